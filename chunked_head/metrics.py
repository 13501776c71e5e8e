"""Metrics from the statistics that losses are made of: no softmax pass of their own, nothing read from the device.

A ``Metric`` is a function of ``(stats, batch)`` that gives one value per token or per segment, and how those become one
number: a sum and a count, or an extremum. Both reduce correctly over micro-batches (``combine``) and ranks
(``all_reduce``); only ``MetricValue.value`` divides. A metric of your own is a ``Metric(...)``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from .losses.base import Field, Scope

Reduce = Literal["mean", "max", "min"]
Weighting = Literal["token", "segment", "document"]
Finish = Literal["mean", "perplexity", "effective_sample_size", "effective_sample_fraction"]

AGAINST = {"old": "old_logprobs", "reference": "ref_logprobs", "rollout": "rollout_logprobs"}
INFINITY = float("inf")


class MetricOptions(TypedDict, total=False):
    """What every metric takes beside its own options.

    ``weighting``, of a mean: ``"token"`` over all tokens; ``"segment"``, ``"document"`` over segments (documents) with
    a token, of the mean over each one's tokens, by the token fields ``segments`` and ``documents``, in which -1 means
    none. ``temperature`` divides the logits that the metric sees (None: the call's). ``name`` is the key in
    ``out.metrics``.
    """

    weighting: Weighting
    temperature: float | None
    name: str | None


@dataclass(frozen=True, eq=False)
class Metric:
    """``function(stats, batch, **options)`` gives values per unit, [n] or, with several components, [n, c]."""

    kind: str  # the name of its factory
    function: Callable[..., Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)  # hashable: part of what is compiled
    needs: frozenset[str] = frozenset()
    fields: tuple[str, ...] = ()
    optional_fields: tuple[str, ...] = ()
    extra_fields: Mapping[str, Field] = field(default_factory=dict)  # what FIELDS does not know
    scope: Scope = "token"
    unit: Literal["token", "segment"] = "token"
    reads_target: bool = True
    reduce: Reduce = "mean"
    weighting: Weighting = "token"  # of unit token; the mean of segments is over those with a token
    finish: Finish = "mean"  # from sums and count to .value
    temperature: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        where = f"metrics.{self.kind}"
        choice(where, "reduce", self.reduce, ("mean", "max", "min"))
        choice(where, "weighting", self.weighting, ("token", "segment", "document"))
        choice(where, "unit", self.unit, ("token", "segment"))
        choice(where, "scope", self.scope, ("token", "segment"))
        choice(where, "finish", self.finish, tuple(FINISH))
        if self.unit == "segment" and self.scope != "segment":
            raise ValueError(f'{where} has values per segment, which need all tokens: scope="segment"')
        if self.weighting != "token" and (self.unit != "token" or self.reduce != "mean"):
            raise ValueError(f"weighting of {where} is that of a mean over tokens; here it has no meaning")
        temperature = self.temperature
        if temperature is not None and not (isinstance(temperature, int | float) and 0 < temperature < INFINITY):
            raise ValueError(f"temperature of {where} must be a positive number, got {temperature!r}")
        if self.weighting != "token" and self.ids not in self.fields:
            object.__setattr__(self, "fields", (*self.fields, self.ids))

    @property
    def label(self) -> str:
        return self.name or self.kind

    @property
    def key(self) -> tuple:
        """Equal for metrics that compile to the same code."""
        options = tuple(sorted(self.options.items()))
        return self.function, options, self.unit, self.temperature, self.reduce, self.weighting

    @property
    def ids(self) -> str:
        """The field that the weighting goes by."""
        return "documents" if self.weighting == "document" else "segments"

    def values(self, stats: Any, batch: Any) -> Tensor:
        return self.function(stats, batch, **self.options)


@dataclass(frozen=True, eq=False)
class MetricValue:
    """A metric of some tokens: ``sum`` and ``count``, or ``extremum``; 0-d, or [c] with c components, on the device."""

    reduce: Reduce = "mean"
    sum: Tensor | None = None
    count: Tensor | None = None  # 0-d: tokens, or segments or documents with a token
    extremum: Tensor | None = None  # the maximum of nothing is -inf, its minimum inf
    finish: Finish = "mean"

    @property
    def value(self) -> Tensor:
        """What to log, on the device and never nan for want of tokens: the mean of nothing is 0, its perplexity 1."""
        if self.reduce != "mean":
            assert self.extremum is not None
            return self.extremum
        assert self.sum is not None and self.count is not None
        return FINISH[self.finish](self.sum, self.count)


def _mean(total: Tensor, count: Tensor) -> Tensor:
    return total / torch.where(count > 0, count, 1.0)


def _effective_sample_size(total: Tensor, count: Tensor) -> Tensor:
    weights, squares = total.unbind(-1)
    return torch.where(squares > 0, weights.square() / torch.where(squares > 0, squares, 1.0), 0.0)


FINISH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "perplexity": lambda total, count: _mean(total, count).exp(),
    "effective_sample_size": _effective_sample_size,
    "effective_sample_fraction": lambda total, count: _mean(_effective_sample_size(total, count), count),
}


# ---- from values to sums, and from sums to sums


def unit_weights(ids: Tensor, mask: Tensor, number: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Weights [n] that make a sum over tokens one of the segments' means, and how many segments have a token (0-d).

    1 / (tokens that count in the token's segment), 0 where a token does not count or is of no segment. ``ids`` [n] in
    [-1, number), ``mask`` [n] of all the call's tokens: a chunk takes its slice.
    """
    kept = mask & (ids >= 0)
    index = torch.where(kept, ids, number)
    counts = torch.zeros(number + 1, dtype=dtype, device=ids.device).index_add(0, index, kept.to(dtype))
    weights = torch.where(kept, 1.0 / counts.clamp(min=1.0)[index], 0.0)
    return weights, (counts[:-1] > 0).sum().to(dtype)


def accumulate(
    metric: Metric, values: Tensor, mask: Tensor, weights: Tensor | None = None, count: Tensor | None = None
) -> MetricValue:
    """The sums or the extremum of ``values`` [n] or [n, c] of some units where ``mask`` [n].

    ``weights`` [n] are those of ``unit_weights`` where the metric's weighting asks for them; ``count`` is the number to
    hold instead of counting: that of ``unit_weights``, given with one chunk only, or each chunk holds its share.
    """
    values = values.detach()
    if values.dtype != torch.float64:
        values = values.float()
    wide = (-1,) + (1,) * (values.dim() - 1)
    if metric.reduce != "mean":
        nothing = -INFINITY if metric.reduce == "max" else INFINITY
        if values.shape[0] == 0:  # torch's extremum of no rows raises
            return MetricValue(metric.reduce, extremum=values.new_full(values.shape[1:], nothing))
        selected = torch.where(mask.view(wide), values, nothing)
        extremum = selected.amax(0) if metric.reduce == "max" else selected.amin(0)
        return MetricValue(metric.reduce, extremum=extremum)
    if weights is not None:
        mask = mask & (weights > 0)
        values = values * weights.view(wide)
    total = torch.where(mask.view(wide), values, 0.0).sum(0)
    if count is None:
        shares = torch.ones_like(mask, dtype=values.dtype) if weights is None else weights.to(values.dtype)
        count = torch.where(mask, shares, 0.0).sum()
    return MetricValue("mean", total, count.to(values.dtype), finish=metric.finish)


def merge(a: MetricValue, b: MetricValue) -> MetricValue:
    """The metric of the tokens of both, for example of two micro-batches."""
    if (a.reduce, a.finish) != (b.reduce, b.finish):
        raise ValueError(f"metrics that differ cannot be merged: {a.reduce}, {a.finish} and {b.reduce}, {b.finish}")
    if a.reduce != "mean":
        assert a.extremum is not None and b.extremum is not None
        larger = torch.maximum if a.reduce == "max" else torch.minimum
        return replace(a, extremum=larger(a.extremum, b.extremum))
    assert a.sum is not None and b.sum is not None and a.count is not None and b.count is not None
    return replace(a, sum=a.sum + b.sum, count=a.count + b.count)


def combine(several: Iterable[Mapping[str, MetricValue]]) -> dict[str, MetricValue]:
    """``out.metrics`` of micro-batches as that of all their tokens; a name that some lack counts where it is.

    A segment or document that lies in two micro-batches counts in each.
    """
    combined: dict[str, MetricValue] = {}
    for metrics in several:
        for name, value in metrics.items():
            combined[name] = merge(combined[name], value) if name in combined else value
    return combined


def all_reduce(metrics: Mapping[str, MetricValue], group: Any = None) -> dict[str, MetricValue]:
    """``metrics`` over the ranks of ``group``: one SUM of all sums and counts, one MAX of all extrema.

    Every rank must hold metrics of the same names and kinds (in any order), those without tokens included. On
    vocabulary-parallel ranks metrics are equal already: reduce over groups that hold different tokens. Without an
    initialised process group there is nothing to do. fp32, fp64 where a metric is.
    """
    from torch import distributed

    if not metrics or not (distributed.is_available() and distributed.is_initialized()):
        return dict(metrics)
    names = sorted(metrics)  # the same order on every rank
    means = [name for name in names if metrics[name].reduce == "mean"]
    extrema = [name for name in names if metrics[name].reduce != "mean"]
    reduced: dict[str, MetricValue] = {}
    if means:
        parts = [part for name in means for part in (metrics[name].sum, metrics[name].count) if part is not None]
        sums = iter(_reduced(parts, distributed.ReduceOp.SUM, group))
        reduced |= {name: replace(metrics[name], sum=next(sums), count=next(sums)) for name in means}
    if extrema:
        # minima travel as maxima of what they are the negative of
        signs = [1.0 if metrics[name].reduce == "max" else -1.0 for name in extrema]
        parts = [sign * _extremum(metrics[name]) for name, sign in zip(extrema, signs, strict=True)]
        largest = _reduced(parts, distributed.ReduceOp.MAX, group)
        for name, sign, part in zip(extrema, signs, largest, strict=True):
            reduced[name] = replace(metrics[name], extremum=sign * part)
    return {name: reduced[name] for name in metrics}


def _extremum(value: MetricValue) -> Tensor:
    assert value.extremum is not None
    return value.extremum


def _reduced(parts: list[Tensor], operation: Any, group: Any) -> list[Tensor]:
    from torch import distributed

    dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    packed = torch.cat([part.reshape(-1).to(dtype) for part in parts])
    distributed.all_reduce(packed, op=operation, group=group)
    pieces = packed.split([part.numel() for part in parts])
    return [piece.view(part.shape).to(part.dtype) for piece, part in zip(pieces, parts, strict=True)]


# ---- the metrics


def choice(where: str, argument: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{argument} of {where} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def _number(where: str, argument: str, value: Any, least: float, most: float = INFINITY) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{argument} of metrics.{where} must be a number in [{least:g}, {most:g}], got {value!r}")
    return float(value)


def _make(kind: str, function: Callable[..., Tensor], common: Mapping[str, Any], **known: Any) -> Metric:
    """A metric of ``kind``; ``common`` are MetricOptions, ``known`` fields of Metric, ``name`` the default name."""
    if unknown := sorted(set(common) - set(MetricOptions.__annotations__)):
        raise TypeError(f"metrics.{kind} takes no option {unknown[0]!r}")
    if common.get("weighting") is not None and known.get("unit") == "segment":
        raise ValueError(f"weighting of metrics.{kind} has no meaning here: its values are per segment")
    given = {name: value for name, value in common.items() if value is not None}
    return Metric(kind, function, **(known | given))


def _suffixed(kind: str, *suffixes: str | None) -> str:
    return "_".join([kind, *(suffix for suffix in suffixes if suffix)])


def _level(kind: str, level: str) -> dict[str, Any]:
    if choice(f"metrics.{kind}", "level", level, ("token", "segment")) == "token":
        return {}
    return {"scope": "segment", "unit": "segment"}


def accuracy(**common: Any) -> Metric:
    """Share of tokens whose target has the largest logit, the first of them on ties. ``common``: ``MetricOptions``."""
    return _make("accuracy", _accuracy, common, needs=frozenset({"argmax"}))


def _accuracy(stats: Any, batch: Any) -> Tensor:
    return (stats.argmax == batch.target).to(stats.lse.dtype)


def perplexity(weighting: Literal["token", "segment"] = "token", **common: Any) -> Metric:
    """``exp(-mean log-probability)``; ``weighting="segment"``: the mean of the segments' own perplexities, as verl."""
    if choice("metrics.perplexity", "weighting", weighting, ("token", "segment")) == "token":
        return _make("perplexity", _negative_logprob, common, finish="perplexity")
    segment = _level("perplexity", "segment")
    return _make("perplexity", _segment_perplexity, common, fields=("segments",), name="perplexity_segment", **segment)


def _negative_logprob(stats: Any, batch: Any) -> Tensor:
    return -stats.logprob


def _segment_perplexity(stats: Any, batch: Any) -> Tensor:
    return batch.segment_mean(-stats.logprob).exp()


def entropy(reduce: Reduce = "mean", **common: Any) -> Metric:
    """Entropy of the softmax in nats, at the metric's temperature."""
    return _statistic("entropy", "entropy", reduce, common, needs=frozenset({"entropy"}), reads_target=False)


def lse(reduce: Reduce = "mean", **common: Any) -> Metric:
    """``logsumexp`` of the logits, what z-loss squares."""
    return _statistic("lse", "lse", reduce, common, reads_target=False)


def mean_logit(reduce: Reduce = "mean", **common: Any) -> Metric:
    """Mean of a token's logits over the vocabulary (TRL's ``logits/chosen`` is its mean over chosen tokens)."""
    return _statistic("mean_logit", "mean_logit", reduce, common, needs=frozenset({"mean_logit"}), reads_target=False)


def logprob(reduce: Reduce = "mean", **common: Any) -> Metric:
    """Log-probability of the target (Fast-LLM's ``new_logprobs``)."""
    return _statistic("logprob", "logprob", reduce, common)


def _statistic(kind: str, statistic: str, reduce: Reduce, common: Mapping[str, Any], **known: Any) -> Metric:
    return _make(kind, _read, common, options={"statistic": statistic}, **_reduction(kind, reduce), **known)


def _reduction(kind: str, reduce: Reduce, *suffixes: str | None) -> dict[str, Any]:
    return {"reduce": reduce, "name": _suffixed(kind, *suffixes, None if reduce == "mean" else str(reduce))}


def _read(stats: Any, batch: Any, statistic: str) -> Tensor:
    return getattr(stats, statistic)


def top_probability(reduce: Reduce = "mean", **common: Any) -> Metric:
    """Probability of the most probable token."""
    known = _reduction("top_probability", reduce)
    needs = frozenset({"top_logprob"})
    return _make("top_probability", _top_probability, common, needs=needs, reads_target=False, **known)


def _top_probability(stats: Any, batch: Any) -> Tensor:
    return stats.top_logprob.exp()


def ratio(
    against: Literal["old", "reference", "rollout"] = "old",
    *,
    level: Literal["token", "segment"] = "token",
    reduce: Reduce = "mean",
    ratio_clamp: float | None = 20.0,
    **common: Any,
) -> Metric:
    """``r = exp(logprob - old_logprobs)``, or to ``ref_logprobs``, ``rollout_logprobs``.

    ``level="segment"``: GSPO's, ``exp`` of the mean log-ratio over a segment's tokens, one per segment. The log-ratio
    is held within ``ratio_clamp`` before ``exp`` (None: not), as in the policy losses.
    """
    options, fields = _against("ratio", against, level, ratio_clamp)
    known = _reduction("ratio", reduce, None if against == "old" else against, None if level == "token" else level)
    return _make("ratio", _ratio, common, options=options, fields=fields, **_level("ratio", level), **known)


def effective_sample_size(
    against: Literal["old", "reference", "rollout"] = "old",
    *,
    level: Literal["token", "segment"] = "token",
    normalized: bool = False,
    ratio_clamp: float | None = 20.0,
    **common: Any,
) -> Metric:
    """``(sum r)^2 / sum r^2`` over all tokens (or segments), between 1 and their number.

    ``normalized``: divided by their number, so at most 1, as verl logs it. ``.sum`` is ``(sum r, sum r^2)``: the value
    follows from the sums of all micro-batches and ranks, which is not the mean of theirs.
    """
    kind = "effective_sample_size"
    if common.get("weighting") is not None:
        raise ValueError("weighting of metrics.effective_sample_size has no meaning: it goes over all tokens")
    options, fields = _against(kind, against, level, ratio_clamp)
    name = _suffixed(
        "effective_sample_fraction" if normalized else kind,
        None if against == "old" else against,
        None if level == "token" else level,
    )
    finish = "effective_sample_fraction" if normalized else "effective_sample_size"
    return _make(
        kind, _ratio_powers, common, options=options, fields=fields, finish=finish, name=name, **_level(kind, level)
    )


def _against(kind: str, against: str, level: str, ratio_clamp: float | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    fields = (AGAINST[choice(f"metrics.{kind}", "against", against, tuple(AGAINST))],)
    return _ratio_options(kind, fields[0], level, ratio_clamp), fields + (("segments",) if level == "segment" else ())


def _ratio_options(kind: str, other: str, level: str, ratio_clamp: float | None) -> dict[str, Any]:
    choice(f"metrics.{kind}", "level", level, ("token", "segment"))
    return {"other": other, "level": level, "ratio_clamp": _clamp(kind, "ratio_clamp", ratio_clamp)}


def _clamp(kind: str, argument: str, value: float | None) -> float | None:
    return None if value is None else _number(kind, argument, value, 0.0)


def _log_ratio(stats: Any, batch: Any, other: str, level: str) -> Tensor:
    log_ratio = stats.logprob - batch[other]
    return batch.segment_mean(log_ratio) if level == "segment" else log_ratio


def _clamped(log_ratio: Tensor, clamp: float | None) -> Tensor:
    return log_ratio if clamp is None else log_ratio.clamp(-clamp, clamp)


def _ratio(stats: Any, batch: Any, other: str, level: str, ratio_clamp: float | None) -> Tensor:
    return _clamped(_log_ratio(stats, batch, other, level), ratio_clamp).exp()


def _ratio_powers(stats: Any, batch: Any, **options: Any) -> Tensor:
    values = _ratio(stats, batch, **options)
    return torch.stack([values, values.square()], dim=-1)


def kl_old(
    estimator: Literal["k1", "abs", "k2", "k3"] = "k3",
    *,
    level: Literal["token", "segment"] = "token",
    reduce: Reduce = "mean",
    ratio_clamp: float | None = 20.0,
    **common: Any,
) -> Metric:
    """KL(old || new), estimated on tokens that the old policy sampled; with ``d = logprob - old_logprobs``:

    k1 ``-d`` (verl's and OpenRLHF's ``ppo_kl``), abs ``|d|``, k2 ``d^2 / 2``, k3 ``exp(d) - d - 1`` (Fast-LLM's
    ``kl_new_old``, TRL's asynchronous GRPO). ``d`` is held within ``ratio_clamp``. ``level="segment"``: of the mean of
    ``d`` over the segment's tokens, GSPO's log-ratio.
    """
    kind = "kl_old"
    options = _ratio_options(kind, "old_logprobs", level, ratio_clamp) | {"estimator": _estimator(kind, estimator)}
    fields = ("old_logprobs", "segments") if level == "segment" else ("old_logprobs",)
    suffixes = None if estimator == "k3" else estimator, None if level == "token" else level
    known = _reduction(kind, reduce, *suffixes)
    return _make(kind, _kl_old, common, options=options, fields=fields, **_level(kind, level), **known)


def _estimator(kind: str, estimator: str) -> str:
    return choice(f"metrics.{kind}", "estimator", estimator, ("k1", "abs", "k2", "k3"))


def _kl_old(stats: Any, batch: Any, other: str, level: str, ratio_clamp: float | None, estimator: str) -> Tensor:
    return _kl(_clamped(_log_ratio(stats, batch, other, level), ratio_clamp), estimator)


def _kl(difference: Tensor, estimator: str) -> Tensor:
    """KL of the policy that sampled, to the other; ``difference``: log-probability of the other less the sampler's."""
    if estimator == "k1":
        return -difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(difference) - difference


def kl_reference(
    estimator: Literal["k1", "abs", "k2", "k3"] = "k3",
    *,
    bias_correction: bool = False,
    reduce: Reduce = "mean",
    log_ratio_clamp: float | None = 20.0,
    kl_clamp: float | None = None,
    ratio_clamp: float | None = 20.0,
    **common: Any,
) -> Metric:
    """KL(new || reference), estimated on tokens that the policy sampled; with ``d = ref_logprobs - logprob``:

    k1 ``-d``, abs ``|d|``, k2 ``d^2 / 2``, k3 ``exp(d) - d - 1``: what ``losses.kl_to_reference`` of the same options
    is the mean of. ``bias_correction`` multiplies by the ratio to ``old_logprobs``, where tokens are the old policy's
    (DeepSeek-V3.2, TRL's ``use_bias_correction_kl``).
    """
    kind = "kl_reference"
    options = {
        "estimator": _estimator(kind, estimator),
        "bias_correction": bool(bias_correction),
        "log_ratio_clamp": _clamp(kind, "log_ratio_clamp", log_ratio_clamp),
        "kl_clamp": _clamp(kind, "kl_clamp", kl_clamp),
        "ratio_clamp": _clamp(kind, "ratio_clamp", ratio_clamp),
    }
    fields = ("ref_logprobs", "old_logprobs") if bias_correction else ("ref_logprobs",)
    suffixes = None if estimator == "k3" else estimator, "corrected" if bias_correction else None
    return _make(kind, _kl_reference, common, options=options, fields=fields, **_reduction(kind, reduce, *suffixes))


def _kl_reference(
    stats: Any,
    batch: Any,
    estimator: str,
    bias_correction: bool,
    log_ratio_clamp: float | None,
    kl_clamp: float | None,
    ratio_clamp: float | None,
) -> Tensor:
    difference = _clamped(batch["ref_logprobs"] - stats.logprob, log_ratio_clamp)
    values = _clamped(_kl(difference, estimator), kl_clamp)
    return values * _ratio(stats, batch, "old_logprobs", "token", ratio_clamp) if bias_correction else values


def clip_fraction(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    *,
    side: Literal["unsigned", "signed", "low", "high"] = "unsigned",
    level: Literal["token", "segment"] = "token",
    ratio_clamp: float | None = 20.0,
    **common: Any,
) -> Metric:
    """Share of tokens (or segments) whose ratio to the old policy lies outside ``[1 - clip_low, 1 + clip_high]``.

    ``"unsigned"``: below or above, whatever the advantage (Fast-LLM, PipelineRL). ``"low"``: below, with a negative
    advantage; ``"high"``: above, with a positive one; ``"signed"``: either (TRL's ``clip_ratio/low_mean``,
    ``high_mean``, ``region_mean``), which is where PPO's clip takes the gradient away. At a bound is not clipped, as in
    the losses. ``level="segment"``: GSPO's ratio, and the mean of the segment's advantages.
    """
    kind = "clip_fraction"
    choice(f"metrics.{kind}", "side", side, ("unsigned", "signed", "low", "high"))
    options = _ratio_options(kind, "old_logprobs", level, ratio_clamp) | {
        "low": 1 - _number(kind, "clip_low", clip_low, 0.0),
        "high": 1 + _number(kind, "clip_high", clip_high, 0.0),
        "side": side,
    }
    fields = ("old_logprobs",) + (() if side == "unsigned" else ("advantages",))
    fields += ("segments",) if level == "segment" else ()
    name = _suffixed(kind, None if side == "unsigned" else side, None if level == "token" else level)
    return _make(kind, _clip_fraction, common, options=options, fields=fields, name=name, **_level(kind, level))


def _clip_fraction(
    stats: Any, batch: Any, other: str, level: str, ratio_clamp: float | None, low: float, high: float, side: str
) -> Tensor:
    ratios = _ratio(stats, batch, other, level, ratio_clamp)
    below, above = ratios < low, ratios > high
    if side != "unsigned":
        advantages = batch["advantages"]
        if level == "segment":
            advantages = batch.segment_mean(advantages)
        below, above = below & (advantages < 0), above & (advantages > 0)
    clipped = {"low": below, "high": above}.get(side, below | above)
    return clipped.to(stats.lse.dtype)


def advantage(reduce: Reduce = "mean", **common: Any) -> Metric:
    """Mean, maximum or minimum of ``batch["advantages"]`` over tokens that count."""
    known = _reduction("advantage", reduce)
    return _make("advantage", _advantage, common, fields=("advantages",), reads_target=False, **known)


def _advantage(stats: Any, batch: Any) -> Tensor:
    return batch["advantages"].to(stats.lse.dtype)
