"""Jit functions of the weighted sum ``sum_j omega_j x_j`` of a row's logits, for the stages of ``lists.py``. ``omega``:
the class weights, or 1."""

import triton
import triton.language as tl


@triton.jit
def weighted_sum_zero(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return (tl.zeros((BLOCK,), dtype=DTYPE),)


@triton.jit
def weighted_sum_add_piece(state, values, share, log_share, is_first):
    return (state[0] + values[0],)


@triton.jit
def weighted_sum_add_strips(state, strip_ptrs, offs, mask):
    return (state[0] + tl.sum(tl.load(strip_ptrs[0] + offs, mask=mask, other=0.0), 0),)


weighted_sum_zero_lanes = weighted_sum_zero


@triton.jit
def weighted_sum_add_lanes(state, x, column, in_columns, class_weights_ptr, lane_max, lane_sum, offset, rescale, z, e):
    omega = tl.where(in_columns, 1.0, 0.0)
    if class_weights_ptr is not None:
        omega = tl.load(class_weights_ptr + column, mask=in_columns, other=0.0).to(tl.float32)
    # by selection, so that a logit of -inf with weight 0 gives 0 and not nan
    return (state[0] + tl.where(omega != 0.0, x * omega, 0.0),)


@triton.jit
def weighted_sum_merge_lanes(state, lane_max, lane_sum, distance, weight, row_max, row_sum, log_sum):
    return (tl.sum(state[0], 0),)


@triton.jit
def weighted_sum_store_logits(strip_ptrs, offs, in_rows, x, offs_col, in_vocab, class_weights_ptr):
    omega = tl.where(in_vocab, 1.0, 0.0)
    if class_weights_ptr is not None:
        omega = tl.load(class_weights_ptr + offs_col, mask=in_vocab, other=0.0).to(tl.float32)
    # by selection, so that a logit of -inf with weight 0 gives 0 and not nan
    weighted_logits = tl.where(omega[None, :] != 0.0, x * omega[None, :], 0.0)
    tl.store(strip_ptrs[0] + offs, tl.sum(weighted_logits, 1), mask=in_rows)
