"""Times of a call's launches, and of the three bare products: `python -m benchmarks.inside`.

A profiler times every launch of cross-entropy's forward and backward and of the bare products, in turns. Launches are
put together: a chunk's product of logits, its two products of gradients, and everything else; what of the span is no
launch's is the gap between them. The medians over the rounds are of launches in steps that follow two others of their
kind, as in `benchmarks.speed`.
"""

import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks import command, measure, shapes, speed_rows
from benchmarks.command import WARM_UP, Row, Watch, number
from benchmarks.shapes import Shape
from benchmarks.speed_rows import Bench

PRODUCTS = ("logits", "dhidden", "dweight")
OTHERS, GAPS, SPAN = "other launches", "gaps", "span"
PARTS = (*PRODUCTS, OTHERS, GAPS, SPAN)
# of ours those that forward and backward make in one pass over the chunks
DEFAULT_ROWS = ("default", "into")


def sorted_launches(names: Sequence[str], chunks: int) -> list[str]:
    """Purposes of a call's launches, by their places among the products: logits, dhidden, dweight of each chunk."""
    places = measure.product_places(names)
    if len(places) != len(PRODUCTS) * chunks:
        found = ", ".join(names[place] for place in places)
        raise ValueError(f"expected {len(PRODUCTS)} products in each of {chunks} chunks, the launches have: {found}")
    purposes = [OTHERS] * len(names)
    for count, place in enumerate(places):
        purposes[place] = PRODUCTS[count % len(PRODUCTS)]
    return purposes


def parts_of(launches: Sequence[measure.Launch], chunks: int) -> dict[str, float]:
    """Milliseconds of a step's parts; a product's launches are those of all chunks."""
    found = dict.fromkeys(PARTS, 0.0)
    for launch, purpose in zip(launches, sorted_launches([x.name for x in launches], chunks), strict=True):
        found[purpose] += launch.length / 1e3
    last = max(launches, key=lambda launch: launch.begin + launch.length)
    found[SPAN] = (last.begin + last.length - launches[0].begin) / 1e3
    found[GAPS] = found[SPAN] - sum(found[part] for part in (*PRODUCTS, OTHERS))
    return found


def longest_others(launches: Sequence[measure.Launch], chunks: int) -> dict[str, float]:
    """Milliseconds of what is no product, by name."""
    found: dict[str, float] = {}
    for launch, purpose in zip(launches, sorted_launches([x.name for x in launches], chunks), strict=True):
        if purpose == OTHERS:
            short = re.split(r"[<(]", launch.name.replace("void ", ""))[0]
            found[short] = found.get(short, 0.0) + launch.length / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def run_shape(shape: Shape, args: Any, watch: Watch) -> list[Row]:
    """A record for the bare products, and one for each row."""
    bench = Bench(shapes.make_operands(shape, args.dtype, args.device))
    measure.release(bench.operands)
    steps: dict[str, tuple[int, Callable[[], Any]]] = {}
    for name in args.rows:
        watch.stage(f"{shape}: warm-up of {name}")
        step = bench.step(name)
        planned = speed_rows.predict(name, shape, args.dtype, args.device) or {}
        schedule = planned.get("schedule", planned.get("error"))
        if schedule != "forward":
            raise ValueError(f"row {name}: only the forward schedule's launches are told apart, not {schedule}'s")
        for _ in range(WARM_UP):
            step()
        steps[name] = planned["chunks"], step
    floor = measure.Floor(bench.operands, args.device)
    blocks = -(-shape.tokens // floor.rows)
    steps = {speed_rows.THREE: (blocks, functools.partial(floor, 3)), **steps}
    for _, timed in steps.values():
        measure.traced(timed, args.device)  # a profiler's first run is slow
    found: dict[str, list[list[measure.Launch]]] = {name: [] for name in steps}
    watch.stage(f"{shape}: {args.rounds} rounds")
    for count in range(args.rounds):
        for name in list(steps) if count % 2 == 0 else reversed(list(steps)):
            found[name].append(settled(steps[name][1], bench, args.device))
        watch.tick()
    bench.operands.clear()
    described = {"shape": str(shape), "status": "ok"}
    return [
        {**described, "row": name, "provider": name, "chunks": steps[name][0], **_medians(rounds, steps[name][0])}
        for name, rounds in found.items()
    ]


def settled(step: Callable[[], Any], bench: Bench, device: torch.device) -> list[measure.Launch]:
    """The launches of a step that follows others of its kind at once, as the clocks of a GPU at its limit ask for."""
    runs = 1 + (measure.SETTLING_RUNS if device.type == "cuda" else 0)

    def several() -> None:
        for _ in range(runs):
            bench.operands.clear()
            step()

    launches = measure.traced(several, device)
    if len(launches) % runs:
        raise ValueError(f"{runs} steps made {len(launches)} launches, not as many each")
    return launches[-(len(launches) // runs) :]


def _medians(rounds: Sequence[Sequence[measure.Launch]], chunks: int) -> dict[str, Any]:
    parts = [parts_of(launches, chunks) for launches in rounds]
    others = [longest_others(launches, chunks) for launches in rounds]

    def middle(values: Sequence[dict[str, float]], key: str) -> float:
        return measure.quantile([value.get(key, 0.0) for value in values], 0.5)

    return {
        "ms": {part: middle(parts, part) for part in PARTS},
        "others_ms": {name: middle(others, name) for name in others[0]},
        "launches": len(rounds[0]),
    }


def _table(rows: Sequence[Row]) -> Table:
    bare, lines = rows[0].get("ms", {}), []
    for row in rows:
        if row["status"] != "ok":
            lines.append([row["row"], row["status"]])
            continue
        over = {part: "" if row is rows[0] else f" {row['ms'][part] - bare[part]:+.3f}" for part in PARTS}
        title = f"{row['row']}, {row['chunks']} chunk{'s' * (row['chunks'] > 1)}"
        lines.append([title, *(number(row["ms"][part]) + over[part] for part in PARTS)])
    title = f"{rows[0]['shape']}: ms of a step, and of it over the bare products"
    return command.table(title, ("row", *PARTS), lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status: 1 where a shape failed."""
    parser = command.arguments("inside", __doc__, shape=True, rounds=9)
    words = ", ".join(DEFAULT_ROWS)
    parser.add_argument("--rows", nargs="+", choices=DEFAULT_ROWS, default=DEFAULT_ROWS, metavar="ROW", help=words)
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    sizes = command.sizes(args, speed_rows.SHAPES)
    jobs = command.over(sizes, args, run_shape, row="all", provider="ours")
    return command.run("inside", args, jobs, len(sizes) * args.rounds, _table, ("shape", "row", "status", "ms"))


if __name__ == "__main__":
    sys.exit(main())
