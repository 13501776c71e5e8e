"""Jit functions of two statistics, for the stages of ``lists.py``. ``top``: the largest logit of a row, and the first
column that has this logit. ``runner_up``: the two largest logits of a row, which may be equal."""

import triton
import triton.language as tl

NO_INDEX = tl.constexpr(2147483647)  # stands in a minimum over indices for an index that is not taken


@triton.jit
def top_zero(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return tl.full((BLOCK,), float("-inf"), dtype=DTYPE), tl.full((BLOCK,), NO_INDEX, dtype=tl.int32)


@triton.jit
def top_add_piece(state, values, share, log_share, is_first):
    # of equal logits the earlier piece's, which has earlier columns
    is_higher = (values[0] > state[0]) | (values[0] != values[0]) | is_first
    return tl.where(is_higher, values[0], state[0]), tl.where(is_higher, values[1].to(tl.int32), state[1])


@triton.jit
def top_add_strips(state, strip_ptrs, offs, mask):
    top = tl.load(strip_ptrs[0] + offs, mask=mask, other=float("-inf"))
    block_top = tl.max(top, 0)
    first_column = tl.load(strip_ptrs[1] + offs, mask=mask, other=NO_INDEX)
    first_column = tl.min(tl.where(top == block_top[None, :], first_column, NO_INDEX), 0)
    # of equal logits the earlier block's
    return tl.maximum(state[0], block_top), tl.where(block_top > state[0], first_column, state[1])


@triton.jit
def top_zero_lanes(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return (tl.full((BLOCK,), NO_INDEX, dtype=tl.int32),)


@triton.jit
def top_add_lanes(state, x, column, in_columns, class_weights_ptr, lane_max, lane_sum, offset, rescale, z, e):
    is_equal = in_columns & (x == lane_max)
    return (tl.where(x > lane_max, column, tl.where(is_equal, tl.minimum(state[0], column), state[0])),)


@triton.jit
def top_merge_lanes(state, lane_max, lane_sum, distance, weight, row_max, row_sum, log_sum):
    first_column = tl.min(tl.where(lane_max == row_max, state[0], NO_INDEX), 0)
    return row_max, tl.where(first_column == NO_INDEX, 0, first_column)


@triton.jit
def top_store_strip(strip_ptrs, offs, in_rows, x, top, offs_col):
    first_column = tl.where(x == top[:, None], offs_col[None, :], NO_INDEX)
    tl.store(strip_ptrs[0] + offs, top, mask=in_rows)
    tl.store(strip_ptrs[1] + offs, tl.min(first_column, 1), mask=in_rows)


@triton.jit
def runner_up_zero(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return tl.full((BLOCK,), float("-inf"), dtype=DTYPE), tl.full((BLOCK,), float("-inf"), dtype=DTYPE)


@triton.jit
def two_largest(state, largest, runner_up):
    """Returns the two largest of four numbers, in descending order. Of the pair ``state`` the first number is the
    larger one, and ``largest >= runner_up``."""
    new_runner_up = tl.maximum(tl.minimum(state[0], largest), tl.maximum(state[1], runner_up))
    return tl.maximum(state[0], largest), new_runner_up


@triton.jit
def runner_up_add_piece(state, values, share, log_share, is_first):
    return two_largest(state, values[0], values[1])


@triton.jit
def runner_up_add_strips(state, strip_ptrs, offs, mask):
    top = tl.load(strip_ptrs[0] + offs, mask=mask, other=float("-inf"))
    runner_up = tl.load(strip_ptrs[1] + offs, mask=mask, other=float("-inf"))
    largest = tl.max(top, 0)
    strip = tl.arange(0, top.shape[0])[:, None]
    first_strip = tl.min(tl.where(top == largest[None, :], strip, NO_INDEX), 0)
    return two_largest(state, largest, tl.max(tl.where(strip == first_strip[None, :], runner_up, top), 0))


@triton.jit
def runner_up_zero_lanes(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return (tl.full((BLOCK,), float("-inf"), dtype=DTYPE),)


@triton.jit
def runner_up_add_lanes(state, x, column, in_columns, class_weights_ptr, lane_max, lane_sum, offset, rescale, z, e):
    return (tl.maximum(state[0], tl.minimum(x, lane_max)),)


@triton.jit
def runner_up_merge_lanes(state, lane_max, lane_sum, distance, weight, row_max, row_sum, log_sum):
    lane = tl.arange(0, lane_max.shape[0])
    first_lane = tl.min(tl.where(lane_max == row_max, lane, NO_INDEX), 0)
    return row_max, tl.max(tl.where(lane == first_lane, state[0], lane_max), 0)


@triton.jit
def runner_up_store_strip(strip_ptrs, offs, in_rows, x, top, offs_col):
    first_column = tl.min(tl.where(x == top[:, None], offs_col[None, :], NO_INDEX), 1)
    runner_up = tl.max(tl.where(offs_col[None, :] == first_column[:, None], float("-inf"), x), 1)
    tl.store(strip_ptrs[0] + offs, top, mask=in_rows)
    tl.store(strip_ptrs[1] + offs, runner_up, mask=in_rows)
