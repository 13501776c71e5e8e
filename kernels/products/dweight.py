"""The weight's gradient [vocab, hidden].

``dweight_kernel`` is the product of logits' gradients, or of exponentials in their place, with hidden states: a
persistent GEMM as in ``dhidden.py``, in which rows after those that count take no time.

    dweight (+)= grad [rows, vocab] .T @ hidden [rows, hidden]

``add_rows_kernel`` adds terms of single logits: for n entries, sorted by the row ``place`` of the output, it adds up
each place's entries in fp32. It adds the targets' terms that exponentials lack; and for softmaxes over sets of columns,
all of dweight and (with ``rows`` the weight's) of dhidden.

    out[p] += sum_{e: place[e] = p} factor[e] rows[row[e]] + ratio[e] (s - bf16(s)),  s = softmax_factor[e] rows[row[e]]

For rows of frequent ids, which are summed in fp32, ``pick_columns_kernel`` copies their columns of logits' gradients,
and ``put_rows_kernel`` overwrites their rounded rows by the sums.
"""

import triton
import triton.language as tl

from ..common.blocks import column_halves, counted_rows, dot, load_tile, store_tile, tile_place
from ..common.launcher import kernel


@triton.jit
def add_or_store(matrix, row, column, value, ADD: tl.constexpr, BY_MEMORY: tl.constexpr):
    """Adds (ADD) or stores a tile. BY_MEMORY adds atomically; a launch adds to each element once, so bits are fixed."""
    if ADD and BY_MEMORY:
        matrix[0].atomic_add([row, column], value)
    else:
        if ADD:
            value += load_tile(matrix, row, column, value.shape[0], value.shape[1], False).to(tl.float32)
        store_tile(matrix, row, column, value)


