"""Matrices in e4m3 (``Quantised``), one byte a number, by torch operations."""

import math

import torch
from torch import Tensor

from ..kernels.common.tiles import LARGEST_E4M3, LEAST_SCALE, Quantised
from ..plan.sizes import cast_rows, slices


def empty_quantised(rows: int, columns: int, device: torch.device, *scales: int) -> Quantised:
    """Memory of a matrix in e4m3, with as many ``scales`` as rows, or none for one of all."""
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
    return Quantised(values, torch.empty(scales, dtype=torch.float32, device=device))


def scale_of(matrix: Tensor) -> Tensor:
    """The scale [] of all rows: e4m3 has a range of 2^18, more than the rows of a head differ by."""
    largest = torch.linalg.vector_norm(matrix, math.inf).float()
    return largest.div(LARGEST_E4M3).clamp(min=LEAST_SCALE).add_(largest * 0.0)


def quantise_(out: Quantised, matrix: Tensor) -> None:
    """As ``kernels.statistics.launch.quantise``."""
    if out.scale.dim():
        largest = matrix.abs().amax(1).float()
        torch.add((largest / LARGEST_E4M3).clamp(min=LEAST_SCALE), largest * 0.0, out=out.scale)
    for part in slices(len(matrix), cast_rows(matrix.shape[1])):
        scale = out.scale[part, None] if out.scale.dim() else out.scale
        out.values[part] = matrix[part].float().mul_(1.0 / scale).to(torch.float8_e4m3fn)
