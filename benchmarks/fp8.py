"""Times, memory and errors of calls with `precision="fp8"` beside those without it: `python -m benchmarks fp8`.

Times are ratios to bare products: of cross-entropy through its backward to three, of a head that takes no gradient to
two, of log-probabilities without gradients to one. All shapes' steps take turns on one GPU, whose clocks the bare
products settle. Errors are against float64 (`fp8_errors.py`). Then `fp8_training.py` trains small models, and writes a
file of its own.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import command, fp8_errors, measure
from benchmarks.command import Row, Watch, mebibytes, number
from benchmarks.fp8_ways import BF16, CROSS_ENTROPY, FP8, FROZEN, KEPT, LOGITS, LOGPROBS, options_of
from benchmarks.rounds import records
from benchmarks.shapes import Operands, Shape
from chunked_head import linear_cross_entropy, linear_logprobs, plan, quantise

SHAPES = (Shape(8192, 4096, 128256), Shape(8192, 2048, 128256), Shape(8192, 1024, 151936))
# by what is called: of how many products, and the ways
CALLS = {
    CROSS_ENTROPY: (3, (BF16, LOGITS, LOGITS + KEPT, FP8, FP8 + KEPT)),
    FROZEN: (2, (BF16, LOGITS + KEPT, FP8 + KEPT)),
    LOGPROBS: (1, (BF16, FP8, FP8 + KEPT)),
}  # fmt: skip
_KEYS = ("shape", "head", "call", "way", "products", "status", "ms", "ratio", "peak_bytes", *fp8_errors.KEYS)


class Several:
    """Operands of several shapes."""

    def __init__(self, shapes: Sequence[Shape], args: Any) -> None:
        self.of_shape = {shape: fp8_errors.draw("flat", shape, args.device, args.dtype) for shape in shapes}

    def clear(self) -> None:
        for operands in self.of_shape.values():
            operands.clear()


def steps_of(operands: Operands, device: torch.device) -> dict[tuple[str, str], measure.Step]:
    """The steps of a shape, by what is called and the way."""
    frozen = Operands(operands.hidden, operands.weight.detach(), operands.target)
    copies, steps = {call: quantise(operands.weight) for call in CALLS}, dict[tuple[str, str], measure.Step]()
    copies[FROZEN] = quantise(frozen.weight)
    for call, (products, ways) in CALLS.items():
        function: Callable[..., Tensor] = linear_logprobs if call == LOGPROBS else linear_cross_entropy
        for way in ways:
            options = options_of(way.removesuffix(KEPT), device) | ({"fp8_weight": copies[call]} if KEPT in way else {})
            data = frozen if call == FROZEN else operands
            steps[call, way] = measure.Step(functools.partial(function, **options), data, backward=products > 1)
    return steps


def run_times(shapes: Sequence[Shape], args: Any, watch: Watch) -> list[Row]:
    """Rows of all shapes, whose steps take turns, and the peak memory of each."""
    operands = Several(shapes, args)
    floors: dict[str, Callable[[], Any]] = {
        f"{shape}, {name}": step for shape, of_shape in operands.of_shape.items()
        for name, step in measure.floor_steps(of_shape, args.device, {1, 2, 3}).items()
    }  # fmt: skip
    steps = {
        (shape, *key): step for shape, of_shape in operands.of_shape.items()
        for key, step in steps_of(of_shape, args.device).items()
    }  # fmt: skip
    timed = floors | {", ".join(map(str, key)): step for key, step in steps.items()}
    timed = {name: timed[name] for shape in shapes for name in timed if name.startswith(f"{shape}, ")}
    settling = [name for name in floors if name.endswith(measure.products_name(3))]
    watch.stage(f"first calls of {len(timed)} steps")
    times = records(timed, operands, args.device, args.rounds, watch.tick, watch.stage, settling)
    rows = [{"provider": name, "way": name} | times[name] for name in floors]
    del floors, timed  # the products' buffers
    for (shape, call, way), step in steps.items():
        products, row = CALLS[call][0], times[f"{shape}, {call}, {way}"]
        floor = times[f"{shape}, {measure.products_name(products)}"].get("ms")
        if floor and "ms" in row:
            watch.stage(f"{shape}: memory of {call}, {way}")
            peak, failure = measure.peak(step)
            row |= {"floor_ms": floor, "ratio": row["ms"] / floor}
            row |= {"memory_error": failure.record()} if failure else peak or {}
        record = {"provider": f"ours, {call}, {way}", "call": call, "way": way, "products": products}
        rows.append(command.describe(shape, args) | record | planned(shape, call, way, args) | row)
    return rows


def planned(shape: Shape, call: str, way: str, args: Any) -> Row:
    """Bytes that the plan predicts, and those of gradients; nothing for a copy of the caller's, which no plan has."""
    if KEPT in way:
        return {}
    options = options_of(way, args.device) | {"hidden_grad": call != LOGPROBS, "weight_grad": call == CROSS_ENTROPY}
    returns = ("logprobs",) if call == LOGPROBS else ()
    sizes = shape.tokens, shape.hidden, shape.vocab
    predicted = plan(*sizes, args.dtype, device=args.device, returns=returns, **options)
    return {"plan": {"peak_bytes": predicted.peak_bytes}, "gradient_bytes": predicted.gradient_bytes}


