"""Metrics and their values. A value keeps a sum and a count, or an extremum, so that values can be combined over
micro-batches (``combine``) and ranks (``all_reduce``). Only ``MetricValue.value`` divides.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..core.checks import INFINITY, choice, number
from ..losses.base import Measure, is_library
from ..losses.user import declared_fields
from ..losses.user_checks import check_metric

Reduce = Literal["mean", "max", "min"]
Weighting = Literal["token", "segment", "document"]
OF_NOTHING = {"mean": 0.0, "max": -INFINITY, "min": INFINITY}  # the sum or extremum of no values, by reduction
Finish = Literal["mean", "perplexity", "effective_sample_size", "effective_sample_fraction", "share", "difference"]
# numbers per unit, where more than one
COMPONENTS_BY_FINISH = {"effective_sample_size": 2, "effective_sample_fraction": 2, "share": 2, "difference": 4}


class MetricOptions(TypedDict, total=False):
    """Options of every metric.

    ``weighting`` says what a mean is over. ``"token"``: all tokens that count. ``"segment"``: the means of segments,
    each over the segment's tokens that count. ``"document"``: the means of documents, likewise. Segments and
    documents without a token that counts are left out. The token fields ``segments`` and ``documents`` have the ids; -1
    means no segment. ``temperature`` divides the logits that the metric reads; None: the call's temperature. ``name``
    is the key of the metric in ``out.metrics``.
    """

    weighting: Weighting
    temperature: float | None
    name: str | None


@dataclass(frozen=True, eq=False, repr=False)
class Metric(Measure):
    """A metric of ``function(stats, batch, **options)``, which returns a value for each token, segment or pair
    (``unit``), [n]. ``fields`` are as in ``losses.custom``.

    A user's function is tried on made-up tokens when the metric is made, unless ``check=False``. ValueError if the
    function does not return a number for each unit. With ``scope="token"``, ValueError also if the values of all tokens
    at once differ from the values of the first and the last tokens in two runs.
    """

    unit: Literal["token", "segment", "pair"] = "token"
    reduce: Reduce = "mean"
    weighting: Weighting = "token"  # for unit "token" only
    finish: Finish = "mean"  # name of the function that makes ``MetricValue.value`` from the sum and the count
    check: bool = True  # a user's function runs on made-up tokens when the metric is made
    # number of values per unit: the function's value, and its square for a sample size or flags for a share
    components: int = field(init=False, repr=False)  # values per unit

    def __post_init__(self) -> None:
        super().__post_init__()
        components = COMPONENTS_BY_FINISH.get(self.finish, 1)
        object.__setattr__(self, "components", components)
        object.__setattr__(self, "width", components * self.width)
        metric_name = f"metrics.{self.kind}"
        if not isinstance(self.fields, tuple):  # names or kinds of fields, as in ``losses.custom``
            declared_names, extra_fields = declared_fields(metric_name, self.fields)
            object.__setattr__(self, "fields", declared_names)
            object.__setattr__(self, "extra_fields", {**extra_fields, **self.extra_fields})
        for option, allowed_values in OPTION_CHOICES:
            choice(metric_name, option, getattr(self, option), allowed_values)
        if self.unit != "token" and self.scope != "segment":
            raise ValueError(f'{metric_name} has values per {self.unit}, which need all tokens: scope="segment"')
        if self.finish in ("share", "difference") and not is_library(self.function):
            raise ValueError(
                f"finish={self.finish!r} of {metric_name} is of several numbers per unit; a function gives one"
            )
        is_token_mean = self.unit == "token" and self.reduce == "mean" and self.components == 1
        if self.weighting != "token" and not is_token_mean:
            raise ValueError(
                f"weighting of {metric_name} is that of a mean over tokens; here it has no meaning; leave it out"
            )
        if self.temperature is not None:
            number(metric_name, "temperature", self.temperature, 0.0, is_open=True)
        if self.weighting != "token" and self.ids not in self.fields:
            object.__setattr__(self, "fields", (*self.fields, self.ids))
        if self.check and not is_library(self.function):
            check_metric(self)

    @property
    def key(self) -> tuple:
        """A key that is equal for two metrics that compile to the same code."""
        code_key, _ = self.key_and_numbers
        return code_key, self.unit, self.reduce, self.weighting, self.components, self.scope, self.reads_target

    @functools.cached_property
    def signature(self) -> Hashable:
        """A key that is equal for two metrics that differ at most in the numbers of their options."""
        return self.key, self.inputs_key, self.finish

    @property
    def ids(self) -> str:
        """Name of the field with the ids of segments or documents, whose means ``weighting`` averages."""
        return "documents" if self.weighting == "document" else "segments"


def as_metrics(metrics: Any) -> tuple[Metric, ...]:
    """A call's metrics as a tuple. TypeError unless ``metrics`` is a list of ``Metric``."""
    if not isinstance(metrics, Iterable) or isinstance(metrics, str | Mapping | Tensor):
        value_in_words = f"{metrics!r}; leave it out for none"
        if isinstance(metrics, Metric):
            value_in_words = f"one, {metrics.label!r}; put it into a list"
        raise TypeError(f"metrics must be a list of chunked_head.metrics, got {value_in_words}")
    metric_tuple = tuple(metrics)
    for metric in metric_tuple:
        if not isinstance(metric, Metric):
            value_in_words, remedy = type(metric).__name__, "call its factory, such as metrics.entropy()"
            if is_library(metric):
                remedy = f"call its factory, metrics.{metric.__name__}()"
            elif callable(metric):
                remedy = 'a function (stats, batch) -> values [tokens] becomes one by metrics.Metric("name", function)'
            raise TypeError(f"metrics must hold chunked_head.metrics, got {value_in_words}; {remedy}")
    return metric_tuple


