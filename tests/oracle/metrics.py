"""Metrics on full logits, each with its row, which ``losses/test_metrics.py`` and the fuzzer read.

A formula makes values of tokens of ``d``: logits ``x``, their softmax ``p``, the teacher's ``q``, ``target``,
``logprob``, ``advantages``, ``log_ratio(against)``. At level "segment", ``d`` has the means of segments.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Options = Mapping[str, Any]
Formula = Callable[..., Tensor]
ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d, "abs": lambda d: d.abs(), "k2": lambda d: d**2 / 2, "k3": lambda d: d.exp() - d - 1,
}  # fmt: skip
COMMON = {"weighting", "reduce", "level"}  # options that are tried of every metric that has them
OTHERS = [{"estimator": each} for each in ("k1", "abs", "k2")]
AGAINST = [{"against": "rollout"}, {"against": "reference"}]


@dataclass(frozen=True)
class Row:
    """A metric in tests."""

    formula: Formula
    options: tuple[Options, ...]
    is_mean: bool  # a mean of the formula's values
    has_teacher: bool  # reads a dense teacher's logits


METRICS: dict[str, Row] = {}


def add_row(*options: Options, is_mean: bool = True, has_teacher: bool = False) -> Callable[[Formula], Formula]:
    """Adds the metric of the formula's name, tried with its defaults and with each of the options."""

    def add(formula: Formula) -> Formula:
        METRICS[formula.__name__] = Row(formula, ({}, *options), is_mean, has_teacher)
        return formula

    return add


def clamped(log_ratio: Tensor, bound: float | None) -> Tensor:
    bound = math.inf if bound is None else bound
    return log_ratio.clamp(-bound, bound)


@add_row()
def accuracy(d: Any) -> Tensor:
    return d.x.argmax(-1) == d.target


@add_row(is_mean=False)
def perplexity(d: Any) -> Tensor:
    return -d.logprob


@add_row()
def entropy(d: Any) -> Tensor:
    return -(d.p * d.p.log()).sum(-1)


@add_row()
def lse(d: Any) -> Tensor:
    return d.x.exp().sum(-1).log()


@add_row()
def mean_logit(d: Any) -> Tensor:
    return d.x.sum(-1) / d.x.shape[-1]


@add_row()
def logprob(d: Any) -> Tensor:
    return d.logprob


@add_row()
def top_probability(d: Any) -> Tensor:
    return d.p.amax(-1)


@add_row()
def margin(d: Any) -> Tensor:
    return -d.p.log().topk(2).values.diff(dim=-1).squeeze(-1)


@add_row()
def advantage(d: Any) -> Tensor:
    return d.advantages


@add_row(*AGAINST, {"ratio_clamp": 0.3}, {"ratio_clamp": None})
def ratio(d: Any, against: str = "old", ratio_clamp: float | None = 20.0) -> Tensor:
    return clamped(d.log_ratio(against), ratio_clamp).exp()


@add_row({"normalized": True}, *AGAINST, {"ratio_clamp": 0.3}, is_mean=False)
def effective_sample_size(d: Any, normalized: bool = False, **options: Any) -> Tensor:
    """Ratios, whose sum squared is divided by the sum of squares."""
    return ratio(d, **options)


@add_row(*OTHERS, {"ratio_clamp": 0.3}, {"estimator": "k2", "ratio_clamp": None})
def kl_old(d: Any, estimator: str = "k3", ratio_clamp: float | None = 20.0) -> Tensor:
    return ESTIMATORS[estimator](clamped(d.log_ratio("old"), ratio_clamp))


@add_row(
    *OTHERS, {"bias_correction": True}, {"bias_correction": True, "ratio_clamp": 0.3}, {"log_ratio_clamp": 0.2},
    {"kl_clamp": 0.05}, {"estimator": "k1", "kl_clamp": 0.1},
)  # fmt: skip
def kl_reference(
    d: Any,
    estimator: str = "k3",
    bias_correction: bool = False,
    log_ratio_clamp: float | None = 20.0,
    kl_clamp: float | None = None,
    ratio_clamp: float | None = 20.0,
) -> Tensor:
    values = clamped(ESTIMATORS[estimator](clamped(-d.log_ratio("reference"), log_ratio_clamp)), kl_clamp)
    return values * ratio(d, ratio_clamp=ratio_clamp) if bias_correction else values


@add_row(
    {"clip_low": 0.2, "clip_high": 0.3}, *({"clip_high": 0.3, "side": side} for side in ("low", "high", "signed")),
    {"clip_low": 0.1, "clip_high": 0.4, "ratio_clamp": 0.2},
)  # fmt: skip
def clip_fraction(
    d: Any, clip_low: float = 0.2, clip_high: float = 0.2, side: str = "unsigned", ratio_clamp: float | None = 20.0
) -> Tensor:
    ratios = ratio(d, ratio_clamp=ratio_clamp)
    low, high = ratios < 1 - clip_low, ratios > 1 + clip_high
    sides = {"low": low & (d.advantages < 0), "high": high & (d.advantages > 0), "unsigned": low | high}
    return (sides["low"] | sides["high"] if side == "signed" else sides[side]).double()


@add_row(
    *({"quantity": each} for each in ("chosen", "rejected", "accuracy")), {"beta": 0.7}, {"average": True},
    {"reference_free": True}, {"alpha": 0.3, "average": True, "reference_free": True}, {"ld_alpha": 0.4},
    *({"paired": False, "quantity": each} for each in ("chosen", "rejected", "margin")), is_mean=False,
)  # fmt: skip
def reward(
    d: Any,
    quantity: str = "margin",
    beta: float = 0.1,
    average: bool = False,
    reference_free: bool = False,
    alpha: float = 0.0,
    ld_alpha: float | None = None,
    paired: bool = True,
) -> Tensor:
    """[1] the mean over pairs of two segments with tokens, or of both labels' segments."""
    values = d.logprob if reference_free else d.log_ratio("reference")
    tokens = [values[d.mask & (d.fields["segments"] == segment)] for segment in range(len(d.fields["segment_labels"]))]
    lengths, of_all = [len(own) for own in tokens], d.fields["pairs"].tolist()
    pairs = [pair for pair in of_all if all(lengths[segment] for segment in pair)]

    def score(segment: int) -> Tensor:
        own = tokens[segment]
        bound = min([lengths[segment], *(min(lengths[each] for each in pair) for pair in of_all if segment in pair)])
        total = own.sum() if ld_alpha is None else own[:bound].sum() + ld_alpha * own[bound:].sum()
        total = total / len(own) if average else total
        return beta * ((1 - total.exp() ** -alpha) / alpha if alpha else total)

    if paired:
        chosen, rejected = (torch.stack([score(pair[side]) for pair in pairs]) for side in (0, 1))
        of_pairs = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, "accuracy": chosen > rejected}
        return of_pairs[quantity].double().mean()[None]
    labels = d.fields["segment_labels"].tolist()
    means = [
        torch.stack([score(s) for s, own in enumerate(tokens) if len(own) and labels[s] == label]).mean()
        for label in (True, False)
    ]
    return {"chosen": means[0], "rejected": means[1], "margin": means[0] - means[1]}[quantity][None]


@add_row(has_teacher=True)
def acceptance(d: Any) -> Tensor:
    return torch.minimum(d.p, d.q).sum(-1)


@add_row(has_teacher=True)
def agreement(d: Any) -> Tensor:
    return d.x.argmax(-1) == d.q.argmax(-1)
