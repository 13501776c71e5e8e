"""Which blocks of tokens and tiles of the vocabulary the recompute schedule makes its gradients from."""

import math

import torch

from .memory import recompute_memory
from .plans import rows_of
from .sizes import Sizes

# columns of the widest tile of the logits matmul: what is left over in a narrower one is computed for nothing
TILE_MULTIPLE = 256
# columns of a tile where nothing may be chosen by size
FIXED_TILE = 8192


def best_tile(
    sizes: Sizes, budget: int, weight_acc: torch.dtype, most_blocks: int, rows: int
) -> tuple[int, int] | None:
    """(block, tile) that fits and whose products move the fewest bytes; or None. ``rows`` are a sweep's."""
    best: tuple[int, int] | None = None
    least = math.inf
    tried = 0
    for blocks in range(1, most_blocks + 1):
        block = rows_of(sizes.tokens, blocks)
        if block == tried:
            continue
        tried = block
        if moved_by_blocks(sizes, block, weight_acc) >= least:
            break  # more blocks move more, whatever their tiles are
        memory = recompute_memory(sizes, rows, block, weight_acc)
        if sizes.deterministic:
            tile = min(sizes.vocab, FIXED_TILE)
            tile = tile if memory.extra(tile) <= budget else 0
        else:
            tile = even_tile(sizes.vocab, memory.largest(budget, sizes.vocab, TILE_MULTIPLE))
        if tile == 0:
            continue
        moved = moved_by_blocks(sizes, block, weight_acc) + moved_by_tiles(sizes, tile)
        if moved < least:
            best, least = (block, tile), moved
    return best


def even_tile(vocab: int, widest: int) -> int:
    """Columns of as many tiles as the widest make, none much narrower than the others."""
    if widest < TILE_MULTIPLE:
        return widest
    columns = math.ceil(vocab / math.ceil(vocab / widest))
    return min(vocab, math.ceil(columns / TILE_MULTIPLE) * TILE_MULTIPLE)


def moved_by_blocks(sizes: Sizes, block: int, weight_acc: torch.dtype) -> int:
    """Bytes read and written because each block walks the whole weight, twice, and adds to its whole gradient."""
    blocks = math.ceil(max(sizes.tokens, 1) / block)
    added = (2 * blocks - 1) * weight_acc.itemsize if sizes.weight_grad else 0
    return sizes.weight_elements * (2 * blocks * sizes.element + added)


def moved_by_tiles(sizes: Sizes, tile: int) -> int:
    """The same because each tile reads all rows of hidden states, twice, and adds to all of their gradient."""
    added = 2 * max(4, sizes.hidden_dtype.itemsize) if sizes.hidden_grad else 0
    return math.ceil(sizes.vocab / tile) * sizes.tokens * sizes.hidden * (2 * sizes.element + added)
