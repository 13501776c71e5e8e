"""Which tiles of exponentials hardly matter, known from the strips' sums before any product is made.

A tile is a block of rows by a strip of columns. What a row has in a strip, its softmax's mass there, is exact. A tile
that is skipped keeps its mass: each row's goes to the strip's mean row of the weight, in shares that add up to 1.
"""

import triton
import triton.language as tl

from .blocks import counted_rows
from .transform import log2_e


@triton.jit
def threshold_kernel(
    # outputs
    threshold_ptr,  # [] fp32: the squared size up to which a tile is skipped
    next_ptr,  # [2] int32: tiles of either product that have been taken
    # inputs
    target_factor_ptr,  # [rows] fp32
    count_ptr,  # [] int64: how many rows of the call count, or None for all
    # sizes
    first_row,
    rows,
    strips,
    # scalars
    share,  # of the gradient's squared size that all tiles together may miss
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile's part of what may be missed: none is worth more than its part, so all together stay within."""
    counted = counted_rows(count_ptr, first_row, rows)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, rows, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        factor = tl.load(target_factor_ptr + offs, mask=offs < counted, other=0.0)
        total += factor * factor
    tiles = tl.maximum(tl.cdiv(counted, TILE_ROWS), 1) * strips
    tl.store(threshold_ptr, share * tl.sum(total, 0) / tiles)
    tl.store(next_ptr + tl.arange(0, 2), tl.zeros((2,), dtype=tl.int32))


@triton.jit
def tile_masses_kernel(
    # outputs
    kept_ptr,  # [row blocks, strips] int32: 1 where the products have to be made
    moved_ptr,  # [strips, rows] 16 bit: what a row has in a strip that is skipped, in the units of its exponentials
    moved_share_ptr,  # [row blocks, strips] fp32: the same as a probability, summed over the tile's rows
    # inputs
    strip_offset_ptr,  # [strips, rows] fp32, where the sum is negative
    strip_sum_ptr,  # [strips, rows] fp32
    level_ptr,  # [rows] fp32
    target_logit_ptr,  # [rows] fp32
    start_ptr,  # [rows] fp32
    rest_ptr,  # [rows] fp32
    softmax_factor_ptr,  # [rows] fp32
    worth_ptr,  # [strips] fp32: what a mass squared counts for in this strip
    threshold_ptr,  # [] fp32
    count_ptr,  # [] int64 or None
    # sizes
    first_row,
    rows,
    strips,
    TILE_ROWS: tl.constexpr,
    STRIPS: tl.constexpr,
):
    row_block = tl.program_id(0)
    offs_row = row_block * TILE_ROWS + tl.arange(0, TILE_ROWS)
    offs_strip = tl.program_id(1) * STRIPS + tl.arange(0, STRIPS)
    in_rows = offs_row < counted_rows(count_ptr, first_row, rows)
    in_strips = offs_strip < strips
    level = tl.load(level_ptr + offs_row, mask=in_rows, other=0.0)
    target_logit = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
    start = tl.load(start_ptr + offs_row, mask=in_rows, other=0.0)
    rest = tl.load(rest_ptr + offs_row, mask=in_rows, other=0.0)
    factor = tl.load(softmax_factor_ptr + offs_row, mask=in_rows, other=0.0)
    at = offs_strip[:, None].to(tl.int64) * rows + offs_row[None, :]
    # a row whose softmax has no part in the gradient matters nowhere
    mask = in_strips[:, None] & (in_rows & (factor != 0.0))[None, :]
    total = tl.load(strip_sum_ptr + at, mask=mask, other=0.0)
    own = total < 0.0
    offset = tl.where(own, tl.load(strip_offset_ptr + at, mask=mask & own, other=0.0), target_logit[None, :])
    mass = tl.where(mask, tl.abs(total) * tl.exp2((offset - level[None, :]) * log2_e), 0.0)
    size = mass * factor[None, :]
    worth = tl.load(worth_ptr + offs_strip, mask=in_strips, other=0.0)
    # what is not a number is kept: it must reach the gradient
    skipped = worth * tl.sum(size * size, 1) <= tl.load(threshold_ptr)
    moved = tl.where(skipped[:, None], mass, 0.0)
    any_rows = tl.max(in_rows.to(tl.int32), 0)
    tl.store(kept_ptr + row_block * strips + offs_strip, tl.where(skipped, 0, any_rows), mask=in_strips)
    tl.store(moved_ptr + at, moved.to(moved_ptr.dtype.element_ty), mask=in_strips[:, None] & (offs_row < rows)[None, :])
    probability = moved * tl.exp2(((level - start) + rest) * log2_e)[None, :]
    tl.store(moved_share_ptr + row_block * strips + offs_strip, tl.sum(probability, 1), mask=in_strips)


@triton.jit
def add_totals_kernel(
    # outputs
    totals_ptr,  # [4] fp32, added to: probability that moved, tokens that count, tiles kept, tiles
    # inputs
    moved_share_ptr,  # [row blocks, strips] fp32
    length_ptr,  # [row blocks] int32: kept strips
    target_ptr,  # [rows] int64, -1 where the row does not count
    count_ptr,  # [] int64 or None
    # sizes
    first_row,
    rows,
    strips,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    counted = counted_rows(count_ptr, first_row, rows)
    row_blocks = tl.cdiv(counted, TILE_ROWS)
    moved = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, row_blocks * strips, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        moved += tl.load(moved_share_ptr + offs, mask=offs < row_blocks * strips, other=0.0)
    tokens = tl.zeros((BLOCK,), dtype=tl.int32)
    kept = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, rows, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tokens += (tl.load(target_ptr + offs, mask=offs < counted, other=-1) >= 0).to(tl.int32)
        kept += tl.load(length_ptr + offs, mask=offs < row_blocks, other=0)
    tl.store(totals_ptr, tl.load(totals_ptr) + tl.sum(moved, 0))
    tl.store(totals_ptr + 1, tl.load(totals_ptr + 1) + tl.sum(tokens, 0).to(tl.float32))
    tl.store(totals_ptr + 2, tl.load(totals_ptr + 2) + tl.sum(kept, 0).to(tl.float32))
    tl.store(totals_ptr + 3, tl.load(totals_ptr + 3) + (row_blocks * strips).to(tl.float32))


@triton.jit
def list_kept_kernel(
    # outputs
    list_ptr,  # [lines, items] int32: a line's kept items first, in their order
    length_ptr,  # [lines] int32
    # inputs
    kept_ptr,  # int32: line l's item i at l * line_stride + i * item_stride
    # sizes
    items,
    line_stride,
    item_stride,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0)
    length = tl.zeros((), dtype=tl.int32)
    for start in range(0, items, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        kept = tl.load(kept_ptr + line * line_stride + offs * item_stride, mask=offs < items, other=0)
        at = length + tl.cumsum(kept, 0) - 1
        tl.store(list_ptr + line * items + at, offs, mask=kept > 0)
        length += tl.sum(kept, 0)
    tl.store(length_ptr + line, length)


@triton.jit
def longest_first_kernel(
    # outputs
    order_ptr,  # [lines] int32
    # inputs
    length_ptr,  # [lines] int32
    # sizes
    lines,
    LINES: tl.constexpr,  # that a program finds places for
    BLOCK: tl.constexpr,
):
    """Lines by descending length, equal ones in their order."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    length = tl.load(length_ptr + line, mask=line < lines, other=0)
    place = tl.zeros((LINES,), dtype=tl.int32)
    for start in range(0, lines, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = tl.load(length_ptr + other, mask=other < lines, other=-1)[None, :]
        before = (theirs > length[:, None]) | ((theirs == length[:, None]) & (other[None, :] < line[:, None]))
        place += tl.sum(before.to(tl.int32), 1)
    tl.store(order_ptr + place, line, mask=line < lines)
