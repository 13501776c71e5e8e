"""Rows whose softmax is over a set of columns per row.

    logit[e] = hidden[row[e]] @ weight[column[e]],  lse[i] = log sum_{begin[i] <= e < end[i]} exp(logit[e])

Logits [n] fp32 are those of all sets' entries, statistics [rows] fp32.
"""

import triton.language as tl

from ..common.kernel import kernel
from ..common.transform import transform_logits
from .row_stats import add_to_lanes, softmax_of_lanes


@kernel
def kept_logits_kernel(
    # outputs
    logit_ptr,  # [n] fp32, -inf where an entry is none
    # inputs
    hidden_ptr,  # [rows, hidden]
    weight_ptr,  # [vocab, hidden]
    bias_ptr,  # [vocab] or None
    row_ptr,  # [n] int64, of hidden and of row_scale
    column_ptr,  # [n] int32, -1 for none
    # sizes
    entries,
    hidden,
    row_stride,
    column_stride,
    weight_row_stride,
    weight_column_stride,
    # scalars
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32 or None
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gathered rows of the weight times gathered rows of hidden states, in fp32."""
    entry = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    column = tl.load(column_ptr + entry, mask=entry < entries, other=-1).to(tl.int64)
    here = column >= 0
    source = tl.load(row_ptr + entry, mask=here, other=0)
    lanes = tl.zeros((AT_ONCE, BLOCK), dtype=tl.float32)
    for start in range(0, hidden, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = here[:, None] & (offs < hidden)[None, :]
        at = hidden_ptr + source[:, None] * row_stride + offs.to(tl.int64)[None, :] * column_stride
        h = tl.load(at, mask=mask, other=0.0).to(weight_ptr.dtype.element_ty).to(tl.float32)
        at = weight_ptr + column[:, None] * weight_row_stride + offs.to(tl.int64)[None, :] * weight_column_stride
        w = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        lanes += h * w
    x = tl.sum(lanes, 1)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, mask=here, other=0.0).to(tl.float32)
    row_scale = None
    if row_scale_ptr is not None:
        row_scale = tl.load(row_scale_ptr + tl.load(row_ptr + entry, mask=here, other=0), mask=here, other=1.0)
    x = transform_logits(x, logit_scale, softcap, row_scale)
    tl.store(logit_ptr + entry, tl.where(here, x, float("-inf")), mask=entry < entries)


@kernel
def kept_stats_kernel(
    # outputs, of rows that keep columns only
    lse_ptr,  # [rows] fp32, as all but argmax
    start_ptr,  # log p = (x - start) + rest
    rest_ptr,
    logprob_ptr,
    target_logit_ptr,  # 0 where the target is elsewhere; None where another launch writes it
    entropy_ptr,  # or None
    top_ptr,  # or None
    argmax_ptr,  # [rows] int32 or None: the first column that has the largest logit
    # inputs
    logit_ptr,  # [n] fp32
    column_ptr,  # [n] int32, -1 for none
    begin_ptr,  # [rows] int64: where a row's entries begin
    end_ptr,  # [rows] int64: and end
    target_ptr,  # [rows] int64
    # scalars
    ratio,  # of the temperature to that of the logits, inverse; float or None for 1
    FILL: tl.constexpr,  # 0 for a row that keeps none, instead of what is there
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(begin_ptr + row), tl.load(end_ptr + row)
    target = tl.load(target_ptr + row)
    lane_max = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    lane_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    lane_shifted = tl.zeros((BLOCK,), dtype=tl.float32)
    lane_target = tl.zeros((BLOCK,), dtype=tl.float32)
    lane_argmax = tl.full((BLOCK,), 2147483647, dtype=tl.int32)
    for first in range(begin, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        column = tl.load(column_ptr + entry, mask=entry < end, other=-1)
        here = column >= 0
        x = tl.load(logit_ptr + entry, mask=here, other=float("-inf"))
        lane_target += tl.where(here & (column == target), x, 0.0)
        if argmax_ptr is not None:
            same = tl.where(x == lane_max, tl.minimum(lane_argmax, column), lane_argmax)
            lane_argmax = tl.where(x > lane_max, column, tl.where(here, same, lane_argmax))
        if ratio is not None:
            x = x * ratio
        lane_max, lane_sum, lane_shifted = add_to_lanes(lane_max, lane_sum, lane_shifted, x, entropy_ptr is not None)
    row_max, log_sum, entropy = softmax_of_lanes(lane_max, lane_sum, lane_shifted)
    target_logit = tl.sum(lane_target, 0)
    # a branch would be on what is loaded
    one = row + tl.arange(0, 1)
    mine = one < tl.where((end > begin) | FILL, row + 1, row)
    if FILL:
        row_max = tl.where(end > begin, row_max, 0.0)
        log_sum = tl.where(end > begin, log_sum, 0.0)
        entropy = tl.where(end > begin, entropy, 0.0)
    if target_logit_ptr is not None:
        tl.store(target_logit_ptr + one, target_logit, mask=mine)
    tl.store(lse_ptr + one, row_max + log_sum, mask=mine)
    tl.store(start_ptr + one, row_max, mask=mine)
    tl.store(rest_ptr + one, -log_sum, mask=mine)
    if ratio is not None:
        target_logit = target_logit * ratio
    tl.store(logprob_ptr + one, (target_logit - row_max) - log_sum, mask=mine)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + one, entropy, mask=mine)
    if argmax_ptr is not None:
        argmax = tl.min(tl.where(lane_max == row_max, lane_argmax, 2147483647), 0)
        tl.store(top_ptr + one, row_max, mask=mine)
        tl.store(argmax_ptr + one, tl.where(argmax == 2147483647, 0, argmax), mask=mine)
