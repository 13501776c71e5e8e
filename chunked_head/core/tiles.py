"""Tiles of matmuls, and constants that kernels share with the rest of the library. Needs no Triton."""

import os
from typing import NamedTuple

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# stands for the column of a target that counts but lies on another rank
ELSEWHERE = 1 << 30
BEHIND = -2  # stands for an entry after the last of the ids that tokens keep
# least value of log p and log q in sums: for a probability of 0, KL(p || q) would be infinite
LOG_FLOOR = -1e4


def cdiv(size: int, step: int) -> int:
    """``ceil(size / step)``. On the host it is ten times as fast as ``triton.cdiv``, which kernels may call."""
    return -(-size // step)


def power_of_2(size: int) -> int:
    """The smallest power of 2 from ``size`` on."""
    return 1 << (size - 1).bit_length()


STRIPS_AT_ONCE = 8  # strips of relative logits that one program turns into gradients
E4M3_ROWS = 64 if INTERPRETED else 128  # and columns of exponentials that are rounded at a time
PRODUCT_ROWS = 128  # most rows of logits' gradients that dweight's product reads at a time


LARGEST_E4M3, LEAST_SCALE = 448.0, 1e-30  # largest number of e4m3; least scale, whose inverse is finite
SAMPLED_ROWS = 4  # rows of a weight from which its scale is estimated
# An id of a row is heavy above a probability of 2^LEAST_HEAVY_LOG2, or of twice or four times as much where more than
# HEAVY ids, the most that a row has, may be above. Candidates are ids whose e4m3 logit is at most MARGIN_LOG2 below in
# base 2, more than it errs by: their exact logits decide.
LEAST_HEAVY_LOG2, MARGIN_LOG2, HEAVY = -8.0, 0.25, 64


class Quantised(NamedTuple):
    """A matrix in e4m3, one byte a number, of which ``values * scale`` is what was rounded.

    Of hidden states that is without their part along a direction [columns], which ``common`` has.
    """

    values: torch.Tensor  # [rows, columns] float8_e4m3fn, contiguous
    scale: torch.Tensor  # [rows] fp32, or [] for all rows; nan if an element of the rows is not finite
    common: torch.Tensor | None = None  # [rows] fp32: each row times the direction; None where there is none


Matrix = torch.Tensor | Quantised  # an operand of the logits' products


class Tile(NamedTuple):
    """Tile of a persistent matmul and how it is run."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 16
    warps: int = 8
    stages: int = 3
    per_multiprocessor: int = 1
    described: bool = True  # True: the tensor copy engine loads operands (descriptors); False: loads through pointers
    e4m3_stages: int | None = None  # number of stages for e4m3 operands; None: the same number

    @property
    def elements(self) -> int:
        return self.block_m * self.block_n

    def for_operand(self, matrix: Matrix) -> "Tile":
        """The tile for operands of this dtype: its step over the hidden size has equally many bytes for all dtypes."""
        if not isinstance(matrix, Quantised):
            return self
        return self._replace(block_k=self.block_k * 2, stages=self.e4m3_stages or self.stages)


def row_block(columns: int) -> tuple[int, int]:
    """Returns elements per step, and the number of warps, for kernels in which a program walks over a row."""
    block = min(power_of_2(columns), 1024 if INTERPRETED else 8192)
    return max(block, 128), 4 if block < 2048 else 16
