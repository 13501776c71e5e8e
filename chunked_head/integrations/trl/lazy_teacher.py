"""TRL's experimental distillation trainers, which compare logits: hidden states of student and teacher instead."""

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from ...functions.divergence import linear_divergence
from ..huggingface.lazy.fused_loss import head_of
from ..huggingface.lazy.fused_statistics import reading
from ..huggingface.lazy.lazy_logits import LazyLogits
from ..huggingface.patch import REPORT, the_model

JSD, SELF = "generalized_jsd_loss", "compute_full_logit_self_distillation_loss"


def distil_from_hidden(trainer: Any) -> Any:
    """Has a GKDTrainer, a GOLDTrainer without ``use_uld_loss``, or an SDFTTrainer or SDPOTrainer of
    ``distillation_mode="full_logits"`` (all of ``trl.experimental``) compute its divergence without logits.

        patch_model(model, when="training", memory_budget="1GiB")
        patch_model(teacher, when="always")
        distil_from_hidden(GKDTrainer(model, teacher, ...)).train()

    Both models' logits are lazy then; where TRL's function of the divergence is given both, its value and gradients
    come from the hidden states and the two heads. What else it is given goes to TRL's own. A model that is its own
    teacher (``teacher_model_kind="live"``) is patched with ``when="always"``.

    Returns:
        ``trainer`` itself.

    Raises:
        TypeError: it is none of those trainers. ValueError: a model was not patched so, before the trainer was made,
            which hangs forwards of TRL's and accelerate's on models.
    """
    module: Any = sys.modules[type(trainer).__module__]
    teacher = getattr(trainer, "teacher_model", None)
    if teacher is None or not (hasattr(trainer, JSD) or hasattr(module, SELF)):
        raise TypeError(
            f"{type(trainer).__name__} compares no logits of a teacher that it holds; patch_trl() serves "
            "DistillationTrainer"
        )
    for model, when in ((teacher, ("always",)), (trainer.model, ("training", "always"))):
        agreed = getattr(the_model(model, "distil_from_hidden"), REPORT, None)
        if agreed is None or agreed.head is None or agreed.when not in when:
            raise ValueError(
                f'distil_from_hidden needs patch_model(model, when="{when[0]}") of the {type(trainer).__name__}\'s '
                f"{'teacher' if model is teacher else 'student'} before the trainer is made; got {agreed}"
            )
    if hasattr(trainer, JSD):
        trainer.generalized_jsd_loss = functools.partial(jsd_loss, getattr(type(trainer), JSD))
    elif not isinstance(theirs := getattr(module, SELF), functools.partial):
        setattr(module, SELF, functools.partial(self_distillation_loss, theirs))  # TRL's own for all but lazy logits
    return trainer


def jsd_loss(
    theirs: Any,
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Tensor | int | None = None,
    **more: Any,
) -> Tensor:
    """GKD's and GOLD's ``generalized_jsd_loss``; ``theirs`` where there are logits, or no sum to divide."""
    mask = None if labels is None else labels != -100
    found = None
    if not any(more.values()) and (num_items_in_batch is not None or reduction in ("batchmean", "sum")):
        found = divergence(student_logits, teacher_logits, beta, temperature, mask)
    if found is None:
        more |= {"labels": labels, "beta": beta, "temperature": temperature, "reduction": reduction}
        return theirs(student_logits, teacher_logits, num_items_in_batch=num_items_in_batch, **more)
    if num_items_in_batch is not None:
        return found.sum() / torch.as_tensor(num_items_in_batch, device=found.device)
    count = max(len(found), 1) if mask is None else mask.sum().clamp_min(1)
    return found.sum() / (count if reduction == "batchmean" else 1)


def self_distillation_loss(theirs: Any, student_logits: Tensor, teacher_logits: Tensor, **options: Any) -> Tensor:
    """SDFT's and SDPO's ``compute_full_logit_self_distillation_loss``: [batch, tokens]."""
    found = divergence(student_logits, teacher_logits, options["distillation_alpha"], 1.0, None)
    return theirs(student_logits, teacher_logits, **options) if found is None else found


def divergence(student: Any, teacher: Any, beta: float, temperature: float, mask: Tensor | None) -> Tensor | None:
    """A token's divergence: forward KL for a ``beta`` of 0, reverse for 1, else the JSD; None where logits exist."""
    if not all(isinstance(logits, LazyLogits) and logits._real is None for logits in (student, teacher)):
        return None  # what is written to computed logits is in these alone
    own, teachers = reading(student._virtual), reading(teacher._virtual)
    if own is None or teachers is None or own.factor is not None or teachers.factor is not None:
        return None
    ours, theirs = own.logits, teachers.logits
    student.check_unchanged()
    teacher.check_unchanged()

    def of_student(given: dict[str, Any], head: Any, hidden: Tensor, _: Any) -> Tensor:
        options = head_of(ours.source, own.tail, head)
        found = linear_divergence(
            hidden, divergence="jsd", beta=beta, temperature=temperature, mask=mask, **given, **options
        )
        assert isinstance(found, Tensor)
        return found

    def of_teacher(head: Any, hidden: Tensor, _: Any) -> Tensor:
        found, given = head_of(theirs.source, teachers.tail, head), {}
        for name in ("weight", "bias", "softcap", "logit_scale"):
            given[f"teacher_{name}"] = found[name].detach() if isinstance(found[name], Tensor) else found[name]
        inside = functools.partial(of_student, given | {"teacher_hidden": hidden.detach()})
        return ours.source.head.real(ours.hidden, chunked_head_loss=inside)

    with ours.source.taken():
        made = theirs.source.head.real(theirs.hidden, chunked_head_loss=of_teacher)
    ours.source.patch.fuses(own.tail)
    return made
