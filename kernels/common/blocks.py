"""Functions with which kernels load, multiply, cast and store tiles of matrices.

A ``matrix`` is a tuple (descriptor, pointer, stride from row to row in elements, number of rows, number of columns).
Either the descriptor or the pointer to the first element is None.
"""

import triton
import triton.language as tl

from ...core import tiles

ELSEWHERE, BEHIND = tl.constexpr(tiles.ELSEWHERE), tl.constexpr(tiles.BEHIND)
INTERPRETED = tl.constexpr(tiles.INTERPRETED)
LARGEST_E4M3 = tl.constexpr(tiles.LARGEST_E4M3)


@triton.jit
def column_halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the left and the right half of the columns of ``x``. No data moves between threads."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def multiple_of_8(elements):
    """Returns ``elements`` rounded up to a multiple of 8 (16 bytes of 16-bit elements). The compiler sees that the
    result is a multiple."""
    return (elements + 7) // 8 * 8


@triton.jit
def load_tile(matrix, row_start, column_start, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr):
    """Loads a tile [ROWS, COLUMNS] of a matrix with contiguous columns; elements past its last row and column are 0.

    Rows in memory are padded to a multiple of 8 columns. With EXACT the padding is read as 0, by single elements if the
    number of columns is odd. Without EXACT the tile contains the padding's numbers, and 16 bytes are read at a time."""
    desc, ptr, stride, rows, columns = matrix
    if desc is not None:
        return desc.load([row_start, column_start])
    else:
        offs_row, offs_col = row_start + tl.arange(0, ROWS), column_start + tl.arange(0, COLUMNS)
        offsets = offs_row.to(tl.int64)[:, None] * multiple_of_8(stride) + offs_col[None, :]
        if not EXACT:
            columns = multiple_of_8(columns)
        return tl.load(ptr + offsets, mask=(offs_row < rows)[:, None] & (offs_col < columns)[None, :], other=0.0)


@triton.jit
def load_rows(matrix, row_start, column_start, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Loads a tile [ROWS, COLUMNS] of a matrix. Rows past the last row are copies of the last row, which is faster than
    a mask. Columns past the last column are 0. The number of columns is a multiple of 8. EVEN: no tile extends past
    the last column."""
    desc, ptr, stride, rows, columns = matrix
    if desc is not None:
        return desc.load([row_start, column_start])
    else:
        offs_row, offs_col = tl.minimum(row_start + tl.arange(0, ROWS), rows - 1), column_start + tl.arange(0, COLUMNS)
        pointers = ptr + offs_row.to(tl.int64)[:, None] * multiple_of_8(stride) + tl.arange(0, COLUMNS)[None, :]
        if EVEN:
            return tl.load(pointers + column_start)
        else:
            return tl.load(pointers + column_start, mask=(offs_col < multiple_of_8(columns))[None, :], other=0.0)


@triton.jit
def dot(a, b, acc):
    """Returns ``acc + a @ b`` fp32. The interpreter multiplies bf16 operands wrongly, so that operands are cast to fp32
    there."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def to_e4m3(x):
    """Casts ``x`` fp32 to e4m3, to the nearest number, ties to even. The interpreter's cast rounds wrongly, so that
    ``x`` is rounded before the cast there."""
    if INTERPRETED:
        exponent = tl.maximum(tl.floor(tl.log2(tl.maximum(tl.abs(x), 2.0**-6))), -6.0)
        spacing = tl.exp2(exponent - 3.0)
        x = ((x / spacing + 12582912.0) - 12582912.0) * spacing
        x = tl.minimum(tl.maximum(x, -LARGEST_E4M3), LARGEST_E4M3)
    return x.to(tl.float8e4nv)


@triton.jit
def descaled(
    product,  # [rows of the tile, columns of the tile] fp32
    hidden_scale_ptr,  # [rows] fp32, or None
    weight_scale_ptr,  # [] fp32
    hidden_common_ptr,  # [rows] fp32
    weight_common_ptr,  # [columns] fp32, or None
    offs_row,  # indices of the tile's rows
    rows,  # number of rows of the logits
    offs_col,  # indices of the tile's columns
    columns,  # number of columns of the logits
):
    """Returns logits from the product of e4m3 operands: multiplies by the scales of hidden states and weight, and adds
    the outer product of ``hidden_common`` and ``weight_common``. The outer product restores the
    component of hidden states that was subtracted from them (``Quantised``). No scales if ``hidden_scale_ptr`` is None;
    no outer product if ``weight_common_ptr`` is None."""
    if hidden_scale_ptr is not None:
        scale = tl.load(hidden_scale_ptr + offs_row, mask=offs_row < rows, other=0.0) * tl.load(weight_scale_ptr)
        product = product * scale[:, None]
    if weight_common_ptr is not None:
        hidden_common = tl.load(hidden_common_ptr + offs_row, mask=offs_row < rows, other=0.0)
        weight_common = tl.load(weight_common_ptr + offs_col, mask=offs_col < columns, other=0.0)
        product += hidden_common[:, None] * weight_common[None, :]
    return product


@triton.jit
def to_type_of(matrix, value):
    """Casts ``value`` to the dtype of a matrix."""
    if matrix[0] is not None:
        return rounded(value, matrix[0].dtype)
    else:
        return rounded(value, matrix[1].dtype.element_ty)


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """Casts ``value`` to ``dtype``, to the nearest number. The interpreter's cast to bf16 truncates, so that ``value``
    is rounded before the cast there."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
        nearest = ((bits + 32767 + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        value = tl.where(tl.abs(value) < float("inf"), nearest, value)
    return value.to(dtype)


@triton.jit
def store_tile(matrix, row_start, column_start, tile):
    """Casts ``tile`` to the matrix's dtype and stores it, also to the padding of rows to a multiple of 8 columns."""
    desc, ptr, stride, rows, columns = matrix
    tile = to_type_of(matrix, tile)
    if desc is not None:
        desc.store([row_start, column_start], tile)
    else:
        offs_row, offs_col = row_start + tl.arange(0, tile.shape[0]), column_start + tl.arange(0, tile.shape[1])
        offsets = offs_row.to(tl.int64)[:, None] * multiple_of_8(stride) + offs_col[None, :]
        mask = (offs_row < rows)[:, None] & (offs_col < multiple_of_8(columns))[None, :]
        tl.store(ptr + offsets, tile, mask=mask)


@triton.jit
def tile_place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Returns a tile's index among the rows of tiles, and its index among the columns of tiles. ``tile``: number of the
    tile. Numbers run down the rows within a group of GROUP_M rows of tiles, so that concurrent tiles read the same
    columns from L2."""
    group = tile // (GROUP_M * tiles_n)
    group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
    tile_in_group = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + tile_in_group % group_rows, tile_in_group // group_rows


@triton.jit
def counted_rows(count_ptr, first_row, rows):
    """Returns how many of a chunk's ``rows`` rows count. Rows that count come first in a call. ``count_ptr`` [] holds
    the number of them in the call; None: all rows count. ``first_row``: index in the call of the chunk's first row."""
    if count_ptr is not None:
        return tl.minimum(tl.maximum(tl.load(count_ptr) - first_row, 0), rows).to(tl.int32)
    else:
        return rows
