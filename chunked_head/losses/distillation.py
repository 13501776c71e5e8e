"""Distillation from a dense teacher, or from a teacher of which K log-probabilities per token are known.

In all docstrings ``p`` is the student's distribution, and ``q`` the teacher's, which takes no gradient.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..core.checks import INFINITY, MOST_ROUNDED, check_logprobs, choice, flag, number, refuse_unknown
from ..core.divergences import Sum
from .base import TEACHER_FIELDS, Losses, SummandOptions, Teacher, make, once
from .batch import Batch, Stats

NOTHING: Mapping[str, Sum] = MappingProxyType({})


class TeacherOptions(SummandOptions, total=False):
    """Options that every loss with a dense teacher takes.

    The teacher's logits are ``teacher_softcap * tanh(teacher_logit_scale * y / teacher_softcap) / T``; without
    ``teacher_softcap`` they are ``teacher_logit_scale * y / T``. ``temperature`` is that of student and teacher;
    ``teacher_temperature`` is that of the teacher alone. ``t_squared`` multiplies value and gradient by
    ``temperature ** 2`` (Hinton et al., 1503.02531).
    """

    teacher_temperature: float | None
    t_squared: bool
    teacher_logit_scale: float
    teacher_softcap: float | None


@once
def forward_kl(form: str = "kl", **teacher: Any) -> Losses:
    """``(q * (q / p).log()).sum(-1)``: KL(q || p) to a dense teacher.

    ``form="cross_entropy"`` is ``-(q * p.log()).sum(-1)``: it lacks the teacher's entropy and has the same gradient.

    Fields, for this and the other losses of a dense teacher: either ``teacher_logits`` [..., V_t], or
    ``teacher_hidden`` [..., H_t] with ``teacher_weight`` [V_t, H_t] and perhaps ``teacher_bias`` [V_t]. Logits and
    hidden states are indexed like the student's hidden states. The target may be None; only its ``ignore_index`` is
    read. The sizes of both vocabularies may differ by up to 1023, the padding of a head: then both distributions are
    over the first ``min(V, V_t)`` ids. With ``vocab_size`` given, the teacher may have any number of ids above it.
    ``teacher``: ``TeacherOptions``.
    """
    choice("losses.forward_kl", "form", form, ("kl", "cross_entropy"))
    return dense("forward_kl", ("forward_kl",) if form == "kl" else ("forward_kl", "teacher_entropy"), teacher)


@once
def reverse_kl(**teacher: Any) -> Losses:
    """``(p * (p / q).log()).sum(-1)``: KL(p || q) to a dense teacher; fields and options as ``forward_kl``.

    Where the teacher excludes an id that the student does not (a logit of -inf), the divergence is infinite. ``log q``
    is taken to be -1e4 there, so that value and gradient are large but finite. ``jsd`` is bounded.
    """
    return dense("reverse_kl", ("reverse_kl",), teacher)


@once
def jsd(beta: float = 0.5, **teacher: Any) -> Losses:
    """``(beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1)`` with ``m = beta * q + (1 - beta) * p``:
    ``beta * KL(q || m) + (1 - beta) * KL(p || m)`` to a dense teacher (GKD, 2306.13649).

    ``beta=0`` is ``forward_kl`` and ``beta=1`` is ``reverse_kl``, although the formula tends to 0 at both ends. Fields
    and other options as ``forward_kl``.
    """
    beta = number("losses.jsd", "beta", beta, 0.0, 1.0)
    ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
    return dense("jsd", (ends.get(beta, "jsd"),), teacher, None if beta in ends else beta)


@once
def tvd(**teacher: Any) -> Losses:
    """``0.5 * (p - q).abs().sum(-1)``: total variation distance to a dense teacher; fields and options as
    ``forward_kl``. Where ``p_j = q_j`` the subgradient is 0.
    """
    return dense("tvd", ("tvd",), teacher)


@once
def lk(form: str = "log", eta: float = 3.0, least: float = 1e-5, **teacher: Any) -> Losses:
    """``-a.log()`` with ``a = torch.min(p, q).sum(-1)``: ``a`` is the probability that a verifier ``q`` accepts a token
    of the trained drafter ``p`` (Samarin et al., 2602.23881; ``speculators``). Fields and other options as
    ``forward_kl``.

    ``form="log"``: ``-log(max(a, least))``. Its gradient is that of ``tvd`` divided by ``a``, and 0 for ``a`` below
    ``least``. ``form="hybrid"``: ``w * KL(q || p) + (1 - w) * tvd``, with ``w = exp(-eta * a)`` without gradient.
    """
    choice("losses.lk", "form", form, ("log", "hybrid"))
    eta, least = number("losses.lk", "eta", eta, 0.0), number("losses.lk", "least", least, 0.0, 1.0, open_=True)
    if form == "log":
        return dense("lk", ("overlap",), teacher, None, _log_acceptance, {"least": least})
    return dense("lk", ("forward_kl", "tvd"), teacher, None, _hybrid_acceptance, {"eta": eta})


def _log_acceptance(stats: Stats, batch: Batch, factor: float, least: float) -> Tensor:
    return -torch.where(stats.overlap < least, least, stats.overlap).log() * factor


def _hybrid_acceptance(stats: Stats, batch: Batch, factor: float, eta: float) -> Tensor:
    share = ((stats.tvd.detach() - 1.0) * eta).exp()
    return (share * stats.forward_kl + (1.0 - share) * stats.tvd) * factor


def _sum_of(stats: Stats, batch: Batch, factor: float, statistics: tuple[str, ...]) -> Tensor:
    first, *further = (getattr(stats, name) for name in statistics)
    return sum(further, first) * factor


def dense(
    kind: str,
    statistics: tuple[str, ...],
    teacher_options: dict[str, Any],
    beta: float | None = None,
    function: Callable[..., Tensor] = _sum_of,
    options: dict[str, Any] | None = None,
    sums: Mapping[str, Sum] = NOTHING,
) -> Losses:
    """A loss of a dense teacher: ``function`` of ``statistics``, by default their sum. ``teacher_options``: the user's
    ``TeacherOptions``. ``sums``: the sums over the vocabulary that define further statistics, by name."""
    refuse_unknown("losses", kind, teacher_options, TeacherOptions.__annotations__)
    where, summand = f"losses.{kind}", dict(teacher_options)
    temperature, softcap = summand.pop("teacher_temperature", None), summand.pop("teacher_softcap", None)
    scale = number(where, "teacher_logit_scale", summand.pop("teacher_logit_scale", 1.0))
    factor = squared(where, summand.get("temperature"), summand.pop("t_squared", False))
    teacher = Teacher(
        None if temperature is None else number(where, "teacher_temperature", temperature, 0.0, open_=True),
        scale,
        None if softcap is None else number(where, "teacher_softcap", softcap, 0.0, open_=True),
        beta,
    )
    options = {"statistics": statistics} if options is None else options
    return make(
        kind, function, summand, {"factor": factor, **options}, needs=statistics, optional_fields=TEACHER_FIELDS,
        reads_target=False, teacher=teacher, sums=sums,
    )  # fmt: skip


# largest log-probability of a teacher that is padding: collators pad with -1e9, -inf or the dtype's minimum
PADDING = -1e6
NONE = -1e30  # log-probability of entries that do not count: finite, and its exp is 0 at any temperature


@once
def topk_kl(
    divergence: str = "forward",
    normalize: str = "tail",
    *,
    beta: float = 0.5,
    teacher_renormalize: bool | None = None,
    teacher_temperature: float | None = None,
    t_squared: bool = False,
    **summand: Any,
) -> Losses:
    """``(t * (t / s).log()).sum(-1) + rest_t * (rest_t / rest_s).log()`` with ``s`` and ``t`` [..., K] the student's
    and the teacher's probabilities of ``teacher_ids``, ``rest_s = 1 - s.sum(-1)`` and ``rest_t = 1 - t.sum(-1)``: a
    divergence from a teacher of which K log-probabilities per token are known.

    Fields: ``teacher_ids`` [..., K], ``teacher_logprobs`` [..., K], and ``teacher_mask`` [..., K] if entries are
    missing. They are indexed like the hidden states. The target may be None.

    ``divergence`` is ``forward`` KL(t || s), ``reverse`` KL(s || t), ``jsd`` (``beta``: 0 is forward, 1 reverse) or
    ``tvd``. ``normalize`` says over which outcomes:

    - ``tail``: over K + 1 outcomes, the last of which is any other id.
    - ``vocab``: over the vocabulary, where the teacher's probability of other ids is 0. ``forward`` is below 0 where
      ``t`` sums to less than 1; ``reverse`` leaves out other ids, whose terms are infinite; ``jsd`` and ``tvd`` count
      ``rest_s``.
    - ``topk``: over the K ids, with ``s`` and ``t`` normalised over them; the value is 0 for K = 1.

    ``teacher_renormalize`` divides ``t`` by its sum first; by default it does for ``topk`` only. The teacher's
    log-probabilities are those at the loss's temperature. With ``teacher_temperature=T`` they are those at temperature
    1, and ``t ** (1 / T)`` is normalised: with ``teacher_renormalize`` over the K ids; else, for ``tail``, over the
    K + 1 outcomes. ``temperature`` is the student's; ``t_squared`` as in ``forward_kl``.

    An entry counts where ``teacher_mask`` is true and its log-probability is above -1e6 (-inf and -1e9 are padding).
    The id of an entry that does not count may be any number. Entries of equal ids count once, with the largest of their
    log-probabilities. A token without entries has value 0. The logarithm of a rest is that of the dtype's epsilon at
    least.
    """
    options = topk_options("losses.topk_kl", divergence, normalize, beta, teacher_renormalize, teacher_temperature)
    options["factor"] = squared("losses.topk_kl", summand.get("temperature"), t_squared)
    return make(
        "topk_kl",
        _topk_kl,
        summand,
        options,
        needs=("topk_logprobs",),
        fields=("teacher_ids", "teacher_logprobs"),
        optional_fields=("teacher_mask",),
        reads_target=False,
        of_columns=normalize == "topk",
    )


def topk_options(
    where: str,
    divergence: str,
    normalize: str,
    beta: float,
    teacher_renormalize: bool | None,
    teacher_temperature: float | None,
) -> dict[str, Any]:
    """Options of ``topk_divergence``, checked."""
    choice(where, "divergence", divergence, ("forward", "reverse", "jsd", "tvd"))
    choice(where, "normalize", normalize, ("tail", "vocab", "topk"))
    beta = number(where, "beta", beta, 0.0, 1.0)
    if divergence == "jsd" and beta in (0.0, 1.0):
        divergence = "reverse" if beta else "forward"
    renormalize = normalize == "topk"
    if teacher_renormalize is not None:
        renormalize = flag(f"teacher_renormalize of {where}", teacher_renormalize)
    temperature = (
        1.0
        if teacher_temperature is None
        else number(where, "teacher_temperature", teacher_temperature, 0.0, open_=True)
    )
    if temperature != 1 and normalize != "tail" and not renormalize:
        raise ValueError(
            f"teacher_temperature of {where} cannot change probabilities that are not normalised over anything known, "
            f"with normalize={normalize!r}; pass teacher_renormalize=True"
        )
    return {
        "divergence": divergence,
        "normalize": normalize,
        "beta": beta if divergence == "jsd" else 0.5,  # unread by the others; an equal value shares the kernel
        "teacher_renormalize": renormalize,
        "teacher_temperature": temperature,
    }


def squared(where: str, temperature: Any, t_squared: bool) -> float:
    """Factor of the values: ``temperature ** 2`` with ``t_squared``, else 1."""
    if not flag(f"t_squared of {where}", t_squared):
        return 1.0
    if temperature is None:
        raise ValueError(f"t_squared of {where} needs the loss's own temperature; pass temperature=")
    return number(where, "temperature", temperature, 0.0, open_=True) ** 2


def _topk_kl(stats: Stats, batch: Batch, factor: float, **options: Any) -> Tensor:
    student = stats.topk_logprobs
    teacher = batch["teacher_logprobs"].to(student.dtype)
    counts = batch.get("teacher_entries")  # made once for all tokens of a call
    if counts is None:
        counts = entries(teacher, batch["teacher_ids"], batch.get("teacher_mask"))
    return topk_divergence(student, teacher, counts, **options) * factor


def entries(teacher: Tensor, ids: Tensor | None, mask: Tensor | None) -> Tensor:
    """Mask [..., K] of the teacher's entries that count: those that are no padding, and of equal ids the likeliest."""
    counts = ~(teacher <= PADDING)  # an entry of nan counts, so that the error shows in the loss
    if mask is not None:
        counts = counts & mask
    if ids is None:
        return counts
    place = torch.arange(teacher.shape[-1], device=teacher.device)
    entry, rival = teacher[..., :, None], teacher[..., None, :]
    better = (rival > entry) | ((rival == entry) & (place[None, :] < place[:, None]))
    return counts & ~((ids[..., :, None] == ids[..., None, :]) & counts[..., None, :] & better).any(-1)


