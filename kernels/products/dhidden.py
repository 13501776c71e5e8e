"""dhidden [rows, hidden]: the product of the weight with logits' gradients, or with exponentials E.

    dhidden (+)= grad [rows, vocab] @ weight [vocab, hidden]
    dhidden[i] (+)= softmax_factor[i] (E @ weight)[i] + target_factor[i] weight[target[i]]

(+)= adds with ADD, and else stores. ``dhidden_kernel`` is a persistent GEMM. Rows after those that count take no time.
Programs compute tiles in turns. Each tile of the last turn may be cut into parts over the vocabulary, which several
programs multiply. The program that finishes last adds up all parts of the tile, in a fixed order.
"""

import triton
import triton.language as tl

from ..common.blocks import ELSEWHERE, column_halves, counted_rows, dot, load_tile, tile_place
from ..common.launcher import kernel


@triton.jit
def store_dhidden(
    dhidden_and_size,  # a pair: the pointer to dhidden, and the hidden size
    factor_ptrs,  # a tuple of pointers: weight, target, softmax_factor, target_factor; the last two may be None
    grad,  # [rows of the block, columns of the block] fp32: the product
    row_start,  # first row of the block
    column_start,  # first column of the block
    num_counted,  # number of the chunk's rows that count
    ADD: tl.constexpr,  # adds to what dhidden holds
):
    """Applies the factors to a block of the product. Stores the result to dhidden, or adds it to dhidden (ADD)."""
    dhidden_ptr, hidden = dhidden_and_size
    weight_ptr, target_ptr, softmax_factor_ptr, target_factor_ptr = factor_ptrs
    offs_row = row_start + tl.arange(0, grad.shape[0])
    offs_col = column_start + tl.arange(0, grad.shape[1])
    in_rows = offs_row < num_counted
    mask = in_rows[:, None] & (offs_col < hidden)[None, :]
    if softmax_factor_ptr is not None:
        target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1)
        is_counted = target >= 0
        is_local = is_counted & (target < ELSEWHERE)
        target_pointers = weight_ptr + target[:, None] * hidden + offs_col[None, :]
        weight_rows = tl.load(target_pointers, mask=mask & is_local[:, None], other=0.0).to(tl.float32)
        softmax_factor = tl.load(softmax_factor_ptr + offs_row, mask=in_rows, other=0.0)
        target_factor = tl.load(target_factor_ptr + offs_row, mask=in_rows, other=0.0)
        grad = softmax_factor[:, None] * grad + target_factor[:, None] * weight_rows
        grad = tl.where(is_counted[:, None], grad, 0.0)
    offsets = offs_row.to(tl.int64)[:, None] * hidden + offs_col[None, :]
    if ADD:
        grad += tl.load(dhidden_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(dhidden_ptr + offsets, grad.to(dhidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def cut_tiles(num_tiles, most_parts, units, programs):
    """Returns the number of uncut tiles, which come first, and the number of parts of each later tile.

    A last turn with fewer tiles than ``programs`` is cut: each of its tiles into up to ``most_parts`` parts. ``units``:
    the number of parts for which there is memory. Fewer rows may count than the host assumed, so that the last turn
    may have more tiles than the host expected.
    """
    last_turn_tiles = num_tiles % programs
    num_parts = tl.maximum(tl.minimum(units // tl.maximum(last_turn_tiles, 1), most_parts), 1)
    return tl.where(num_parts > 1, num_tiles - last_turn_tiles, num_tiles), num_parts


@kernel
def dhidden_kernel(
    # outputs
    dhidden_ptr,  # [rows, hidden]
    part_ptr,  # [units, BLOCK_M, BLOCK_N] fp32: products over parts of the vocabulary; None: no tile is cut
    finished_ptr,  # [programs] int32, 0 before the launch: number of finished parts of each cut tile; or None
    # inputs
    grad_desc,  # [rows, vocab] 16 bit, block [BLOCK_M, BLOCK_K]; or None
    grad_ptr,  # [rows, vocab] if there is no descriptor; else None
    weight_desc,  # [vocab, hidden], block [BLOCK_K, BLOCK_N]; or None
    weight_ptr,  # [vocab, hidden], never None
    count_ptr,  # [] int64: rows of the call that count; None for all
    target_ptr,  # [rows] int64, -1 where the row does not count; None without factors
    softmax_factor_ptr,  # [rows] fp32, or None for 1 and no target's term
    target_factor_ptr,  # [rows] fp32
    # sizes
    first_row,  # of the chunk within the call
    rows,  # number of the chunk's rows
    vocab,  # number of columns of the logits
    hidden,  # hidden size
    most_parts,  # most parts that a tile is cut into
    units,  # number of parts for which ``part_ptr`` has memory
    grad_stride,  # elements from row to row
    ADD: tl.constexpr,  # adds to what dhidden holds
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_VOCAB: tl.constexpr,  # rows of the gradient need no mask: their padding is read as 0, or there is none
    BLOCK_ROWS: tl.constexpr,  # rows of a cut tile that are added up at a time
):
    """Writes ``dhidden (+)= softmax_factor * (grad @ weight) + target_factor * weight[target]``."""
    num_counted = counted_rows(count_ptr, first_row, rows)
    tiles_m = tl.cdiv(num_counted, BLOCK_M)
    tiles_n = tl.cdiv(hidden, BLOCK_N)
    num_tiles = tiles_m * tiles_n
    num_uncut, num_parts = num_tiles, 1
    if part_ptr is not None:
        num_uncut, num_parts = cut_tiles(num_tiles, most_parts, units, tl.num_programs(0))
    num_cut = tl.maximum(num_tiles - num_uncut, 1)
    part_columns = tl.cdiv(tl.cdiv(vocab, BLOCK_K), num_parts) * BLOCK_K
    HALF: tl.constexpr = BLOCK_N // 2
    grad_matrix = grad_desc, grad_ptr, grad_stride, rows, vocab
    weight_matrix = weight_desc, weight_ptr, hidden, vocab, hidden
    dhidden_and_size = dhidden_ptr, hidden
    factor_ptrs = weight_ptr, target_ptr, softmax_factor_ptr, target_factor_ptr
    for unit in tl.range(  # a unit is an uncut tile, or a part of a cut tile
        tl.program_id(0),
        num_uncut + (num_tiles - num_uncut) * num_parts,
        tl.num_programs(0),
        flatten=grad_desc is not None,
    ):
        # the bounds depend on the unit: with constant bounds the compiler would unroll the loop, with spills
        tile, begin, end = unit, unit // num_tiles, vocab  # columns from begin to end of the vocabulary
        if part_ptr is not None:
            cut_unit = tl.maximum(unit - num_uncut, 0)
            is_cut = unit >= num_uncut
            tile = tl.where(is_cut, num_uncut + cut_unit % num_cut, unit)
            begin = tl.where(is_cut, cut_unit // num_cut * part_columns, 0)
            end = tl.where(is_cut, min(begin + part_columns, vocab), vocab)
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row_start, column_start = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(begin, end, BLOCK_K):
            grad_tile = load_tile(grad_matrix, row_start, k, BLOCK_M, BLOCK_K, not EVEN_VOCAB)
            weight_tile = load_tile(weight_matrix, k, column_start, BLOCK_K, BLOCK_N, False)
            acc = dot(grad_tile, weight_tile, acc)
        halves = column_halves(acc, BLOCK_M, BLOCK_N)
        if part_ptr is None:
            for half in tl.static_range(2):
                half_start = column_start + half * HALF
                store_dhidden(dhidden_and_size, factor_ptrs, halves[half], row_start, half_start, num_counted, ADD)
        elif unit >= num_uncut:
            unit_pointers = part_ptr + (unit - num_uncut) * (BLOCK_M * BLOCK_N)
            offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, HALF)[None, :]
            for half in tl.static_range(2):
                tl.store(unit_pointers + half * HALF + offs, halves[half])
        else:
            for half in tl.static_range(2):
                half_start = column_start + half * HALF
                store_dhidden(dhidden_and_size, factor_ptrs, halves[half], row_start, half_start, num_counted, ADD)
    if part_ptr is not None:
        tl.debug_barrier()  # all threads have stored their elements before one thread counts the part as finished
        for unit in range(
            num_uncut + tl.program_id(0), num_uncut + (num_tiles - num_uncut) * num_parts, tl.num_programs(0)
        ):
            cut_tile = (unit - num_uncut) % num_cut
            if tl.atomic_add(finished_ptr + cut_tile, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
                tile_m, tile_n = tile_place(num_uncut + cut_tile, tiles_m, tiles_n, GROUP_M)
                for row in range(0, BLOCK_M, BLOCK_ROWS):
                    offs = (row + tl.arange(0, BLOCK_ROWS))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                    total = tl.zeros((BLOCK_ROWS, BLOCK_N), dtype=tl.float32)
                    for part_index in range(0, num_parts):
                        part_pointers = part_ptr + (part_index * num_cut + cut_tile) * (BLOCK_M * BLOCK_N)
                        total += tl.load(part_pointers + offs, cache_modifier=".cg")
                    row_start, column_start = tile_m * BLOCK_M + row, tile_n * BLOCK_N
                    store_dhidden(dhidden_and_size, factor_ptrs, total, row_start, column_start, num_counted, ADD)


@kernel
def finish_dhidden_kernel(
    # outputs
    dhidden_ptr,  # [rows, hidden]
    # inputs
    product_ptr,  # [rows, hidden] fp32
    weight_ptr,  # [vocab, hidden]
    target_ptr,  # [rows] int64, -1 where a row does not count
    softmax_factor_ptr,  # [rows] fp32
    target_factor_ptr,  # [rows] fp32
    # sizes
    rows,  # number of the chunk's rows
    hidden,  # hidden size
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Writes ``dhidden = softmax_factor * product + target_factor * weight[target]``, where BLAS has made
    ``product``, exponentials times the weight; 0 where a row does not count."""
    row, column = tl.program_id(0) * BLOCK_ROWS, tl.program_id(1) * BLOCK_COLUMNS
    product = load_tile((None, product_ptr, hidden, rows, hidden), row, column, BLOCK_ROWS, BLOCK_COLUMNS, False)
    factor_ptrs = weight_ptr, target_ptr, softmax_factor_ptr, target_factor_ptr
    store_dhidden((dhidden_ptr, hidden), factor_ptrs, product, row, column, rows, False)


@kernel
def finish_with_sparse_kernel(
    # outputs
    dhidden_ptr,  # [rows, hidden]
    # inputs
    product_ptr,  # [rows, hidden] fp32, of e4m3 operands
    weight_ptr,  # [vocab, hidden]
    target_ptr,  # [rows] int64, -1 where a row does not count
    softmax_factor_ptr,  # [rows] fp32
    place_ptr,  # [rows, NUM_IDS] int32: ids whose dlogits the product lacks, -1 for none
    term_ptr,  # [rows, NUM_IDS] fp32: dlogits of these ids
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,  # number of the chunk's rows
    hidden,  # hidden size
    NUM_IDS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,  # power of 2 from NUM_IDS on
    BLOCK_COLUMNS: tl.constexpr,
):
    """Writes row r: ``softmax_factor[r] product[r] + sum_i term[r, i] weight[place[r, i]]``; 0 if r does not count."""
    row = tl.program_id(0).to(tl.int64)
    if row < counted_rows(count_ptr, first_row, rows):
        offs_col = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        mask = offs_col < hidden
        slot = tl.arange(0, BLOCK_IDS)
        ids = tl.load(place_ptr + row * NUM_IDS + slot, mask=slot < NUM_IDS, other=-1)
        total = tl.load(product_ptr + row * hidden + offs_col, mask=mask, other=0.0) * tl.load(softmax_factor_ptr + row)
        for first_slot in range(0, tl.max(tl.where(ids >= 0, slot + 1, 0), 0), 4):  # 4 rows of the weight at a time
            slots = first_slot + tl.arange(0, 4)
            id = tl.load(place_ptr + row * NUM_IDS + slots, mask=slots < NUM_IDS, other=-1).to(tl.int64)
            term = tl.load(term_ptr + row * NUM_IDS + slots, mask=id >= 0, other=0.0)
            in_weight = (id >= 0)[:, None] & mask[None, :]
            weight_pointers = weight_ptr + id[:, None] * hidden + offs_col[None, :]
            weight_values = tl.load(weight_pointers, mask=in_weight, other=0.0).to(tl.float32)
            total += tl.sum(term[:, None] * weight_values, 0)
        total = tl.where(tl.load(target_ptr + row) >= 0, total, 0.0)
        tl.store(dhidden_ptr + row * hidden + offs_col, total.to(dhidden_ptr.dtype.element_ty), mask=mask)
