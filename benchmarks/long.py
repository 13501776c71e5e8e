"""Long sequences: one GPU, context-parallel ranks and vocabulary-parallel ones: `python -m benchmarks long --gpus 2`.

A process for each GPU. Every rank runs the whole sequence by itself first, which gives the loss and the gradients that
rows of ranks are compared with, each in its own part. Labels of ranks come by `shift_targets` within the timed step.
A size whose inputs, gradients and plan take more memory than there is gets no process: its row says what it needs.
"""

import argparse
import datetime
import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from rich.table import Table
from torch import Tensor, distributed

from benchmarks import command, measure, shapes
from benchmarks.accuracy import relative_error
from benchmarks.command import Row, mebibytes, number
from benchmarks.parallel_ranks import LIMITS, LOSS_LIMITS, process_group, run_ranks, write_rows
from benchmarks.shapes import Operands, Shape
from chunked_head import TokenParallel, VocabParallel, linear_cross_entropy, plan, shift_targets
from chunked_head.parallel.groups import part_sizes

LENGTHS = (131072, 1048576)
SHAPES = tuple([Shape(tokens, 4096, 128256) for tokens in LENGTHS])
LABELS = {
    "one": "all tokens on one rank", "contiguous": "context-parallel, contiguous",
    "zigzag": "context-parallel, zigzag", "vocabulary": "vocabulary-parallel, sequence-sharded",
}  # fmt: skip
ERRORS = "loss_error", "d_hidden_error", "d_weight_error", "last_rows_error"
PATIENCE = datetime.timedelta(seconds=60)  # of ranks that wait for one that has failed
SETTLED = 2.0  # seconds of steps before those that are timed, on a GPU
CHECKED_ROWS = 256  # the last ones, whose gradient is compared with float32
SPARE = 0.95  # of a GPU's memory


@dataclass(frozen=True)
class Task:
    """A measurement in plain values, for processes of ranks."""

    ranks: int
    shapes: tuple[Shape, ...]
    rows: tuple[str, ...]
    rounds: int
    device: str
    dtype: str
    budget: str | None


# ---- before any work


def planned(shape: Shape, row: str, task: Task) -> Any:
    """Return the plan of a row's call on one rank; raises ValueError where there is none."""
    tokens = shape.tokens if row in ("one", "vocabulary") else shape.tokens // task.ranks
    options: dict[str, Any] = {"memory_budget": task.budget, "device": task.device}
    if row == "vocabulary":
        options |= {"ranks": task.ranks, "sequence_sharded": True}
    return plan(tokens, shape.hidden, shape.vocab, shapes.parse_dtype(task.dtype), **options)