GROUP_NUMBERS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by process group, in order of first use
NEXT_GROUP_NUMBER = itertools.count()  # iterator of the numbers of groups


def name_and_number(group: Any) -> tuple[str, int]:
    """The identity of a process group, a pair that can be pickled: the group's name, and its position in the order in
    which this process first used its groups. Two groups of the same name, such as one before and one after a restart
    of torch.distributed, have different numbers."""
    if group not in GROUP_NUMBERS:
        GROUP_NUMBERS[group] = next(NEXT_GROUP_NUMBER)
    return group.group_name, GROUP_NUMBERS[group]


@dataclass(frozen=True, eq=False)
class MetricValue:
    """The value of a metric over some tokens: ``sum`` and ``count``, or ``extremum``. These are 0-d tensors on the
    device, except that ``sum`` is [2] for an effective sample size or a share, and [4] for a difference."""

    reduce: Reduce = "mean"
    sum: Tensor | None = None  # sum of the weighted values; None for an extremum
    count: Tensor | None = None  # number of tokens that count; by weighting, of segments or documents with such a token
    extremum: Tensor | None = None  # without tokens a maximum is -inf and a minimum inf
    finish: Finish = "mean"
    # name and number of the process group over which the metric is reduced; None: over this rank only
    whole_of: tuple[str, int] | None = None

    @property
    def value(self) -> Tensor:
        """The number to log, 0-d on the device. Without tokens that count, a mean is 0 and a perplexity 1, not nan."""
        if self.reduce != "mean":
            assert self.extremum is not None
            return self.extremum
        assert self.sum is not None and self.count is not None
        return FINISH_FUNCTIONS[self.finish](self.sum, self.count)

    def __float__(self) -> float:
        """``value`` as a float, read from the device."""
        return float(self.value)

    def __repr__(self) -> str:
        if self.reduce != "mean":
            return f"MetricValue({short_text(self.value)}, {self.reduce})"
        return f"MetricValue({short_text(self.value)}, sum={short_text(self.sum)}, count={short_text(self.count)})"