@kernel
def dweight_kernel(
    # outputs
    dweight_desc,  # [vocab, hidden], block [BLOCK_M, BLOCK_N / 2], added to or stored; None where not described
    dweight_ptr,
    # inputs
    grad_desc,  # [rows, vocab] 16 bit, block [BLOCK_K, BLOCK_M]
    grad_ptr,
    hidden_desc,  # [rows, hidden], block [BLOCK_K, BLOCK_N], 0 behind the rows that count
    hidden_ptr,
    scale_ptr,  # [] fp32 of e4m3 operands, which lie [vocab, rows] and [hidden, rows]; None for 16-bit ones
    sum_ptr,  # [vocab] fp32, with the scale
    mean_ptr,  # [hidden] fp32: what rows of hidden states lack, times ``sum`` in the product
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    vocab,
    hidden,
    grad_stride,  # from row to row
    ADD: tl.constexpr,
    PROMOTED: tl.constexpr,  # rows whose products tensor cores add up before they are added in fp32; None: all
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
    if scale_ptr is not None:
        g_matrix = grad_desc, grad_ptr, grad_stride, vocab, rows
        h_matrix = hidden_desc, hidden_ptr, grad_stride, hidden, rows
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=grad_desc is not None):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row_start, column_start = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if PROMOTED is not None:
            total = acc
        for k in range(0, counted, BLOCK_K):
            if scale_ptr is None:
                g = load_tile(g_matrix, k, row_start, BLOCK_K, BLOCK_M, False)
                h = load_tile(h_matrix, k, column_start, BLOCK_K, BLOCK_N, False)
                acc = dot(g.T, h, acc)
            else:
                g = load_tile(g_matrix, row_start, k, BLOCK_M, BLOCK_K, False)
                h = load_tile(h_matrix, column_start, k, BLOCK_N, BLOCK_K, False)
                acc = dot(g, h.T, acc)
            if PROMOTED is not None:  # noqa: SIM102  (what follows is compiled only where it is there)
                if (k + BLOCK_K) % PROMOTED == 0:
                    total += acc
                    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if PROMOTED is not None:
            acc += total
        if scale_ptr is not None:
            offs_row, offs_col = row_start + tl.arange(0, BLOCK_M), column_start + tl.arange(0, BLOCK_N)
            sums = tl.load(sum_ptr + offs_row, mask=offs_row < vocab, other=0.0)
            mean = tl.load(mean_ptr + offs_col, mask=offs_col < hidden, other=0.0)
            acc = acc * tl.load(scale_ptr) + sums[:, None] * mean[None, :]
        left, right = column_halves(acc, BLOCK_M, BLOCK_N)
        add_or_store(dw_matrix, row_start, column_start, left, ADD, BY_MEMORY)
        add_or_store(dw_matrix, row_start, column_start + BLOCK_N // 2, right, ADD, BY_MEMORY)


@kernel
def sort_columns_kernel(
    # outputs
    sorted_ptr,  # [entries] int32
    order_ptr,  # [entries] int64: where each stands in column
    occurrences_ptr,  # [entries] int32: how many are equal to it, as they stand in column; or None
    # inputs
    column_ptr,  # [entries] int32 or int64
    # sizes
    entries,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """A stable sort in one launch: a column's place is the number of columns that are smaller, or equal and earlier."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(column_ptr + entry, mask=entry < entries, other=0).to(tl.int32)
    smaller = tl.zeros((BLOCK, AT_ONCE), dtype=tl.int32)
    equal = smaller
    for start in range(0, entries, AT_ONCE):
        compared_entry = start + tl.arange(0, AT_ONCE)
        compared = tl.load(column_ptr + compared_entry, mask=compared_entry < entries, other=2147483647).to(tl.int32)
        # of equal columns, the earlier one comes first
        bound = column[:, None] + (compared_entry[None, :] < entry[:, None]).to(tl.int32)
        smaller += (compared[None, :] < bound).to(tl.int32)
        if occurrences_ptr is not None:
            equal += (compared[None, :] == column[:, None]).to(tl.int32)
    place = tl.sum(smaller, 1)
    tl.store(sorted_ptr + place, column, mask=entry < entries)
    tl.store(order_ptr + place, entry.to(tl.int64), mask=entry < entries)
    if occurrences_ptr is not None:
        tl.store(occurrences_ptr + entry, tl.sum(equal, 1), mask=entry < entries)


@kernel
def pick_columns_kernel(
    # outputs
    out_ptr,  # [rows, picked] contiguous
    # inputs
    grad_ptr,  # [rows, vocab]
    sorted_ptr,  # [tokens] int32: columns in ascending order, -1 for none
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    picked,
    step,  # one of so many columns is picked
    stride,  # from row to row
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``out[:, i] = grad[:, sorted[step * i]]``; 0 where ``sorted`` is -1, and in rows after those that count."""
    offs_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.load(sorted_ptr + offs.to(tl.int64) * step, mask=offs < picked, other=-1)
    counts = offs_row < counted_rows(count_ptr, first_row, rows)
    grad_pointers = grad_ptr + offs_row[:, None] * stride + column[None, :]
    value = tl.load(grad_pointers, mask=counts[:, None] & (column >= 0)[None, :], other=0.0)
    mask = (offs_row < rows)[:, None] & (offs < picked)[None, :]
    tl.store(out_ptr + offs_row[:, None] * picked + offs[None, :], value, mask=mask)


@kernel
def put_rows_kernel(
    # outputs
    out_ptr,  # [places, width]
    # inputs
    rows_ptr,  # [picked, width] fp32
    sorted_ptr,  # [tokens] int32: places in ascending order, -1 for none
    # sizes
    step,  # one of so many places has a row
    width,
    BLOCK: tl.constexpr,
):
    """``out[sorted[step * i]] = rows[i]``; of equal places, the first i."""
    entry = tl.program_id(0).to(tl.int64)
    place = tl.load(sorted_ptr + entry * step)
    previous = tl.load(sorted_ptr + (entry - 1) * step, mask=entry > 0, other=-1)
    if (place >= 0) & (place != previous):
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + entry * width + cols, mask=cols < width)
        out_pointers = out_ptr + place.to(tl.int64) * width + cols
        tl.store(out_pointers, row.to(out_ptr.dtype.element_ty), mask=cols < width)


@triton.jit
def entry_and_row(entry_pointers, position, mask):
    """Returns the entries at positions ``position`` of the sorted order, and their rows; -1 where ``mask`` is false or
    an entry has no row."""
    row_ptr, order_ptr, ENTRIES_PER_ROW = entry_pointers
    entry = tl.where(mask, position, -1).to(tl.int64)
    if order_ptr is not None:
        entry = tl.load(order_ptr + position, mask=mask, other=-1)
    row = tl.where(mask, entry // ENTRIES_PER_ROW, -1)
    if row_ptr is not None:
        row = tl.load(row_ptr + row, mask=mask, other=-1).to(tl.int64)
    return entry, row


@triton.jit
def load_terms(rows_ptr, factors, entry, row, cols, width, stride):
    """The terms of entries [entries, columns]; 0 for a row of -1."""
    factor_ptr, softmax_factor_ptr, ratio_ptr = factors
    has_row = row >= 0
    row_pointers = rows_ptr + row[:, None] * stride + cols[None, :]
    values = tl.load(row_pointers, mask=has_row[:, None] & (cols < width)[None, :], other=0.0).to(tl.float32)
    terms = tl.load(factor_ptr + entry, mask=has_row, other=0.0)[:, None] * values
    if ratio_ptr is not None:
        softmax_factor = tl.load(softmax_factor_ptr + entry, mask=has_row, other=0.0)[:, None]
        multiplied = (softmax_factor * values.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
        lost = softmax_factor * values - multiplied
        terms += tl.load(ratio_ptr + entry, mask=has_row, other=0.0)[:, None] * lost
    return terms


@triton.jit
def add_piece(
    piece,  # of the entries
    out_ptr,
    rows_ptr,
    entry_pointers,  # pointers to entries' rows and to their order, and ENTRIES_PER_ROW
    factors,  # pointers: factor, softmax_factor, ratio
    sorted_ptr,
    entries,
    width,
    stride,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SCAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the places that begin in a piece, with the entries of the last one that lie in later pieces."""
    end = (piece + 1) * PIECE
    position = piece * PIECE + tl.arange(0, PIECE)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(sorted_ptr + position, mask=position < entries, other=-1)
    previous = tl.load(sorted_ptr + position - 1, mask=(position > 0) & (position < entries), other=-2)
    last = tl.load(sorted_ptr + end - 1, mask=end < entries, other=-1)
    following_place = tl.load(sorted_ptr + end, mask=end < entries, other=-2)
    # matrix [PIECE, PIECE]: the row of a place's first entry has ones at all entries of the place
    first = (place >= 0) & (previous != place)
    # all loads come before the sum, so that the program waits once
    entry, row = entry_and_row(entry_pointers, position, place >= 0)
    terms = load_terms(rows_ptr, factors, entry, row, cols, width, stride)
    out_pointers = out_ptr + place.to(tl.int64)[:, None] * width + cols[None, :]
    mask = first[:, None] & (cols < width)[None, :]
    sum_so_far = tl.load(out_pointers, mask=mask, other=0.0)
    gather = tl.where(first[:, None] & (place[:, None] == place[None, :]), 1.0, 0.0)
    total = tl.dot(gather, terms, input_precision=PRECISION)  # ones are exact, and this splits the rest
    reaches = first & (place == last)
    unread = tl.where(last == following_place, tl.max(reaches.to(tl.int32), 0), 0)
    # Triton 3.5 and 3.6 compile no while loop that carries a tensor
    stop = end
    while unread > 0:
        ahead = stop + tl.arange(0, SCAN)
        same = tl.load(sorted_ptr + ahead, mask=ahead < entries, other=-2) == last
        matches = tl.sum(same.to(tl.int32), 0)
        stop, unread = stop + matches, matches // SCAN
    following = tl.zeros((BLOCK,), dtype=tl.float32)
    ahead = end + tl.arange(0, AT_ONCE)
    entry, row = entry_and_row(entry_pointers, ahead, ahead < stop)
    for _ in range(end, stop, AT_ONCE):
        # loads the next entries' rows while these terms are added
        ahead += AT_ONCE
        next_entry, next_row = entry_and_row(entry_pointers, ahead, ahead < stop)
        following += tl.sum(load_terms(rows_ptr, factors, entry, row, cols, width, stride), 0)
        entry, row = next_entry, next_row
    total += tl.where(reaches[:, None], following[None, :], 0.0)
    tl.store(out_pointers, (sum_so_far.to(tl.float32) + total).to(out_ptr.dtype.element_ty), mask=mask)


@kernel
def add_rows_kernel(
    # outputs
    out_ptr,  # [places, width], added to
    # inputs
    rows_ptr,  # [rows, width]
    row_ptr,  # [entries / ENTRIES_PER_ROW] int64 or int32, -1 for none; None where these are the rows
    factor_ptr,  # [entries] fp32
    softmax_factor_ptr,  # [entries] fp32, or None with ratio_ptr
    ratio_ptr,  # [entries] fp32
    sorted_ptr,  # [entries] int32: places, equal ones together, -1 for none
    order_ptr,  # [entries] int64: the entry of each; None where they are in order
    none_ptr,  # [] int64: how many entries are none, and come first; or None where all pieces have a program
    # sizes
    entries,
    width,
    stride,  # from row to row
    ENTRIES_PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SCAN: tl.constexpr,
    PRECISION: tl.constexpr,  # of fp32 operands
):
    """``out[place[i]] +=`` the term of entry i, entries in sorted pieces of a fixed size.

    A program finishes the places that begin in its piece: the order of every sum is fixed, and it is rounded once.
    """
    entry_pointers, factors = (row_ptr, order_ptr, ENTRIES_PER_ROW), (factor_ptr, softmax_factor_ptr, ratio_ptr)
    if none_ptr is None:
        add_piece(
            tl.program_id(0), out_ptr, rows_ptr, entry_pointers, factors, sorted_ptr, entries, width, stride,
            BLOCK, PIECE, AT_ONCE, SCAN, PRECISION,
        )  # fmt: skip
    else:
        first = (tl.load(none_ptr) // PIECE).to(tl.int32)
        for piece in range(first + tl.program_id(0), tl.cdiv(entries, PIECE), tl.num_programs(0)):
            add_piece(
                piece, out_ptr, rows_ptr, entry_pointers, factors, sorted_ptr, entries, width, stride,
                BLOCK, PIECE, AT_ONCE, SCAN, PRECISION,
            )  # fmt: skip
