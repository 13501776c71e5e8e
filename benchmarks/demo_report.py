"""The demo's results: the comparison itself, its table, its JSON and its plot."""

import dataclasses
import json
import math
import platform
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws into a file; no display is needed

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from benchmarks.demo_train import RunResult, TrainingConfig

# Both heads compute the same loss; only the order of the floating-point sums differs. In fp32 that was at most 5e-6
# over 8 to 120 steps, while a gradient with one chunk left out or 10 % too small differed by 2e-3 within 6 steps:
# 1e-4 lies between. (A constant factor on *all* gradients would pass: AdamW does not see it.)
# bf16 training is chaotic: on an H200 the plain head against itself, its initial weights changed by one part in a
# million, differed by 2e-4 to 4e-3 at step 20 and by 0.12 to 0.15 within 200. So only the first steps are held to
# a bound there; the rest is shown.
TOLERANCE = {"cpu": 1e-4, "cuda": 2e-3}
COMPARED_STEPS = {"cpu": 1 << 30, "cuda": 10}
UNTIMED_STEPS = 2  # the first steps also fetch memory from the system
SAMPLED_STEPS = 8
MAX_CORES_ELSEWHERE = 0.3  # beyond this, on a machine of few cores, times say more about the others
MIB = 2**20
PLAIN_LABEL, OURS_LABEL = "Linear + cross_entropy", "ChunkedHead"
PLAIN_COLOR, OURS_COLOR, DIFFERENCE_COLOR = "#8a93a6", "#d1495b", "#30638e"


@dataclass(frozen=True)
class Comparison:
    plain: RunResult
    ours: RunResult
    config: TrainingConfig
    text: str
    bpe_size: int
    device: str

    @cached_property
    def differences(self) -> list[float]:
        return [abs(a - b) for a, b in zip(self.plain.losses, self.ours.losses, strict=True)]

    @cached_property
    def validation_difference(self) -> float:
        return abs(self.plain.validation_loss - self.ours.validation_loss)

    @cached_property
    def tolerance(self) -> float:
        return TOLERANCE[torch.device(self.config.device).type]

    @cached_property
    def compared(self) -> list[float]:
        """The differences that are held to the tolerance: of the validation too where all steps are."""
        steps = COMPARED_STEPS[torch.device(self.config.device).type]
        return self.differences[:steps] + ([self.validation_difference] if steps >= self.config.steps else [])

    @cached_property
    def agree(self) -> bool:
        # all(x <= t), not max(...) <= t: a NaN compares false here, and max() could pass over it.
        return all(difference <= self.tolerance for difference in self.compared)

    @property
    def scope(self) -> str:
        steps = COMPARED_STEPS[torch.device(self.config.device).type]
        if steps >= self.config.steps:
            return "in every step and in validation"
        return f"in the first {steps} steps (bf16 training amplifies any rounding afterwards)"

    @property
    def verdict(self) -> str:
        relation = "agree" if self.agree else "do NOT agree"
        return (
            f"The losses {relation} to {self.tolerance:g} {self.scope}: "
            f"largest difference {largest(self.compared):.1e} there, {largest(self.differences):.1e} over all "
            f"{self.config.steps} steps, {self.validation_difference:.1e} in validation."
        )


