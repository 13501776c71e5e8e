"""Launches of the kernels of e4m3 operands on torch tensors: grids, block sizes, warps."""

import torch

from ...core.gpus import multiprocessors_of
from ...core.records import ALL_ROWS, CountedRows
from ...core.tiles import E4M3_ROWS, Quantised, cdiv, power_of_2
from ..common.operands import Strips
from .gradients import both_orders_kernel, mean_of_rows_kernel, split_sparse_kernel, transposed_rows_kernel
from .quantise import quantise_kernel, sum_parts_kernel


def quantise(
    out: Quantised | None,  # receives the rounded matrix, with a scale for each row or one scale; None: it is not made
    matrix: torch.Tensor,  # [rows, columns] contiguous
    direction: torch.Tensor | None = None,  # [columns] fp32, numbers of bf16; with ``dots``
    dots: torch.Tensor | None = None,  # [rows] fp32: receives the products of rows and ``direction``
    prints: torch.Tensor | None = None,  # [rows] int32: receives the fingerprints of the rows of a 16-bit matrix
    expected: torch.Tensor | None = None,  # [rows] int32: fingerprints of unchanged rows; the dots of others become nan
) -> None:
    """Rounds a matrix to e4m3. If each row has a scale and there are ``dots``, the component of each row along the
    direction is subtracted before the rounding."""
    rows, columns = matrix.shape
    values, scale = (None, None) if out is None else out[:2]
    block_columns, warps = power_of_2(columns), 4 if columns <= 2048 else 8
    has_row_scales = scale is not None and scale.dim() == 1
    block_rows = 1 if has_row_scales else cdiv(2048 * warps, block_columns)  # 64 numbers a thread
    programs = cdiv(rows, block_rows)
    if not has_row_scales:
        programs = min(programs, 6 * multiprocessors_of(matrix.device))

    def launch(scale: torch.Tensor | None, sums: torch.Tensor | None, divisor: torch.Tensor | None) -> None:
        """Rounds all rows. ``sums``: receives the sums for one scale. ``divisor``: None: estimated from a few rows."""
        quantise_kernel[(programs,)](
            values, scale, sums, dots, prints, matrix, divisor, direction, expected, rows, columns,
            ROWS=block_rows, BLOCK=block_columns, num_warps=warps,
        )  # fmt: skip

    if scale is None or has_row_scales:
        launch(scale, None, None)
        return
    sums, second_divisor = matrix.new_empty(4, programs, dtype=torch.float32), torch.empty_like(scale)
    for divisor in (None, second_divisor):
        launch(None, sums, divisor)
        sum_parts_kernel[(1,)](scale, second_divisor, sums, programs, BLOCK=power_of_2(programs), num_warps=4)


