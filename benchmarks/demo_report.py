"""The demo's results: the comparison itself, its table, its JSON and its plot."""

import dataclasses
import json
import math
import platform
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.demo_train import RunResult, TrainingConfig
from benchmarks.svg import plot

# Both heads compute the same loss; only the order of the floating-point sums differs. In fp32 that was at most 5e-6
# over 8 to 120 steps, while a gradient with one chunk left out or 10 % too small differed by 2e-3 within 6 steps:
# 1e-4 lies between. (A constant factor on *all* gradients would pass: AdamW does not see it.)
# bf16 training is chaotic: on an H200 the plain head against itself, its initial weights changed by one part in a
# million, differed by 2e-4 to 4e-3 at step 20 and by 0.12 to 0.15 within 200. So only the first steps are compared with
# a bound there; the rest is shown.
TOLERANCE = {"cpu": 1e-4, "cuda": 2e-3}
COMPARED_STEPS = {"cpu": 1 << 30, "cuda": 10}
UNTIMED_STEPS = 2  # the first steps also fetch memory from the system
SAMPLED_STEPS = 8
MIB = 2**20
PLAIN_LABEL, OURS_LABEL = "Linear + cross_entropy", "ChunkedHead"


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
        """The differences that are compared with the tolerance: of the validation too where all steps are."""
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
    """Median over the steps after the first two, or over all steps of a run of one or two."""
    return statistics.median(seconds[UNTIMED_STEPS:] or seconds)


def ratio(plain: float, ours: float, less: str, more: str) -> str:
    """A comparison in words: '2.84x less', or '1.10x more' if ours is worse; never rounded into a gain."""
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
    step_time = (timed(plain.step_seconds), timed(ours.step_seconds))
    table.add_row("time per step", *(f"{s:.3f} s" for s in step_time), ratio(*step_time, "faster", "slower"))
    head_time = (timed(plain.head_seconds), timed(ours.head_seconds))
    table.add_row("... head and backward", *(f"{s:.3f} s" for s in head_time), ratio(*head_time, "faster", "slower"))
    console.print(table)
    for line in explanations(comparison):
        console.print(line, highlight=False)


def explanations(comparison: Comparison) -> tuple[str, ...]:
    on_gpu = torch.device(comparison.config.device).type == "cuda"
    source = "allocated by PyTorch on the GPU" if on_gpu else "resident in the run's own process, read every 2 ms,"
    return (
        f"Peak memory: the most memory {source} during the training steps, minus that before the first step "
        f"(process and weights); the gradients and AdamW's moments, {comparison.plain.state_bytes / MIB:,.0f} MiB "
        "whatever the head, are in it.",
        "Time: median over the steps after the first two.",
    )


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
    path, model = folder / "demo.svg", comparison.config.model
    runs = {PLAIN_LABEL: comparison.plain, OURS_LABEL: comparison.ours}
    figures = [
        f"{label}: {run.peak_bytes / MIB:,.0f} MiB, {timed(run.step_seconds):.3g} s a step"
        for label, run in runs.items()
    ]
    plain, ours = (list(enumerate(run.losses, 1)) for run in runs.values())
    ours = ours[:: max(1, len(ours) // 18)]  # few enough for dots, so that both runs are seen
    title = f"One training run, two heads of {model.vocab:,} x {model.hidden}"
    curves = dict(zip(figures, (plain, ours), strict=True))
    path.write_text(plot(title, "step", "training loss", curves), encoding="utf-8")
    return path
