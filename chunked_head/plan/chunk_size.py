"""The rows of a chunk, and the rows and columns of the tiles that the recompute schedule makes its gradients from.

``chunk_size`` decides the first, ``block_and_tile`` the second: the largest that the budget holds.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from .buffers import CHUNK_MULTIPLE, MiB
from .plans import Plan
from .sizes import Sizes

GOOD_CHUNK = 2048  # fewer rows leave matmuls starved and make every pass over the gradient of the weight count
MODEST_SWEEP = 60 * MiB
FEW_CHUNKS = 4  # up to which one chunk fewer is worth rows that are no multiple of a tile's
HALF_TILE = 64  # rows that dweight's product takes at a time
FEW_TOKENS = 16  # up to which each number of tokens is a size of its own
# by how much chunks that end where segments do may be larger than equal ones, so that there are no more of them: at
# most, and where the budget is near at least
SLACK, LEAST_SLACK = 1.25, 1.1
TILE_MULTIPLE = 256  # columns of the widest tile of the logits matmul: the rest of a narrower one is computed in vain
FIXED_TILE = 8192  # columns of a tile where nothing may be chosen by size


def chunk_size(plan: Plan, named: int | None, fits_budget: bool) -> int:
    """Rows of a chunk of ``plan``, which makes its gradients along with the statistics: as many as its budget holds,
    or as the caller ``named``; 0 where those do not fit and ``fits_budget`` says that they must."""
    tokens, budget, sized = max(plan.sizes.tokens, 1), plan.budget, partial(of_rows, plan)
    if named is not None:
        rows = balanced(tokens, named)
        return 0 if fits_budget and sized(rows).extra_bytes > budget else rows
    rows = largest(sized, budget, tokens)
    # A chunk less may fit where the next multiple of 128 does not. That is worth rows that tiles compute in vain where
    # it saves a quarter of the passes over dweight, and not where it saves an eighth.
    fewer = -(-tokens // rows) - 1 if rows else 0
    for multiple in (HALF_TILE, 16) if fewer else ():
        fitting = multiple * math.ceil(tokens / fewer / multiple)
        if (fewer < FEW_CHUNKS or fitting % CHUNK_MULTIPLE == 0) and sized(fitting).extra_bytes <= budget:
            rows = fitting
            break
    if rows == 0:
        return 0
    equal = uneven(tokens, rows) if plan.sizes.by_segments else balanced(tokens, rows)
    return equal if sized(equal).extra_bytes <= budget else rows  # parts of dhidden may take more of fewer rows


def sweep_size(plan: Plan, named: int | None, explicit: bool) -> int:
    """Rows of a chunk in a pass that keeps statistics and makes no gradient; 0 where none fit. ``explicit``: the
    caller gave the budget."""
    most = max(1, plan.sizes.tokens if named is None else min(plan.sizes.tokens, named))
    if named is not None and not explicit:
        return balanced(plan.sizes.tokens, most)
    sized = partial(of_rows, plan)
    rows = largest(sized, plan.budget, most)
    if not explicit and not plan.sizes.keeps_sweep:
        # where no logits are stored, larger chunks gain nothing
        rows = min(rows, max(largest(sized, MODEST_SWEEP, most), GOOD_CHUNK))
    if rows == 0 or (named is not None and rows < min(plan.sizes.tokens, named)):
        return 0
    return balanced(plan.sizes.tokens, rows)


def of_rows(plan: Plan, rows: int) -> Plan:
    """The plan with chunks of ``rows``."""
    return replace(plan, chunk_tokens=rows, block_tokens=rows)


def largest(sized: Callable[[int], Plan], budget: int, most: int, multiple: int = CHUNK_MULTIPLE) -> int:
    """The largest size up to ``most`` whose plan fits, a multiple of ``multiple`` unless it is ``most`` or none is."""
    if sized(most).extra_bytes <= budget:
        return most
    for step, top in ((multiple, most // multiple), (1, multiple - 1)):
        low, high = 0, top  # the bytes needed grow with the size: bisect
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if sized(middle * step).extra_bytes <= budget else (low, middle - 1)
        if low:
            return low * step
    return 0


def balanced(tokens: int, most: int) -> int:
    """Rows of equal chunks of at most ``most``, a multiple of 128, 64 or 16, where ``most`` leaves room for that."""
    if tokens <= most:
        return max(tokens, 1)
    rows = math.ceil(tokens / math.ceil(tokens / most))
    rounded = (math.ceil(rows / multiple) * multiple for multiple in (CHUNK_MULTIPLE, HALF_TILE, 16))
    return next((choice for choice in rounded if choice <= most), rows)


def uneven(tokens: int, most: int) -> int:
    """Rows that the largest of chunks may have that end where segments do, of at most ``most``."""
    if most >= tokens:
        return max(tokens, 1)
    return min(most, tokens, int(balanced(tokens, max(1, int(most / LEAST_SLACK))) * SLACK))


def rows_of(tokens: int, chunks: int) -> int:
    """Rows of equal chunks, no more of them than ``chunks``, a multiple of 128 where there are several."""
    rows = -(-max(tokens, 1) // chunks)
    return min(max(tokens, 1), -(-rows // CHUNK_MULTIPLE) * CHUNK_MULTIPLE)


def padded_rows(tokens: int) -> int:
    """Rows of a call of so many tokens where rows that do not count may follow the tokens' own: no more than the tiles
    of matmuls have anyway. Calls whose numbers of tokens differ by less are calls of one size."""
    if tokens <= FEW_TOKENS:
        return tokens
    step = HALF_TILE if tokens <= HALF_TILE else CHUNK_MULTIPLE
    return math.ceil(tokens / step) * step


def block_and_tile(plan: Plan, most_blocks: int) -> Plan | None:
    """The recompute plan with the block and the tile that fit and whose products move the fewest bytes; or None."""
    sizes, weight_acc = plan.sizes, plan.weight_accumulate
    best, least = None, math.inf
    tried = 0
    for blocks in range(1, most_blocks + 1):
        block = rows_of(sizes.tokens, blocks)
        if block == tried:
            continue
        tried = block
        moved = moved_by_blocks(sizes, block, weight_acc)
        if moved >= least:
            break  # more blocks move more, whatever their tiles are
        tile = widest_tile(plan, block)
        if tile and moved + moved_by_tiles(sizes, tile) < least:
            best, least = of_tile(plan, block, tile), moved + moved_by_tiles(sizes, tile)
    return best


def of_tile(plan: Plan, block: int, tile: int) -> Plan:
    hidden_acc = plan.sizes.hidden_accumulator(tile)
    return replace(plan, block_tokens=block, tile_columns=tile, hidden_accumulate=hidden_acc)


def widest_tile(plan: Plan, block: int) -> int:
    """Columns of as many tiles as the widest that fit make, none much narrower than the others; 0 where none fits."""
    vocab, sized = plan.sizes.vocab, partial(of_tile, plan, block)
    if plan.sizes.deterministic:
        tile = min(vocab, FIXED_TILE)
        return tile if sized(tile).extra_bytes <= plan.budget else 0
    widest = largest(sized, plan.budget, vocab, TILE_MULTIPLE)
    if widest < TILE_MULTIPLE:
        return widest
    columns = math.ceil(vocab / math.ceil(vocab / widest))
    return min(vocab, math.ceil(columns / TILE_MULTIPLE) * TILE_MULTIPLE)


def moved_by_blocks(sizes: Sizes, block: int, weight_acc: torch.dtype) -> int:
    """Bytes read and written because each block walks the weight, twice, and adds to its gradient."""
    blocks = math.ceil(max(sizes.tokens, 1) / block)
    added = (2 * blocks - 1) * weight_acc.itemsize if sizes.weight_grad else 0
    return sizes.weight_elements * (2 * blocks * sizes.dtype.itemsize + added)


def moved_by_tiles(sizes: Sizes, tile: int) -> int:
    """Bytes read and written because each tile reads all rows of hidden states, twice, and adds to their gradient."""
    added = 2 * max(4, sizes.hidden_dtype.itemsize) if sizes.hidden_grad else 0
    return math.ceil(sizes.vocab / tile) * sizes.tokens * sizes.hidden * (2 * sizes.dtype.itemsize + added)
