"""The largest logit of a row and the first column that has it, in kernels; and the two largest, equal ones as two."""

import triton
import triton.language as tl


@triton.jit
def top_zero(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return tl.full((BLOCK,), float("-inf"), dtype=DTYPE), tl.full((BLOCK,), 2147483647, dtype=tl.int32)


@triton.jit
def top_add_piece(state, numbers, share, log_share, is_first):
    # of equal logits the first column's; earlier pieces have earlier columns
    higher = (numbers[0] > state[0]) | (numbers[0] != numbers[0]) | is_first
    return tl.where(higher, numbers[0], state[0]), tl.where(higher, numbers[1].to(tl.int32), state[1])


@triton.jit
def top_add_strips(state, numbers, offs, mask):
    top = tl.load(numbers[0] + offs, mask=mask, other=float("-inf"))
    best = tl.max(top, 0)
    first = tl.load(numbers[1] + offs, mask=mask, other=2147483647)
    first = tl.min(tl.where(top == best[None, :], first, 2147483647), 0)
    # of equal logits, that of the earlier block
    return tl.maximum(state[0], best), tl.where(best > state[0], first, state[1])


@triton.jit
def top_zero_lanes(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return (tl.full((BLOCK,), 2147483647, dtype=tl.int32),)


@triton.jit
def top_add_lanes(state, x, column, in_columns, class_weights_ptr, lane_max, lane_sum, offset, rescale, z, e):
    same = in_columns & (x == lane_max)
    return (tl.where(x > lane_max, column, tl.where(same, tl.minimum(state[0], column), state[0])),)


@triton.jit
def top_merge_lanes(state, lane_max, lane_sum, distance, weight, row_max, row_sum, log_sum):
    first = tl.min(tl.where(lane_max == row_max, state[0], 2147483647), 0)
    return row_max, tl.where(first == 2147483647, 0, first)


@triton.jit
def top_store_strip(numbers, offs, in_rows, x, top, offs_col):
    first = tl.where(x == top[:, None], offs_col[None, :], 2147483647)
    tl.store(numbers[0] + offs, top, mask=in_rows)
    tl.store(numbers[1] + offs, tl.min(first, 1), mask=in_rows)


@triton.jit
def runner_up_zero(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return tl.full((BLOCK,), float("-inf"), dtype=DTYPE), tl.full((BLOCK,), float("-inf"), dtype=DTYPE)


@triton.jit
def joined(state, largest, second):
    """Returns the two largest of ``state`` (a pair in descending order), ``largest`` and ``second``, in descending
    order."""
    smaller = tl.maximum(tl.minimum(state[0], largest), tl.maximum(state[1], second))
    return tl.maximum(state[0], largest), smaller


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
