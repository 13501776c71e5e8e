"""Distillation losses, from a dense teacher (all logits) or from K log-probabilities of a teacher per token.

In all docstrings ``p`` is the student's softmax, and ``q`` the teacher's softmax. ``q`` takes no gradient.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from ..core.checks import INFINITY, MAX_ROUNDED_LOGPROB, check_logprobs, choice, flag, number, refuse_unknown
from ..core.records import VocabularySum
from .base import TEACHER_FIELDS, Losses, SummandOptions, Teacher, make, sharing_results
from .batch import Batch, Stats


class TeacherOptions(SummandOptions, total=False):
    """Options of every loss with a dense teacher.

    The teacher's logits are ``teacher_softcap * tanh(teacher_logit_scale * y / teacher_softcap) / T``; without
    ``teacher_softcap`` they are ``teacher_logit_scale * y / T``. Here y are the logits of the teacher's head, and T is
    ``teacher_temperature`` or, if None, ``temperature``. ``t_squared`` multiplies value and gradient by
    ``temperature ** 2`` (Hinton et al., 1503.02531).
    """

    teacher_temperature: float | None
    t_squared: bool  # values are multiplied by temperature ** 2
    teacher_logit_scale: float
    teacher_softcap: float | None


@sharing_results
def forward_kl(form: str = "kl", **teacher: Unpack[TeacherOptions]) -> Losses:
    """``(q * (q / p).log()).sum(-1)``: KL(q || p) to a dense teacher.

    ``form="cross_entropy"`` is ``-(q * p.log()).sum(-1)``, which is KL(q || p) plus the teacher's entropy, with the
    same gradient.

    Fields of this and all losses of a dense teacher: either ``teacher_logits`` [..., V_t], or ``teacher_hidden``
    [..., H_t] with ``teacher_weight`` [V_t, H_t] and optionally ``teacher_bias`` [V_t]. Logits and hidden states are
    indexed like the student's hidden states. The target may be None; a target only says which tokens count. The
    sizes V and V_t of the vocabularies may differ by up to 1023, since heads are padded: then both distributions are
    over the first ``min(V, V_t)`` ids. With the call's ``vocab_size``, the teacher may have ``vocab_size`` ids or more.
    """
    choice("losses.forward_kl", "form", form, ("kl", "cross_entropy"))
    return dense("forward_kl", ("forward_kl",) if form == "kl" else ("forward_kl", "teacher_entropy"), teacher)


@sharing_results
def reverse_kl(**teacher: Unpack[TeacherOptions]) -> Losses:
    """``(p * (p / q).log()).sum(-1)``: KL(p || q) to a dense teacher. Fields and options are those of ``forward_kl``.

    If the teacher excludes an id (by a logit of -inf) that the student does not exclude, the divergence is infinite.
    ``log q`` is taken as -1e4 for that id, so that value and gradient are large but finite.
    """
    return dense("reverse_kl", ("reverse_kl",), teacher)


@sharing_results
def jsd(beta: float = 0.5, **teacher: Unpack[TeacherOptions]) -> Losses:
    """``(beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1)`` with ``m = beta * q + (1 - beta) * p``:
    ``beta * KL(q || m) + (1 - beta) * KL(p || m)`` to a dense teacher (GKD, 2306.13649).

    ``beta=0`` means ``forward_kl`` and ``beta=1`` means ``reverse_kl``, although the formula is 0 for both. Fields and
    other options are those of ``forward_kl``.
    """
    beta = number("losses.jsd", "beta", beta, 0.0, 1.0)
    statistic_by_beta = {0.0: "forward_kl", 1.0: "reverse_kl"}
    if beta in statistic_by_beta:
        return dense("jsd", (statistic_by_beta[beta],), teacher)
    return dense("jsd", ("jsd",), teacher, beta)


@sharing_results
def tvd(**teacher: Unpack[TeacherOptions]) -> Losses:
    """``0.5 * (p - q).abs().sum(-1)``: total variation distance to a dense teacher. The subgradient is 0 where
    ``p_j = q_j``. Fields and options are those of ``forward_kl``.
    """
    return dense("tvd", ("tvd",), teacher)


@sharing_results
def lk(form: str = "log", eta: float = 3.0, least: float = 1e-5, **teacher: Unpack[TeacherOptions]) -> Losses:
    """``-a.log()`` with ``a = torch.min(p, q).sum(-1)``: ``a`` is the probability that a verifier ``q`` accepts a token
    of the trained drafter ``p`` (Samarin et al., 2602.23881; ``speculators``). Fields and other options are those of
    ``forward_kl``.

    ``form="log"``: ``-log(max(a, least))``. The gradient is the gradient of ``tvd`` divided by ``a``, and 0 for ``a``
    below ``least``. ``form="hybrid"``: ``w * KL(q || p) + (1 - w) * tvd``, where ``w = exp(-eta * a)`` has no gradient.
    """
    choice("losses.lk", "form", form, ("log", "hybrid"))
    eta, least = number("losses.lk", "eta", eta, 0.0), number("losses.lk", "least", least, 0.0, 1.0, is_open=True)
    if form == "log":
        return dense("lk", ("overlap",), teacher, None, _log_acceptance, {"least": least})
    return dense("lk", ("forward_kl", "tvd"), teacher, None, _hybrid_acceptance, {"eta": eta})


def _log_acceptance(stats: Stats, batch: Batch, factor: float, least: float) -> Tensor:
    return -torch.where(stats.overlap < least, least, stats.overlap).log() * factor


def _hybrid_acceptance(stats: Stats, batch: Batch, factor: float, eta: float) -> Tensor:
    kl_weight = ((stats.tvd.detach() - 1.0) * eta).exp()
    return (kl_weight * stats.forward_kl + (1.0 - kl_weight) * stats.tvd) * factor


def _sum_of(stats: Stats, batch: Batch, factor: float, statistics: tuple[str, ...]) -> Tensor:
    first_values, *further_values = (getattr(stats, name) for name in statistics)
    return sum(further_values, first_values) * factor


def dense(
    kind: str,  # name of the loss
    statistics: tuple[str, ...],  # names of the statistics that ``function`` reads
    teacher_options: Mapping[str, Any],  # the user's ``TeacherOptions``
    beta: float | None = None,  # weight of the teacher in the JSD
    function: Callable[..., Tensor] = _sum_of,  # (stats, batch, factor, **options) -> values [n]
    options: dict[str, Any] | None = None,  # of ``function``; None: {"statistics": statistics}
    sums: Mapping[str, VocabularySum] | None = None,  # sums over the vocabulary, by the name of the statistic
) -> Losses:
    """A loss of a dense teacher. The default ``function`` adds up the statistics and multiplies the sum by ``factor``:
    ``temperature ** 2`` with the teacher's option ``t_squared``, else 1. TypeError or ValueError for wrong options."""
    refuse_unknown("losses", kind, teacher_options, TeacherOptions.__annotations__)
    loss_name, summand_options = f"losses.{kind}", dict(teacher_options)
    temperature = summand_options.pop("teacher_temperature", None)
    softcap = summand_options.pop("teacher_softcap", None)
    logit_scale = number(loss_name, "teacher_logit_scale", summand_options.pop("teacher_logit_scale", 1.0))
    factor = squared_temperature(loss_name, summand_options.get("temperature"), summand_options.pop("t_squared", False))
    teacher = Teacher(
        None if temperature is None else number(loss_name, "teacher_temperature", temperature, 0.0, is_open=True),
        logit_scale,
        None if softcap is None else number(loss_name, "teacher_softcap", softcap, 0.0, is_open=True),
        beta,
    )
    options = {"statistics": statistics} if options is None else options
    return make(
        kind, function, summand_options, {"factor": factor, **options}, needs=statistics,
        optional_fields=TEACHER_FIELDS, reads_target=False, teacher=teacher, sums=sums or {},
    )  # fmt: skip


