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
    needed_bytes: Callable[[int], int],
    budget: int,
    most_size: int,
    size_multiple: int = CHUNK_MULTIPLE,
    fitting_size: int = 0,
) -> int:
    """The largest size up to ``most_size`` for which ``needed_bytes(size)`` fit the budget; 0 where no size fits.
    The size is ``most_size`` or a multiple of ``size_multiple``, unless only sizes below ``size_multiple`` fit.
    ``fitting_size``: a size that is known to fit."""
    if needed_bytes(most_size) <= budget:
        return most_size
    for step_size, most_steps in ((size_multiple, -(-most_size // size_multiple)), (1, size_multiple)):
        # a search between numbers of steps that fit and that do not; bytes grow nearly in proportion to the size
        low_steps, low_bytes = fitting_size // step_size, needed_bytes(fitting_size)
        high_steps, high_bytes = most_steps, needed_bytes(min(most_steps * step_size, most_size))
        while high_steps - low_steps > 1:
            guess = (high_steps - low_steps) * (budget - low_bytes) // max(1, high_bytes - low_bytes)
            steps = low_steps + min(max(guess, 1), high_steps - low_steps - 1)
            steps_bytes = needed_bytes(steps * step_size)
            if steps_bytes <= budget:
                low_steps, low_bytes = steps, steps_bytes
            else:
                high_steps, high_bytes = steps, steps_bytes
        if low_steps:
            return low_steps * step_size
    return 0


def chunk_size(
    plan: Plan, needed_bytes: Callable[[int], int], chunk_tokens: int | None, least_rows: int, fits_budget: bool
) -> int:
    """Rows of a forward pass's chunk: as many as the budget holds, or nearly ``chunk_tokens``, which the caller asks
    for. Returns 0 if ``least_rows`` rows do not fit the budget, or with ``fits_budget`` if ``chunk_tokens`` rows do
    not fit it. ``needed_bytes``: from rows to bytes."""
    tokens, budget = max(plan.sizes.tokens, 1), plan.budget
    if chunk_tokens is not None:
        rows = balanced(tokens, chunk_tokens)
        return 0 if fits_budget and needed_bytes(rows) > budget else rows
    rows = largest(needed_bytes, budget, tokens, fitting_size=least_rows) if needed_bytes(least_rows) <= budget else 0
    if plan.schedule == "loss only" and not (fits_budget or plan.sizes.keeps_sweep):
        # where no logits are stored, larger chunks gain nothing
        rows = min(rows, max(largest(needed_bytes, MODEST_SWEEP + e4m3_copy(plan.sizes), tokens), GOOD_CHUNK))
    if rows == 0 or (plan.schedule == "forward" and plan.sizes.ends_with_segments):
        return rows
    equal_rows = balanced(tokens, rows)
    return (
        equal_rows if needed_bytes(equal_rows) <= budget else rows
    )  # fewer rows may have more partial sums of dhidden


def with_rows(plan: Plan, rows: int) -> Plan:
    """The plan with ``rows`` rows in each chunk and in each block."""
    return replace(plan, chunk_tokens=rows, block_tokens=rows)


def block_and_tile(
    plan: Plan, needed_bytes: Callable[[int, int], int], most_blocks: int, most_rows: int
) -> Plan | None:
    """The recompute plan with the blocks and tiles that fit the budget and move the fewest bytes in their products;
    None where no block fits. ``needed_bytes``: from rows of a block and columns of a tile to bytes. ``most_blocks``:
    largest number of blocks. ``most_rows``: largest number of rows of a block."""
    sizes, best_plan, best_bytes, last_block = plan.sizes, None, 0, 0
    # a tile reads all rows of hidden states, twice, and adds to their gradient
    read_bytes, added_bytes = (
        2 * sizes.dtype.itemsize,
        2 * max(4, sizes.hidden_dtype.itemsize) if sizes.hidden_grad else 0,
    )
    bytes_per_tile = sizes.tokens * sizes.hidden * (read_bytes + added_bytes)
    weight_sum = plan.weight_accumulate.itemsize if sizes.weight_grad else 0
    for most_block_count in range(1, most_blocks + 1):
        block_rows = min(rows_of(sizes.tokens, most_block_count), most_rows)
        if block_rows == last_block:
            continue
        # each block reads the weight, twice, and adds to its gradient
        block_count, last_block = math.ceil(max(sizes.tokens, 1) / block_rows), block_rows
        moved_bytes = sizes.weight_elements * (block_count * read_bytes + (2 * block_count - 1) * weight_sum)
        # most tiles with which this block moves fewer bytes than the best; with none, more blocks cannot move fewer
        most_tiles = sizes.vocab if best_plan is None else (best_bytes - moved_bytes - 1) // bytes_per_tile
        if most_tiles < 1:
            break
        least_columns = math.ceil(sizes.vocab / most_tiles)
        if needed_bytes(block_rows, least_columns) > plan.budget:
            continue
        tile_columns = widest_tile(plan, functools.partial(needed_bytes, block_rows), least_columns)
        if tile_columns and math.ceil(sizes.vocab / tile_columns) <= most_tiles:
            best_plan, best_bytes = (
                with_tile(plan, block_rows, tile_columns),
                moved_bytes + math.ceil(sizes.vocab / tile_columns) * bytes_per_tile,
            )
    return best_plan


def with_tile(plan: Plan, block_rows: int, tile_columns: int) -> Plan:
    """The recompute plan with blocks of ``block_rows`` rows and tiles of ``tile_columns`` columns. The gradient of
    hidden states adds up in fp32 where there are several tiles, or where fp16 gradients are scaled."""
    sizes, hidden_sum_dtype = plan.sizes, plan.sizes.hidden_dtype
    needs_fp32 = tile_columns < sizes.vocab or sizes.dtype == torch.float16 or not sizes.sums_into(hidden_sum_dtype)
    if needs_fp32 and hidden_sum_dtype.itemsize < 4:
        hidden_sum_dtype = torch.float32
    return replace(plan, block_tokens=block_rows, tile_columns=tile_columns, hidden_accumulate=hidden_sum_dtype)


def widest_tile(plan: Plan, needed_bytes: Callable[[int], int], fitting_columns: int) -> int:
    """Columns of a tile, for the fewest tiles of nearly equal width that the budget allows; 0 where none fits.
    ``fitting_columns``: a number of columns that is known to fit."""
    vocab = plan.sizes.vocab
    if plan.sizes.deterministic:
        tile_columns = min(vocab, FIXED_TILE)
        return tile_columns if needed_bytes(tile_columns) <= plan.budget else 0
    most_columns = largest(needed_bytes, plan.budget, vocab, TILE_MULTIPLE, fitting_columns)
    if most_columns < TILE_MULTIPLE:
        return most_columns
    columns = math.ceil(vocab / math.ceil(vocab / most_columns))
    return min(vocab, math.ceil(columns / TILE_MULTIPLE) * TILE_MULTIPLE)


def e4m3_copy(sizes: Sizes) -> int:
    """Bytes of the weight's e4m3 copies that a call makes, whatever its chunks are."""
    has_transposed = sizes.e4m3_gradients and sizes.hidden_grad
    return sizes.hidden * (sizes.vocab * (sizes.fp8 == "made") + padded_e4m3(sizes.vocab) * has_transposed)
