"""Peak memory against the number of tokens, beside the plan's prediction: `python -m benchmarks.memory`.

All figures are peaks beside the inputs (hidden states, weight and targets), the gradients included.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws into a file; no display is needed

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from rich.table import Table

from benchmarks import measure, providers
from benchmarks.head import Watch, make_console, mebibytes, number, report_failures, report_skipped
from benchmarks.shapes import Shape, dtype_name, make_operands, parse_bytes, parse_count, parse_head

_GPU_MODELS, _CPU_MODELS = ("llama3-8b", "qwen3-8b", "gpt-oss", "gemma2-2b"), ("llama3-8b", "gemma2-2b")
_GPU_TOKENS = tuple(1024 * 2**power for power in range(7))
_CPU_TOKENS = tuple(256 * 2**power for power in range(5))
_CPU_HIDDEN = 256
# Not torch.compile: it compiles for a minute or more in all, and peaks where eager does or a little lower.
_GPU_PROVIDERS = ("eager", "torch", *providers.PACKAGES, "ours")
_CPU_PROVIDERS = ("eager", "torch", "ours")
_WARM_UP = 2
_COLORS = ("#d1495b", "#30638e", "#8a93a6", "#edae49", "#00798c", "#7b4b94")
_MARKERS = ("o", "s", "^", "D", "v", "P")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
    check = providers.argument
    parser.add_argument(
        "--model", action="append", type=check(parse_head), help="repeatable: llama3-8b, another name, or HIDDENxVOCAB"
    )
    parser.add_argument("--tokens", nargs="+", type=check(parse_count), help="the numbers of tokens to try")
    parser.add_argument("--hidden", type=check(parse_count), help="a hidden size to use in place of the models' own")
    parser.add_argument("--limit", type=check(parse_bytes), help="the memory that the step may take, such as 24GiB")
    providers.common_arguments(parser)
    return parser


def defaults(args: argparse.Namespace, device: torch.device) -> argparse.Namespace:
    """Fill in what was not given: the real models on a GPU, a small hidden size and few tokens on a CPU."""
    gpu = device.type == "cuda"
    args.dtype = args.dtype or (torch.bfloat16 if gpu else torch.float32)
    args.limit = args.limit or parse_bytes("80GiB" if gpu else "4GiB")
    args.tokens = sorted(set(args.tokens or (_GPU_TOKENS if gpu else _CPU_TOKENS)))
    args.provider = args.provider or (_GPU_PROVIDERS if gpu else _CPU_PROVIDERS)
    hidden = args.hidden
    if not (gpu or hidden or args.model):
        hidden = _CPU_HIDDEN
    models = args.model or [parse_head(name) for name in (_GPU_MODELS if gpu else _CPU_MODELS)]
    args.model = list(dict.fromkeys((name, hidden or own, vocab) for name, own, vocab in models))
    return args


def run_model(
    model: tuple[str, int, int], args: argparse.Namespace, device: torch.device, watch: Watch
) -> list[dict[str, Any]]:
    """Rows for one model: every provider at every number of tokens, until it runs out of memory."""
    name, hidden, vocab = model
    rows: list[dict[str, Any]] = []
    exhausted: set[str] = set()
    for tokens in args.tokens:
        shape = Shape(tokens, hidden, vocab)
        # Anew for each shape: compiled code is for one shape, see providers.
        ready, _ = providers.resolve(args.provider, device)
        for provider in ready:
            watch.tick()
            if provider.label in exhausted:
                continue
            watch.stage(f"{name} {shape}: {provider.label}")
            row = {"model": name, "shape": str(shape), "tokens": tokens, "hidden": hidden, "vocab": vocab}
            row |= {"dtype": dtype_name(args.dtype), "provider": provider.label, "status": "ok"}
            row["plan"] = providers.predict(provider, shape, args.dtype, device)
            peak, failure = peak_of(provider, shape, args.dtype, device)
            row |= failure.record() if failure else peak
            if row["status"] == measure.OUT_OF_MEMORY:
                exhausted.add(provider.label)
            row["over_limit"] = row["status"] == measure.OUT_OF_MEMORY or row.get("peak_bytes", 0) > args.limit
            row |= compare(row)
            rows.append(row)
    return rows


def peak_of(
    provider: providers.Provider, shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[Any, measure.Failure | None]:
    """Peak bytes of one step after a warm-up, or why there are none."""
    if device.type == "cpu":
        return measure.cpu_peak(measure.MemoryRequest(provider.label, shape, dtype_name(dtype)))

    def run() -> dict[str, int]:
        step = measure.Step(provider.call, make_operands(shape, dtype, device))
        for _ in range(_WARM_UP):
            step.operands.clear()
            step()
        return measure.gpu_peak(step)

    return measure.attempt(run)


def compare(row: dict[str, Any]) -> dict[str, float]:
    """The measured peak minus the predicted one, where there are both."""
    predicted = (row["plan"] or {}).get("peak_bytes")
    if not predicted or "peak_bytes" not in row:
        return {}
    difference = row["peak_bytes"] - predicted
    return {"difference_bytes": difference, "difference_percent": 100.0 * difference / predicted}


def table(rows: Sequence[dict[str, Any]], limit: int) -> Table:
    """Measured and predicted peaks; `*` marks what is over the limit."""
    made = Table(title=f"peak MiB beside the inputs, gradients included (* over {mebibytes(limit)} MiB)")
    for column in ("model", "vocab x hidden", "tokens", "provider"):
        made.add_column(column, no_wrap=True, justify="right" if column == "tokens" else "left")
    for column in ("peak MiB", "plan's peak", "difference MiB", "%"):
        made.add_column(column, no_wrap=True, justify="right")
    for row in rows:
        peak = mebibytes(row["peak_bytes"]) if row["status"] == "ok" else row["status"]
        made.add_row(
            row["model"],
            f"{row['vocab']}x{row['hidden']}",
            str(row["tokens"]),
            row["provider"],
            peak + (" *" if row["over_limit"] else ""),
            mebibytes((row["plan"] or {}).get("peak_bytes")),
            mebibytes(row.get("difference_bytes")),
            number(row.get("difference_percent"), "+.2f"),
        )
    return made


def first_over(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int | None]]:
    """For each model and provider the fewest tokens that are over the limit, None where all sizes fit."""
    found: dict[str, dict[str, int | None]] = {}
    for row in rows:
        model = found.setdefault(row["model"], {})
        model.setdefault(row["provider"], None)
        if row["over_limit"] and model[row["provider"]] is None:
            model[row["provider"]] = row["tokens"]
    return found


def largest_difference(rows: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """The plan's largest relative and largest absolute difference from a measurement."""
    compared = [row for row in rows if "difference_bytes" in row]
    if not compared:
        return None
    return {
        "percent": max((row["difference_percent"] for row in compared), key=abs),
        "bytes": max((row["difference_bytes"] for row in compared), key=abs),
    }