# log-probabilities of a teacher up to this are padding: collators pad with -1e9, -inf or the dtype's minimum
MAX_PADDING_LOGPROB = -1e6
EXCLUDED_LOGPROB = -1e30  # stands for entries that do not count: finite, and its exp is 0 at any temperature


@sharing_results
def topk_kl(
    divergence: str = "forward",  # name of the divergence
    normalize: str = "tail",  # name of the set of outcomes that the divergence sums over
    *,
    beta: float = 0.5,  # weight of the teacher in the JSD
    teacher_renormalize: bool | None = None,  # the teacher's K probabilities are divided by their sum
    teacher_temperature: float | None = None,
    t_squared: bool = False,  # values are multiplied by temperature ** 2
    **summand: Unpack[SummandOptions],
) -> Losses:
    """``(t * (t / s).log()).sum(-1) + rest_t * (rest_t / rest_s).log()`` with ``s`` and ``t`` [..., K] the student's
    and the teacher's probabilities of ``teacher_ids``, ``rest_s = 1 - s.sum(-1)`` and ``rest_t = 1 - t.sum(-1)``: a
    divergence from K log-probabilities of a teacher per token.

    Fields: ``teacher_ids`` [..., K], ``teacher_logprobs`` [..., K], and ``teacher_mask`` [..., K] if some tokens have
    fewer than K. They are indexed like the hidden states. The target may be None.

    ``divergence`` is ``forward`` KL(t || s), ``reverse`` KL(s || t), ``jsd`` (``beta``: 0 is forward, 1 reverse) or
    ``tvd``. ``normalize`` says which outcomes the divergence sums over:

    - ``tail``: K + 1 outcomes. One outcome is each of the K ids, and one is all other ids together.
    - ``vocab``: the vocabulary. The teacher's probability of other ids is 0. ``forward`` is below 0 where
      ``t`` sums to less than 1; ``reverse`` leaves out other ids, whose terms are infinite; ``jsd`` and ``tvd`` count
      ``rest_s``.
    - ``topk``: the K ids. ``s`` and ``t`` are normalised over these; the value is 0 for K = 1.

    ``teacher_renormalize`` divides ``t`` by its sum first; None: for ``topk`` only. ``teacher_logprobs`` are at the
    loss's temperature if ``teacher_temperature`` is None. With ``teacher_temperature=T`` they are at temperature 1, and
    ``t ** (1 / T)`` is normalised: with ``teacher_renormalize`` over the K ids, else, for ``tail``, over the K + 1
    outcomes. ``temperature`` is the student's; ``t_squared`` is as in ``forward_kl``.

    An entry counts where ``teacher_mask`` is true and its log-probability is above -1e6 (-inf and -1e9 are padding).
    The id of an entry that does not count may be any number. Entries of equal ids count once, with the largest of their
    log-probabilities. A token without entries has value 0. ``rest_s`` and ``rest_t`` are at least the dtype's epsilon
    in the logarithms.
    """
    options = topk_options("losses.topk_kl", divergence, normalize, beta, teacher_renormalize, teacher_temperature)
    options["factor"] = squared_temperature("losses.topk_kl", summand.get("temperature"), t_squared)
    return make(
        "topk_kl",
        _topk_kl,
        summand,
        options,
        needs=("topk_logprobs",),
        fields=("teacher_ids", "teacher_logprobs"),
        optional_fields=("teacher_mask",),
        reads_target=False,
        reads_only_teacher_ids=normalize == "topk",
    )


