"""Preference losses of segments and of pairs of segments: ORPO, KTO, DPO and its variants, SimPO, CPO.

A segment's score is the sum, or the mean, of ``logprob - ref_logprobs`` over the segment's tokens that count; 0 if none
counts. Differences are taken per token, since the difference of two long sums would round away the score. The
field ``pair_weights`` [P] of a batch multiplies the values of pairs (``weights.wpo``).
"""

import math
from collections.abc import Mapping
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.checks import choice, flag, number, refuse
from .base import Losses, SummandOptions, make, sharing_results
from .batch import Batch, Stats, gate


@sharing_results
def orpo(beta: float = 0.1, **summand: Unpack[SummandOptions]) -> Losses:
    """``-beta * F.logsigmoid(odds.log()[chosen] - odds.log()[rejected])`` per pair, with ``odds = P / (1 - P)`` and
    ``P = segment_mean(logprob).exp()``: the odds-ratio term of ORPO (arXiv 2403.07691).

    Fields: ``segments``, ``pairs``. The paper adds the negative log-likelihood of prompt and chosen completion. The
    docstring of ``cpo`` says how to add it, here with ``nll_mask`` true on the chosen sequences' prompts and
    completions, and ``segments`` -1 on prompts. The prompts' targets must not be ``ignore_index``.
    """
    beta = number("losses.orpo", "beta", beta, 0.0)
    return make("orpo", _orpo, summand, {"beta": beta}, fields=("segments", "pairs"), scope="segment", unit="pair")


def _orpo(stats: Stats, batch: Batch, beta: float) -> Tensor:
    mean_logprobs = batch.segment_mean(stats.logprob)
    # a probability that rounds to 1 is replaced by the next smaller number: odds and gradient stay finite, and the
    # gradient still lowers a rejected segment's probability
    eps = torch.finfo(mean_logprobs.dtype).eps
    mean_logprobs = torch.where(mean_logprobs > -eps, mean_logprobs - (mean_logprobs + eps).detach(), mean_logprobs)
    # log1p(-exp(...)) would be more exact far below 0, by less than the rounding of ``mean_logprobs`` itself
    chosen, rejected = values_of_pairs(mean_logprobs - torch.log(-torch.expm1(mean_logprobs)), batch)
    return -beta * F.logsigmoid(chosen - rejected)


@sharing_results
def kto(
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    *,
    average: bool = False,  # scores are means over tokens, not sums
    reference_free: bool = False,  # scores have no ``ref_logprobs``
    **summand: Unpack[SummandOptions],
) -> Losses:
    """``torch.where(desirable, desirable_weight * torch.sigmoid(beta * (kl - u)), undesirable_weight *
    torch.sigmoid(beta * (u - kl)))`` per segment, with ``u = segment_sum(logprob - ref_logprobs)``: KTO (arXiv
    2402.01306).

    ``average`` makes ``u`` the mean over tokens. ``desirable`` is the field ``segment_labels``. ``kl`` is the constant
    field ``kl_baseline`` (0-d, [1] or [num_segments]), without gradient and clamped to at least 0. Without this field,
    ``kl`` is 0.

    Fields: ``segments``, ``segment_labels`` [num_segments] (true: desirable), ``ref_logprobs`` unless
    ``reference_free``; ``kl_baseline`` is optional. There is one value per segment. The denominator is the number of
    segments with a token that counts, whatever the weights are.
    """
    loss_name = "losses.kto"
    options = {
        "beta": number(loss_name, "beta", beta, 0.0, is_open=True),
        "desirable_weight": number(loss_name, "desirable_weight", desirable_weight, 0.0),
        "undesirable_weight": number(loss_name, "undesirable_weight", undesirable_weight, 0.0),
        "average": flag(f"average of {loss_name}", average),
        "has_reference": not flag(f"reference_free of {loss_name}", reference_free),
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
    average: bool,  # scores are means over tokens, not sums
    has_reference: bool,  # scores are relative to ``ref_logprobs``
) -> Tensor:
    segment_scores = segment_totals(score_terms(stats, batch, has_reference), batch, average)
    baseline = batch.get("kl_baseline")
    if baseline is not None:
        segment_scores = segment_scores - baseline.detach().clamp(min=0).to(segment_scores.dtype)
    desirable_values = desirable_weight * gate(-beta * segment_scores)
    return torch.where(batch["segment_labels"], desirable_values, undesirable_weight * gate(beta * segment_scores))


