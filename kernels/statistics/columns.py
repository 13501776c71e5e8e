"""Exact logits of few columns of each row, in fp32, after scale and cap.

``clean_rows_kernel`` makes the logits of targets [rows]. It also copies hidden states [rows, hidden] for the matmuls:

    out[i] = source[order[i]] where target[i] >= 0, else 0;  logit[i] = out[i] @ weight[target[i]]

``dot_columns_kernel`` makes the logits of entries. An entry is a row and a column; a row may have several entries:

    logit[e] = hidden[row[e]] @ weight[column[e]]
"""

import triton.language as tl

from ..common.blocks import ELSEWHERE, dot
from ..common.launcher import kernel
from ..common.transform import transform_logits


@kernel
def clean_rows_kernel(
    # outputs
    out_ptr,  # [rows, hidden] contiguous: the source, 0 where a row does not count
    logit_ptr,  # [rows] fp32: the target's logit, 0 where it is ELSEWHERE; or None
    tile_logit_ptr,  # [rows] fp32: the target's logit with the bits of ``exp_logits``'s accumulator; or None
    zeros_ptr,  # [zero_count] int32: memory that becomes 0; or None
    # inputs
    source_ptr,  # [rows, hidden]
    weight_ptr,  # [vocab, hidden], or None without logits
    bias_ptr,  # [vocab] or None
    target_ptr,  # [rows] int64, -1 where the row does not count, or ELSEWHERE
    order_ptr,  # [rows] int64: the row of the source for each row of ``out``; None: the source's first rows in order
    # sizes
    rows,
    zero_count,  # number of zeros to write
    hidden,  # hidden size
    source_row_stride,
    source_column_stride,
    # scalars
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32, or None for 1
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes BLOCK_ROWS rows of hidden states and their targets' logits. The first program zeroes ``zeros_ptr``."""
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < rows
    row = offs_row.to(tl.int64)
    target = tl.load(target_ptr + row, mask=in_rows, other=-1)
    is_counted = target >= 0
    source_row = row
    if order_ptr is not None:
        source_row = tl.load(order_ptr + row, mask=in_rows, other=0)
    is_local = is_counted & (target < ELSEWHERE)
    column = tl.where(is_local, target, 0)
    if zeros_ptr is not None:
        for block_start in range(0, tl.where(tl.program_id(0) == 0, zero_count, 0), BLOCK):
            offs = block_start + tl.arange(0, BLOCK)
            tl.store(zeros_ptr + offs, tl.zeros((BLOCK,), dtype=tl.int32), mask=offs < zero_count)
    lane_sums = tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32)
    products = tl.zeros((BLOCK_ROWS, BLOCK_ROWS), dtype=tl.float32)
    for block_start in range(0, hidden, BLOCK):
        offs = block_start + tl.arange(0, BLOCK)
        in_hidden = (offs < hidden)[None, :]
        pointers = (
            source_ptr + source_row[:, None] * source_row_stride + offs.to(tl.int64)[None, :] * source_column_stride
        )
        hidden_values = tl.load(pointers, mask=is_counted[:, None] & in_hidden, other=0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * hidden + offs[None, :], hidden_values, mask=in_rows[:, None] & in_hidden)
        if logit_ptr is not None:
            pointers = weight_ptr + column[:, None] * hidden + offs[None, :]
            weight_values = tl.load(pointers, mask=is_local[:, None] & in_hidden, other=0.0)
            lane_sums += hidden_values.to(tl.float32) * weight_values.to(tl.float32)
            if tile_logit_ptr is not None:
                # the product of each row and each row's target, of which the diagonal is read: tensor cores sum an
                # element in the same order in any tile
                products = dot(hidden_values, weight_values.T, products)
    if logit_ptr is not None:
        bias = 0.0
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + column, mask=is_local, other=0.0).to(tl.float32)
        row_scale = None
        if row_scale_ptr is not None:
            row_scale = tl.load(row_scale_ptr + row, mask=in_rows, other=1.0)
        x = tl.where(is_local, transform_logits(tl.sum(lane_sums, 1) + bias, logit_scale, softcap, row_scale), 0.0)
        tl.store(logit_ptr + row, x, mask=in_rows)
        if tile_logit_ptr is not None:
            is_diagonal = tl.arange(0, BLOCK_ROWS)[:, None] == tl.arange(0, BLOCK_ROWS)[None, :]
            x = tl.sum(tl.where(is_diagonal, products, 0.0), 1) + bias
            tl.store(tile_logit_ptr + row, transform_logits(x, logit_scale, softcap, row_scale), mask=in_rows)


@kernel
def dot_columns_kernel(
    # outputs
    logit_ptr,  # [entries] fp32, ``fill_value`` where the column is -1, 0 where it is ELSEWHERE
    # inputs
    hidden_ptr,  # [rows, hidden]
    weight_ptr,  # [vocab, hidden]
    column_ptr,  # [entries] int64 or int32, -1 for no column, or ELSEWHERE
    row_ptr,  # [entries] int64: an entry's row; None: each row in turn has ``entries_per_row`` entries
    bias_ptr,  # [vocab] or None
    # sizes
    entries,  # number of entries
    entries_per_row,  # number of entries of each row
    hidden,
    hidden_row_stride,
    hidden_column_stride,
    weight_row_stride,
    weight_column_stride,
    # scalars
    fill_value,  # float: logit of an entry without a column
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32 or None
    BLOCK_ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the logits of BLOCK_ENTRIES entries, from products in fp32 of rows of hidden states and of the weight."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK_ENTRIES + tl.arange(0, BLOCK_ENTRIES)
    column_id = tl.load(column_ptr + entry, mask=entry < entries, other=-1).to(tl.int64)
    has_column = column_id >= 0
    column = tl.where(has_column & (column_id < ELSEWHERE), column_id, 0)
    row = entry // entries_per_row
    if row_ptr is not None:
        row = tl.load(row_ptr + entry, mask=has_column, other=0)
    lane_sums = tl.zeros((BLOCK_ENTRIES, BLOCK), dtype=tl.float32)
    for block_start in range(0, hidden, BLOCK):
        offs = block_start + tl.arange(0, BLOCK).to(tl.int64)
        mask = has_column[:, None] & (offs < hidden)[None, :]
        pointers = hidden_ptr + row[:, None] * hidden_row_stride + offs[None, :] * hidden_column_stride
        hidden_values = tl.load(pointers, mask=mask, other=0.0).to(weight_ptr.dtype.element_ty).to(tl.float32)
        pointers = weight_ptr + column[:, None] * weight_row_stride + offs[None, :] * weight_column_stride
        lane_sums += hidden_values * tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    x = tl.sum(lane_sums, 1)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, mask=has_column, other=0.0).to(tl.float32)
    row_scale = None
    if row_scale_ptr is not None:
        row_scale = tl.load(row_scale_ptr + row, mask=has_column, other=1.0)
    x = tl.where(column_id < ELSEWHERE, transform_logits(x, logit_scale, softcap, row_scale), 0.0)
    tl.store(logit_ptr + entry, tl.where(has_column, x, fill_value), mask=entry < entries)
