"""Times, memory and errors of calls with `precision="fp8"` beside those without it: `python -m benchmarks fp8`.

Times are ratios to bare products: of cross-entropy through its backward to three, of a head that takes no gradient to
two, of log-probabilities without gradients to one. All shapes' steps take turns on one GPU, whose clocks the bare
products settle; on flat data, which has no heavy ids, and on data as a trained head's (`shapes.py`). Errors are against
float64 (`fp8_errors.py`). Then `fp8_training.py` trains small models, and writes a file of its own.
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
from benchmarks.shapes import Operands, Shape, make_operands
from chunked_head import linear_cross_entropy, linear_logprobs, plan, quantise

SHAPES = (Shape(8192, 4096, 128256), Shape(8192, 2048, 128256), Shape(8192, 1024, 151936))
FLAT, TRAINED = "flat", "trained"
# by what is called: of how many products, and the ways
CALLS = {
    CROSS_ENTROPY: (3, (BF16, LOGITS, LOGITS + KEPT, FP8, FP8 + KEPT)),
    FROZEN: (2, (BF16, LOGITS + KEPT, FP8 + KEPT)),
    LOGPROBS: (1, (BF16, FP8, FP8 + KEPT)),
}  # fmt: skip
FLAT_ALONE = {(FROZEN, way) for way in CALLS[FROZEN][1]} | {(CROSS_ENTROPY, LOGITS + KEPT)}
_KEYS = ("shape", "data", "head", "call", "way", "products", "status", "ms", "ratio", "peak_bytes", *fp8_errors.KEYS)


class Several:
    """Operands of several shapes on two kinds of data."""

    def __init__(self, shapes: Sequence[Shape], args: Any) -> None:
        self.named = {
            (shape, data): make_operands(shape, args.dtype, args.device, data=data)
            for shape in shapes for data in (FLAT, TRAINED)
        }  # fmt: skip

    def clear(self) -> None:
        for operands in self.named.values():
            operands.clear()


def steps_of(operands: Operands, data: str, device: torch.device) -> dict[tuple[str, str], measure.Step]:
    """Make the steps of a shape on one kind of data, by call and way."""
    frozen = Operands(operands.hidden, operands.weight.detach(), operands.target)
    copy, steps = quantise(operands.weight), dict[tuple[str, str], measure.Step]()
    copies = {CROSS_ENTROPY: copy, LOGPROBS: copy, FROZEN: quantise(frozen.weight)}
    for call, (products, ways) in CALLS.items():
        function: Callable[..., Tensor] = linear_logprobs if call == LOGPROBS else linear_cross_entropy
        for way in ways:
            if data != FLAT and (call, way) in FLAT_ALONE:
                continue
            options = options_of(way.removesuffix(KEPT), device) | ({"fp8_weight": copies[call]} if KEPT in way else {})
            inputs = frozen if call == FROZEN else operands
            steps[call, way] = measure.Step(functools.partial(function, **options), inputs, backward=products > 1)
    return steps


def run_times(shapes: Sequence[Shape], args: Any, watch: Watch) -> list[Row]:
    """Time all shapes' steps in turns, and read the peak memory of those on flat data; return a row for each."""
    operands, rows = Several(shapes, args), list[Row]()
    steps, timed = dict[str, measure.Step](), dict[str, Any]()
    for (shape, data), inputs in operands.named.items():
        described = command.describe(shape, args) | {"data": data}
        counts = {1, 2, 3} if data == FLAT else {1, 3}
        for name, floor in measure.floor_steps(inputs, args.device, counts).items():
            key = f"{shape}, {data}, {name}"
            timed[key] = floor
            rows.append(described | {"provider": key, "way": name})
        for (call, way), step in steps_of(inputs, data, args.device).items():
            key, products = f"{shape}, {data}, {call}, {way}", CALLS[call][0]
            timed[key] = steps[key] = step
            record = {"provider": key.replace(str(shape), "ours", 1), "call": call, "way": way, "products": products}
            below = f"{shape}, {data}, {measure.products_name(products)}"
            rows.append(described | record | {"below": below} | planned(shape, call, way, args))
    settling = [name for name in timed if f"{FLAT}, {measure.products_name(3)}" in name]
    watch.stage(f"first calls of {len(timed)} steps")
    times = records(timed, operands, args.device, args.rounds, watch.tick, watch.stage, settling)
    keys = list(timed)
    timed.clear()  # with the products' buffers
    for key, row in zip(keys, rows, strict=True):
        row |= times[key]
        floor_ms = times.get(row.pop("below", ""), {}).get("ms")
        if floor_ms is not None and "ms" in row:
            row |= {"floor_ms": floor_ms, "ratio": row["ms"] / floor_ms}
        if key in steps and row["data"] == FLAT and row["status"] == "ok":
            watch.stage(f"memory of {key}")
            peak, failure = measure.peak(steps[key])
            row |= {"memory_error": failure.record()} if failure else peak or {}
    return rows


def planned(shape: Shape, call: str, way: str, args: Any) -> Row:
    """Return the plan's peak and the gradients' bytes; nothing for a kept copy, which no plan counts."""
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
        lines.append([row["shape"], row["data"], row.get("call", ""), row["way"], row["status"], *cells])
    columns = (
        "shape",
        "data",
        "call",
        "way",
        "status",
        "ms",
        "of products",
        "rounds",
        "peak MiB",
        "plan's",
        "settled seconds",
    )
    return command.table("times and memory", columns, lines, left=["data", "call", "way"])


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
