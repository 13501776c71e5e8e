"""Rows of hidden states as the matmuls take them."""

import triton.language as tl

from ..common.kernel import kernel


@kernel
def copy_rows_kernel(
    # outputs
    out_ptr,  # [rows, hidden] contiguous
    # inputs
    source_ptr,  # [rows, hidden]
    target_ptr,  # [rows] int64, -1 where the row does not count
    factor_ptr,  # [rows] fp32, or None for 1
    order_ptr,  # [rows] int64: rows of the source, or None for its first
    # sizes
    hidden,
    row_stride,
    column_stride,
    BLOCK: tl.constexpr,
):
    """``out = factor * source`` in the dtype of ``out``, 0 where a row does not count, whatever stands there."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < hidden
    kept = tl.where(tl.load(target_ptr + row) >= 0, hidden, 0)
    source_row = row
    if order_ptr is not None:
        source_row = tl.load(order_ptr + row)
    value = tl.load(
        source_ptr + source_row * row_stride + offs.to(tl.int64) * column_stride, mask=offs < kept, other=0.0
    )
    if factor_ptr is not None:
        # nobody has written the factor of a row behind those that count
        value = value.to(tl.float32) * tl.load(factor_ptr + row, mask=kept > 0, other=0.0)
    tl.store(out_ptr + row * hidden + offs, value.to(out_ptr.dtype.element_ty), mask=mask)
