"""Tiles of the matmuls by measurement, and what memory follows from them; nothing here needs Triton."""

import functools
import os
from typing import NamedTuple

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# of every launch: a product and a sum are one instruction, whatever Triton does by itself (from 3.10 on it does not)
FUSED = {"enable_fp_fusion": True}


def cdiv(size: int, step: int) -> int:
    """Steps that cover the size. Triton's own may be called in kernels too, and takes ten times as long on the host."""
    return -(-size // step)


def power_of_2(size: int) -> int:
    """The least that is not smaller; likewise."""
    return 1 << (size - 1).bit_length()


PIECE = 16  # tokens of equal or neighbouring targets whose rows of dweight are summed at a time
LEAST_SECTION = 16 * PIECE  # tokens that are dealt with at a time where there is no room for the sums of more


def piece_bytes(tokens: int, columns: int) -> int:
    """Of the sums of targets that lie in several pieces: two of each piece, in fp32."""
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


RELATIVE_STRIP = 128  # columns that share one offset where relative logits are stored
# few steps over hidden make the epilogue weigh: a second program on the multiprocessor computes under it
SHORT_HIDDEN = 2048
WIDE_TILE = Tile()
NARROW_TILE = Tile(block_n=128, warps=4, per_multiprocessor=2)
# of few rows, which take the time that the weight takes to be read: more of it on its way at a time
FEW_ROWS = (Tile(block_m=64, warps=4, stages=4), Tile(block_m=64, block_n=128, warps=4, stages=8))
if INTERPRETED:
    RELATIVE_STRIP = 32
    WIDE_TILE = NARROW_TILE = Tile(block_m=32, block_n=64, block_k=64)
    FEW_ROWS = (Tile(block_m=16, block_n=64, block_k=64),)


# of the gradients' products: a step over rows is within a tile of them, behind whose end nobody has written
PRODUCT_TILE = Tile()
if INTERPRETED:
    PRODUCT_TILE = Tile(block_m=32, block_n=64, block_k=32)
TILE_ELEMENTS = PRODUCT_TILE.block_m * PRODUCT_TILE.block_n
MOST_PARTS = 16
LEAST_STEPS = 4  # over the vocabulary in a part


def exp_tile(hidden: int) -> Tile:
    """What was fastest on an H200, by hidden size."""
    return NARROW_TILE if hidden <= SHORT_HIDDEN else WIDE_TILE


def exp_tile_of(rows: int, hidden: int, vocab: int) -> Tile:
    """The same for chunks of so many rows: whatever the tile, a row's strips are those of ``strips_of``."""
    usual = exp_tile(hidden)

    def columns(tile: Tile) -> int:
        return cdiv(vocab, tile.block_n) * tile.block_n

    few = [tile for tile in FEW_ROWS if rows <= tile.block_m and columns(tile) == columns(usual)]
    return (*few, usual)[0]


def grad_tile(hidden: int) -> Tile:
    """The same where logits are computed again and leave as gradients, which no strips hold to the tile before."""
    return NARROW_TILE if hidden <= SHORT_HIDDEN // 2 else WIDE_TILE


def strip_width(hidden: int, relative: bool) -> int:
    """Columns of a strip: of its own width where it has an offset of its own."""
    return RELATIVE_STRIP if relative else exp_tile(hidden).block_n


def strips_of(vocab: int, hidden: int, relative: bool) -> int:
    """Number of column strips in a row of ``vocab`` logits: those of whole tiles."""
    block_n = exp_tile(hidden).block_n
    return cdiv(vocab, block_n) * (block_n // strip_width(hidden, relative))


class DhiddenSplit(NamedTuple):
    """Into how many parts over the vocabulary tiles of dhidden's last turn are cut; the places that their sums have."""

    parts: int = 1
    units: int = 0


WHOLE = DhiddenSplit()


@functools.lru_cache(maxsize=4096)  # asked for each chunk of each call
def dhidden_split(
    rows: int, hidden: int, vocab: int, multiprocessors: int, most_units: int | None = None
) -> DhiddenSplit:
    """The split that takes the fewest turns: all multiprocessors multiply to the end, or nearly.

    144 tiles on 132 multiprocessors would take two turns, the second for 12 tiles; in 11 parts these take a turn's
    eleventh. A part costs its sums' way to memory and back, about 0.2 % of a turn.
    """
    most_units = 2 * multiprocessors if most_units is None else most_units
    tile = PRODUCT_TILE
    left = cdiv(rows, tile.block_m) * cdiv(hidden, tile.block_n) % multiprocessors
    best, fewest = WHOLE, float("inf")
    for parts in range(1, MOST_PARTS + 1):
        if parts > 1 and (left * parts > most_units or parts * LEAST_STEPS * tile.block_k > vocab):
            break
        turns = cdiv(left * parts, multiprocessors) / parts + 0.002 * parts
        if turns < fewest:
            best, fewest = DhiddenSplit(parts, left * parts if parts > 1 else 0), turns
    return best