def score_terms(stats: Stats, batch: Batch, has_reference: bool) -> Tensor:
    """Terms [n] that tokens add to their segments' scores: ``logprob - ref_logprobs`` if ``has_reference``, else
    ``logprob``."""
    return stats.logprob - batch["ref_logprobs"] if has_reference else stats.logprob


def segment_totals(values: Tensor, batch: Batch, average: bool) -> Tensor:
    """Sums [num_segments], or means if ``average``, of ``values`` [n] over each segment's tokens that count."""
    return batch.segment_mean(values) if average else batch.segment_sum(values)


def values_of_pairs(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns two vectors [P]: ``values`` [num_segments] at each pair's chosen segment, and at its rejected segment."""
    pairs = batch["pairs"]
    return values[pairs[:, 0]], values[pairs[:, 1]]


DPO_VARIANTS = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
    "apo_down", "discopop", "aot", "aot_unpaired",
)  # fmt: skip
CPO_VARIANTS = ("sigmoid", "hinge", "ipo")  # values of ``variant`` of ``cpo``
MEAN_SCORE_VARIANTS = ("ipo", "sigmoid_norm")  # variants whose default score of a segment is a mean
# variants that take label_smoothing
SMOOTHABLE_VARIANTS = ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired")
SORTING_VARIANTS = ("aot", "aot_unpaired")  # variants that compare a pair with all others
# variants that read nothing but differences of scores, and so take a divergence
DIVERGENCE_VARIANTS = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop")
MAX_EXPONENT = 80.0  # exp(80) does not overflow fp32


@sharing_results
def dpo(
    beta: float = 0.1,
    variant: str = "sigmoid",
    *,
    label_smoothing: float = 0.0,
    average: bool | None = None,  # scores are means over tokens, not sums; None: the variant decides
    reference_free: bool = False,  # scores have no ``ref_logprobs``
    discopop_tau: float = 0.05,  # temperature of variant discopop
    divergence: str = "reverse_kl",  # name of the divergence of f-DPO
    divergence_alpha: float = 0.5,
    ld_alpha: float | None = None,  # factor of tokens past the length of a pair's shorter segment; None: 1
    **summand: Unpack[SummandOptions],
) -> Losses:
    """``-F.logsigmoid(beta * (score[chosen] - score[rejected]))`` per pair, with ``score = segment_sum(logprob -
    ref_logprobs)``: direct preference optimisation (arXiv 2305.18290) and the losses that ``variant`` chooses (names
    and defaults are those of TRL's ``loss_type``). docs/losses.md has the formula of each variant.

    With ``label_smoothing`` eps the value is ``-(1 - eps) * F.logsigmoid(d) - eps * F.logsigmoid(-d)`` (cDPO), where d
    is the argument of ``logsigmoid`` above. ``exo_pair`` needs eps > 0 (its paper advises 1e-3), ``robust`` eps < 0.5.
    ``divergence`` (f-DPO, 2309.16240): "reverse_kl", "forward_kl", "js", or "alpha" with ``divergence_alpha`` (1 is the
    reverse KL). Only variants that read nothing but the difference of scores take a ``divergence``. Exponents in the
    formulas are clamped to at most 80 (``ipo``, which squares exponentials: 40), without gradient above.

    ``ld_alpha`` in [0, 1] (LD-DPO, 2409.06411) multiplies what tokens past the length of a pair's shorter segment add
    to the score of the longer segment. If a segment has several pairs, the shortest segment of all these pairs decides.
    ValueError with ``TokenParallel``.

    Fields: ``segments``, ``pairs`` [P, 2] of (chosen, rejected) segment ids, and ``ref_logprobs`` unless
    ``reference_free``. There is one value per pair, and the mean is over pairs. ``average``: the score is a mean over
    tokens rather than a sum; None: for ``ipo`` and ``sigmoid_norm`` only. The optional field ``pair_weights`` [P]
    multiplies the values of all variants but ``aot`` and ``aot_unpaired``, and does not change the denominator.
    """
    loss_name = "losses.dpo"
    choice(loss_name, "variant", variant, DPO_VARIANTS)
    tau = number(loss_name, "discopop_tau", discopop_tau, 0.0, math.inf, is_open=True)
    has_reference = not flag(f"reference_free of {loss_name}", reference_free)
    checked_alpha = number(loss_name, "divergence_alpha", divergence_alpha)
    power_by_divergence = {"reverse_kl": 0.0, "forward_kl": -1.0, "js": None, "alpha": checked_alpha - 1.0}
    power = power_by_divergence[choice(loss_name, "divergence", divergence, tuple(power_by_divergence))]
    if power != 0.0 and variant not in DIVERGENCE_VARIANTS:
        raise ValueError(
            f"divergence={divergence!r} of {loss_name} goes with variants {', '.join(DIVERGENCE_VARIANTS)}, got "
            f"{variant!r}"
        )
    if ld_alpha is not None:
        ld_alpha = number(loss_name, "ld_alpha", ld_alpha, 0.0, 1.0)
        if variant in SORTING_VARIANTS:
            raise ValueError(
                f"ld_alpha of {loss_name} weighs the tokens of pairs, which {variant!r} takes apart; leave it out"
            )
    further_options = {"tau": tau, "power": power, "ld_alpha": ld_alpha}
    return make_paired("dpo", beta, variant, label_smoothing, average, has_reference, summand, **further_options)


