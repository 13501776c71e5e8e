"""The library's metrics. Metrics read the statistics that losses read: they take no further softmax, and the host reads
nothing from the device. ``Metric(...)`` makes a metric of a function that you write.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from torch import Tensor

from ..core.checks import bound, choice, flag, number, refuse_unknown
from ..core.private import breaks_graph
from ..losses.base import sharing_results
from ..losses.batch import clamped, kl_estimate
from ..losses.policy import checked_clamp, estimated_kl
from ..losses.sums import ElementwiseFunction, sum_of
from .values import Metric, MetricOptions, Reduce

ESTIMATORS = ("k1", "abs", "k2", "k3")  # of a KL divergence: values of ``estimator``
# fields of older log-probabilities, by the value of the option ``against``
AGAINST = {"old": "old_logprobs", "reference": "ref_logprobs", "rollout": "rollout_logprobs"}  # field by policy


def make(
    kind: str,
    function: Callable[..., Tensor],
    metric_options: Mapping[str, Any],
    *,
    level: str = "token",
    reduce: Reduce = "mean",
    name: str | None = None,
    suffix: str = "",  # of the default name
    fields: tuple[str, ...] = (),  # names of fields of the batch
    needs: Iterable[str] = (),  # names of statistics
    **metric_fields: Any,
) -> Metric:
    """A metric of the library. Its default name joins ``name`` (None: ``kind``), ``suffix``, "segment" if ``level`` is
    "segment", and ``reduce`` if it is not "mean". ``metric_options``: the user's ``MetricOptions``. ``metric_fields``:
    further fields of ``Metric``. TypeError or ValueError for wrong options."""
    if metric_options:
        refuse_unknown("metrics", kind, metric_options, MetricOptions.__annotations__)
    if level != "token":
        choice(f"metrics.{kind}", "level", level, ("token", "segment", "pair"))
        metric_fields |= {"scope": "segment", "unit": level}
        fields = (*fields, "segments")
    suffixes = suffix, level if level == "segment" else "", "" if reduce == "mean" else str(reduce)
    metric_fields |= {"name": "_".join([name or kind, *filter(None, suffixes)]), "reduce": reduce, "fields": fields}
    chosen_options = {option: value for option, value in metric_options.items() if value is not None}
    return Metric(kind, function, needs=frozenset(needs), check=False, **(metric_fields | chosen_options))


@sharing_results
def accuracy(**metric_options: Any) -> Metric:
    """``argmax == target``: the fraction of tokens whose target has the largest logit. Of several ids with the largest
    logit, the first is the argmax. ``metric_options`` of all metrics: ``MetricOptions``."""
    return make("accuracy", _accuracy, metric_options, needs=("argmax",))


def _accuracy(stats: Any, batch: Any) -> Tensor:
    return (stats.argmax == batch.target).to(stats.lse.dtype)


@sharing_results
def perplexity(weighting: Literal["token", "segment"] = "token", **metric_options: Any) -> Metric:
    """``(-logprob).mean().exp()`` over tokens; with ``weighting="segment"`` the mean of the segments' perplexities."""
    if choice("metrics.perplexity", "weighting", weighting, ("token", "segment")) == "token":
        return make("perplexity", _negative_logprob, metric_options, finish="perplexity")
    return make("perplexity", _segment_perplexity, metric_options, level="segment")


def _negative_logprob(stats: Any, batch: Any) -> Tensor:
    return -stats.logprob


def _segment_perplexity(stats: Any, batch: Any) -> Tensor:
    return batch.segment_mean(-stats.logprob).exp()


@sharing_results
def entropy(reduce: Reduce = "mean", **metric_options: Any) -> Metric:
    """``-(p * p.log()).sum(-1)``: entropy of the softmax in nats, at the metric's temperature."""
    return _statistic_metric("entropy", "entropy", reduce, metric_options)


@sharing_results
def lse(reduce: Reduce = "mean", **metric_options: Any) -> Metric:
    """``x.logsumexp(-1)`` of a token's logits x; its square is the z-loss."""
    return _statistic_metric("lse", "lse", reduce, metric_options)


