"""Tiles of matmuls, and sizes and numbers that kernels share with the rest; nothing here needs Triton."""

import os
from typing import NamedTuple

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# the column of a target that counts and lies in another part of the vocabulary
ELSEWHERE = 1 << 30
BEHIND = -2  # behind the last of the ids that tokens keep
# stands for log q where a teacher's probability is 0 and KL(p || q) would be infinite
LOG_FLOOR = -1e4


def cdiv(size: int, step: int) -> int:
    """Steps that cover the size. On the host ten times as fast as Triton's own, which kernels may call."""
    return -(-size // step)


def power_of_2(size: int) -> int:
    """The smallest power of 2 from ``size`` on."""
    return 1 << (size - 1).bit_length()


STRIPS_AT_ONCE = 8  # of relative logits that one program turns into gradients
E4M3_ROWS = 64 if INTERPRETED else 128  # and columns of exponentials that are rounded at a time
PRODUCT_ROWS = 128  # most rows of logits' gradients that dweight's product reads at a time


LARGEST_E4M3, LEAST_SCALE = 448.0, 1e-30  # a scale has an inverse, whatever it is of
SAMPLED_ROWS = 4  # of a weight, which tell how large its numbers are
HEAVY_LOG2, HEAVY = -6.0, 64  # logarithm of the probability that makes an id of a row heavy; the most that a row has
# of e4m3 logits; a heavy id's exact logit is above, and errs by less than the difference
CANDIDATE_LOG2 = -6.25


class Quantised(NamedTuple):
    """A matrix in e4m3, one byte a number, of which ``values * scale`` is what was rounded.

    Of hidden states that is without their part along a direction [columns], which ``common`` has.
    """

    values: torch.Tensor  # [rows, columns] float8_e4m3fn, contiguous
    scale: torch.Tensor  # [rows] fp32, or [] for all; nan where a number of them is not finite
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
    described: bool = True  # operands come by the tensor copy engine, else through pointers
    e4m3_stages: int | None = None  # where these are others for e4m3 operands

    @property
    def elements(self) -> int:
        return self.block_m * self.block_n

    def for_operand(self, matrix: Matrix) -> "Tile":
        """The tile for operands like this one: as many bytes of hidden states at a time."""
        if not isinstance(matrix, Quantised):
            return self
        return self._replace(block_k=self.block_k * 2, stages=self.e4m3_stages or self.stages)


def row_block(columns: int) -> tuple[int, int]:
    """Elements per step, and warps, of the kernels that walk a row."""
    block = min(power_of_2(columns), 1024 if INTERPRETED else 8192)
    return max(block, 128), 4 if block < 2048 else 16