@sharing_results
def simpo(
    beta: float = 0.1,
    gamma: float = 0.5,  # margin
    *,
    label_smoothing: float = 0.0,
    alpha: float = 0.0,  # exponent of AlphaPO; 0: SimPO
    **summand: Unpack[SummandOptions],
) -> Losses:
    """``-F.logsigmoid(beta * (score[chosen] - score[rejected]) - gamma)`` per pair, with ``score =
    segment_mean(logprob)``: SimPO (arXiv 2405.14734).

    ``alpha`` other than 0 is AlphaPO (2501.03884): it replaces a score u by ``(1 - exp(-alpha * u)) / alpha``, with
    exponents of at most 80. ``label_smoothing`` is as in ``dpo``. Fields: ``segments``, ``pairs``. The docstring of
    ``cpo`` says how to add the chosen segments' NLL. The paper's code takes ``gamma / beta`` in place of ``gamma``.
    """
    further_options = {
        "margin": number("losses.simpo", "gamma", gamma),
        "power": -number("losses.simpo", "alpha", alpha),
    }
    return make_paired("simpo", beta, "sigmoid", label_smoothing, True, False, summand, **further_options)


@sharing_results
def cpo(
    beta: float = 0.1,
    variant: str = "sigmoid",
    *,
    label_smoothing: float = 0.0,
    average: bool | None = None,  # scores are means over tokens, not sums; None: the variant decides
    alpha: float = 0.0,  # exponent of AlphaPO; 0: CPO
    **summand: Unpack[SummandOptions],
) -> Losses:
    """``-F.logsigmoid(beta * (score[chosen] - score[rejected]))`` per pair, with ``score = segment_sum(logprob)``:
    the pair term of contrastive preference optimisation (arXiv 2401.08417); ``dpo`` without a reference.

    ``variant``: ``sigmoid``, ``hinge`` or ``ipo``, as in ``dpo``. ``average``: the score is a mean over tokens rather
    than a sum; None: for ``ipo`` only. ``alpha`` transforms scores as in ``simpo``: sums (as in TRL), or with
    ``average`` means (as in AlphaPO's paper). Exponents are at most 80, for ``ipo`` 40. Fields: ``segments``,
    ``pairs``.

    The paper adds the chosen segments' negative log-likelihood, which is a summand of its own:
    ``losses.cpo() + losses.cross_entropy(token_weights="nll_mask", normalizer=nll_mask.sum())``, where
    ``batch["nll_mask"]`` is true on the chosen segments' tokens. With this normalizer the summand is the mean over
    these tokens; without it the sum is divided by the number of all tokens that count.
    """
    choice("losses.cpo", "variant", variant, CPO_VARIANTS)
    power = -number("losses.cpo", "alpha", alpha)
    return make_paired("cpo", beta, variant, label_smoothing, average, False, summand, power=power)