@sharing_results
def mean_logit(reduce: Reduce = "mean", **metric_options: Any) -> Metric:
    """``x.mean(-1)``: mean of a token's logits x over the vocabulary."""
    return _statistic_metric("mean_logit", "mean_logit", reduce, metric_options)


@sharing_results
def logprob(reduce: Reduce = "mean", **metric_options: Any) -> Metric:
    """``logprob``: log-probability of the target."""
    return _statistic_metric("logprob", "logprob", reduce, metric_options)


def _statistic_metric(
    kind: str, statistic: str, reduce: Reduce, metric_options: Mapping[str, Any], **metric_fields: Any
) -> Metric:
    """A metric whose value for a token is the statistic ``statistic``."""
    needs = () if statistic in ("logprob", "lse") else (statistic,)
    metric_fields |= {"options": {"statistic": statistic}, "needs": needs, "reads_target": statistic == "logprob"}
    return make(kind, _statistic_values, metric_options, reduce=reduce, **metric_fields)


def _statistic_values(stats: Any, batch: Any, statistic: str) -> Tensor:
    return getattr(stats, statistic)


@sharing_results
def top_probability(reduce: Reduce = "mean", **metric_options: Any) -> Metric:
    """``p.amax(-1)``: probability of the likeliest id."""
    return make(
        "top_probability", _top_probability, metric_options, reduce=reduce, needs=("top_logprob",), reads_target=False
    )


def _top_probability(stats: Any, batch: Any) -> Tensor:
    return stats.top_logprob.exp()


@sharing_results
def margin(reduce: Reduce = "mean", **metric_options: Any) -> Metric:
    """``-x.topk(2)[0].diff()[:, 0]``: log-probability of the likeliest id minus the log-probability of the second
    likeliest id."""
    needs = "top_logprob", "runner_up_logprob"
    return make("margin", _margin, metric_options, reduce=reduce, needs=needs, reads_target=False)


def _margin(stats: Any, batch: Any) -> Tensor:
    return stats.top_logprob - stats.runner_up_logprob


@sharing_results
def ratio(
    against: Literal["old", "reference", "rollout"] = "old",
    *,
    level: Literal["token", "segment"] = "token",
    reduce: Reduce = "mean",
    ratio_clamp: float | None = 20.0,
    **metric_options: Any,
) -> Metric:
    """``(logprob - old_logprobs).exp()``: the ratio r of the policy to the old policy. ``against``: "reference" and
    "rollout" take ``ref_logprobs`` and ``rollout_logprobs`` instead of ``old_logprobs``.

    ``level="segment"``: GSPO's ratio, ``exp`` of the mean log-ratio over a segment's tokens; one value per segment.
    ``ratio_clamp`` c: the log-ratio is clamped to [-c, c], as in the policy losses; None: no clamp.
    """
    return make("ratio", _ratio, metric_options, reduce=reduce, **_ratio_fields("ratio", against, level, ratio_clamp))


@sharing_results
def effective_sample_size(
    against: Literal["old", "reference", "rollout"] = "old",
    *,
    level: Literal["token", "segment"] = "token",
    normalized: bool = False,
    ratio_clamp: float | None = 20.0,
    **metric_options: Any,
) -> Metric:
    """``r.sum() ** 2 / (r ** 2).sum()`` over all tokens, or over all segments with ``level="segment"``. The value lies
    between 1 and the number of tokens or segments; ``normalized`` divides by this number.

    ``MetricValue.sum`` is [2]: ``(sum r, sum r^2)``. The ratio ``r``, ``against``, ``level`` and ``ratio_clamp`` are as
    in ``ratio``.
    """
    kind = "effective_sample_size"
    flag(f"normalized of metrics.{kind}", normalized)
    finish = "effective_sample_fraction" if normalized else "effective_sample_size"
    ratio_fields = _ratio_fields(kind, against, level, ratio_clamp)
    return make(kind, _ratio, metric_options, name=finish, finish=finish, **ratio_fields)


