"""Buffers of a call's gradients, and the caller's buffer for the weight's gradient (``accumulate_into=``)."""

from typing import Any

import torch
from torch import Tensor

from ..core import checks
from ..core.checks import name as name_of
from ..core.private import private
from ..parallel.merge import ScatteredRows, SummedRows
from ..plan.sizes import Sizes

# name of an attribute of the tensor that owns the memory of callers' buffers: a set of the places of buffers that hold
# a part of the gradient of a call that has raised
PARTIAL = "chunked_head_partial"


class GradientBuffer:
    """A buffer [vocab, hidden] of the caller, to which the weight's gradient is added."""

    fresh = False  # True: the buffer is uninitialised, so the first product is stored in it, not added
    written = False  # True: a part of this call's gradient may be in the buffer

    def __init__(self, weight: Tensor, buffer: Tensor, attribute: str | None = None):
        """``attribute``: name of the attribute of ``weight`` that holds ``buffer``; None if no attribute does."""
        self.weight, self.buffer, self.attribute = weight, buffer, attribute

    @property
    def place(self) -> tuple[Tensor, tuple[Any, ...]]:
        """The tensor that owns the buffer's memory, and the place of the buffer there: (offset, *shape)."""
        buffer = self.buffer
        return buffer if buffer._base is None else buffer._base, (buffer.storage_offset(), *buffer.shape)

    def note_failure(self) -> None:
        """Notes in ``PARTIAL`` that a call has raised, if a part of its gradient may be in the buffer."""
        if self.written:
            owner, place = self.place
            setattr(owner, PARTIAL, {*getattr(owner, PARTIAL, ()), place})

    def check_complete(self, label: str) -> None:
        """Raises RuntimeError if a part of an earlier call's gradient is in the buffer. If an earlier call has raised,
        the host waits for the device, to see whether the buffer is zero by now."""
        owner, place = self.place
        partial_places: set[tuple[Any, ...]] = getattr(owner, PARTIAL, set())
        if place not in partial_places:
            return
        is_captured = self.buffer.is_cuda and torch.cuda.is_current_stream_capturing()
        if is_captured or self.buffer.any():
            raise RuntimeError(
                f"a call that added to {label} raised before it was done, and a part of its gradient lies there beside "
                "what was there before; zero it and go on with the next step (zero_grad(set_to_none=False)), or, if "
                f"you have put back what it held, delete its attribute {PARTIAL}"
                + " (of the tensor that it is a view of)"
                * (owner is not self.buffer)
            )
        partial_places.discard(place)

    def check_attribute(self) -> None:
        """Raises RuntimeError if the weight's attribute has become another tensor since the forward pass."""
        if self.attribute is not None and getattr(self.weight, self.attribute, None) is not self.buffer:
            raise RuntimeError(
                f"weight.{self.attribute} is no longer the tensor that accumulate_into has added to since the forward "
                "pass, and what was added would be lost; call zero_grad() before the forward pass, with "
                "set_to_none=False"
            )

    def result(self) -> Tensor | None:
        """Returns the weight's gradient for autograd: None, since the buffer has the gradient. Megatron's hooks need a
        tensor but do not read it: for Megatron it returns zeros that take no memory."""
        weight, zeros = self.weight, private("_efficientzerotensor")
        if self.attribute != "main_grad" or not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        if zeros is None:
            return torch.zeros_like(weight)
        return zeros[0](weight.shape, dtype=weight.dtype, device=weight.device)


