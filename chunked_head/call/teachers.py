"""The dense teacher of a call: its fields, checked, and what the kernels take of them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..core.stats import Teacher
from ..losses.base import TEACHER_FIELDS as TEACHER
from ..losses.base import Summand
from ..losses.base import Teacher as TeacherOptions


def check_teacher(summand: Summand, batch: Mapping[str, Tensor]) -> None:
    """Exactly one dense teacher."""
    if "teacher_logits" in batch:
        beside = [field for field in TEACHER[1:] if field in batch]
        if beside:
            raise ValueError(
                f"batch has teacher_logits and {beside[0]}; loss {summand.label} takes one of them, teacher_logits or "
                "teacher_hidden with teacher_weight"
            )
    elif "teacher_hidden" not in batch or "teacher_weight" not in batch:
        raise ValueError(
            f"loss {summand.label} needs batch['teacher_logits'], or batch['teacher_hidden'] with "
            "batch['teacher_weight']"
        )


def check_dense_teacher(
    batch: Mapping[str, Tensor], wanted: list[str], dtype: torch.dtype, autocast: bool
) -> int | None:
    """Rows of the teacher's vocabulary, None without one; its two matmul operands must fit each other, in their dtypes
    too where autocast casts them not."""
    if "teacher_logits" in wanted:
        return batch["teacher_logits"].shape[-1]
    if "teacher_hidden" not in wanted:
        return None
    hidden, weight, bias = batch["teacher_hidden"], batch["teacher_weight"], batch.get("teacher_bias")
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(
            f"batch['teacher_weight'] must be [vocabulary, {hidden.shape[-1]}], the width of teacher_hidden, got "
            f"{tuple(weight.shape)}"
        )
    for name, tensor in (("teacher_weight", weight), ("teacher_bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype and not autocast:
            raise TypeError(
                f"batch[{name!r}] must have the dtype of teacher_hidden, {hidden.dtype}, got {tensor.dtype}; cast one "
                f"of them or run under torch.autocast({hidden.device.type!r})"
            )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"batch['teacher_bias'] must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    if (hidden.dtype == torch.float64) != (dtype == torch.float64):
        raise TypeError(f"batch['teacher_hidden'] is {hidden.dtype}, the student's matmuls are in {dtype}")
    return weight.shape[0]


def make_teacher(
    fields: Mapping[str, Tensor], options: TeacherOptions, columns: int, dtype: torch.dtype | None
) -> Teacher:
    """The teacher over the vocabulary that it shares with the student, its temperature in scale and cap, or that of
    each token; ``dtype``: of its matmul, where autocast gives one."""
    temperature = 1.0 if options.temperature is None else options.temperature
    weight, bias = fields.get("teacher_weight"), fields.get("teacher_bias")
    return Teacher(
        fields.get("teacher_logits"),
        fields.get("teacher_hidden"),
        None if weight is None else weight[:columns].detach(),
        None if bias is None else bias[:columns].detach().contiguous(),  # as kernels read it
        options.logit_scale / temperature,
        None if options.softcap is None else options.softcap / temperature,
        options.temperature is None,
        dtype,
    )
