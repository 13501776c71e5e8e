"""Jit functions of the entropy ``-sum p log p``. They add up ``exp(x - offset) (x - offset)`` beside the softmax's
sum of ``exp(x - offset)``."""

import triton
import triton.language as tl

from ..common.transform import ln_2


@triton.jit
def entropy_zero(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return (tl.zeros((BLOCK,), dtype=DTYPE),)


@triton.jit
def entropy_add_piece(state, numbers, share, log_share, is_first):
    """``sum_r share[r] (entropy[r] - log share[r])``"""
    return (state[0] + tl.where(share > 0.0, share * (numbers[0] - log_share), 0.0),)


@triton.jit
def entropy_merge_pieces(state, total, log_sum):
    return (state[0] / total + log_sum,)


@triton.jit
def entropy_add_exponentials(state, numbers, offs, mask, run_max, run_sum, offset, rescale, sums, distance, weight):
    moved = tl.where(run_max == float("-inf"), 0.0, run_max - offset)
    w = tl.load(numbers[0] + offs, mask=mask, other=0.0)
    added = tl.where(weight > 0.0, weight * (w + sums * distance), 0.0)
    return (rescale * (state[0] + run_sum * moved) + tl.sum(added, 0),)


@triton.jit
def entropy_exchange_target(state, removed, removed_distance, added, added_distance):
    """Replaces the target's term with its logit in the tile by the term with its exact logit."""
    shifted = state[0] - tl.where(removed > 0.0, removed * removed_distance, 0.0)
    return (shifted + tl.where(added > 0.0, added * added_distance, 0.0),)


@triton.jit
def entropy_merge_strips(state, total, log_sum):
    return (log_sum - state[0] / total,)


entropy_zero_lanes = entropy_zero


@triton.jit
def entropy_add_lanes(state, x, column, in_columns, class_weights_ptr, lane_max, lane_sum, offset, rescale, z, e):
    moved = tl.where(lane_max == float("-inf"), 0.0, lane_max - offset)
    return (rescale * (state[0] + lane_sum * moved) + tl.where(e > 0.0, e * z, 0.0),)


@triton.jit
def entropy_merge_lanes(state, lane_max, lane_sum, distance, weight, row_max, row_sum, log_sum):
    shifted = tl.sum(tl.where(weight > 0.0, weight * (state[0] + lane_sum * distance), 0.0), 0)
    return (log_sum - shifted / row_sum,)


@triton.jit
def entropy_half(z, e, IS_FIRST: tl.constexpr, INFINITE: tl.constexpr):
    """The sums [rows] of half a tile, from exponentials ``e`` and base-2 differences ``z``."""
    if IS_FIRST:
        if INFINITE:
            z = tl.maximum(z, -160.0)  # 0 below, where a logit of -inf would make it nan
        return tl.sum(e * z, 1)
    else:
        return tl.sum(tl.where(e > 0.0, e * z, 0.0), 1)


@triton.jit
def entropy_store_sums(numbers, offs, in_rows, moment, total, rounded):
    """Stores a strip's sums. ``rounded``: the rounding error in all differences, which is subtracted."""
    tl.store(numbers[0] + offs, (moment - rounded * total) * (tl.exp2(-rounded) * ln_2), mask=in_rows)
