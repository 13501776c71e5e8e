"""Parts of every benchmark's command: arguments, the loop over its jobs, tables, and the record of a run."""

import argparse
import contextlib
import datetime
import functools
import importlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import gauge, measure, providers, rounds, shapes

if TYPE_CHECKING:  # frameworks' environments lack it, and their commands need none
    from rich.console import Console
    from rich.table import Table

_ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2
Row = dict[str, Any]


class Watch(contextlib.AbstractContextManager["Watch"]):
    """Progress on the error stream: a bar on a terminal, else a line a stage, to show how far a cut run got."""

    def __init__(self, total: int) -> None:
        from rich.progress import Progress

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


Job = tuple[Row, Callable[[Watch], list[Row]]]  # the record of its failure, and its rows


def make_console(stderr: bool = False) -> "Console":
    """A console that does not fold wide tables when its output goes into a file."""
    from rich.console import Console

    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=170)


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Turn a parser's ValueError into argparse's message, which names the option as well."""

    @functools.wraps(parse)
    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


count, size_in_bytes = argument(shapes.parse_count), argument(shapes.parse_bytes)


def _json_path(text: str) -> Path:
    if Path(text).suffix != ".json" or Path(text).is_dir():
        raise ValueError(f"{text!r} is no path of a .json file")
    return Path(text)


def arguments(
    name: str, doc: str | None, *, shape: bool = False, rounds: int = 0, upstream: Sequence[float] = (),
    peers: bool = False, dtype: bool = True,
) -> argparse.ArgumentParser:  # fmt: skip
    """Make a parser of ``--device``, ``--output`` and those shared options that the arguments switch on."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").splitlines()[0])
    add = parser.add_argument
    if shape:
        words = "repeatable: 8192x4096x128256, llama3-8b, llama3-8b@4096, cpu"
        add("--shape", action="append", type=argument(shapes.parse_shape), help=words)
    if rounds:
        add("--rounds", type=count, default=rounds, help=f"timed rounds ({rounds})")
    if upstream:
        words = f"gradients from above ({' '.join(f'{value:g}' for value in upstream)})"
        add("--upstream", nargs="+", type=argument(shapes.parse_upstream), default=list(upstream), help=words)
    if peers:
        words = f"repeatable; one of {', '.join((*providers.NAMES, *providers.LATE))}; ours takes options"
        add("--provider", action="append", type=argument(providers.checked_spec), metavar="NAME[:KEY=VALUE,...]",
            help=words)  # fmt: skip
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    if dtype:
        add("--dtype", type=argument(shapes.parse_dtype), help="the operands' type: bf16, fp16, fp32")
    add("--output", type=argument(_json_path), metavar="PATH", help="the JSON file of the results")
    return parser


