"""Moving values along with ``shift``, and knowing when a forward runs inside a backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .private import private, under_hooks


def shift_left(values: Tensor, shift: int, fill: int, dim: int = -1) -> Tensor:
    """``values[..., t + shift]`` at t along ``dim``, ``fill`` where there is none."""
    if shift == 0:
        return values
    shifted = torch.full_like(values, fill)
    kept = max(0, values.shape[dim] - shift)
    shifted.narrow(dim, 0, kept).copy_(values.narrow(dim, values.shape[dim] - kept, kept))
    return shifted


def shift_right(values: Tensor, shift: int, dim: int = -1) -> Tensor:
    """``values[..., t - shift]`` at t along ``dim``, 0 where there is none; differentiable."""
    if shift == 0:
        return values
    length = values.shape[dim]
    kept = values.narrow(dim, 0, max(0, length - shift))
    shape = list(values.shape)
    shape[dim] = min(shift, length)
    return torch.cat([values.new_zeros(shape), kept], dim)


def at_targets(values: Tensor, leading: Sequence[int], shift: int) -> Tensor:
    """Values [rows, ...] of rows of hidden states at the places of the targets that those predict [*leading, ...]."""
    if len(leading) == 1 and not shift:
        return values
    return shift_right(values.reshape((*leading, *values.shape[1:])), shift, len(leading) - 1)


def all_at_targets(values: Sequence[Tensor], leading: Sequence[int], shift: int) -> tuple[Tensor, ...]:
    return tuple([at_targets(value, leading, shift) for value in values])


def in_backward() -> bool:
    """Whether autograd is running a backward: then a forward is a checkpointed region being computed again.

    The non-reentrant kind throws the new graph away (its gradients wait in the old one), so gradients are left to
    a backward that may never come. Where torch does not tell, so are those of every call under hooks such as a
    checkpoint's, at one matmul more.
    """
    task = private("_C._current_graph_task_id")
    return under_hooks() if task is None else task[0]() != -1
