"""Distillation from a dense teacher.

Throughout, ``p`` is the student's distribution and ``q`` the teacher's, which takes no gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.checks import choice, number, refuse_unknown
from ..core.stats import shift_left
from .base import TEACHER_FIELDS, Losses, SummandOptions, Teacher, make, once
from .batch import Batch, Stats
from .topk import positive, squared

TARGET_MASS = "target_mass"  # field: what a token's probabilities add up to


class TeacherOptions(SummandOptions, total=False):
    """Options that every loss with a dense teacher takes.

    The teacher's logits are ``teacher_softcap * tanh(teacher_logit_scale * y / teacher_softcap) / T``, the capping
    where asked for. ``temperature`` is the student's and the teacher's; ``teacher_temperature`` is the teacher's alone
    (Fast-LLM: set that one only; with both, each has its own). ``t_squared`` multiplies value and gradient by
    ``temperature ** 2`` (Hinton et al., 1503.02531; DistillKit; Axolotl multiplies the value only); by default there
    is no factor (TRL, Liger, Fast-LLM).
    """

    teacher_temperature: float | None
    t_squared: bool
    teacher_logit_scale: float
    teacher_softcap: float | None


@once
def forward_kl(form: str = "kl", **teacher: Any) -> Losses:
    """``(q * (q / p).log()).sum(-1)``: KL(q || p) to a dense teacher.

    ``form="cross_entropy"`` leaves out the teacher's entropy, ``-(q * p.log()).sum(-1)``: the same gradient.

    Fields, for this and the other dense losses: either ``teacher_logits`` [..., V_t], or ``teacher_hidden``
    [..., H_t] with ``teacher_weight`` [V_t, H_t] and perhaps ``teacher_bias`` [V_t]. They are indexed like the hidden
    states. The target is read for its ``ignore_index`` alone and may be None. Where the vocabularies differ in size,
    both distributions are over the ids that they share, the first ``min(V, V_t)``. (Liger pads the student with
    logits of 0, which take probability; DistillKit cuts the teacher.)

    ``teacher``: ``TeacherOptions``. A token's value has no factor of the vocabulary (Liger's and TRL's ``batchmean``).

    A mixture of forward and reverse, or with hard labels at temperature 1, is a sum:
    ``0.5 * losses.forward_kl(temperature=2.0) + 0.5 * losses.cross_entropy()``.
    """
    choice("losses.forward_kl", "form", form, ("kl", "cross_entropy"))
    return dense("forward_kl", ("forward_kl",) if form == "kl" else ("forward_kl", "teacher_entropy"), teacher)


@once
def reverse_kl(**teacher: Any) -> Losses:
    """``(p * (p / q).log()).sum(-1)``: KL(p || q) to a dense teacher; fields and options as ``forward_kl``.

    Where the teacher excludes an id (a logit of -inf) that the student does not, the divergence is infinite; its
    ``log q`` is taken to be -1e4 there, so that value and gradient are large but finite. ``jsd`` is bounded.
    """
    return dense("reverse_kl", ("reverse_kl",), teacher)


@once
def jsd(beta: float = 0.5, **teacher: Any) -> Losses:
    """``(beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1)`` with ``m = beta * q + (1 - beta) * p``:
    ``beta * KL(q || m) + (1 - beta) * KL(p || m)`` to a dense teacher (GKD, 2306.13649).

    ``beta`` as in TRL, Liger and Axolotl: 0 is ``forward_kl`` and 1 ``reverse_kl``. They are cases of their own: the
    formula tends to 0 at both ends. Fields and other options as ``forward_kl``.
    """
    beta = number("losses.jsd", "beta", beta, 0.0, 1.0)
    ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
    return dense("jsd", (ends.get(beta, "jsd"),), teacher, None if beta in ends else beta)


@once
def tvd(**teacher: Any) -> Losses:
    """``0.5 * (p - q).abs().sum(-1)``: total variation distance to a dense teacher; fields and options as
    ``forward_kl``.

    An id where ``p_j = q_j`` has the subgradient 0.
    """
    return dense("tvd", ("tvd",), teacher)


@once
def lk(form: str = "log", eta: float = 3.0, least: float = 1e-5, **teacher: Any) -> Losses:
    """``-a.log()`` with ``a = torch.min(p, q).sum(-1)``: the probability that a verifier ``q`` accepts a token of the
    drafter ``p`` that is trained (Samarin et al., 2602.23881; ``speculators``). Fields and other options as
    ``forward_kl``.

    ``form="log"``: ``-log(max(a, least))``, whose gradient is that of ``tvd`` over ``a``: 0 below ``least``.
    ``form="hybrid"``: ``w * KL(q || p) + (1 - w) * tvd`` with ``w = exp(-eta * a)``, which takes no gradient.
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
    first, *others = (getattr(stats, name) for name in statistics)
    return sum(others, first) * factor


def dense(
    kind: str,
    statistics: tuple[str, ...],
    given: dict[str, Any],
    beta: float | None = None,
    function: Callable[..., Tensor] = _sum_of,
    options: dict[str, Any] | None = None,
) -> Losses:
    """The loss that is a function of these statistics, or their sum; ``given``: ``TeacherOptions``."""
    refuse_unknown("losses", kind, given, TeacherOptions.__annotations__)
    where, summand = f"losses.{kind}", dict(given)
    temperature, softcap = summand.pop("teacher_temperature", None), summand.pop("teacher_softcap", None)
    scale = number(where, "teacher_logit_scale", summand.pop("teacher_logit_scale", 1.0))
    factor = squared(where, summand.get("temperature"), summand.pop("t_squared", False))
    teacher = Teacher(
        None if temperature is None else positive(where, "teacher_temperature", temperature),
        scale,
        None if softcap is None else positive(where, "teacher_softcap", softcap),
        beta,
    )
    options = {"statistics": statistics} if options is None else options
    return make(
        kind, function, summand, {"factor": factor, **options}, needs=statistics, optional_fields=TEACHER_FIELDS,
        reads_target=False, teacher=teacher,
    )  # fmt: skip


def fields_of_probabilities(
    probabilities: Tensor,  # [..., V]
    label_smoothing: float,
    class_weights: Tensor | None,  # [V]
    token_weights: Tensor | None,  # [...]
    shift: int,
) -> dict[str, Tensor]:
    """Fields of a cross-entropy whose targets are class probabilities: those of
    ``forward_kl("cross_entropy", token_weights=TARGET_MASS)``: with the sum ``s`` per token of ``q =
    class_weights * ((1 - e) * probabilities + e / V)`` the cross-entropy is s times that of ``softmax(log q) = q / s``.

    The logarithm is a copy of the probabilities, in float32 at least. A token whose probabilities are all 0 has loss 0.
    """
    dtype = torch.promote_types(probabilities.dtype, torch.float32)
    q = probabilities.to(dtype)
    if label_smoothing:
        q = (1 - label_smoothing) * q + label_smoothing / q.shape[-1]
    if class_weights is not None:
        q = q * class_weights.to(dtype)
    mass = q.sum(-1)
    logits = q.log().masked_fill_((mass == 0).unsqueeze(-1), 0.0)
    dims = logits.dim() - 1
    fields = {"teacher_logits": shift_left(logits, shift, 0, dims - 1) if dims else logits}
    if token_weights is None:
        return fields | {TARGET_MASS: mass}
    # other summands, such as a z-loss, know nothing of the mass
    return fields | {TARGET_MASS: mass * token_weights, "token_weights": token_weights}
