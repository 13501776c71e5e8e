"""Rewards of preferred and rejected segments, as trainers log them beside preference losses."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.checks import choice, flag, number, refuse
from ..losses.base import Losses, once
from ..losses.batch import Batch, Stats
from ..losses.preference import MOST_EXPONENT, bent, beyond_shorter, of_pairs, scores, total
from .functions import make
from .values import Metric

Quantity = Literal["chosen", "rejected", "margin", "accuracy"]
# names under which TRL logs them
TRL_NAMES: dict[Quantity, str] = {
    "chosen": "chosen", "rejected": "rejected", "margin": "margins", "accuracy": "accuracies"
}  # fmt: skip


@once
def reward(
    quantity: Quantity = "margin",
    *,
    beta: float = 0.1,
    average: bool = False,
    reference_free: bool = False,
    alpha: float = 0.0,
    ld_alpha: float | None = None,
    paired: bool = True,
    **common: Any,
) -> Metric:
    """``beta * (segment_sum(logprob - ref_logprobs)[chosen] - segment_sum(logprob - ref_logprobs)[rejected])`` per
    pair, the "margin" of the implicit rewards of DPO (arXiv 2305.18290); or one of the two rewards, "chosen" or
    "rejected"; or "accuracy", 1 where the margin is positive.

    ``average``, ``reference_free``, ``ld_alpha`` as in ``losses.dpo``, ``alpha`` as in ``losses.simpo``. A ``beta`` of
    1 and ``reference_free`` give log-probabilities. Without ``paired`` segments are chosen where ``segment_labels`` are
    true, as in ``losses.kto``: each mean is over one label's segments, and the margin is the difference of both.

    Fields: ``segments``, ``pairs`` (``segment_labels`` without ``paired``), ``ref_logprobs`` unless ``reference_free``.
    Means count pairs of two segments with a counted token, or segments with one.
    """
    where = "metrics.reward"
    choice(where, "quantity", quantity, tuple(TRL_NAMES))
    reference = not flag(f"reference_free of {where}", reference_free)
    options = {
        "quantity": quantity,
        "beta": number(where, "beta", beta, 0.0, open_=True),
        "average": flag(f"average of {where}", average),
        "reference": reference,
        "power": -number(where, "alpha", alpha),
        "ld_alpha": None if ld_alpha is None else number(where, "ld_alpha", ld_alpha, 0.0, 1.0),
    }
    flag(f"paired of {where}", paired)
    refuse({
        f"quantity='accuracy' of {where} is of pairs: leave paired=True": not paired and quantity == "accuracy",
        f"ld_alpha of {where} weighs the tokens of pairs: leave paired=True": not paired and ld_alpha is not None,
    })  # fmt: skip
    fields = ("pairs" if paired else "segment_labels", *["ref_logprobs"] * reference)
    finish = "mean" if paired else "difference" if quantity == "margin" else "share"
    function: Callable[..., Any] = _reward if paired else _labelled_reward
    return make(
        "reward", function, common, level="pair" if paired else "segment", suffix=quantity, options=options,
        fields=fields, finish=finish,
    )  # fmt: skip


def _reward(stats: Stats, batch: Batch, quantity: str, beta: float, **options: Any) -> Tensor:
    chosen, rejected = of_pairs(beta * segment_scores(stats, batch, **options), batch)
    if quantity == "accuracy":
        return (chosen > rejected).to(chosen.dtype)
    return {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected}[quantity]


def _labelled_reward(stats: Stats, batch: Batch, quantity: str, beta: float, **options: Any) -> tuple[Tensor, ...]:
    """Values and flags [num_segments] of the chosen segments, of the rejected ones, or of both."""
    rewards, labels = beta * segment_scores(stats, batch, **options), batch["segment_labels"]
    sides = ("chosen", labels), ("rejected", ~labels)
    columns = {name: (torch.where(flags, rewards, 0.0), flags) for name, flags in sides}
    return columns["chosen"] + columns["rejected"] if quantity == "margin" else columns[quantity]


def segment_scores(
    stats: Stats, batch: Batch, average: bool, reference: bool, power: float, ld_alpha: float | None
) -> Tensor:
    """Scores [num_segments], computed once for all metrics of a call."""
    key = id(stats), average, reference, power, ld_alpha
    if key not in batch.memo:
        values = scores(stats, batch, reference)
        if ld_alpha is not None:
            values = torch.where(beyond_shorter(batch), values * ld_alpha, values)
        # with the statistics, so that no others get their id
        batch.memo[key] = stats, bent(total(values, batch, average), power, MOST_EXPONENT)
    return batch.memo[key][1]


# by loss: the options that its trainer's rewards share with it, others replaced. TRL's rewards of DPO are sums of
# log-ratios whatever the variant
SHARED: Mapping[str, Mapping[str, Any]] = {
    "dpo": {"average": False}, "kto": {"paired": False}, "simpo": {}, "cpo": {}, "orpo": {"average": True},
}  # fmt: skip


def preference(loss: Losses) -> tuple[Metric, ...]:
    """What trainers log beside DPO and its variants, CPO, SimPO, ORPO or KTO, under TRL's names: ``rewards/chosen``,
    ``rewards/rejected``, ``rewards/margins``, ``rewards/accuracies`` (not of KTO), ``logps/chosen`` and
    ``logps/rejected``; from the loss's own pass: ``linear_loss(..., loss, metrics=metrics.preference(loss))``.

    ``beta`` and the scores' options are those of the first preference loss of a sum. Rewards and log-probabilities are
    sums over a segment for DPO and KTO, means for SimPO, ORPO and CPO's "ipo". With ``alpha`` rewards are AlphaPO's.
    """
    summand = next((summand for _, summand in getattr(loss, "terms", ()) if summand.kind in SHARED), None)
    if summand is None:
        raise ValueError(
            f"metrics.preference takes a sum with one of losses.{', '.join(sorted(SHARED))}, got {loss!r}; other "
            "losses' rewards are metrics.reward(quantity, beta=...)"
        )
    shared = {"reference": False} | dict(summand.options) | dict(SHARED[summand.kind])
    options: dict[str, Any] = {
        "average": shared["average"], "reference_free": not shared["reference"], "ld_alpha": shared.get("ld_alpha"),
        "paired": shared.get("paired", True), "temperature": summand.temperature,
    }  # fmt: skip
    alpha = -(shared.get("power") or 0.0) if summand.kind in ("simpo", "cpo") else 0.0
    rewards = [
        reward(quantity, beta=shared["beta"], alpha=alpha, name=f"rewards/{name}", **options)
        for quantity, name in TRL_NAMES.items() if options["paired"] or quantity != "accuracy"
    ]  # fmt: skip
    options["reference_free"] = True
    sides: tuple[Quantity, ...] = ("chosen", "rejected")
    return *rewards, *[reward(side, beta=1.0, name=f"logps/{side}", **options) for side in sides]
