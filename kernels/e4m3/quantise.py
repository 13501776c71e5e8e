"""Rounding of matrices to e4m3, by one scale for each row or one for the whole matrix.

With a divisor ``s`` the kernels store ``out = e4m3(matrix / s)`` and

    scale = s sqrt(sum (matrix / s)^2 / sum out^2)

The sums are over the numbers that share the scale, so that ``scale * out`` has the matrix's norm. With ``scale = s``
the norms of rows were up to 0.4 % larger or smaller, and log-probabilities of flat heads erred by 1.5e-2 nats.

Each row of hidden states has its own ``s = largest / 448``. A direction along which many rows have a large component is
subtracted before; what the component adds to logits is added in fp32. A weight has one ``s``, a power of 2: divided by
``s``, the longest of a few rows has a root mean square of 2 to 4, so that numbers of 100 times that size fit. One
launch rounds the weight. If a number does not fit, a second launch rounds the weight again; else the second launch ends
at once.

The fingerprint of a row of 16-bit numbers is ``sum_j bits[j] factor[j]`` modulo 2^32, with odd pseudo-random factors. A
change of one number always changes the fingerprint; any other change does with a probability of 1 - 2^-32. If the
caller gives the weight's e4m3 copy, a call reads the weight for ``dots`` and compares fingerprints with the copy's:
dots and logits of a changed row become nan.
"""

import triton
import triton.language as tl

from ...core import tiles
from ..common.blocks import to_e4m3
from ..common.launcher import kernel

LARGEST, LEAST = tl.constexpr(tiles.LARGEST_E4M3), tl.constexpr(tiles.LEAST_SCALE)
SAMPLED_ROWS = tl.constexpr(tiles.SAMPLED_ROWS)


@triton.jit
def factors_of(column):
    """Returns the odd factors [columns] of a fingerprint, hashes of the column indices."""
    factor = column.to(tl.uint32) * 2654435769
    factor = (factor ^ (factor >> 15)) * 2246822519
    return (factor ^ (factor >> 13)) | 1


