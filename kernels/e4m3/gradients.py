"""Operands in e4m3 of the two products that make gradients of stored exponentials E.

The gradient of a row's logits is the sum of two parts. The sparse part has the target and the row's heavy ids, at most
1 + SLOTS numbers in fp32; their exponentials are set to 0. The dense part is ``factor * E`` of all other ids, in e4m3:
each row of E is divided by a power of 2, ``divisor``, after which its largest number is at most 448. The divisor comes
from the sums over strips of columns, which are upper bounds of the numbers in them, so no pass over E finds it.

dweight sums over rows, so a row's divisor has to be in the other operand, ``hidden_factor = factor * divisor``
times the row's hidden state. These have one power of 2 for all rows, and are rounded without a vector ``m``, which is
about their mean:

    E.T @ (factor * hidden) = e4m3(E / divisor).T @ e4m3(hidden_factor * (hidden - m)) + outer(factor @ E, m)

which holds for any m. Hopper's e4m3 products keep 13 bits of a sum. What all hidden states have in common makes large
sums, which the sparse part then nearly cancels: without m dweight erred by 1e-2 to 7e-2 on Zipf heads.
"""

import triton
import triton.language as tl

from ...core import tiles
from ..common.blocks import counted_rows, to_e4m3
from ..common.launcher import kernel
from ..common.transform import log2_e

LARGEST, LEAST = tl.constexpr(tiles.LARGEST_E4M3), tl.constexpr(tiles.LEAST_SCALE)


@triton.jit
def divisor_for(x):
    """The power of 2 by which x is divided, so that it is above 224 and at most 448; nan where x is not finite."""
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(x / LARGEST, LEAST)))) + x * 0.0