def make_paired(
    kind: str,  # name of the loss
    beta: float,  # factor of scores
    variant: str,
    label_smoothing: float,
    average: bool | None,  # scores are means over tokens, not sums; None: the variant decides
    has_reference: bool,  # scores are relative to ``ref_logprobs``
    summand_options: Mapping[str, Any],  # the user's ``SummandOptions``
    **further_options: Any,  # checked options of ``pair_values``
) -> Losses:
    """A loss of pairs of scores. TypeError or ValueError for wrong options."""
    loss_name = f"losses.{kind}"
    checked_smoothing = number(loss_name, "label_smoothing", label_smoothing, 0.0, 1.0)
    variant_text = f"for variant {variant!r}, got {checked_smoothing}"
    refuse({
        f"label_smoothing of {loss_name} does not apply {variant_text}; leave it 0":
            checked_smoothing and variant not in SMOOTHABLE_VARIANTS,
        f"label_smoothing of {loss_name} must be below 0.5 {variant_text}":
            variant == "robust" and checked_smoothing >= 0.5,
        f"label_smoothing of {loss_name} must be above 0 and below 1 {variant_text}; its paper advises 1e-3":
            variant == "exo_pair" and not 0 < checked_smoothing < 1,
    })  # fmt: skip
    options = {
        "beta": number(loss_name, "beta", beta, 0.0, is_open=True),
        "variant": variant,
        "eps": checked_smoothing,
        "average": variant in MEAN_SCORE_VARIANTS if average is None else flag(f"average of {loss_name}", average),
        "has_reference": has_reference,
        **further_options,
    }
    fields = ("segments", "pairs", *["ref_logprobs"] * has_reference)
    is_separable = variant not in SORTING_VARIANTS
    # pairs that are compared with all others have no weights
    optional_fields = ("pair_weights",) if is_separable else ()
    return make(
        kind, _paired, summand_options, options, fields=fields, optional_fields=optional_fields, scope="segment",
        unit="pair", is_separable=is_separable,
    )  # fmt: skip


def _paired(stats: Stats, batch: Batch, **options: Any) -> Tensor:
    values = pair_values(stats, batch, **options)
    return values * batch["pair_weights"].to(values.dtype) if "pair_weights" in batch else values


def pair_values(
    stats: Stats,
    batch: Batch,
    beta: float,  # factor of scores
    variant: str,
    eps: float,  # label smoothing
    average: bool,  # scores are means over tokens, not sums
    has_reference: bool,  # scores are relative to ``ref_logprobs``
    margin: float = 0.0,  # subtracted from ``beta`` times the difference of scores
    tau: float = 0.05,  # temperature of discopop
    power: float | None = 0.0,  # argument of ``transformed_scores``
    ld_alpha: float | None = None,  # factor of tokens past the length of a pair's shorter segment; None: 1
) -> Tensor:
    """Values [P] of a loss of pairs, without ``pair_weights``."""
    if variant in SORTING_VARIANTS:
        first_scores, second_scores = sorted_scores(stats, batch, average, has_reference, variant == "aot")
    else:
        token_scores = score_terms(stats, batch, has_reference)
        if ld_alpha is not None:
            token_scores = torch.where(is_past_shorter(batch), token_scores * ld_alpha, token_scores)
        max_exponent = MAX_EXPONENT / 2 if variant == "ipo" else MAX_EXPONENT  # IPO squares exponentials
        first_scores, second_scores = values_of_pairs(
            transformed_scores(segment_totals(token_scores, batch, average), power, max_exponent), batch
        )
    d = beta * (first_scores - second_scores) - margin  # [P] scaled differences of chosen and rejected scores
    if variant in ("sigmoid", "sigmoid_norm", *SORTING_VARIANTS):
        return -(1 - eps) * F.logsigmoid(d) - eps * F.logsigmoid(-d)
    if variant == "hinge":
        return torch.relu(1 - d)
    if variant == "ipo":
        return (first_scores - second_scores - 0.5 / beta).square()
    if variant == "robust":
        return (-(1 - eps) * F.logsigmoid(d) + eps * F.logsigmoid(-d)) / (1 - 2 * eps)
    if variant == "exo_pair":
        chosen_term = gate(d) * (F.logsigmoid(d) - math.log1p(-eps))
        return chosen_term + gate(-d) * (F.logsigmoid(-d) - math.log(eps))
    if variant == "nca_pair":
        return (
            -F.logsigmoid(beta * first_scores)
            - 0.5 * F.logsigmoid(-beta * first_scores)
            - 0.5 * F.logsigmoid(-beta * second_scores)
        )
    if variant == "bco_pair":
        return -F.logsigmoid(beta * first_scores) - F.logsigmoid(-beta * second_scores)
    if variant == "sppo_hard":
        return (first_scores - 0.5 / beta).square() + (second_scores + 0.5 / beta).square()
    if variant == "apo_zero":
        return gate(-beta * first_scores) + gate(beta * second_scores)
    if variant == "apo_down":
        return gate(beta * first_scores) + gate(-d)
    # discopop; exp(-d) * M in one exponential: for d far below 0 it is inf * 0 otherwise
    exponential = torch.exp(F.logsigmoid(d / tau) - d)
    return exponential - F.logsigmoid(d) * gate(-d / tau)


