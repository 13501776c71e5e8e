"""The logit of each row's target: a gathered row of the weight times the row of hidden states."""

import triton
import triton.language as tl

from .transform import transform_logits


@triton.jit
def target_logits_kernel(
    # outputs
    target_logit_ptr,  # [rows] fp32, of the row's target; of column 0 where the row does not count
    # inputs
    hidden_ptr,  # [rows, hidden]
    weight_ptr,  # [vocab, hidden]
    target_ptr,  # [rows] int64, -1 where the row does not count
    bias_ptr,  # [vocab] or None
    # sizes
    hidden,
    # scalars
    logit_scale,
    softcap,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.maximum(tl.load(target_ptr + row), 0)
    lanes = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, hidden, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        h = tl.load(hidden_ptr + row * hidden + offs, mask=offs < hidden, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + column * hidden + offs, mask=offs < hidden, other=0.0).to(tl.float32)
        lanes += h * w
    x = tl.sum(lanes, 0)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column).to(tl.float32)
    tl.store(target_logit_ptr + row, transform_logits(x, logit_scale, softcap))
