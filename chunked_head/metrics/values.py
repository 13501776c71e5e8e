"""Metrics and their values: sums and counts, or extrema, that add up over micro-batches and ranks.

Both reduce correctly over micro-batches (``combine``) and ranks (``all_reduce``); only ``MetricValue.value`` divides.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypedDict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..core.checks import INFINITY, choice, number
from ..losses.base import Measure, is_library
from ..losses.user import declared_fields
from ..losses.user_checks import check_metric

Reduce = Literal["mean", "max", "min"]
Weighting = Literal["token", "segment", "document"]
OF_NOTHING = {"mean": 0.0, "max": -INFINITY, "min": INFINITY}  # the sum, or the extremum, of no values
Finish = Literal["mean", "perplexity", "effective_sample_size", "effective_sample_fraction", "share", "difference"]
COMPONENTS = {"effective_sample_size": 2, "effective_sample_fraction": 2, "share": 2, "difference": 4}  # where not 1


class MetricOptions(TypedDict, total=False):
    """Options of every metric.

    ``weighting``, of a mean: ``"token"`` over all tokens; ``"segment"``, ``"document"`` over segments (documents) with
    a token, of the mean over each one's tokens, by the token fields ``segments`` and ``documents``, in which -1 means
    none. ``temperature`` divides the logits that the metric sees (None: the call's). ``name`` is the key in
    ``out.metrics``.
    """

    weighting: Weighting
    temperature: float | None
    name: str | None


@dataclass(frozen=True, eq=False, repr=False)
class Metric(Measure):
    """``function(stats, batch, **options)`` gives values per unit, [n]. ``fields`` as in ``losses.custom``.

    A function of your own runs once on some made-up tokens, as in ``losses.custom``: it must return a number for each
    unit and, with ``scope="token"``, the same for all tokens at once as for two pieces of them. ``check=False`` leaves
    that out.
    """

    unit: Literal["token", "segment", "pair"] = "token"
    reduce: Reduce = "mean"
    weighting: Weighting = "token"  # of unit token; the mean of segments is over those with a token
    finish: Finish = "mean"  # from sums and count to .value
    check: bool = True
    # numbers per unit: the value, its square for a sample size, flags for shares and differences of means
    components: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        components = COMPONENTS.get(self.finish, 1)
        object.__setattr__(self, "components", components)
        object.__setattr__(self, "width", components * self.width)
        where = f"metrics.{self.kind}"
        if not isinstance(self.fields, tuple):  # as ``losses.custom`` takes them
            names, extra = declared_fields(where, self.fields)
            object.__setattr__(self, "fields", names)
            object.__setattr__(self, "extra_fields", {**extra, **self.extra_fields})
        for option, allowed in CHOICES:
            choice(where, option, getattr(self, option), allowed)
        if self.unit != "token" and self.scope != "segment":
            raise ValueError(f'{where} has values per {self.unit}, which need all tokens: scope="segment"')
        if self.finish in ("share", "difference") and not is_library(self.function):
            raise ValueError(f"finish={self.finish!r} of {where} is of several numbers per unit; a function gives one")
        plain = self.unit == "token" and self.reduce == "mean" and self.components == 1
        if self.weighting != "token" and not plain:
            raise ValueError(
                f"weighting of {where} is that of a mean over tokens; here it has no meaning; leave it out"
            )
        if self.temperature is not None:
            number(where, "temperature", self.temperature, 0.0, open_=True)
        if self.weighting != "token" and self.ids not in self.fields:
            object.__setattr__(self, "fields", (*self.fields, self.ids))
        if self.check and not is_library(self.function):
            check_metric(self)

    @property
    def key(self) -> tuple:
        """A key: equal for metrics that compile to the same code."""
        code, _ = self.key_and_numbers
        return code, self.unit, self.reduce, self.weighting, self.components, self.scope, self.reads_target

    @functools.cached_property
    def signature(self) -> Hashable:
        """A key: equal for metrics that differ in numbers at most."""
        return self.key, self.reads, self.finish

    @property
    def ids(self) -> str:
        """Name of the field of ids over which the weighting takes means."""
        return "documents" if self.weighting == "document" else "segments"


def as_metrics(metrics: Any) -> tuple[Metric, ...]:
    """A call's metrics as a tuple; TypeError where ``metrics`` is no list of them."""
    if not isinstance(metrics, Iterable) or isinstance(metrics, str | Mapping | Tensor):
        description = f"{metrics!r}; leave it out for none"
        if isinstance(metrics, Metric):
            description = f"one, {metrics.label!r}; put it into a list"
        raise TypeError(f"metrics must be a list of chunked_head.metrics, got {description}")
    measured = tuple(metrics)
    for metric in measured:
        if not isinstance(metric, Metric):
            description, remedy = type(metric).__name__, "call its factory, such as metrics.entropy()"
            if is_library(metric):
                remedy = f"call its factory, metrics.{metric.__name__}()"
            elif callable(metric):
                remedy = 'a function (stats, batch) -> values [tokens] becomes one by metrics.Metric("name", function)'
            raise TypeError(f"metrics must hold chunked_head.metrics, got {description}; {remedy}")
    return measured


class Group(NamedTuple):
    """The identity of a process group, which can be copied and pickled. A group that is made after torch.distributed
    was shut down may have the name of an earlier one, and has another number."""

    name: str
    number: int

    @classmethod
    def from_process_group(cls, group: Any) -> "Group":
        if group not in NUMBERS:
            NUMBERS[group] = next(COUNTED)
        return cls(group.group_name, NUMBERS[group])


NUMBERS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by process group, in the order of first use
COUNTED = itertools.count()


@dataclass(frozen=True, eq=False)
class MetricValue:
    """A metric of some tokens: ``sum`` and ``count``, or ``extremum``; 0-d, or [c] with c components, on the device."""

    reduce: Reduce = "mean"
    sum: Tensor | None = None
    count: Tensor | None = None  # 0-d: tokens, or segments or documents with a token
    extremum: Tensor | None = None  # the maximum of nothing is -inf, its minimum inf
    finish: Finish = "mean"
    whole_of: "Group | None" = None  # process group whose ranks' tokens the metric is of; None: one rank's

    @property
    def value(self) -> Tensor:
        """The number to log, on the device, never nan for want of tokens: a mean of nothing is 0, its perplexity 1."""
        if self.reduce != "mean":
            assert self.extremum is not None
            return self.extremum
        assert self.sum is not None and self.count is not None
        return FINISH[self.finish](self.sum, self.count)

    def __float__(self) -> float:
        """``value`` read from the device."""
        return float(self.value)

    def __repr__(self) -> str:
        if self.reduce != "mean":
            return f"MetricValue({short(self.value)}, {self.reduce})"
        return f"MetricValue({short(self.value)}, sum={short(self.sum)}, count={short(self.count)})"


def short(value: Tensor | None) -> str:
    """Numbers of a tensor as text, six digits each; its shape where they are on no device."""
    if value is None or value.device.type == "meta":
        return "None" if value is None else f"tensor{list(value.shape)}"
    numbers = [f"{number:.6g}" for number in value.detach().flatten().tolist()]
    return numbers[0] if value.dim() == 0 else f"[{', '.join(numbers)}]"


def _mean(total: Tensor, count: Tensor) -> Tensor:
    return total / torch.where(count > 0, count, 1.0)


def _effective_sample_size(total: Tensor, count: Tensor) -> Tensor:
    weights, squares = total.unbind(-1)
    return torch.where(squares > 0, weights.square() / torch.where(squares > 0, squares, 1.0), 0.0)


def _share(total: Tensor, count: Tensor) -> Tensor:
    return _mean(*total.unbind(-1))


def _difference(total: Tensor, count: Tensor) -> Tensor:
    return _share(total[..., :2], count) - _share(total[..., 2:], count)


FINISH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "perplexity": lambda total, count: _mean(total, count).exp(),
    "effective_sample_size": _effective_sample_size,
    "effective_sample_fraction": lambda total, count: _mean(_effective_sample_size(total, count), count),
    "share": _share,
    "difference": _difference,
}
CHOICES = (
    ("reduce", ("mean", "max", "min")), ("weighting", ("token", "segment", "document")),
    ("unit", ("token", "segment", "pair")), ("scope", ("token", "segment")), ("finish", tuple(FINISH)),
)  # fmt: skip


