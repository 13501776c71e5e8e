"""From a call's arguments to rows: targets paired with the hidden states that predict them, and the plan's sizes."""

from typing import NamedTuple

import torch
from torch import Tensor

from .backends import Backend, Layout
from .memory import Sizes
from .stats import Head


class Tensors(NamedTuple):
    """The tensor arguments of a call, as they were given."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weights: Tensor | None
    token_weights: Tensor | None


def shift_left(values: Tensor, shift: int, fill: int) -> Tensor:
    """``values[..., t + shift]`` at t, ``fill`` where there is none."""
    if shift == 0:
        return values
    shifted = torch.full_like(values, fill)
    shifted[..., : max(0, values.shape[-1] - shift)] = values[..., shift:]
    return shifted


def shift_right(values: Tensor, shift: int) -> Tensor:
    """``values[..., t - shift]`` at t, 0 where there is none."""
    if shift == 0:
        return values
    return torch.nn.functional.pad(values[..., : max(0, values.shape[-1] - shift)], (min(shift, values.shape[-1]), 0))


def pair_targets(target: Tensor, shift: int, ignore_index: int, vocab: int) -> tuple[Tensor, Tensor]:
    """The target of each row of hidden states, -1 where the row does not count, and whether one is out of range.

    On the CPU an IndexError says which; elsewhere the answer stays on the device, as a 0-d bool.
    """
    paired = shift_left(target, shift, ignore_index).reshape(-1)
    ignored = paired == ignore_index
    inside = (paired >= 0) & (paired < vocab)
    bad = ~(ignored | inside)
    if bad.device.type == "cpu" and bad.any():
        first = int(bad.nonzero()[0])
        raise IndexError(
            f"target must be in [0, {vocab}) (the rows of weight) or ignore_index ({ignore_index}), got "
            f"{int(paired[first])} for row {first} of the flattened hidden states; mask it with ignore_index"
        )
    return torch.where(ignored | ~inside, -1, paired), bad.any()


def in_backward() -> bool:
    """Whether autograd is running a backward: then a forward is a checkpointed region being computed again.

    The non-reentrant kind throws the new graph away (its gradients wait in the old one), so gradients are left to
    a backward that may never come.
    """
    return torch._C._current_graph_task_id() != -1


def sizes_of(
    tensors: Tensors, rows: Tensor, dtype: torch.dtype, backend: Backend, head: Head, weighted_sum: bool, late: bool
) -> Sizes:
    """What the plan is made from."""
    hidden, weight, bias = tensors.hidden, tensors.weight, tensors.bias
    grad = torch.is_grad_enabled()
    # a view shares memory with what it views, a copy does not
    copied = rows.numel() > 0 and rows.data_ptr() != hidden.data_ptr()
    bias_grad = grad and bias is not None and bias.requires_grad
    layout = Layout(
        hidden.device, dtype, weight.shape[1],
        plain_weight=weight.is_contiguous() and weight.data_ptr() % 16 == 0,
        plain_rows=rows.stride(1) == 1 or rows.shape[1] == 1,
        smoothed=weighted_sum, capped=head.softcap is not None, bias_grad=bias_grad,
    )  # fmt: skip
    return Sizes(
        rows.shape[0], rows.shape[1], weight.shape[0], dtype,
        hidden_dtype=hidden.dtype, weight_dtype=weight.dtype,
        hidden_grad=grad and hidden.requires_grad,
        weight_grad=grad and weight.requires_grad,
        bias_grad=bias_grad, bias_dtype=None if bias is None else bias.dtype,
        late_upstream=late, weighted_sum=weighted_sum,
        store=backend.store(layout), copied=copied, **backend.traits(hidden.device),
    )  # fmt: skip
