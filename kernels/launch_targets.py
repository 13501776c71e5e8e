"""Launching the kernels of targets, on torch tensors: who predicts what, and targets' rows of the weight's gradient."""

import torch

from .target_terms import add_target_rows_kernel, join_pieces_kernel
from .targets import read_targets_kernel, sort_targets_kernel
from .tiles import cdiv, power_of_2

PIECE = 32  # tokens of equal or neighbouring targets that are summed at a time
MOST_COUNTED = 16384  # tokens that are sorted by comparing each with each: one launch of some microseconds, not ten


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
    block = 32
    sort_targets_kernel[(cdiv(tokens, block),)](
        sorted_target, order, target, tokens, BLOCK=block, AT_ONCE=512, num_warps=8
    )
    return sorted_target, order


def add_target_rows(
    dweight: torch.Tensor,  # [vocab, hidden] contiguous
    hidden: torch.Tensor,  # [tokens, hidden], columns contiguous
    target: torch.Tensor,  # [tokens] int64
    target_factor: torch.Tensor,  # [tokens] fp32
    rows: torch.Tensor | None = None,  # [tokens] int64, rows of ``hidden``; None: in its order
) -> None:
    """``dweight[target[i]] += target_factor[i] * hidden[rows[i]]``, the same bits whenever it is done."""
    tokens, columns = hidden.shape
    sorted_target, order = sort_targets(target)
    if rows is not None:
        rows = rows[order]
    pieces = cdiv(tokens, PIECE)
    piece_sum = torch.empty(2 * pieces, columns, dtype=torch.float32, device=hidden.device)
    block = 128 if columns >= 128 else max(16, power_of_2(columns))
    grid = pieces, cdiv(columns, block)
    add_target_rows_kernel[grid](
        dweight, piece_sum, hidden, order, rows, sorted_target, target_factor,
        tokens, columns, hidden.stride(0), PIECE=PIECE, BLOCK=block, num_warps=4,
    )  # fmt: skip
    join_pieces_kernel[grid](
        dweight, piece_sum, sorted_target, tokens, columns, pieces, PIECE=PIECE, AT_ONCE=16, BLOCK=block, num_warps=4
    )
