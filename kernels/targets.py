"""Targets beside the rows that predict them, what does not count taken out."""

import triton
import triton.language as tl

from . import elsewhere

ELSEWHERE = tl.constexpr(elsewhere.ELSEWHERE)


@triton.jit
def read_targets_kernel(
    # outputs
    paired_ptr,  # [tokens] int64, -1 where a row does not count
    counted_ptr,  # [] fp32: how many do
    one_or_nan_ptr,  # [] fp32: 1, or nan where an id is out of range
    # inputs
    target_ptr,  # [tokens] int64
    mask_ptr,  # [tokens] bytes, or None for 1
    # sizes
    tokens,
    length,  # of the dimension that the shift runs along
    vocab,
    # scalars
    shift,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """One program walks over all of them: a few microseconds beside any matmul, and nothing to be set to 0 before."""
    counted = tl.zeros((BLOCK,), dtype=tl.int32)
    wrong = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, tokens, BLOCK):
        row = start + tl.arange(0, BLOCK)
        there = (row < tokens) & (row % length + shift < length)
        target = tl.load(target_ptr + row + shift, mask=there, other=-1)
        counts = there & (target != ignore_index)
        if mask_ptr is not None:
            counts &= tl.load(mask_ptr + row + shift, mask=there, other=0) != 0
        inside = (target >= 0) & (target < vocab)
        tl.store(paired_ptr + row, tl.where(counts & inside, target, -1), mask=row < tokens)
        counted += (counts & inside).to(tl.int32)
        wrong += (counts & (inside == 0)).to(tl.int32)
    tl.store(counted_ptr, tl.sum(counted, 0).to(tl.float32))
    tl.store(one_or_nan_ptr, tl.where(tl.sum(wrong, 0) > 0, float("nan"), 1.0))


@triton.jit
def sort_targets_kernel(
    # outputs
    sorted_ptr,  # [tokens] int32
    order_ptr,  # [tokens] int64: where each stands in target
    # inputs
    target_ptr,  # [tokens] int64
    # sizes
    tokens,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """A stable sort in one launch: a target's place is how many come before it."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row, mask=row < tokens, other=0).to(tl.int32)
    before = tl.zeros((BLOCK, AT_ONCE), dtype=tl.int32)
    for start in range(0, tokens, AT_ONCE):
        other_row = start + tl.arange(0, AT_ONCE)
        other = tl.load(target_ptr + other_row, mask=other_row < tokens, other=2147483647).to(tl.int32)
        # of equals the first in place
        bound = target[:, None] + (other_row[None, :] < row[:, None]).to(tl.int32)
        before += (other[None, :] < bound).to(tl.int32)
    place = tl.sum(before, 1)
    tl.store(sorted_ptr + place, target, mask=row < tokens)
    tl.store(order_ptr + place, row.to(tl.int64), mask=row < tokens)
