"""Time and errors of calls with `precision="fp8"` beside those without it: `python -m benchmarks fp8`.

Times are of cross-entropy through its backward, as ratios to three bare products, and of log-probabilities without
gradients, to one. Errors are against float64, of 2048 tokens: plain PyTorch's in bf16, whose logits are rounded, and
those of calls with and without the option; with a copy whose direction is that of hidden states; and how much
log-probabilities of the same tokens differ in another batch.
"""

import functools
import importlib.util
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
TRAINED, STEPS, BATCH, CONTEXT = "trained on text", 1500, 16, 256
# heads whose errors are measured: their kind, and their size on a GPU
HEADS = {
    "flat": (4096, 128256),
    "half of the tokens sure": (4096, 128256),
    "Zipf's frequencies": (4096, 128256),
    "Zipf's, ids in any order": (4096, 128256),
    "Zipf's, short matmuls": (1024, 128256),
    TRAINED: (512, 16384),
}
# the last two: rows of dweight that are no token's target, and the largest difference in another batch, in nats
ERRORS = ("logprob", "loss", "d_hidden", "d_weight", "others", "batch")
_KEYS = ("shape", "head", "way", "products", "status", "ms", "ratio", *(f"{name}_error" for name in ERRORS))


def plain(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target, reduction=reduction)


def draw(kind: str, shape: Shape, args: Any) -> Operands:
    """Logits of standard deviation 1.5; of Zipf's heads beside what all hidden states have in common, which tells how
    frequent each id is, and targets as likely as the head says."""
    if kind == TRAINED:
        return train(shape, args)
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


def train(shape: Shape, args: Any) -> Operands:
    """The head of a small language model after some steps on text, and hidden states of text that it has not seen."""
    from benchmarks import demo_data, demo_model  # which need packages that the rest does not

    steps = STEPS if args.gpu else 2
    text = demo_data.tokenize_text(demo_data.load_text(None), shape.vocab, CONTEXT)
    training, held_out = (torch.from_numpy(ids).long().to(args.device) for ids in (text.training, text.held_out))
    torch.manual_seed(1)
    model = demo_model.Decoder(demo_model.ModelConfig(shape.vocab, shape.hidden, 4, CONTEXT)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    offsets = torch.arange(CONTEXT + 1, device=args.device)
    for step in range(steps):
        first = torch.randint(len(training) - CONTEXT, (BATCH, 1), device=args.device)
        windows = training[first + offsets]
        with torch.autocast(args.device.type, torch.bfloat16):
            loss = linear_cross_entropy(model(windows[:, :-1]), model.lm_head.weight, windows[:, 1:])
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 100)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), torch.autocast(args.device.type, torch.bfloat16):
        windows = held_out[: -(-shape.tokens // CONTEXT) * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)
        hidden = model(windows[:, :-1]).flatten(0, 1)[: shape.tokens]
    weight = model.lm_head.weight.detach().to(args.dtype)
    target = windows[:, 1:].flatten()[: shape.tokens]
    return Operands(hidden.to(args.dtype).requires_grad_(), weight.requires_grad_(), target)


def others_error(operands: Operands, step: measure.Step, exact: accuracy.Reference) -> float:
    """Relative error of the rows of dweight that are no token's target."""
    operands.clear()
    step()
    assert operands.weight.grad is not None
    is_other = torch.ones(len(operands.weight), dtype=torch.bool, device=operands.weight.device)
    is_other[operands.target] = False
    error = accuracy.relative_error(operands.weight.grad[is_other], exact.d_weight[is_other], step.upstream)
    operands.clear()
    return error


@torch.no_grad()
def batch_error(operands: Operands, loss: Callable[..., Tensor]) -> float:
    """The largest difference of tokens' losses from those of the same tokens among others, in nats."""
    hidden, weight, target = operands.hidden.detach(), operands.weight.detach(), operands.target
    picked = torch.randperm(len(target), device=target.device)[: len(target) // 3]
    batches = (hidden, target), (hidden[picked], target[picked])
    nats, picked_nats = (loss(h, weight, t, reduction="none") for h, t in batches)
    return float((nats[picked] - picked_nats).abs().max())


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
    fp8_weight: dict[str, Any] = {"fp8_weight": quantise(operands.weight, hidden=operands.hidden)}
    ways: dict[str, Callable[..., Tensor]] = {"plain": plain}
    ways |= {way: functools.partial(linear_cross_entropy, **WAYS[way]) for way in ("bf16", "fp8")}
    ways["fp8, hidden given"] = functools.partial(linear_cross_entropy, **WAYS["fp8"], **fp8_weight)
    ways["fp8, deterministic"] = functools.partial(linear_cross_entropy, **WAYS["fp8"], deterministic=args.gpu)
    for way, loss in ways.items():

        def read(*given: Tensor, loss: Callable[..., Tensor] = loss) -> tuple[Tensor, Tensor]:
            each = loss(*given, reduction="none")
            return -each, each

        found = accuracy.errors(measure.Step(loss, operands), exact, read)
        found |= {"others": others_error(operands, measure.Step(loss, operands), exact)}
        found |= {"batch": batch_error(operands, loss)}
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
        if kind == TRAINED and importlib.util.find_spec("tokenizers") is None:
            continue
        record = command.describe(shape, args) | {"provider": "ours", "way": "all", "head": kind}
        jobs.append((record, functools.partial(run_errors, kind, shape, args)))
    return command.run("fp8", args, jobs, len(sizes) * args.rounds, _table, _KEYS)


if __name__ == "__main__":
    sys.exit(main())