def _ratio_fields(kind: str, against: str, level: str, ratio_clamp: float | None, **options: Any) -> dict[str, Any]:
    """Keyword arguments of ``make`` for a metric of ratios."""
    field = AGAINST[choice(f"metrics.{kind}", "against", against, tuple(AGAINST))]
    options |= {"baseline": field, "level": level, "ratio_clamp": checked_clamp(f"metrics.{kind}", ratio_clamp)}
    return {"level": level, "options": options, "fields": (field,), "suffix": "" if against == "old" else against}


def _log_ratio(stats: Any, batch: Any, baseline: str, level: str) -> Tensor:  # ``baseline``: name of a field
    log_ratio = stats.logprob - batch[baseline]
    return batch.segment_mean(log_ratio) if level == "segment" else log_ratio


def _ratio(stats: Any, batch: Any, baseline: str, level: str, ratio_clamp: float | None) -> Tensor:
    return clamped(_log_ratio(stats, batch, baseline, level), ratio_clamp).exp()


@sharing_results
def kl_old(
    estimator: Literal["k1", "abs", "k2", "k3"] = "k3",
    *,
    level: Literal["token", "segment"] = "token",
    reduce: Reduce = "mean",
    ratio_clamp: float | None = 20.0,
    **metric_options: Any,
) -> Metric:
    """``d.exp() - d - 1`` with ``d = logprob - old_logprobs``: an estimate of KL(old || new) from tokens that the old
    policy sampled.

    ``estimator``: "k3" is the formula above, "k1" ``-d``, "abs" ``d.abs()``, "k2" ``d ** 2 / 2``. ``ratio_clamp`` c:
    ``d`` is clamped to [-c, c]. With ``level="segment"``, ``d`` is GSPO's log-ratio: the mean of ``logprob -
    old_logprobs`` over a segment's tokens.
    """
    choice("metrics.kl_old", "estimator", estimator, ESTIMATORS)
    ratio_fields = _ratio_fields("kl_old", "old", level, ratio_clamp, estimator=estimator)
    ratio_fields["suffix"] = "" if estimator == "k3" else estimator
    return make("kl_old", _kl_old, metric_options, reduce=reduce, **ratio_fields)


def _kl_old(stats: Any, batch: Any, baseline: str, level: str, ratio_clamp: float | None, estimator: str) -> Tensor:
    return kl_estimate(clamped(_log_ratio(stats, batch, baseline, level), ratio_clamp), estimator)


@sharing_results
def kl_reference(
    estimator: Literal["k1", "abs", "k2", "k3"] = "k3",
    *,
    bias_correction: bool = False,
    reduce: Reduce = "mean",
    log_ratio_clamp: float | None = 20.0,
    kl_clamp: float | None = None,
    ratio_clamp: float | None = 20.0,
    **metric_options: Any,
) -> Metric:
    """``d.exp() - d - 1`` with ``d = ref_logprobs - logprob``: an estimate of KL(new || reference) from tokens that the
    policy sampled.

    ``estimator`` is as in ``kl_old``. The mean equals ``losses.kl_to_reference`` with equal options.
    ``bias_correction`` multiplies values by the ratio to ``old_logprobs``, for tokens that the old policy sampled.
    """
    metric_name = "metrics.kl_reference"
    options = {
        "estimator": choice(metric_name, "estimator", estimator, ESTIMATORS),
        "bias_correction": flag(f"bias_correction of {metric_name}", bias_correction),
        "log_ratio_clamp": checked_clamp(metric_name, log_ratio_clamp, "log_ratio_clamp"),
        "kl_clamp": checked_clamp(metric_name, kl_clamp, "kl_clamp"),
        "ratio_clamp": checked_clamp(metric_name, ratio_clamp),
    }
    fields = ("ref_logprobs", "old_logprobs") if bias_correction else ("ref_logprobs",)
    suffix = "_".join(filter(None, ("" if estimator == "k3" else estimator, "corrected" if bias_correction else "")))
    return make(
        "kl_reference", estimated_kl, metric_options, reduce=reduce, options=options, fields=fields, suffix=suffix
    )


