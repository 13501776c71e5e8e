"""Time, memory and errors of checkouts of this library that take turns on one GPU: `python -m benchmarks turns`.

Each checkout runs in a process of its own (`turns_worker.py`), and one more runs the bare matrix products. A turn
runs a step for `--settle` seconds and then times it for `--seconds`: a GPU at its power limit needs that long until
what ran before no longer shows. Rounds reverse the order. Reported are medians of the rounds, and their ratio to the
products' median.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks import command

ROOT = Path(__file__).resolve().parent.parent
PRODUCTS = "products"
# tokens x hidden x vocabulary: loss, and what is passed besides
CASES = (
    "8192x4096x128256:ce", "8192x2048x128256:ce", "8192x1024x151936:ce", "8192x768x50304:ce", "8192x2880x201088:ce",
    "8192x4096x128256:grpo", "8192x1024x151936:grpo", "2048x4096x128256:ce", "16384x4096x128256:ce",
    "32768x4096x128256:ce", "131072x4096x128256:ce",
)  # fmt: skip


class Worker:
    """A process that runs steps of one checkout, or bare products where ``checkout`` is None."""

    def __init__(self, name: str, checkout: Path | None):
        self.name = name
        script = str(ROOT / "benchmarks" / "turns_worker.py")
        path = [] if checkout is None else [str(checkout)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
        words = [sys.executable, script, *(["--products"] if checkout is None else [])]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, env=environment, cwd=checkout or ROOT, **pipes)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request; return its answer, whose ``error`` says what went wrong."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "its process has ended"}


def run_case(case: str, workers: Sequence[Worker], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each worker: milliseconds of each round, the ratio, peak bytes, errors by kind of data."""
    rows, ready = [], []
    for worker in workers:
        row = {"case": case, "checkout": worker.name} | worker.ask(do="prepare", case=case)
        if worker.name != PRODUCTS and "error" not in row:
            row |= {f"errors {kind}": worker.ask(do="errors", data=kind) for kind in args.errors}
            row |= worker.ask(do="memory")
        rows.append(row)
        if "error" not in row:
            ready.append((worker, row.setdefault("ms_rounds", [])))
    for number in range(args.rounds):
        for worker, times in ready if number % 2 == 0 else ready[::-1]:
            answer = worker.ask(do="turn", settle=args.settle, seconds=args.seconds)
            if "ms" in answer:
                times.append(answer["ms"])
    floor = next((statistics.median(row["ms_rounds"]) for row in rows if row["checkout"] == PRODUCTS), None)
    for row in rows:
        if row.get("ms_rounds"):
            row["ms"] = statistics.median(row["ms_rounds"])
            row["ratio"] = row["ms"] / floor if floor else None
    for worker in workers:
        worker.ask(do="clear")
    return rows


def table_of(rows: Sequence[dict[str, Any]], kinds: Sequence[str]) -> Table:
    errors = [f"{name}, {kind}" for kind in kinds for name in ("dhidden", "dweight", "logprob")]
    lines = []
    for row in rows:
        cells = [row["case"], row["checkout"]]
        if "error" in row:
            lines.append([*cells, row["error"][:60]])
            continue
        spread = f"{min(row['ms_rounds']):.2f} to {max(row['ms_rounds']):.2f}" if row["ms_rounds"] else ""
        cells += [f"{row.get('ms', 0):.2f}", spread, f"{row.get('ratio') or 0:.3f}"]
        cells.append(f"{row['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in row else "")
        cells.append(row.get("plan", ""))
        for kind in kinds:
            of_kind = row.get(f"errors {kind}", {})
            cells += [f"{of_kind[name]:.2e}" if name in of_kind else "" for name in ("dhidden", "dweight", "logprob")]
        lines.append(cells)
    columns = ("case", "checkout", "ms", "rounds", "of products", "MiB", "plan", *errors)
    return command.table("Checkouts in turns", columns, lines, left=["checkout", "plan"])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks turns", description=(__doc__ or "").splitlines()[0])
    words = "repeatable: TOKENSxHIDDENxVOCAB:LOSS[:OPTION=VALUE,...]; " + ", ".join(CASES)
    parser.add_argument("--case", action="append", help=words)
    words = "repeatable: NAME=FOLDER of a checkout; this one is always there"
    parser.add_argument("--against", action="append", default=[], help=words)
    parser.add_argument("--errors", nargs="*", default=[], choices=("flat", "zipf", "peaked"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle", type=float, default=1.5, help="seconds of each turn before what is timed")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of each turn that are timed")
    parser.add_argument("--output", type=Path, help="the JSON file of the results")
    args = parser.parse_args(argv)
    checkouts = dict(each.split("=", 1) for each in args.against)
    workers = [Worker(PRODUCTS, None), *(Worker(name, Path(folder).resolve()) for name, folder in checkouts.items())]
    workers.append(Worker("this", ROOT))
    rows: list[dict[str, Any]] = []
    for case in args.case or CASES:
        found = run_case(case, workers, args)
        rows += found
        command.make_console().print(table_of(found, args.errors))
        if args.output is not None:
            command.write_results(args.output, "turns", argv, torch.device("cuda"), rows=rows)
    return 0 if all("error" not in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
