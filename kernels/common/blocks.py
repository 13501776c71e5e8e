"""What kernels share of tiles, rows and columns."""

import triton
import triton.language as tl

from . import elsewhere

ELSEWHERE = tl.constexpr(elsewhere.ELSEWHERE)


@triton.jit
def column_halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of the columns, each in registers that hold it already."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def tile_place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile: rows fastest within a group, so that what the columns share serves GROUP_M row tiles
    while it is in L2."""
    group = tile // (GROUP_M * tiles_n)
    group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + within % group_rows, within // group_rows


@triton.jit
def counted_rows(count_ptr, first_row, rows):
    """How many of a chunk's rows count, where a device-side number of the call's that do is given."""
    if count_ptr is not None:
        return tl.minimum(tl.maximum(tl.load(count_ptr) - first_row, 0), rows).to(tl.int32)
    else:
        return rows
