"""Rewards of preferred and rejected segments, as trainers log them beside preference losses."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.checks import choice, flag, number, refuse
from ..losses.base import Losses, sharing_results
from ..losses.batch import Batch, Stats
from ..losses.preference import (
    MAX_EXPONENT,
    is_past_shorter,
    score_terms,
    segment_totals,
    transformed_scores,
    values_of_pairs,
)
from .functions import make
from .values import Metric

Quantity = Literal["chosen", "rejected", "margin", "accuracy"]
# TRL's name of each quantity
TRL_NAMES: dict[Quantity, str] = {
    "chosen": "chosen", "rejected": "rejected", "margin": "margins", "accuracy": "accuracies"
}  # fmt: skip


@sharing_results
def reward(
    quantity: Quantity = "margin",
    *,
    beta: float = 0.1,
    average: bool = False,
    reference_free: bool = False,
    alpha: float = 0.0,
    ld_alpha: float | None = None,
    paired: bool = True,
    **metric_options: Any,
) -> Metric:
    """``beta * (segment_sum(logprob - ref_logprobs)[chosen] - segment_sum(logprob - ref_logprobs)[rejected])`` per
    pair, the "margin" of the implicit rewards of DPO (arXiv 2305.18290). ``quantity``: "chosen" or "rejected" is the
    reward of the pair's chosen or rejected segment; "accuracy" is 1 where the margin is positive, else 0.

    ``average``, ``reference_free`` and ``ld_alpha`` are as in ``losses.dpo``, ``alpha`` as in ``losses.simpo``.
    With ``beta=1`` and ``reference_free``, rewards are log-probabilities of segments. With ``paired=False`` there are
    no pairs: ``segment_labels`` are true for chosen segments, as for ``losses.kto``. "chosen" and "rejected" are then
    means over the chosen or rejected segments, and "margin" is the difference of these means.

    Fields: ``segments``, ``pairs`` (``segment_labels`` for ``paired=False``), ``ref_logprobs`` unless
    ``reference_free``. A segment counts if it has a token that counts, and a pair if both segments count.
    """
    metric_name = "metrics.reward"
    choice(metric_name, "quantity", quantity, tuple(TRL_NAMES))
    has_reference = not flag(f"reference_free of {metric_name}", reference_free)
    options = {
        "quantity": quantity,
        "beta": number(metric_name, "beta", beta, 0.0, is_open=True),
        "average": flag(f"average of {metric_name}", average),
        "has_reference": has_reference,
        "power": -number(metric_name, "alpha", alpha),
        "ld_alpha": None if ld_alpha is None else number(metric_name, "ld_alpha", ld_alpha, 0.0, 1.0),
    }
    flag(f"paired of {metric_name}", paired)
    refuse({
        f"quantity='accuracy' of {metric_name} is of pairs: leave paired=True": not paired and quantity == "accuracy",
        f"ld_alpha of {metric_name} weighs the tokens of pairs: leave paired=True": not paired and ld_alpha is not None,
    })  # fmt: skip
    fields = ("pairs" if paired else "segment_labels", *["ref_logprobs"] * has_reference)
    finish = "mean" if paired else "difference" if quantity == "margin" else "share"
    function: Callable[..., Any] = _reward if paired else _labelled_reward
    return make(
        "reward", function, metric_options, level="pair" if paired else "segment", suffix=quantity, options=options,
        fields=fields, finish=finish,
    )  # fmt: skip


def _reward(stats: Stats, batch: Batch, quantity: str, beta: float, **options: Any) -> Tensor:
    chosen, rejected = values_of_pairs(beta * segment_scores(stats, batch, **options), batch)
    if quantity == "accuracy":
        return (chosen > rejected).to(chosen.dtype)
    return {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected}[quantity]


def _labelled_reward(stats: Stats, batch: Batch, quantity: str, beta: float, **options: Any) -> tuple[Tensor, ...]:
    """Rewards of labelled segments. For ``quantity`` "chosen", returns two vectors [num_segments]: rewards, 0 for
    rejected segments; and bools, true for chosen segments. For "rejected", returns two vectors with the roles of chosen
    and rejected segments exchanged. For "margin", returns all four vectors."""
    rewards, is_chosen = beta * segment_scores(stats, batch, **options), batch["segment_labels"]
    chosen = torch.where(is_chosen, rewards, 0.0), is_chosen
    rejected = torch.where(~is_chosen, rewards, 0.0), ~is_chosen
    return {"chosen": chosen, "rejected": rejected, "margin": chosen + rejected}[quantity]


def segment_scores(
    stats: Stats, batch: Batch, average: bool, has_reference: bool, power: float, ld_alpha: float | None
) -> Tensor:
    """Scores of segments [num_segments]. Metrics of the same call share the tensor if their arguments are equal."""
    key = id(stats.values), average, has_reference, power, ld_alpha
    if key not in batch.shared_values:
        token_scores = score_terms(stats, batch, has_reference)
        if ld_alpha is not None:
            token_scores = torch.where(is_past_shorter(batch), token_scores * ld_alpha, token_scores)
        segment_sums = segment_totals(token_scores, batch, average)
        # beside the statistics, which stay alive, so that no other object gets their id
        batch.shared_values[key] = stats, transformed_scores(segment_sums, power, MAX_EXPONENT)
    return batch.shared_values[key][1]


# options of ``reward`` that replace the loss's options, by loss. TRL's rewards are sums for all variants of DPO
SHARED_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "dpo": {"average": False}, "kto": {"paired": False}, "simpo": {}, "cpo": {}, "orpo": {"average": True},
}  # fmt: skip


def preference(loss: Losses) -> tuple[Metric, ...]:
    """The metrics that trainers log beside a preference loss (DPO and its variants, CPO, SimPO, ORPO, KTO), with TRL's
    names: ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins``, ``rewards/accuracies`` (not for KTO),
    ``logps/chosen`` and ``logps/rejected``. Usage: ``linear_loss(..., loss, metrics=metrics.preference(loss))``.

    ``beta`` and the options of rewards come from the first preference loss in the sum ``loss``. Rewards and
    log-probabilities are sums over a segment for DPO and KTO, means for SimPO, ORPO and CPO's "ipo". If the loss has an
    ``alpha``, rewards are AlphaPO's. ValueError for a sum without a preference loss.
    """
    summand = next((summand for _, summand in getattr(loss, "terms", ()) if summand.kind in SHARED_OPTIONS), None)
    if summand is None:
        raise ValueError(
            f"metrics.preference takes a sum with one of losses.{', '.join(sorted(SHARED_OPTIONS))}, got {loss!r}; "
            "other losses' rewards are metrics.reward(quantity, beta=...)"
        )
    loss_options = {"has_reference": False} | dict(summand.options) | dict(SHARED_OPTIONS[summand.kind])
    options: dict[str, Any] = {
        "average": loss_options["average"], "reference_free": not loss_options["has_reference"],
        "ld_alpha": loss_options.get("ld_alpha"), "paired": loss_options.get("paired", True),
        "temperature": summand.temperature,
    }  # fmt: skip
    alpha = -(loss_options.get("power") or 0.0) if summand.kind in ("simpo", "cpo") else 0.0
    rewards = [
        reward(quantity, beta=loss_options["beta"], alpha=alpha, name=f"rewards/{name}", **options)
        for quantity, name in TRL_NAMES.items() if options["paired"] or quantity != "accuracy"
    ]  # fmt: skip
    options["reference_free"] = True
    sides: tuple[Quantity, ...] = ("chosen", "rejected")
    return *rewards, *[reward(side, beta=1.0, name=f"logps/{side}", **options) for side in sides]