def needed(shape: Shape, task: Task) -> int:
    """Return the bytes that a rank needs for a shape's rows; raises ValueError where tokens make no equal slices."""
    slices = 2 * task.ranks if "zigzag" in task.rows else task.ranks
    if shape.tokens % slices and len(task.rows) > 1:
        raise ValueError(f"{shape.tokens} tokens do not make {slices} equal slices")
    itemsize = shapes.parse_dtype(task.dtype).itemsize
    hidden, weight = shape.tokens * shape.hidden * itemsize, shape.vocab * shape.hidden * itemsize
    inputs, most = hidden + weight + 8 * shape.tokens, 0
    for row in task.rows:
        # beside the plan's: the gradients of one rank's row, a part of the inputs, a float32 copy of the weight's size
        held = (hidden + weight) * (len(task.rows) > 1) + (hidden // task.ranks + weight) * (row != "one")
        most = max(most, inputs + held + 4 * shape.vocab * shape.hidden + planned(shape, row, task).peak_bytes)
    return most


def refusal(shape: Shape, task: Task, memory: int) -> str | None:
    """Say why a shape cannot run within ``memory`` bytes a rank; None where it can."""
    try:
        size = needed(shape, task)
    except ValueError as error:
        return str(error)
    if size > memory:
        return f"needs {size / 2**30:,.1f} GiB for each rank, and there are {memory / 2**30:,.1f}"
    return None


# ---- a rank


class Rank:
    """One shape's rows on one rank."""

    def __init__(self, shape: Shape, task: Task, device: torch.device) -> None:
        self.shape, self.task, self.device, self.half = shape, task, device, shapes.parse_dtype(task.dtype).itemsize < 4
        self.rank, self.ranks = distributed.get_rank(), task.ranks
        self.operands = shapes.make_operands(shape, shapes.parse_dtype(task.dtype), device)
        self.expected: Row = {}

    def slice_of(self, row: str, values: Tensor) -> Tensor:
        """This rank's part of a sequence [tokens, ...]."""
        if row != "zigzag":
            return values.chunk(self.ranks)[self.rank]
        slices = values.chunk(2 * self.ranks)
        return torch.cat([slices[self.rank], slices[2 * self.ranks - 1 - self.rank]])

    def step(self, row: str) -> measure.Step:
        operands, options = self.operands, dict[str, Any](memory_budget=self.task.budget)
        if row == "one":
            return measure.Step(functools.partial(linear_cross_entropy, shift=1, **options), operands)
        hidden, weight = self.slice_of(row, operands.hidden.detach()).clone().requires_grad_(), operands.weight
        options["parallel"] = TokenParallel()
        if row == "vocabulary":
            options |= {"parallel": VocabParallel(sequence_sharded=True), "vocab_size": self.shape.vocab}
            weight = weight.detach().split(part_sizes(self.shape.vocab, self.ranks))[self.rank].clone().requires_grad_()
        layout = "zigzag" if row == "zigzag" else "contiguous"

        def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, weight, shift_targets(target, layout=layout), **options)

        return measure.Step(loss, Operands(hidden, weight, self.slice_of(row, operands.target)))

    def measured(self, row: str) -> Row:
        """A row's loss, errors, times and memory, the same on all ranks."""
        step = self.step(row)
        step.operands.clear()
        loss = step().double()
        if row in ("contiguous", "zigzag"):  # shares
            distributed.all_reduce(loss)
        record: Row = {"loss": float(loss), "plan_peak_bytes": planned(self.shape, row, self.task).peak_bytes}
        record |= self.compared(row, step, float(loss))
        begun = time.monotonic()
        while self.device.type == "cuda" and self.agreed(time.monotonic() - begun) < SETTLED:
            self.timed(step)
        seconds = [self.timed(step) for _ in range(self.task.rounds)]
        record |= {"ms": 1000 * measure.quantile(seconds, 0.5), "tokens_per_second": self.shape.tokens / min(seconds)}
        if self.device.type == "cuda":
            peak = self.agreed(measure.gpu_peak(step, step.operands)["peak_bytes"])
            gradients = step.operands.hidden.nbytes + step.operands.weight.nbytes
            record |= {"peak_bytes": int(peak), "beside_gradients_bytes": int(peak) - gradients}
        step.operands.clear()
        return record

    def agreed(self, value: float) -> float:
        """The largest of the ranks' values."""
        largest = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        return float(largest)

    def timed(self, step: measure.Step) -> float:
        """Seconds of a step, the slowest rank's."""
        step.operands.clear()
        distributed.barrier()
        self.wait()
        begun = time.perf_counter()
        step()
        self.wait()
        return self.agreed(time.perf_counter() - begun)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def compared(self, row: str, step: measure.Step, loss: float) -> Row:
        """Return the largest errors of the ranks against one rank's gradients, or that rank's own against float32."""
        hidden, weight = step.operands.hidden.grad, step.operands.weight.grad
        assert hidden is not None and weight is not None
        if row == "one":
            if len(self.task.rows) > 1:
                self.expected = {"loss": loss, "hidden": hidden, "weight": weight}
            return {"last_rows_error": self.agreed(self.last_rows_error(hidden))}
        d_weight = self.expected["weight"]
        if row == "vocabulary":
            d_weight = d_weight.split(part_sizes(self.shape.vocab, self.ranks))[self.rank]
        else:
            weight = weight.float()
            distributed.all_reduce(weight)
        errors = {
            "d_hidden_error": self.agreed(relative_error(hidden, self.slice_of(row, self.expected["hidden"]), 1.0)),
            "d_weight_error": self.agreed(relative_error(weight.to(d_weight.dtype), d_weight, 1.0)),
            "loss_error": abs(loss - self.expected["loss"]) / max(1.0, abs(self.expected["loss"])),
        }
        limits = LIMITS[self.half], LIMITS[self.half], LOSS_LIMITS[self.half]
        agrees = all(error <= limit for error, limit in zip(errors.values(), limits, strict=True))
        return {**errors, "agrees": agrees}

    @torch.no_grad()
    def last_rows_error(self, found: Tensor) -> float:
        """Relative error, against float32, of the gradient of the last hidden states that predict a token."""
        rows = slice(max(0, self.shape.tokens - 1 - CHECKED_ROWS), self.shape.tokens - 1)
        hidden, weight = self.operands.hidden[rows].float(), self.operands.weight.float()
        exact = (hidden @ weight.t()).softmax(-1)
        exact[torch.arange(len(exact)), self.operands.target[rows.start + 1 : rows.stop + 1]] -= 1.0
        return relative_error(found[rows].float(), exact @ weight / (self.shape.tokens - 1), 1.0)


def enter(rank: int, task: Task, folder: str) -> None:
    """Measure every shape on one rank."""
    rows = list[Row]()
    with process_group(rank, task.ranks, task.device, folder, PATIENCE) as device:
        for shape in task.shapes:
            measurer = Rank(shape, task, device)
            for row in task.rows:
                record, failure = measure.attempt(functools.partial(measurer.measured, row), measurer.operands)
                rows.append({**described(shape, row, task), **(failure.record() if failure else record)})
                write_rows(folder, rows)
            del measurer
            measure.release()


