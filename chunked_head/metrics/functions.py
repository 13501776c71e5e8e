"""The library's metrics. They read the statistics that losses read, so they need no softmax pass, and the host reads
nothing from the device. ``Metric(...)`` makes one of your own.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from torch import Tensor

from ..core.checks import bound, choice, flag, number, refuse_unknown
from ..core.private import breaks_graph
from ..losses.base import once
from ..losses.batch import clamped, kl_estimate
from ..losses.policy import checked_clamp, estimated_kl
from ..losses.sums import Elementwise, sum_of
from .values import Metric, MetricOptions, Reduce

ESTIMATORS = ("k1", "abs", "k2", "k3")
AGAINST = {"old": "old_logprobs", "reference": "ref_logprobs", "rollout": "rollout_logprobs"}


def make(
    kind: str,
    function: Callable[..., Tensor],
    common: Mapping[str, Any],
    *,
    level: str = "token",
    reduce: Reduce = "mean",
    name: str | None = None,
    suffix: str = "",
    fields: tuple[str, ...] = (),
    needs: Iterable[str] = (),
    **metric_fields: Any,
) -> Metric:
    """A metric. Its default name is ``name`` (None: ``kind``) and ``suffix``, with level and reduction appended where
    they are not "token" and "mean". ``common``: ``MetricOptions``; ``metric_fields``: further fields of ``Metric``."""
    if common:
        refuse_unknown("metrics", kind, common, MetricOptions.__annotations__)
    if level != "token":
        choice(f"metrics.{kind}", "level", level, ("token", "segment", "pair"))
        metric_fields |= {"scope": "segment", "unit": level}
        fields = (*fields, "segments")
    unusual = suffix, level if level == "segment" else "", "" if reduce == "mean" else str(reduce)
    metric_fields |= {"name": "_".join([name or kind, *filter(None, unusual)]), "reduce": reduce, "fields": fields}
    chosen_options = {option: value for option, value in common.items() if value is not None}
    return Metric(kind, function, needs=frozenset(needs), check=False, **(metric_fields | chosen_options))


@once
def accuracy(**common: Any) -> Metric:
    """``argmax == target``: share of tokens whose target is the id of the largest logit; on ties, the first such id.

    ``common``, here and below: ``MetricOptions``.
    """
    return make("accuracy", _accuracy, common, needs=("argmax",))


def _accuracy(stats: Any, batch: Any) -> Tensor:
    return (stats.argmax == batch.target).to(stats.lse.dtype)


@once
def perplexity(weighting: Literal["token", "segment"] = "token", **common: Any) -> Metric:
    """``(-logprob).mean().exp()``; with ``weighting="segment"`` the mean over segments of each one's perplexity."""
    if choice("metrics.perplexity", "weighting", weighting, ("token", "segment")) == "token":
        return make("perplexity", _negative_logprob, common, finish="perplexity")
    return make("perplexity", _segment_perplexity, common, level="segment")


def _negative_logprob(stats: Any, batch: Any) -> Tensor:
    return -stats.logprob


def _segment_perplexity(stats: Any, batch: Any) -> Tensor:
    return batch.segment_mean(-stats.logprob).exp()


@once
def entropy(reduce: Reduce = "mean", **common: Any) -> Metric:
    """``-(p * p.log()).sum(-1)``: entropy of the softmax in nats, at the metric's temperature."""
    return _statistic("entropy", "entropy", reduce, common)


@once
def lse(reduce: Reduce = "mean", **common: Any) -> Metric:
    """``x.logsumexp(-1)``: the number whose square is the z-loss."""
    return _statistic("lse", "lse", reduce, common)


@once
def mean_logit(reduce: Reduce = "mean", **common: Any) -> Metric:
    """``x.mean(-1)``: mean of a token's logits over the vocabulary."""
    return _statistic("mean_logit", "mean_logit", reduce, common)


@once
def logprob(reduce: Reduce = "mean", **common: Any) -> Metric:
    """``logprob``: log-probability of the target."""
    return _statistic("logprob", "logprob", reduce, common)


def _statistic(kind: str, statistic: str, reduce: Reduce, common: Mapping[str, Any], **metric_fields: Any) -> Metric:
    needs = () if statistic in ("logprob", "lse") else (statistic,)
    metric_fields |= {"options": {"statistic": statistic}, "needs": needs, "reads_target": statistic == "logprob"}
    return make(kind, _read, common, reduce=reduce, **metric_fields)


def _read(stats: Any, batch: Any, statistic: str) -> Tensor:
    return getattr(stats, statistic)


@once
def top_probability(reduce: Reduce = "mean", **common: Any) -> Metric:
    """``p.amax(-1)``: probability of the most probable token."""
    return make("top_probability", _top_probability, common, reduce=reduce, needs=("top_logprob",), reads_target=False)


