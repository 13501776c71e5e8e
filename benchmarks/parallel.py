"""One head's step on GPUs that share its vocabulary, and on one GPU: `python -m benchmarks.parallel --gpus 2`.

A process for each GPU. All rows take turns in one run, one GPU's among them (rank 0 with all of the head, while the
other ranks wait); of each round the slowest rank's time counts. Bare products of the head and of a part, and the sum
over ranks of the gradient of hidden states by itself, tell what bounds the ratio.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import torch
from rich.table import Table

from benchmarks import command, parallel_ranks, shapes
from benchmarks.command import Row, mebibytes, number
from benchmarks.parallel_ranks import Task
from benchmarks.parallel_rows import MUST_BESIDE_CE, ROWS, SHAPE, chosen

# nothing here uses it, and where it is off NCCL must not try
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def divide(rows: Sequence[Row], shape: str) -> None:
    """Add to each row its time's ratio to one GPU's, and to bare products of a rank's part of the head."""
    timed = {row["row"]: row["ms"] for row in rows if row["shape"] == shape and "ms" in row}
    for row in rows:
        if row["shape"] != shape or "ms" not in row:
            continue
        below = ROWS[row["row"]].below
        if below in timed:
            row |= {"below": below, "ratio": row["ms"] / timed[below]}
        if "matmuls-part" in timed and below not in (None, "matmuls"):
            row["to_products"] = row["ms"] / timed["matmuls-part"]
        if row["row"] == "grpo" and "cross-entropy" in timed:
            row |= {"beside_ce": row["ms"] / timed["cross-entropy"], "must_beside_ce": MUST_BESIDE_CE}


def _table(rows: Sequence[Row], ranks: int) -> Table:
    lines = []
    for row in rows:
        cells = [row["status"]]
        if row["status"] == "ok":
            off = number(max(row["d_hidden_error"], row["d_weight_error"]), ".1e") if "d_hidden_error" in row else "-"
            cells = [*command.timed_cells(row), number(row.get("must"), ".3f"), number(row.get("to_products"))]
            cells += [number(row.get("messages"), "d"), mebibytes(row.get("message_bytes"))]
            cells += [number(row.get("loss"), ".5f"), off]
        lines.append([row["row"], *cells])
    columns = ("row", *command.TIMED, "must", "to products", "messages", "MiB", "loss", "off")
    title = f"{rows[0]['shape']} {rows[0]['dtype']} on {ranks} (* over what it must be)"
    return command.table(title, columns, lines)


def _notes(rows: Sequence[Row]) -> list[str]:
    """Return lines on what the table does not show: GRPO beside cross-entropy, and rows that are wrong."""
    lines = list[str]()
    for row in rows:
        if "beside_ce" in row:
            over = " *" * (row["beside_ce"] > row["must_beside_ce"])
            lines.append(f"{row['row']}: {row['beside_ce']:.3f} of cross-entropy's time{over}")
        if row.get("agrees") is False:
            lines.append(f"WRONG: {row['row']} does not agree with one GPU, or its ranks with each other")
    return lines


def _task(argv: Sequence[str]) -> tuple[Task, argparse.Namespace]:
    parser = command.arguments("parallel", __doc__, shape=True, rounds=15)
    add = parser.add_argument
    add("--gpus", type=command.count, default=2, help="ranks: GPUs, or processes on a CPU (2)")
    add("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"some of {', '.join(ROWS)}")
    add("--no-memory", action="store_true", help="measure no memory")
    args = command.read(parser, argv)
    if args.gpu and args.gpus > torch.cuda.device_count():
        parser.error(f"argument --gpus: {args.gpus} is more than the {torch.cuda.device_count()} GPUs that are there")
    sizes = tuple(command.sizes(args, (SHAPE,)))
    for size in sizes:
        if size.vocab % args.gpus:
            parser.error(f"argument --shape: the vocabulary of {size} does not make {args.gpus} equal parts")
    dtype, memory = shapes.dtype_name(args.dtype), args.gpu and not args.no_memory
    return Task(args.gpus, sizes, tuple(chosen(args.rows)), args.rounds, args.device.type, dtype, memory), args


def run(task: Task) -> list[Row]:
    """Measure with a process for each rank; return its rows, and a row for a crash."""
    rows, failure = parallel_ranks.run_ranks(parallel_ranks.enter, task.ranks, task)
    if failure is not None:
        where = {"shape": "all", "dtype": task.dtype, "row": "all", "provider": "ours"}
        rows.append({**where, **failure.record()})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status: 1 where a row of ours failed or is wrong."""
    task, args = _task(sys.argv[1:] if argv is None else argv)
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    rows = run(task)
    for shape in map(str, task.shapes):
        divide(rows, shape)
    path = command.results_path(args.output, f"parallel-{task.ranks}", args.device)
    content: Row = {"ranks": task.ranks, "environment": {name: os.environ[name] for name in NO_MULTICAST}, "rows": rows}
    command.write_results(path, "parallel", args.argv, args.device, **content)
    console = command.make_console()
    for shape in dict.fromkeys(row["shape"] for row in rows):
        found = [row for row in rows if row["shape"] == shape]
        console.print(_table(found, task.ranks))
        for line in _notes(found):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    status = command.report_failures(console, rows)
    keys = ("shape", "row", "status", "ms", "ratio", "below", "must", "beside_ce", "peak_bytes", "loss", "agrees")
    command.summary("parallel", args.device, rows, keys, ranks=task.ranks)
    return status or int(any(row.get("agrees") is False and row["provider"].startswith("ours") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
