"""Time, peak memory and errors of the head's providers, and bare matrix products: `python -m benchmarks head`.

With `--late` the providers are functions of log-probabilities and entropy, whose gradients come in backward: four
products, and one without gradients. `--errors`, against a wider type, are of the data that is timed.
"""

import functools
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks import accuracy, command, measure, providers
from benchmarks.command import Row, Watch, number
from benchmarks.shapes import DATA, Shape, make_operands

FLOOR, FOUR, ONE = "floor", "floor, 4 products", "floor, 1 product"
_GPU_SHAPES = (Shape(8192, 4096, 128256), Shape(8192, 1024, 151936))
_ERRORS = ("d_hidden_error", "d_weight_error", "logprob_error")
_KEYS = ("shape", "data", "provider", "upstream", "below", "status", "ms", "ratio", "peak_bytes", *_ERRORS)


def run_shape(shape: Shape, args: Any, watch: Watch) -> list[Row]:
    """Measure every provider at one shape: a row for each floor, and for each provider and upstream."""
    ready = providers.build_again(args.provider, args.device)
    operands = make_operands(shape, args.dtype, args.device, data=args.data)
    errors = accuracy.errors_of(ready, shape, operands, args, watch) if args.errors else {}
    measure.release(operands)
    names, steps = {FOUR: 4, ONE: 1} if args.late else {FLOOR: 3}, dict[str, Any]()
    for provider in ready:
        plan = None if args.late else providers.predict(provider, shape, args.dtype, args.device)
        for below, value in ((below, value) for below in names for value in args.upstream):
            record = {"provider": provider.label, "upstream": value, "below": below, "plan": plan}
            call = provider.logprobs if below == ONE else provider.call
            step = functools.partial(measure.Step, call, operands, value, below != ONE)
            steps[f"{below}, {command.key_of(provider.label, value)}"] = (
                record | errors.get((provider.label, value), {}),
                step,
            )

    def floors() -> dict[str, Any]:
        products = measure.floor_steps(operands, args.device, set(names.values()))
        return {name: products[measure.products_name(count)] for name, count in names.items()}

    records = {name: {"provider": name} for name in names}
    return command.measured(shape, args, operands, steps, records, floors, watch)


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = f"{first['shape']} {first['dtype']}, {first['data']} data"
    lines = []
    for row in rows:
        cells = [row["provider"], row.get("below", ""), number(row.get("upstream"), "g")]
        if row["status"] == "ok":
            cells += [*command.timed_cells(row), number(row.get("loss"), ".5f")]
            cells += [number(row.get(name), ".1e") for name in _ERRORS]
        else:
            cells.append(f"{row['status']}: {row['error'][:60]}")
        lines.append(cells)
    columns = ("provider", "of", "upstream", *command.TIMED, "loss", "d hidden", "d weight", "log-prob")
    return command.table(title, columns, lines, left=["of"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = command.arguments("head", __doc__, shape=True, rounds=10, upstream=[1.0], peers=True)
    words = f"one after the other ({' '.join(DATA)})"
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA), help=words)
    parser.add_argument("--late", action="store_true", help=f"by default {', '.join(providers.LATE)}")
    parser.add_argument("--errors", action="store_true", help="of gradients and log-probabilities as well")
    parser.add_argument("--no-memory", action="store_true", help="measure no memory")
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    if args.errors and 0.0 in args.upstream:
        parser.error("argument --upstream: an error relative to a gradient of zero is undefined")
    args.provider = args.provider or (providers.LATE if args.late else providers.NAMES)
    sizes = command.sizes(args, _GPU_SHAPES)
    ready, skipped = providers.resolve(args.provider, args.device)
    args.provider = [provider.label for provider in ready]
    jobs = list[command.Job]()
    for size in sizes:
        for data in args.data:
            jobs += command.over([size], Namespace(**vars(args) | {"data": data}), run_shape, provider="operands")
    if not ready:
        return command.nothing_runs(skipped)
    return command.run("head", args, jobs, len(jobs) * args.rounds, _table, _KEYS, skipped=skipped)


if __name__ == "__main__":
    sys.exit(main())
