"""One head's step on GPUs that share its vocabulary, beside one GPU's: `python -m benchmarks.parallel --gpus 2`.

A process for each GPU. All rows take turns in one run, one GPU's among them (rank 0 with the whole head, while the
others wait); of each round the slowest rank's time counts. Bare products of the whole head and of a part, and the sum
over ranks of the gradient of hidden states by itself, tell what bounds the ratio.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks import measure, parallel_ranks, providers, shapes
from benchmarks.head import brief, make_console, mebibytes, number, report_failures
from benchmarks.parallel_ranks import Task
from benchmarks.parallel_rows import MUST_BESIDE_CE, ROWS, SHAPE, chosen

# nothing here uses it, and where it is off NCCL must not try
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def divide(rows: Sequence[dict[str, Any]], shape: str) -> None:
    """Add to each row its ratio to one GPU's, and to the bare products of a part."""
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


def _table(rows: Sequence[dict[str, Any]], ranks: int) -> Table:
    first = rows[0]
    table = Table(title=f"{first['shape']} {first['dtype']} on {ranks} (* over what it must be)")
    columns = "ms,ratio,must,to products,p20-p80,peak MiB,beside grads,plan's,messages,MiB,loss,off"
    for column in ("row", *columns.split(",")):
        table.add_column(column, no_wrap=True, justify="left" if column == "row" else "right")
    for row in rows:
        if row["status"] != "ok":
            table.add_row(row["row"], row["status"])
            continue
        over = row.get("must") is not None and row.get("ratio", 0.0) > row["must"]
        plan = (row.get("plan") or {}).get("extra_bytes")
        table.add_row(
            row["row"], number(row["ms"]), number(row.get("ratio")) + " *" * over, number(row.get("must"), ".3f"),
            number(row.get("to_products")),
            f"{number(row['ms_p20'])}-{number(row['ms_p80'])}",
            row.get("memory_error", {}).get("status") or mebibytes(row.get("peak_bytes")),
            mebibytes(row.get("beside_gradients_bytes")), mebibytes(plan), number(row.get("messages"), "d"),
            mebibytes(row.get("message_bytes")), number(row.get("loss"), ".5f"),
            number(max(row["d_hidden_error"], row["d_weight_error"]), ".1e") if "d_hidden_error" in row else "-",
        )  # fmt: skip
    return table


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of what a table of ratios does not say."""
    lines = list[str]()
    for row in rows:
        if "beside_ce" in row:
            over = " *" * (row["beside_ce"] > row["must_beside_ce"])
            lines.append(f"{row['row']}: {row['beside_ce']:.3f} of cross-entropy's time{over}")
        if row.get("agrees") is False:
            lines.append(f"WRONG: {row['row']} does not agree with one GPU, or its ranks with each other")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel", description=__doc__.splitlines()[0])
    known, add = providers.argument, parser.add_argument
    add("--gpus", type=known(shapes.parse_count), default=2, help="ranks: GPUs, or processes on a CPU (2)")
    add("--shape", action="append", type=known(shapes.parse_shape), help="repeatable: 8192x4096x128256, llama3-8b, cpu")
    add("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"some of {', '.join(ROWS)}")
    add("--rounds", type=known(shapes.parse_count), default=15, help="timed rounds (15)")
    add("--no-memory", action="store_true", help="measure the time alone")
    providers.common_arguments(parser, peers=False)
    return parser


def _task(argv: Sequence[str]) -> tuple[Task, argparse.Namespace]:
    parser = _parser()
    args = parser.parse_args(argv)
    args.device = providers.read_device(parser, args.device)
    gpu = args.device.type == "cuda"
    if gpu and args.gpus > torch.cuda.device_count():
        parser.error(f"argument --gpus: {args.gpus} is more than the {torch.cuda.device_count()} GPUs that are there")
    dtype = args.dtype or (torch.bfloat16 if gpu else torch.float32)
    sizes = tuple(dict.fromkeys(args.shape or ((SHAPE,) if gpu else (shapes.Shape(*shapes.CPU_SHAPE),))))
    for size in sizes:
        if size.vocab % args.gpus:
            parser.error(f"argument --shape: the vocabulary of {size} does not make {args.gpus} equal parts")
    task = Task(
        args.gpus, sizes, tuple(chosen(args.rows)), args.rounds, args.device.type, shapes.dtype_name(dtype),
        memory=gpu and not args.no_memory,
    )  # fmt: skip
    return task, args


def run(task: Task) -> list[dict[str, Any]]:
    """The rows that a process for each rank has measured; those before a crash, and the crash, where one ends so."""
    with tempfile.TemporaryDirectory() as folder:
        _, failure = measure.attempt(
            functools.partial(torch.multiprocessing.spawn, parallel_ranks.enter, (task, folder), task.ranks)
        )
        written = Path(folder, parallel_ranks.ROWS_FILE)
        rows: list[dict[str, Any]] = json.loads(written.read_text()) if written.exists() else []
    if failure is not None:
        where = {"shape": "all", "dtype": task.dtype, "row": "all", "provider": "ours"}
        rows.append({**where, **failure.record()})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status: 1 where a row of ours failed or is wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    task, args = _task(argv)
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    rows = run(task)
    for shape in map(str, task.shapes):
        divide(rows, shape)
    path = providers.results_path(args.output, f"parallel-{task.ranks}", args.device)
    settings = {name: os.environ[name] for name in NO_MULTICAST}
    providers.write_results(path, "parallel", argv, args.device, ranks=task.ranks, environment=settings, rows=rows)
    console = make_console()
    for shape in dict.fromkeys(row["shape"] for row in rows):
        found = [row for row in rows if row["shape"] == shape]
        console.print(_table(found, task.ranks))
        for line in _notes(found):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    status = report_failures(console, rows)
    keys = ("shape", "row", "status", "ms", "ratio", "below", "must", "beside_ce", "peak_bytes", "loss", "agrees")
    short = [brief({key: row[key] for key in keys if key in row}) for row in rows]
    print(json.dumps({"benchmark": "parallel", "device": task.device, "ranks": task.ranks, "rows": short}))
    return status or int(any(row.get("agrees") is False and row["provider"].startswith("ours") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
