"""Rows of hidden states [rows, hidden] as the matmuls take them, and the exact logits [rows] fp32 of their targets.

    out[i] = source[order[i]] where target[i] >= 0, else 0;  logit[i] = out[i] @ weight[target[i]]

The logits are scaled and capped.
"""

import triton.language as tl

from ..common.blocks import ELSEWHERE
from ..common.kernel import kernel
from ..common.stored import load_number
from ..common.transform import transform_logits


@kernel
def clean_rows_kernel(
    # outputs
    out_ptr,  # [rows, hidden] contiguous: the source, 0 where a row does not count, whatever stands there
    logit_ptr,  # [rows] fp32 as ``dot_columns_kernel`` makes them of one id a row, or None
    # inputs
    source_ptr,  # [rows, hidden]
    weight_ptr,  # [vocab, hidden], or None without logits
    bias_ptr,  # [vocab] or None
    target_ptr,  # [rows] int64, -1 where the row does not count, or ELSEWHERE
    order_ptr,  # [rows] int64: rows of the source, or None for its first
    # sizes
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