# ---- from values to sums, and from sums to sums


def weights_in(counts: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Weights [n] that make a sum over tokens one of the segments' means: 1 / ``counts`` [number], how many tokens of
    each segment count; 0 where a token does not count or is of no segment. ``ids`` [n] in [-1, number)."""
    in_segment = mask & (ids >= 0)
    return torch.where(in_segment, 1.0 / counts.clamp(min=1.0)[ids.clamp(min=0)], 0.0)


def selected(metric: Metric, values: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Terms of a metric's sum or extremum: ``values`` [n] where ``mask`` [n] bool, elsewhere 0 or an infinity that
    changes no extremum. fp32 at least, without gradient.

    ``weights`` [n] are those of ``weights_in`` where the metric's weighting asks for them.
    """
    values = values.detach()
    if values.dtype != torch.float64:
        values = values.float()
    if weights is not None:
        mask = mask & (weights > 0)
        values = values * weights
    return torch.where(mask, values, OF_NOTHING[metric.reduce])


def merge(a: MetricValue, b: MetricValue) -> MetricValue:
    """The metric of the tokens of both, for example of two micro-batches."""
    if a.whole_of != b.whole_of:
        raise ValueError(
            "metrics of one rank's tokens and of all ranks', or of two process groups', cannot be merged: give both "
            "calls the same parallel="
        )
    if (a.reduce, a.finish) != (b.reduce, b.finish):
        raise ValueError(
            f"metrics that differ cannot be merged: {a.reduce}, {a.finish} and {b.reduce}, {b.finish}; give them names"
        )
    if a.reduce != "mean":
        assert a.extremum is not None and b.extremum is not None
        larger = torch.maximum if a.reduce == "max" else torch.minimum
        return replace(a, extremum=larger(a.extremum, b.extremum))
    assert a.sum is not None and b.sum is not None and a.count is not None and b.count is not None
    return replace(a, sum=a.sum + b.sum, count=a.count + b.count)


def combine(several: Iterable[Mapping[str, MetricValue]]) -> dict[str, MetricValue]:
    """``out.metrics`` of all micro-batches' tokens, from that of each. A metric that some of them lack is that of the
    others' tokens.

    A segment or document that lies in two micro-batches counts in each.
    """
    combined: dict[str, MetricValue] = {}
    if isinstance(several, Mapping):
        raise TypeError("combine takes a list with the out.metrics of each call, got one of them; put it into a list")
    for metrics in several:
        if not isinstance(metrics, Mapping):
            raise TypeError(f"combine takes a list with the out.metrics of each call, got a {type(metrics).__name__}")
        for name, value in metrics.items():
            combined[name] = merge(combined[name], value) if name in combined else value
    return combined


def all_reduce(metrics: Mapping[str, MetricValue], group: Any = None) -> dict[str, MetricValue]:
    """``metrics`` over the ranks of ``group``, in one message.

    Every rank must hold metrics of the same names and kinds (in any order), those without tokens included. Reduce over
    groups that hold different tokens; metrics of a call with ``TokenParallel`` over this group stay as they are.
    """
    from torch import distributed

    if not metrics or not (distributed.is_available() and distributed.is_initialized()):
        return dict(metrics)
    ranks: Any = distributed.group.WORLD if group is None else group
    group_id, partial = Group.from_process_group(ranks), dict[str, MetricValue]()
    for name, value in metrics.items():
        if value.whole_of is not None and value.whole_of != group_id and value.whole_of.name == group_id.name:
            raise ValueError(
                f"metric {name!r} is of a process group {group_id.name!r} that is no longer there; another one has its "
                "name now, and which ranks' tokens it holds is not known: reduce metrics before "
                "destroy_process_group()"
            )
        if value.whole_of != group_id:
            partial[name] = value
    return {**metrics, **over_ranks(partial, ranks)}


def over_ranks(
    metrics: Mapping[str, MetricValue], group: Any, counts: bool = True, gather: Callable[..., Any] | None = None
) -> dict[str, MetricValue]:
    """Metrics with sums and extrema of all ranks, in one message. ``counts``: add up counts too; False where they are
    of all ranks already. ``gather``: a function in place of ``torch.distributed.all_gather_into_tensor``."""
    attributes = ("sum", "count", "extremum") if counts else ("sum", "extremum")
    # sorted: the same order on every rank
    pairs = [(name, attribute) for name in sorted(metrics) for attribute in attributes]
    entries = [(name, attribute) for name, attribute in pairs if getattr(metrics[name], attribute) is not None]
    if not entries:
        return {}
    local = [getattr(metrics[name], attribute) for name, attribute in entries]
    packed = torch.cat([tensor.reshape(-1).double() for tensor in local])
    gathered = packed.new_empty(group.size(), len(packed))
    (gather or torch.distributed.all_gather_into_tensor)(gathered.view(-1), packed, group=group)
    reduced_metrics = dict(metrics)
    for (name, attribute), local_value, pieces in zip(
        entries, local, gathered.split([tensor.numel() for tensor in local], 1), strict=True
    ):
        total = {"mean": pieces.sum(0), "max": pieces.amax(0), "min": pieces.amin(0)}[metrics[name].reduce]
        reduced_metrics[name] = replace(
            reduced_metrics[name], **{attribute: total.view(local_value.shape).to(local_value.dtype)}
        )
    return reduced_metrics