def topk_options(
    function_name: str,
    divergence: str,
    normalize: str,
    beta: float,
    teacher_renormalize: bool | None,  # None: for "topk" only
    teacher_temperature: float | None,
) -> dict[str, Any]:
    """Options of ``topk_divergence``. TypeError or ValueError for wrong arguments; ``function_name``: for errors."""
    choice(function_name, "divergence", divergence, ("forward", "reverse", "jsd", "tvd"))
    choice(function_name, "normalize", normalize, ("tail", "vocab", "topk"))
    beta = number(function_name, "beta", beta, 0.0, 1.0)
    if divergence == "jsd" and beta in (0.0, 1.0):
        divergence = "reverse" if beta else "forward"
    is_renormalized = normalize == "topk"
    if teacher_renormalize is not None:
        is_renormalized = flag(f"teacher_renormalize of {function_name}", teacher_renormalize)
    checked_temperature = (
        1.0
        if teacher_temperature is None
        else number(function_name, "teacher_temperature", teacher_temperature, 0.0, is_open=True)
    )
    if checked_temperature != 1 and normalize != "tail" and not is_renormalized:
        raise ValueError(
            f"teacher_temperature of {function_name} cannot change probabilities that are not normalised over anything "
            f"known, with normalize={normalize!r}; pass teacher_renormalize=True"
        )
    return {
        "divergence": divergence,
        "normalize": normalize,
        "beta": beta if divergence == "jsd" else 0.5,  # only jsd reads it; calls with equal options share a kernel
        "teacher_renormalize": is_renormalized,
        "teacher_temperature": checked_temperature,
    }