def short_text(value: Tensor | None) -> str:
    """A tensor as text: its numbers with six digits each; on the meta device its shape."""
    if value is None or value.device.type == "meta":
        return "None" if value is None else f"tensor{list(value.shape)}"
    numbers = [f"{number:.6g}" for number in value.detach().flatten().tolist()]
    return numbers[0] if value.dim() == 0 else f"[{', '.join(numbers)}]"


def _mean(value_sum: Tensor, count: Tensor) -> Tensor:
    return value_sum / torch.where(count > 0, count, 1.0)


def _effective_sample_size(value_sum: Tensor, count: Tensor) -> Tensor:
    ratio_sum, square_sum = value_sum.unbind(-1)
    return torch.where(square_sum > 0, ratio_sum.square() / torch.where(square_sum > 0, square_sum, 1.0), 0.0)


def _share(value_sum: Tensor, count: Tensor) -> Tensor:
    return _mean(*value_sum.unbind(-1))


def _difference(value_sum: Tensor, count: Tensor) -> Tensor:
    return _share(value_sum[..., :2], count) - _share(value_sum[..., 2:], count)


FINISH_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "perplexity": lambda value_sum, count: _mean(value_sum, count).exp(),
    "effective_sample_size": _effective_sample_size,
    "effective_sample_fraction": lambda value_sum, count: _mean(_effective_sample_size(value_sum, count), count),
    "share": _share,
    "difference": _difference,
}
OPTION_CHOICES = (
    ("reduce", ("mean", "max", "min")), ("weighting", ("token", "segment", "document")),
    ("unit", ("token", "segment", "pair")), ("scope", ("token", "segment")), ("finish", tuple(FINISH_FUNCTIONS)),
)  # fmt: skip


# ---- values per token to sums, and the combination of sums


def weights_in(token_counts: Tensor, segment_ids: Tensor, mask: Tensor) -> Tensor:
    """Weights [n] that turn a sum over tokens into the sum of the segments' means: 1 / ``token_counts`` of the token's
    segment, or 0 if the token does not count or has no segment. ``token_counts`` [s]: each segment's number of tokens
    that count. ``segment_ids`` [n]: the tokens' segments in [0, s), or -1. ``mask`` [n] bool: the tokens that count."""
    in_segment = mask & (segment_ids >= 0)
    return torch.where(in_segment, 1.0 / token_counts.clamp(min=1.0)[segment_ids.clamp(min=0)], 0.0)


