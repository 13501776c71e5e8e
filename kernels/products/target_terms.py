"""The target's terms of the weight's gradient [vocab, hidden], added to the product of exponentials.

    dweight[target[i]] += target_factor[i] hidden[i]

Exact in fp32, for tokens [tokens] sorted by target.
"""

import triton.language as tl

from ..common import tiles
from ..common.kernel import kernel

PIECE = tl.constexpr(tiles.PIECE)


@kernel
def sort_targets_kernel(
    # outputs
    sorted_ptr,  # [tokens] int32
    order_ptr,  # [tokens] int64: where each stands in target
    # inputs
    target_ptr,  # [tokens] int64
    # sizes
    tokens,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """A stable sort in one launch: a target's place is how many come before it."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row, mask=row < tokens, other=0).to(tl.int32)
    before = tl.zeros((BLOCK, AT_ONCE), dtype=tl.int32)
    for start in range(0, tokens, AT_ONCE):
        other_row = start + tl.arange(0, AT_ONCE)
        other = tl.load(target_ptr + other_row, mask=other_row < tokens, other=2147483647).to(tl.int32)
        # of equals the first in place
        bound = target[:, None] + (other_row[None, :] < row[:, None]).to(tl.int32)
        before += (other[None, :] < bound).to(tl.int32)
    place = tl.sum(before, 1)
    tl.store(sorted_ptr + place, target, mask=row < tokens)
    tl.store(order_ptr + place, row.to(tl.int64), mask=row < tokens)


@kernel
def add_target_rows_kernel(
    # outputs
    dweight_ptr,  # [vocab, hidden], added to
    piece_sum_ptr,  # [2 * pieces, hidden] fp32: sums of a target that other pieces hold too, head and tail
    # inputs
    hidden_ptr,  # [tokens, hidden]
    order_ptr,  # [tokens] int64, tokens sorted by target
    row_ptr,  # [tokens] int64: where a token stands in hidden, in the same order; None where tokens stand in theirs
    sorted_target_ptr,  # [tokens] int32, -1 first
    target_factor_ptr,  # [tokens] fp32
    # sizes
    tokens,
    hidden,
    hidden_stride,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,  # of fp32 operands
):
    """``dweight[target[i]] += target_factor[i] * hidden[i]``, tokens in sorted pieces of a fixed size.

    A target whose tokens all lie in one piece is finished here. One that spans pieces, at most one at either end of
    each, leaves its sums to ``join_pieces_kernel``: whatever the targets, the order of every sum is fixed, and no
    program walks over more than a piece.
    """
    piece = tl.program_id(0)
    at = piece * PIECE + tl.arange(0, PIECE)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_cols = cols < hidden
    target = tl.load(sorted_target_ptr + at, mask=at < tokens, other=-1)
    before = tl.load(sorted_target_ptr + at - 1, mask=(at > 0) & (at < tokens), other=-2)
    end = (piece + 1) * PIECE
    after = tl.load(sorted_target_ptr + end, mask=end < tokens, other=-2)
    token = tl.load(order_ptr + at, mask=at < tokens, other=0)
    row = token
    if row_ptr is not None:
        row = tl.load(row_ptr + at, mask=at < tokens, other=0)
    counts = target >= 0
    in_piece = tl.arange(0, PIECE)
    # a row for each target of the piece, where it stands first, gathers all of them
    first = counts & ((in_piece == 0) | (before != target))
    from_before = (in_piece == 0) & (before == target)
    complete = first & (from_before == 0) & (target != after)
    # all that is read stands before the sum, so that it is waited for once
    factor = tl.load(target_factor_ptr + token, mask=counts, other=0.0)
    h = tl.load(
        hidden_ptr + row[:, None] * hidden_stride + cols[None, :], mask=counts[:, None] & in_cols[None, :], other=0.0
    ).to(tl.float32)
    out = dweight_ptr + target.to(tl.int64)[:, None] * hidden + cols[None, :]
    mask = complete[:, None] & in_cols[None, :]
    sum_so_far = tl.load(out, mask=mask, other=0.0)

    gather = tl.where(first[:, None] & (target[:, None] == target[None, :]), 1.0, 0.0)
    total = tl.dot(gather, factor[:, None] * h, input_precision=PRECISION)  # ones are exact, and this splits the rest
    tl.store(out, (sum_so_far.to(tl.float32) + total).to(dweight_ptr.dtype.element_ty), mask=mask)
    slot = 2 * piece + tl.where(from_before, 0, 1)
    partial = first & (complete == 0)
    tl.store(
        piece_sum_ptr + slot.to(tl.int64)[:, None] * hidden + cols[None, :], total,
        mask=partial[:, None] & in_cols[None, :],
    )  # fmt: skip


@kernel
def join_pieces_kernel(
    # outputs
    dweight_ptr,  # [vocab, hidden], added to
    # inputs
    piece_sum_ptr,  # [2 * pieces, hidden] fp32
    sorted_target_ptr,  # [tokens] int32
    # sizes
    tokens,
    hidden,
    pieces,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up the targets that span pieces, each by the program of the piece in which it begins."""
    piece = tl.program_id(0)
    end = (piece + 1) * PIECE
    target = tl.load(sorted_target_ptr + end - 1, mask=end < tokens, other=-1)
    after = tl.load(sorted_target_ptr + end, mask=end < tokens, other=-2)
    start = tl.load(sorted_target_ptr + piece * PIECE)
    before = tl.load(sorted_target_ptr + piece * PIECE - 1, mask=piece > 0, other=-2)
    begins_here = (start != target) | (before != target)
    if (target >= 0) & (after == target) & begins_here:
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        in_cols = cols < hidden
        total = tl.load(piece_sum_ptr + (2 * piece + 1).to(tl.int64) * hidden + cols, mask=in_cols, other=0.0)
        following = piece + 1
        more = 1
        while more > 0:
            at = following + tl.arange(0, AT_ONCE)
            here = tl.load(sorted_target_ptr + at * PIECE, mask=at < pieces, other=-2) == target
            heads = piece_sum_ptr + (2 * at).to(tl.int64)[:, None] * hidden + cols[None, :]
            total += tl.sum(tl.load(heads, mask=here[:, None] & in_cols[None, :], other=0.0), 0)
            more = tl.min(here.to(tl.int32), 0)
            following += AT_ONCE
        out = dweight_ptr + target.to(tl.int64) * hidden + cols
        sum_so_far = tl.load(out, mask=in_cols, other=0.0).to(tl.float32)
        tl.store(out, (sum_so_far + total).to(dweight_ptr.dtype.element_ty), mask=in_cols)
