"""Launching the kernels of e4m3 operands on torch tensors: grids, block sizes, warps."""

import torch

from ...core.gpus import multiprocessors_of
from ...core.records import ALL_ROWS, CountedRows
from ...core.tiles import E4M3_ROWS, Quantised, cdiv, power_of_2
from ..common.operands import Strips
from .gradients import both_orders_kernel, mean_of_rows_kernel, split_sparse_kernel, transposed_rows_kernel
from .quantise import quantise_kernel, sum_parts_kernel


def quantise(
    out: Quantised | None,
    matrix: torch.Tensor,
    direction: torch.Tensor | None = None,
    dots: torch.Tensor | None = None,
    prints: torch.Tensor | None = None,
    expected: torch.Tensor | None = None,
) -> None:
    """Rounds a contiguous matrix to ``out``, by a scale for each row or one for all. Without ``out`` it makes only the
    vectors below.

    ``dots`` [rows] fp32: receives the products of rows and ``direction`` [columns] fp32, whose numbers are bf16's. Rows
    with a scale each are rounded without their part along the direction. ``prints`` [rows] int32: receives fingerprints
    of the rows of a 16-bit matrix. ``expected`` [rows] int32: dots of rows with another fingerprint become nan."""
    rows, columns = matrix.shape
    values, scale = (None, None) if out is None else out[:2]
    block, warps = power_of_2(columns), 4 if columns <= 2048 else 8
    each_row = scale is not None and scale.dim() == 1
    at_once = 1 if each_row else cdiv(2048 * warps, block)  # 64 numbers a thread
    programs = cdiv(rows, at_once) if each_row else min(cdiv(rows, at_once), 6 * multiprocessors_of(matrix.device))

    def launch(scale: torch.Tensor | None, sums: torch.Tensor | None, divisor: torch.Tensor | None) -> None:
        quantise_kernel[(programs,)](
            values, scale, sums, dots, prints, matrix, divisor, direction, expected, rows, columns,
            ROWS=at_once, BLOCK=block, num_warps=warps,
        )  # fmt: skip

    if scale is None or each_row:
        launch(scale, None, None)
        return
    sums, second_divisor = matrix.new_empty(4, programs, dtype=torch.float32), torch.empty_like(scale)
    for divisor in (None, second_divisor):
        launch(None, sums, divisor)
        sum_parts_kernel[(1,)](scale, second_divisor, sums, programs, BLOCK=power_of_2(programs), num_warps=4)


def split_sparse(
    exp: torch.Tensor,  # [rows, vocab] 16 bit, as ``level_rows`` leaves them; 0 at heavy ids afterwards
    sparse_ids: torch.Tensor,  # [rows, 1 + n] int32: the row's target and heavy ids, -1 for none
    sparse_dlogits: torch.Tensor,  # [rows, 1 + n] fp32: gradients of their logits
    divisor: torch.Tensor,  # [rows] fp32: power of 2 for the row's exponentials
    hidden_factor: torch.Tensor,  # [rows] fp32: softmax factor times divisor
    row_max: torch.Tensor,  # [rows] fp32: max |hidden_factor * (hidden - mean)|
    hidden: torch.Tensor | None,  # [rows, hidden] contiguous; None: ``row_max`` is not made
    mean: torch.Tensor | None,  # [hidden] fp32
    heavy_ids: torch.Tensor,  # [rows, n] int32, -1 behind the last
    heavy_logits: torch.Tensor,  # [rows, n] fp32
    strips: Strips,
    strip: int,  # columns
    level: torch.Tensor,
    target: torch.Tensor,
    target_logit: torch.Tensor,
    factors: torch.Tensor,  # [2 or more, rows] fp32: softmax_factor, multiplied by the divisor and the weight's scale;
    # target_factor
    weight_scale: torch.Tensor,  # [] fp32
    counted: CountedRows = ALL_ROWS,
) -> None:
    """Splits the gradient of a chunk's logits into a sparse part (the target and heavy ids) and exponentials to be
    divided by ``divisor``, as ``gradients.py`` says."""
    (rows, vocab), count, width = exp.shape, strips.offset.shape[0], 0 if hidden is None else hidden.shape[1]
    columns = power_of_2(count)
    at_once = max(1, min(8, 4096 // columns))
    split_sparse_kernel[(cdiv(rows, at_once),)](
        exp, factors[0], sparse_ids, sparse_dlogits, divisor, hidden_factor, row_max, hidden, mean, heavy_ids,
        heavy_logits, strips.offset, strips.sums[0], level, target, target_logit, factors[1], weight_scale, *counted,
        rows, vocab, count, strips.offset.stride(0), exp.stride(0), width,
        SLOTS=heavy_ids.shape[1], STRIP=strip, BLOCK_ROWS=at_once, STRIPS=columns,
        BLOCK=min(power_of_2(max(width, 1)), 512), num_warps=4,
    )  # fmt: skip


def mean_of_rows(
    mean: torch.Tensor,  # [hidden] fp32
    hidden: torch.Tensor,  # [rows, hidden] contiguous
    target: torch.Tensor,  # [rows] int64, -1 where a row does not count
) -> None:
    """Writes the mean of those of 256 rows at equal distances that count."""
    rows, width = hidden.shape
    mean_of_rows_kernel[(cdiv(width, 32),)](mean, hidden, target, rows, width, SAMPLED=256, COLUMNS=32, num_warps=4)


def both_orders(
    out: torch.Tensor | None,  # [rows, columns] e4m3, a multiple of 16
    transposed: torch.Tensor | None,  # [columns, padded rows] e4m3, a multiple of 16
    matrix: torch.Tensor,  # [rows, columns] 16 bit or e4m3, contiguous columns
    divisor: torch.Tensor | None = None,  # [rows] fp32; None for 1
    hidden_factor: torch.Tensor | None = None,  # [rows] fp32, with the divisor: where it is 0 a row becomes 0
    # [rows / E4M3_ROWS, columns] fp32: of hidden_factor * matrix / divisor over E4M3_ROWS rows
    sums: torch.Tensor | None = None,
    counted: CountedRows = ALL_ROWS,
) -> None:
    """Writes ``matrix / divisor`` in e4m3, as it is and transposed; 0 in rows that do not count and in the padding."""
    (rows, columns), block = matrix.shape, E4M3_ROWS
    padded_rows, padded_columns = cdiv(rows, 16) * 16, cdiv(columns, 16) * 16
    both_orders_kernel[cdiv(padded_rows, block), cdiv(padded_columns, block)](
        out, transposed, sums, matrix, divisor, hidden_factor, *counted, rows, padded_rows, columns, padded_columns,
        matrix.stride(0), ROWS=block, COLUMNS=block, num_warps=4,
    )  # fmt: skip


def transposed_rows(
    out: Quantised,  # [hidden, padded rows] e4m3, one scale
    hidden: torch.Tensor,  # [rows, hidden] contiguous
    mean: torch.Tensor,  # [hidden] fp32
    hidden_factor: torch.Tensor,  # [rows] fp32
    row_max: torch.Tensor,  # [rows] fp32
    counted: CountedRows = ALL_ROWS,
) -> None:
    """Writes ``(hidden_factor * (hidden - mean)).T`` in e4m3."""
    (rows, width), padded = hidden.shape, out.values.shape[1]
    transposed_rows_kernel[cdiv(padded, 64), cdiv(width, 64)](
        out.values, out.scale, hidden, mean, hidden_factor, row_max, *counted, rows, padded, width,
        ROWS=64, COLUMNS=64, AT_ONCE=256, num_warps=4,
    )  # fmt: skip