@kernel
def quantise_kernel(
    # outputs
    out_ptr,  # [rows, columns] e4m3 contiguous; None: the matrix is not rounded
    scale_ptr,  # [rows] fp32: each row's scale; None without scales per row
    # [4, programs] fp32, for one scale: s, the largest number of matrix / s, the sums of squares of matrix / s and of
    # the rounded numbers; None without one scale
    sums_ptr,
    dots_ptr,  # [rows] fp32: product of each row and the direction; or None
    print_ptr,  # [rows] int32: fingerprints of rows; or None
    # inputs
    matrix_ptr,  # [rows, columns] contiguous
    divisor_ptr,  # [] fp32: s, or 0 if the matrix is rounded already; None: s is estimated from a few rows
    direction_ptr,  # [columns] fp32, numbers of bf16: subtracted from rows with a scale each; None without ``dots_ptr``
    expected_ptr,  # [rows] int32: fingerprints; the dots of a row with another fingerprint become nan; or None
    # sizes
    rows,
    columns,
    ROWS: tl.constexpr,  # rows that a program rounds at a time
    BLOCK: tl.constexpr,  # power of 2 from the number of columns on
):
    """Rounds a matrix, ROWS rows at a time. A scale becomes nan if a number that shares it is not finite."""
    program = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    in_columns, end_row = offs < columns, rows
    if sums_ptr is not None:
        if divisor_ptr is not None:
            divisor = tl.load(divisor_ptr)
            end_row = tl.where(divisor == 0.0, 0, rows)
        else:
            mean_square = LEAST + 0.0
            for i in tl.static_range(SAMPLED_ROWS):
                row_ptr = matrix_ptr + tl.cast(rows, tl.int64) * i // SAMPLED_ROWS * columns
                sample = tl.load(row_ptr + offs, mask=in_columns, other=0.0).to(tl.float32)
                mean_square = tl.maximum(mean_square, tl.sum(sample * sample, 0) / columns)
            divisor = tl.exp2(tl.floor(0.5 * tl.log2(mean_square)) - 1.0)
    if dots_ptr is not None:
        direction = tl.load(direction_ptr + offs, mask=in_columns, other=0.0)[None, :]
    if print_ptr is not None or expected_ptr is not None:
        factor = factors_of(offs)[None, :]
    largest = tl.zeros((ROWS,), dtype=tl.float32)
    exact_squares = tl.zeros((ROWS,), dtype=tl.float32)
    rounded_squares = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(program * ROWS, end_row, tl.num_programs(0) * ROWS):
        offs_row = start + tl.arange(0, ROWS)
        in_rows = offs_row < rows
        mask = in_rows[:, None] & in_columns[None, :]
        offsets = offs_row.to(tl.int64)[:, None] * columns + offs[None, :]
        source_values = tl.load(matrix_ptr + offsets, mask=mask, other=0.0)
        x = source_values.to(tl.float32)
        if print_ptr is not None or expected_ptr is not None:
            bits = source_values.to(tl.int16, bitcast=True).to(tl.int32).to(tl.uint32, bitcast=True)
            prints = tl.sum(bits * factor, 1).to(tl.int32, bitcast=True)
        if print_ptr is not None:
            tl.store(print_ptr + offs_row, prints, mask=in_rows)
        if dots_ptr is not None:
            dots = tl.sum(x * direction, 1)
            if expected_ptr is not None:
                expected = tl.load(expected_ptr + offs_row, mask=in_rows, other=0)
                dots = tl.where(prints == expected, dots, float("nan"))
            if scale_ptr is not None:
                # 8 significant bits, like the direction's: the product is exact, so kernels and torch get equal bits
                dots = (dots.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
                x -= dots[:, None] * direction
            tl.store(dots_ptr + offs_row, dots, mask=in_rows)
        if out_ptr is not None:
            if scale_ptr is not None:
                row_divisor = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), LARGEST), LEAST) + tl.sum(x * 0.0, 1)
                x *= tl.div_rn(1.0, row_divisor)[:, None]
            else:
                x *= tl.div_rn(1.0, divisor)
                largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
            e4m3 = to_e4m3(x)
            tl.store(out_ptr + offsets, e4m3, mask=mask)
            rounded = e4m3.to(tl.float32)
            row_squares, rounded_row_squares = tl.sum(x * x, 1), tl.sum(rounded * rounded, 1)
            if scale_ptr is not None:
                scale = row_divisor * tl.sqrt_rn(tl.div_rn(row_squares + 1.0, rounded_row_squares + 1.0))
                tl.store(scale_ptr + offs_row, scale, mask=in_rows)
            else:
                exact_squares += row_squares
                rounded_squares += rounded_row_squares
    if sums_ptr is not None:
        program_pointer, programs = sums_ptr + program, tl.num_programs(0)
        tl.store(program_pointer, divisor, mask=end_row > 0)
        tl.store(program_pointer + programs, tl.max(largest, 0), mask=end_row > 0)
        tl.store(program_pointer + 2 * programs, tl.sum(exact_squares, 0), mask=end_row > 0)
        tl.store(program_pointer + 3 * programs, tl.sum(rounded_squares, 0), mask=end_row > 0)


@kernel
def sum_parts_kernel(
    # outputs
    scale_ptr,  # [] fp32
    divisor_ptr,  # [] fp32: a divisor with which all numbers fit e4m3; 0 if they fit already
    # inputs
    sums_ptr,  # [4, programs] fp32, which ``quantise_kernel`` has written
    # sizes
    programs,  # number of programs
    BLOCK: tl.constexpr,  # power of 2 from the number of programs on
):
    """Makes the scale of a whole matrix from the sums of the programs that have rounded it."""
    offs = tl.arange(0, BLOCK)
    program_pointers, mask = sums_ptr + offs, offs < programs
    divisor = tl.load(sums_ptr)
    largest = tl.max(tl.load(program_pointers + programs, mask=mask, other=0.0), 0)
    exact_squares = tl.sum(tl.load(program_pointers + 2 * programs, mask=mask, other=0.0), 0)
    rounded_squares = tl.sum(tl.load(program_pointers + 3 * programs, mask=mask, other=0.0), 0)
    scale = divisor * tl.sqrt_rn(tl.div_rn(exact_squares + 1.0, rounded_squares + 1.0)) + exact_squares * 0.0
    tl.store(scale_ptr, scale)
    growth = tl.exp2(tl.ceil(tl.log2(tl.maximum(largest / LARGEST, 1.0))))
    tl.store(divisor_ptr, tl.where(largest > LARGEST, divisor * growth, 0.0))