def split_sparse(
    exp: torch.Tensor,  # [rows, vocab] 16 bit exponentials, which ``level_rows`` has written: become 0 at heavy ids
    sparse_ids: torch.Tensor,  # [rows, 1 + n] int32: receives the row's target and heavy ids, -1 for no id
    sparse_dlogits: torch.Tensor,  # [rows, 1 + n] fp32: receives the gradients of their logits
    divisor: torch.Tensor,  # [rows] fp32: receives the power of 2 that divides the row's exponentials
    hidden_factor: torch.Tensor,  # [rows] fp32: receives softmax factor times divisor
    row_max: torch.Tensor,  # [rows] fp32: receives max |hidden_factor * (hidden - mean)|
    hidden: torch.Tensor | None,  # [rows, hidden] contiguous; None: ``row_max`` is not made
    mean: torch.Tensor | None,  # [hidden] fp32
    heavy_ids: torch.Tensor,  # [rows, n] int32: heavy ids, then -1
    heavy_logits: torch.Tensor,  # [rows, n] fp32
    strips: Strips,
    strip_width: int,  # columns of a strip
    level: torch.Tensor,  # [rows] fp32: the logit that a row's exponentials are relative to
    target: torch.Tensor,  # [rows] int64, -1 where a row does not count
    target_logit: torch.Tensor,  # [rows] fp32
    factors: torch.Tensor,  # [2 or more, rows] fp32: softmax_factor, which is multiplied in place, and target_factor
    weight_scale: torch.Tensor,  # [] fp32
    counted: CountedRows = ALL_ROWS,
) -> None:
    """Writes the sparse part of the gradient of a chunk's logits, and a divisor of each row's exponentials for the
    dense part. Multiplies ``factors[0]`` in place by the divisors and the weight's scale."""
    (rows, vocab), strip_count = exp.shape, strips.offset.shape[0]
    hidden_size, block_strips = 0 if hidden is None else hidden.shape[1], power_of_2(strip_count)
    block_rows = max(1, min(8, 4096 // block_strips))
    split_sparse_kernel[(cdiv(rows, block_rows),)](
        exp, factors[0], sparse_ids, sparse_dlogits, divisor, hidden_factor, row_max, hidden, mean, heavy_ids,
        heavy_logits, strips.offset, strips.sums[0], level, target, target_logit, factors[1], weight_scale, *counted,
        rows, vocab, strip_count, strips.offset.stride(0), exp.stride(0), hidden_size,
        SLOTS=heavy_ids.shape[1], STRIP=strip_width, BLOCK_ROWS=block_rows, STRIPS=block_strips,
        BLOCK=min(power_of_2(max(hidden_size, 1)), 512), num_warps=4,
    )  # fmt: skip


def mean_of_rows(
    mean: torch.Tensor,  # [hidden] fp32
    hidden: torch.Tensor,  # [rows, hidden] contiguous
    target: torch.Tensor,  # [rows] int64, -1 where a row does not count
) -> None:
    """Takes 256 rows at equal distances and writes the mean of the rows among them that count."""
    rows, size = hidden.shape
    mean_of_rows_kernel[(cdiv(size, 32),)](mean, hidden, target, rows, size, SAMPLED=256, COLUMNS=32, num_warps=4)


def both_orders(
    out: torch.Tensor | None,  # [rows, padded columns] e4m3
    transposed: torch.Tensor | None,  # [padded columns, padded rows] e4m3
    matrix: torch.Tensor,  # [rows, columns] 16 bit or e4m3, contiguous columns
    divisor: torch.Tensor | None = None,  # [rows] fp32; None for 1
    hidden_factor: torch.Tensor | None = None,  # [rows] fp32, with ``divisor``: a row whose factor is 0 becomes 0
    # [rows / E4M3_ROWS, padded columns] fp32: receives sums of hidden_factor * matrix / divisor over E4M3_ROWS rows
    sums: torch.Tensor | None = None,  # receives sums of rows
    counted: CountedRows = ALL_ROWS,
) -> None:
    """Writes ``matrix / divisor`` in e4m3 to ``out``, and its transpose to ``transposed``, with 0 in rows that do not
    count and in the padding to multiples of 16."""
    rows, columns = matrix.shape
    padded_rows, padded_columns = cdiv(rows, 16) * 16, cdiv(columns, 16) * 16
    both_orders_kernel[cdiv(padded_rows, E4M3_ROWS), cdiv(padded_columns, E4M3_ROWS)](
        out, transposed, sums, matrix, divisor, hidden_factor, *counted, rows, padded_rows, columns, padded_columns,
        matrix.stride(0), ROWS=E4M3_ROWS, COLUMNS=E4M3_ROWS, num_warps=4,
    )  # fmt: skip


def transposed_rows(
    out: Quantised,  # [hidden, padded rows] with one scale
    hidden: torch.Tensor,  # [rows, hidden] contiguous
    mean: torch.Tensor,  # [hidden] fp32
    hidden_factor: torch.Tensor,  # [rows] fp32
    row_max: torch.Tensor,  # [rows] fp32
    counted: CountedRows = ALL_ROWS,
) -> None:
    """Writes ``(hidden_factor * (hidden - mean)).T`` in e4m3, with 0 in rows that do not count and in the padding."""
    (rows, size), padded_rows = hidden.shape, out.values.shape[1]
    transposed_rows_kernel[cdiv(padded_rows, 64), cdiv(size, 64)](
        out.values, out.scale, hidden, mean, hidden_factor, row_max, *counted, rows, padded_rows, size,
        ROWS=64, COLUMNS=64, BLOCK_MAX=256, num_warps=4,
    )  # fmt: skip