def transformed_scores(scores: Tensor, power: float | None, max_exponent: float) -> Tensor:
    """``(exp(power * x) - 1) / power`` of scores x, with exponents clamped to at most ``max_exponent``. Returns x for a
    ``power`` of 0, and ``log 2 + logsigmoid(x)`` for a ``power`` of None."""
    if power is None:
        return math.log(2.0) + F.logsigmoid(scores)
    # for a power near 0 the value is x, and the division would lose the gradient
    if abs(power) < 1e-6:
        return scores
    return torch.expm1((power * scores).clamp(max=max_exponent)) / power


def is_past_shorter(batch: Batch) -> Tensor:
    """Mask [n]. True if a segment that is paired with the token's segment has no token at the token's position."""
    segment_lengths = batch.segment_count()
    chosen, rejected = batch["pairs"].unbind(1)
    is_valid_pair = (chosen >= 0) & (rejected >= 0)
    pair_lengths = torch.where(is_valid_pair, torch.minimum(*values_of_pairs(segment_lengths, batch)), torch.inf)
    shortest_lengths = segment_lengths
    for segment_ids in (chosen, rejected):
        shortest_lengths = shortest_lengths.scatter_reduce(
            0, torch.where(is_valid_pair, segment_ids, 0), pair_lengths, "amin"
        )
    return batch.segment_place() >= batch.per_token(shortest_lengths)


def sorted_scores(
    stats: Stats, batch: Batch, average: bool, has_reference: bool, compares_policies: bool
) -> tuple[Tensor, Tensor]:
    """Returns two vectors [P]: chosen and rejected scores. If ``compares_policies``, they are the policy's and the
    reference's differences of chosen and rejected scores. The second vector is reordered: the k-th smallest number of
    the second vector stands at the index of the k-th smallest number of the first vector."""
    chosen_has_tokens, rejected_has_tokens = values_of_pairs(batch.segment_count() > 0, batch)
    is_counted = chosen_has_tokens & rejected_has_tokens & (batch["pairs"] >= 0).all(1)
    if compares_policies:
        reference_logprobs = batch["ref_logprobs"] if has_reference else torch.zeros_like(stats.logprob)
        chosen, rejected = values_of_pairs(segment_totals(stats.logprob, batch, average), batch)
        reference_chosen, reference_rejected = values_of_pairs(
            segment_totals(reference_logprobs, batch, average), batch
        )
        first_vector, second_vector = chosen - rejected, reference_chosen - reference_rejected
    else:
        first_vector, second_vector = values_of_pairs(
            segment_totals(score_terms(stats, batch, has_reference), batch, average), batch
        )
    # pairs that do not count are sorted to the end of both vectors
    first_order = torch.where(is_counted, first_vector.detach(), torch.inf).sort(stable=True).indices
    second_order = torch.where(is_counted, second_vector.detach(), torch.inf).sort(stable=True).indices
    return first_vector, second_vector[torch.empty_like(second_order).scatter_(0, first_order, second_order)]
