"""Targets in order, so that rows of one target lie together."""

import triton.language as tl

from ..common.kernel import kernel


@kernel
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
