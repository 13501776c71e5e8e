"""Launching the kernels of targets, on torch tensors: who predicts what, and targets' rows of the weight's gradient."""

import torch

from .target_terms import add_target_rows_kernel, join_pieces_kernel
from .targets import read_targets_kernel, sort_targets_kernel
from .tiles import PIECE, cdiv, piece_bytes, power_of_2

MOST_COUNTED = 8192  # tokens that are sorted by comparing each with each: one launch instead of ten


def read_targets(
    paired: torch.Tensor,  # [tokens] int64
    counted: torch.Tensor,  # [] fp32
    one_or_nan: torch.Tensor,  # [] fp32
    target: torch.Tensor,  # [...] int64, tokens in all
    mask: torch.Tensor | None,  # [...] bool
    length: int,  # of the last dimension
    shift: int,
    ignore_index: int,
    vocab: int,
) -> None:
    """Targets ``shift`` further along the last dimension, -1 where one does not count; how many do, and 1 or nan."""
    read_targets_kernel[(1,)](
        paired, counted, one_or_nan,
        target.contiguous(), None if mask is None else mask.contiguous().view(torch.uint8),
        len(paired), length, vocab, shift, ignore_index, BLOCK=4096, num_warps=16,
    )  # fmt: skip


def sort_targets(target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``target`` [tokens] int64 sorted, equal ones in their order, as int32; and where each stood, int64."""
    tokens = len(target)
    if tokens > MOST_COUNTED:
        # half as many passes as for int64
        return torch.sort(target.to(torch.int32), stable=True)
    sorted_target, order = torch.empty_like(target, dtype=torch.int32), torch.empty_like(target)
    block = 16
    sort_targets_kernel[(cdiv(tokens, block),)](
        sorted_target, order, target, tokens, BLOCK=block, AT_ONCE=256, num_warps=8
    )
    return sorted_target, order


def add_target_rows(
    dweight: torch.Tensor,  # [vocab, hidden] contiguous
    hidden: torch.Tensor,  # [tokens, hidden], columns contiguous
    target: torch.Tensor,  # [tokens] int64
    target_factor: torch.Tensor,  # [tokens] fp32
    rows: torch.Tensor | None = None,  # [tokens] int64, rows of ``hidden``; None: in its order
    scratch: torch.Tensor | None = None,  # contiguous, of any dtype and any size, whose contents nobody needs
) -> None:
    """``dweight[target[i]] += target_factor[i] * hidden[rows[i]]``, the same bits whenever it is done."""
    tokens, columns = hidden.shape
    sorted_target, order = sort_targets(target)
    if rows is not None:
        rows = rows[order]
    pieces = cdiv(tokens, PIECE)
    if scratch is not None and scratch.nbytes >= piece_bytes(tokens, columns):
        piece_sum = scratch.view(-1).view(torch.uint8)[: piece_bytes(tokens, columns)].view(torch.float32)
    else:
        piece_sum = torch.empty(2 * pieces, columns, dtype=torch.float32, device=hidden.device)
    block = 128 if columns >= 128 else max(16, power_of_2(columns))
    grid = pieces, cdiv(columns, block)
    add_target_rows_kernel[grid](
        dweight, piece_sum, hidden, order, rows, sorted_target, target_factor,
        tokens, columns, hidden.stride(0), PIECE=PIECE, BLOCK=block, num_warps=2,
    )  # fmt: skip
    wide = 4 * block  # nearly all programs have nothing to add
    join_pieces_kernel[(pieces, cdiv(columns, wide))](
        dweight, piece_sum, sorted_target, tokens, columns, pieces, PIECE=PIECE, AT_ONCE=16, BLOCK=wide, num_warps=4
    )
