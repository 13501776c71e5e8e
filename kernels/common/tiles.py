"""Tiles of matmuls, the arithmetic of sizes and numbers that kernels share with the rest; nothing here needs Triton."""

import os
from typing import NamedTuple

from .cache import Cache

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# the column of a target that is none of those at hand, for rows that count: a vocabulary in parts has it elsewhere
ELSEWHERE = 1 << 30
BEHIND = -2  # behind the last of the ids that tokens keep
# stands for log q where a teacher's probability is 0 and KL(p || q) would be infinite
LOG_FLOOR = -1e4


def cdiv(size: int, step: int) -> int:
    """Steps that cover the size. Triton's own may be called in kernels too, and takes ten times as long on the host."""
    return -(-size // step)


def power_of_2(size: int) -> int:
    """The least that is not smaller; likewise."""
    return 1 << (size - 1).bit_length()


PIECE = 16  # tokens of equal or neighbouring targets whose rows of dweight are summed at a time
LEAST_SECTION = 16 * PIECE  # tokens that are dealt with at a time where there is no room for the sums of more


STRIPS_AT_ONCE = 8  # of relative logits, that one program turns into gradients
PRODUCT_ROWS = 128  # the most rows of logits' gradients that a product for dweight reads at a time


def piece_bytes(tokens: int, columns: int) -> int:
    """Bytes of the sums of targets that lie in several pieces: two of each piece, in fp32."""
    return 2 * cdiv(tokens, PIECE) * columns * 4


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

    @property
    def elements(self) -> int:
        return self.block_m * self.block_n


def row_block(columns: int) -> tuple[int, int]:
    """Elements a step and warps of the kernels that walk a row."""
    block = min(power_of_2(columns), 1024 if INTERPRETED else 8192)
    return max(block, 128), 4 if block < 2048 else 16


class DhiddenSplit(NamedTuple):
    """Into how many parts over the vocabulary tiles of dhidden's last turn are cut; the places that their sums have."""

    parts: int = 1
    units: int = 0


UNCUT = DhiddenSplit()
MOST_PARTS = 16
LEAST_STEPS = 4  # over the vocabulary in a part
SPLITS: Cache[tuple, DhiddenSplit] = Cache(4096)  # asked for each chunk of each call


def dhidden_split(
    tile: Tile, rows: int, hidden: int, vocab: int, multiprocessors: int, most_units: int | None = None
) -> DhiddenSplit:
    """The split that takes the fewest turns: all multiprocessors multiply to the end, or nearly.

    144 tiles on 132 multiprocessors would take two turns, the second for 12 tiles; in 11 parts these take a turn's
    eleventh. A part costs its sums' way to memory and back, about 0.2 % of a turn, and room: it has to save 0.5 %.
    """
    most_units = 4 * multiprocessors if most_units is None else most_units
    key = tile, rows, hidden, vocab, multiprocessors, most_units
    return SPLITS.made(key, lambda: fewest_turns(*key))


def fewest_turns(tile: Tile, rows: int, hidden: int, vocab: int, multiprocessors: int, most_units: int) -> DhiddenSplit:
    left = cdiv(rows, tile.block_m) * cdiv(hidden, tile.block_n) % multiprocessors
    best, fewest = UNCUT, float("inf")
    for parts in range(1, MOST_PARTS + 1):
        if parts > 1 and (left * parts > most_units or parts * LEAST_STEPS * tile.block_k > vocab):
            break
        turns = cdiv(left * parts, multiprocessors) / parts + 0.005 * parts
        if turns < fewest:
            best, fewest = DhiddenSplit(parts, left * parts if parts > 1 else 0), turns
    return best
