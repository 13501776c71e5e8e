"""The weight's gradient [vocab, hidden].

The product of logits' gradients, or of exponentials that stand for them, with hidden states, ``dweight_kernel``: a
persistent GEMM, as ``dhidden.py`` has one; rows behind those that count cost nothing.

    dweight (+)= grad [rows, vocab] .T @ hidden [rows, hidden]

The target's terms added to the product of exponentials, exact in fp32, for tokens [tokens] sorted by target,
``add_target_rows_kernel``:

    dweight[target[i]] += target_factor[i] hidden[i]

Rows where few logits have a gradient, sums in fp32 over the entries [n] of each column, ``column_rows_kernel``:

    dweight[c] (+)= sum_{e: column[e] = c} factor[e] hidden[row[e]]
"""

import triton
import triton.language as tl

from ..common import tiles
from ..common.blocks import column_halves, counted_rows, dot, load_tile, store_tile, tile_place
from ..common.launcher import kernel

PIECE = tl.constexpr(tiles.PIECE)


@triton.jit
def add_or_store(matrix, row, column, value, ADD: tl.constexpr, BY_MEMORY: tl.constexpr):
    """Adds or stores a tile. Each element is added to once per launch, so that atomic addition leaves the same bits."""
    if ADD and BY_MEMORY:
        matrix[0].atomic_add([row, column], value)
    else:
        if ADD:
            value += load_tile(matrix, row, column, value.shape[0], value.shape[1], False).to(tl.float32)
        store_tile(matrix, row, column, value)


@kernel
def dweight_kernel(
    # outputs
    dweight_desc,  # [vocab, hidden], block [BLOCK_M, BLOCK_N / 2]; added to, or stored; None where it is not described
    dweight_ptr,
    # inputs
    grad_desc,  # [rows, vocab] 16 bit, block [BLOCK_K, BLOCK_M]
    grad_ptr,
    hidden_desc,  # [rows, hidden], block [BLOCK_K, BLOCK_N], 0 behind the rows that count
    hidden_ptr,
    count_ptr,  # [] int64: how many rows of the call count, or None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    vocab,
    hidden,
    grad_stride,  # from row to row
    ADD: tl.constexpr,
    BY_MEMORY: tl.constexpr,  # where it is described
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """``dweight (+)= grad.T @ hidden``"""
    counted = counted_rows(count_ptr, first_row, rows)
    tiles_m = tl.cdiv(vocab, BLOCK_M)
    tiles_n = tl.cdiv(hidden, BLOCK_N)
    tiles = tiles_m * tiles_n
    if ADD:
        tiles = tl.where(counted > 0, tiles, 0)  # nothing to add
    dw_matrix = dweight_desc, dweight_ptr, hidden, vocab, hidden
    g_matrix = grad_desc, grad_ptr, grad_stride, rows, vocab
    h_matrix = hidden_desc, hidden_ptr, hidden, rows, hidden
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=grad_desc is not None):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row_start, column_start = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, counted, BLOCK_K):
            g = load_tile(g_matrix, k, row_start, BLOCK_K, BLOCK_M, False)
            h = load_tile(h_matrix, k, column_start, BLOCK_K, BLOCK_N, False)
            acc = dot(g.T, h, acc)
        left, right = column_halves(acc, BLOCK_M, BLOCK_N)
        add_or_store(dw_matrix, row_start, column_start, left, ADD, BY_MEMORY)
        add_or_store(dw_matrix, row_start, column_start + BLOCK_N // 2, right, ADD, BY_MEMORY)


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
    """Sums of pieces of columns with many entries: no program walks over a column that stands in every set."""
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