def _top_probability(stats: Any, batch: Any) -> Tensor:
    return stats.top_logprob.exp()


@once
def margin(reduce: Reduce = "mean", **common: Any) -> Metric:
    """``-x.topk(2)[0].diff()[:, 0]``: log-probability of the most probable token minus the runner-up's, 0 on ties."""
    needs = "top_logprob", "runner_up_logprob"
    return make("margin", _margin, common, reduce=reduce, needs=needs, reads_target=False)


def _margin(stats: Any, batch: Any) -> Tensor:
    return stats.top_logprob - stats.runner_up_logprob


@once
def ratio(
    against: Literal["old", "reference", "rollout"] = "old",
    *,
    level: Literal["token", "segment"] = "token",
    reduce: Reduce = "mean",
    ratio_clamp: float | None = 20.0,
    **common: Any,
) -> Metric:
    """``(logprob - old_logprobs).exp()``: the ratio r to the old policy, or by ``against`` to the policy of
    ``ref_logprobs`` or ``rollout_logprobs``.

    ``level="segment"``: GSPO's ratio, ``exp`` of the mean log-ratio over a segment's tokens; one value per segment.
    ``ratio_clamp`` c: the log-ratio is clamped to [-c, c], as in the policy losses; None: no clamp.
    """
    return make("ratio", _ratio, common, reduce=reduce, **_of_ratios("ratio", against, level, ratio_clamp))


@once
def effective_sample_size(
    against: Literal["old", "reference", "rollout"] = "old",
    *,
    level: Literal["token", "segment"] = "token",
    normalized: bool = False,
    ratio_clamp: float | None = 20.0,
    **common: Any,
) -> Metric:
    """``r.sum() ** 2 / (r ** 2).sum()`` over all tokens (or segments), between 1 and their number.

    ``normalized`` divides by the number of tokens (or segments), so that the value is at most 1. ``.sum`` is
    ``(sum r, sum r^2)``. ``r``, ``against``, ``level`` and ``ratio_clamp`` as in ``ratio``.
    """
    kind = "effective_sample_size"
    flag(f"normalized of metrics.{kind}", normalized)
    finish = "effective_sample_fraction" if normalized else "effective_sample_size"
    traits = _of_ratios(kind, against, level, ratio_clamp)
    return make(kind, _ratio, common, name=finish, finish=finish, **traits)


def _of_ratios(kind: str, against: str, level: str, ratio_clamp: float | None, **options: Any) -> dict[str, Any]:
    """Keywords of ``make`` for a metric of ratios."""
    baseline = AGAINST[choice(f"metrics.{kind}", "against", against, tuple(AGAINST))]
    options |= {"baseline": baseline, "level": level, "ratio_clamp": checked_clamp(f"metrics.{kind}", ratio_clamp)}
    return {"level": level, "options": options, "fields": (baseline,), "suffix": "" if against == "old" else against}


def _log_ratio(stats: Any, batch: Any, baseline: str, level: str) -> Tensor:
    log_ratio = stats.logprob - batch[baseline]
    return batch.segment_mean(log_ratio) if level == "segment" else log_ratio


def _ratio(stats: Any, batch: Any, baseline: str, level: str, ratio_clamp: float | None) -> Tensor:
    return clamped(_log_ratio(stats, batch, baseline, level), ratio_clamp).exp()


@once
def kl_old(
    estimator: Literal["k1", "abs", "k2", "k3"] = "k3",
    *,
    level: Literal["token", "segment"] = "token",
    reduce: Reduce = "mean",
    ratio_clamp: float | None = 20.0,
    **common: Any,
) -> Metric:
    """``d.exp() - d - 1`` with ``d = logprob - old_logprobs``: KL(old || new), on tokens that the old policy sampled.

    ``estimator``: "k3" is this, "k1" ``-d``, "abs" ``d.abs()``, "k2" ``d ** 2 / 2``. ``ratio_clamp`` c: ``d`` is
    clamped to [-c, c]. ``level="segment"``: ``d`` is the mean over the segment's tokens, GSPO's log-ratio.
    """
    choice("metrics.kl_old", "estimator", estimator, ESTIMATORS)
    traits = _of_ratios("kl_old", "old", level, ratio_clamp, estimator=estimator)
    traits["suffix"] = "" if estimator == "k3" else estimator
    return make("kl_old", _kl_old, common, reduce=reduce, **traits)


def _kl_old(stats: Any, batch: Any, baseline: str, level: str, ratio_clamp: float | None, estimator: str) -> Tensor:
    return kl_estimate(clamped(_log_ratio(stats, batch, baseline, level), ratio_clamp), estimator)


