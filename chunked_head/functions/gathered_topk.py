"""Top-K distillation from student logits that the caller has gathered."""

import torch
from torch import Tensor

from ..core import checks
from ..core.checks import choice, number
from ..core.private import is_traced
from ..losses.distillation import check_teacher, entries, squared, topk_divergence, topk_options

WHERE = "losses.gathered_topk_kl"


def gathered_topk_kl(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    *,
    lse: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    teacher_mask: Tensor | None = None,
    mask: Tensor | None = None,
    divergence: str = "forward",
    normalize: str = "tail",
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_renormalize: bool | None = None,
    teacher_temperature: float | None = None,
    t_squared: bool = False,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """``losses.topk_kl`` of the student's logits at the teacher's ids, by plain autograd.

    ``student_logits`` [..., K] are gathered from scaled and capped logits, and this function divides them by
    ``temperature``. ``lse`` [...] is ``logsumexp(logits / temperature)`` over the vocabulary; gradients flow
    through it as well. It is needed unless ``normalize="topk"``. ``teacher_logprobs`` [..., K] and ``teacher_mask``
    [..., K] are as in ``losses.topk_kl``. ``teacher_ids`` [..., K] make a repeated id count once; leave them out if no
    id is repeated. The other options are those of ``losses.topk_kl``.

    Positions where ``mask`` [...] is false have value 0 and zero gradients, whatever their inputs are.
    ``reduction="mean"`` divides the sum of ``token_weights * value`` by ``normalizer``, or without one by the number of
    positions that count. The result is 0-d, or [...] for ``"none"``; fp32 for 16-bit inputs.
    """
    choice(WHERE, "reduction", reduction, ("mean", "sum", "none"))
    options = topk_options(WHERE, divergence, normalize, beta, teacher_renormalize, teacher_temperature)
    temperature = number(WHERE, "temperature", temperature, 0.0, open_=True)
    factor = squared(WHERE, temperature, t_squared)
    if lse is None and normalize != "topk":
        raise ValueError(
            f"lse is needed with normalize={normalize!r}: pass logsumexp of the student's logits / temperature over "
            'the vocabulary, or normalize="topk"'
        )
    if normalizer is not None and reduction != "mean":
        raise ValueError(f'normalizer goes with reduction="mean" only, got {reduction!r}; divide the result instead')
    checks.check_factor("normalizer", normalizer)
    checks.check_tensor("student_logits", student_logits, optional=False)
    if student_logits.dim() < 1 or not student_logits.is_floating_point():
        raise ValueError(
            f"student_logits must be floating-point [..., K], got {student_logits.dtype} {tuple(student_logits.shape)}"
        )
    entry_shape, leading = tuple(student_logits.shape), tuple(student_logits.shape[:-1])
    fields: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "teacher_logprobs": (teacher_logprobs, entry_shape),
        "teacher_ids": (teacher_ids, entry_shape),
        "teacher_mask": (teacher_mask, entry_shape),
        "lse": (lse, leading),
        "mask": (mask, leading),
        "token_weights": (token_weights, leading),
    }
    for argument, (tensor, shape) in fields.items():
        checks.check_tensor(argument, tensor, optional=argument != "teacher_logprobs")
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{argument} must have shape {shape}, got {tuple(tensor.shape)}; nothing is broadcast: expand it"
            )
        if tensor is not None and argument in ("teacher_mask", "mask") and tensor.dtype != torch.bool:
            raise TypeError(f"{argument} must be bool, got {tensor.dtype}; use {argument}.bool()")

    dtype = torch.promote_types(student_logits.dtype, torch.float32)
    x = student_logits.to(dtype) / temperature
    if lse is not None:
        x = x - lse.to(dtype).unsqueeze(-1)
    teacher = teacher_logprobs.to(dtype)
    counts = entries(teacher, teacher_ids, teacher_mask)
    if mask is not None:
        counts = counts & mask.unsqueeze(-1)  # a position without entries is 0
    if type(teacher) is Tensor and teacher.device.type == "cpu" and not is_traced():
        check_teacher("teacher_logprobs", teacher, counts, not options["teacher_renormalize"])
    values = topk_divergence(x, teacher, counts, **options) * factor
    if token_weights is not None:
        weights = token_weights.detach().to(dtype)
        values = values * (weights if mask is None else torch.where(mask, weights, 0.0))
    if reduction == "none":
        return values
    total = values.sum()
    if reduction == "sum":
        return total
    if normalizer is None:
        normalizer = values.numel() if mask is None else mask.sum()
    divisor = normalizer.detach().to(total) if isinstance(normalizer, Tensor) else total.new_full((), normalizer)
    return torch.where(divisor == 0, 0.0, total / torch.where(divisor == 0, 1.0, divisor))
