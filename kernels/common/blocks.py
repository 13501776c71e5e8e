"""Functions with which kernels load, multiply and store tiles, and find their places."""

import triton
import triton.language as tl

from ...core import tiles

ELSEWHERE, BEHIND = tl.constexpr(tiles.ELSEWHERE), tl.constexpr(tiles.BEHIND)
INTERPRETED = tl.constexpr(tiles.INTERPRETED)
LARGEST_E4M3 = tl.constexpr(tiles.LARGEST_E4M3)


@triton.jit
def column_halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the left and the right half of the columns of ``x``; no data moves between threads."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def multiple_of_8(elements):
    """``elements`` rounded up to a multiple of 8 (16 bytes of 16-bit elements), in a form from which the compiler sees
    the multiple."""
    return (elements + 7) // 8 * 8


@triton.jit
def load_tile(matrix, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr):
    """A tile of a matrix, 0 past its last row and column. ``matrix``: a tuple of a descriptor or None; and for None a
    pointer to contiguous columns, the stride from row to row (a multiple of 8), and the numbers of rows and columns.

    Rows are padded to a multiple of 8 columns. With EXACT the padding is read as 0, by single elements if the number of
    columns is odd. Without, the tile has the padding's content, and 16 bytes are read at a time."""
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
    """A tile as from ``load_tile``, but rows past the last one are copies of it, which is faster. The number of columns
    is a multiple of 8. EVEN: no tile extends past the last column, so that there is no mask."""
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
    """``total + a @ b``. Under the interpreter, whose product of bf16 operands is wrong, operands are cast to fp32."""
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
    """``value`` cast to the dtype of the matrix."""
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
    """Returns row and column of a tile, in tiles. Row tiles run fastest within a group of GROUP_M, so that they read
    the same columns while these are in L2."""
    group = tile // (GROUP_M * tiles_n)
    group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + within % group_rows, within // group_rows


@triton.jit
def counted_rows(count_ptr, first_row, rows):
    """The number of a chunk's rows that count. ``count_ptr``: [] number of rows of the call that count; None: all
    ``rows``."""
    if count_ptr is not None:
        return tl.minimum(tl.maximum(tl.load(count_ptr) - first_row, 0), rows).to(tl.int32)
    else:
        return rows
