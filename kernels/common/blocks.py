"""Tiles, rows and columns as all kernels load, multiply and store them."""

import triton
import triton.language as tl

from ...core import tiles

ELSEWHERE, BEHIND = tl.constexpr(tiles.ELSEWHERE), tl.constexpr(tiles.BEHIND)
INTERPRETED = tl.constexpr(tiles.INTERPRETED)
LARGEST_E4M3 = tl.constexpr(tiles.LARGEST_E4M3)


@triton.jit
def column_halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of the columns, each in registers that hold it already."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def multiple_of_8(elements):
    """Rounded up to a multiple of 8 (16 bytes of 16-bit elements), so that the compiler knows it for one."""
    return (elements + 7) // 8 * 8


@triton.jit
def load_tile(matrix, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr):
    """A tile of a matrix, 0 past its end. ``matrix``: a descriptor, or None and a pointer to contiguous columns, the
    distance from row to row, a multiple of 8, and the numbers of rows and columns.

    Rows are padded to a multiple of 8 columns. EXACT reads the padding as 0, and then an odd number of columns one by
    one; otherwise the tile holds whatever stands there, and 16 bytes are read at a time."""
    desc, ptr, stride, rows, columns = matrix
    if desc is not None:
        return desc.load([row, column])
    else:
        offs_row, offs_col = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        offsets = offs_row.to(tl.int64)[:, None] * multiple_of_8(stride) + offs_col[None, :]
        if not EXACT:
            columns = multiple_of_8(columns)
        return tl.load(ptr + offsets, mask=(offs_row < rows)[:, None] & (offs_col < columns)[None, :], other=0.0)


@triton.jit
def load_rows(matrix, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """A tile as ``load_tile`` loads it, faster, whose rows past the end are copies of the last. Columns are a multiple
    of 8. EVEN: no tile passes the last column, and nothing is masked."""
    desc, ptr, stride, rows, columns = matrix
    if desc is not None:
        return desc.load([row, column])
    else:
        offs_row, offs_col = tl.minimum(row + tl.arange(0, ROWS), rows - 1), column + tl.arange(0, COLUMNS)
        pointers = ptr + offs_row.to(tl.int64)[:, None] * multiple_of_8(stride) + tl.arange(0, COLUMNS)[None, :]
        if EVEN:
            return tl.load(pointers + column)
        else:
            return tl.load(pointers + column, mask=(offs_col < multiple_of_8(columns))[None, :], other=0.0)


@triton.jit
def dot(a, b, total):
    """``total + a @ b``; the interpreter's product of bf16 operands is wrong, of fp32 ones right."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit
def to_e4m3(x):
    """Rounded to the nearest, of two to the even one. The interpreter's conversion of what is rounded is wrong."""
    if INTERPRETED:
        exponent = tl.maximum(tl.floor(tl.log2(tl.maximum(tl.abs(x), 2.0**-6))), -6.0)
        unit = tl.exp2(exponent - 3.0)
        x = ((x / unit + 12582912.0) - 12582912.0) * unit
        x = tl.minimum(tl.maximum(x, -LARGEST_E4M3), LARGEST_E4M3)
    return x.to(tl.float8e4nv)


@triton.jit
def descaled(product, row_scale_ptr, scale_ptr, row_common_ptr, common_ptr, offs_row, rows, offs_col, columns):
    """A product of e4m3 operands times the scales [rows] of the first and [] of the second, and what these leave out:
    the product of [rows] and [columns] fp32. Of other operands as it is."""
    if row_scale_ptr is not None:
        scale = tl.load(row_scale_ptr + offs_row, mask=offs_row < rows, other=0.0) * tl.load(scale_ptr)
        product = product * scale[:, None]
    if common_ptr is not None:
        row_common = tl.load(row_common_ptr + offs_row, mask=offs_row < rows, other=0.0)
        common = tl.load(common_ptr + offs_col, mask=offs_col < columns, other=0.0)
        product += row_common[:, None] * common[None, :]
    return product


@triton.jit
def to_type_of(matrix, value):
    """A value in the dtype of the matrix."""
    if matrix[0] is not None:
        return rounded(value, matrix[0].dtype)
    else:
        return rounded(value, matrix[1].dtype.element_ty)


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """A value in another dtype. The interpreter cuts off what does not fit bf16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
        nearest = ((bits + 32767 + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        value = tl.where(tl.abs(value) < float("inf"), nearest, value)
    return value.to(dtype)


@triton.jit
def store_tile(matrix, row, column, value):
    """Stores a tile; the padding of a row to a multiple of 8 is written too."""
    desc, ptr, stride, rows, columns = matrix
    value = to_type_of(matrix, value)
    if desc is not None:
        desc.store([row, column], value)
    else:
        offs_row, offs_col = row + tl.arange(0, value.shape[0]), column + tl.arange(0, value.shape[1])
        offsets = offs_row.to(tl.int64)[:, None] * multiple_of_8(stride) + offs_col[None, :]
        mask = (offs_row < rows)[:, None] & (offs_col < multiple_of_8(columns))[None, :]
        tl.store(ptr + offsets, value, mask=mask)


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
    """Number of a chunk's rows that count, from the number [] of the call's that do; all where there is none."""
    if count_ptr is not None:
        return tl.minimum(tl.maximum(tl.load(count_ptr) - first_row, 0), rows).to(tl.int32)
    else:
        return rows
