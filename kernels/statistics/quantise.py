"""Matrices in e4m3: ``out = matrix / scale``, rounded, ``scale = largest / 448`` of each row, or given for all."""

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
    out_ptr,  # [rows, columns] e4m3 contiguous
    scale_ptr,  # [rows] fp32, or None with a scale for all rows
    # inputs
    matrix_ptr,  # [rows, columns] contiguous
    shared_scale_ptr,  # [] fp32, or None
    # sizes
    columns,
    BLOCK: tl.constexpr,  # all columns
):
    """A row; its scale is nan where a number in it is not finite."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(matrix_ptr + row * columns + offs, mask=offs < columns, other=0.0).to(tl.float32)
    if shared_scale_ptr is not None:
        scale = tl.load(shared_scale_ptr)
    else:
        scale = tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, LEAST) + tl.sum(x * 0.0, 0)
        tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * columns + offs, to_e4m3(x * (1.0 / scale)), mask=offs < columns)
