"""Time and peak memory of the head's providers beside three bare matrix products: `python -m benchmarks.head`."""

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import measure, providers
from benchmarks.shapes import (
    CPU_SHAPE,
    DATA,
    TARGETS,
    Operands,
    Shape,
    dtype_name,
    make_operands,
    parse_count,
    parse_shape,
    parse_upstream,
)

FLOOR = "floor"
WARM_UP = 2
_GPU_SHAPES = (Shape(8192, 4096, 128256), Shape(8192, 2048, 128256), Shape(8192, 2304, 256000))


def make_console(stderr: bool = False) -> Console:
    """A console that does not fold wide tables when its output goes into a file."""
    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=170)


class Watch(contextlib.AbstractContextManager["Watch"]):
    """Progress on the error stream: a bar on a terminal, else a line a stage, to show how far a cut run got."""

    def __init__(self, total: int) -> None:
        self.console = make_console(stderr=True)
        self.progress = Progress(console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("", total=total)

    def __enter__(self) -> "Watch":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def stage(self, text: str) -> None:
        """Name what is under way."""
        self.progress.update(self.task, description=text)
        if not self.console.is_terminal:
            self.console.print(text, markup=False, highlight=False)

    def tick(self) -> None:
        """Count one unit of the total as done."""
        self.progress.advance(self.task)


@dataclass(frozen=True)
class Setting:
    """What holds for a whole run."""

    device: torch.device
    dtype: torch.dtype
    data: str
    targets: str
    rounds: int
    upstreams: tuple[float, ...]
    memory: bool


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head", description=__doc__)
    check = providers.argument
    parser.add_argument(
        "--shape", action="append", type=check(parse_shape), help="repeatable: 8192x4096x128256, llama3-8b@4096, cpu"
    )
    parser.add_argument("--rounds", type=check(parse_count), default=20, help="timed rounds (20)")
    parser.add_argument(
        "--upstream", nargs="+", type=check(parse_upstream), default=[1.0], help="gradients from above, such as 1 0.37"
    )
    parser.add_argument("--targets", choices=TARGETS, default="random")
    parser.add_argument("--data", choices=DATA, default="random")
    parser.add_argument("--no-memory", action="store_true", help="measure the time alone")
    providers.common_arguments(parser)
    return parser


def run_shape(
    shape: Shape, setting: Setting, ready: Sequence[providers.Provider], watch: Watch
) -> list[dict[str, Any]]:
    """Measure every provider at one shape; one row for the floor and one for each provider and upstream."""
    operands = make_operands(shape, setting.dtype, setting.device, data=setting.data, targets=setting.targets)
    measure.release(operands)
    rows: dict[str, dict[str, Any]] = {FLOOR: {**_describe(shape, setting), "provider": FLOOR, "status": "ok"}}
    steps: dict[str, Callable[[], Any]] = {}
    for provider in ready:
        for value in setting.upstreams:
            row = {**_describe(shape, setting), "provider": provider.label, "upstream": value, "status": "ok"}
            row["plan"] = providers.predict(provider, shape, setting.dtype, setting.device)
            key = f"{provider.label} upstream {value:g}"
            watch.stage(f"{shape}: warm-up of {key}")
            step = measure.Step(provider.call, operands, value)
            loss, failure = measure.attempt(functools.partial(_warm_up, step), operands)
            rows[key] = row | (failure.record() if failure else {"loss": loss})
            if failure is None:
                steps[key] = step
    _time(shape, setting, operands, steps, rows, watch)
    if setting.memory:
        _remember(shape, setting, steps, rows, watch)
    return list(rows.values())


def _describe(shape: Shape, setting: Setting) -> dict[str, Any]:
    return {
        "shape": str(shape),
        "tokens": shape.tokens,
        "hidden": shape.hidden,
        "vocab": shape.vocab,
        "dtype": dtype_name(setting.dtype),
        "data": setting.data,
        "targets": setting.targets,
    }


def _warm_up(step: measure.Step) -> float:
    for _ in range(WARM_UP):
        step.operands.clear()
        loss = float(step())
    step.operands.clear()
    return loss


def _time(
    shape: Shape,
    setting: Setting,
    operands: Operands,
    steps: dict[str, Callable[[], Any]],
    rows: dict[str, dict[str, Any]],
    watch: Watch,
) -> None:
    """Time the steps and the floor in turns; the floor's buffers go when this returns."""
    watch.stage(f"{shape}: {setting.rounds} rounds")
    floor, failure = measure.attempt(lambda: _ready_floor(operands, setting.device), operands)
    timed = steps if failure else {FLOOR: floor, **steps}
    times, failures = measure.time_rounds(timed, operands, setting.device, setting.rounds, watch.tick)
    if failure:
        failures[FLOOR] = failure
    for key, values in times.items():
        rows[key] |= {
            "ms": measure.quantile(values, 0.5),
            "ms_p20": measure.quantile(values, 0.2),
            "ms_p80": measure.quantile(values, 0.8),
            "ms_rounds": [round(value, 4) for value in values],
        }
        if FLOOR in times:
            rows[key]["ratio"] = rows[key]["ms"] / measure.quantile(times[FLOOR], 0.5)
        rows[key]["tflops"] = shape.flops / rows[key]["ms"] / 1e9
    for key, failed in failures.items():
        rows[key] |= failed.record()
        steps.pop(key, None)


def _ready_floor(operands: Operands, device: torch.device) -> measure.Floor:
    measure.release(operands)  # the floor sizes its buffers by the free memory
    floor = measure.Floor(operands, device)
    floor()
    return floor


def _remember(
    shape: Shape, setting: Setting, steps: dict[str, Callable[[], Any]], rows: dict[str, dict[str, Any]], watch: Watch
) -> None:
    """Add each step's peak memory to its row, in a round of its own that is not timed."""
    for key, step in steps.items():
        row = rows[key]
        watch.stage(f"{shape}: memory of {key}")
        if setting.device.type == "cuda":
            assert isinstance(step, measure.Step)
            peak, failure = measure.attempt(functools.partial(measure.gpu_peak, step), step.operands)
        else:
            request = measure.MemoryRequest(
                row["provider"], shape, row["dtype"], row["upstream"], setting.data, setting.targets
            )
            peak, failure = measure.cpu_peak(request)
        if failure:
            row["memory_error"] = failure.record()
            continue
        row |= {**peak, "beside_gradients_bytes": peak["peak_bytes"] - shape.gradient_bytes(setting.dtype)}


def mebibytes(count: float | None) -> str:
    """Bytes as MiB for a table."""
    return "-" if count is None else f"{count / 2**20:,.1f}"


def brief(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its fractions cut to five digits, for a line that people read too."""
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}


def number(value: float | None, form: str = ".3f") -> str:
    """A number for a table, `-` where there is none."""
    return "-" if value is None else format(value, form)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    first = rows[0]
    table = Table(title=f"{first['shape']} {first['dtype']}, data {first['data']}, targets {first['targets']}")
    table.add_column("provider", no_wrap=True)
    for name in ("upstream", "ms", "x floor", "p20-p80", "peak MiB", "beside grads", "plan's peak", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row["status"] != "ok":
            table.add_row(row["provider"], number(row.get("upstream"), "g"), row["status"])
            continue
        table.add_row(
            row["provider"],
            number(row.get("upstream"), "g"),
            number(row.get("ms")),
            number(row.get("ratio")),
            f"{number(row.get('ms_p20'))}-{number(row.get('ms_p80'))}",
            row.get("memory_error", {}).get("status") or mebibytes(row.get("peak_bytes")),
            mebibytes(row.get("beside_gradients_bytes")),
            mebibytes((row.get("plan") or {}).get("peak_bytes")),
            number(row.get("loss"), ".5f"),
        )
    return table


def report_skipped(console: Console, skipped: dict[str, str]) -> None:
    """Say which providers are left out, and why."""
    for label, reason in skipped.items():
        console.print(f"skipped {label}: {reason}", markup=False, highlight=False, soft_wrap=True)


def report_failures(console: Console, rows: Sequence[dict[str, Any]]) -> int:
    """Print the errors of the rows that failed; return the exit status, 1 if one of them is ours."""
    failures = [(row["provider"], failure) for row in rows for failure in (row, row.get("memory_error", {}))]
    failures = [(label, failure) for label, failure in failures if failure.get("status") == "failed"]
    for text in dict.fromkeys(f"{label} failed: {one['error']} ({', '.join(one['where'])})" for label, one in failures):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return int(any(label.startswith("ours") for label, _ in failures))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    args = parser.parse_args(argv)
    device = providers.read_device(parser, args.device)
    gpu = device.type == "cuda"
    dtype = args.dtype or (torch.bfloat16 if gpu else torch.float32)
    upstreams = tuple(dict.fromkeys(args.upstream))
    setting = Setting(device, dtype, args.data, args.targets, args.rounds, upstreams, not args.no_memory)
    shapes = list(dict.fromkeys(args.shape or (_GPU_SHAPES if gpu else (Shape(*CPU_SHAPE),))))
    path: Path = providers.results_path(args.output, "head", device)
    console, rows = make_console(), list[dict[str, Any]]()
    _, skipped = providers.resolve(args.provider or providers.NAMES, device)
    report_skipped(console, skipped)
    with Watch(len(shapes) * args.rounds) as watch:
        for shape in shapes:
            # Anew for each shape: compiled code is for one shape, see providers.
            ready, _ = providers.resolve(args.provider or providers.NAMES, device)
            if not ready:
                break
            found, failure = measure.attempt(functools.partial(run_shape, shape, setting, ready, watch))
            measure.release()
            if failure:
                found = [{**_describe(shape, setting), "provider": "operands", **failure.record()}]
            rows += found
            console.print(_table(found))
            # After each shape, so that a run that is cut short leaves what it has.
            providers.write_results(path, "head", argv, device, skipped=skipped, rows=rows)
    if not rows:
        console.print("no provider can run here")
        return 1
    status = report_failures(console, rows)
    keys = ("shape", "provider", "upstream", "status", "ms", "ratio", "peak_bytes", "beside_gradients_bytes")
    short = [brief({key: row[key] for key in keys if key in row}) for row in rows]
    print(json.dumps({"benchmark": "head", "device": device.type, "rows": short, "skipped": skipped}))
    return status


if __name__ == "__main__":
    sys.exit(main())
