"""Errors of calls with `precision="fp8"` beside those without it, against float64, on heads of several kinds."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from benchmarks import accuracy, command, measure
from benchmarks.command import Row, number
from benchmarks.fp8_ways import HIDDEN, PLAIN, WAYS, options_of
from benchmarks.shapes import Operands, Shape
from chunked_head import linear_cross_entropy, quantise

TRAINED = "trained on text"
# heads drawn at random: their kind, and their size on a GPU
HEADS = {
    "flat": (4096, 128256),
    "half of the tokens sure": (4096, 128256),
    "Zipf's frequencies": (4096, 128256),
    "Zipf's, ids in any order": (4096, 128256),
    "Zipf's, short matmuls": (1024, 128256),
}
TOKENS = 2048
# the last two: rows of dweight that are no token's target, and the largest difference in another batch, in nats
ERRORS = ("logprob", "loss", "d_hidden", "d_weight", "others", "batch")
KEYS = tuple(f"{name}_error" for name in ERRORS)


def plain(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target, reduction=reduction)


def draw(kind: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Operands:
    """Draw operands whose logits have a standard deviation of 1.5.

    In Zipf's heads all hidden states also share a direction, whose logits are the ids' log-frequencies, and targets are
    drawn with the head's probabilities.
    """
    generator = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    hidden, weight = normal(shape.tokens, shape.hidden), normal(shape.vocab, shape.hidden) * 1.5 / shape.hidden**0.5
    target = torch.randint(shape.vocab, (shape.tokens,), generator=generator, device=device)
    if "sure" in kind:
        hidden[::2] += (14.0 * F.normalize(weight[target]))[::2]
    if "Zipf" in kind:
        frequency = 1.0 / torch.arange(1, shape.vocab + 1, device=device)
        if "any order" in kind:
            frequency = frequency[torch.randperm(shape.vocab, generator=generator, device=device)]
        common, length = F.normalize(normal(shape.hidden), dim=0), shape.hidden**0.5
        hidden += length * common
        weight += (frequency.log() / length)[:, None] * common
        probabilities = [(rows @ weight.T).softmax(1) for rows in hidden.split(512)]
        target = torch.cat([torch.multinomial(rows, 1, generator=generator)[:, 0] for rows in probabilities])
    return Operands(hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target)


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


def batch_error(operands: Operands, loss: Callable[..., Tensor]) -> float:
    """Return the largest difference, in nats, of a token's loss in two batches, with and without gradients.

    GRPO's ratio of these losses is off from 1 by as much.
    """
    hidden, weight, target = operands.hidden.detach(), operands.weight.detach(), operands.target
    picked = torch.randperm(len(target), device=target.device)[: len(target) // 3]
    nats = loss(hidden, weight, target, reduction="none")[picked]
    with_gradients = hidden[picked].requires_grad_(), operands.weight, target[picked]
    picked_nats = [
        loss(*batch, reduction="none").detach() for batch in ((hidden[picked], weight, target[picked]), with_gradients)
    ]
    return max(float((nats - others).abs().max()) for others in picked_nats)


def rows_of(kind: str, operands: Operands, args: Any) -> list[Row]:
    """A row for each way to call the head: plain PyTorch in bf16, whose logits are rounded, and ours."""
    shape = Shape(len(operands.hidden), operands.hidden.shape[1], len(operands.weight))
    exact = accuracy.reference(operands, torch.float64)
    copy = quantise(operands.weight, hidden=operands.hidden)
    ways: dict[str, Callable[..., Tensor]] = {PLAIN: plain}
    ways |= {way: functools.partial(linear_cross_entropy, **options_of(way, args.device)) for way in WAYS}
    ways[HIDDEN] = functools.partial(linear_cross_entropy, precision="fp8", fp8_weight=copy)
    rows = list[Row]()
    for way, loss in ways.items():

        def read(*batch: Tensor, loss: Callable[..., Tensor] = loss) -> tuple[Tensor, Tensor]:
            nats = loss(*batch, reduction="none")
            return -nats, nats

        errors = accuracy.errors(measure.Step(loss, operands), exact, read)
        errors |= {"others": others_error(operands, measure.Step(loss, operands), exact)}
        errors |= {"batch": batch_error(operands, loss)}
        record = command.describe(shape, args) | {"provider": f"ours, {way}", "way": way, "head": kind}
        record |= {"status": "ok", "nats": exact.loss} | {f"{name}_error": errors[name] for name in ERRORS}
        rows.append(record)
    return rows


def table(rows: Sequence[Row]) -> Table:
    lines = [[row["way"], row["status"], *(number(row.get(key), ".1e") for key in KEYS)] for row in rows]
    return command.table(f"{rows[0]['shape']} {rows[0]['head']}, errors", ("way", "status", *ERRORS), lines)
