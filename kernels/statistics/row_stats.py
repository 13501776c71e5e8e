"""Statistics [rows] fp32 of rows of stored logits [rows, columns].

    log p = (x - start) + rest,  start = max x,  rest = -log sum exp(x - start),  entropy = -sum p log p

One program walks over a row.
"""

import triton
import triton.language as tl

from ..common.kernel import kernel
from ..common.stored import load_number, load_row
from ..common.transform import ln_2, log2_e, transform_logits


@triton.jit
def add_to_lanes(
    lane_max,  # of x, -inf where a lane has seen nothing
    lane_sum,  # of exp(x - max)
    lane_shifted,  # of exp(x - max) (x - max), where the entropy is wanted
    x,  # one more for each lane
    ENTROPY: tl.constexpr,
):
    new_max = tl.maximum(lane_max, x)
    offset = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2((lane_max - offset) * log2_e)
    z = x - offset
    e = tl.exp2(z * log2_e)
    if ENTROPY:
        moved = tl.where(lane_max == float("-inf"), 0.0, lane_max - offset)
        lane_shifted = rescale * (lane_shifted + lane_sum * moved) + tl.where(e > 0.0, e * z, 0.0)
    return new_max, lane_sum * rescale + e, lane_shifted


@triton.jit
def softmax_of_lanes(lane_max, lane_sum, lane_shifted):
    """The largest logit of all lanes, the logarithm of their sum relative to it, and the entropy."""
    row_max = tl.max(lane_max, 0)
    distance = lane_max - tl.where(row_max == float("-inf"), 0.0, row_max)
    weight = tl.exp2(distance * log2_e)
    row_sum = tl.sum(lane_sum * weight, 0)
    log_sum = tl.log2(row_sum) * ln_2
    shifted = tl.sum(tl.where(weight > 0.0, weight * (lane_shifted + lane_sum * distance), 0.0), 0)
    return row_max, log_sum, log_sum - shifted / row_sum


@kernel
def row_stats_kernel(
    # outputs
    lse_ptr,  # [rows] fp32 or None
    start_ptr,  # [rows] fp32: log p = (x - start) + rest, without the rounding of lse
    rest_ptr,  # [rows] fp32
    logprob_ptr,  # [rows] fp32, 0 where the row does not count; None without targets
    target_logit_ptr,  # [rows] fp32 or None
    entropy_ptr,  # [rows] fp32 or None
    weighted_sum_ptr,  # [rows] fp32: sum of omega * x, or None
    top_ptr,  # [rows] fp32 or None: the largest logit
    argmax_ptr,  # [rows] int32 or None: the first column that has it
    # inputs
    logits_ptr,  # [rows, columns], raw
    target_ptr,  # [rows] int64, -1 where the row does not count; None without targets
    bias_ptr,  # [columns] or None
    class_weights_ptr,  # [columns] or None for 1
    # sizes
    columns,
    stride,  # elements from row to row of logits
    # scalars
    logit_scale,  # float or None for 1
    softcap,  # float or None
    row_scale_ptr,  # [rows] fp32, or None for 1
    ratio,  # of the temperature to that of the logits, inverse; float or None for 1
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    row_scale = load_number(row_scale_ptr, row)
    if target_ptr is not None:
        target = tl.load(target_ptr + row)
        counts = (target >= 0) & (target < columns)
        raw = tl.load(logits_ptr + target, mask=counts, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            raw += tl.load(bias_ptr + target, mask=counts, other=0.0).to(tl.float32)
        target_logit = transform_logits(raw, logit_scale, softcap, row_scale)
        if target_logit_ptr is not None:
            tl.store(target_logit_ptr + row, target_logit)
    # every lane keeps a maximum and sums of its own, so the loop has no reduction in it
    lane_max = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    lane_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    lane_shifted = tl.zeros((BLOCK,), dtype=tl.float32)
    lane_weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    lane_argmax = tl.full((BLOCK,), 2147483647, dtype=tl.int32)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        inside = offs < columns
        x = load_row(logits_ptr, None, bias_ptr, row, 0, offs, inside, logit_scale, softcap, row_scale)
        if weighted_sum_ptr is not None:
            omega = tl.where(inside, 1.0, 0.0)
            if class_weights_ptr is not None:
                omega = tl.load(class_weights_ptr + offs, mask=inside, other=0.0).to(tl.float32)
            # selection, so that a logit of -inf with weight 0 does not become nan
            lane_weighted += tl.where(omega != 0.0, x * omega, 0.0)
        x = tl.where(inside, x, float("-inf"))  # the cap turns the padding's -inf into a number
        if argmax_ptr is not None:
            lane_argmax = tl.where(x > lane_max, offs, lane_argmax)
        if ratio is not None:
            x = x * ratio
        lane_max, lane_sum, lane_shifted = add_to_lanes(lane_max, lane_sum, lane_shifted, x, entropy_ptr is not None)
    row_max, log_sum, entropy = softmax_of_lanes(lane_max, lane_sum, lane_shifted)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, row_max + log_sum)
    tl.store(start_ptr + row, row_max)
    tl.store(rest_ptr + row, -log_sum)
    if logprob_ptr is not None:
        if ratio is not None:
            target_logit = target_logit * ratio
        # not target_logit - lse, which has lost what lies below an ulp of the logits
        tl.store(logprob_ptr + row, tl.where(counts, (target_logit - row_max) - log_sum, 0.0))
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)
    if weighted_sum_ptr is not None:
        tl.store(weighted_sum_ptr + row, tl.sum(lane_weighted, 0))
    if argmax_ptr is not None:
        tl.store(top_ptr + row, row_max)
        tl.store(argmax_ptr + row, tl.min(tl.where(lane_max == row_max, lane_argmax, 2147483647), 0))
