"""Targets beside the rows that predict them, what does not count taken out."""

import triton.language as tl

from ..common.kernel import kernel


@kernel
def read_targets_kernel(
    # outputs
    paired_ptr,  # [tokens] int64, -1 where a row does not count
    counted_ptr,  # [] fp32: how many do
    one_or_nan_ptr,  # [] fp32: 1, or nan where an id is out of range
    inverse_ptr,  # [] fp32: that divided by how many count, or by 1 where none does
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
    number = tl.sum(counted, 0).to(tl.float32)
    one_or_nan = tl.where(tl.sum(wrong, 0) > 0, float("nan"), 1.0)
    tl.store(counted_ptr, number)
    tl.store(one_or_nan_ptr, one_or_nan)
    tl.store(inverse_ptr, tl.div_rn(one_or_nan, tl.maximum(number, 1.0)))
