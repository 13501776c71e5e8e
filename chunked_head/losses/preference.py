"""Losses of segments that are preferred or not: ORPO, KTO, DPO and its variants, SimPO, CPO.

A segment's score is the sum, or the mean, of ``logprob - ref_logprobs`` over its tokens that count; 0 without such a
token. The subtraction is per token, since the difference of two long sums would round away the score. The constant
field ``pair_weights`` [P] of a batch multiplies the values of pairs (``weights.wpo``).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.checks import choice, flag, number, refuse
from .base import Losses, make, once
from .batch import Batch, Stats, gate


@once
def orpo(beta: float = 0.1, **summand: Any) -> Losses:
    """``-beta * F.logsigmoid(odds.log()[chosen] - odds.log()[rejected])`` per pair, with ``odds = P / (1 - P)`` and
    ``P = segment_mean(logprob).exp()``: the odds-ratio term of ORPO (arXiv 2403.07691).

    Fields: ``segments``, ``pairs``. The paper's other term is the negative log-likelihood of prompt and chosen
    completion together: add it as ``cpo`` says, with ``nll_mask`` true on the chosen sequences' prompt and completion,
    and ``segments`` -1 on prompts (their targets must not be ``ignore_index``).
    """
    beta = number("losses.orpo", "beta", beta, 0.0)
    return make("orpo", _orpo, summand, {"beta": beta}, fields=("segments", "pairs"), scope="segment", unit="pair")


def _orpo(stats: Stats, batch: Batch, beta: float) -> Tensor:
    a = batch.segment_mean(stats.logprob)
    # a probability that rounds to 1 is replaced by the next smaller number: odds and gradient stay finite, and the
    # gradient still lowers a rejected segment's probability
    eps = torch.finfo(a.dtype).eps
    a = torch.where(a > -eps, a - (a + eps).detach(), a)
    # log1p(-exp(a)) would be more exact far below 0, by less than the rounding of a itself
    chosen, rejected = of_pairs(a - torch.log(-torch.expm1(a)), batch)
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

    ``average`` makes ``u`` the mean over tokens. ``desirable`` is the field ``segment_labels``. ``kl`` is the constant
    field ``kl_baseline`` (0-d, [1], or one per segment), without gradient and clamped to at least 0; it is 0 where the
    field is missing.

    Fields: ``segments``, ``segment_labels`` [num_segments] (true: desirable), ``ref_logprobs`` unless
    ``reference_free``; ``kl_baseline`` is optional. One value per segment. The denominator is the number of segments
    with a token that counts, without the weights.
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
    """[n] each token's term of its segment's score: ``logprob``, with ``reference`` minus ``ref_logprobs``."""
    return stats.logprob - batch["ref_logprobs"] if reference else stats.logprob


def total(values: Tensor, batch: Batch, average: bool) -> Tensor:
    """[num_segments] the sum, with ``average`` the mean, of ``values`` [n] over each segment's tokens that count."""
    return batch.segment_mean(values) if average else batch.segment_sum(values)