def read(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; add the device, and a dtype where none is named (bf16 on a GPU, else fp32)."""
    args = parser.parse_args(argv)
    args.device, args.argv = device_of(parser, args.device), list(argv)
    args.gpu = args.device.type == "cuda"
    args.dtype = getattr(args, "dtype", None) or (torch.bfloat16 if args.gpu else torch.float32)
    if "upstream" in args:
        args.upstream = list(dict.fromkeys(args.upstream))
    return args


def device_of(parser: argparse.ArgumentParser, text: str) -> torch.device:
    """Return the named device; end with argparse's error where it cannot be used here."""
    try:
        device = torch.device(text)
    except RuntimeError:
        parser.error(f"argument --device: {text!r} is no device")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"argument --device: {text!r} is neither cpu nor cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error("argument --device: no CUDA device is available here")
        if (device.index or 0) >= torch.cuda.device_count():
            parser.error(f"argument --device: {text!r} is not there, {torch.cuda.device_count()} device(s) are")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def sizes(args: argparse.Namespace, of_gpu: Sequence[shapes.Shape], *of_cpu: shapes.Shape) -> list[shapes.Shape]:
    """Return the shapes that ``--shape`` names, or the device's defaults."""
    return list(dict.fromkeys(args.shape or (of_gpu if args.gpu else of_cpu or (shapes.Shape(*shapes.CPU_SHAPE),))))


def describe(shape: shapes.Shape, args: argparse.Namespace) -> Row:
    """Return a row's shape and dtype, and the command's choice of data and targets where it has such options."""
    known = {"shape": str(shape), "tokens": shape.tokens, "hidden": shape.hidden, "vocab": shape.vocab}
    given = {name: getattr(args, name) for name in ("data", "targets") if isinstance(getattr(args, name, None), str)}
    return {**known, "dtype": shapes.dtype_name(args.dtype), **given}


def over(
    sizes: Sequence[shapes.Shape], args: argparse.Namespace, run_shape: Callable[..., list[Row]], **record: Any
) -> list[Job]:
    """Return a job for each shape; the row of a shape that fails has ``record``."""
    return [(describe(size, args) | record, functools.partial(run_shape, size, args)) for size in sizes]


def key_of(name: str, upstream: float) -> str:
    return f"{name} upstream {upstream:g}"


def warm_up(make: Callable[[], measure.Step]) -> tuple[measure.Step, Row]:
    """Make a step and run it; return it with its loss (of log-probabilities the mean) and its gradients' bytes."""
    step = make()
    for _ in range(WARM_UP):
        step.operands.clear()
        loss = float(step().mean())
    hidden, weight = step.operands.hidden.grad, step.operands.weight.grad
    # nan is what a call makes of a broken promise, such as another upstream gradient
    if step.backward and not (hidden is not None and bool(hidden.isfinite().all())):
        raise ArithmeticError("the gradient of the hidden states is not finite, or not there")
    step.operands.clear()
    return step, {"loss": loss, "gradient_bytes": sum(grad.nbytes for grad in (hidden, weight) if grad is not None)}


def measured(
    shape: shapes.Shape,
    args: argparse.Namespace,
    operands: shapes.Operands,
    asked: Mapping[str, tuple[Row, Callable[[], measure.Step]]],
    floors: Mapping[str, Row],
    make_floors: Callable[[], Mapping[str, Callable[[], Any]]],
    watch: Watch,
    known: Callable[[measure.Step], Row] = lambda step: {},
) -> list[Row]:
    """Measure one shape: all steps take turns, then the peak memory of each is read. Rows of the floors come first.

    Args:
        asked: by key the first fields of a row, and a function that makes its step. The row's time is divided by that
            of the row ``below``: a floor, or a row with the same upstream gradient.
        floors: by name the first fields of each floor's row; ``make_floors`` makes their steps.
        known: a function from a step that has run to more fields of its row.
    """
    described, rows, steps = describe(shape, args), dict[str, Row](), dict[str, measure.Step]()
    for key, (record, make) in asked.items():
        watch.stage(f"{shape}: warm-up of {key}")
        made, failure = measure.attempt(functools.partial(warm_up, make), operands)
        rows[key] = {**described, **record, "status": "ok"} | (failure.record() if failure else made[1])
        if failure is None:
            steps[key] = made[0]
            rows[key] |= known(made[0])
    watch.stage(f"{shape}: settling")
    bare, failure = measure.attempt(make_floors, operands)
    rows = {
        name: {**described, **record} | (failure.record() if failure else {}) for name, record in floors.items()
    } | rows
    timed: dict[str, Callable[[], Any]] = {**(bare or {}), **steps}

    def say(text: str) -> None:
        watch.stage(f"{shape}: {text}")

    for key, found in rounds.records(timed, operands, args.device, args.rounds, watch.tick, say).items():
        rows[key] |= found
    del bare, timed  # the floors' buffers
    for row in rows.values():
        if row["status"] == "ok" and "below" in row:
            row["ratios"] = {name: row["ms"] / rows[name]["ms"] for name in floors if "ms" in rows[name]}
            below = rows.get(row["below"]) or rows.get(key_of(row["below"], row["upstream"]), {})
            row |= {"floor_ms": below["ms"], "ratio": row["ms"] / below["ms"]} if "ms" in below else {}
    for key, step in steps.items() if not args.no_memory else ():
        if rows[key]["status"] == "ok":
            watch.stage(f"{shape}: memory of {key}")
            peak, failure = measure.peak(step)
            rows[key] |= {"memory_error": failure.record()} if failure else peak or {}
            if peak:
                rows[key]["beside_gradients_bytes"] = peak["peak_bytes"] - rows[key]["gradient_bytes"]
    return list(rows.values())


def run(
    name: str,
    args: argparse.Namespace,
    jobs: Sequence[Job],
    total: int,
    shown: Callable[[list[Row]], "Table"],
    keys: Sequence[str],
    *,
    skipped: Mapping[str, str] | None = None,
    more: Callable[[list[Row]], Row] = lambda rows: {},
) -> int:
    """Run the jobs one after the other; show and write the rows of each. Return 1 where a row of ours failed.

    The last line printed is a JSON with ``keys`` of the rows. ``total`` is the number of ticks of the progress.
    ``more`` makes further contents of the file from all rows.
    """
    path, console, rows = results_path(args.output, name, args.device), make_console(), list[Row]()
    left_out: Row = {} if skipped is None else {"skipped": dict(skipped)}
    report_skipped(console, skipped or {})
    with Watch(total) as watch:
        for record, job in jobs:
            found, failure = measure.attempt(functools.partial(job, watch))
            measure.release()
            rows += [{**record, **failure.record()}] if failure else found
            console.print(shown([record | failure.record()] if failure else found))
            # After each job, so that a run that is cut short leaves what it has.
            write_results(path, name, args.argv, args.device, **left_out, **more(rows), rows=rows)
    summary(name, args.device, rows, keys, **left_out, **more(rows))
    return report_failures(console, rows)


def summary(name: str, device: torch.device, rows: Iterable[Row], keys: Sequence[str], **more: Any) -> None:
    """Print a line of JSON with the named values of the rows, fractions cut to five digits."""
    short = [{key: _brief(row[key]) for key in keys if key in row} for row in rows]
    print(json.dumps({"benchmark": name, "device": device.type, "rows": short, **more}))


def _brief(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]], left: Sequence[str] = ()) -> "Table":
    """Make a table whose first column, and those of ``left``, are aligned on the left."""
    from rich.table import Table

    made = Table(title=title)
    for at, column in enumerate(columns):
        made.add_column(column, no_wrap=True, justify="left" if at == 0 or column in left else "right")
    for line in lines:
        made.add_row(*line)
    return made


