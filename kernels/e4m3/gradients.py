"""Operands in e4m3 of the two products that make gradients from stored exponentials E.

The gradient of a row's logits is the sum of two parts. The sparse part has the gradients at the target and at the row's
heavy ids (``heavy.py``), at most 1 + SLOTS numbers in fp32; E is set to 0 at these ids. The dense part is ``factor *
E`` of all other ids, in e4m3: a power of 2, ``divisor``, divides a row of E, so that the row's largest number is at
most 448. The divisor comes from the sums of E over strips of columns: a sum bounds the numbers in its strip.

dweight sums over rows, so its other operand must contain the row's divisor: this operand is the row's hidden state
times ``hidden_factor = factor * divisor``, scaled by one power of 2 for all rows. A vector ``m``, about the mean of the
hidden states, is subtracted from hidden states before they are rounded. For any m

    E.T @ (factor * hidden) = e4m3(E / divisor).T @ e4m3(hidden_factor * (hidden - m)) + outer(factor @ E, m)

up to rounding. Hopper's e4m3 products keep 13 bits of a sum. The common component of all hidden states makes large
sums, which the sparse part nearly cancels: without m, dweight erred by 1e-2 to 7e-2 on Zipf heads.
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
    """Returns the power of 2 that divides x so that the quotient is above 224 and at most 448; nan if x is not
    finite."""
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(x / LARGEST, LEAST)))) + x * 0.0


@kernel
def split_sparse_kernel(
    # in and out
    exp_ptr,  # [rows, vocab] 16 bit exponentials, which ``level_rows`` has set to 0 at targets: become 0 at heavy ids
    softmax_factor_ptr,  # [rows] fp32: multiplied by the divisor and the weight's scale
    # outputs
    sparse_id_ptr,  # [rows, 1 + SLOTS] int32: the target and heavy ids, -1 for no id
    sparse_dlogit_ptr,  # [rows, 1 + SLOTS] fp32: gradients of their logits
    divisor_ptr,  # [rows] fp32: power of 2 that divides the row's exponentials
    hidden_factor_ptr,  # [rows] fp32: softmax factor times divisor, 0 where a row does not count
    row_max_ptr,  # [rows] fp32: max |hidden_factor * (hidden - mean)|; None without ``hidden_ptr``
    # inputs
    hidden_ptr,  # [rows, hidden] 16 bit, or None
    mean_ptr,  # [hidden] fp32; None without ``hidden_ptr``
    heavy_id_ptr,  # [rows, SLOTS] int32: heavy ids, then -1
    heavy_logit_ptr,  # [rows, SLOTS] fp32: their logits
    strip_offset_ptr,  # [strips, rows] fp32: offset of a strip whose sum is negative
    strip_sum_ptr,  # [strips, rows] fp32: sums of exponentials, with a minus sign where a strip has its own offset
    level_ptr,  # [rows] fp32: the logit that a row's exponentials are relative to
    target_ptr,  # [rows] int64, -1 where a row does not count
    target_logit_ptr,  # [rows] fp32: the target's logit, the offset of strips whose sum is positive
    target_factor_ptr,  # [rows] fp32: gradient of the target's logit
    weight_scale_ptr,  # [] fp32
    count_ptr,  # [] int64: number of rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    vocab,
    strips,  # number of strips
    strip_stride,  # elements from strip to strip
    stride,  # elements from row to row of ``exp_ptr``
    hidden,  # hidden size
    SLOTS: tl.constexpr,  # most heavy ids of a row
    STRIP: tl.constexpr,  # columns of a strip
    BLOCK_ROWS: tl.constexpr,
    STRIPS: tl.constexpr,  # power of 2 from the number of strips on
    BLOCK: tl.constexpr,  # columns of hidden states that are read at a time
):
    """Writes the sparse part of the gradient of BLOCK_ROWS rows' logits, and the divisors of the rows' dense part."""
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
    strip_sum = tl.load(strip_sum_ptr + offs_strip, mask=mask, other=0.0)
    offset = tl.load(strip_offset_ptr + offs_strip, mask=mask & (strip_sum < 0.0), other=0.0)
    offset = tl.where(strip_sum < 0.0, offset, target_logit[:, None])
    strip_sum = tl.abs(strip_sum) * tl.exp2((offset - level[:, None]) * log2_e)
    dense_sum = strip_sum  # sum of a strip, from which the target and heavy ids are subtracted
    id_exp = tl.exp2((target_logit - level) * log2_e)
    dense_sum -= tl.where(strip[None, :] == tl.where(target >= 0, target // STRIP, -1)[:, None], id_exp[:, None], 0.0)

    slot = tl.arange(0, SLOTS)
    offs_slot = wide_row[:, None] * SLOTS + slot[None, :]
    ids = tl.load(heavy_id_ptr + offs_slot, mask=in_rows[:, None], other=-1)
    logit = tl.load(heavy_logit_ptr + offs_slot, mask=in_rows[:, None], other=0.0)
    is_heavy = ids >= 0
    sparse_dlogit = tl.where(is_heavy, factor[:, None] * tl.exp2((logit - level[:, None]) * log2_e), 0.0)
    # rows after the last that counts have no sparse part
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
    num_slots = tl.max(tl.max(tl.where(is_heavy, slot[None, :] + 1, 0), 1), 0)  # most heavy ids of one of these rows
    for i in range(0, num_slots):
        heavy_id = tl.load(heavy_id_ptr + wide_row * SLOTS + i, mask=in_rows, other=-1)
        heavy_logit = tl.load(heavy_logit_ptr + wide_row * SLOTS + i, mask=in_rows, other=0.0)
        id_exp = tl.where(heavy_id >= 0, tl.exp2((heavy_logit - level) * log2_e), 0.0)
        dense_sum -= tl.where(strip[None, :] == (heavy_id // STRIP)[:, None], id_exp[:, None], 0.0)
    # a margin for the rounding of sums and differences
    divisor = divisor_for(tl.max(tl.maximum(dense_sum, 0.0) + strip_sum * 2.0**-20, 1))
    tl.store(divisor_ptr + offs_row, divisor, mask=in_chunk)
    hidden_factor = tl.where(target >= 0, factor * divisor, 0.0)
    tl.store(hidden_factor_ptr + offs_row, hidden_factor, mask=in_chunk)
    tl.store(softmax_factor_ptr + offs_row, hidden_factor * tl.load(weight_scale_ptr), mask=in_rows)

    if hidden_ptr is not None:
        largest = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
        for start in range(0, hidden, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            in_hidden = in_rows[:, None] & (offs < hidden)[None, :]
            hidden_tile = tl.load(hidden_ptr + wide_row[:, None] * hidden + offs[None, :], mask=in_hidden, other=0.0)
            mean = tl.load(mean_ptr + offs, mask=offs < hidden, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(hidden_tile.to(tl.float32) - mean[None, :]), 1))
        tl.store(row_max_ptr + offs_row, largest * tl.abs(hidden_factor), mask=in_chunk)


@kernel
def mean_of_rows_kernel(
    # outputs
    mean_ptr,  # [hidden] fp32
    # inputs
    hidden_ptr,  # [rows, hidden] 16 bit
    target_ptr,  # [rows] int64, -1 where a row does not count
    # sizes
    rows,  # number of rows
    hidden,  # hidden size
    SAMPLED: tl.constexpr,  # number of rows that are read
    COLUMNS: tl.constexpr,  # columns of a program
):
    """Takes SAMPLED rows at equal distances and writes the mean of the rows among them that count; 0 if no row does."""
    row = tl.arange(0, SAMPLED).to(tl.int64) * rows // SAMPLED
    offs = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_counted = tl.load(target_ptr + row) >= 0
    mask = is_counted[:, None] & (offs < hidden)[None, :]
    hidden_tile = tl.load(hidden_ptr + row[:, None] * hidden + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    num_counted = tl.maximum(tl.sum(is_counted.to(tl.float32), 0), 1.0)
    tl.store(mean_ptr + offs, tl.sum(hidden_tile, 0) / num_counted, mask=offs < hidden)


@kernel
def both_orders_kernel(
    # outputs
    out_ptr,  # [rows, padded_columns] e4m3, or None
    transposed_ptr,  # [padded_columns, padded_rows] e4m3, or None
    sum_ptr,  # [programs, padded_columns] fp32: sums over ROWS rows of hidden_factor * matrix / divisor; or None
    # inputs
    matrix_ptr,  # [rows, columns] 16 bit or e4m3
    divisor_ptr,  # [rows] fp32, or None for 1
    hidden_factor_ptr,  # [rows] fp32: a row whose factor is 0 becomes 0; None without a divisor
    count_ptr,  # [] int64: number of rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    padded_rows,  # a multiple of 16
    columns,
    padded_columns,  # a multiple of 16
    stride,  # elements from row to row of the matrix, a multiple of 8
    ROWS: tl.constexpr,  # rows of a program
    COLUMNS: tl.constexpr,  # columns of a program
):
    """Writes ``matrix / divisor`` and its transpose in e4m3, with 0 in rows that do not count and in the padding.
    Also writes the sum of each ROWS rows of ``hidden_factor * matrix / divisor``, fp32."""
    offs_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = offs_row < counted_rows(count_ptr, first_row, rows)
    if divisor_ptr is not None:
        hidden_factor = tl.load(hidden_factor_ptr + offs_row, mask=in_rows, other=0.0)
        in_rows &= hidden_factor != 0.0  # the divisor of a row with a factor of 0 may be nan
        inverse = 1.0 / tl.load(divisor_ptr + offs_row, mask=in_rows, other=1.0)
    source_pointers = matrix_ptr + offs_row.to(tl.int64)[:, None] * (stride // 8 * 8) + offs[None, :]
    x = tl.load(source_pointers, mask=in_rows[:, None] & (offs < columns)[None, :], other=0.0).to(tl.float32)
    if divisor_ptr is not None:
        x *= inverse[:, None]
    e4m3 = to_e4m3(x)
    padded_rows, padded_columns = padded_rows // 16 * 16, padded_columns // 16 * 16  # so that the compiler knows it
    if out_ptr is not None:
        out_pointers = out_ptr + offs_row.to(tl.int64)[:, None] * padded_columns + offs[None, :]
        tl.store(out_pointers, e4m3, mask=(offs_row < rows)[:, None] & (offs < padded_columns)[None, :])
    if transposed_ptr is not None:
        out_pointers = transposed_ptr + offs.to(tl.int64)[:, None] * padded_rows + offs_row[None, :]
        mask = (offs < padded_columns)[:, None] & (offs_row < padded_rows)[None, :]
        tl.store(out_pointers, e4m3.T, mask=mask)
    if sum_ptr is not None:
        out_pointers = sum_ptr + tl.program_id(0).to(tl.int64) * padded_columns + offs
        tl.store(out_pointers, tl.sum(x * hidden_factor[:, None], 0), mask=offs < padded_columns)


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
    count_ptr,  # [] int64: number of rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    padded_rows,  # a multiple of 16
    hidden,  # hidden size
    ROWS: tl.constexpr,  # rows of a program
    COLUMNS: tl.constexpr,  # columns of a program
    BLOCK_MAX: tl.constexpr,  # number of rows whose maxima are read at a time
):
    """Writes ``(hidden_factor * (hidden - mean) / scale).T`` in e4m3, and the scale, one power of 2 for all rows."""
    num_counted = counted_rows(count_ptr, first_row, rows)
    largest = tl.zeros((BLOCK_MAX,), dtype=tl.float32)
    for start in range(0, num_counted, BLOCK_MAX):
        offs_max = start + tl.arange(0, BLOCK_MAX)
        largest = tl.maximum(largest, tl.load(row_max_ptr + offs_max, mask=offs_max < num_counted, other=0.0))
    scale = divisor_for(tl.max(largest, 0))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, scale)
    offs_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = offs_row < num_counted
    source_pointers = hidden_ptr + offs_row.to(tl.int64)[:, None] * hidden + offs[None, :]
    hidden_tile = tl.load(source_pointers, mask=in_rows[:, None] & (offs < hidden)[None, :], other=0.0).to(tl.float32)
    hidden_tile -= tl.load(mean_ptr + offs, mask=offs < hidden, other=0.0)[None, :]
    factor = tl.load(hidden_factor_ptr + offs_row, mask=in_rows, other=0.0) / scale
    padded_rows = padded_rows // 16 * 16
    out_pointers = out_ptr + offs.to(tl.int64)[:, None] * padded_rows + offs_row[None, :]
    mask = (offs < hidden)[:, None] & (offs_row < padded_rows)[None, :]
    tl.store(out_pointers, to_e4m3(hidden_tile * factor[:, None]).T, mask=mask)
