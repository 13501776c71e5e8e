"""Rows of the weight's gradient [vocab, hidden] where few logits have one.

    dweight[c] (+)= sum_{e: column[e] = c} factor[e] hidden[row[e]]

Sums over the entries [n] of each column are in fp32.
"""

import triton
import triton.language as tl

from ..common.kernel import kernel


@kernel
def column_begins_kernel(
    # outputs
    begin_ptr,  # [vocab + 1] int32: how many entries are of smaller columns
    # inputs
    sorted_ptr,  # [entries] int32
    # sizes
    entries,
    vocab,
    steps,  # to find a place by halving
    BLOCK: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = tl.zeros((BLOCK,), dtype=tl.int32), tl.zeros((BLOCK,), dtype=tl.int32) + entries
    for _ in range(steps):
        middle = low + (high - low) // 2
        smaller = tl.load(sorted_ptr + middle, mask=low < high, other=0) < column
        low, high = tl.where((low < high) & smaller, middle + 1, low), tl.where(smaller, high, middle)
    tl.store(begin_ptr + column, low, mask=column <= vocab)


@triton.jit
def sum_of_rows(
    hidden_ptr, order_ptr, row_ptr, factor_ptr, begin, end, cols, mask, hidden_stride, AT_ONCE: tl.constexpr
):
    """Sum of ``factor[i] * hidden[row[i]]`` for the sorted entries from ``begin`` to ``end``."""
    total = tl.zeros(cols.shape, dtype=tl.float32)
    for first in range(begin, end, AT_ONCE):
        at = first + tl.arange(0, AT_ONCE)
        entry = tl.load(order_ptr + at, mask=at < end, other=0)
        row = tl.load(row_ptr + entry, mask=at < end, other=0)
        factor = tl.load(factor_ptr + entry, mask=at < end, other=0.0)
        of_rows = hidden_ptr + row[:, None] * hidden_stride + cols[None, :]
        h = tl.load(of_rows, mask=(at < end)[:, None] & mask[None, :], other=0.0).to(tl.float32)
        total += tl.sum(h * factor[:, None], 0)
    return total


@kernel
def column_pieces_kernel(
    # outputs
    piece_sum_ptr,  # [pieces, hidden] fp32, of a column that began before the piece
    # inputs
    hidden_ptr,  # [rows, hidden]
    order_ptr,  # [entries] int64: entries sorted by column
    row_ptr,  # [entries] int64, of hidden
    factor_ptr,  # [entries] fp32
    begin_ptr,  # [vocab + 1] int32: where a column's entries begin
    sorted_ptr,  # [entries] int32: columns, -1 first
    # sizes
    hidden,
    hidden_stride,
    PIECE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """So that no program walks over all entries of a column that stands in every set."""
    piece = tl.program_id(0) + 1
    begin = piece * PIECE
    column = tl.load(sorted_ptr + begin)
    before = tl.load(sorted_ptr + begin - 1)
    end = begin
    if (column >= 0) & (before == column):
        end = tl.minimum(tl.load(begin_ptr + column + 1), begin + PIECE)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < tl.where(end > begin, hidden, 0)
    total = sum_of_rows(hidden_ptr, order_ptr, row_ptr, factor_ptr, begin, end, cols, mask, hidden_stride, AT_ONCE)
    tl.store(piece_sum_ptr + piece.to(tl.int64) * hidden + cols, total, mask=mask)


@kernel
def column_rows_kernel(
    # outputs
    dweight_ptr,  # [vocab, hidden]
    # inputs
    piece_sum_ptr,  # [pieces, hidden] fp32
    hidden_ptr,  # [rows, hidden]
    order_ptr,  # [entries] int64: entries sorted by column
    row_ptr,  # [entries] int64, of hidden
    factor_ptr,  # [entries] fp32
    begin_ptr,  # [vocab + 1] int32: where a column's entries begin
    # sizes
    hidden,
    hidden_stride,
    ADD: tl.constexpr,  # and leave rows without entries; otherwise they are 0
    PIECE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``dweight[column] (+)= sum(factor * hidden[row])``, the same bits whenever it is done."""
    column = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(begin_ptr + column), tl.load(begin_ptr + column + 1)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < hidden
    if ADD:
        mask = cols < tl.where(end > begin, hidden, 0)
    following = begin // PIECE + 1
    mine = tl.minimum(end, following * PIECE)
    total = sum_of_rows(hidden_ptr, order_ptr, row_ptr, factor_ptr, begin, mine, cols, mask, hidden_stride, AT_ONCE)
    wide = tl.zeros((), dtype=tl.int64) + hidden
    for piece in range(following, tl.cdiv(end, PIECE)):
        total += tl.load(piece_sum_ptr + piece * wide + cols, mask=mask, other=0.0)
    out = dweight_ptr + column * hidden + cols
    if ADD:
        total += tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, total.to(dweight_ptr.dtype.element_ty), mask=mask)
