"""Exponentials of logits in e4m3, for products of gradients with e4m3 operands.

A row's target and its heavy ids stand apart, in float32. What is left of a row is divided by a power of 2 that takes
its largest number to 224 to 448, or less: the power comes from sums over strips of columns, which bound it. In the
weight's gradient that power belongs to the row's hidden state, and these are rounded by one power of 2 for all rows,
without their mean ``m``, whose part needs no rounding, for any vector. With ``share = factor * power``

    E.T @ (factor * hidden) = e4m3(E / power).T @ e4m3(share * (hidden - m)) + outer(factor @ E, m)

Tensor cores sum 13 bits, and sums over tokens of what hidden states have in common err by that: on Zipf heads, where
targets' terms nearly cancel them, dweight was off by 1e-2 to 7e-2.
"""

import triton
import triton.language as tl

from ...core import tiles
from ..common.blocks import counted_rows, to_e4m3
from ..common.launcher import kernel
from ..common.transform import log2_e

LARGEST, LEAST = tl.constexpr(tiles.LARGEST_E4M3), tl.constexpr(tiles.LEAST_SCALE)


@triton.jit
def power_of_2_above(x):
    """The power of 2 by which x is divided, so that it is above 224 and at most 448; nan where x is not finite."""
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(x / LARGEST, LEAST)))) + x * 0.0


