"""Sums over all tokens of losses' and metrics' values.

    out[r] = factor[r] * sum_i table[r, i]

The table is [rows, tokens], the sums are [rows], fp32.
"""

import triton.language as tl

from ..common.kernel import kernel


@kernel
def sum_rows_kernel(
    # outputs
    first_ptr,  # [] the first of the sums once more
    out_ptr,  # [rows]
    # inputs
    table_ptr,  # [rows, tokens] contiguous
    inverse_ptr,  # [] factor of the first ``parts`` rows
    one_or_nan_ptr,  # [] factor of the others
    # sizes
    tokens,
    parts,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(table_ptr + row.to(tl.int64) * tokens + at, mask=at < tokens, other=0.0)
    factor = tl.load(inverse_ptr) if row < parts else tl.load(one_or_nan_ptr)
    total = tl.sum(sums, 0) * factor
    tl.store(out_ptr + row, total)
    tl.store(first_ptr, total, mask=row == 0)
