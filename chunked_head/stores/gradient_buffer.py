"""A buffer of the caller's that the weight's gradient is added to, instead of one made for it: ``accumulate_into=``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import checks
from ..core.checks import name as name_of
from ..core.private import private


@dataclass(frozen=True, eq=False)
class GradientBuffer:
    """The buffer of one call.

    What autograd gets for the weight: nothing, and hooks of the weight's accumulation fire for nothing as they do for
    something. Megatron's hook asks for a gradient to be there, though it reads none of it: a parameter that has
    ``grad_added_to_main_grad`` gets torch's zero that takes no memory.
    """

    weight: Tensor
    buffer: Tensor  # [vocab, hidden]
    attribute: str | None  # of the weight, where the buffer is one

    def check_there(self) -> None:
        """Raises where the weight has let go of the buffer since the call."""
        if self.attribute is not None and getattr(self.weight, self.attribute, None) is not self.buffer:
            raise RuntimeError(
                f"weight.{self.attribute} is no longer the tensor that accumulate_into has added to since the forward "
                "pass, and what was added would be lost; call zero_grad() before the forward pass, with "
                "set_to_none=False"
            )

    def handed_over(self) -> Tensor | None:
        """The weight's gradient as backward returns it to autograd; the sums lie in the buffer."""
        weight = self.weight
        if self.attribute != "main_grad" or not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        zeros = private("_efficientzerotensor")
        return (
            torch.zeros_like(weight)
            if zeros is None
            else zeros[0](weight.shape, dtype=weight.dtype, device=weight.device)
        )

    @property
    def fresh(self) -> bool:
        """True where the buffer is uninitialised: the first product is stored rather than added."""
        return False


class StreamsBuffer(GradientBuffer):
    """The gradient that the streams of one call add to, until the call's backward returns it."""

    fresh = True  # until a stream with tokens has added to it

    def __init__(self, weight: Tensor, vocab: int, dtype: torch.dtype):
        super().__init__(weight, torch.empty(weight.shape, dtype=dtype, device=weight.device), None)
        self.buffer[vocab:].zero_()  # rows that stand for no id

    def handed_over(self) -> None:
        """The backward of all streams returns it, once."""

    def taken(self) -> Tensor:
        """The sums, which nothing here keeps: a graph may outlive its backward."""
        sums = self.buffer
        object.__setattr__(self, "buffer", sums.new_empty(0))
        return sums


def resolve(
    accumulate_into: Tensor | str | None, weight: Tensor, others: dict[str, Tensor | None]
) -> GradientBuffer | None:
    """The buffer that this call adds the weight's gradient to, or None; ValueError, TypeError for one that cannot be.

    A name is looked up only where the call makes that gradient: in evaluation there may be nothing under it.
    """
    if accumulate_into is None:
        return None
    wanted = torch.is_grad_enabled() and weight.requires_grad
    if wanted:
        check_weight(weight)
    buffer, label = accumulate_into, "accumulate_into"
    if isinstance(buffer, str):
        if not wanted:
            return None
        buffer, label = named(buffer, weight), f"weight.{buffer} (accumulate_into)"
    check_buffer(label, buffer, weight, others | {"weight": weight})
    if not wanted:
        return None
    attribute = next((a for a in ("grad", "main_grad") if getattr(weight, a, None) is buffer), None)
    if isinstance(accumulate_into, str):
        attribute = accumulate_into
    if attribute == "main_grad" and getattr(weight, "overwrite_main_grad", False):
        raise ValueError(
            "weight.overwrite_main_grad is set: its main_grad is to be overwritten, and accumulate_into adds; clear "
            "the flag and zero main_grad, or leave accumulate_into=None"
        )
    return GradientBuffer(weight, buffer, attribute)


def check_kind(accumulate_into: Tensor | str | None) -> None:
    if accumulate_into is not None and not isinstance(accumulate_into, Tensor | str):
        raise TypeError(
            "accumulate_into must be a tensor, the name of an attribute of weight or None, got "
            f"{type(accumulate_into).__name__}"
        )


def named(name: str, weight: Tensor) -> Tensor:
    buffer = getattr(weight, name, None)
    if buffer is None:
        keep = "; zero_grad(set_to_none=False) keeps it" if name == "grad" else ""
        raise ValueError(
            f"accumulate_into={name!r} names weight.{name}, which is not there; make it before the call, such as "
            f"weight.{name} = torch.zeros_like(weight, dtype={sum_dtype(weight.dtype)}){keep}"
        )
    return buffer


def sum_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """The one dtype of a buffer. Sums over micro-batches in 16 bits would err more with every chunk."""
    return torch.promote_types(weight_dtype, torch.float32)


def check_buffer(label: str, buffer: Tensor, weight: Tensor, operands: dict[str, Tensor | None]) -> None:
    checks.check_tensor(label, buffer, optional=False)
    checks.check_shape(label, buffer, buffer.shape == weight.shape, f"{tuple(weight.shape)}, that of weight", "")
    if buffer.dtype != sum_dtype(weight.dtype):
        raise TypeError(
            f"{label} must be {name_of(sum_dtype(weight.dtype))} for a weight of {name_of(weight.dtype)}, got "
            f"{name_of(buffer.dtype)}; sums in 16 bits lose what is added late: keep the gradient in a buffer of its "
            "own, such as weight.main_grad"
        )
    checks.check_device(label, buffer, weight.device, "weight")
    if not buffer.is_contiguous():
        raise ValueError(f"{label} must be contiguous, got strides {buffer.stride()}; make it by torch.zeros")
    if buffer.is_neg():
        raise ValueError(
            f"{label} is lazily negated, and what is added to its memory would be too; make it by torch.zeros"
        )
    if buffer.requires_grad:
        raise ValueError(f"{label} must not require a gradient, got requires_grad=True; pass {label}.detach()")
    for argument, tensor in operands.items():
        if tensor is not None and overlap(buffer, tensor):
            raise ValueError(f"{label} shares memory with {argument}; pass a buffer of its own")


def overlap(one: Tensor, other: Tensor) -> bool:
    """True where the bytes that two tensors span have some in common."""
    if not one.numel() or not other.numel():
        return False
    spans = []
    for tensor in (one, other):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]


def check_weight(weight: Tensor) -> None:
    """Raises where hooks or a graph have to see the weight's gradient."""
    if not weight.is_leaf:
        raise ValueError(
            "accumulate_into takes the gradient of weight, and weight has been computed from other tensors, which "
            "would get none; pass the parameter itself, or leave accumulate_into=None"
        )
    if getattr(weight, "_backward_hooks", None):
        raise ValueError(
            "weight has hooks (register_hook) that are to see its gradient, and accumulate_into adds that unseen; "
            "remove them, use register_post_accumulate_grad_hook, or leave accumulate_into=None"
        )