@kernel
def set_apart_kernel(
    # in and out
    exp_ptr,  # [rows, vocab] 16 bit, as level_rows leaves them; heavy ids' become 0
    softmax_factor_ptr,  # [rows] fp32, times the power and the weight's scale afterwards
    # outputs
    place_ptr,  # [rows, 1 + SLOTS] int32: the target and heavy ids, -1 for none
    term_ptr,  # [rows, 1 + SLOTS] fp32: dlogits there
    power_ptr,  # [rows] fp32: what exponentials are to be divided by
    share_ptr,  # [rows] fp32: softmax factor times power, 0 where a row does not count
    most_ptr,  # [rows] fp32: the largest number of share * (hidden - mean); None with hidden_ptr and mean_ptr
    # inputs
    hidden_ptr,  # [rows, hidden] 16 bit
    mean_ptr,  # [hidden] fp32
    heavy_id_ptr,  # [rows, SLOTS] int32, -1 behind the last
    heavy_logit_ptr,  # [rows, SLOTS] fp32
    strip_offset_ptr,  # [strips, rows] fp32, where the sum is negative
    strip_sum_ptr,  # [strips, rows] fp32
    level_ptr,  # [rows] fp32
    target_ptr,  # [rows] int64, -1 where a row does not count
    target_logit_ptr,  # [rows] fp32, the offset of other strips
    target_factor_ptr,  # [rows] fp32
    weight_scale_ptr,  # [] fp32
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    vocab,
    strips,
    strip_stride,  # from strip to strip
    stride,  # from row to row
    hidden,
    SLOTS: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STRIPS: tl.constexpr,  # all
    BLOCK: tl.constexpr,
):
    """What a row has apart, and the power of 2 of the rest."""
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < counted_rows(count_ptr, first_row, rows)
    wide_row = offs_row.to(tl.int64)
    level = tl.load(level_ptr + offs_row, mask=in_rows, other=0.0)
    target_logit = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
    target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1)
    factor = tl.load(softmax_factor_ptr + offs_row, mask=in_rows, other=0.0)

    strip = tl.arange(0, STRIPS)
    offs_strip = strip[None, :].to(tl.int64) * strip_stride + offs_row[:, None]
    mask = in_rows[:, None] & (strip < strips)[None, :]
    total = tl.load(strip_sum_ptr + offs_strip, mask=mask, other=0.0)
    offset = tl.load(strip_offset_ptr + offs_strip, mask=mask & (total < 0.0), other=0.0)
    offset = tl.where(total < 0.0, offset, target_logit[:, None])
    total = tl.abs(total) * tl.exp2((offset - level[:, None]) * log2_e)
    remaining = total  # without what stands apart
    exp = tl.exp2((target_logit - level) * log2_e)
    remaining -= tl.where(strip[None, :] == tl.where(target >= 0, target // STRIP, -1)[:, None], exp[:, None], 0.0)

    slot = tl.arange(0, SLOTS)
    offs_slot = wide_row[:, None] * SLOTS + slot[None, :]
    ids = tl.load(heavy_id_ptr + offs_slot, mask=in_rows[:, None], other=-1)
    logit = tl.load(heavy_logit_ptr + offs_slot, mask=in_rows[:, None], other=0.0)
    is_heavy = ids >= 0
    term = tl.where(is_heavy, factor[:, None] * tl.exp2((logit - level[:, None]) * log2_e), 0.0)
    # rows behind those that count have none apart
    in_chunk, in_vocab = offs_row < rows, (target >= 0) & (target < vocab)
    offs_place = wide_row * (SLOTS + 1)
    tl.store(place_ptr + offs_place, tl.where(in_vocab, target, -1).to(tl.int32), mask=in_chunk)
    tl.store(term_ptr + offs_place, tl.load(target_factor_ptr + offs_row, mask=in_rows, other=0.0), mask=in_chunk)
    offs_place = offs_place[:, None] + 1 + slot[None, :]
    tl.store(place_ptr + offs_place, ids, mask=in_chunk[:, None])
    tl.store(term_ptr + offs_place, term, mask=in_chunk[:, None])
    zero = tl.zeros((BLOCK_ROWS, SLOTS), dtype=exp_ptr.dtype.element_ty)
    tl.store(exp_ptr + wide_row[:, None] * stride + ids, zero, mask=is_heavy)
    most = tl.max(tl.max(tl.where(is_heavy, slot[None, :] + 1, 0), 1), 0)
    for i in range(0, most):
        heavy_id = tl.load(heavy_id_ptr + wide_row * SLOTS + i, mask=in_rows, other=-1)
        heavy_logit = tl.load(heavy_logit_ptr + wide_row * SLOTS + i, mask=in_rows, other=0.0)
        exp = tl.where(heavy_id >= 0, tl.exp2((heavy_logit - level) * log2_e), 0.0)
        remaining -= tl.where(strip[None, :] == (heavy_id // STRIP)[:, None], exp[:, None], 0.0)
    # the sums and their differences are rounded
    power = power_of_2_above(tl.max(tl.maximum(remaining, 0.0) + total * 2.0**-20, 1))
    tl.store(power_ptr + offs_row, power, mask=in_chunk)
    share = tl.where(target >= 0, factor * power, 0.0)
    tl.store(share_ptr + offs_row, share, mask=in_chunk)
    tl.store(softmax_factor_ptr + offs_row, share * tl.load(weight_scale_ptr), mask=in_rows)

    if hidden_ptr is not None:
        largest = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
        for start in range(0, hidden, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            in_hidden = in_rows[:, None] & (offs < hidden)[None, :]
            h = tl.load(hidden_ptr + wide_row[:, None] * hidden + offs[None, :], mask=in_hidden, other=0.0)
            mean = tl.load(mean_ptr + offs, mask=offs < hidden, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(h.to(tl.float32) - mean[None, :]), 1))
        tl.store(most_ptr + offs_row, largest * tl.abs(share), mask=in_chunk)


@kernel
def mean_of_rows_kernel(
    # outputs
    mean_ptr,  # [hidden] fp32
    # inputs
    hidden_ptr,  # [rows, hidden] 16 bit
    target_ptr,  # [rows] int64, -1 where a row does not count
    # sizes
    rows,
    hidden,
    SAMPLED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The mean of SAMPLED rows at equal distances, of those that count; 0 if none does."""
    row = tl.arange(0, SAMPLED).to(tl.int64) * rows // SAMPLED
    offs = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    counts = tl.load(target_ptr + row) >= 0
    mask = counts[:, None] & (offs < hidden)[None, :]
    h = tl.load(hidden_ptr + row[:, None] * hidden + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    count = tl.maximum(tl.sum(counts.to(tl.float32), 0), 1.0)
    tl.store(mean_ptr + offs, tl.sum(h, 0) / count, mask=offs < hidden)


@kernel
def both_orders_kernel(
    # outputs
    out_ptr,  # [rows, padded_columns] e4m3, or None
    transposed_ptr,  # [padded_columns, padded_rows] e4m3, or None
    sum_ptr,  # [programs, padded_columns] fp32: sums over ROWS rows of share * matrix / power; or None
    # inputs
    matrix_ptr,  # [rows, columns] 16 bit or e4m3
    power_ptr,  # [rows] fp32, or None for 1
    share_ptr,  # [rows] fp32, with the power: rows of a share of 0 become 0
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    padded_rows,  # a multiple of 16
    columns,
    padded_columns,  # a multiple of 16
    stride,  # from row to row, a multiple of 8
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``out = matrix / power``, and the same transposed; 0 in rows that do not count and in what is padded."""
    offs_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = offs_row < counted_rows(count_ptr, first_row, rows)
    if power_ptr is not None:
        share = tl.load(share_ptr + offs_row, mask=in_rows, other=0.0)
        in_rows &= share != 0.0  # another row's power may be nan
        inverse = 1.0 / tl.load(power_ptr + offs_row, mask=in_rows, other=1.0)
    source = matrix_ptr + offs_row.to(tl.int64)[:, None] * (stride // 8 * 8) + offs[None, :]
    x = tl.load(source, mask=in_rows[:, None] & (offs < columns)[None, :], other=0.0).to(tl.float32)
    if power_ptr is not None:
        x *= inverse[:, None]
    e4m3 = to_e4m3(x)
    padded_rows, padded_columns = padded_rows // 16 * 16, padded_columns // 16 * 16  # so that the compiler knows it
    if out_ptr is not None:
        out = out_ptr + offs_row.to(tl.int64)[:, None] * padded_columns + offs[None, :]
        tl.store(out, e4m3, mask=(offs_row < rows)[:, None] & (offs < padded_columns)[None, :])
    if transposed_ptr is not None:
        out = transposed_ptr + offs.to(tl.int64)[:, None] * padded_rows + offs_row[None, :]
        mask = (offs < padded_columns)[:, None] & (offs_row < padded_rows)[None, :]
        tl.store(out, e4m3.T, mask=mask)
    if sum_ptr is not None:
        out = sum_ptr + tl.program_id(0).to(tl.int64) * padded_columns + offs
        tl.store(out, tl.sum(x * share[:, None], 0), mask=offs < padded_columns)


@kernel
def transposed_rows_kernel(
    # outputs
    out_ptr,  # [hidden, padded_rows] e4m3
    scale_ptr,  # [] fp32
    # inputs
    hidden_ptr,  # [rows, hidden] 16 bit
    mean_ptr,  # [hidden] fp32
    share_ptr,  # [rows] fp32
    most_ptr,  # [rows] fp32: the largest number of each row's
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    padded_rows,  # a multiple of 16
    hidden,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """``out = (share * (hidden - mean) / scale).T``, by one power of 2 for all rows."""
    counted = counted_rows(count_ptr, first_row, rows)
    most = tl.zeros((AT_ONCE,), dtype=tl.float32)
    for start in range(0, counted, AT_ONCE):
        offs_most = start + tl.arange(0, AT_ONCE)
        most = tl.maximum(most, tl.load(most_ptr + offs_most, mask=offs_most < counted, other=0.0))
    scale = power_of_2_above(tl.max(most, 0))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, scale)
    offs_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = offs_row < counted
    source = hidden_ptr + offs_row.to(tl.int64)[:, None] * hidden + offs[None, :]
    h = tl.load(source, mask=in_rows[:, None] & (offs < hidden)[None, :], other=0.0).to(tl.float32)
    h -= tl.load(mean_ptr + offs, mask=offs < hidden, other=0.0)[None, :]
    factor = tl.load(share_ptr + offs_row, mask=in_rows, other=0.0) / scale
    padded_rows = padded_rows // 16 * 16
    out = out_ptr + offs.to(tl.int64)[:, None] * padded_rows + offs_row[None, :]
    mask = (offs < hidden)[:, None] & (offs_row < padded_rows)[None, :]
    tl.store(out, to_e4m3(h * factor[:, None]).T, mask=mask)
