"""Top-K distillation from student logits that the caller has gathered."""

import torch
from torch import Tensor

from ..core import checks
from ..core.checks import choice, number
from ..core.private import is_traced
from ..losses.distillation import check_teacher, counted_entries, squared_temperature, topk_divergence, topk_options

FUNCTION_NAME = "losses.gathered_topk_kl"  # for errors


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
    """``losses.topk_kl`` of the student's logits at the teacher's ids, by autograd through PyTorch's operations.

    Args:
        student_logits: [..., K], gathered from scaled and capped logits. This function divides them by ``temperature``.
        lse: [...], ``logsumexp(logits / temperature)`` over the vocabulary, through which gradients flow too. Required
            unless ``normalize="topk"``.
        teacher_logprobs, teacher_mask: [..., K], as in ``losses.topk_kl``.
        teacher_ids: [..., K], so that an id that is repeated at a position counts once; None: no id is repeated.
        mask: [...] bool. Where ``mask`` is false, a position has value 0 and zero gradients, whatever the inputs hold.
        token_weights: [...], factors of the positions' values.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        normalizer: the number by which ``"mean"`` divides the sum of ``token_weights * value``. None: the number of
            positions that count. 0 gives 0.
        divergence, normalize, beta, temperature, teacher_renormalize, teacher_temperature, t_squared: as in
            ``losses.topk_kl``.

    Returns:
        The loss, 0-d, or [...] for ``"none"``; fp32 for 16-bit inputs.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    choice(FUNCTION_NAME, "reduction", reduction, ("mean", "sum", "none"))
    options = topk_options(FUNCTION_NAME, divergence, normalize, beta, teacher_renormalize, teacher_temperature)
    temperature = number(FUNCTION_NAME, "temperature", temperature, 0.0, is_open=True)
    temperature_factor = squared_temperature(FUNCTION_NAME, temperature, t_squared)
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
    entry_shape, leading_shape = tuple(student_logits.shape), tuple(student_logits.shape[:-1])
    tensors_with_shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "teacher_logprobs": (teacher_logprobs, entry_shape),
        "teacher_ids": (teacher_ids, entry_shape),
        "teacher_mask": (teacher_mask, entry_shape),
        "lse": (lse, leading_shape),
        "mask": (mask, leading_shape),
        "token_weights": (token_weights, leading_shape),
    }
    for argument, (tensor, shape) in tensors_with_shapes.items():
        checks.check_tensor(argument, tensor, optional=argument != "teacher_logprobs")
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{argument} must have shape {shape}, got {tuple(tensor.shape)}; nothing is broadcast: expand it"
            )
        if tensor is not None and argument in ("teacher_mask", "mask") and tensor.dtype != torch.bool:
            raise TypeError(f"{argument} must be bool, got {tensor.dtype}; use {argument}.bool()")

    dtype = torch.promote_types(student_logits.dtype, torch.float32)
    student_values = student_logits.to(dtype) / temperature
    if lse is not None:
        student_values = student_values - lse.to(dtype).unsqueeze(-1)
    teacher_values = teacher_logprobs.to(dtype)
    is_counted = counted_entries(teacher_values, teacher_ids, teacher_mask)
    if mask is not None:
        is_counted = is_counted & mask.unsqueeze(-1)  # a position without entries is 0
    if type(teacher_values) is Tensor and teacher_values.device.type == "cpu" and not is_traced():
        check_teacher("teacher_logprobs", teacher_values, is_counted, not options["teacher_renormalize"])
    divergences = topk_divergence(student_values, teacher_values, is_counted, **options) * temperature_factor
    if token_weights is not None:
        wide_weights = token_weights.detach().to(dtype)
        divergences = divergences * (wide_weights if mask is None else torch.where(mask, wide_weights, 0.0))
    if reduction == "none":
        return divergences
    value_sum = divergences.sum()
    if reduction == "sum":
        return value_sum
    if normalizer is None:
        normalizer = divergences.numel() if mask is None else mask.sum()
    if isinstance(normalizer, Tensor):
        divisor = normalizer.detach().to(value_sum)
    else:
        divisor = value_sum.new_full((), normalizer)
    return torch.where(divisor == 0, 0.0, value_sum / torch.where(divisor == 0, 1.0, divisor))
