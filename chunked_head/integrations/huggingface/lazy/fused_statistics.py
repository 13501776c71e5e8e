"""Log-probabilities of lazy logits, for losses that a model's user writes himself: the library's, from one pass.

``log_softmax`` stays lazy; what is read from it, ``gather(-1, ids)`` and ``sum(-1)``, is a statistic of each row, as
are ``gather``, ``logsumexp`` and ``mean`` of the logits themselves.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....functions.logprobs import linear_logprobs
from .fused_loss import cross_entropy, head_of, wide
from .tail import Rehearsed, Tail, tail_of
from .virtual import Virtual

LOG_SOFTMAX = "log_softmax"
NONE = -(1 << 62)  # every id counts: an id out of range is an error, as gather has it


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


# remembers what was computed of the same logits, for ids [..., 1] or any
Cached = Callable[[Read, Tensor | None], Rows]


def log_softmax(v: Virtual, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(dim, int) or dim not in (-1, len(v.shape) - 1) or reading(v) is None:
        return NotImplemented
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    if dtype is None and torch.is_autocast_enabled(v.source.device_type):
        dtype = torch.empty(1, dtype=v.dtype, device=v.hidden.device).log_softmax(-1).dtype  # fp32 on a GPU
    return v.then(LOG_SOFTMAX, dtype).but(dtype=dtype or v.dtype)


def nll_loss(v: Virtual, *args: Any, **kwargs: Any) -> Any:
    """The cross-entropy of log-probabilities' logits, as ProphetNet writes it."""
    if not v.steps or v.steps[-1][0] != LOG_SOFTMAX:
        return NotImplemented
    logits = v.but(steps=v.steps[:-1])
    return cross_entropy(logits.then("cast", v.dtype), *args, **kwargs)


def reading(v: Virtual) -> Read | None:
    """The logits and the factor of what the steps make; None where statistics of rows do not tell it."""
    names = [name for name, _ in v.steps]
    at = names.index(LOG_SOFTMAX) if LOG_SOFTMAX in names else None
    factor = None
    if at is not None:
        factor = 1.0
        for name, argument in v.steps[at + 1 :]:
            if name not in ("mul", "div", "cast"):
                return None
            if name != "cast":
                factor = factor * argument if name == "mul" else factor / argument
    logits = v if at is None else v.but(steps=v.steps[:at])
    tail = tail_of(logits)
    if tail is None or not v.source.fuses or not v.source.head.reads_weight:
        return None
    return Read(logits, tail, factor)


def statistics(read: Read, ids: Tensor) -> Rows:
    """Differentiable, inside of the head's call as its hooks want it."""
    source = read.logits.source

    def inside(head: Any, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        options = head_of(source, read.tail, head)
        if source.patch.rehearsed is not None:
            call = Rehearsed(read.tail, hidden, options["weight"], options["bias"], source.autocast, read.logits.dtype)
            source.patch.rehearses(call)
            return tuple(hidden.new_empty(ids.shape, dtype=torch.float32, requires_grad=True) for _ in Rows._fields)
        target = ids.to(hidden.device)
        return tuple(linear_logprobs(hidden, target=target, lse=True, mean_logit=True, ignore_index=NONE, **options))

    return Rows(*source.inside(read.logits.hidden, inside))


def mean_logits(read: Read) -> Tensor:
    """Mean logits of a head without a cap [...], fp32 or wider; differentiable, inside of the head's call. The
    mean of a row is its product with the mean row of the weight: no pass over the logits."""
    source = read.logits.source

    def inside(head: Any, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        options = head_of(source, read.tail, head)
        dtype = wide(hidden.dtype)
        with torch.autocast(source.device_type, enabled=False):
            value = hidden.to(dtype) @ options["weight"].mean(0, dtype=dtype)
            value = value if options["bias"] is None else value + options["bias"].mean(dtype=dtype)
        return value * read.tail.logit_scale

    return source.inside(read.logits.hidden, inside)


def gather(v: Virtual, cached: Cached, dim: Any, index: Any) -> Any:
    """``gather(-1, ids)``, ids of one column."""
    read = reading(v)
    right = isinstance(index, Tensor) and isinstance(dim, int) and dim in (-1, len(v.shape) - 1)
    if read is None or not right or tuple(index.shape) != (*v.shape[:-1], 1):
        return NotImplemented
    rows = cached(read, index)
    value = rows.logprobs + rows.lse if read.factor is None else rows.logprobs * read.factor
    return value[..., None].to(v.dtype)


def reduction(of: Callable[[Read, Cached], Tensor], logprobs: bool = False, everything: bool = False) -> Any:
    """Over the vocabulary, of the logits or of log-probabilities; ``everything``: over all rows too."""

    def reduced(
        v: Virtual, cached: Cached, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Any:
        read, each = reading(v), dim in (-1, len(v.shape) - 1)
        if read is None or logprobs != (read.factor is not None):
            return NotImplemented
        if not each and not (everything and dim is None and not keepdim):
            return NotImplemented
        value = of(read, cached) if each else of(read, cached).mean()
        return (value[..., None] if keepdim else value).to(dtype or v.dtype)

    return reduced


def sum_of_logprobs(read: Read, cached: Cached) -> Tensor:
    rows = cached(read, None)
    assert read.factor is not None
    return (rows.mean_logit - rows.lse) * (read.factor * read.logits.vocab)


def mean(read: Read, cached: Cached) -> Tensor:
    return cached(read, None).mean_logit if read.tail.softcap else mean_logits(read)


# by the name of the tensor's method
STATISTICS: dict[str, Callable[..., Any]] = {
    "gather": gather, "logsumexp": reduction(lambda read, cached: cached(read, None).lse),
    "sum": reduction(sum_of_logprobs, logprobs=True), "mean": reduction(mean, everything=True),
}  # fmt: skip