# ---- the command


def described(shape: Shape, row: str, task: Task) -> Row:
    ranks = 1 if row == "one" else task.ranks
    names = {"shape": str(shape), "tokens": shape.tokens, "dtype": task.dtype, "row": row, "ranks": ranks}
    return {**names, "provider": f"ours, {LABELS[row]}", "status": "ok"}


def run(task: Task) -> list[Row]:
    """Measure with a process for each rank; return its rows, and a row for a crash."""
    rows, failure = run_ranks(enter, task.ranks, task)
    if failure is not None:
        rows.append({**described(task.shapes[0], "one", task), "row": "all", **failure.record()})
    return rows


def _table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        cells: list[str] = [row["status"]]
        if row["status"] == "ok":
            errors = [row.get(name) for name in ERRORS]
            cells = [number(row["ms"], ".1f"), number(row.get("ratio")), number(row["tokens_per_second"], ",.0f")]
            cells += [mebibytes(row.get(name)) for name in ("peak_bytes", "beside_gradients_bytes", "plan_peak_bytes")]
            cells += [number(row["loss"], ".5f"), *[number(error, ".1e") for error in errors]]
        lines.append([row["row"], str(row["ranks"]), *cells])
    columns = ("row", "ranks", "ms", "of one", "tokens/s", "peak MiB", "beside grads", "plan's", "loss")
    titles = ("loss off", "dhidden off", "dweight off", "last rows off")
    return command.table(f"{rows[0]['shape']} {rows[0]['dtype']}", (*columns, *titles), lines)


def _task(argv: Sequence[str]) -> tuple[Task, argparse.Namespace]:
    parser = command.arguments("long", __doc__, shape=True, rounds=3)
    add = parser.add_argument
    add("--gpus", type=command.count, default=1, help="ranks: GPUs, or processes on a CPU (1)")
    add("--rows", nargs="+", choices=LABELS, metavar="ROW", help=f"some of {', '.join(LABELS)}, beside one")
    add("--budget", metavar="SIZE", help="memory_budget of every call")
    add("--memory", type=command.size_in_bytes, metavar="SIZE", help="of each rank (what the device has)")
    args = command.read(parser, argv)
    if args.gpu and args.gpus > torch.cuda.device_count():
        parser.error(f"argument --gpus: {args.gpus} is more than the {torch.cuda.device_count()} GPUs that are there")
    asked = LABELS if args.rows is None else {"one", *args.rows}
    rows = tuple([row for row in LABELS if row in asked and (row == "one" or args.gpus > 1)])
    if args.memory is None and args.gpu:
        args.memory = int(SPARE * torch.cuda.mem_get_info(args.device)[1])
    elif args.memory is None:
        args.memory = psutil.virtual_memory().available // args.gpus
    sizes = tuple(command.sizes(args, SHAPES))
    dtype = shapes.dtype_name(args.dtype)
    return Task(args.gpus, sizes, rows, args.rounds, args.device.type, dtype, args.budget), args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status: 1 where a row failed or is wrong, 2 where every size is refused."""
    task, args = _task(sys.argv[1:] if argv is None else argv)
    reasons = {shape: refusal(shape, task, args.memory) for shape in task.shapes}
    fitting = tuple([shape for shape, reason in reasons.items() if reason is None])
    rows = [
        {**described(shape, "one", task), "row": "all", "status": "refused", "error": reason}
        for shape, reason in reasons.items() if reason is not None
    ]  # fmt: skip
    if fitting:
        rows += run(Task(**{**vars(task), "shapes": fitting}))
    alone = {row["shape"]: row["ms"] for row in rows if row["row"] == "one" and "ms" in row}
    for row in rows:
        if "ms" in row and row["row"] != "one":
            row["ratio"] = row["ms"] / alone[row["shape"]]
    path = command.results_path(args.output, f"long-{task.ranks}", args.device)
    command.write_results(path, "long", args.argv, args.device, ranks=task.ranks, memory=args.memory, rows=rows)
    console = command.make_console()
    for shape in dict.fromkeys(row["shape"] for row in rows):
        console.print(_table([row for row in rows if row["shape"] == shape]))
    for row in rows:
        if row["status"] == "refused" or row.get("agrees") is False:
            text = row.get("error", f"WRONG: {row['row']} does not agree with one rank")
            console.print(f"{row['shape']}: {text}", markup=False, highlight=False, soft_wrap=True)
    status = command.report_failures(console, rows)
    sizes = "peak_bytes", "beside_gradients_bytes"
    keys = ("shape", "row", "ranks", "status", "ms", "ratio", *sizes, "loss", *ERRORS, "agrees", "error")
    command.summary("long", args.device, rows, keys, ranks=task.ranks)
    return (status or int(any(row.get("agrees") is False for row in rows))) if fitting else 2


if __name__ == "__main__":
    sys.exit(main())