def of_pairs(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns ``values`` [num_segments] of the chosen segments, and of the rejected ones, each [P]."""
    pairs = batch["pairs"]
    return values[pairs[:, 0]], values[pairs[:, 1]]


DPO_VARIANTS = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
    "apo_down", "discopop", "aot", "aot_unpaired",
)  # fmt: skip
CPO_VARIANTS = ("sigmoid", "hinge", "ipo")
AVERAGED = ("ipo", "sigmoid_norm")  # variants that score a segment by its mean by default
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired")
SORTED = ("aot", "aot_unpaired")  # variants that compare a pair with all others
OF_MARGINS = (
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "discopop",
)  # variants that take a divergence
MOST_EXPONENT = 80.0  # exp of it does not overflow fp32


@once
def dpo(
    beta: float = 0.1,
    variant: str = "sigmoid",
    *,
    label_smoothing: float = 0.0,
    average: bool | None = None,
    reference_free: bool = False,
    discopop_tau: float = 0.05,
    divergence: str = "reverse_kl",
    divergence_alpha: float = 0.5,
    ld_alpha: float | None = None,
    **summand: Any,
) -> Losses:
    """``-F.logsigmoid(beta * (score[chosen] - score[rejected]))`` per pair, with ``score = segment_sum(logprob -
    ref_logprobs)``: direct preference optimisation (arXiv 2305.18290) and, by ``variant``, its relatives (names and
    defaults as TRL's ``loss_type``). docs/losses.md has the formula of each.

    With ``label_smoothing`` eps the value is ``-(1 - eps) * F.logsigmoid(d) - eps * F.logsigmoid(-d)`` (cDPO), where d
    is the argument of ``logsigmoid`` above. ``exo_pair`` needs eps > 0 (its paper advises 1e-3), ``robust`` eps < 0.5.
    ``divergence`` (f-DPO, 2309.16240): "reverse_kl", "forward_kl", "js", or "alpha" with ``divergence_alpha`` (1 is the
    reverse KL). It goes with variants that read nothing but the difference of scores. Exponents are clamped to at most
    80 (40 for ``ipo``, which squares), without gradient above.

    ``ld_alpha`` in [0, 1] (LD-DPO, 2409.06411) is the weight of those tokens of a pair's longer segment that lie past
    the shorter one's length; for a segment of several pairs, past the shortest one's. Not with ``TokenParallel``.

    Fields: ``segments``, ``pairs`` [P, 2] of (chosen, rejected) segment ids, and ``ref_logprobs`` unless
    ``reference_free``. One value per pair; the mean is over pairs. ``average`` makes the score a mean over tokens;
    None: it does for ``ipo`` and ``sigmoid_norm``. The optional field ``pair_weights`` [P] multiplies the values (not
    those of ``aot`` and ``aot_unpaired``) and does not change the denominator.
    """
    where = "losses.dpo"
    choice(where, "variant", variant, DPO_VARIANTS)
    tau = number(where, "discopop_tau", discopop_tau, 0.0, math.inf, open_=True)
    reference = not flag(f"reference_free of {where}", reference_free)
    alpha = number(where, "divergence_alpha", divergence_alpha)
    powers = {"reverse_kl": 0.0, "forward_kl": -1.0, "js": None, "alpha": alpha - 1.0}
    power = powers[choice(where, "divergence", divergence, tuple(powers))]
    if power != 0.0 and variant not in OF_MARGINS:
        raise ValueError(
            f"divergence={divergence!r} of {where} goes with variants {', '.join(OF_MARGINS)}, got {variant!r}"
        )
    if ld_alpha is not None:
        ld_alpha = number(where, "ld_alpha", ld_alpha, 0.0, 1.0)
        if variant in SORTED:
            raise ValueError(
                f"ld_alpha of {where} weighs the tokens of pairs, which {variant!r} takes apart; leave it out"
            )
    further_options = {"tau": tau, "power": power, "ld_alpha": ld_alpha}
    return paired("dpo", beta, variant, label_smoothing, average, reference, summand, **further_options)


@once
def simpo(
    beta: float = 0.1, gamma: float = 0.5, *, label_smoothing: float = 0.0, alpha: float = 0.0, **summand: Any
) -> Losses:
    """``-F.logsigmoid(beta * (score[chosen] - score[rejected]) - gamma)`` per pair, with ``score =
    segment_mean(logprob)``: SimPO (arXiv 2405.14734).

    ``alpha`` other than 0 is AlphaPO (2501.03884): it replaces a score u by ``(1 - exp(-alpha * u)) / alpha``, with
    exponents of at most 80. ``label_smoothing`` as in ``dpo``. Fields: ``segments``, ``pairs``; no reference. ``cpo``
    says how to add the chosen segments' NLL. The paper's code takes ``gamma / beta`` as its argument.
    """
    further_options = {
        "margin": number("losses.simpo", "gamma", gamma),
        "power": -number("losses.simpo", "alpha", alpha),
    }
    return paired("simpo", beta, "sigmoid", label_smoothing, True, False, summand, **further_options)


@once
def cpo(
    beta: float = 0.1,
    variant: str = "sigmoid",
    *,
    label_smoothing: float = 0.0,
    average: bool | None = None,
    alpha: float = 0.0,
    **summand: Any,
) -> Losses:
    """``-F.logsigmoid(beta * (score[chosen] - score[rejected]))`` per pair, with ``score = segment_sum(logprob)``:
    contrastive preference optimisation (arXiv 2401.08417), ``dpo`` without a reference, the pair term alone.

    ``variant``: ``sigmoid``, ``hinge`` or ``ipo``, as in ``dpo``. ``average`` makes the score a mean over tokens; None:
    it does for ``ipo``. ``alpha`` as in ``simpo``, on sums (TRL) or with ``average`` on means (AlphaPO's paper); for
    ``ipo`` exponents are at most 40. Fields: ``segments``, ``pairs``.

    The paper adds the chosen segments' negative log-likelihood, a summand of its own:
    ``losses.cpo() + losses.cross_entropy(token_weights="nll_mask", normalizer=nll_mask.sum())``, where
    ``batch["nll_mask"]`` is true on the chosen segments' tokens. The normalizer makes it the mean over these tokens;
    without it the sum is divided by the number of all tokens that count.
    """
    choice("losses.cpo", "variant", variant, CPO_VARIANTS)
    power = -number("losses.cpo", "alpha", alpha)
    return paired("cpo", beta, variant, label_smoothing, average, False, summand, power=power)


def paired(
    kind: str,
    beta: float,
    variant: str,
    label_smoothing: float,
    average: bool | None,
    reference: bool,
    summand: dict[str, Any],
    **further_options: Any,
) -> Losses:
    """A loss of pairs of scores. ``further_options``: options of ``unweighted``, already checked."""
    where = f"losses.{kind}"
    smoothing = number(where, "label_smoothing", label_smoothing, 0.0, 1.0)
    context = f"for variant {variant!r}, got {smoothing}"
    refuse({
        f"label_smoothing of {where} does not apply {context}; leave it 0": smoothing and variant not in SMOOTHED,
        f"label_smoothing of {where} must be below 0.5 {context}": variant == "robust" and smoothing >= 0.5,
        f"label_smoothing of {where} must be above 0 and below 1 {context}; its paper advises 1e-3":
            variant == "exo_pair" and not 0 < smoothing < 1,
    })  # fmt: skip
    options = {
        "beta": number(where, "beta", beta, 0.0, open_=True),
        "variant": variant,
        "eps": smoothing,
        "average": variant in AVERAGED if average is None else flag(f"average of {where}", average),
        "reference": reference,
        **further_options,
    }
    fields = ("segments", "pairs", *["ref_logprobs"] * reference)
    separable = variant not in SORTED
    # in variants that compare a pair with all others, pairs have no weights
    weighted = ("pair_weights",) if separable else ()
    return make(
        kind, _paired, summand, options, fields=fields, optional_fields=weighted, scope="segment", unit="pair",
        separable=separable,
    )  # fmt: skip


def _paired(stats: Stats, batch: Batch, **options: Any) -> Tensor:
    values = unweighted(stats, batch, **options)
    return values * batch["pair_weights"].to(values.dtype) if "pair_weights" in batch else values


def unweighted(
    stats: Stats,
    batch: Batch,
    beta: float,
    variant: str,
    eps: float,
    average: bool,
    reference: bool,
    margin: float = 0.0,
    tau: float = 0.05,
    power: float | None = 0.0,
    ld_alpha: float | None = None,
) -> Tensor:
    if variant in SORTED:
        u, v = sorted_scores(stats, batch, average, reference, variant == "aot")
    else:
        values = scores(stats, batch, reference)
        if ld_alpha is not None:
            values = torch.where(beyond_shorter(batch), values * ld_alpha, values)
        most = MOST_EXPONENT / 2 if variant == "ipo" else MOST_EXPONENT  # IPO squares exponentials
        u, v = of_pairs(bent(total(values, batch, average), power, most), batch)
    d = beta * (u - v) - margin
    if variant in ("sigmoid", "sigmoid_norm", *SORTED):
        return -(1 - eps) * F.logsigmoid(d) - eps * F.logsigmoid(-d)
    if variant == "hinge":
        return torch.relu(1 - d)
    if variant == "ipo":
        return (u - v - 0.5 / beta).square()
    if variant == "robust":
        return (-(1 - eps) * F.logsigmoid(d) + eps * F.logsigmoid(-d)) / (1 - 2 * eps)
    if variant == "exo_pair":
        chosen = gate(d) * (F.logsigmoid(d) - math.log1p(-eps))
        return chosen + gate(-d) * (F.logsigmoid(-d) - math.log(eps))
    if variant == "nca_pair":
        return -F.logsigmoid(beta * u) - 0.5 * F.logsigmoid(-beta * u) - 0.5 * F.logsigmoid(-beta * v)
    if variant == "bco_pair":
        return -F.logsigmoid(beta * u) - F.logsigmoid(-beta * v)
    if variant == "sppo_hard":
        return (u - 0.5 / beta).square() + (v + 0.5 / beta).square()
    if variant == "apo_zero":
        return gate(-beta * u) + gate(beta * v)
    if variant == "apo_down":
        return gate(beta * u) + gate(-d)
    # discopop; exp(-d) * M in one exponential: for d far below 0 it is inf * 0 otherwise
    exponential = torch.exp(F.logsigmoid(d / tau) - d)
    return exponential - F.logsigmoid(d) * gate(-d / tau)


def bent(scores: Tensor, power: float | None, most: float) -> Tensor:
    """``(exp(power * x) - 1) / power`` of scores x, with exponents of at most ``most``; x for a power of 0, and
    ``log 2 + logsigmoid(x)`` for None."""
    if power is None:
        return math.log(2.0) + F.logsigmoid(scores)
    # for a power near 0 the value is x, and the division would lose the gradient
    if abs(power) < 1e-6:
        return scores
    return torch.expm1((power * scores).clamp(max=most)) / power


def beyond_shorter(batch: Batch) -> Tensor:
    """Mask [n] of tokens past the length of the shortest segment that is paired with theirs."""
    count = batch.segment_count()
    chosen, rejected = batch["pairs"].unbind(1)
    paired = (chosen >= 0) & (rejected >= 0)
    shared = torch.where(paired, torch.minimum(*of_pairs(count, batch)), torch.inf)
    for segment in (chosen, rejected):
        count = count.scatter_reduce(0, torch.where(paired, segment, 0), shared, "amin")
    return batch.segment_place() >= batch.per_token(count)


def sorted_scores(stats: Stats, batch: Batch, average: bool, reference: bool, differ: bool) -> tuple[Tensor, Tensor]:
    """Returns two vectors [pairs], each sorted by itself: the chosen and the rejected scores; or with ``differ`` the
    policy's and the reference's differences of chosen and rejected scores."""
    counted = of_pairs(batch.segment_count() > 0, batch)
    counts = counted[0] & counted[1] & (batch["pairs"] >= 0).all(1)
    if differ:
        reference_logprobs = batch["ref_logprobs"] if reference else torch.zeros_like(stats.logprob)
        chosen, rejected = of_pairs(total(stats.logprob, batch, average), batch)
        of_chosen, of_rejected = of_pairs(total(reference_logprobs, batch, average), batch)
        first, second = chosen - rejected, of_chosen - of_rejected
    else:
        first, second = of_pairs(total(scores(stats, batch, reference), batch, average), batch)
    # pairs that do not count are sorted to the end of both vectors
    first_order = torch.where(counts, first.detach(), torch.inf).sort(stable=True).indices
    second_order = torch.where(counts, second.detach(), torch.inf).sort(stable=True).indices
    return first, second[torch.empty_like(second_order).scatter_(0, first_order, second_order)]
