"""Exact logits [rows, count] fp32 of some columns of each row.

    logit[i, k] = hidden[i] @ weight[ids[i, k]]

The logits are scaled and capped.
"""

import triton.language as tl

from ..common.blocks import ELSEWHERE
from ..common.kernel import kernel
from ..common.stored import load_number
from ..common.transform import transform_logits


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
