"""The weight's gradient [vocab, hidden].

``dweight_kernel`` multiplies logits' gradients, or exponentials, with hidden states. It is a persistent GEMM; rows
after the last row that counts take no time.

    dweight (+)= (grad [rows, vocab]).T @ hidden [rows, hidden]

``add_rows_kernel`` adds terms of single logits to rows of an output. An entry e is one logit: it has a place, which is
a row of the output, and a row of hidden states or of the weight. Entries are sorted by place, and the terms of each
place are summed in fp32. The kernel adds the targets' terms, which a product of exponentials lacks. For softmaxes
over sets of columns the kernel computes all of dweight and, from rows of the weight, all of dhidden.

    out[p] += sum_{e: place[e] = p} factor[e] rows[row[e]] + ratio[e] (s - bf16(s)),  s = softmax_factor[e] rows[row[e]]

The rows of frequent ids are summed in fp32: ``pick_columns_kernel`` copies the columns of these ids from logits'
gradients, a product computes the ids' rows of dweight, and ``put_rows_kernel`` writes them over the rounded rows.
"""

import triton
import triton.language as tl

from ..common.blocks import column_halves, counted_rows, dot, load_tile, store_tile, tile_place
from ..common.launcher import kernel


@triton.jit
def add_or_store(matrix, row_start, column_start, tile, ADD: tl.constexpr, IS_ATOMIC: tl.constexpr):
    """Adds ``tile`` to a matrix (ADD) or stores it there. IS_ATOMIC: by an atomic addition. A launch adds to each
    element once, so that the order of additions does not change bits."""
    if ADD and IS_ATOMIC:
        matrix[0].atomic_add([row_start, column_start], tile)
    else:
        if ADD:
            tile += load_tile(matrix, row_start, column_start, tile.shape[0], tile.shape[1], False).to(tl.float32)
        store_tile(matrix, row_start, column_start, tile)