class Gradients:
    """Buffers of the gradients of hidden states, weight and bias; None for a gradient that the call does not make. The
    upstream gradient multiplies them at the end of the call (``finish``).

    ``weight`` and ``bias`` are the rows that stand for an id. ``padding``: number of further rows in their buffers.
    """

    def __init__(
        self,
        hidden: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        gradient_buffer: GradientBuffer | None = None,  # the caller's, whose ``buffer`` is ``weight``; None: new memory
        padding: int = 0,
        over_ranks: SummedRows | ScatteredRows | None = None,  # messages that add up ``hidden`` over ranks
    ):
        self.hidden, self.weight, self.bias, self.gradient_buffer = hidden, weight, bias, gradient_buffer
        self.buffers = weight, bias
        # True: the first product is stored as the weight's gradient; False: it is added
        self.fresh = gradient_buffer is None or gradient_buffer.fresh
        self.over_ranks = over_ranks
        if padding:
            self.weight, self.bias = (None if tensor is None else tensor[:-padding] for tensor in self.buffers)
            for padded_buffer in (None if gradient_buffer is not None else weight, bias):
                if padded_buffer is not None:
                    padded_buffer[-padding:].zero_()

    def hidden_rows(self, tokens: slice) -> Tensor:
        """Returns the memory [rows, hidden] for the gradient of the hidden states ``tokens``."""
        assert self.hidden is not None
        if self.over_ranks is not None:
            return self.over_ranks.buffer_of(self.hidden, tokens)
        return self.hidden if tokens.stop - tokens.start == self.hidden.shape[0] else self.hidden[tokens]

    def sum_over_ranks(self, tokens: slice) -> None:
        """Starts the sum over ranks of the gradient of the hidden states ``tokens``, if ranks share the gradient. This
        rank's share must be complete."""
        if self.over_ranks is not None and self.hidden is not None:
            self.over_ranks.reduce(self.hidden, tokens)

    def drop_weight(self) -> None:
        """Drops the reference to the weight's gradient, so that ``finish`` neither scales nor returns it."""
        self.weight, self.buffers = None, (None, self.buffers[1])

    def finish(
        self, backend: Any, sizes: Sizes, one_or_nan: Tensor, ratio: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients times ``one_or_nan`` [] and ``ratio`` [] (None: 1), in the operands' dtypes. Frees each
        buffer before it makes the next gradient. ``backend``: a ``Backend``, which multiplies.

        The caller's buffer is multiplied by ``one_or_nan`` only, since it holds more than this call's gradient.
        """
        buffer = self.gradient_buffer
        if buffer is not None and self.weight is not None:
            backend.scale_([self.weight], one_or_nan)
            self.drop_weight()
        factors = (one_or_nan,) if ratio is None else (ratio, one_or_nan)
        gradients, dtypes = [self.hidden, *self.buffers], (sizes.hidden_dtype, sizes.weight_dtype, sizes.bias_dtype)
        self.hidden = self.weight = self.bias = None
        self.buffers = None, None
        in_place = [g for g, dtype in zip(gradients, dtypes, strict=True) if g is not None and g.dtype == dtype]
        backend.scale_(in_place, *factors)
        for i, dtype in enumerate(dtypes):
            gradient = gradients[i]
            if gradient is not None and dtype not in (None, gradient.dtype):
                gradients[i] = backend.scale(gradient, dtype, *factors)
        hidden, weight, bias = gradients
        return hidden, weight if buffer is None else buffer.result(), bias

    def finish_rows(self, backend: Any, factors: Tensor, sizes: Sizes) -> tuple[Tensor, None, None]:
        """Returns the gradient of hidden states in their dtype, with each row multiplied by its element of ``factors``
        [rows] (0 for a factor of 0); and None for weight and bias."""
        gradient, self.hidden = self.hidden, None
        assert gradient is not None
        is_in_place = gradient.dtype == sizes.hidden_dtype
        out = gradient if is_in_place else torch.empty_like(gradient, dtype=sizes.hidden_dtype)
        backend.scale_rows(out, gradient, factors)
        return out, None, None


def gradient_buffer_of(
    accumulate_into: Tensor | str | GradientBuffer | None, weight: Tensor, operands: dict[str, Tensor | None]
) -> GradientBuffer | None:
    """Returns the caller's buffer for the weight's gradient; None without ``accumulate_into``, or if the call makes no
    gradient of the weight. Raises TypeError or ValueError for an unusable buffer.

    In evaluation, where the call makes no gradient, the attribute of the weight may be missing.
    """
    needs_gradient = torch.is_grad_enabled() and weight.requires_grad
    if accumulate_into is None or (isinstance(accumulate_into, str) and not needs_gradient):
        return None
    if isinstance(accumulate_into, GradientBuffer):
        return accumulate_into
    checks.refuse({
        "accumulate_into takes the gradient of weight, and weight has been computed from other tensors, which would "
        "get none; pass the parameter itself, or leave accumulate_into=None": needs_gradient and not weight.is_leaf,
        "weight has hooks (register_hook) that are to see its gradient, and accumulate_into adds that unseen; remove "
        "them, use register_post_accumulate_grad_hook, or leave accumulate_into=None":
            needs_gradient and getattr(weight, "_backward_hooks", None),
    })  # fmt: skip
    buffer: Any = accumulate_into
    if isinstance(accumulate_into, str):
        buffer, attribute = getattr(weight, accumulate_into, None), accumulate_into
        label, advice = f"weight.{attribute} (accumulate_into)", "; zero_grad(set_to_none=False) keeps it"
        if buffer is None:
            raise ValueError(
                f"accumulate_into={attribute!r} names weight.{attribute}, which is not there; make it before the call, "
                f"such as weight.{attribute} = torch.zeros_like(weight, dtype={sum_dtype(weight.dtype)})"
                + (advice if attribute == "grad" else "")
            )
    else:
        label, attribute = "accumulate_into", ""
        if needs_gradient:
            attribute = next((a for a in ("grad", "main_grad") if getattr(weight, a, None) is buffer), "")
    check_buffer(label, buffer, weight, operands)
    if not needs_gradient:
        return None
    if attribute == "main_grad" and getattr(weight, "overwrite_main_grad", False):
        raise ValueError(
            "weight.overwrite_main_grad is set: its main_grad is to be overwritten, and accumulate_into adds; clear "
            "the flag and zero main_grad, or leave accumulate_into=None"
        )
    gradient_buffer = GradientBuffer(weight, buffer, attribute or None)
    gradient_buffer.check_complete(label)
    return gradient_buffer


def check_accumulate_into(accumulate_into: Tensor | str | GradientBuffer | None) -> None:
    """Raises TypeError if the argument is no buffer, no name of an attribute, and not None."""
    if accumulate_into is not None and not isinstance(accumulate_into, Tensor | str | GradientBuffer):
        raise TypeError(
            "accumulate_into must be a tensor, the name of an attribute of weight or None, got "
            f"{type(accumulate_into).__name__}"
        )


def sum_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that a buffer must have: float32, or float64 for a float64 weight. The error of sums in 16 bits
    would grow with every micro-batch."""
    return torch.promote_types(weight_dtype, torch.float32)


def check_buffer(label: str, buffer: Tensor, weight: Tensor, operands: dict[str, Tensor | None]) -> None:
    """Raises TypeError or ValueError for a buffer to which the weight's gradient cannot be added, such as a buffer of
    another shape, or one in the memory of an operand. ``label``: the buffer's name in messages."""
    checks.check_tensor(label, buffer, optional=False)
    checks.check_shape(label, buffer, buffer.shape == weight.shape, f"{tuple(weight.shape)}, that of weight", "")
    if buffer.dtype != sum_dtype(weight.dtype):
        raise TypeError(
            f"{label} must be {name_of(sum_dtype(weight.dtype))} for a weight of {name_of(weight.dtype)}, got "
            f"{name_of(buffer.dtype)}; sums in 16 bits lose what is added late: keep the gradient in a buffer of its "
            "own, such as weight.main_grad"
        )
    checks.check_device(label, buffer, weight.device, "weight")
    checks.refuse({
        f"{label} must be contiguous, got strides {buffer.stride()}; make it by torch.zeros":
            not buffer.is_contiguous(),
        f"{label} is lazily negated, and what is added to its memory would be too; make it by torch.zeros":
            buffer.is_neg(),
        f"{label} must not require a gradient, got requires_grad=True; pass {label}.detach()": buffer.requires_grad,
    })  # fmt: skip
    start, end = bytes_of(buffer)
    for argument, tensor in {**operands, "weight": weight}.items():
        if tensor is None or not tensor.numel():
            continue
        operand_start, operand_end = bytes_of(tensor)
        if start < operand_end and operand_start < end:
            raise ValueError(f"{label} shares memory with {argument}; pass a buffer of its own")


def bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses of a tensor's first byte and of the byte after its last."""
    last_offset = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last_offset + 1) * tensor.element_size()
