"""Matrices in e4m3: ``out = matrix / s`` rounded, ``s = largest / 448`` of a row or of all rows; what belongs to it is

    scale = s sqrt(sum (matrix / s)^2 / sum out^2)

of the same rows. Rounding to the nearest makes a row longer or shorter by up to 4e-3, by where ``largest`` happens to
lie, and all its logits with it: log-probabilities of flat heads were off by 1.5e-2 nats, each token's by as much. So
lengths stay.
"""

import triton
import triton.language as tl

from ..common import tiles
from ..common.blocks import INTERPRETED
from ..common.launcher import kernel

LARGEST, LEAST = tl.constexpr(tiles.LARGEST_E4M3), tl.constexpr(tiles.LEAST_SCALE)


@triton.jit
def to_e4m3(x):
    """Rounded to the nearest, of two to the even one. The interpreter's conversion of what is rounded is wrong."""
    if INTERPRETED:
        exponent = tl.maximum(tl.floor(tl.log2(tl.maximum(tl.abs(x), 2.0**-6))), -6.0)
        unit = tl.exp2(exponent - 3.0)
        x = ((x / unit + 12582912.0) - 12582912.0) * unit
    return x.to(tl.float8e4nv)


@kernel
def quantise_kernel(
    # outputs
    out_ptr,  # [rows, columns] e4m3 contiguous; None where only ``dots`` are wanted
    scale_ptr,  # [rows] fp32; or with ``largest_ptr`` [3, rows]: what was divided by, and both sums of squares
    dots_ptr,  # [rows] fp32: each row times ``mean``; or None, and the mean is taken out of the rows
    # inputs
    matrix_ptr,  # [rows, columns] contiguous
    largest_ptr,  # [] of the whole matrix, or None for each row's own
    mean_ptr,  # [columns] fp32 or None
    # sizes
    rows,
    columns,
    BLOCK: tl.constexpr,  # all columns
):
    """A row; its scale is nan where a number in it is not finite."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(matrix_ptr + row * columns + offs, mask=offs < columns, other=0.0).to(tl.float32)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + offs, mask=offs < columns, other=0.0)
        if dots_ptr is not None:
            tl.store(dots_ptr + row, tl.sum(x * mean, 0))
        else:
            x -= mean
    if out_ptr is not None:
        if largest_ptr is not None:
            largest = tl.load(largest_ptr).to(tl.float32)
            finite = largest * 0.0
        else:
            largest = tl.max(tl.abs(x), 0)
            finite = tl.sum(x * 0.0, 0)
        scale = tl.maximum(tl.div_rn(largest, LARGEST), LEAST) + finite
        x = x * tl.div_rn(1.0, scale)
        e4m3 = to_e4m3(x)
        tl.store(out_ptr + row * columns + offs, e4m3, mask=offs < columns)
        rounded = e4m3.to(tl.float32)
        before, after = tl.sum(x * x, 0), tl.sum(rounded * rounded, 0)
        if largest_ptr is not None:
            tl.store(scale_ptr + row, scale)
            tl.store(scale_ptr + rows + row, before)
            tl.store(scale_ptr + 2 * rows + row, after)
        else:
            tl.store(scale_ptr + row, scale * tl.sqrt_rn(tl.div_rn(before + 1.0, after + 1.0)))