def largest(values: list[float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def timed(seconds: list[float]) -> float:
    """Median over the steps after the first two (over all of a run that has no more)."""
    return statistics.median(seconds[UNTIMED_STEPS:] or seconds)


def ratio(plain: float, ours: float, less: str, more: str) -> str:
    """How ours compares: '2.84x less', or '1.10x more' if it is worse; never rounded into a gain."""
    if min(plain, ours) <= 0:
        return "-"
    return f"{plain / ours:.2f}x {less}" if ours <= plain else f"{ours / plain:.2f}x {more}"


def print_table(console: Console, comparison: Comparison) -> None:
    plain, ours = comparison.plain, comparison.ours
    table = Table(title="Loss per step, and what it cost")
    table.add_column("")
    for name in (PLAIN_LABEL, OURS_LABEL, "difference"):
        table.add_column(name, justify="right")
    for step in sampled_steps(comparison.config.steps):
        difference = f"{comparison.differences[step]:.1e}"
        table.add_row(f"loss, step {step + 1}", f"{plain.losses[step]:.5f}", f"{ours.losses[step]:.5f}", difference)
    table.add_section()
    table.add_row("largest difference", "", "", f"{largest(comparison.differences):.1e}")
    validation_losses = (f"{run.validation_loss:.5f}" for run in (plain, ours))
    table.add_row("validation loss", *validation_losses, f"{comparison.validation_difference:.1e}")
    table.add_section()
    memory = (plain.peak_bytes, ours.peak_bytes)
    table.add_row("peak memory", *(f"{m / MIB:,.0f} MiB" for m in memory), ratio(*memory, "less", "more"))
    without_state = (plain.peak_bytes - plain.state_bytes, ours.peak_bytes - ours.state_bytes)
    if min(without_state) > 0:
        shown = (f"{m / MIB:,.0f} MiB" for m in without_state)
        table.add_row(f"... minus {plain.state_bytes / MIB:,.0f} MiB", *shown, ratio(*without_state, "less", "more"))
    step_time = (timed(plain.step_seconds), timed(ours.step_seconds))
    table.add_row("time per step", *(f"{s:.3f} s" for s in step_time), ratio(*step_time, "faster", "slower"))
    head_time = (timed(plain.head_seconds), timed(ours.head_seconds))
    table.add_row("... head and backward", *(f"{s:.3f} s" for s in head_time), ratio(*head_time, "faster", "slower"))
    table.add_row("cores busy elsewhere", *(f"{run.cores_elsewhere:.1f}" for run in (plain, ours)), "")
    console.print(table)
    for line in explanations(comparison):
        console.print(line, highlight=False)


def explanations(comparison: Comparison) -> tuple[str, ...]:
    on_gpu = torch.device(comparison.config.device).type == "cuda"
    source = "allocated by PyTorch on the GPU" if on_gpu else "resident in the run's own process, read every 5 ms,"
    return (
        f"BPE: {comparison.bpe_size:,} tokens; the head has {comparison.config.model.vocab:,} rows all the same.",
        f"Peak memory: the most memory {source} during the training steps, minus that before the first step "
        f"(process and weights); the gradients and AdamW's moments, {comparison.plain.state_bytes / MIB:,.0f} MiB "
        "whatever the head, are in it.",
        "Time: median over the steps after the first two." + (busy_warning(comparison) if not on_gpu else ""),
    )


def busy_warning(comparison: Comparison) -> str:
    busiest = max(comparison.plain.cores_elsewhere, comparison.ours.cores_elsewhere)
    if busiest <= MAX_CORES_ELSEWHERE:
        return ""
    return f" WARNING: other processes kept up to {busiest:.1f} cores busy, so the times are not reliable."


def sampled_steps(steps: int) -> list[int]:
    count = min(steps, SAMPLED_STEPS)
    return sorted({round(i * (steps - 1) / max(1, count - 1)) for i in range(count)})


def save_json(comparison: Comparison, folder: Path) -> Path:
    path = folder / "demo.json"
    content = {
        "config": dataclasses.asdict(comparison.config),
        "text": comparison.text,
        "bpe_size": comparison.bpe_size,
        "device": comparison.device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "plain": run_numbers(comparison.plain),
        "ours": run_numbers(comparison.ours),
        "differences": comparison.differences,
        "largest_difference": largest(comparison.differences),
        "validation_difference": comparison.validation_difference,
        "tolerance": comparison.tolerance,
        "agree": comparison.agree,
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def run_numbers(run: RunResult) -> dict[str, object]:
    medians = {"median_step_seconds": timed(run.step_seconds), "median_head_seconds": timed(run.head_seconds)}
    return {**dataclasses.asdict(run), **medians}


def save_plot(comparison: Comparison, folder: Path) -> Path:
    path = folder / "demo.png"
    figure = plt.figure(figsize=(11, 6), layout="constrained")
    grid = figure.add_gridspec(2, 3, width_ratios=(3.2, 1, 1), height_ratios=(2.2, 1))
    losses = figure.add_subplot(grid[0, 0])
    plot_losses(losses, comparison)
    plot_differences(figure.add_subplot(grid[1, 0], sharex=losses), comparison)
    losses.tick_params(labelbottom=False)
    memory = [run.peak_bytes / MIB for run in (comparison.plain, comparison.ours)]
    state = comparison.plain.state_bytes / MIB
    plot_bars(figure.add_subplot(grid[:, 1]), "peak memory [MiB]", memory, "{:,.0f}", state)
    seconds = [timed(run.step_seconds) for run in (comparison.plain, comparison.ours)]
    plot_bars(figure.add_subplot(grid[:, 2]), "time per step [s]", seconds, "{:.3g}")
    model = comparison.config.model
    figure.suptitle(
        f"The same training run with two heads of {model.vocab:,} x {model.hidden}, "
        f"{comparison.config.batch * model.context:,} tokens per step\n{comparison.device}",
        fontsize=12,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def plot_losses(axes: Axes, comparison: Comparison) -> None:
    steps = range(1, comparison.config.steps + 1)
    axes.plot(steps, comparison.plain.losses, color=PLAIN_COLOR, linewidth=5, alpha=0.7, label=PLAIN_LABEL)
    axes.plot(steps, comparison.ours.losses, color=OURS_COLOR, linewidth=1.8, linestyle="--", label=OURS_LABEL)
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    finish(axes)


def plot_differences(axes: Axes, comparison: Comparison) -> None:
    # A difference of exactly 0 has no place on a log axis: it is drawn hollow at the bottom, below half an fp32
    # rounding of a loss of 1, and the label says so.
    floor = 2.0**-25
    points = list(enumerate(comparison.differences, start=1))
    apart = [(step, difference) for step, difference in points if difference > 0]
    equal = [(step, floor) for step, difference in points if difference == 0]
    style: dict[str, Any] = {"color": DIFFERENCE_COLOR, "linestyle": "none", "marker": "o", "markersize": 4}
    axes.plot(*zip(*apart, strict=True) if apart else ((), ()), **style)
    axes.plot(*zip(*equal, strict=True) if equal else ((), ()), **style, fillstyle="none")
    axes.axhline(comparison.tolerance, color=OURS_COLOR, linewidth=1, linestyle=":")
    axes.annotate(
        f"tolerance {comparison.tolerance:g}",
        (0.01, comparison.tolerance),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color=OURS_COLOR,
    )
    axes.set_yscale("log")
    axes.set_ylim(floor / 2, 4 * max(comparison.tolerance, *filter(math.isfinite, comparison.differences)))
    axes.set_ylabel("|difference|")
    axes.set_xlabel("step" + (" (hollow points: no difference at all)" if equal else ""))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish(axes)


def plot_bars(axes: Axes, title: str, values: list[float], form: str, state: float = 0.0) -> None:
    """One bar per head; the lower part up to `state`, which any head needs, is hatched."""
    bars = axes.bar([0, 1], values, color=[PLAIN_COLOR, OURS_COLOR], width=0.65)
    axes.bar_label(bars, labels=[form.format(value) for value in values], padding=3)
    if 0 < state < min(values):
        axes.bar([0, 1], [state, state], width=0.65, facecolor="none", edgecolor="white", hatch="///", linewidth=0)
        axes.set_xlabel(f"hatched: gradients + AdamW,\n{form.format(state)} MiB with any head", fontsize=8)
    axes.set_xticks([0, 1], ["Linear +\ncross_entropy", "Chunked-\nHead"], fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.set_ylim(0, max(values) * 1.12 or 1.0)
    finish(axes)


def finish(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
