"""The curves of `trained_head --curve` side by side.

python -m benchmarks.trained_figure benchmarks/results/trained_head-cuda.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

WINDOW = 25  # steps that are averaged


def smoothed(losses: list[float]) -> np.ndarray:
    return np.convolve(losses, np.ones(WINDOW) / WINDOW, mode="valid")


def draw(curves: list[dict[str, Any]], path: Path) -> None:
    """The losses above; below their difference from the first curve, and the share of tiles that were kept."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (losses, difference, tiles) = plt.subplots(
        3, 1, figsize=(8, 8), sharex=True, height_ratios=(3, 1.5, 1.5), constrained_layout=True
    )
    usual = smoothed(curves[0]["losses"])
    at = np.arange(len(usual)) + WINDOW // 2
    for curve in curves:
        name = curve.get("label") or f"skip_tolerance {curve['tolerance']}"
        ours = smoothed(curve["losses"])
        (line,) = losses.plot(at, ours, label=f"{name}: held-out loss {curve['held_out']:.4f}", linewidth=1.0)
        if curve is not curves[0]:  # another run without skipping tells what the differences mean
            difference.plot(at, ours - usual[: len(ours)], linewidth=1.0, color=line.get_color())
        if curve["tiles"]:
            tiles.plot(
                [step for step, *_ in curve["tiles"]],
                [kept for _, kept, _ in curve["tiles"]],
                linewidth=1.0,
                color=line.get_color(),
            )
    losses.set_ylabel(f"loss, mean of {WINDOW} steps")
    losses.legend()
    difference.set_ylabel("difference")
    difference.axhline(0.0, color="grey", linewidth=0.5)
    difference.set_ylim(-0.07, 0.07)
    tiles.set_ylabel("tiles kept")
    tiles.set_ylim(0.0, 1.0)
    tiles.set_xlabel("step")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    draw(json.loads(arguments.results.read_text())["curves"], arguments.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