@kernel
def split_sparse_kernel(
    # in and out
    exp_ptr,  # [rows, vocab] 16 bit, as level_rows leaves them: 0 at targets; becomes 0 at heavy ids
    softmax_factor_ptr,  # [rows] fp32, which is multiplied by the divisor and the weight's scale
    # outputs
    sparse_id_ptr,  # [rows, 1 + SLOTS] int32: the target and heavy ids, -1 for none
    sparse_dlogit_ptr,  # [rows, 1 + SLOTS] fp32: gradients of their logits
    divisor_ptr,  # [rows] fp32: power of 2 for the row's exponentials
    hidden_factor_ptr,  # [rows] fp32: softmax factor times divisor, 0 where a row does not count
    row_max_ptr,  # [rows] fp32: max |hidden_factor * (hidden - mean)|; None with hidden_ptr and mean_ptr
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
    """Writes the sparse part of BLOCK_ROWS rows, and the divisor of the dense part."""
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
    dense_sum = total  # of the strip, without the target and heavy ids
    exp = tl.exp2((target_logit - level) * log2_e)
    dense_sum -= tl.where(strip[None, :] == tl.where(target >= 0, target // STRIP, -1)[:, None], exp[:, None], 0.0)

    slot = tl.arange(0, SLOTS)
    offs_slot = wide_row[:, None] * SLOTS + slot[None, :]
    ids = tl.load(heavy_id_ptr + offs_slot, mask=in_rows[:, None], other=-1)
    logit = tl.load(heavy_logit_ptr + offs_slot, mask=in_rows[:, None], other=0.0)
    is_heavy = ids >= 0
    sparse_dlogit = tl.where(is_heavy, factor[:, None] * tl.exp2((logit - level[:, None]) * log2_e), 0.0)
    # rows behind those that count have no sparse part
    in_chunk, in_vocab = offs_row < rows, (target >= 0) & (target < vocab)
    offs_sparse = wide_row * (SLOTS + 1)
    tl.store(sparse_id_ptr + offs_sparse, tl.where(in_vocab, target, -1).to(tl.int32), mask=in_chunk)
    tl.store(
        sparse_dlogit_ptr + offs_sparse, tl.load(target_factor_ptr + offs_row, mask=in_rows, other=0.0), mask=in_chunk
    )
    offs_sparse = offs_sparse[:, None] + 1 + slot[None, :]
    tl.store(sparse_id_ptr + offs_sparse, ids, mask=in_chunk[:, None])
    tl.store(sparse_dlogit_ptr + offs_sparse, sparse_dlogit, mask=in_chunk[:, None])
    zero = tl.zeros((BLOCK_ROWS, SLOTS), dtype=exp_ptr.dtype.element_ty)
    tl.store(exp_ptr + wide_row[:, None] * stride + ids, zero, mask=is_heavy)
    num_slots = tl.max(tl.max(tl.where(is_heavy, slot[None, :] + 1, 0), 1), 0)  # that some row uses
    for i in range(0, num_slots):
        heavy_id = tl.load(heavy_id_ptr + wide_row * SLOTS + i, mask=in_rows, other=-1)
        heavy_logit = tl.load(heavy_logit_ptr + wide_row * SLOTS + i, mask=in_rows, other=0.0)
        exp = tl.where(heavy_id >= 0, tl.exp2((heavy_logit - level) * log2_e), 0.0)
        dense_sum -= tl.where(strip[None, :] == (heavy_id // STRIP)[:, None], exp[:, None], 0.0)
    # the sums and their differences are rounded
    divisor = divisor_for(tl.max(tl.maximum(dense_sum, 0.0) + total * 2.0**-20, 1))
    tl.store(divisor_ptr + offs_row, divisor, mask=in_chunk)
    hidden_factor = tl.where(target >= 0, factor * divisor, 0.0)
    tl.store(hidden_factor_ptr + offs_row, hidden_factor, mask=in_chunk)
    tl.store(softmax_factor_ptr + offs_row, hidden_factor * tl.load(weight_scale_ptr), mask=in_rows)

    if hidden_ptr is not None:
        largest = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
        for start in range(0, hidden, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            in_hidden = in_rows[:, None] & (offs < hidden)[None, :]
            h = tl.load(hidden_ptr + wide_row[:, None] * hidden + offs[None, :], mask=in_hidden, other=0.0)
            mean = tl.load(mean_ptr + offs, mask=offs < hidden, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(h.to(tl.float32) - mean[None, :]), 1))
        tl.store(row_max_ptr + offs_row, largest * tl.abs(hidden_factor), mask=in_chunk)


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
    sum_ptr,  # [programs, padded_columns] fp32: sums over ROWS rows of hidden_factor * matrix / divisor; or None
    # inputs
    matrix_ptr,  # [rows, columns] 16 bit or e4m3
    divisor_ptr,  # [rows] fp32, or None for 1
    hidden_factor_ptr,  # [rows] fp32, with a divisor: rows where it is 0 become 0
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
    """``out = matrix / divisor``, and the same transposed; 0 in rows that do not count and in what is padded."""
    offs_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = offs_row < counted_rows(count_ptr, first_row, rows)
    if divisor_ptr is not None:
        hidden_factor = tl.load(hidden_factor_ptr + offs_row, mask=in_rows, other=0.0)
        in_rows &= hidden_factor != 0.0  # the divisor of other rows may be nan
        inverse = 1.0 / tl.load(divisor_ptr + offs_row, mask=in_rows, other=1.0)
    source = matrix_ptr + offs_row.to(tl.int64)[:, None] * (stride // 8 * 8) + offs[None, :]
    x = tl.load(source, mask=in_rows[:, None] & (offs < columns)[None, :], other=0.0).to(tl.float32)
    if divisor_ptr is not None:
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
        tl.store(out, tl.sum(x * hidden_factor[:, None], 0), mask=offs < padded_columns)


@kernel
def transposed_rows_kernel(
    # outputs
    out_ptr,  # [hidden, padded_rows] e4m3
    scale_ptr,  # [] fp32
    # inputs
    hidden_ptr,  # [rows, hidden] 16 bit
    mean_ptr,  # [hidden] fp32
    hidden_factor_ptr,  # [rows] fp32
    row_max_ptr,  # [rows] fp32: max |hidden_factor * (hidden - mean)|
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
    """``out = (hidden_factor * (hidden - mean) / scale).T`` in e4m3; the scale is one power of 2 for all rows."""
    counted = counted_rows(count_ptr, first_row, rows)
    largest = tl.zeros((AT_ONCE,), dtype=tl.float32)
    for start in range(0, counted, AT_ONCE):
        offs_max = start + tl.arange(0, AT_ONCE)
        largest = tl.maximum(largest, tl.load(row_max_ptr + offs_max, mask=offs_max < counted, other=0.0))
    scale = divisor_for(tl.max(largest, 0))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, scale)
    offs_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = offs_row < counted
    source = hidden_ptr + offs_row.to(tl.int64)[:, None] * hidden + offs[None, :]
    h = tl.load(source, mask=in_rows[:, None] & (offs < hidden)[None, :], other=0.0).to(tl.float32)
    h -= tl.load(mean_ptr + offs, mask=offs < hidden, other=0.0)[None, :]
    factor = tl.load(hidden_factor_ptr + offs_row, mask=in_rows, other=0.0) / scale
    padded_rows = padded_rows // 16 * 16
    out = out_ptr + offs.to(tl.int64)[:, None] * padded_rows + offs_row[None, :]
    mask = (offs < hidden)[:, None] & (offs_row < padded_rows)[None, :]
    tl.store(out, to_e4m3(h * factor[:, None]).T, mask=mask)
