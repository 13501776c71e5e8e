"""Our calls with the options that change a step's time, and bare matrix products: `python -m benchmarks.speed`.

The floors are one product of logits (nothing but the loss is asked for), three products (loss and gradients), and three
and the addition of dW to an fp32 buffer (what a framework does without `accumulate_into`). All take turns in one run.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks import command, measure, providers, shapes, speed_rows
from benchmarks.command import Row, Watch, number
from benchmarks.shapes import Shape
from benchmarks.speed_rows import FLOORS, ROWS, SUMMED, THREE, Bench

_KEYS = ("shape", "row", "upstream", "status", "ms", "ratio", "below", "must", "peak_bytes")


def run_shape(shape: Shape, args: Any, watch: Watch) -> list[Row]:
    """Measure every row at one shape: a record for each floor, and for each row or peer and upstream."""
    ready = providers.build_again(args.peers, args.device)  # before our calls are warm
    bench = Bench(shapes.make_operands(shape, args.dtype, args.device, targets=args.targets))
    measure.release(bench.operands)
    asked: dict[str, Any] = {}
    for name in speed_rows.chosen(args.rows):
        row, plan = ROWS[name], speed_rows.predict(name, shape, args.dtype, args.device)
        for upstream in args.upstream if row.backward else args.upstream[:1]:
            record = {"row": name, "provider": f"ours, {name}", "upstream": upstream, "below": row.below}
            record |= {"must": speed_rows.must_of(name, shape), "plan": plan}
            asked[command.key_of(name, upstream)] = record, functools.partial(bench.step, name, upstream)
    for peer in ready:
        for upstream in args.upstream:
            record = {"row": peer.label, "provider": peer.label, "upstream": upstream, "below": THREE, "must": None}
            step = functools.partial(measure.Step, peer.call, bench.operands, upstream)
            asked[command.key_of(peer.label, upstream)] = record, step
    below = {record["below"] for record, _ in asked.values()}
    needed = [name for name in FLOORS if name in below or (name == THREE and SUMMED in below)]
    floors = {name: {"row": name, "provider": f"floor, {name}"} for name in needed}

    make_floors = functools.partial(bench.floors, needed, args.device)
    return command.measured(shape, args, bench.operands, asked, floors, make_floors, watch)


def _table(rows: Sequence[Row]) -> Table:
    columns = ("row", "upstream", *command.TIMED, "to", "must", "to three", "loss")
    lines = []
    for row in rows:
        cells = [row["status"]]
        if row["status"] == "ok":
            three = row.get("ratios", {}).get(THREE)
            cells = [*command.timed_cells(row), row.get("below", "-"), number(row.get("must"), ".2f"), number(three)]
            cells.append(number(row.get("loss"), ".5f"))
        lines.append([row["row"], number(row.get("upstream"), "g"), *cells])
    first = rows[0]
    title = f"{first['shape']} {first['dtype']}, targets {first['targets']} (* over what it must be)"
    return command.table(title, columns, lines, left=["to"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status: 1 where a row of ours failed."""
    parser = command.arguments("speed", __doc__, shape=True, rounds=10, upstream=[1.0])
    add = parser.add_argument
    add("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"some of {', '.join(ROWS)}")
    add("--targets", choices=shapes.TARGETS, default="random")
    add("--peers", action="store_true", help=f"also {', '.join(speed_rows.PEERS)}")
    add("--no-memory", action="store_true", help="measure no memory")
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    if 0.0 in args.upstream:
        parser.error("argument --upstream: 0 can be promised to no accumulate_into, name another number")
    sizes = command.sizes(args, speed_rows.SHAPES)
    ready, skipped = providers.resolve(speed_rows.PEERS if args.peers else (), args.device)
    args.peers = [provider.label for provider in ready]
    jobs = command.over(sizes, args, run_shape, row="all", provider="ours")
    return command.run("speed", args, jobs, len(sizes) * args.rounds, _table, _KEYS, skipped=skipped)


if __name__ == "__main__":
    sys.exit(main())
