"""Time and peak memory of the head's providers and of three bare matrix products: `python -m benchmarks.head`."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks import command, measure, providers
from benchmarks.command import Row, Watch, number
from benchmarks.shapes import DATA, TARGETS, Shape, make_operands

FLOOR = "floor"
_GPU_SHAPES = (Shape(8192, 4096, 128256), Shape(8192, 2048, 128256), Shape(8192, 2304, 256000))
_KEYS = ("shape", "provider", "upstream", "status", "ms", "ratio", "peak_bytes", "beside_gradients_bytes")


def run_shape(shape: Shape, args: Any, watch: Watch) -> list[Row]:
    """Measure every provider at one shape; one row for the floor and one for each provider and upstream."""
    # Anew for each shape: compiled code is for one shape, see providers.
    ready, _ = providers.resolve(args.provider or providers.NAMES, args.device)
    operands = make_operands(shape, args.dtype, args.device, data=args.data, targets=args.targets)
    measure.release(operands)
    asked = {}
    for provider in ready:
        plan = providers.predict(provider, shape, args.dtype, args.device)
        for value in args.upstream:
            record = {"provider": provider.label, "upstream": value, "below": FLOOR, "plan": plan}
            step = functools.partial(measure.Step, provider.call, operands, value)
            asked[command.key_of(provider.label, value)] = record, step

    def floors() -> dict[str, Any]:
        return {FLOOR: measure.floor_steps(operands, args.device, [3])["3 products"]}

    def request(row: Row) -> measure.MemoryRequest:
        return measure.MemoryRequest(row["provider"], shape, row["dtype"], row["upstream"], args.data, args.targets)

    return command.measured(shape, args, operands, asked, {FLOOR: {"provider": FLOOR}}, floors, request, watch)


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = f"{first['shape']} {first['dtype']}, data {first['data']}, targets {first['targets']}"
    lines = [
        [row["provider"], number(row.get("upstream"), "g"),
         *([*command.timed_cells(row), number(row.get("loss"), ".5f")] if row["status"] == "ok" else [row["status"]])]
        for row in rows
    ]  # fmt: skip
    return command.table(title, ("provider", "upstream", *command.TIMED, "loss"), lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = command.arguments("head", __doc__, shape=True, rounds=20, upstream=[1.0], peers=True)
    parser.add_argument("--targets", choices=TARGETS, default="random")
    parser.add_argument("--data", choices=DATA, default="random")
    parser.add_argument("--no-memory", action="store_true", help="measure no memory")
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    sizes = command.sizes(args, _GPU_SHAPES)
    ready, skipped = providers.resolve(args.provider or providers.NAMES, args.device)
    jobs = command.over(sizes, args, run_shape, provider="operands")
    if not ready:
        return command.nothing_runs(skipped)
    return command.run("head", args, jobs, len(sizes) * args.rounds, _table, _KEYS, skipped=skipped)


if __name__ == "__main__":
    sys.exit(main())
