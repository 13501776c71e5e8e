"""Exact logits, in fp32, of few columns of each row, scaled and capped.

``clean_rows_kernel`` makes those of targets [rows], and copies hidden states [rows, hidden] for the matmuls:

    out[i] = source[order[i]] where target[i] >= 0, else 0;  logit[i] = out[i] @ weight[target[i]]

``dot_columns_kernel`` makes those of n entries, several for each row:

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
    tile_logit_ptr,  # [rows] fp32: the same, bit for bit as the matmul makes it; or None
    zeros_ptr,  # [zeros] int32 of 0, or None
    # inputs
    source_ptr,  # [rows, hidden]
    weight_ptr,  # [vocab, hidden], or None without logits
    bias_ptr,  # [vocab] or None
    target_ptr,  # [rows] int64, -1 where the row does not count, or ELSEWHERE
    order_ptr,  # [rows] int64: rows of the source, or None for its first
    # sizes
    rows,
    zeros,
    hidden,
    row_stride,
    column_stride,
    # scalars
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32 or None
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out[i] = source[order[i]]`` where a row counts, else 0; ``logit[i] = out[i] @ weight[target[i]]``"""
    offs_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = offs_row < rows
    row = offs_row.to(tl.int64)
    target = tl.load(target_ptr + row, mask=in_rows, other=-1)
    counts = target >= 0
    source_row = row
    if order_ptr is not None:
        source_row = tl.load(order_ptr + row, mask=in_rows, other=0)
    is_local = counts & (target < ELSEWHERE)
    column = tl.where(is_local, target, 0)
    if zeros_ptr is not None:
        for start in range(0, tl.where(tl.program_id(0) == 0, zeros, 0), BLOCK):
            offs = start + tl.arange(0, BLOCK)
            tl.store(zeros_ptr + offs, tl.zeros((BLOCK,), dtype=tl.int32), mask=offs < zeros)
    lanes = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    products = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    for start in range(0, hidden, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        in_hidden = (offs < hidden)[None, :]
        pointers = source_ptr + source_row[:, None] * row_stride + offs.to(tl.int64)[None, :] * column_stride
        value = tl.load(pointers, mask=counts[:, None] & in_hidden, other=0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * hidden + offs[None, :], value, mask=in_rows[:, None] & in_hidden)
        if logit_ptr is not None:
            pointers = weight_ptr + column[:, None] * hidden + offs[None, :]
            w = tl.load(pointers, mask=is_local[:, None] & in_hidden, other=0.0)
            lanes += value.to(tl.float32) * w.to(tl.float32)
            if tile_logit_ptr is not None:
                # the product of each row with all targets: tensor cores sum an element in the same order in any tile
                products = dot(value, w.T, products)
    if logit_ptr is not None:
        bias = 0.0
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + column, mask=is_local, other=0.0).to(tl.float32)
        row_scale = None
        if row_scale_ptr is not None:
            row_scale = tl.load(row_scale_ptr + row, mask=in_rows, other=1.0)
        x = tl.where(is_local, transform_logits(tl.sum(lanes, 1) + bias, logit_scale, softcap, row_scale), 0.0)
        tl.store(logit_ptr + row, x, mask=in_rows)
        if tile_logit_ptr is not None:
            is_diagonal = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
            x = tl.sum(tl.where(is_diagonal, products, 0.0), 1) + bias
            tl.store(tile_logit_ptr + row, transform_logits(x, logit_scale, softcap, row_scale), mask=in_rows)


@kernel
def dot_columns_kernel(
    # outputs
    logit_ptr,  # [entries] fp32, ``nothing`` where a column is -1, 0 where it is ELSEWHERE
    # inputs
    hidden_ptr,  # [rows, hidden]
    weight_ptr,  # [vocab, hidden]
    column_ptr,  # [entries] int64 or int32, -1 for none, or ELSEWHERE
    row_ptr,  # [entries] int64, of hidden and of row_scale; None where each row has ``count`` entries
    bias_ptr,  # [vocab] or None
    # sizes
    entries,
    count,
    hidden,
    hidden_row_stride,
    hidden_column_stride,
    weight_row_stride,
    weight_column_stride,
    # scalars
    nothing,
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32 or None
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gathered rows of the weight times gathered rows of hidden states, in fp32."""
    entry = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    column_id = tl.load(column_ptr + entry, mask=entry < entries, other=-1).to(tl.int64)
    has_column = column_id >= 0
    column = tl.where(has_column & (column_id < ELSEWHERE), column_id, 0)
    row = entry // count
    if row_ptr is not None:
        row = tl.load(row_ptr + entry, mask=has_column, other=0)
    lanes = tl.zeros((AT_ONCE, BLOCK), dtype=tl.float32)
    for start in range(0, hidden, BLOCK):
        offs = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = has_column[:, None] & (offs < hidden)[None, :]
        pointers = hidden_ptr + row[:, None] * hidden_row_stride + offs[None, :] * hidden_column_stride
        h = tl.load(pointers, mask=mask, other=0.0).to(weight_ptr.dtype.element_ty).to(tl.float32)
        pointers = weight_ptr + column[:, None] * weight_row_stride + offs[None, :] * weight_column_stride
        lanes += h * tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    x = tl.sum(lanes, 1)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, mask=has_column, other=0.0).to(tl.float32)
    row_scale = None
    if row_scale_ptr is not None:
        row_scale = tl.load(row_scale_ptr + row, mask=has_column, other=1.0)
    x = tl.where(column_id < ELSEWHERE, transform_logits(x, logit_scale, softcap, row_scale), 0.0)
    tl.store(logit_ptr + entry, tl.where(has_column, x, nothing), mask=entry < entries)
