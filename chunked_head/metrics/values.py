"""Metrics and their values. A value is a sum and a count, or an extremum, so that it can be combined over micro-batches
(``combine``) and ranks (``all_reduce``); only ``MetricValue.value`` divides.
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
OF_NOTHING = {"mean": 0.0, "max": -INFINITY, "min": INFINITY}  # by reduction: the sum or extremum of no values
Finish = Literal["mean", "perplexity", "effective_sample_size", "effective_sample_fraction", "share", "difference"]
COMPONENTS = {"effective_sample_size": 2, "effective_sample_fraction": 2, "share": 2, "difference": 4}  # where not 1


class MetricOptions(TypedDict, total=False):
    """Options of every metric.

    ``weighting`` of a mean: ``"token"`` is the mean over all tokens that count. ``"segment"`` is the mean over segments
    of each segment's mean over tokens, ``"document"`` the same over documents; segments without a token that counts are
    left out. The token fields ``segments`` and ``documents`` have the ids, -1 for none. ``temperature`` divides the
    logits that the metric reads (None: the call's). ``name`` is the key in ``out.metrics``.
    """

    weighting: Weighting
    temperature: float | None
    name: str | None


@dataclass(frozen=True, eq=False, repr=False)
class Metric(Measure):
    """A metric of ``function(stats, batch, **options)``, which returns values [n], one per unit. ``fields`` as in
    ``losses.custom``.

    A function of your own runs once on made-up tokens when the metric is made, as in ``losses.custom``. It must return
    a number for each unit and, with ``scope="token"``, the same for all tokens at once as for two pieces of them.
    ``check=False`` leaves out this check.
    """

    unit: Literal["token", "segment", "pair"] = "token"
    reduce: Reduce = "mean"
    weighting: Weighting = "token"  # for unit "token" only
    finish: Finish = "mean"  # how ``.value`` follows from sums and count
    check: bool = True
    # numbers per unit: the value, its square for a sample size, flags for shares and differences of means
    components: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        components = COMPONENTS.get(self.finish, 1)
        object.__setattr__(self, "components", components)
        object.__setattr__(self, "width", components * self.width)
        where = f"metrics.{self.kind}"
        if not isinstance(self.fields, tuple):  # names or kinds of fields, as in ``losses.custom``
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
    """The identity of a process group, which can be copied and pickled. ``number`` tells groups apart that have one
    name, as a group made after a restart of torch.distributed may have."""

    name: str
    number: int

    @classmethod
    def from_process_group(cls, group: Any) -> "Group":
        if group not in NUMBERS:
            NUMBERS[group] = next(COUNTED)
        return cls(group.group_name, NUMBERS[group])


NUMBERS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # ``Group.number`` by process group, in order of first use
COUNTED = itertools.count()


@dataclass(frozen=True, eq=False)
class MetricValue:
    """A metric of some tokens: ``sum`` and ``count``, or ``extremum``. They are on the device and 0-d; ``sum`` is [2]
    for an effective sample size."""

    reduce: Reduce = "mean"
    sum: Tensor | None = None
    count: Tensor | None = None  # 0-d: number of tokens that count; by weighting, of segments or documents with one
    extremum: Tensor | None = None  # without tokens a maximum is -inf and a minimum inf
    finish: Finish = "mean"
    whole_of: "Group | None" = None  # the process group over which the metric is reduced; None: over this rank only

    @property
    def value(self) -> Tensor:
        """The number to log, on the device. Without tokens it is 0 for a mean and 1 for a perplexity, not nan."""
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


# ---- values per token to sums, and the combination of sums


def weights_in(counts: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Weights [n] with which a sum over tokens is the sum of segments' means: 1 / ``counts`` of the token's segment, or
    0 where a token does not count or has no segment. ``counts`` [s]: number of tokens that count in each segment;
    ``ids`` [n] in [-1, s): the tokens' segments."""
    in_segment = mask & (ids >= 0)
    return torch.where(in_segment, 1.0 / counts.clamp(min=1.0)[ids.clamp(min=0)], 0.0)


def selected(metric: Metric, values: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Terms of a metric's sum or extremum, detached, in fp32 at least: ``values`` [n] where ``mask`` [n] bool is true,
    elsewhere 0 for a sum, -inf for a maximum, inf for a minimum.

    ``weights`` [n]: factors of a sum's terms, from ``weights_in``; None for ``weighting="token"``.
    """
    values = values.detach()
    if values.dtype != torch.float64:
        values = values.float()
    if weights is not None:
        mask = mask & (weights > 0)
        values = values * weights
    return torch.where(mask, values, OF_NOTHING[metric.reduce])


def merge(a: MetricValue, b: MetricValue) -> MetricValue:
    """The metric of the tokens of ``a`` and ``b`` together, for example of two micro-batches."""
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
    """The metrics of all micro-batches' tokens. ``several``: ``out.metrics`` of each micro-batch. A metric that is
    missing in some of them is that of the others' tokens.

    A segment or document that lies in two micro-batches counts twice.
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
    """``metrics`` reduced over the ranks of ``group``, in one message.

    Every rank, also one without tokens, must pass metrics of the same names and kinds, in any order. The ranks of the
    group must have different tokens. Metrics of a call with ``TokenParallel`` over this group are reduced already and
    stay as they are.
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
    """Metrics with sums and extrema of all ranks, in one message. ``counts``: counts add up too; False if they are all
    ranks' already. ``gather``: a function in place of ``torch.distributed.all_gather_into_tensor``."""
    attributes = ("sum", "count", "extremum") if counts else ("sum", "extremum")
    # sorted, so that the order is equal on all ranks
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