def selected(metric: Metric, values: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """The numbers [n] that a metric sums up or takes the extremum of, detached, fp32 or fp64: ``values`` [n] where
    ``mask`` [n] bool is true; elsewhere 0 for a sum, -inf for a maximum, inf for a minimum. ``weights`` [n]: factors of
    ``values``, from ``weights_in``; None for ``weighting="token"``."""
    values = values.detach()
    if values.dtype != torch.float64:
        values = values.float()
    if weights is not None:
        mask = mask & (weights > 0)
        values = values * weights
    return torch.where(mask, values, OF_NOTHING[metric.reduce])


def merge(a: MetricValue, b: MetricValue) -> MetricValue:
    """The metric over the tokens of ``a`` and of ``b``, which may come from two micro-batches. ValueError if ``a`` and
    ``b`` are values of different metrics, or are reduced over different ranks."""
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
        extremum_of = torch.maximum if a.reduce == "max" else torch.minimum
        return replace(a, extremum=extremum_of(a.extremum, b.extremum))
    assert a.sum is not None and b.sum is not None and a.count is not None and b.count is not None
    return replace(a, sum=a.sum + b.sum, count=a.count + b.count)


def combine(several: Iterable[Mapping[str, MetricValue]]) -> dict[str, MetricValue]:
    """The metrics over the tokens of all micro-batches, by name. ``several``: a list with the ``out.metrics`` of each
    micro-batch. A metric that is missing in some micro-batches is over the tokens of the other micro-batches.

    A segment or document that lies in two micro-batches counts twice. TypeError for anything but a list of mappings.
    """
    combined: dict[str, MetricValue] = {}
    if isinstance(several, Mapping):
        raise TypeError("combine takes a list with the out.metrics of each call, got one of them; put it into a list")
    for metrics in several:
        if not isinstance(metrics, Mapping):
            raise TypeError(f"combine takes a list with the out.metrics of each call, got a {type(metrics).__name__}")
        for name, metric_value in metrics.items():
            combined[name] = merge(combined[name], metric_value) if name in combined else metric_value
    return combined


def all_reduce(metrics: Mapping[str, MetricValue], group: Any = None) -> dict[str, MetricValue]:
    """The metrics over the tokens of all ranks of ``group`` (None: all ranks), by one message.

    Every rank, also a rank without tokens, must pass metrics of the same names and kinds, in any order. The ranks of
    the group must have different tokens. Metrics of a call with ``TokenParallel`` over this group are reduced already
    and do not change. ValueError for metrics of a process group that has been destroyed.
    """
    from torch import distributed

    if not metrics or not (distributed.is_available() and distributed.is_initialized()):
        return dict(metrics)
    process_group: Any = distributed.group.WORLD if group is None else group
    (group_name, group_number), unreduced = name_and_number(process_group), dict[str, MetricValue]()
    for name, metric_value in metrics.items():
        reduced_name, reduced_number = metric_value.whole_of or (None, None)
        if (reduced_name, reduced_number) == (group_name, group_number):
            continue
        if reduced_name == group_name:
            raise ValueError(
                f"metric {name!r} is of a process group {group_name!r} that is no longer there; another one has its "
                "name now, and which ranks' tokens it holds is not known: reduce metrics before "
                "destroy_process_group()"
            )
        unreduced[name] = metric_value
    return {**metrics, **over_ranks(unreduced, process_group)}


def over_ranks(
    metrics: Mapping[str, MetricValue], group: Any, sums_counts: bool = True, gather: Callable[..., Any] | None = None
) -> dict[str, MetricValue]:
    """Metrics over the tokens of all ranks of the process group ``group``, by one message. ``sums_counts``: True to
    sum counts over ranks; False if each rank has the counts of all ranks already. ``gather``: a function in place of
    ``torch.distributed.all_gather_into_tensor``."""
    attributes = ("sum", "count", "extremum") if sums_counts else ("sum", "extremum")
    # sorted, so that the order is equal on all ranks
    names_and_attributes = [(name, attribute) for name in sorted(metrics) for attribute in attributes]
    sent_entries = [
        (name, attribute) for name, attribute in names_and_attributes if getattr(metrics[name], attribute) is not None
    ]
    if not sent_entries:
        return {}
    local_tensors = [getattr(metrics[name], attribute) for name, attribute in sent_entries]
    message = torch.cat([tensor.reshape(-1).double() for tensor in local_tensors])
    messages = message.new_empty(group.size(), len(message))
    (gather or torch.distributed.all_gather_into_tensor)(messages.view(-1), message, group=group)
    reduced_metrics = dict(metrics)
    reductions: dict[str, Callable[..., Tensor]] = {"mean": torch.sum, "max": torch.amax, "min": torch.amin}
    rank_values = messages.split([tensor.numel() for tensor in local_tensors], 1)  # [ranks, numbers] of each tensor
    for (name, attribute), local_tensor, values in zip(sent_entries, local_tensors, rank_values, strict=True):
        reduced_values = reductions[metrics[name].reduce](values, 0)
        reduced_tensor = reduced_values.view(local_tensor.shape).to(local_tensor.dtype)
        changes: dict[str, Any] = {attribute: reduced_tensor}
        reduced_metrics[name] = replace(reduced_metrics[name], **changes)
    return reduced_metrics
