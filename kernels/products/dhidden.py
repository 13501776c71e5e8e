"""dhidden [rows, hidden]: the product of logits' gradients, or of exponentials E in their place, with the weight.

    dhidden (+)= grad [rows, vocab] @ weight [vocab, hidden]
    dhidden (+)= softmax_factor[i] (E @ weight)[i] + target_factor[i] weight[target[i]]

It is a persistent GEMM that reads the number of rows that count on the device; later rows take no time. Tiles of the
last turn may be cut over the vocabulary: the last program to finish a part of a tile adds up all parts, in a fixed
order.
"""

import triton
import triton.language as tl

from ..common.blocks import ELSEWHERE, column_halves, counted_rows, dot, load_tile, tile_place
from ..common.launcher import kernel


@triton.jit
def store_dhidden(
    out,  # pointer to dhidden, and how long a row is
    factors,  # pointers: weight, target, softmax_factor, target_factor
    grad,  # [rows, columns] fp32, of the product
    row_start,
    column_start,
    counted,
    ADD: tl.constexpr,
):
    dhidden_ptr, hidden = out
    weight_ptr, target_ptr, softmax_factor_ptr, target_factor_ptr = factors
    offs_row = row_start + tl.arange(0, grad.shape[0])
    offs_col = column_start + tl.arange(0, grad.shape[1])
    in_rows = offs_row < counted
    mask = in_rows[:, None] & (offs_col < hidden)[None, :]
    if softmax_factor_ptr is not None:
        target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1)
        counts = target >= 0
        is_local = counts & (target < ELSEWHERE)
        at_target = weight_ptr + target[:, None] * hidden + offs_col[None, :]
        w = tl.load(at_target, mask=mask & is_local[:, None], other=0.0).to(tl.float32)
        softmax_factor = tl.load(softmax_factor_ptr + offs_row, mask=in_rows, other=0.0)
        target_factor = tl.load(target_factor_ptr + offs_row, mask=in_rows, other=0.0)
        grad = softmax_factor[:, None] * grad + target_factor[:, None] * w
        grad = tl.where(counts[:, None], grad, 0.0)
    offsets = offs_row.to(tl.int64)[:, None] * hidden + offs_col[None, :]
    if ADD:
        grad += tl.load(dhidden_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(dhidden_ptr + offsets, grad.to(dhidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def cut_tiles(tiles, most_parts, units, programs):
    """Returns the number of first tiles that are not cut, and the number of parts into which each later tile is cut.

    Programs make tiles in turns. If the last turn has fewer tiles than programs, each of its tiles is cut into parts
    over the vocabulary. ``units``: most parts in all, for which there is memory; fewer rows may count than the host
    has assumed.
    """
    last_turn = tiles % programs
    pieces = tl.maximum(tl.minimum(units // tl.maximum(last_turn, 1), most_parts), 1)
    return tl.where(pieces > 1, tiles - last_turn, tiles), pieces


@kernel
def dhidden_kernel(
    # outputs
    dhidden_ptr,  # [rows, hidden]
    part_ptr,  # [units, BLOCK_M, BLOCK_N] fp32: products over parts of the vocabulary; None: no tile is cut
    arrived_ptr,  # [programs] int32: finished parts of each cut tile, 0 at first, or None
    # inputs
    grad_desc,  # [rows, vocab] 16 bit, block [BLOCK_M, BLOCK_K]; None where it is not described
    grad_ptr,
    weight_desc,  # [vocab, hidden], block [BLOCK_K, BLOCK_N]
    weight_ptr,
    count_ptr,  # [] int64: rows of the call that count; None for all
    target_ptr,  # [rows] int64, -1 where the row does not count; None without factors
    softmax_factor_ptr,  # [rows] fp32, or None for 1 and no target's term
    target_factor_ptr,  # [rows] fp32
    # sizes
    first_row,  # of the chunk within the call
    rows,
    vocab,
    hidden,
    most_parts,  # that a tile is cut into
    units,  # places of parts' sums
    grad_stride,  # from row to row
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_VOCAB: tl.constexpr,  # nothing fills a row of the gradient
    ROWS: tl.constexpr,  # of a cut tile that are added up at a time
):
    """``dhidden (+)= softmax_factor * (grad @ weight) + target_factor * weight[target]``"""
    counted = counted_rows(count_ptr, first_row, rows)
    tiles_m = tl.cdiv(counted, BLOCK_M)
    tiles_n = tl.cdiv(hidden, BLOCK_N)
    tiles = tiles_m * tiles_n
    uncut, pieces = tiles, 1
    if part_ptr is not None:
        uncut, pieces = cut_tiles(tiles, most_parts, units, tl.num_programs(0))
    cut_count = tl.maximum(tiles - uncut, 1)
    part_columns = tl.cdiv(tl.cdiv(vocab, BLOCK_K), pieces) * BLOCK_K
    HALF: tl.constexpr = BLOCK_N // 2
    g_matrix = grad_desc, grad_ptr, grad_stride, rows, vocab
    w_matrix = weight_desc, weight_ptr, hidden, vocab, hidden
    out = dhidden_ptr, hidden
    factors = weight_ptr, target_ptr, softmax_factor_ptr, target_factor_ptr
    for unit in tl.range(
        tl.program_id(0), uncut + (tiles - uncut) * pieces, tl.num_programs(0), flatten=grad_desc is not None
    ):
        # the bounds depend on the unit: with constant bounds the compiler would unroll the loop, with spills
        tile, first, last = unit, unit // tiles, vocab
        if part_ptr is not None:
            cut_unit = tl.maximum(unit - uncut, 0)
            is_cut = unit >= uncut
            tile = tl.where(is_cut, uncut + cut_unit % cut_count, unit)
            first = tl.where(is_cut, cut_unit // cut_count * part_columns, 0)
            last = tl.where(is_cut, min(first + part_columns, vocab), vocab)
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row_start, column_start = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(first, last, BLOCK_K):
            g = load_tile(g_matrix, row_start, k, BLOCK_M, BLOCK_K, not EVEN_VOCAB)
            w = load_tile(w_matrix, k, column_start, BLOCK_K, BLOCK_N, False)
            acc = dot(g, w, acc)
        halves = column_halves(acc, BLOCK_M, BLOCK_N)
        if part_ptr is None:
            for half in tl.static_range(2):
                store_dhidden(out, factors, halves[half], row_start, column_start + half * HALF, counted, ADD)
        elif unit >= uncut:
            unit_pointers = part_ptr + (unit - uncut) * (BLOCK_M * BLOCK_N)
            offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, HALF)[None, :]
            for half in tl.static_range(2):
                tl.store(unit_pointers + half * HALF + offs, halves[half])
        else:
            for half in tl.static_range(2):
                store_dhidden(out, factors, halves[half], row_start, column_start + half * HALF, counted, ADD)
    if part_ptr is not None:
        tl.debug_barrier()  # all threads' parts are stored before one thread announces them
        for unit in range(uncut + tl.program_id(0), uncut + (tiles - uncut) * pieces, tl.num_programs(0)):
            cut_tile = (unit - uncut) % cut_count
            if tl.atomic_add(arrived_ptr + cut_tile, 1, sem="acq_rel", scope="gpu") == pieces - 1:
                tile_m, tile_n = tile_place(uncut + cut_tile, tiles_m, tiles_n, GROUP_M)
                for row in range(0, BLOCK_M, ROWS):
                    offs = (row + tl.arange(0, ROWS))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                    total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
                    for piece in range(0, pieces):
                        part_at = part_ptr + (piece * cut_count + cut_tile) * (BLOCK_M * BLOCK_N)
                        total += tl.load(part_at + offs, cache_modifier=".cg")
                    store_dhidden(out, factors, total, tile_m * BLOCK_M + row, tile_n * BLOCK_N, counted, ADD)


@kernel
def finish_dhidden_kernel(
    # outputs
    dhidden_ptr,
    # inputs
    product_ptr,  # [rows, hidden] fp32
    weight_ptr,
    target_ptr,
    softmax_factor_ptr,
    target_factor_ptr,
    # sizes
    rows,
    hidden,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Makes dhidden from an fp32 product of BLAS: applies the factors and adds the targets' terms."""
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    product = load_tile((None, product_ptr, hidden, rows, hidden), row, column, ROWS, COLUMNS, False)
    factors = weight_ptr, target_ptr, softmax_factor_ptr, target_factor_ptr
    store_dhidden((dhidden_ptr, hidden), factors, product, row, column, rows, False)


@kernel
def finish_with_apart_kernel(
    # outputs
    dhidden_ptr,  # [rows, hidden]
    # inputs
    product_ptr,  # [rows, hidden] fp32, of e4m3 operands
    weight_ptr,  # [vocab, hidden]
    target_ptr,  # [rows] int64, -1 where a row does not count
    softmax_factor_ptr,  # [rows] fp32
    place_ptr,  # [rows, PLACES] int32: ids that stand apart, -1 for none
    term_ptr,  # [rows, PLACES] fp32: dlogits there
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    hidden,
    PLACES: tl.constexpr,
    AT_ONCE: tl.constexpr,  # all places
    COLUMNS: tl.constexpr,
):
    """``dhidden = softmax_factor * product + sum_i term[i] weight[place[i]]``, 0 where a row does not count."""
    row = tl.program_id(0).to(tl.int64)
    if row < counted_rows(count_ptr, first_row, rows):
        cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = cols < hidden
        slot = tl.arange(0, AT_ONCE)
        places = tl.load(place_ptr + row * PLACES + slot, mask=slot < PLACES, other=-1)
        total = tl.load(product_ptr + row * hidden + cols, mask=mask, other=0.0) * tl.load(softmax_factor_ptr + row)
        for i in range(0, tl.max(tl.where(places >= 0, slot + 1, 0), 0)):
            place = tl.load(place_ptr + row * PLACES + i).to(tl.int64)
            in_weight = mask & (place + cols * 0 >= 0)  # the interpreter takes no mask that is one number
            w = tl.load(weight_ptr + place * hidden + cols, mask=in_weight, other=0.0).to(tl.float32)
            total += tl.load(term_ptr + row * PLACES + i) * w
        total = tl.where(tl.load(target_ptr + row) >= 0, total, 0.0)
        tl.store(dhidden_ptr + row * hidden + cols, total.to(dhidden_ptr.dtype.element_ty), mask=mask)