def draw(rows: Sequence[dict[str, Any]], limit: int, path: Path) -> None:
    """One panel a model: measurements as markers, the plan's predictions as lines."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    # Ours first, so that it has the same colour in every picture.
    labels = sorted(dict.fromkeys(row["provider"] for row in rows), key=lambda label: not label.startswith("ours"))
    across = min(2, len(models))
    down = -(-len(models) // across)
    figure, grid = plt.subplots(down, across, figsize=(5.2 * across, 4.0 * down), squeeze=False, sharey=True)
    for axes, model in zip(grid.flat, models, strict=False):
        _panel(axes, [row for row in rows if row["model"] == model], labels, limit)
    for axes in list(grid.flat)[len(models) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        shown, names = axes.get_legend_handles_labels()
        handles |= {name: handle for handle, name in zip(shown, names, strict=True) if name not in handles}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=3, fontsize=8, frameon=False)
    figure.suptitle("Peak memory of loss and gradients beside the inputs")
    figure.tight_layout(rect=(0, 0.05 + 0.02 * len(handles) / 3, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axes: Axes, rows: Sequence[dict[str, Any]], labels: Sequence[str], limit: int) -> None:
    for index, label in enumerate(labels):
        color, marker = _COLORS[index % len(_COLORS)], _MARKERS[index % len(_MARKERS)]
        own = [row for row in rows if row["provider"] == label]
        planned = [(row["tokens"], row["plan"]["peak_bytes"]) for row in own if (row["plan"] or {}).get("peak_bytes")]
        if planned:
            tokens, peaks = zip(*planned, strict=True)
            axes.plot(tokens, [peak / 2**30 for peak in peaks], color=color, lw=1.2, label=f"{label}, plan")
        done = [(row["tokens"], row["peak_bytes"] / 2**30) for row in own if row.get("peak_bytes")]
        if done:
            axes.plot(*zip(*done, strict=True), marker, color=color, ms=5, alpha=0.85, label=label)
        lost = [row["tokens"] for row in own if row["status"] == measure.OUT_OF_MEMORY]
        # At the panel's top edge: how much it would have taken is not known.
        top = axes.get_xaxis_transform()
        axes.plot(lost, [0.97] * len(lost), "x", color=color, ms=7, transform=top, label="_no legend")
    axes.axhline(limit / 2**30, color="#444444", ls="--", lw=0.9, label=f"limit {limit / 2**30:.4g} GiB")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}K" if value >= 1024 else f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axes.set_title(f"{rows[0]['model']} (vocabulary {rows[0]['vocab']:,}, hidden {rows[0]['hidden']})", fontsize=9)
    axes.set_xlabel("tokens (x: out of memory)", fontsize=8)
    axes.set_ylabel("GiB", fontsize=8)
    axes.grid(True, which="major", alpha=0.25)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    args = parser.parse_args(argv)
    device = providers.read_device(parser, args.device)
    args = defaults(args, device)
    path = providers.results_path(args.output, "memory", device)
    picture = path.with_suffix(".png")
    console, rows = make_console(), list[dict[str, Any]]()
    ready, skipped = providers.resolve(args.provider, device)
    report_skipped(console, skipped)
    if not ready:
        console.print("no provider can run here")
        return 1
    with Watch(len(args.model) * len(args.tokens) * len(ready)) as watch:
        for model in args.model:
            rows += run_model(model, args, device, watch)
            # After each model, so that a run that is cut short leaves what it has.
            providers.write_results(path, "memory", argv, device, skipped=skipped, limit=args.limit, rows=rows)
    over, difference = first_over(rows), largest_difference(rows)
    summary: dict[str, Any] = {"limit": args.limit, "first_over_limit": over, "largest_difference": difference}
    providers.write_results(path, "memory", argv, device, skipped=skipped, **summary, rows=rows)
    console.print(table(rows, args.limit))
    for name, found in over.items():
        text = ", ".join(f"{label} {tokens or 'none'}" for label, tokens in found.items())
        print(f"first tokens over {args.limit / 2**30:.4g} GiB, {name}: {text}")
    if difference:
        print(f"largest difference: {difference['percent']:.2f} % or {difference['bytes'] / 2**20:.1f} MiB")
    _, failure = measure.attempt(lambda: draw(rows, args.limit, picture))
    if failure:
        print(f"the plot was not drawn: {failure.error} ({', '.join(failure.where)})")
    status = report_failures(console, rows)
    print(json.dumps({"benchmark": "memory", "device": device.type, **summary, "skipped": skipped}))
    return status


if __name__ == "__main__":
    sys.exit(main())
