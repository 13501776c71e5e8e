"""The largest chunks and tiles of a plan that its budget holds: ``chunk_size`` for the forward pass, ``block_and_tile``
for the recompute schedule."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from .plans import Plan
from .sizes import CHUNK_MULTIPLE, MiB, Sizes, balanced, padded_e4m3, rows_of

GOOD_CHUNK = 2048  # fewer rows starve matmuls; passes over the weight's gradient cost more
MODEST_SWEEP = 60 * MiB
TILE_MULTIPLE = 256  # columns of the logits matmul's widest tile; a narrower tile wastes the remaining columns
FIXED_TILE = 8192  # columns of a tile where nothing may be chosen by size


def largest(
    needed: Callable[[int], int], budget: int, most: int, multiple: int = CHUNK_MULTIPLE, least: int = 0
) -> int:
    """The largest size up to ``most`` for which ``needed(size)`` bytes fit the budget; 0 where none fits. It is
    ``most`` or a multiple of ``multiple``, unless only smaller sizes fit. ``least``: a size that is known to fit."""
    if needed(most) <= budget:
        return most
    for step, top in ((multiple, -(-most // multiple)), (1, multiple)):
        # a search between a size that fits and one that does not; bytes grow nearly in proportion to the size
        low, fits, high, exceeds = least // step, needed(least), top, needed(min(top * step, most))
        while high - low > 1:
            share = (high - low) * (budget - fits) // max(1, exceeds - fits)
            middle = low + min(max(share, 1), high - low - 1)
            size = needed(middle * step)
            low, fits, high, exceeds = (middle, size, high, exceeds) if size <= budget else (low, fits, middle, size)
        if low:
            return low * step
    return 0


def chunk_size(
    plan: Plan, needed: Callable[[int], int], chunk_tokens: int | None, least: int, fits_budget: bool
) -> int:
    """Rows of a forward pass's chunk: as many as the budget holds, or nearly ``chunk_tokens``, which the caller asks
    for. Returns 0 if ``least`` rows do not fit the budget, or with ``fits_budget`` if ``chunk_tokens`` do not."""
    tokens, budget = max(plan.sizes.tokens, 1), plan.budget
    if chunk_tokens is not None:
        rows = balanced(tokens, chunk_tokens)
        return 0 if fits_budget and needed(rows) > budget else rows
    rows = largest(needed, budget, tokens, least=least) if needed(least) <= budget else 0
    if plan.schedule == "loss only" and not (fits_budget or plan.sizes.keeps_sweep):
        # where no logits are stored, larger chunks gain nothing
        rows = min(rows, max(largest(needed, MODEST_SWEEP + e4m3_copy(plan.sizes), tokens), GOOD_CHUNK))
    if rows == 0 or (plan.schedule == "forward" and plan.sizes.ends_with_segments):
        return rows
    equal = balanced(tokens, rows)
    return equal if needed(equal) <= budget else rows  # fewer rows may have more partial sums of dhidden


def with_rows(plan: Plan, rows: int) -> Plan:
    """The plan with chunks of ``rows``."""
    return replace(plan, chunk_tokens=rows, block_tokens=rows)


def block_and_tile(plan: Plan, needed: Callable[[int, int], int], most_blocks: int, most_rows: int) -> Plan | None:
    """The recompute plan with that size of blocks and tiles that fits the budget and moves the fewest bytes in its
    products; None where none fits. ``most_rows``: most rows of a block."""
    sizes, best, least, tried = plan.sizes, None, 0, 0
    # a tile reads all rows of hidden states, twice, and adds to their gradient
    read, added = 2 * sizes.dtype.itemsize, 2 * max(4, sizes.hidden_dtype.itemsize) if sizes.hidden_grad else 0
    bytes_per_tile = sizes.tokens * sizes.hidden * (read + added)
    weight_sum = plan.weight_accumulate.itemsize if sizes.weight_grad else 0
    for blocks in range(1, most_blocks + 1):
        block = min(rows_of(sizes.tokens, blocks), most_rows)
        if block == tried:
            continue
        # each block reads the weight, twice, and adds to its gradient
        walks, tried = math.ceil(max(sizes.tokens, 1) / block), block
        moved = sizes.weight_elements * (walks * read + (2 * walks - 1) * weight_sum)
        # most tiles with which this block moves fewer bytes than the best; with none, more blocks cannot move fewer
        tiles = sizes.vocab if best is None else (least - moved - 1) // bytes_per_tile
        if tiles < 1:
            break
        narrowest = math.ceil(sizes.vocab / tiles)
        if needed(block, narrowest) > plan.budget:
            continue
        tile = widest_tile(plan, functools.partial(needed, block), narrowest)
        if tile and math.ceil(sizes.vocab / tile) <= tiles:
            best, least = with_tile(plan, block, tile), moved + math.ceil(sizes.vocab / tile) * bytes_per_tile
    return best


def with_tile(plan: Plan, block: int, tile: int) -> Plan:
    """The recompute plan with blocks of ``block`` rows and tiles of ``tile`` columns. The gradient of hidden states
    adds up in fp32 where there are several tiles, or where fp16 gradients are scaled."""
    sizes, hidden_acc = plan.sizes, plan.sizes.hidden_dtype
    wide = tile < sizes.vocab or sizes.dtype == torch.float16 or not sizes.sums_into(hidden_acc)
    if wide and hidden_acc.itemsize < 4:
        hidden_acc = torch.float32
    return replace(plan, block_tokens=block, tile_columns=tile, hidden_accumulate=hidden_acc)


def widest_tile(plan: Plan, needed: Callable[[int], int], least: int) -> int:
    """Columns of a tile, for the fewest tiles of nearly equal width that the budget allows; 0 where none fits.
    ``least``: a number of columns that is known to fit."""
    vocab = plan.sizes.vocab
    if plan.sizes.deterministic:
        tile = min(vocab, FIXED_TILE)
        return tile if needed(tile) <= plan.budget else 0
    widest = largest(needed, plan.budget, vocab, TILE_MULTIPLE, least)
    if widest < TILE_MULTIPLE:
        return widest
    columns = math.ceil(vocab / math.ceil(vocab / widest))
    return min(vocab, math.ceil(columns / TILE_MULTIPLE) * TILE_MULTIPLE)


def e4m3_copy(sizes: Sizes) -> int:
    """Bytes of the weight's e4m3 copies that a call makes, whatever its chunks are."""
    has_transposed = sizes.e4m3_gradients and sizes.hidden_grad
    return sizes.hidden * (sizes.vocab * (sizes.fp8 == "made") + padded_e4m3(sizes.vocab) * has_transposed)
