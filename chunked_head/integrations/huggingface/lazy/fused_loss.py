"""The cross-entropy of lazy logits: the library's, inside of the head's own call, so that every hook of it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .... import losses
from ....functions.cross_entropy import linear_cross_entropy
from ....functions.logits_loss import logits_loss
from ....functions.loss import linear_loss
from ....losses.base import Losses
from .source import Source, changed, is_shard, running, version
from .tail import Rehearsed, Tail, tail_of
from .virtual import Virtual, replay

BYTES_AT_ONCE = 256 << 20  # of logits where a head's own forward computes them
COPIES_OF_LOGITS = 4  # of a chunk in fp32: its cast, log-probabilities, gradient


def rows_at_once(columns: int) -> int:
    """Rows of a chunk of real logits."""
    return max(1, BYTES_AT_ONCE // (columns * torch.float32.itemsize * COPIES_OF_LOGITS))


@dataclass(frozen=True, eq=False)
class LazyLoss:
    """A cross-entropy of lazy logits, with its options. ``own``: made by the model inside of its forward; any other
    stays a plain cross-entropy."""

    source: Source
    tail: Tail
    steps: tuple[tuple[str, Any], ...]
    target: Tensor
    class_weights: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    own: bool

    @property
    def plain(self) -> bool:
        return not self.own or not self.source.patch.asks

    def from_weight(self, module: Any, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss from the head's weight; called inside of the head's call."""
        patch = self.source.patch
        if is_shard(module._parameters.get("weight")):  # inside of the head's hooks too
            return self.by_chunks(hidden, forward)
        head = head_of(self.source, self.tail, module)
        if patch.rehearsed is not None:
            return self.rehearse(hidden, head["weight"], head["bias"])
        head |= {"target": self.target.to(hidden.device), "ignore_index": self.ignore_index}
        if self.plain:
            return linear_cross_entropy(
                hidden, class_weights=self.class_weights, reduction=self.reduction,
                label_smoothing=self.label_smoothing, **head,
            )  # fmt: skip
        found = linear_loss(
            hidden, loss=self.loss(self.reduction), metrics=patch.measured, reduction=self.reduction, **head
        )
        patch.takes(found)
        return found.loss

    def loss(self, reduction: str) -> Losses:
        """The losses in the place of the model's cross-entropy."""
        return self.source.patch.loss_of(self.class_weights, self.label_smoothing, reduction)

    def rehearse(self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """A loss without a number, of hidden states without numbers."""
        source = self.source
        if self.plain:
            loss = losses.cross_entropy(self.label_smoothing, self.class_weights)
        else:
            loss = self.loss(self.reduction)
        casts = [argument for name, argument in self.steps if name == "cast"]
        read = torch.float32 if source.autocast is not None else (hidden.dtype, *casts)[-1]
        call = Rehearsed(self.tail, hidden, weight, bias, source.autocast, read, loss, self.reduction)
        source.patch.rehearses(call)
        shape = self.target.shape if self.reduction == "none" else ()
        return hidden.new_empty(shape, dtype=wide(hidden.dtype), requires_grad=True)

    def by_chunks(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss through the head's own forward, some rows at a time, computed again in backward: for heads that
        are more than a matrix (adapters, quantised weights, shards)."""
        self.source.patch.check_by_chunks()
        if self.source.patch.rehearsed is not None:
            return self.rehearse(hidden, None, None)
        rows, target = hidden.reshape(-1, hidden.shape[-1]), self.target.reshape(-1)
        chunk = rows_at_once(self.source.head.columns)
        parts = zip(rows.split(chunk), target.split(chunk), strict=True)
        pieces = [checkpoint(self.part, head, *part, [], use_reentrant=False) for part in parts]
        if self.reduction == "none":
            return torch.cat(pieces).reshape(self.target.shape)
        total = torch.stack(pieces).sum()
        return total if self.reduction == "sum" else total / counted(self)

    def part(self, head: Callable[[Tensor], Tensor], rows: Tensor, ids: Tensor, before: list[Any]) -> Tensor:
        """The sum over some rows; ``before`` remembers of what it was computed, for the second time in backward."""
        again, patch = bool(before), self.source.patch
        if not torch.compiler.is_compiling():  # whose graphs are of values
            written = [version(given) for given in (rows, ids, self.class_weights) if given is not None]
            if again and (before != written or changed(self.source.head, self.source.parameters)):
                raise RuntimeError(
                    f"{patch.model}'s loss is computed again in backward, and hidden states, targets, class weights or "
                    "the head's parameters have been modified by an inplace operation since; call backward before"
                )
            before[:] = written
        real = replay(head(rows), self.steps)
        if self.plain:
            values = F.cross_entropy(
                real, ids, self.class_weights, ignore_index=self.ignore_index, reduction="none",
                label_smoothing=self.label_smoothing,
            )  # fmt: skip
            # float16 does not hold the sum of many tokens
            return values if self.reduction == "none" else values.sum(dtype=wide(values.dtype))
        reduction = "none" if self.reduction == "none" else "sum"
        found = logits_loss(
            real, ids, self.loss(reduction), metrics=patch.measured, reduction=reduction, ignore_index=self.ignore_index
        )
        if not again:
            patch.takes(found)
        return found.loss


def cross_entropy(
    logits: Virtual,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``F.cross_entropy`` of class ids; NotImplemented where it is another one."""
    tail, source = tail_of(logits), logits.source
    rows = tuple(logits.shape[:-1])
    plain = size_average is None and reduce is None and isinstance(target, Tensor)
    # PyTorch's classes are the second dimension: the last of one or two
    if not plain or len(rows) > 1 or tuple(target.shape) != rows or target.is_floating_point():
        return NotImplemented
    if tail is None or not source.fuses:
        return NotImplemented
    rounded = not torch.is_autocast_enabled(source.device_type)  # autocast computes a cross-entropy in fp32
    target = target.to(logits.hidden.device, torch.int64)
    own = running(source.head) is source.patch
    request = LazyLoss(source, tail, logits.steps, target, weight, ignore_index, reduction, float(label_smoothing), own)
    if source.head.reads_weight:
        loss = source.inside(logits.hidden, request.from_weight)
    else:
        with source.taken():
            loss = request.by_chunks(logits.hidden, source.head.real)
        rounded = False  # a forward of its own may give other dtypes than it takes
    loss = loss.to(logits.dtype if rounded else wide(logits.dtype))
    source.patch.fuses(tail, own)
    return loss


def head_of(source: Source, tail: Tail, head: Any) -> dict[str, Any]:
    """The head with what the model does behind it, as options of this library's functions."""
    weight = head.weight  # once: a parametrised one is computed each time
    if is_shard(weight):
        raise RuntimeError("the head's weight is sharded where its logits are read; use logits.materialise()")
    if weight.shape[0] != source.head.columns:
        raise RuntimeError(
            f"the head's weight has {weight.shape[0]} rows where {source.head.columns} were expected; if a sharding "
            "framework holds a part of it, its hooks have to run around the head's call"
        )
    cropped = weight if tail.vocab is None else weight[: tail.vocab]
    given = {"weight": cropped, "bias": tail.bias(head.bias, weight), "softcap": tail.softcap}
    return given | {"logit_scale": tail.logit_scale, **source.patch.options}


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def counted(loss: LazyLoss) -> Tensor:
    """The denominator of a mean, 1 where nothing counts."""
    counts = loss.target != loss.ignore_index
    if loss.class_weights is None:
        return counts.sum().clamp(min=1)
    weights = loss.class_weights[loss.target.where(counts, 0)].where(counts, 0).sum()
    return weights.where(weights != 0, 1)
