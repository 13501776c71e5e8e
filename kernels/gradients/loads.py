"""What the gradients' kernels read of rows."""

import triton
import triton.language as tl


@triton.jit
def load_column(ptr, offs_row, in_rows):
    """A number per row, as a column."""
    return tl.load(ptr + offs_row, mask=in_rows, other=0.0)[:, None]
