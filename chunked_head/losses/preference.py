"""Losses of pairs of segments, and of segments with a label: DPO and its variants, SimPO, CPO, ORPO, KTO.

A segment's score is the sum or the mean over its counted tokens of ``logprob - ref_logprobs``, subtracted token by
token: the difference of two long sums would lose what the loss is about. A segment without a counted token has score 0.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.batch import Batch
from ..core.loss_stats import Stats
from .base import Losses, choice, flag, make, number

DPO_VARIANTS = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
    "apo_down", "discopop",
)  # fmt: skip
CPO_VARIANTS = ("sigmoid", "hinge", "ipo")
AVERAGED = ("ipo", "sigmoid_norm")  # variants that score a segment by its mean unless told otherwise
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair")


def dpo(
    beta: float = 0.1,
    variant: str = "sigmoid",
    *,
    label_smoothing: float = 0.0,
    average: bool | None = None,
    reference_free: bool = False,
    discopop_tau: float = 0.05,
    **summand: Any,
) -> Losses:
    """Direct preference optimisation and its relatives (arXiv 2305.18290; names and defaults as TRL's ``loss_type``).

    With ``u`` and ``v`` the scores of a pair's chosen and rejected segment, ``d = beta * (u - v)``, ``s`` the sigmoid
    and ``eps = label_smoothing``, a pair's value is:

    - ``sigmoid``: ``-(1 - eps) * log s(d) - eps * log s(-d)``; eps > 0 is cDPO. ``sigmoid_norm``: of mean scores.
    - ``hinge`` (SLiC, 2305.10425): ``max(0, 1 - d)``.
    - ``ipo`` (2310.12036): ``(u - v - 1 / (2 * beta)) ** 2`` of mean scores.
    - ``robust`` (2403.00409), eps < 0.5: ``(-(1 - eps) * log s(d) + eps * log s(-d)) / (1 - 2 * eps)``.
    - ``exo_pair`` (2402.00856), eps > 0: KL of ``(s(d), s(-d))`` from ``(1 - eps, eps)``; the paper advises 1e-3.
    - ``nca_pair`` (2402.05369): ``-log s(beta * u) - 0.5 * log s(-beta * u) - 0.5 * log s(-beta * v)``.
    - ``bco_pair`` (2404.04656), without a running mean: ``-log s(beta * u) - log s(-beta * v)``.
    - ``sppo_hard`` (2405.00675): ``(u - 0.5 / beta) ** 2 + (v + 0.5 / beta) ** 2``.
    - ``apo_zero`` (2408.06266): ``s(-beta * u) + s(beta * v)``. ``apo_down``: ``s(beta * u) + s(-d)``.
    - ``discopop`` (2406.08414): ``-log s(d) * (1 - M) + exp(-d) * M``, ``M = s(d / discopop_tau)``.

    Fields: ``segments``, ``pairs`` [P, 2] of (chosen, rejected) segment ids, and ``ref_logprobs`` unless
    ``reference_free``. One value per pair; the mean is over pairs. ``average`` scores segments by their mean instead
    of their sum; by default ``ipo`` and ``sigmoid_norm`` do.

    Where sources differ: OpenRLHF's IPO takes sums (``average=False``), TRL's means. Liger has no smoothing of
    ``sigmoid``. Fast-LLM sums the differences of all pairs under one log-sigmoid: not offered.
    """
    choice("dpo", "variant", variant, DPO_VARIANTS)
    discopop_tau = number("dpo", "discopop_tau", discopop_tau, 0.0, math.inf, open_=True)
    reference = not flag("dpo", "reference_free", reference_free)
    return paired("dpo", beta, variant, label_smoothing, average, reference, summand, tau=discopop_tau)


def simpo(beta: float = 0.1, gamma: float = 0.5, *, label_smoothing: float = 0.0, **summand: Any) -> Losses:
    """SimPO (arXiv 2405.14734): ``-log s(d)`` with ``d = beta * (u - v) - gamma`` of mean log-probabilities.

    ``label_smoothing`` as in ``dpo``. Fields: ``segments``, ``pairs``; no reference. The margin is TRL's and Liger's
    ``simpo_gamma``, as are the defaults; the paper's code says ``gamma_beta_ratio = gamma / beta`` and trains with
    beta 2 to 10. TRL and Liger can add the chosen segments' NLL: ``cpo`` says how to.
    """
    gamma = number("simpo", "gamma", gamma)
    return paired("simpo", beta, "sigmoid", label_smoothing, True, False, summand, margin=gamma)


def cpo(
    beta: float = 0.1,
    variant: str = "sigmoid",
    *,
    label_smoothing: float = 0.0,
    average: bool | None = None,
    **summand: Any,
) -> Losses:
    """Contrastive preference optimisation (arXiv 2401.08417): ``dpo`` without a reference, the pair term alone.

    ``variant``: ``sigmoid``, ``hinge`` or ``ipo``, as in ``dpo``. Scores are sums except for ``ipo``'s. Fields:
    ``segments``, ``pairs``.

    The papers and TRL add the chosen segments' negative log-likelihood (``cpo_alpha`` 1), which is a summand of its
    own: with ``batch["nll_mask"]`` true on the tokens it is of,
    ``losses.cpo() + losses.cross_entropy(token_weights="nll_mask", normalizer=nll_mask.sum())``. The normalizer makes
    it the mean over those tokens; without one it is divided by all tokens that count.
    """
    choice("cpo", "variant", variant, CPO_VARIANTS)
    return paired("cpo", beta, variant, label_smoothing, average, False, summand)


def orpo(beta: float = 0.1, **summand: Any) -> Losses:
    """The odds-ratio term of ORPO (arXiv 2403.07691): ``-beta * log s(log odds(chosen) - log odds(rejected))``.

    ``odds = P / (1 - P)`` with ``P`` the exponential of a segment's mean log-probability. Fields: ``segments``,
    ``pairs``. The paper's other term is the negative log-likelihood of prompt and chosen completion together: add it
    as ``cpo`` says, with ``nll_mask`` true on the chosen sequences' prompt and completion, and ``segments`` -1 on
    prompts (their targets must not be ``ignore_index``). TRL and Liger do the same; Liger's ``log1p(-exp(a))`` is lost
    where ``a`` is near 0.
    """
    beta = number("orpo", "beta", beta, 0.0)
    return make("orpo", _orpo, summand, {"beta": beta}, fields=("segments", "pairs"), scope="segment", unit="pair")


def kto(
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    *,
    average: bool = False,
    reference_free: bool = False,
    **summand: Any,
) -> Losses:
    """KTO (arXiv 2402.01306): ``w * s(beta * (kl - u))`` of desirable segments, ``w * s(beta * (u - kl))`` of others.

    ``u`` is the segment's score (a mean with ``average``), ``w`` the weight of its kind, ``kl`` the constant field
    ``kl_baseline`` (0-d, [1], or one per segment), taken without gradient and at least 0; absent, it is 0, which is
    TRL's ``apo_zero_unpaired``. It is the caller's: TRL takes the mean of ``logprob - ref`` over completions of other
    prompts, over all ranks.

    Fields: ``segments``, ``segment_labels`` [num_segments] (true: desirable), ``ref_logprobs`` unless
    ``reference_free``; ``kl_baseline`` if there is one. One value per segment; the weights are no part of the
    denominator, which is the number of segments with a counted token.
    """
    options = {
        "beta": number("kto", "beta", beta, 0.0, open_=True),
        "desirable_weight": number("kto", "desirable_weight", desirable_weight, 0.0),
        "undesirable_weight": number("kto", "undesirable_weight", undesirable_weight, 0.0),
        "average": flag("kto", "average", average),
        "reference": not flag("kto", "reference_free", reference_free),
    }
    fields = ("segments", "segment_labels") + (() if reference_free else ("ref_logprobs",))
    return make(
        "kto",
        _kto,
        summand,
        options,
        fields=fields,
        optional_fields=("kl_baseline",),
        scope="segment",
        unit="segment",
    )


def paired(
    kind: str,
    beta: float,
    variant: str,
    label_smoothing: float,
    average: bool | None,
    reference: bool,
    summand: dict[str, Any],
    margin: float = 0.0,
    tau: float = 0.05,
) -> Losses:
    """A loss of a pair's two scores, its options checked."""
    smoothing = number(kind, "label_smoothing", label_smoothing, 0.0, 1.0)
    if variant not in SMOOTHED and smoothing:
        raise ValueError(
            f"label_smoothing of losses.{kind} does not apply to variant {variant!r}, got {label_smoothing!r}; it is "
            f"an option of {', '.join(name for name in SMOOTHED if kind == 'dpo' or name in CPO_VARIANTS)}"
        )
    if variant == "robust" and smoothing >= 0.5:
        raise ValueError(f"label_smoothing of losses.{kind} must be below 0.5 for 'robust', got {smoothing}")
    if variant == "exo_pair" and not 0 < smoothing < 1:
        raise ValueError(
            f"label_smoothing of losses.{kind} must be between 0 and 1 for 'exo_pair', ends excluded, got {smoothing}; "
            "its paper advises 1e-3"
        )
    options = {
        "beta": number(kind, "beta", beta, 0.0, open_=True),
        "variant": variant,
        "label_smoothing": smoothing,
        "average": variant in AVERAGED if average is None else flag(kind, "average", average),
        "reference": reference,
        "margin": margin,
        "tau": tau,
    }
    fields = ("segments", "pairs") + (("ref_logprobs",) if reference else ())
    return make(kind, _paired, summand, options, fields=fields, scope="segment", unit="pair")


def _paired(
    stats: Stats,
    batch: Batch,
    beta: float,
    variant: str,
    label_smoothing: float,
    average: bool,
    reference: bool,
    margin: float,
    tau: float,
) -> Tensor:
    u, v = of_pairs(scores(stats, batch, average, reference), batch)
    d = beta * (u - v) - margin
    eps = label_smoothing
    if variant in ("sigmoid", "sigmoid_norm"):
        return -(1 - eps) * F.logsigmoid(d) - eps * F.logsigmoid(-d)
    if variant == "hinge":
        return torch.relu(1 - d)
    if variant == "ipo":
        return (u - v - 0.5 / beta).square()
    if variant == "robust":
        return (-(1 - eps) * F.logsigmoid(d) + eps * F.logsigmoid(-d)) / (1 - 2 * eps)
    if variant == "exo_pair":
        chosen = torch.sigmoid(d) * (F.logsigmoid(d) - math.log1p(-eps))
        return chosen + torch.sigmoid(-d) * (F.logsigmoid(-d) - math.log(eps))
    if variant == "nca_pair":
        return -F.logsigmoid(beta * u) - 0.5 * F.logsigmoid(-beta * u) - 0.5 * F.logsigmoid(-beta * v)
    if variant == "bco_pair":
        return -F.logsigmoid(beta * u) - F.logsigmoid(-beta * v)
    if variant == "sppo_hard":
        return (u - 0.5 / beta).square() + (v + 0.5 / beta).square()
    if variant == "apo_zero":
        return torch.sigmoid(-beta * u) + torch.sigmoid(beta * v)
    if variant == "apo_down":
        return torch.sigmoid(beta * u) + torch.sigmoid(-d)
    # discopop; exp(-d) * M in one exponential: for d far below 0 it is inf * 0 otherwise
    exponential = torch.exp(F.logsigmoid(d / tau) - d)
    return exponential - F.logsigmoid(d) * torch.sigmoid(-d / tau)


def _orpo(stats: Stats, batch: Batch, beta: float) -> Tensor:
    odds = log_odds(scores(stats, batch, average=True, reference=False))
    chosen, rejected = of_pairs(odds, batch)
    return -beta * F.logsigmoid(chosen - rejected)


def _kto(
    stats: Stats,
    batch: Batch,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
    average: bool,
    reference: bool,
) -> Tensor:
    u = scores(stats, batch, average, reference)
    baseline = batch.get("kl_baseline")
    if baseline is not None:
        u = u - baseline.detach().clamp(min=0).to(u.dtype)
    desirable = batch["segment_labels"]
    return torch.where(
        desirable, desirable_weight * torch.sigmoid(-beta * u), undesirable_weight * torch.sigmoid(beta * u)
    )


def scores(stats: Stats, batch: Batch, average: bool, reference: bool) -> Tensor:
    """[num_segments]"""
    values = stats.logprob - batch["ref_logprobs"] if reference else stats.logprob
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