def check_teacher(argument: str, teacher: Tensor, counts: Tensor, is_normalized: bool) -> None:
    """Raises ValueError where a teacher's numbers are no log-probabilities. Tensors on a GPU are not checked, since the
    host would wait. ``is_normalized``: the sum of a token's probabilities, too, must be at most 1."""
    if not counts.any():
        return
    check_logprobs(argument, teacher[counts], MOST_ROUNDED if is_normalized else INFINITY)
    total = float(torch.where(counts, teacher, -torch.inf).logsumexp(-1).max())
    if is_normalized and total > MOST_ROUNDED:
        raise ValueError(
            f"{argument} must hold log-probabilities, whose exponentials add up to at most 1 for a token, got "
            f"{math.exp(total):g}; take them from log_softmax, or pass teacher_renormalize=True"
        )


def topk_divergence(
    student: Tensor,  # [..., K]: log-probabilities; for "topk" plus any constant per token
    teacher: Tensor,  # [..., K]: log-probabilities
    counts: Tensor,  # [..., K] bool: true where an entry counts; entries that count have different ids
    divergence: str,
    normalize: str,
    beta: float,
    teacher_renormalize: bool,
    teacher_temperature: float,
) -> Tensor:
    """Values [...] of ``topk_kl`` from gathered log-probabilities."""
    has_entries = counts.any(-1)
    s = torch.where(counts, student, NONE)
    t = torch.where(counts, teacher.detach(), NONE)
    if teacher_renormalize or teacher_temperature != 1:
        tempered = t / teacher_temperature
        total = tempered.logsumexp(-1, keepdim=True)
        if not teacher_renormalize:  # over K and the rest as one outcome, -inf where nothing is left
            remainder = -torch.expm1(t.logsumexp(-1, keepdim=True))
            log_remainder = torch.where(remainder > 0, remainder, 0.0).log()
            total = torch.logaddexp(total, log_remainder / teacher_temperature)
        t = tempered - total
    bounded = s.clamp(min=NONE)  # an id that the student excludes has p * log p = 0
    if normalize == "topk":
        total = bounded.logsumexp(-1, keepdim=True)
        s, bounded = s - total, bounded - total
    value = divergence_of(t.exp(), t, s, bounded, divergence, beta, counts)
    if normalize == "tail":
        p_left_out, log_p_left_out = remainder_of(bounded)
        # probabilities that are renormalised add up to 1, and 1 minus their sum would be a rounding error
        q_left_out, log_q_left_out = remainder_of(torch.zeros_like(t[..., :1]) if teacher_renormalize else t)
        outside = q_left_out, log_q_left_out, log_p_left_out, log_p_left_out
        value = value + divergence_of(*outside, divergence, beta, None, p_left_out)
    elif normalize == "vocab" and divergence == "tvd":
        value = value + 0.5 * remainder_of(bounded)[0]
    elif normalize == "vocab" and divergence == "jsd":
        value = value - (1 - beta) * math.log(1 - beta) * remainder_of(bounded)[0]  # for other ids m = (1 - beta) * p
    return torch.where(has_entries, value, 0.0)


def remainder_of(log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 1 minus the sum of probabilities [...], and its logarithm, which is finite where the former is 0."""
    remainder = (-torch.expm1(log_probabilities.logsumexp(-1))).clamp(min=0.0)
    return remainder, remainder.clamp(min=torch.finfo(remainder.dtype).eps).log()


def divergence_of(
    q: Tensor,
    log_q: Tensor,
    log_p: Tensor,
    bounded: Tensor,  # log_p, finite
    divergence: str,
    beta: float,
    counts: Tensor | None,  # [..., K] bool; None: the terms are returned and not summed
    p: Tensor | None = None,  # None: exp(bounded)
) -> Tensor:
    """Terms of a divergence, summed over the entries that count."""
    if p is None:
        p = bounded.exp()
    if divergence == "forward":
        terms = q * (log_q - log_p)
    elif divergence == "reverse":
        terms = p * (bounded - log_q)
    elif divergence == "tvd":
        terms = 0.5 * (p - q).abs()
    else:
        log_m = torch.logaddexp(bounded + math.log1p(-beta), log_q + math.log(beta))
        terms = beta * q * (log_q - log_m) + (1 - beta) * p * (bounded - log_m)
    return terms if counts is None else torch.where(counts, terms, 0.0).sum(-1)
