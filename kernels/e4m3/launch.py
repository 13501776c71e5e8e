"""Launching the kernels of e4m3 operands on torch tensors: grids, block sizes, warps."""

import torch

from ...core.gpus import multiprocessors_of
from ...core.tiles import Quantised, cdiv, power_of_2
from .quantise import quantise_kernel, sum_parts_kernel


def quantise(
    out: Quantised | None,
    matrix: torch.Tensor,
    direction: torch.Tensor | None = None,
    dots: torch.Tensor | None = None,
    prints: torch.Tensor | None = None,
    expected: torch.Tensor | None = None,
) -> None:
    """Rounds a contiguous matrix, by a scale for each row or one for all; without ``out`` not.

    ``dots`` [rows] fp32 receive the rows' products with ``direction`` [columns] fp32, of bf16 numbers; a row with a
    scale of its own is rounded without its part along that. Of a 16-bit matrix ``prints`` [rows] int32 receives
    fingerprints; dots are nan where they are not those ``expected``."""
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
