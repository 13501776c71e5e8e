"""What a public function was asked for, and the signature of that: whatever of it no tensor's content decides."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..core.groups import TokenParallel, VocabParallel
from ..core.options import exact
from ..core.stats import Demand
from ..losses.base import FIELDS, KEPT_FIELDS, Field, Losses
from ..metrics import Metric
from ..plan.segments import Segments
from .head_options import HeadOptions, LogitsOptions

Result = TypeVar("Result")
Signature = tuple[Hashable, ...]
TENSORS = (Tensor, nn.Parameter)  # whose metadata say all there is to check; of a subclass's nobody knows
# types of options that are equal where they mean the same
OPTIONS = (type(None), bool, int, float, str, torch.dtype, VocabParallel, TokenParallel)


@dataclass(frozen=True, eq=False)
class Task(Generic[Result]):
    """A call as it was made: nothing checked, nothing computed. It runs at once, or as an operator of a graph.

    ``check`` raises what is wrong with options that this function alone has; ``options`` are those, as far as they are
    plain values. ``wants``: the statistics, from those that losses and metrics need. ``result``: from what ran to what
    the function returns, of outputs at their targets' places; for values per token it holds no tensor. ``per_token``:
    names of what the objective returns for each token, whose upstream gradients come late; none for a scalar loss.
    """

    function: str
    head: HeadOptions | LogitsOptions
    losses: Losses
    objective: Callable[[Any], Any]
    result: Callable[[Any], Result]
    metrics: tuple[Metric, ...] = ()
    batch: Mapping[str, Tensor] | None = None
    num_segments: int | None = None
    check: Callable[[], None] = lambda: None
    options: tuple[Hashable, ...] = ()
    wants: Callable[[Demand], Demand] = lambda needed: needed
    per_token: tuple[str, ...] = ()
    inplace: bool = False
    asked: Mapping[str, str] = field(default_factory=dict)  # the objective's options, by name
    kept_everywhere: bool = False  # whether every token that counts keeps a set of columns
    segments: Segments | None = None  # where the host knows them

    @property
    def numbers(self) -> str:
        """Numbers of the head, of losses and of metrics, which ``signature`` leaves out: equal text for equal ones."""
        parts = (*(summand for _, summand in self.losses.terms), *self.metrics)
        return repr((self.head.numbers, [part.settings for part in parts]))

    def alike(self) -> tuple[int, ...]:
        """For each loss and metric the first one at an equal temperature, 0 for the call's: which share a softmax."""
        parts = (*(summand for _, summand in self.losses.terms), *self.metrics)
        call = self.head.plain_temperature
        found = [call, *(call if part.temperature is None else part.temperature for part in parts)]
        return tuple(map(found.index, found))

    def signature(self) -> Signature | None:
        """Equal for calls that one program runs, but for its ``numbers``; None where it cannot be told."""
        head, batch, count = self.head, self.batch, self.num_segments
        batch = {} if batch is None else batch
        if not isinstance(batch, Mapping) or not (count is None or (type(count) is int and count > 0)):
            return None
        tensors = [tensor for tensor in (*head.operands, *batch.values()) if tensor is not None]
        if head.rows[0] is None or not all(type(tensor) in TENSORS for tensor in tensors):
            return None
        options = (*head.options, *self.options)
        kinds = tuple(map(type, (*options, *head.numbers)))
        if not all(kind in OPTIONS for kind in kinds) or type(head.shift) is not int:
            return None
        leading, terms, device = head.leading, self.losses.terms, head.device.type
        if device == "meta":
            return None
        rows, whole = head.rows, head.whole
        own = {name: kind for _, summand in terms for name, kind in summand.extra_fields.items()}
        held = [tensor for _, summand in terms for tensor in summand.tensors.values()]
        return (
            self.function, self.per_token,
            tuple([beginning(tensor, leading, "tokens") for tensor in rows]),
            tuple([metadata(tensor) for tensor in whole]),
            tuple([(name, field_of(name, value, own, leading, count)) for name, value in batch.items()]),
            tuple([
                (summand.signature, beginning(summand.weights, leading, "tokens"), isinstance(coefficient, Tensor))
                for coefficient, summand in terms
            ]),
            tuple([metadata(tensor) for tensor in held]),
            tuple([next(i for i, other in enumerate(held) if other is tensor) for tensor in held]),
            tuple([metric.signature for metric in self.metrics]),
            exact(options), kinds, self.alike(), self.kept_everywhere,
            len(leading), count is None,
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            torch.is_grad_enabled(),
        )  # fmt: skip


def metadata(tensor: Tensor | None) -> Hashable:
    """What checks look at."""
    if tensor is None:
        return None
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad


def beginning(tensor: Tensor | None, leading: tuple[int, ...], what: str) -> Hashable:
    """The same without the dimensions that a shape has in common with the target's, or with the number of segments:
    calls of other lengths have the same."""
    if tensor is None:
        return None
    shape = tuple(tensor.shape)
    if shape[: len(leading)] != leading:
        return metadata(tensor)
    return what, shape[len(leading) :], tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad


def field_of(
    name: str, value: Tensor, own: Mapping[str, Field], leading: tuple[int, ...], segments: int | None
) -> Hashable:
    if name in KEPT_FIELDS:  # of how many ids does not matter, and is another number at every step
        ahead = value.shape[0] - math.prod(leading) if name == "kept_offsets" and value.dim() else 0
        beside = tuple(value.shape[:-1]) == leading
        return value.dim(), ahead, beside, value.dtype, value.device, value.layout, value.requires_grad
    field = own.get(name) or FIELDS.get(name)
    if field is None:
        return metadata(value)
    if field.kind in ("token", "row"):
        return beginning(value, leading, "tokens")
    if field.kind == "pair":
        return beginning(value, tuple(value.shape[:1]), "pairs")
    return metadata(value) if segments is None else beginning(value, (segments,), "segments")