def squared_temperature(function_name: str, temperature: Any, t_squared: bool) -> float:
    """Factor of a loss's values: ``temperature ** 2`` if ``t_squared``, else 1. ValueError for ``t_squared`` without a
    temperature. ``function_name``: for errors."""
    if not flag(f"t_squared of {function_name}", t_squared):
        return 1.0
    if temperature is None:
        raise ValueError(f"t_squared of {function_name} needs the loss's own temperature; pass temperature=")
    return number(function_name, "temperature", temperature, 0.0, is_open=True) ** 2


def _topk_kl(stats: Stats, batch: Batch, factor: float, **options: Any) -> Tensor:
    student_logprobs = stats.topk_logprobs
    teacher_logprobs = batch["teacher_logprobs"].to(student_logprobs.dtype)
    is_counted = batch.get("teacher_entries")  # the result of ``counted_entries`` for all tokens of a call, if computed
    if is_counted is None:
        is_counted = counted_entries(teacher_logprobs, batch["teacher_ids"], batch.get("teacher_mask"))
    return topk_divergence(student_logprobs, teacher_logprobs, is_counted, **options) * factor


def counted_entries(teacher_logprobs: Tensor, ids: Tensor | None, mask: Tensor | None) -> Tensor:
    """Mask [..., K] of the teacher's entries that count. An entry counts if it is no padding, if ``mask`` is true, and
    if no other entry of the same id is likelier, or as likely and earlier. ``ids`` None: all ids are different."""
    # an entry of nan counts, so that the error shows in the loss
    is_counted = ~(teacher_logprobs <= MAX_PADDING_LOGPROB)
    if mask is not None:
        is_counted = is_counted & mask
    if ids is None:
        return is_counted
    positions = torch.arange(teacher_logprobs.shape[-1], device=teacher_logprobs.device)
    entry_logprobs, rival_logprobs = teacher_logprobs[..., :, None], teacher_logprobs[..., None, :]
    has_better_rival = (rival_logprobs > entry_logprobs) | (
        (rival_logprobs == entry_logprobs) & (positions[None, :] < positions[:, None])
    )
    has_equal_id = ids[..., :, None] == ids[..., None, :]
    return is_counted & ~(has_equal_id & is_counted[..., None, :] & has_better_rival).any(-1)


def check_teacher(argument: str, teacher_logprobs: Tensor, is_counted: Tensor, is_normalized: bool) -> None:
    """ValueError if entries that count are no log-probabilities, or, with ``is_normalized``, if the probabilities of a
    token add up to more than 1. Reads the tensors on the host. ``argument``: name of ``teacher_logprobs``, for errors.
    """
    if not is_counted.any():
        return
    check_logprobs(argument, teacher_logprobs[is_counted], MAX_ROUNDED_LOGPROB if is_normalized else INFINITY)
    max_log_total = float(torch.where(is_counted, teacher_logprobs, -torch.inf).logsumexp(-1).max())
    if is_normalized and max_log_total > MAX_ROUNDED_LOGPROB:
        raise ValueError(
            f"{argument} must hold log-probabilities, whose exponentials add up to at most 1 for a token, got "
            f"{math.exp(max_log_total):g}; take them from log_softmax, or pass teacher_renormalize=True"
        )


