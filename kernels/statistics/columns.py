"""Exact logits fp32 of few columns of each row, scaled and capped.

Of targets [rows], with the rows of hidden states [rows, hidden] as the matmuls take them, ``clean_rows_kernel``:

    out[i] = source[order[i]] where target[i] >= 0, else 0;  logit[i] = out[i] @ weight[target[i]]

Of ids [rows, count], ``dot_columns_kernel``:

    logit[i, k] = hidden[i] @ weight[ids[i, k]]
"""

import triton.language as tl

from ..common.blocks import ELSEWHERE
from ..common.launcher import kernel
from ..common.transform import load_number, transform_logits


@kernel
def clean_rows_kernel(
    # outputs
    out_ptr,  # [rows, hidden] contiguous: the source, 0 where a row does not count, whatever stands there
    logit_ptr,  # [rows] fp32 as ``dot_columns_kernel`` makes them of one id a row, or None
    zeros_ptr,  # [zeros] int32 of 0, or None
    # inputs
    source_ptr,  # [rows, hidden]
    weight_ptr,  # [vocab, hidden], or None without logits
    bias_ptr,  # [vocab] or None
    target_ptr,  # [rows] int64, -1 where the row does not count, or ELSEWHERE
    order_ptr,  # [rows] int64: rows of the source, or None for its first
    # sizes
    zeros,
    hidden,
    row_stride,
    column_stride,
    # scalars
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32 or None
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    kept = tl.where(target >= 0, hidden, 0)
    source_row = row
    if order_ptr is not None:
        source_row = tl.load(order_ptr + row)
    here = target < ELSEWHERE
    column = tl.where(here, tl.maximum(target, 0), 0)
    if zeros_ptr is not None:
        for start in range(0, tl.where(row == 0, zeros, 0), BLOCK):
            offs = start + tl.arange(0, BLOCK)
            tl.store(zeros_ptr + offs, tl.zeros((BLOCK,), dtype=tl.int32), mask=offs < zeros)
    lanes = tl.zeros((1, BLOCK), dtype=tl.float32)
    for start in range(0, hidden, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        at = source_ptr + source_row * row_stride + offs.to(tl.int64) * column_stride
        value = tl.load(at, mask=offs < kept, other=0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * hidden + offs, value, mask=offs < hidden)
        if logit_ptr is not None:
            w = tl.load(weight_ptr + column * hidden + offs, mask=offs < kept, other=0.0).to(tl.float32)
            lanes += tl.where(target >= 0, value.to(tl.float32) * w, 0.0)[None, :]
    if logit_ptr is not None:
        x = tl.sum(lanes, 1)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + column).to(tl.float32)
        x = tl.where(here, transform_logits(x, logit_scale, softcap, load_number(row_scale_ptr, row)), 0.0)
        tl.store(logit_ptr + row + tl.arange(0, 1), x)


@kernel
def dot_columns_kernel(
    # outputs
    logit_ptr,  # [rows, count] fp32, where an id is -1 column 0's of a row of zeros, 0 where it is ELSEWHERE
    # inputs
    hidden_ptr,  # [rows, hidden]
    weight_ptr,  # [vocab, hidden]
    ids_ptr,  # [rows, count] int64, -1 for none, or ELSEWHERE
    bias_ptr,  # [vocab] or None
    # sizes
    hidden,
    hidden_stride,
    count,
    # scalars
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32 or None
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gathered rows of the weight times the row of hidden states, in fp32."""
    row = tl.program_id(0).to(tl.int64)
    row_scale = load_number(row_scale_ptr, row)
    k = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    asked = tl.load(ids_ptr + row * count + k, mask=k < count, other=0)
    here = asked < ELSEWHERE
    column = tl.where(here, tl.maximum(asked, 0), 0)
    lanes = tl.zeros((AT_ONCE, BLOCK), dtype=tl.float32)
    for start in range(0, hidden, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        h = tl.load(hidden_ptr + row * hidden_stride + offs, mask=offs < hidden, other=0.0).to(tl.float32)
        at = weight_ptr + column[:, None] * hidden + offs[None, :]
        w = tl.load(at, mask=(k < count)[:, None] & (offs < hidden)[None, :], other=0.0).to(tl.float32)
        # whatever stands in a row that does not count
        lanes += tl.where((asked >= 0)[:, None], h[None, :] * w, 0.0)
    x = tl.sum(lanes, 1)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column).to(tl.float32)
    x = tl.where(here, transform_logits(x, logit_scale, softcap, row_scale), 0.0)
    tl.store(logit_ptr + row * count + k, x, mask=k < count)


@kernel
def pick_columns_kernel(
    # outputs
    logit_ptr,  # [rows, count] fp32, 0 where an id is -1
    # inputs
    logits_ptr,  # [rows, vocab], before bias and transform
    ids_ptr,  # [rows, count] int64, -1 for none
    bias_ptr,  # [vocab] or None
    # sizes
    count,
    stride,
    # scalars
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32 or None
    BLOCK: tl.constexpr,
):
    """Logits of some columns of each row, out of stored raw logits."""
    row = tl.program_id(0).to(tl.int64)
    row_scale = load_number(row_scale_ptr, row)
    k = tl.arange(0, BLOCK)
    column = tl.load(ids_ptr + row * count + k, mask=k < count, other=-1)
    x = tl.load(logits_ptr + row * stride + column, mask=column >= 0, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, mask=column >= 0, other=0.0).to(tl.float32)
    tl.store(logit_ptr + row * count + k, transform_logits(x, logit_scale, softcap, row_scale), mask=k < count)
