"""Metrics from the statistics that losses are made of: no softmax pass of their own, nothing read from the device."""

from typing import TYPE_CHECKING

from ..core.checks import hints_of
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

KL = "metrics.kl_old() is to the old policy, metrics.kl_reference() to a reference"
if not TYPE_CHECKING:  # a type checker would take every name of a module with ``__getattr__``
    __getattr__ = hints_of(__name__, __all__, {
        "kl": KL, "approxkl": KL, "ppl": "that is metrics.perplexity()", "acc": "that is metrics.accuracy()",
        "clipfrac": "that is metrics.clip_fraction()", "clipratio": "that is metrics.clip_fraction()",
        "ess": "that is metrics.effective_sample_size()", "logprobs": "that is metrics.logprob()",
        "loss": "out.loss and out.parts have losses", "reduce": "that is metrics.all_reduce()",
        "rewards": "metrics.preference(loss) has what trainers log", "dpo": "that is metrics.preference(losses.dpo())",
    })  # fmt: skip
