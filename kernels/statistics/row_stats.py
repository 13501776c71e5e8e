"""Statistics [rows] fp32 of stored logits, one program per row.

``row_stats`` is the body of kernels that are generated for the statistics beside the softmax (``lists.py``). From
complete rows [rows, columns] of logits it makes

    log p = (x - lse_base) + neg_log_sum,  lse_base = max x,  neg_log_sum = -log sum exp(x - lse_base)

Where softmaxes are over sets of columns, it reads the logits [entries] fp32 of all sets:

    lse[i] = log sum_{begin[i] <= e < end[i]} exp(logit[e])
"""

import triton
import triton.language as tl

from ..common.transform import ln_2, load_number, load_row, log2_e, times, transform_logits


@triton.jit
def row_stats(
    # outputs
    lse_ptr,  # [rows] fp32 or None
    lse_base_ptr,  # [rows] fp32: log p = (x - lse_base) + neg_log_sum
    neg_log_sum_ptr,  # [rows] fp32
    logprob_ptr,  # [rows] fp32, 0 where the row does not count; None without targets
    target_logit_ptr,  # [rows] fp32; None without targets
    output_ptrs,  # a tuple of [rows]: the statistics' vectors
    # inputs
    logits_ptr,  # [rows, columns] raw logits; of sets [entries] fp32 logits as the softmax sees them
    column_ptr,  # [entries] int32: an entry's column, -1 for no column; None without sets
    begin_ptr,  # [rows] int64: index of a row's first entry; None without sets
    end_ptr,  # [rows] int64: index after a row's last entry, equal to begin for a row without a set; None without sets
    target_ptr,  # [rows] int64, -1 where the row does not count; None without targets
    bias_ptr,  # [columns] or None
    class_weights_ptr,  # [columns] or None for 1
    # sizes
    columns,  # number of columns of complete rows
    stride,  # elements from row to row of complete rows of logits
    # scalars
    logit_scale,  # float or None for 1
    softcap,  # float or None
    row_scale_ptr,  # [rows] fp32, or None for 1
    ratio,  # the softmax's inverse temperature relative to the logits'; float or None for 1
    ZERO_LANES: tl.constexpr,  # generated function of ``lists.py``
    ADD_LANES: tl.constexpr,  # generated function of ``lists.py``
    MERGE_LANES: tl.constexpr,  # generated function of ``lists.py``
    NUM_VECTORS: tl.constexpr,
    FILLS_ZEROS: tl.constexpr,  # True: a row without a set gets statistics of 0; False: its outputs are not written
    BLOCK: tl.constexpr,
):
    """Writes ``lse = log sum exp(ratio * x)`` of a row or of its set, and the statistics beside the softmax."""
    row = tl.program_id(0).to(tl.int64)
    HAS_SETS: tl.constexpr = begin_ptr is not None
    row_scale = load_number(row_scale_ptr, row)
    target = load_number(target_ptr, row)
    if HAS_SETS:
        begin, end = tl.load(begin_ptr + row), tl.load(end_ptr + row)
        is_counted = target >= 0
    else:
        begin, end = 0, columns
        logits_ptr += row * stride
        if target_ptr is not None:
            is_counted = (target >= 0) & (target < columns)
            raw_target = tl.load(logits_ptr + target, mask=is_counted, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                raw_target += tl.load(bias_ptr + target, mask=is_counted, other=0.0).to(tl.float32)
            target_logit = transform_logits(raw_target, logit_scale, softcap, row_scale)
    # each lane has its maximum, its sum of exp(x - max) and its states, so that the loop has no reduction
    lane_max = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    lane_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    lane_target = tl.zeros((BLOCK,), dtype=tl.float32)
    if NUM_VECTORS > 0:
        states = ZERO_LANES(BLOCK, tl.float32)
    for block_start in range(begin, end, BLOCK):
        offs = block_start + tl.arange(0, BLOCK)
        in_row = offs < end
        if HAS_SETS:
            column = tl.load(column_ptr + offs, mask=in_row, other=-1)
            in_row = column >= 0
            x = tl.load(logits_ptr + offs, mask=in_row, other=float("-inf"))
            lane_target += tl.where(in_row & (column == target), x, 0.0)
        else:
            column = offs
            x = load_row(logits_ptr, None, bias_ptr, row, 0, offs, in_row, logit_scale, softcap, row_scale)
        x = tl.where(in_row, x, float("-inf"))  # the cap turns the padding's -inf into a number
        scaled_x = times(x, ratio)
        new_max = tl.maximum(lane_max, scaled_x)
        offset = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2((lane_max - offset) * log2_e)
        z = scaled_x - offset
        e = tl.exp2(z * log2_e)
        if NUM_VECTORS > 0:
            states = ADD_LANES(states, x, column, in_row, class_weights_ptr, lane_max, lane_sum, offset, rescale, z, e)
        lane_max, lane_sum = new_max, lane_sum * rescale + e
    row_max = tl.max(lane_max, 0)
    distance = lane_max - tl.where(row_max == float("-inf"), 0.0, row_max)
    weight = tl.exp2(distance * log2_e)
    row_sum = tl.sum(lane_sum * weight, 0)
    log_sum = tl.log2(row_sum) * ln_2
    if NUM_VECTORS > 0:
        merged_values = MERGE_LANES(states, lane_max, lane_sum, distance, weight, row_max, row_sum, log_sum)
    row_lane = row + tl.arange(0, 1)
    mask = row_lane >= row
    if HAS_SETS:
        target_logit = tl.sum(lane_target, 0)
        # by a mask: a branch would wait for the loads that its condition depends on
        mask = row_lane < tl.where((end > begin) | FILLS_ZEROS, row + 1, row)
        row_max = tl.where(end > begin, row_max, 0.0)
        log_sum = tl.where(end > begin, log_sum, 0.0)
    if lse_ptr is not None:
        tl.store(lse_ptr + row_lane, row_max + log_sum, mask=mask)
    tl.store(lse_base_ptr + row_lane, row_max, mask=mask)
    tl.store(neg_log_sum_ptr + row_lane, -log_sum, mask=mask)
    if target_logit_ptr is not None:
        tl.store(target_logit_ptr + row_lane, target_logit, mask=mask)
    if logprob_ptr is not None:
        target_logit = times(target_logit, ratio)
        # target_logit - lse would have the rounding error of lse, which grows with the logits
        tl.store(logprob_ptr + row_lane, tl.where(is_counted, (target_logit - row_max) - log_sum, 0.0), mask=mask)
    for i in tl.static_range(NUM_VECTORS):
        value = merged_values[i]
        if HAS_SETS:
            value = tl.where(end > begin, value, 0)
        tl.store(output_ptrs[i] + row_lane, value, mask=mask)
