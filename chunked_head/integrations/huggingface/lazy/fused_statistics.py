"""Log-probabilities of lazy logits, for losses that a model's user writes himself: the library's, from one pass.

``log_softmax`` stays lazy; what is read from it, ``gather(-1, ids)`` and ``sum(-1)``, is a statistic of each row, as
are ``gather`` and ``logsumexp`` of the logits themselves.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....api.logprobs import linear_logprobs
from .fused_loss import cross_entropy, head_of
from .source import is_shard
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


def log_softmax(v: Virtual, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(dim, int) or dim not in (-1, len(v.shape) - 1) or reading(v) is None:
        return NotImplemented
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    if dtype is None and torch.is_autocast_enabled(v.source.device_type):
        dtype = torch.empty(1, dtype=v.dtype, device=v.hidden.device).log_softmax(-1).dtype  # fp32 on a GPU
    return v.then(LOG_SOFTMAX, dtype).but(dtype=dtype or v.dtype)


def nll_loss(v: Virtual, *args: Any, **kwargs: Any) -> Any:
    """Of log-probabilities: the cross-entropy of what they are of, as ProphetNet writes it."""
    if not v.steps or v.steps[-1][0] != LOG_SOFTMAX:
        return NotImplemented
    logits = v.but(steps=v.steps[:-1])
    return cross_entropy(logits.then("cast", v.dtype), *args, **kwargs)


def reading(v: Virtual) -> Read | None:
    """None where statistics of rows do not tell what the steps make."""
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
    # the mean of cropped logits is that of what is left; a filled one's would drown it
    if tail is None or tail.filled or not v.source.fuses or not v.source.head.reads_weight:
        return None
    return Read(logits, tail, factor)


def statistics(read: Read, ids: Tensor) -> Rows:
    """Differentiable, inside of the head's call as its hooks want it."""
    source = read.logits.source

    def inside(head: Any, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        weight = head.weight  # once: a parametrised one is computed each time
        if is_shard(weight):
            raise RuntimeError("log-probabilities of a sharded head's lazy logits; use logits.materialise()")
        options = head_of(source, read.tail, weight, head.bias)
        if source.patch.rehearsed is not None:
            call = Rehearsed(read.tail, hidden, options["weight"], options["bias"], source.autocast, read.logits.dtype)
            source.patch.rehearses(call)
            return tuple(hidden.new_empty(ids.shape, dtype=torch.float32, requires_grad=True) for _ in Rows._fields)
        return tuple(
            linear_logprobs(
                hidden, target=ids.to(hidden.device), lse=True, mean_logit=True, ignore_index=NONE, **options
            )
        )

    with source.state(), torch.set_grad_enabled(source.grad and torch.is_grad_enabled()):
        found = source.head.real(read.logits.hidden, chunked_head_loss=inside)
    return Rows(*found)


def gather(v: Virtual, cached: Callable[[Read, Tensor | None], Rows], dim: Any, index: Any) -> Any:
    """``gather(-1, ids)``, ids of one column."""
    read = reading(v)
    right = isinstance(index, Tensor) and isinstance(dim, int) and dim in (-1, len(v.shape) - 1)
    if read is None or not right or tuple(index.shape) != (*v.shape[:-1], 1):
        return NotImplemented
    rows = cached(read, index)
    value = rows.logprobs + rows.lse if read.factor is None else rows.logprobs * read.factor
    return value[..., None].to(v.dtype)


def logsumexp(v: Virtual, cached: Callable[[Read, Tensor | None], Rows], dim: Any, keepdim: bool = False) -> Any:
    read = reading(v)
    if read is None or read.factor is not None or dim not in (-1, len(v.shape) - 1):
        return NotImplemented
    lse = cached(read, None).lse.to(v.dtype)
    return lse[..., None] if keepdim else lse


def summed(
    v: Virtual,
    cached: Callable[[Read, Tensor | None], Rows],
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Of log-probabilities over the vocabulary: ``vocab * (mean logit - lse)``."""
    read = reading(v)
    if read is None or read.factor is None or dim not in (-1, len(v.shape) - 1):
        return NotImplemented
    rows = cached(read, None)
    value = ((rows.mean_logit - rows.lse) * (read.factor * v.vocab)).to(dtype or v.dtype)
    return value[..., None] if keepdim else value


# by the name of the tensor's method; each takes a function that remembers what was computed for the same logits
STATISTICS: dict[str, Callable[..., Any]] = {"gather": gather, "logsumexp": logsumexp, "sum": summed}
