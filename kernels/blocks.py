"""What the persistent matmuls share."""

import triton
import triton.language as tl


@triton.jit
def column_halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of the columns, each in registers that hold it already."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def counted_rows(count_ptr, first_row, rows):
    """How many of a chunk's rows count, where a device-side number of the call's that do is given."""
    if count_ptr is not None:
        return tl.minimum(tl.maximum(tl.load(count_ptr) - first_row, 0), rows).to(tl.int32)
    else:
        return rows