@sharing_results
def clip_fraction(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    *,
    side: Literal["unsigned", "signed", "low", "high"] = "unsigned",
    level: Literal["token", "segment"] = "token",
    ratio_clamp: float | None = 20.0,
    **metric_options: Any,
) -> Metric:
    """``(r < 1 - clip_low) | (r > 1 + clip_high)``: the fraction of tokens whose ratio r lies outside of the clip.

    ``side``: ``"unsigned"`` counts all ratios outside of the clip. ``"low"`` counts ratios below the clip with a
    negative advantage, ``"high"`` counts ratios above the clip with a positive advantage, and ``"signed"`` counts both:
    PPO's clip removes the gradients of these tokens. A ratio at a bound is not counted. ``level="segment"``: the
    fraction of segments, by GSPO's ratio and the mean advantage of the segment.
    """
    metric_name = "metrics.clip_fraction"
    choice(metric_name, "side", side, ("unsigned", "signed", "low", "high"))
    low, high = 1 - number(metric_name, "clip_low", clip_low, 0.0, 1.0), 1 + bound(metric_name, "clip_high", clip_high)
    ratio_fields = _ratio_fields("clip_fraction", "old", level, ratio_clamp, side=side, low=low, high=high)
    if side != "unsigned":
        ratio_fields |= {"fields": ("old_logprobs", "advantages"), "suffix": side}
    return make("clip_fraction", _clip_fraction, metric_options, **ratio_fields)


def _clip_fraction(
    stats: Any, batch: Any, baseline: str, level: str, ratio_clamp: float | None, low: float, high: float, side: str
) -> Tensor:
    ratios = _ratio(stats, batch, baseline, level, ratio_clamp)
    is_below, is_above = ratios < low, ratios > high
    if side != "unsigned":
        advantages = batch["advantages"]
        if level == "segment":
            advantages = batch.segment_mean(advantages)
        is_below, is_above = is_below & (advantages < 0), is_above & (advantages > 0)
    is_clipped = {"low": is_below, "high": is_above}.get(side, is_below | is_above)
    return is_clipped.to(stats.lse.dtype)


@sharing_results
def advantage(reduce: Reduce = "mean", **metric_options: Any) -> Metric:
    """``A``, the field ``advantages``: the mean over tokens that count; with ``reduce``, the maximum or minimum."""
    return make("advantage", _advantage, metric_options, reduce=reduce, fields=("advantages",), reads_target=False)


def _advantage(stats: Any, batch: Any) -> Tensor:
    return batch["advantages"].to(stats.lse.dtype)


@sharing_results
def acceptance(reduce: Reduce = "mean", **metric_options: Any) -> Metric:
    """``torch.min(p, q).sum(-1)``: the probability that a verifier ``q`` accepts a token that a drafter ``p`` has
    sampled. The call needs a loss with a dense teacher: ``p`` is the student and ``q`` the teacher, at the
    temperatures of this loss."""
    return _statistic_metric("acceptance", "overlap", reduce, metric_options)


@breaks_graph
def vocabulary_sum(
    function: ElementwiseFunction,
    options: Mapping[str, float] | None = None,
    reduce: Reduce = "mean",
    **metric_options: Any,
) -> Metric:
    """``f(p.log()).sum(-1)`` with ``function`` f. ``function`` and ``options`` are as in ``losses.vocabulary_sum``.
    Example of f, for the total probability of the ids above a threshold: ``lambda log_p: torch.where(log_p > -3,
    log_p.exp(), 0.0)``."""
    vocab_sum = sum_of("metrics.vocabulary_sum", function, options, False)
    return _statistic_metric(
        "vocabulary_sum", "vocabulary_sum", reduce, metric_options, sums={"vocabulary_sum": vocab_sum}
    )


@sharing_results
def agreement(**metric_options: Any) -> Metric:
    """``argmax == q.argmax(-1)``: the fraction of tokens for which student and dense teacher ``q`` have the same
    likeliest id. Of several likeliest ids, the first is the argmax. ``q`` is as in ``acceptance``."""
    return make("agreement", _agreement, metric_options, needs=("argmax", "teacher_argmax"), reads_target=False)


def _agreement(stats: Any, batch: Any) -> Tensor:
    return (stats.argmax == stats.teacher_argmax).to(stats.lse.dtype)
