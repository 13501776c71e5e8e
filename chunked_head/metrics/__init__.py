"""Metrics from the statistics that losses are made of: no softmax pass of their own, nothing read from the device."""

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
from .values import Finish, Metric, MetricOptions, MetricValue, Reduce, Weighting, all_reduce, combine, merge

__all__ = [
    "AGAINST", "Finish", "Metric", "MetricOptions", "MetricValue", "Reduce", "Weighting", "acceptance",
    "accuracy", "advantage", "agreement", "all_reduce", "clip_fraction", "combine",
    "effective_sample_size", "entropy", "kl_old", "kl_reference", "logprob", "lse", "margin", "mean_logit", "merge",
    "perplexity", "ratio", "top_probability", "vocabulary_sum",
]  # fmt: skip
