"""Losses of segments that are preferred or not: ORPO, KTO, and what they share with DPO (``preference_pairs``).

A segment's score is the sum or the mean over its counted tokens of ``logprob - ref_logprobs``, subtracted token by
token: the difference of two long sums would lose what the loss is about. A segment without a counted token has score 0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.checks import flag, number
from .base import Losses, make, once
from .batch import Batch, Stats, gate


@once
def orpo(beta: float = 0.1, **summand: Any) -> Losses:
    """``-beta * F.logsigmoid(odds.log()[chosen] - odds.log()[rejected])`` per pair, with ``odds = P / (1 - P)`` and
    ``P = segment_mean(logprob).exp()``: the odds-ratio term of ORPO (arXiv 2403.07691).

    Fields: ``segments``, ``pairs``. The paper's other term is the negative log-likelihood of prompt and chosen
    completion together: add it as ``cpo`` says, with ``nll_mask`` true on the chosen sequences' prompt and completion,
    and ``segments`` -1 on prompts (their targets must not be ``ignore_index``). TRL and Liger do the same; Liger's
    ``log1p(-exp(a))`` is lost where ``a`` is near 0.
    """
    beta = number("losses.orpo", "beta", beta, 0.0)
    return make("orpo", _orpo, summand, {"beta": beta}, fields=("segments", "pairs"), scope="segment", unit="pair")


def _orpo(stats: Stats, batch: Batch, beta: float) -> Tensor:
    odds = log_odds(batch.segment_mean(stats.logprob))
    chosen, rejected = of_pairs(odds, batch)
    return -beta * F.logsigmoid(chosen - rejected)


@once
def kto(
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    *,
    average: bool = False,
    reference_free: bool = False,
    **summand: Any,
) -> Losses:
    """``torch.where(desirable, desirable_weight * torch.sigmoid(beta * (kl - u)), undesirable_weight *
    torch.sigmoid(beta * (u - kl)))`` per segment, with ``u = segment_sum(logprob - ref_logprobs)``: KTO (arXiv
    2402.01306).

    ``u`` is a mean with ``average``, ``desirable`` the field ``segment_labels``, ``kl`` the constant field
    ``kl_baseline`` (0-d, [1], or one per segment), taken without gradient and at least 0; absent, it is 0, which is
    TRL's ``apo_zero_unpaired``. It is the caller's: TRL takes the mean of ``logprob - ref`` over completions of other
    prompts, over all ranks.

    Fields: ``segments``, ``segment_labels`` [num_segments] (true: desirable), ``ref_logprobs`` unless
    ``reference_free``; ``kl_baseline`` if there is one. One value per segment; the weights are no part of the
    denominator, which is the number of segments with a counted token.
    """
    where = "losses.kto"
    options = {
        "beta": number(where, "beta", beta, 0.0, open_=True),
        "desirable_weight": number(where, "desirable_weight", desirable_weight, 0.0),
        "undesirable_weight": number(where, "undesirable_weight", undesirable_weight, 0.0),
        "average": flag(f"average of {where}", average),
        "reference": not flag(f"reference_free of {where}", reference_free),
    }
    fields = ("segments", "segment_labels", *["ref_logprobs"] * (not reference_free))
    return make(
        "kto", _kto, summand, options, fields=fields, optional_fields=("kl_baseline",), scope="segment", unit="segment"
    )


def _kto(
    stats: Stats,
    batch: Batch,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
    average: bool,
    reference: bool,
) -> Tensor:
    u = total(scores(stats, batch, reference), batch, average)
    baseline = batch.get("kl_baseline")
    if baseline is not None:
        u = u - baseline.detach().clamp(min=0).to(u.dtype)
    desirable = batch["segment_labels"]
    return torch.where(desirable, desirable_weight * gate(-beta * u), undesirable_weight * gate(beta * u))


def scores(stats: Stats, batch: Batch, reference: bool) -> Tensor:
    """Each token's part [n] of its segment's score."""
    return stats.logprob - batch["ref_logprobs"] if reference else stats.logprob


def total(values: Tensor, batch: Batch, average: bool) -> Tensor:
    """Sum or mean [num_segments] over each segment's tokens."""
    return batch.segment_mean(values) if average else batch.segment_sum(values)


def of_pairs(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The chosen and the rejected segments' ``values``, each [P]."""
    pairs = batch["pairs"]
    return values[pairs[:, 0]], values[pairs[:, 1]]


def log_odds(a: Tensor) -> Tensor:
    """``a - log(1 - exp(a))`` of log-probabilities ``a <= 0``.

    A probability that rounds to 1 has infinite odds: its value is that of the nearest number below 1, and its gradient
    the one there, which is large and finite, so that a rejected segment of probability 1 is still pushed down.
    """
    eps = torch.finfo(a.dtype).eps
    a = torch.where(a > -eps, a - (a + eps).detach(), a)
    # log1p(-exp(a)) would be more exact far below 0, by less than the rounding of a itself
    return a - torch.log(-torch.expm1(a))
