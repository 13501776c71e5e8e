"""Jit functions of the entropy ``-sum p log p``, for the stages of ``lists.py``. The state is a moment, the sum of
``exp(x - offset) (x - offset)``; for ranks' pieces of the vocabulary, the sum of ``share (entropy - log share)``."""

import triton
import triton.language as tl

from ..common.transform import ln_2


@triton.jit
def entropy_zero(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    return (tl.zeros((BLOCK,), dtype=DTYPE),)


@triton.jit
def entropy_add_piece(state, values, share, log_share, is_first):
    """Adds ``share (entropy - log share)`` of one piece to the state."""
    return (state[0] + tl.where(share > 0.0, share * (values[0] - log_share), 0.0),)


@triton.jit
def entropy_merge_pieces(state, total, log_sum):
    return (state[0] / total + log_sum,)


@triton.jit
def entropy_add_exponentials(state, strip_ptrs, offs, mask, run_max, run_sum, offset, rescale, sums, distance, weight):
    base_change = tl.where(run_max == float("-inf"), 0.0, run_max - offset)
    strip_moments = tl.load(strip_ptrs[0] + offs, mask=mask, other=0.0)
    terms = tl.where(weight > 0.0, weight * (strip_moments + sums * distance), 0.0)
    return (rescale * (state[0] + run_sum * base_change) + tl.sum(terms, 0),)


@triton.jit
def entropy_exchange_target(state, removed_exp, removed_z, added_exp, added_z):
    """Replaces the moment's term of the target, made from the tile's logit, by a term of the exact logit. A term is
    ``exp * z``: ``z`` is the logit less the offset, ``exp`` its exponential."""
    moment = state[0] - tl.where(removed_exp > 0.0, removed_exp * removed_z, 0.0)
    return (moment + tl.where(added_exp > 0.0, added_exp * added_z, 0.0),)


@triton.jit
def entropy_merge_strips(state, total, log_sum):
    return (log_sum - state[0] / total,)


entropy_zero_lanes = entropy_zero


@triton.jit
def entropy_add_lanes(state, x, column, in_columns, class_weights_ptr, lane_max, lane_sum, offset, rescale, z, e):
    base_change = tl.where(lane_max == float("-inf"), 0.0, lane_max - offset)
    return (rescale * (state[0] + lane_sum * base_change) + tl.where(e > 0.0, e * z, 0.0),)


@triton.jit
def entropy_merge_lanes(state, lane_max, lane_sum, distance, weight, row_max, row_sum, log_sum):
    moment = tl.sum(tl.where(weight > 0.0, weight * (state[0] + lane_sum * distance), 0.0), 0)
    return (log_sum - moment / row_sum,)


@triton.jit
def entropy_half(z, e, IS_FIRST_SOFTMAX: tl.constexpr, INFINITE: tl.constexpr):
    """Returns the moments [rows] of half a tile, from ``z``, logits less the offset in base 2, and ``e = 2 ** z``.
    INFINITE: True if a logit may be -inf."""
    if IS_FIRST_SOFTMAX:
        if INFINITE:
            z = tl.maximum(z, -160.0)  # e is 0 below, and its product with -inf would be nan
        return tl.sum(e * z, 1)
    else:
        return tl.sum(tl.where(e > 0.0, e * z, 0.0), 1)


@triton.jit
def entropy_store_sums(strip_ptrs, offs, in_rows, moment, total, shift_error):
    """Stores the moments [rows] of a strip. ``moment``: sum of ``e z``. ``total``: sum of ``e``. ``shift_error``: the
    rounding error that all ``z`` of a row have in common, which this function removes."""
    tl.store(strip_ptrs[0] + offs, (moment - shift_error * total) * (tl.exp2(-shift_error) * ln_2), mask=in_rows)
