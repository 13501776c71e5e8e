"""Labels where ranks hold slices of sequences: the last tokens of a slice predict what the next slice begins with."""

from typing import Any

import torch
from torch import Tensor, distributed

from ..core.collectives import all_gather
from ..core.groups import process_group
from ..core.options import choice

LAYOUTS = ("contiguous", "zigzag")


def shift_targets(
    target: Tensor,  # [...] int64, this rank's slice
    group: Any = None,
    shift: int = 1,
    ignore_index: int = -100,
    dim: int = -1,
    layout: str = "contiguous",
) -> Tensor:
    """``target[..., t + shift]`` at t, across the slices of sequences that the ranks of ``group`` hold.

    What ``shift=`` of ``linear_cross_entropy`` does where a rank has the whole sequence; there pass ``shift=0`` with
    these. The first ``shift`` ids of every slice travel, in one message; the end of the whole sequence predicts nothing
    and gets ``ignore_index``.

    Args:
        target: token ids [...] int64 or int32; along ``dim`` this rank's part of each sequence.
        group: a process group, a one-dimensional DeviceMesh, or None for all processes; every rank of it calls.
        shift: how far ahead the predicted token stands, at least 1; every slice is at least so long.
        ignore_index: the target of tokens that predict nothing.
        dim: the dimension that sequences run along.
        layout: ``"contiguous"``: rank r holds slice r of as many as there are ranks, of any lengths. ``"zigzag"``, the
            balanced one of PyTorch's and Megatron's context parallelism: rank r of R holds slices r and 2R - 1 - r of
            2R equal ones, one after the other.

    Returns:
        A tensor of the shape and dtype of ``target``.

    Raises:
        TypeError, ValueError, RuntimeError: before any message, naming the argument.
    """
    if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target of shift_targets must be an int64 or int32 tensor, got {described(target)}")
    for name, value, least in (("shift", shift, 1), ("ignore_index", ignore_index, None), ("dim", dim, None)):
        if type(value) is not int or (least is not None and value < least):
            raise ValueError(f"{name} of shift_targets must be an int, shift at least 1, got {value!r}")
    if not -target.dim() <= dim < target.dim():
        raise ValueError(f"dim of shift_targets must be a dimension of target {tuple(target.shape)}, got {dim}")
    choice("shift_targets", "layout", layout, LAYOUTS)
    group = process_group(group, "shift_targets")
    ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
    held = 2 if layout == "zigzag" else 1
    length = target.shape[dim]
    if length % held or length // held < shift:
        raise ValueError(
            f"target of shift_targets has {length} ids along dimension {dim}; layout={layout!r} with shift={shift} "
            + (f"takes {held} equal slices of at least {shift}" if held > 1 else f"takes at least {shift}")
        )
    slices = target.chunk(held, dim)
    first = torch.stack([piece.narrow(dim, 0, shift) for piece in slices])
    every = first.new_empty(ranks, *first.shape)
    all_gather(every.view(-1), first.view(-1), group)
    places = (rank, 2 * ranks - 1 - rank)[:held]  # of this rank's slices in the sequence
    shifted = []
    for piece, place in zip(slices, places, strict=True):
        after = place + 1
        if after == held * ranks:
            following = torch.full_like(first[0], ignore_index)
        else:
            following = every[after, 0] if after < ranks else every[2 * ranks - 1 - after, 1]
        shifted += [piece.narrow(dim, shift, piece.shape[dim] - shift), following]
    return torch.cat(shifted, dim)


def described(value: Any) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
