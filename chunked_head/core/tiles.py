"""Tiles of matmuls, and constants that kernels share with the rest of the library. Needs no Triton."""

import os
from typing import NamedTuple

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
ELSEWHERE = 1 << 30  # in targets: an id that counts but lies on another rank
BEHIND = -2  # in a list of kept ids: an entry after the last
LOG_FLOOR = -1e4  # lower bound of log p and log q in sums: with a probability of 0, KL(p || q) would be infinite


def cdiv(size: int, step: int) -> int:
    """Returns ``ceil(size / step)``. On the host ``triton.cdiv`` takes ten times as long."""
    return -(-size // step)


def power_of_2(size: int) -> int:
    """Returns the smallest power of 2 that is at least ``size``."""
    return 1 << (size - 1).bit_length()


STRIPS_AT_ONCE = 8  # strips of relative logits that one program turns into gradients
E4M3_ROWS = 64 if INTERPRETED else 128  # a block of exponentials that is rounded to e4m3 has as many rows and columns
PRODUCT_ROWS = 128  # most rows of logits' gradients that dweight's product reads at a time


LARGEST_E4M3, LEAST_SCALE = 448.0, 1e-30  # largest number of e4m3; least scale, whose inverse is finite
SAMPLED_ROWS = 4  # rows of a weight from which its scale is estimated
# An id of a row is heavy if its probability is above a threshold: 2^LEAST_HEAVY_LOG2, or twice or four times as much in
# a row where more than HEAVY ids could be heavy. A row has at most HEAVY heavy ids. Logits of e4m3 operands err by less
# than MARGIN_LOG2 in base 2: an id is a candidate if its e4m3 logit is above the threshold less that margin, and its
# exact logit decides.
LEAST_HEAVY_LOG2, MARGIN_LOG2, HEAVY = -8.0, 0.25, 64


class Quantised(NamedTuple):
    """A matrix in e4m3, one byte per number: ``values * scale`` is the matrix, rounded.

    From each row of hidden states a multiple of one direction [columns] was subtracted before: ``common`` has the
    multiples.
    """

    values: torch.Tensor  # [rows, columns] float8_e4m3fn, contiguous
    scale: torch.Tensor  # [rows] fp32, or [] for all rows; nan if an element of the row, or of all rows, is not finite
    common: torch.Tensor | None = None  # [rows] fp32 multiples of the direction; None: nothing was subtracted


Matrix = torch.Tensor | Quantised  # an operand of the logits' products


class Tile(NamedTuple):
    """The tile of a persistent matmul [m, k] @ [k, n], and how the matmul is launched."""

    block_m: int = 128  # rows of the result
    block_n: int = 256  # columns of the result
    block_k: int = 64  # step over k
    group_m: int = 16  # number of rows of tiles that are made before the next column of tiles
    warps: int = 8  # number of warps of a program
    stages: int = 3  # number of stages of the pipeline that loads operands
    per_multiprocessor: int = 1  # number of programs that a multiprocessor runs at a time
    described: bool = True  # True: the tensor copy engine loads operands (descriptors); False: loads through pointers
    e4m3_stages: int | None = None  # number of stages for e4m3 operands; None: the same number

    @property
    def elements(self) -> int:
        """Number of elements of the result in a tile."""
        return self.block_m * self.block_n

    def for_operand(self, matrix: Matrix) -> "Tile":
        """The tile for operands of the type of ``matrix``. The step over k has twice as many elements for e4m3, hence
        as many bytes as for 16 bits."""
        if not isinstance(matrix, Quantised):
            return self
        return self._replace(block_k=self.block_k * 2, stages=self.e4m3_stages or self.stages)


def row_block(columns: int) -> tuple[int, int]:
    """For kernels with one program per row: returns the number of columns that a program reads at a time, and the
    number of its warps."""
    block_columns = min(power_of_2(columns), 1024 if INTERPRETED else 8192)
    return max(block_columns, 128), 4 if block_columns < 2048 else 16
