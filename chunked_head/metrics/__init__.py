"""Metrics: functions of the statistics that losses read. They take no further softmax, and the host reads
nothing from the device."""

from ..core.checks import answer_names
from .functions import (
    AGAINST,
    acceptance,
    accuracy,
    advantage,
    agreement,
    clip_fraction,
    effective_sample_size,
    entropy,
    kl_old,
    kl_reference,
    logprob,
    lse,
    margin,
    mean_logit,
    perplexity,
    ratio,
    top_probability,
    vocabulary_sum,
)
from .preference import preference, reward
from .values import Finish, Metric, MetricOptions, MetricValue, Reduce, Weighting, all_reduce, combine, merge

__all__ = [
    "AGAINST", "Finish", "Metric", "MetricOptions", "MetricValue", "Reduce", "Weighting", "acceptance",
    "accuracy", "advantage", "agreement", "all_reduce", "clip_fraction", "combine",
    "effective_sample_size", "entropy", "kl_old", "kl_reference", "logprob", "lse", "margin", "mean_logit", "merge",
    "perplexity", "preference", "ratio", "reward", "top_probability", "vocabulary_sum",
]  # fmt: skip

answer_names(__name__, {
    "metrics.kl_old() to the old policy, metrics.kl_reference() to a reference": "kl approxkl",
    "metrics.perplexity()": "ppl", "metrics.accuracy()": "acc", "metrics.clip_fraction()": "clipfrac clipratio",
    "metrics.effective_sample_size()": "ess", "metrics.logprob()": "logprobs", "metrics.all_reduce()": "reduce",
    "metrics.preference(loss)": "rewards dpo", "out.loss, and out.parts of each summand": "loss",
})  # fmt: skip
