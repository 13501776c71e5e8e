"""Time and errors of calls with `precision="fp8"` beside those without it: `python -m benchmarks fp8`.

Times are of cross-entropy through its backward, as ratios to three bare products, and of log-probabilities without
gradients, to one. Errors are against float64, of 2048 tokens: plain PyTorch's in bf16, whose logits are rounded, and
those of calls with and without the option.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from benchmarks import accuracy, command, measure
from benchmarks.command import Row, Watch, number
from benchmarks.rounds import time_with_products
from benchmarks.shapes import Operands, Shape
from chunked_head import linear_cross_entropy, linear_logprobs, quantise

SHAPES = (Shape(8192, 4096, 128256), Shape(8192, 2048, 128256), Shape(8192, 1024, 151936))
WAYS: dict[str, dict[str, Any]] = {"bf16": {}, "fp8": {"precision": "fp8"}, "fp8, weight kept": {"precision": "fp8"}}
# heads whose errors are measured: their kind, and their size on a GPU
HEADS = {
    "flat": (4096, 128256),
    "half of the tokens sure": (4096, 128256),
    "Zipf's frequencies": (4096, 128256),
    "Zipf's, ids in any order": (4096, 128256),
    "Zipf's, short matmuls": (1024, 128256),
}
ERRORS = ("logprob", "loss", "d_hidden", "d_weight")
_KEYS = ("shape", "head", "way", "products", "status", "ms", "ratio", *(f"{name}_error" for name in ERRORS))


def plain(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target, reduction=reduction)


def draw(kind: str, shape: Shape, args: Any) -> Operands:
    """Logits of standard deviation 1.5; of Zipf's heads beside what all hidden states have in common, which tells how
    frequent each id is, and targets as likely as the head says."""
    made = torch.Generator(args.device).manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=made, device=args.device)

    hidden, weight = normal(shape.tokens, shape.hidden), normal(shape.vocab, shape.hidden) * 1.5 / shape.hidden**0.5
    target = torch.randint(shape.vocab, (shape.tokens,), generator=made, device=args.device)
    if "sure" in kind:
        hidden[::2] += (14.0 * F.normalize(weight[target]))[::2]
    if "Zipf" in kind:
        frequency = 1.0 / torch.arange(1, shape.vocab + 1, device=args.device)
        if "any order" in kind:
            frequency = frequency[torch.randperm(shape.vocab, generator=made, device=args.device)]
        common, length = F.normalize(normal(shape.hidden), dim=0), shape.hidden**0.5
        hidden += length * common
        weight += (frequency.log() / length)[:, None] * common
        parts = [(part @ weight.T).softmax(1) for part in hidden.split(512)]
        target = torch.cat([torch.multinomial(p, 1, generator=made)[:, 0] for p in parts])
    return Operands(hidden.to(args.dtype).requires_grad_(), weight.to(args.dtype).requires_grad_(), target)


def run_times(shape: Shape, args: Any, watch: Watch) -> list[Row]:
    operands = draw("flat", shape, args)
    calls: dict[str, Callable[..., Tensor]] = {"cross-entropy": linear_cross_entropy, "logprobs": linear_logprobs}
    steps, products, rows = dict[str, Any](), dict[str, int](), list[Row]()
    for way, given in WAYS.items():
        options = given | ({"fp8_weight": quantise(operands.weight)} if "kept" in way else {})
        for name, call in calls.items():
            key = f"{name}, {way}"
            products[key] = 3 if name == "cross-entropy" else 1
            loss = functools.partial(call, **options)
            steps[key] = measure.Step(loss, operands, backward=products[key] == 3)
            rows.append(command.describe(shape, args) | {"provider": f"ours, {key}", "way": way})
    watch.stage(f"{shape}: {args.rounds} rounds")
    found = time_with_products(products, steps, operands, args.device, args.rounds, watch.tick)
    return [row | {"products": products[key]} | found[key] for row, key in zip(rows, steps, strict=True)]


def run_errors(kind: str, shape: Shape, args: Any, watch: Watch) -> list[Row]:
    watch.stage(f"{shape}: errors, {kind}")
    operands, rows = draw(kind, shape, args), list[Row]()
    exact = accuracy.reference(operands, torch.float64)
    ways: dict[str, Callable[..., Tensor]] = {"plain": plain}
    ways |= {way: functools.partial(linear_cross_entropy, **WAYS[way]) for way in ("bf16", "fp8")}
    for way, loss in ways.items():

        def read(*given: Tensor, loss: Callable[..., Tensor] = loss) -> tuple[Tensor, Tensor]:
            each = loss(*given, reduction="none")
            return -each, each

        found = accuracy.errors(measure.Step(loss, operands), exact, read)
        named = {f"{name}_error": found[name] for name in ERRORS} | {"nats": exact.loss}
        described = command.describe(shape, args) | {"provider": f"ours, {way}", "way": way, "head": kind}
        rows.append(described | {"status": "ok"} | named)
    return rows


def _table(rows: Sequence[Row]) -> Table:
    lines = [
        [row["way"], number(row.get("products"), "d"), row["status"], number(row.get("ms")), number(row.get("ratio"))]
        + [number(row.get(f"{name}_error"), ".1e") for name in ERRORS]
        for row in rows
    ]
    title = f"{rows[0]['shape']} {rows[0].get('head', '')}, ratios to bare products"
    return command.table(title, ("way", "of products", "status", "ms", "ratio", *ERRORS), lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status: 1 where a call failed."""
    parser = command.arguments("fp8", __doc__, shape=True, rounds=10)
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    if not args.gpu:
        args.dtype = torch.bfloat16
    sizes = command.sizes(args, SHAPES)
    jobs = command.over(sizes, args, run_times, provider="ours", way="all")
    for kind, (hidden, vocab) in HEADS.items():
        shape = Shape(2048, hidden, vocab) if args.gpu else Shape(32, 64, 512)
        record = command.describe(shape, args) | {"provider": "ours", "way": "all", "head": kind}
        jobs.append((record, functools.partial(run_errors, kind, shape, args)))
    return command.run("fp8", args, jobs, len(sizes) * args.rounds, _table, _KEYS)


if __name__ == "__main__":
    sys.exit(main())
