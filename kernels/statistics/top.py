"""Jit functions of two statistics, for the stages of ``lists.py``: the largest logit of a row with the first column
that has it (top); and the two largest logits, of which equal ones count as two (runner_up)."""

import triton
import triton.language as tl


@triton.jit
def top_zero(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return tl.full((BLOCK,), float("-inf"), dtype=DTYPE), tl.full((BLOCK,), 2147483647, dtype=tl.int32)


@triton.jit
def top_add_piece(state, values, share, log_share, is_first):
    # of equal logits the first column's; earlier pieces have earlier columns
    is_higher = (values[0] > state[0]) | (values[0] != values[0]) | is_first
    return tl.where(is_higher, values[0], state[0]), tl.where(is_higher, values[1].to(tl.int32), state[1])


@triton.jit
def top_add_strips(state, strip_ptrs, offs, mask):
    top = tl.load(strip_ptrs[0] + offs, mask=mask, other=float("-inf"))
    strips_top = tl.max(top, 0)
    first_column = tl.load(strip_ptrs[1] + offs, mask=mask, other=2147483647)
    first_column = tl.min(tl.where(top == strips_top[None, :], first_column, 2147483647), 0)
    # of equal logits, that of the earlier block
    return tl.maximum(state[0], strips_top), tl.where(strips_top > state[0], first_column, state[1])


@triton.jit
def top_zero_lanes(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return (tl.full((BLOCK,), 2147483647, dtype=tl.int32),)


@triton.jit
def top_add_lanes(state, x, column, in_columns, class_weights_ptr, lane_max, lane_sum, offset, rescale, z, e):
    is_equal = in_columns & (x == lane_max)
    return (tl.where(x > lane_max, column, tl.where(is_equal, tl.minimum(state[0], column), state[0])),)


@triton.jit
def top_merge_lanes(state, lane_max, lane_sum, distance, weight, row_max, row_sum, log_sum):
    first_column = tl.min(tl.where(lane_max == row_max, state[0], 2147483647), 0)
    return row_max, tl.where(first_column == 2147483647, 0, first_column)


@triton.jit
def top_store_strip(strip_ptrs, offs, in_rows, x, top, offs_col):
    first_column = tl.where(x == top[:, None], offs_col[None, :], 2147483647)
    tl.store(strip_ptrs[0] + offs, top, mask=in_rows)
    tl.store(strip_ptrs[1] + offs, tl.min(first_column, 1), mask=in_rows)


@triton.jit
def runner_up_zero(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return tl.full((BLOCK,), float("-inf"), dtype=DTYPE), tl.full((BLOCK,), float("-inf"), dtype=DTYPE)


@triton.jit
def joined(state, largest, runner_up):
    """Returns the two largest of four numbers, in descending order: the pair ``state``, in descending order, and
    ``largest`` and ``runner_up``, likewise."""
    new_runner_up = tl.maximum(tl.minimum(state[0], largest), tl.maximum(state[1], runner_up))
    return tl.maximum(state[0], largest), new_runner_up


@triton.jit
def runner_up_add_piece(state, values, share, log_share, is_first):
    return joined(state, values[0], values[1])


@triton.jit
def runner_up_add_strips(state, strip_ptrs, offs, mask):
    top = tl.load(strip_ptrs[0] + offs, mask=mask, other=float("-inf"))
    runner_up = tl.load(strip_ptrs[1] + offs, mask=mask, other=float("-inf"))
    largest = tl.max(top, 0)
    strip = tl.arange(0, top.shape[0])[:, None]
    first_strip = tl.min(tl.where(top == largest[None, :], strip, 2147483647), 0)
    return joined(state, largest, tl.max(tl.where(strip == first_strip[None, :], runner_up, top), 0))


@triton.jit
def runner_up_zero_lanes(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return (tl.full((BLOCK,), float("-inf"), dtype=DTYPE),)


@triton.jit
def runner_up_add_lanes(state, x, column, in_columns, class_weights_ptr, lane_max, lane_sum, offset, rescale, z, e):
    return (tl.maximum(state[0], tl.minimum(x, lane_max)),)


@triton.jit
def runner_up_merge_lanes(state, lane_max, lane_sum, distance, weight, row_max, row_sum, log_sum):
    lane = tl.arange(0, lane_max.shape[0])
    first_lane = tl.min(tl.where(lane_max == row_max, lane, 2147483647), 0)
    return row_max, tl.max(tl.where(lane == first_lane, state[0], lane_max), 0)


@triton.jit
def runner_up_store_strip(strip_ptrs, offs, in_rows, x, top, offs_col):
    first_column = tl.min(tl.where(x == top[:, None], offs_col[None, :], 2147483647), 1)
    runner_up = tl.max(tl.where(offs_col[None, :] == first_column[:, None], float("-inf"), x), 1)
    tl.store(strip_ptrs[0] + offs, top, mask=in_rows)
    tl.store(strip_ptrs[1] + offs, runner_up, mask=in_rows)