@kernel
def dweight_kernel(
    # outputs
    dweight_desc,  # [vocab, hidden], block [BLOCK_M, BLOCK_N / 2], added to or stored; or None
    dweight_ptr,  # [vocab, hidden] if there is no descriptor; else None
    # inputs
    grad_desc,  # [rows, vocab] 16 bit, block [BLOCK_K, BLOCK_M]; e4m3 [vocab, rows], block [BLOCK_M, BLOCK_K]; or None
    grad_ptr,  # the gradient if there is no descriptor; else None
    hidden_desc,  # [rows, hidden], block [BLOCK_K, BLOCK_N], 0 behind the rows that count; e4m3 [hidden, rows]; or None
    hidden_ptr,  # hidden states if there is no descriptor; else None
    scale_ptr,  # [] fp32: factor of the product of e4m3 operands; None for 16-bit operands, like the next two
    grad_sum_ptr,  # [vocab] fp32: factors of hidden_mean in a term that is added
    hidden_mean_ptr,  # [hidden] fp32: was subtracted from hidden states before they were rounded to e4m3
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,  # number of the chunk's rows
    vocab,  # number of columns of the logits
    hidden,  # hidden size
    grad_stride,  # elements from row to row
    ADD: tl.constexpr,  # adds to what dweight holds
    PROMOTED_ROWS: tl.constexpr,  # rows whose products tensor cores sum before the sum is added in fp32; None: all rows
    IS_ATOMIC: tl.constexpr,  # memory adds; with a descriptor of dweight only
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Writes ``dweight = grad.T @ hidden``, or adds the product to dweight (ADD)."""
    num_counted = counted_rows(count_ptr, first_row, rows)
    tiles_m = tl.cdiv(vocab, BLOCK_M)
    tiles_n = tl.cdiv(hidden, BLOCK_N)
    num_tiles = tiles_m * tiles_n
    if ADD:
        num_tiles = tl.where(num_counted > 0, num_tiles, 0)  # nothing to add
    dweight_matrix = dweight_desc, dweight_ptr, hidden, vocab, hidden
    grad_matrix = grad_desc, grad_ptr, grad_stride, rows, vocab
    hidden_matrix = hidden_desc, hidden_ptr, hidden, rows, hidden
    if scale_ptr is not None:
        grad_matrix = grad_desc, grad_ptr, grad_stride, vocab, rows
        hidden_matrix = hidden_desc, hidden_ptr, grad_stride, hidden, rows
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=grad_desc is not None):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row_start, column_start = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if PROMOTED_ROWS is not None:
            total = acc
        for k in range(0, num_counted, BLOCK_K):
            if scale_ptr is None:
                grad_tile = load_tile(grad_matrix, k, row_start, BLOCK_K, BLOCK_M, False)
                hidden_tile = load_tile(hidden_matrix, k, column_start, BLOCK_K, BLOCK_N, False)
                acc = dot(grad_tile.T, hidden_tile, acc)
            else:
                grad_tile = load_tile(grad_matrix, row_start, k, BLOCK_M, BLOCK_K, False)
                hidden_tile = load_tile(hidden_matrix, column_start, k, BLOCK_N, BLOCK_K, False)
                acc = dot(grad_tile, hidden_tile.T, acc)
            if PROMOTED_ROWS is not None:  # noqa: SIM102  (so that the inner condition is not compiled for None)
                if (k + BLOCK_K) % PROMOTED_ROWS == 0:
                    total += acc
                    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if PROMOTED_ROWS is not None:
            acc += total
        if scale_ptr is not None:
            offs_row, offs_col = row_start + tl.arange(0, BLOCK_M), column_start + tl.arange(0, BLOCK_N)
            grad_sums = tl.load(grad_sum_ptr + offs_row, mask=offs_row < vocab, other=0.0)
            hidden_mean = tl.load(hidden_mean_ptr + offs_col, mask=offs_col < hidden, other=0.0)
            acc = acc * tl.load(scale_ptr) + grad_sums[:, None] * hidden_mean[None, :]
        left_half, right_half = column_halves(acc, BLOCK_M, BLOCK_N)
        add_or_store(dweight_matrix, row_start, column_start, left_half, ADD, IS_ATOMIC)
        add_or_store(dweight_matrix, row_start, column_start + BLOCK_N // 2, right_half, ADD, IS_ATOMIC)


@kernel
def sort_columns_kernel(
    # outputs
    sorted_ptr,  # [entries] int32
    order_ptr,  # [entries] int64: for each column in ``sorted_ptr`` its index in ``column_ptr``
    occurrences_ptr,  # [entries] int32: for each column in ``column_ptr`` the number of equal columns; or None
    # inputs
    column_ptr,  # [entries] int32 or int64
    # sizes
    entries,  # number of entries
    BLOCK: tl.constexpr,
    BLOCK_COMPARED: tl.constexpr,  # entries that are compared at a time
):
    """Sorts columns in ascending order. The sort is stable: the new index of a column is the number of smaller columns,
    plus the number of equal columns before it."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(column_ptr + entry, mask=entry < entries, other=0).to(tl.int32)
    num_before = tl.zeros((BLOCK, BLOCK_COMPARED), dtype=tl.int32)
    num_equal = num_before
    for start in range(0, entries, BLOCK_COMPARED):
        compared_entry = start + tl.arange(0, BLOCK_COMPARED)
        compared_column = tl.load(column_ptr + compared_entry, mask=compared_entry < entries, other=2147483647).to(
            tl.int32
        )
        # of equal columns, the earlier one comes first
        upper_bound = column[:, None] + (compared_entry[None, :] < entry[:, None]).to(tl.int32)
        num_before += (compared_column[None, :] < upper_bound).to(tl.int32)
        if occurrences_ptr is not None:
            num_equal += (compared_column[None, :] == column[:, None]).to(tl.int32)
    sorted_index = tl.sum(num_before, 1)
    tl.store(sorted_ptr + sorted_index, column, mask=entry < entries)
    tl.store(order_ptr + sorted_index, entry.to(tl.int64), mask=entry < entries)
    if occurrences_ptr is not None:
        tl.store(occurrences_ptr + entry, tl.sum(num_equal, 1), mask=entry < entries)


@kernel
def pick_columns_kernel(
    # outputs
    out_ptr,  # [rows, num_picked] contiguous
    # inputs
    grad_ptr,  # [rows, vocab]
    sorted_ptr,  # [tokens] int32: columns in ascending order, -1 for none
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,  # number of the chunk's rows
    num_picked,  # number of picked columns
    step,  # every ``step``-th column is picked
    stride,  # elements of ``grad_ptr`` from row to row
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Writes ``out[:, i] = grad[:, sorted[step * i]]``; 0 where ``sorted`` is -1, and in rows after those that
    count."""
    offs_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column = tl.load(sorted_ptr + offs.to(tl.int64) * step, mask=offs < num_picked, other=-1)
    is_counted = offs_row < counted_rows(count_ptr, first_row, rows)
    grad_pointers = grad_ptr + offs_row[:, None] * stride + column[None, :]
    value = tl.load(grad_pointers, mask=is_counted[:, None] & (column >= 0)[None, :], other=0.0)
    mask = (offs_row < rows)[:, None] & (offs < num_picked)[None, :]
    tl.store(out_ptr + offs_row[:, None] * num_picked + offs[None, :], value, mask=mask)


@kernel
def put_rows_kernel(
    # outputs
    out_ptr,  # [places, width]
    # inputs
    rows_ptr,  # [num_picked, width] fp32
    sorted_ptr,  # [tokens] int32: places in ascending order, -1 for none
    # sizes
    step,  # every ``step``-th place has a row
    width,  # elements of a row
    BLOCK: tl.constexpr,
):
    """Writes ``out[sorted[step * i]] = rows[i]``; if several i have the same place, the row of the first."""
    entry = tl.program_id(0).to(tl.int64)
    place = tl.load(sorted_ptr + entry * step)
    previous = tl.load(sorted_ptr + (entry - 1) * step, mask=entry > 0, other=-1)
    if (place >= 0) & (place != previous):
        offs_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + entry * width + offs_col, mask=offs_col < width)
        out_pointers = out_ptr + place.to(tl.int64) * width + offs_col
        tl.store(out_pointers, row.to(out_ptr.dtype.element_ty), mask=offs_col < width)


@triton.jit
def entry_and_row(entry_pointers, position, mask):
    """Returns the entries at ``position`` [n] of the sorted order, and the entries' rows. Both are -1 where ``mask`` is
    false. A row is also -1 for an entry without a row. ``entry_pointers``: a tuple of ``row_ptr``, ``order_ptr`` and
    ENTRIES_PER_ROW."""
    row_ptr, order_ptr, ENTRIES_PER_ROW = entry_pointers
    entry = tl.where(mask, position, -1).to(tl.int64)
    if order_ptr is not None:
        entry = tl.load(order_ptr + position, mask=mask, other=-1)
    row = tl.where(mask, entry // ENTRIES_PER_ROW, -1)
    if row_ptr is not None:
        row = tl.load(row_ptr + row, mask=mask, other=-1).to(tl.int64)
    return entry, row


@triton.jit
def load_terms(rows_ptr, factor_ptrs, entry, row, offs_col, width, stride):
    """Returns the terms of entries at the columns ``offs_col``, [entries, columns] fp32; 0 where ``row`` is -1.
    ``factor_ptrs``: a tuple of ``factor_ptr``, ``softmax_factor_ptr`` and ``ratio_ptr``."""
    factor_ptr, softmax_factor_ptr, ratio_ptr = factor_ptrs
    has_row = row >= 0
    row_pointers = rows_ptr + row[:, None] * stride + offs_col[None, :]
    values = tl.load(row_pointers, mask=has_row[:, None] & (offs_col < width)[None, :], other=0.0).to(tl.float32)
    terms = tl.load(factor_ptr + entry, mask=has_row, other=0.0)[:, None] * values
    if ratio_ptr is not None:
        softmax_factor = tl.load(softmax_factor_ptr + entry, mask=has_row, other=0.0)[:, None]
        rounded_product = (softmax_factor * values.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
        rounding_error = softmax_factor * values - rounded_product
        terms += tl.load(ratio_ptr + entry, mask=has_row, other=0.0)[:, None] * rounding_error
    return terms


@triton.jit
def add_piece(
    piece,  # index of the piece, BLOCK_PIECE entries
    out_ptr,  # [places, width]
    rows_ptr,  # [rows, width]
    entry_pointers,  # a tuple, the argument of ``entry_and_row``
    factor_ptrs,  # a tuple, the argument of ``load_terms``
    sorted_ptr,  # [entries] int32: places in ascending order
    entries,  # number of entries
    width,  # elements of a row
    stride,  # elements of ``rows_ptr`` from row to row
    BLOCK: tl.constexpr,
    BLOCK_PIECE: tl.constexpr,  # entries of a piece
    BLOCK_ENTRIES: tl.constexpr,  # entries of later pieces that are added at a time
    BLOCK_SCAN: tl.constexpr,  # places that are compared at a time
    PRECISION: tl.constexpr,  # Triton's ``input_precision`` for fp32 operands
):
    """Adds the terms of each place that has its first entry in the piece; also those entries of the last place that are
    in later pieces."""
    end = (piece + 1) * BLOCK_PIECE
    position = piece * BLOCK_PIECE + tl.arange(0, BLOCK_PIECE)
    offs_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(sorted_ptr + position, mask=position < entries, other=-1)
    previous = tl.load(sorted_ptr + position - 1, mask=(position > 0) & (position < entries), other=-2)
    last_place = tl.load(sorted_ptr + end - 1, mask=end < entries, other=-1)
    next_place = tl.load(sorted_ptr + end, mask=end < entries, other=-2)
    # gather_matrix [BLOCK_PIECE, BLOCK_PIECE]: the row of a place's first entry has ones at all entries of the place
    is_first = (place >= 0) & (previous != place)
    # all loads come before the sum, so that the program waits once
    entry, row = entry_and_row(entry_pointers, position, place >= 0)
    terms = load_terms(rows_ptr, factor_ptrs, entry, row, offs_col, width, stride)
    out_pointers = out_ptr + place.to(tl.int64)[:, None] * width + offs_col[None, :]
    mask = is_first[:, None] & (offs_col < width)[None, :]
    stored_sum = tl.load(out_pointers, mask=mask, other=0.0)
    gather_matrix = tl.where(is_first[:, None] & (place[:, None] == place[None, :]), 1.0, 0.0)
    total = tl.dot(gather_matrix, terms, input_precision=PRECISION)  # PRECISION splits terms; ones are exact
    is_continued = is_first & (place == last_place)
    has_more = tl.where(last_place == next_place, tl.max(is_continued.to(tl.int32), 0), 0)
    # Triton 3.5 and 3.6 compile no while loop that carries a tensor
    end_of_place = end
    while has_more > 0:
        ahead_positions = end_of_place + tl.arange(0, BLOCK_SCAN)
        is_same_place = tl.load(sorted_ptr + ahead_positions, mask=ahead_positions < entries, other=-2) == last_place
        num_matches = tl.sum(is_same_place.to(tl.int32), 0)
        end_of_place, has_more = end_of_place + num_matches, num_matches // BLOCK_SCAN
    following_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    ahead_positions = end + tl.arange(0, BLOCK_ENTRIES)
    entry, row = entry_and_row(entry_pointers, ahead_positions, ahead_positions < end_of_place)
    for _ in range(end, end_of_place, BLOCK_ENTRIES):
        # loads the next entries' rows while these terms are added
        ahead_positions += BLOCK_ENTRIES
        next_entry, next_row = entry_and_row(entry_pointers, ahead_positions, ahead_positions < end_of_place)
        following_sum += tl.sum(load_terms(rows_ptr, factor_ptrs, entry, row, offs_col, width, stride), 0)
        entry, row = next_entry, next_row
    total += tl.where(is_continued[:, None], following_sum[None, :], 0.0)
    tl.store(out_pointers, (stored_sum.to(tl.float32) + total).to(out_ptr.dtype.element_ty), mask=mask)


@kernel
def add_rows_kernel(
    # outputs
    out_ptr,  # [places, width], added to
    # inputs
    rows_ptr,  # [rows, width]
    row_ptr,  # [entries / ENTRIES_PER_ROW] int64 or int32: rows of entries, -1 for none; None: 0, 1, 2, ...
    factor_ptr,  # [entries] fp32
    softmax_factor_ptr,  # [entries] fp32, or None
    ratio_ptr,  # [entries] fp32, or None
    sorted_ptr,  # [entries] int32: places, equal ones together, -1 for none
    order_ptr,  # [entries] int64: the entry of each of ``sorted_ptr``; None: entries are sorted by place
    num_none_ptr,  # [] int64: number of entries without a place, which come first; None: one program for each piece
    # sizes
    entries,  # number of entries
    width,  # elements of a row
    stride,  # elements of ``rows_ptr`` from row to row
    ENTRIES_PER_ROW: tl.constexpr,  # number of neighbouring entries that have the same row
    BLOCK: tl.constexpr,
    BLOCK_PIECE: tl.constexpr,  # entries of a piece
    BLOCK_ENTRIES: tl.constexpr,  # entries of later pieces that are added at a time
    BLOCK_SCAN: tl.constexpr,  # places that are compared at a time
    PRECISION: tl.constexpr,  # Triton's ``input_precision`` for fp32 operands
):
    """Adds the term of each entry to the entry's place, a row of the output.

    Sorted entries are divided into pieces. A program adds up all entries of the places that begin in its piece. The
    order of each sum is therefore fixed, and a sum is rounded once.
    """
    entry_pointers = row_ptr, order_ptr, ENTRIES_PER_ROW
    factor_ptrs = factor_ptr, softmax_factor_ptr, ratio_ptr
    if num_none_ptr is None:
        add_piece(
            tl.program_id(0), out_ptr, rows_ptr, entry_pointers, factor_ptrs, sorted_ptr, entries, width, stride,
            BLOCK, BLOCK_PIECE, BLOCK_ENTRIES, BLOCK_SCAN, PRECISION,
        )  # fmt: skip
    else:
        first_piece = (tl.load(num_none_ptr) // BLOCK_PIECE).to(tl.int32)
        for piece in range(first_piece + tl.program_id(0), tl.cdiv(entries, BLOCK_PIECE), tl.num_programs(0)):
            add_piece(
                piece, out_ptr, rows_ptr, entry_pointers, factor_ptrs, sorted_ptr, entries, width, stride,
                BLOCK, BLOCK_PIECE, BLOCK_ENTRIES, BLOCK_SCAN, PRECISION,
            )  # fmt: skip