def topk_divergence(
    student: Tensor,  # [..., K]: log-probabilities; with normalize="topk" up to a constant per token
    teacher: Tensor,  # [..., K]: log-probabilities
    is_counted: Tensor,  # [..., K] bool: true where an entry counts; entries that count have different ids
    divergence: str,  # "forward", "reverse", "jsd" or "tvd"
    normalize: str,  # "tail", "vocab" or "topk": the outcomes over which the divergence is summed
    beta: float,  # weight of the teacher in the JSD
    teacher_renormalize: bool,  # the teacher's probabilities are divided by their sum
    teacher_temperature: float,
) -> Tensor:
    """Values [...] of ``topk_kl``, from log-probabilities of ids under the student and under the teacher."""
    has_entries = is_counted.any(-1)
    log_p = torch.where(is_counted, student, EXCLUDED_LOGPROB)
    log_q = torch.where(is_counted, teacher.detach(), EXCLUDED_LOGPROB)
    if teacher_renormalize or teacher_temperature != 1:
        tempered_logprobs = log_q / teacher_temperature
        log_sum = tempered_logprobs.logsumexp(-1, keepdim=True)
        if not teacher_renormalize:  # the sum is over K + 1 outcomes; the log-probability of the last may be -inf
            remainder = -torch.expm1(log_q.logsumexp(-1, keepdim=True))
            log_remainder = torch.where(remainder > 0, remainder, 0.0).log()
            log_sum = torch.logaddexp(log_sum, log_remainder / teacher_temperature)
        log_q = tempered_logprobs - log_sum
    finite_log_p = log_p.clamp(min=EXCLUDED_LOGPROB)  # an id that the student excludes has p * log p = 0
    if normalize == "topk":
        log_sum = finite_log_p.logsumexp(-1, keepdim=True)
        log_p, finite_log_p = log_p - log_sum, finite_log_p - log_sum
    divergences = divergence_of(log_q.exp(), log_q, log_p, finite_log_p, divergence, beta, is_counted)
    if normalize == "tail":
        p_left_out, log_p_left_out = remainder_of(finite_log_p)
        # probabilities that are renormalised add up to 1, and 1 minus their sum would be a rounding error
        q_left_out, log_q_left_out = remainder_of(torch.zeros_like(log_q[..., :1]) if teacher_renormalize else log_q)
        rest_probabilities = q_left_out, log_q_left_out, log_p_left_out, log_p_left_out
        divergences = divergences + divergence_of(*rest_probabilities, divergence, beta, None, p_left_out)
    elif normalize == "vocab" and divergence == "tvd":
        divergences = divergences + 0.5 * remainder_of(finite_log_p)[0]
    elif normalize == "vocab" and divergence == "jsd":
        # for other ids m = (1 - beta) * p
        divergences = divergences - (1 - beta) * math.log(1 - beta) * remainder_of(finite_log_p)[0]
    return torch.where(has_entries, divergences, 0.0)


def remainder_of(log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two tensors [...]: the remainder, which is 1 minus the sum of probabilities over the last dimension, and
    the logarithm of the remainder clamped to at least the dtype's epsilon."""
    remainder = (-torch.expm1(log_probabilities.logsumexp(-1))).clamp(min=0.0)
    return remainder, remainder.clamp(min=torch.finfo(remainder.dtype).eps).log()


def divergence_of(
    q: Tensor,  # [..., K] or [...], the teacher's probabilities; all tensors have this shape
    log_q: Tensor,
    log_p: Tensor,
    finite_log_p: Tensor,  # log_p, clamped to finite numbers
    divergence: str,  # "forward", "reverse", "jsd" or "tvd"
    beta: float,  # weight of the teacher in the JSD
    is_counted: Tensor | None,  # bool; None: the terms are returned and not summed
    p: Tensor | None = None,  # None: exp(finite_log_p)
) -> Tensor:
    """Returns a divergence [...]: the sum of its terms over the entries that count. If ``is_counted`` is None, returns
    the terms themselves, in the shape of ``q``."""
    if p is None:
        p = finite_log_p.exp()
    if divergence == "forward":
        terms = q * (log_q - log_p)
    elif divergence == "reverse":
        terms = p * (finite_log_p - log_q)
    elif divergence == "tvd":
        terms = 0.5 * (p - q).abs()
    else:
        log_m = torch.logaddexp(finite_log_p + math.log1p(-beta), log_q + math.log(beta))
        terms = beta * q * (log_q - log_m) + (1 - beta) * p * (finite_log_p - log_m)
    return terms if is_counted is None else torch.where(is_counted, terms, 0.0).sum(-1)