def mebibytes(size: float | None) -> str:
    """Bytes as MiB for a table."""
    return "-" if size is None else f"{size / 2**20:,.1f}"


def number(value: float | None, form: str = ".3f") -> str:
    """A number for a table, `-` where there is none."""
    return "-" if value is None else format(value, form)


def timed_cells(row: Row) -> list[str]:
    """Cells of TIMED of a row; `*` marks a ratio above the accepted one."""
    over = row.get("must") is not None and row.get("ratio", 0.0) > row["must"]
    return [
        number(row.get("ms")), number(row.get("ratio")) + " *" * over,
        f"{number(row.get('ms_p25'))}-{number(row.get('ms_p75'))}",
        row.get("memory_error", {}).get("status") or mebibytes(row.get("peak_bytes")),
        mebibytes(row.get("beside_gradients_bytes")), mebibytes((row.get("plan") or {}).get("peak_bytes")),
    ]  # fmt: skip


TIMED = ("ms", "ratio", "middle half", "peak MiB", "beside grads", "plan's")


def nothing_runs(skipped: Mapping[str, str]) -> int:
    """Say why no provider can run; return the exit status."""
    console = make_console()
    report_skipped(console, skipped)
    console.print("no provider can run here")
    return 1


def report_skipped(console: "Console", skipped: Mapping[str, str]) -> None:
    """Say which providers are left out, and why."""
    for label, reason in skipped.items():
        console.print(f"skipped {label}: {reason}", markup=False, highlight=False, soft_wrap=True)


def report_failures(console: "Console", rows: Sequence[Row]) -> int:
    """Print the errors of the rows that failed; return the exit status, 1 if one of them is ours."""
    failures = [(row["provider"], failure) for row in rows for failure in (row, row.get("memory_error", {}))]
    failures = [(label, failure) for label, failure in failures if failure.get("status") == "failed"]
    for text in dict.fromkeys(f"{label} failed: {one['error']} ({', '.join(one['where'])})" for label, one in failures):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return int(any("ours" in label for label, _ in failures))


def results_path(output: Path | None, benchmark: str, device: torch.device) -> Path:
    """Return ``output``, or a file in benchmarks/results where it is None."""
    return output or _ROOT / "benchmarks" / "results" / f"{benchmark}-{device.type}.json"


def write_results(path: Path, benchmark: str, argv: Sequence[str], device: torch.device, **content: Any) -> None:
    """Write what was measured, with the machine, the versions and the commit it was measured on."""
    # Absolute paths say something about the machine and nothing about the measurement.
    words = [Path(word).name if word.startswith("/") else word for word in argv]
    record = {
        "benchmark": benchmark,
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *words]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        **_machine(device),
        **content,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _machine(device: torch.device) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(ImportError):
        # the one that runs: another than the installed one may come before it on the path
        versions["triton"] = importlib.import_module("triton").__version__
    for name in dict.fromkeys(package.name for package in (providers.PACKAGES | providers.LATE_PACKAGES).values()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    versions |= providers.newer_torch()
    if device.type == "cuda":
        driver, _, limit = _output(*gauge.query(device, "driver_version", "power.limit")).partition(", ")
        name = torch.cuda.get_device_name(device)
        total = torch.cuda.get_device_properties(device).total_memory
        # another's than the device's where one is forced
        gpu = importlib.import_module("chunked_head.core.gpus").gpu_of(device)
        return {
            "device": name, "architecture": gpu and gpu.name, "memory": total, "driver": driver, "watts_limit": limit,
            "cuda": torch.version.cuda, "versions": versions,
        }  # fmt: skip
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {"device": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "versions": versions}


def commit() -> str:
    named = os.environ.get("CHUNKED_HEAD_COMMIT")
    if named:
        return named
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "HEAD")
    changed = bool(commit) and bool(_output("git", "-C", str(_ROOT), "status", "--porcelain"))
    return (commit or "unknown") + ("-dirty" if changed else "")


def _output(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return ""
