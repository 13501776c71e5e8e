"""Cross-entropy and statistics of lazy logits, computed inside of the head's own call, so that every hook of it runs.

Losses that a user writes himself read log-probabilities: ``log_softmax`` stays lazy, and ``gather(-1, ids)`` and
``sum(-1)`` of it are statistics of each row, as are ``gather``, ``logsumexp`` and ``mean`` of the logits themselves.
One pass makes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ... import losses
from ...core.checks import is_dtensor
from ...functions.logprobs import linear_logprobs
from ...functions.loss import linear_loss, logits_loss
from ...losses.base import Losses
from ...metrics import Metric
from .source import Source, changed, running, version
from .virtual import Rehearsed, Tail, Virtual, replay, tail_of

BYTES_AT_ONCE = 256 << 20  # of logits where a head's own forward computes them
COPIES_OF_LOGITS = 4  # of a chunk in fp32: its cast, log-probabilities, gradient
LOG_SOFTMAX = "log_softmax"
NONE = -(1 << 62)  # every id counts: an id out of range is an error, as gather has it


def rows_at_once(columns: int) -> int:
    """The number of rows in a chunk of real logits."""
    return max(1, BYTES_AT_ONCE // (columns * torch.float32.itemsize * COPIES_OF_LOGITS))


@dataclass(frozen=True, eq=False)
class LazyLoss:
    """A cross-entropy of lazy logits, with its options."""

    source: Source
    tail: Tail
    steps: tuple[tuple[str, Any], ...]
    target: Tensor
    ignore_index: int
    reduction: str
    class_weights: Tensor | None  # of the cross-entropy
    loss: Losses
    measured: Sequence[Metric]

    def from_weight(self, module: Any, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss from the head's weight; called inside of the head's call."""
        if is_dtensor(module._parameters.get("weight")):  # inside of the head's hooks too
            return self.by_chunks(hidden, forward)
        head = head_of(self.source, self.tail, module)
        if self.source.agreement.rehearsed is not None:
            return self.rehearse(hidden, head["weight"], head["bias"])
        head |= {"target": self.target.to(hidden.device), "ignore_index": self.ignore_index}
        output = linear_loss(hidden, loss=self.loss, metrics=self.measured, reduction=self.reduction, **head)
        self.source.agreement.add_metrics(output)
        return output.loss

    def rehearse(self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """A loss without a number, of hidden states without numbers."""
        source = self.source
        casts = [argument for name, argument in self.steps if name == "cast"]
        read = torch.float32 if source.autocast is not None else (source.output.dtype, *casts)[-1]
        call = Rehearsed(self.tail, hidden, weight, bias, source.autocast, read, self.loss, self.reduction)
        source.agreement.note_rehearsed(call)
        shape = self.target.shape if self.reduction == "none" else ()
        return hidden.new_empty(shape, dtype=wide(hidden.dtype), requires_grad=True)

    def by_chunks(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss through the head's own forward, some rows at a time, computed again in backward: for heads that
        are more than a matrix (adapters, quantised weights, shards)."""
        agreement = self.source.agreement
        if any(summand.normalizer is not None or summand.reduction is not None for _, summand in self.loss.terms):
            name = f"{agreement.name}, a {type(agreement.head).__name__}"
            raise ValueError(f"loss= with a normalizer or reduction of its own does not go with {name}")
        if agreement.rehearsed is not None:
            return self.rehearse(hidden, None, None)
        rows, target = hidden.reshape(-1, hidden.shape[-1]), self.target.reshape(-1)
        chunk_rows = rows_at_once(self.source.output.columns)
        chunks = zip(rows.split(chunk_rows), target.split(chunk_rows), strict=True)
        values = [checkpoint(self.chunk_loss, head, *chunk, [], use_reentrant=False) for chunk in chunks]
        if self.reduction == "none":
            return torch.cat(values).reshape(self.target.shape)
        total = torch.stack(values).sum()
        return total if self.reduction == "sum" else total / counted(self)

    def chunk_loss(
        self, head: Callable[[Tensor], Tensor], rows: Tensor, ids: Tensor, first_versions: list[Any]
    ) -> Tensor:
        """The sum of the loss over some rows. ``first_versions``: empty in the forward pass, which fills it; in
        backward the checkpoint calls again, and the same versions show that no operand was written to."""
        is_repeated, agreement = bool(first_versions), self.source.agreement
        if not torch.compiler.is_compiling():  # a graph's tensors are values, which nothing writes to
            versions = [version(tensor) for tensor in (rows, ids, self.class_weights) if tensor is not None]
            if is_repeated and (first_versions != versions or changed(self.source.head, self.source.parameters)):
                raise RuntimeError(
                    f"{agreement.model}'s loss is computed again in backward, and hidden states, targets, class "
                    "weights or the head's parameters have been modified by an inplace operation "
                    "since; call backward before"
                )
            first_versions[:] = versions
        logits = replay(self.source.output.checked(head(rows)), self.steps)
        reduction = "none" if self.reduction == "none" else "sum"
        options: Any = {"metrics": self.measured, "ignore_index": self.ignore_index, "reduction": reduction}
        output = logits_loss(logits, ids, self.loss, **options)
        if not is_repeated:
            agreement.add_metrics(output)
        return output.loss


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
    """``F.cross_entropy`` of lazy logits and class ids; NotImplemented for other targets and shapes."""
    tail, source = tail_of(logits), logits.source
    rows = tuple(logits.shape[:-1])
    is_plain = size_average is None and reduce is None and isinstance(target, Tensor)
    # PyTorch's classes are the second dimension: the last of one or two
    if not is_plain or len(rows) > 1 or tuple(target.shape) != rows or target.is_floating_point():
        return NotImplemented
    if tail is None or not source.fuses:
        return NotImplemented
    rounded = not torch.is_autocast_enabled(source.device_type)  # autocast computes a cross-entropy in fp32
    target = target.to(logits.hidden.device, torch.int64)
    smoothing, agreement, measured = float(label_smoothing), source.agreement, ()
    loss, by_model = losses.cross_entropy(smoothing, weight), running(source.head) is agreement
    if by_model and agreement.loss_argument:  # loss= and metrics= have no part in a loss outside of the forward
        if reduction == "none":
            raise ValueError("loss= and metrics= of patch_model go with a mean or a sum; this model reduces by itself")
        if agreement.loss is not None and (weight is not None or smoothing):
            raise ValueError(
                f"{agreement.model}'s own cross-entropy has class weights or label smoothing, which loss= would drop; "
                "give them to losses.cross_entropy in loss="
            )
        loss, measured = agreement.loss or loss, agreement.measured
    request = LazyLoss(source, tail, logits.steps, target, ignore_index, reduction, weight, loss, measured)
    if source.head.reads_weight:
        value = source.in_call(logits.hidden, request.from_weight)
    else:
        with source.loss_state():
            value = request.by_chunks(logits.hidden, source.call)
    agreement.count_loss(tail, by_model)
    return value.to(logits.dtype if rounded else wide(logits.dtype))


def head_of(source: Source, tail: Tail, head: Any) -> dict[str, Any]:
    """Options of this library's functions: the head's operands, the tail, and the options of ``patch_model``."""
    weight = head.weight  # once: a parametrised one is computed each time
    if is_dtensor(weight):
        raise RuntimeError("the head's weight is sharded where its logits are read; use logits.materialise()")
    if weight.shape[0] != source.output.columns:
        raise RuntimeError(
            f"the head's weight has {weight.shape[0]} rows where {source.output.columns} were expected; if a sharding "
            "framework holds a part of it, its hooks have to run around the head's call"
        )
    cropped = weight if tail.vocab is None else weight[: tail.vocab]
    options = {"weight": cropped, "bias": tail.bias(head.bias, weight), "softcap": tail.softcap}
    return options | {"logit_scale": tail.logit_scale, **source.agreement.options}


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def counted(loss: LazyLoss) -> Tensor:
    """The denominator of a mean over tokens; 1 if no token counts."""
    counts = loss.target != loss.ignore_index
    if loss.class_weights is None:
        return counts.sum().clamp(min=1)
    weights = loss.class_weights[loss.target.where(counts, 0)].where(counts, 0).sum()
    return weights.where(weights != 0, 1)


class Rows(NamedTuple):
    """Statistics of each row [...], for ids [...]."""

    logprobs: Tensor
    lse: Tensor
    mean_logit: Tensor


class Read(NamedTuple):
    """Lazy logits, or their log-probabilities times a factor."""

    logits: Virtual
    tail: Tail
    factor: float | None  # None: of the logits themselves


# statistics of rows for ids [..., 1], or for any ids where that is None; those computed last where they serve
Cached = Callable[[Read, Tensor | None], Rows]


def log_softmax(v: Virtual, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(dim, int) or dim not in (-1, len(v.shape) - 1) or reading(v) is None:
        return NotImplemented
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    if dtype is None and torch.is_autocast_enabled(v.source.device_type):
        dtype = torch.empty(1, dtype=v.dtype, device=v.hidden.device).log_softmax(-1).dtype  # fp32 on a GPU
    return v.with_step(LOG_SOFTMAX, dtype).with_fields(dtype=dtype or v.dtype)


def nll_loss(v: Virtual, *args: Any, **kwargs: Any) -> Any:
    """``F.nll_loss`` of lazy log-probabilities, as ProphetNet calls it: the cross-entropy of their logits."""
    if not v.steps or v.steps[-1][0] != LOG_SOFTMAX:
        return NotImplemented
    logits = v.with_fields(steps=v.steps[:-1])
    return cross_entropy(logits.with_step("cast", v.dtype), *args, **kwargs)


def reading(v: Virtual) -> Read | None:
    """The lazy logits or log-probabilities that ``v`` is, for statistics of rows; None if its steps are of another
    kind."""
    names = [name for name, _ in v.steps]
    position = names.index(LOG_SOFTMAX) if LOG_SOFTMAX in names else None
    factor = None
    if position is not None:
        factor = 1.0
        for name, argument in v.steps[position + 1 :]:
            if name not in ("mul", "div", "cast"):
                return None
            if name != "cast":
                factor = factor * argument if name == "mul" else factor / argument
    logits = v if position is None else v.with_fields(steps=v.steps[:position])
    tail = tail_of(logits)
    if tail is None or not v.source.fuses or not v.source.head.reads_weight:
        return None
    return Read(logits, tail, factor)


def outputs_of(read: Read, ids: Tensor, **results: bool) -> tuple[Tensor, ...]:
    """Results of ``linear_logprobs`` for ids [...], computed inside of the head's call. ``results``: its flags of
    further results, such as ``lse=True``."""
    source = read.logits.source

    def compute(head: Any, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        options = head_of(source, read.tail, head)
        if source.agreement.rehearsed is not None:
            call = Rehearsed(read.tail, hidden, options["weight"], options["bias"], source.autocast, read.logits.dtype)
            source.agreement.note_rehearsed(call)
            return tuple(hidden.new_empty(ids.shape, dtype=torch.float32, requires_grad=True) for _ in (ids, *results))
        options |= {"target": ids.to(hidden.device), "ignore_index": NONE, **results}
        return tuple(linear_logprobs(hidden, **options))

    outputs: tuple[Tensor, ...] = source.in_call(read.logits.hidden, compute)
    return outputs


def mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Mean logits of a head without a cap [...], fp32 or wider: products with the mean row of the weight, which take
    less than a pass over the logits."""
    dtype = wide(hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        mean = hidden.to(dtype) @ weight.mean(0, dtype=dtype)
        return mean if bias is None else mean + bias.mean(dtype=dtype)


def gather(v: Virtual, cached: Cached, dim: Any, index: Any) -> Any:
    """``gather(-1, ids)``, ids of one column."""
    read = reading(v)
    right = isinstance(index, Tensor) and isinstance(dim, int) and dim in (-1, len(v.shape) - 1)
    if read is None or not right or tuple(index.shape) != (*v.shape[:-1], 1):
        return NotImplemented
    rows = cached(read, index)
    value = rows.logprobs + rows.lse if read.factor is None else rows.logprobs * read.factor
    return value[..., None].to(v.dtype)


def reduction(statistic: Callable[[Read, Cached], Tensor], logprobs: bool = False, everything: bool = False) -> Any:
    """A tensor's method that reduces lazy logits, with ``logprobs`` log-probabilities, over the vocabulary to
    ``statistic``. ``everything``: without a dimension, the method also takes the mean over all rows."""

    def reduced(
        v: Virtual, cached: Cached, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Any:
        read, is_per_row = reading(v), dim in (-1, len(v.shape) - 1)
        if read is None or logprobs != (read.factor is not None):
            return NotImplemented
        if not is_per_row and not (everything and dim is None and not keepdim):
            return NotImplemented
        value = statistic(read, cached) if is_per_row else statistic(read, cached).mean()
        return (value[..., None] if keepdim else value).to(dtype or v.dtype)

    return reduced


def sum_of_logprobs(read: Read, cached: Cached) -> Tensor:
    rows = cached(read, None)
    assert read.factor is not None
    return (rows.mean_logit - rows.lse) * (read.factor * read.logits.vocab)


def mean(read: Read, cached: Cached) -> Tensor:
    if read.tail.softcap:
        return cached(read, None).mean_logit
    source = read.logits.source

    def compute(head: Any, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        options = head_of(source, read.tail, head)
        return mean_logits(hidden, options["weight"], options["bias"]) * read.tail.logit_scale

    return source.in_call(read.logits.hidden, compute)


# by the name of the tensor's method
STATISTICS: dict[str, Callable[..., Any]] = {
    "gather": gather, "logsumexp": reduction(lambda read, cached: cached(read, None).lse),
    "sum": reduction(sum_of_logprobs, logprobs=True), "mean": reduction(mean, everything=True),
}  # fmt: skip
