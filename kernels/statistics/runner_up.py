"""The two largest logits of a row in kernels; equal ones count as two."""

import triton
import triton.language as tl


@triton.jit
def runner_up_zero(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return tl.full((BLOCK,), float("-inf"), dtype=DTYPE), tl.full((BLOCK,), float("-inf"), dtype=DTYPE)


@triton.jit
def joined(state, largest, second):
    """The two largest of two pairs, each in descending order."""
    others = tl.maximum(tl.minimum(state[0], largest), tl.maximum(state[1], second))
    return tl.maximum(state[0], largest), others


@triton.jit
def runner_up_add_piece(state, numbers, share, log_share, is_first):
    return joined(state, numbers[0], numbers[1])


@triton.jit
def runner_up_add_strips(state, numbers, offs, mask):
    top = tl.load(numbers[0] + offs, mask=mask, other=float("-inf"))
    second = tl.load(numbers[1] + offs, mask=mask, other=float("-inf"))
    largest = tl.max(top, 0)
    strip = tl.arange(0, top.shape[0])[:, None]
    first = tl.min(tl.where(top == largest[None, :], strip, 2147483647), 0)
    return joined(state, largest, tl.max(tl.where(strip == first[None, :], second, top), 0))


@triton.jit
def runner_up_zero_lanes(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return (tl.full((BLOCK,), float("-inf"), dtype=DTYPE),)


@triton.jit
def runner_up_add_lanes(state, x, column, in_columns, class_weights_ptr, lane_max, lane_sum, offset, rescale, z, e):
    return (tl.maximum(state[0], tl.minimum(x, lane_max)),)


@triton.jit
def runner_up_merge_lanes(state, lane_max, lane_sum, distance, weight, row_max, row_sum, log_sum):
    lane = tl.arange(0, lane_max.shape[0])
    first = tl.min(tl.where(lane_max == row_max, lane, 2147483647), 0)
    return row_max, tl.max(tl.where(lane == first, state[0], lane_max), 0)


@triton.jit
def runner_up_store_strip(numbers, offs, in_rows, x, top, offs_col):
    first = tl.min(tl.where(x == top[:, None], offs_col[None, :], 2147483647), 1)
    second = tl.max(tl.where(offs_col[None, :] == first[:, None], float("-inf"), x), 1)
    tl.store(numbers[0] + offs, top, mask=in_rows)
    tl.store(numbers[1] + offs, second, mask=in_rows)