@once
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
    """``d.exp() - d - 1`` with ``d = ref_logprobs - logprob``: KL(new || reference), on tokens that the policy sampled.

    ``estimator`` as in ``kl_old``. The mean equals ``losses.kl_to_reference`` with the same options.
    ``bias_correction`` multiplies by the ratio to ``old_logprobs``, for tokens that the old policy sampled.
    """
    where = "metrics.kl_reference"
    options = {
        "estimator": choice(where, "estimator", estimator, ESTIMATORS),
        "bias_correction": flag(f"bias_correction of {where}", bias_correction),
        "log_ratio_clamp": checked_clamp(where, log_ratio_clamp, "log_ratio_clamp"),
        "kl_clamp": checked_clamp(where, kl_clamp, "kl_clamp"),
        "ratio_clamp": checked_clamp(where, ratio_clamp),
    }
    fields = ("ref_logprobs", "old_logprobs") if bias_correction else ("ref_logprobs",)
    suffix = "_".join(filter(None, ("" if estimator == "k3" else estimator, "corrected" if bias_correction else "")))
    return make("kl_reference", estimated_kl, common, reduce=reduce, options=options, fields=fields, suffix=suffix)


@once
def clip_fraction(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    *,
    side: Literal["unsigned", "signed", "low", "high"] = "unsigned",
    level: Literal["token", "segment"] = "token",
    ratio_clamp: float | None = 20.0,
    **common: Any,
) -> Metric:
    """``(r < 1 - clip_low) | (r > 1 + clip_high)``: share of tokens (or segments) whose ratio lies outside of the clip.

    ``side``: ``"unsigned"`` counts ratios below or above the bounds, whatever the advantage; ``"low"`` those below with
    a negative advantage; ``"high"`` those above with a positive advantage; ``"signed"`` both of the latter, where PPO's
    clip takes the gradient away. A ratio at a bound is not counted. ``level="segment"``: GSPO's ratio, and the mean
    advantage of the segment.
    """
    where = "metrics.clip_fraction"
    choice(where, "side", side, ("unsigned", "signed", "low", "high"))
    low, high = 1 - number(where, "clip_low", clip_low, 0.0, 1.0), 1 + bound(where, "clip_high", clip_high)
    traits = _of_ratios("clip_fraction", "old", level, ratio_clamp, side=side, low=low, high=high)
    if side != "unsigned":
        traits |= {"fields": ("old_logprobs", "advantages"), "suffix": side}
    return make("clip_fraction", _clip_fraction, common, **traits)


def _clip_fraction(
    stats: Any, batch: Any, baseline: str, level: str, ratio_clamp: float | None, low: float, high: float, side: str
) -> Tensor:
    ratios = _ratio(stats, batch, baseline, level, ratio_clamp)
    below, above = ratios < low, ratios > high
    if side != "unsigned":
        advantages = batch["advantages"]
        if level == "segment":
            advantages = batch.segment_mean(advantages)
        below, above = below & (advantages < 0), above & (advantages > 0)
    clipped = {"low": below, "high": above}.get(side, below | above)
    return clipped.to(stats.lse.dtype)


@once
def advantage(reduce: Reduce = "mean", **common: Any) -> Metric:
    """``A``: mean, maximum or minimum of ``batch["advantages"]`` over tokens that count."""
    return make("advantage", _advantage, common, reduce=reduce, fields=("advantages",), reads_target=False)


def _advantage(stats: Any, batch: Any) -> Tensor:
    return batch["advantages"].to(stats.lse.dtype)


@once
def acceptance(reduce: Reduce = "mean", **common: Any) -> Metric:
    """``torch.min(p, q).sum(-1)``: the probability that a verifier ``q`` accepts a token that a drafter ``p`` has
    sampled. The call needs a loss with a dense teacher: ``p`` and ``q`` are student and teacher at its temperatures."""
    return _statistic("acceptance", "overlap", reduce, common)


@breaks_graph
def vocabulary_sum(
    function: Elementwise, options: Mapping[str, float] | None = None, reduce: Reduce = "mean", **common: Any
) -> Metric:
    """``f(p.log()).sum(-1)`` with ``function`` f; ``function`` and ``options`` are as in ``losses.vocabulary_sum``. An
    example is the mass of ids above a threshold, ``lambda log_p: torch.where(log_p > -3, log_p.exp(), 0.0)``."""
    vocab_sum = sum_of("metrics.vocabulary_sum", function, options, False)
    return _statistic("vocabulary_sum", "vocabulary_sum", reduce, common, sums={"vocabulary_sum": vocab_sum})


@once
def agreement(**common: Any) -> Metric:
    """``argmax == q.argmax(-1)``: share of tokens whose most probable id is that of the dense teacher ``q``; on ties,
    the first such id. ``q`` as in ``acceptance``."""
    return make("agreement", _agreement, common, needs=("argmax", "teacher_argmax"), reads_target=False)


def _agreement(stats: Any, batch: Any) -> Tensor:
    return (stats.argmax == stats.teacher_argmax).to(stats.lse.dtype)
