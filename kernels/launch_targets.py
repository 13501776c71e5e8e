"""Launching the kernels of targets, on torch tensors: who predicts what, and targets' rows of the weight's gradient."""

import torch

from .target_terms import add_target_rows_kernel, join_pieces_kernel
from .targets import read_targets_kernel, sort_targets_kernel
from .tiles import FUSED, LEAST_SECTION, PIECE, cdiv, piece_bytes, power_of_2

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
        len(paired), length, vocab, shift, ignore_index, BLOCK=4096, num_warps=16, **FUSED,
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
        sorted_target, order, target, tokens, BLOCK=block, AT_ONCE=256, num_warps=8, **FUSED
    )
    return sorted_target, order


def add_target_rows(
    dweight: torch.Tensor,  # [vocab, hidden] contiguous
    hidden: torch.Tensor,  # [tokens, hidden], columns contiguous
    target: torch.Tensor,  # [tokens] int64
    target_factor: torch.Tensor,  # [tokens] fp32
    rows: torch.Tensor | None = None,  # [tokens] int64, rows of ``hidden``; None: in its order
    scratch: torch.Tensor | None = None,  # contiguous, of any dtype, whose contents nobody needs
) -> None:
    """``dweight[target[i]] += target_factor[i] * hidden[rows[i]]``, the same bits whenever it is done.

    Sorted tokens are dealt with in as few sections as the scratch has room for their sums.
    """
    tokens, columns = hidden.shape
    sorted_target, order = sort_targets(target)
    if rows is not None:
        rows = rows[order]
    room = tokens if scratch is None else scratch.nbytes // piece_bytes(1, columns) * PIECE
    if scratch is None or room < min(tokens, LEAST_SECTION):
        room = min(tokens, max(room, LEAST_SECTION))
        piece_sum = torch.empty(piece_bytes(room, columns) // 4, dtype=torch.float32, device=hidden.device)
    else:
        piece_sum = scratch.view(-1).view(torch.uint8)[: piece_bytes(min(room, tokens), columns)].view(torch.float32)
    block = 128 if columns >= 128 else max(16, power_of_2(columns))
    wide = 4 * block  # nearly all programs of the second have nothing to add
    for first in range(0, tokens, max(room, 1)):
        at = slice(first, min(first + room, tokens))
        count, targets, pieces = at.stop - first, sorted_target[at], cdiv(at.stop - first, PIECE)
        add_target_rows_kernel[pieces, cdiv(columns, block)](
            dweight, piece_sum, hidden, order[at], None if rows is None else rows[at], targets, target_factor,
            count, columns, hidden.stride(0), PIECE=PIECE, BLOCK=block, num_warps=2, **FUSED,
        )  # fmt: skip
        join_pieces_kernel[pieces, cdiv(columns, wide)](
            dweight, piece_sum, targets, count, columns, pieces, PIECE=PIECE, AT_ONCE=16, BLOCK=wide,
            num_warps=4, **FUSED,
        )  # fmt: skip
