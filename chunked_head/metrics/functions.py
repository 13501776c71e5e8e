"""Metrics from the statistics that losses are made of: no softmax pass of their own, nothing read from the device.

A metric of your own is a ``Metric(...)``.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.estimates import clamped, kl_estimate
from ..core.options import bound, choice, flag, number
from .values import (
    Metric,
    Reduce,
    make,
)

AGAINST = {"old": "old_logprobs", "reference": "ref_logprobs", "rollout": "rollout_logprobs"}


def _suffixed(kind: str, *suffixes: str | None) -> str:
    return "_".join([kind, *(suffix for suffix in suffixes if suffix)])


def _level(kind: str, level: str) -> dict[str, Any]:
    if choice(f"metrics.{kind}", "level", level, ("token", "segment")) == "token":
        return {}
    return {"scope": "segment", "unit": "segment"}


def accuracy(**common: Any) -> Metric:
    """Share of tokens whose target has the largest logit, the first of them on ties. ``common``: ``MetricOptions``."""
    return make("accuracy", _accuracy, common, needs=frozenset({"argmax"}))


def _accuracy(stats: Any, batch: Any) -> Tensor:
    return (stats.argmax == batch.target).to(stats.lse.dtype)


def perplexity(weighting: Literal["token", "segment"] = "token", **common: Any) -> Metric:
    """``exp(-mean log-probability)``; ``weighting="segment"``: the mean of the segments' own perplexities, as verl."""
    if choice("metrics.perplexity", "weighting", weighting, ("token", "segment")) == "token":
        return make("perplexity", _negative_logprob, common, finish="perplexity")
    segment = _level("perplexity", "segment")
    return make("perplexity", _segment_perplexity, common, fields=("segments",), name="perplexity_segment", **segment)


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
    return make(kind, _read, common, options={"statistic": statistic}, **_reduction(kind, reduce), **known)


def _reduction(kind: str, reduce: Reduce, *suffixes: str | None) -> dict[str, Any]:
    return {"reduce": reduce, "name": _suffixed(kind, *suffixes, None if reduce == "mean" else str(reduce))}


def _read(stats: Any, batch: Any, statistic: str) -> Tensor:
    return getattr(stats, statistic)


def top_probability(reduce: Reduce = "mean", **common: Any) -> Metric:
    """Probability of the most probable token."""
    known = _reduction("top_probability", reduce)
    needs = frozenset({"top_logprob"})
    return make("top_probability", _top_probability, common, needs=needs, reads_target=False, **known)


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
    return make("ratio", _ratio, common, options=options, fields=fields, **_level("ratio", level), **known)


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
    flag(f"normalized of metrics.{kind}", normalized)
    options, fields = _against(kind, against, level, ratio_clamp)
    name = _suffixed(
        "effective_sample_fraction" if normalized else kind,
        None if against == "old" else against,
        None if level == "token" else level,
    )
    finish = "effective_sample_fraction" if normalized else "effective_sample_size"
    return make(
        kind, _ratio_powers, common, options=options, fields=fields, finish=finish, name=name, **_level(kind, level)
    )


def _against(kind: str, against: str, level: str, ratio_clamp: float | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    fields = (AGAINST[choice(f"metrics.{kind}", "against", against, tuple(AGAINST))],)
    return _ratio_options(kind, fields[0], level, ratio_clamp), fields + (("segments",) if level == "segment" else ())


def _ratio_options(kind: str, other: str, level: str, ratio_clamp: float | None) -> dict[str, Any]:
    choice(f"metrics.{kind}", "level", level, ("token", "segment"))
    return {"other": other, "level": level, "ratio_clamp": _clamp(kind, "ratio_clamp", ratio_clamp)}


def _clamp(kind: str, argument: str, value: float | None) -> float | None:
    return None if value is None else bound(f"metrics.{kind}", argument, value)


def _log_ratio(stats: Any, batch: Any, other: str, level: str) -> Tensor:
    log_ratio = stats.logprob - batch[other]
    return batch.segment_mean(log_ratio) if level == "segment" else log_ratio


def _ratio(stats: Any, batch: Any, other: str, level: str, ratio_clamp: float | None) -> Tensor:
    return clamped(_log_ratio(stats, batch, other, level), ratio_clamp).exp()


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
    return make(kind, _kl_old, common, options=options, fields=fields, **_level(kind, level), **known)


def _estimator(kind: str, estimator: str) -> str:
    return choice(f"metrics.{kind}", "estimator", estimator, ("k1", "abs", "k2", "k3"))


def _kl_old(stats: Any, batch: Any, other: str, level: str, ratio_clamp: float | None, estimator: str) -> Tensor:
    return kl_estimate(clamped(_log_ratio(stats, batch, other, level), ratio_clamp), estimator)


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
        "bias_correction": flag(f"bias_correction of metrics.{kind}", bias_correction),
        "log_ratio_clamp": _clamp(kind, "log_ratio_clamp", log_ratio_clamp),
        "kl_clamp": _clamp(kind, "kl_clamp", kl_clamp),
        "ratio_clamp": _clamp(kind, "ratio_clamp", ratio_clamp),
    }
    fields = ("ref_logprobs", "old_logprobs") if bias_correction else ("ref_logprobs",)
    suffixes = None if estimator == "k3" else estimator, "corrected" if bias_correction else None
    return make(kind, _kl_reference, common, options=options, fields=fields, **_reduction(kind, reduce, *suffixes))


def _kl_reference(
    stats: Any,
    batch: Any,
    estimator: str,
    bias_correction: bool,
    log_ratio_clamp: float | None,
    kl_clamp: float | None,
    ratio_clamp: float | None,
) -> Tensor:
    difference = clamped(batch["ref_logprobs"] - stats.logprob, log_ratio_clamp)
    values = clamped(kl_estimate(difference, estimator), kl_clamp)
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
        "low": 1 - number(f"metrics.{kind}", "clip_low", clip_low, 0.0, 1.0),
        "high": 1 + bound(f"metrics.{kind}", "clip_high", clip_high),
        "side": side,
    }
    fields = ("old_logprobs",) + (() if side == "unsigned" else ("advantages",))
    fields += ("segments",) if level == "segment" else ()
    name = _suffixed(kind, None if side == "unsigned" else side, None if level == "token" else level)
    return make(kind, _clip_fraction, common, options=options, fields=fields, name=name, **_level(kind, level))


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
    return make("advantage", _advantage, common, fields=("advantages",), reads_target=False, **known)


def _advantage(stats: Any, batch: Any) -> Tensor:
    return batch["advantages"].to(stats.lse.dtype)