def _table(rows: Sequence[Row]) -> Table:
    if "head" in rows[0] or "call" not in rows[-1]:
        return fp8_errors.table(rows)
    lines = []
    for row in rows:
        expected = row.get("plan", {}).get("peak_bytes")
        memory = mebibytes(row.get("peak_bytes")), mebibytes(expected)
        settled = " ".join(f"{value:.2f}" for value in row.get("ms_seconds", ()))
        cells = number(row.get("ms")), number(row.get("ratio")), str(len(row.get("ms_rounds", ()))), *memory, settled
        lines.append([row.get("shape", ""), row.get("call", ""), row["way"], row["status"], *cells])
    columns = ("shape", "call", "way", "status", "ms", "of products", "rounds", "peak MiB", "plan's", "settled seconds")
    return command.table("times and memory", columns, lines, left=["call", "way"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status: 1 where a call failed."""
    parser = command.arguments("fp8", __doc__, shape=True, rounds=8)
    parser.add_argument(
        "--no-training", action="store_true", help="leave out fp8_training, which takes half of the time"
    )
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    if not args.gpu:
        args.dtype = torch.bfloat16
    sizes = command.sizes(args, SHAPES)
    jobs: list[command.Job] = [({"provider": "ours", "way": "all"}, functools.partial(run_times, sizes, args))]
    for kind, (hidden, vocab) in fp8_errors.HEADS.items():
        shape = Shape(fp8_errors.TOKENS, hidden, vocab) if args.gpu else Shape(32, 64, 512)
        record = command.describe(shape, args) | {"provider": "ours", "way": "all", "head": kind}
        jobs.append((record, functools.partial(run_errors, kind, shape, args)))
    status = command.run("fp8", args, jobs, args.rounds, _table, _KEYS)
    if args.no_training or importlib.util.find_spec("tokenizers") is None:
        return status
    fp8_training = importlib.import_module("benchmarks.fp8_training")
    path = command.results_path(args.output, "fp8", args.device)
    output = str(path.with_stem(f"{path.stem}-training"))
    return int(fp8_training.main(["--device", str(args.device), "--output", output]) or status)


def run_errors(kind: str, shape: Shape, args: Any, watch: Watch) -> list[Row]:
    watch.stage(f"{shape}: errors, {kind}")
    return fp8_errors.rows_of(kind, fp8_errors.draw(kind, shape, args.device, args.dtype), args)


if __name__ == "__main__":
    sys.exit(main())
