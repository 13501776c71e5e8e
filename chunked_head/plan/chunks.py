"""The largest chunks and tiles that a plan's budget holds: ``chunk_size`` for the forward pass, ``block_and_tile`` for
the recompute schedule."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from .plans import Plan
from .sizes import CHUNK_MULTIPLE, MiB, Sizes, balanced, padded_e4m3, rows_of

GOOD_CHUNK = 2048  # fewer rows starve matmuls; passes over the weight's gradient cost more
MODEST_SWEEP = 60 * MiB  # bytes of a pass without gradients in which larger chunks gain nothing
TILE_MULTIPLE = 256  # columns of the logits matmul's widest tile; a narrower tile wastes the remaining columns
FIXED_TILE = 8192  # columns of a tile where nothing may be chosen by size


def largest(
    bytes_of: Callable[[int], int],
    budget: int,
    most_size: int,
    size_multiple: int = CHUNK_MULTIPLE,
    fitting_size: int = 0,
) -> int:
    """The largest size up to ``most_size`` whose bytes, ``bytes_of(size)``, fit the budget; 0 where no size fits.
    Returns ``most_size`` or a multiple of ``size_multiple``, unless only sizes below ``size_multiple`` fit.
    ``fitting_size``: a size that is known to fit."""
    if bytes_of(most_size) <= budget:
        return most_size
    for step_size, most_steps in ((size_multiple, -(-most_size // size_multiple)), (1, size_multiple)):
        # ``low_steps`` steps fit, ``high_steps`` do not; bytes grow nearly in proportion to the size
        low_steps, low_bytes = fitting_size // step_size, bytes_of(fitting_size)
        high_steps, high_bytes = most_steps, bytes_of(min(most_steps * step_size, most_size))
        while high_steps - low_steps > 1:
            guessed_steps = (high_steps - low_steps) * (budget - low_bytes) // max(1, high_bytes - low_bytes)
            steps = low_steps + min(max(guessed_steps, 1), high_steps - low_steps - 1)
            steps_bytes = bytes_of(steps * step_size)
            if steps_bytes <= budget:
                low_steps, low_bytes = steps, steps_bytes
            else:
                high_steps, high_bytes = steps, steps_bytes
        if low_steps:
            return low_steps * step_size
    return 0


def chunk_size(
    plan: Plan, bytes_of: Callable[[int], int], chunk_tokens: int | None, least_rows: int, fits_budget: bool
) -> int:
    """Number of rows of a forward pass's chunk. Without ``chunk_tokens``: as many as the budget holds, or 0 if the
    budget does not hold ``least_rows`` rows. With ``chunk_tokens``: nearly ``chunk_tokens``, or 0 if these exceed
    the budget and ``fits_budget`` is True. ``bytes_of(rows)``: bytes of the plan with chunks of ``rows`` rows."""
    tokens, budget = max(plan.sizes.tokens, 1), plan.budget
    if chunk_tokens is not None:
        rows = balanced(tokens, chunk_tokens)
        return 0 if fits_budget and bytes_of(rows) > budget else rows
    rows = largest(bytes_of, budget, tokens, fitting_size=least_rows) if bytes_of(least_rows) <= budget else 0
    if plan.schedule == "loss only" and not (fits_budget or plan.sizes.keeps_sweep):
        # no logits are stored: larger chunks gain nothing
        rows = min(rows, max(largest(bytes_of, MODEST_SWEEP + e4m3_copy(plan.sizes), tokens), GOOD_CHUNK))
    if rows == 0 or (plan.schedule == "forward" and plan.sizes.ends_with_segments):
        return rows
    equal_rows = balanced(tokens, rows)
    # fewer rows may have more partial sums of dhidden
    return equal_rows if bytes_of(equal_rows) <= budget else rows


def with_rows(plan: Plan, rows: int) -> Plan:
    """The plan with ``rows`` rows in each chunk and in each block."""
    return replace(plan, chunk_tokens=rows, block_tokens=rows)


def block_and_tile(plan: Plan, bytes_of: Callable[[int, int], int], most_blocks: int, most_rows: int) -> Plan | None:
    """The recompute plan with the blocks and tiles that fit the budget and move the fewest bytes in their products;
    None where no block fits. ``bytes_of(block_rows, tile_columns)``: bytes of the plan with such blocks and tiles.
    ``most_blocks``: largest number of blocks. ``most_rows``: largest number of rows of a block."""
    sizes, best_plan, best_bytes, last_block_rows = plan.sizes, None, 0, 0
    # each tile reads all rows of hidden states twice, and adds to the gradient of hidden states
    read_bytes = 2 * sizes.dtype.itemsize  # of each element
    added_bytes = 2 * max(4, sizes.hidden_dtype.itemsize) if sizes.hidden_grad else 0  # of each element
    bytes_per_tile = sizes.tokens * sizes.hidden * (read_bytes + added_bytes)
    weight_sum_bytes = plan.weight_accumulate.itemsize if sizes.weight_grad else 0  # of each element
    for most_block_count in range(1, most_blocks + 1):
        block_rows = min(rows_of(sizes.tokens, most_block_count), most_rows)
        if block_rows == last_block_rows:
            continue
        # each block reads the weight twice, and adds to the weight's gradient
        block_count, last_block_rows = math.ceil(max(sizes.tokens, 1) / block_rows), block_rows
        moved_bytes = sizes.weight_elements * (block_count * read_bytes + (2 * block_count - 1) * weight_sum_bytes)
        # most tiles with which this block moves fewer bytes than the best; with none, more blocks cannot move fewer
        most_tiles = sizes.vocab if best_plan is None else (best_bytes - moved_bytes - 1) // bytes_per_tile
        if most_tiles < 1:
            break
        least_columns = math.ceil(sizes.vocab / most_tiles)
        if bytes_of(block_rows, least_columns) > plan.budget:
            continue
        tile_columns = widest_tile(plan, functools.partial(bytes_of, block_rows), least_columns)
        tile_count = math.ceil(sizes.vocab / tile_columns) if tile_columns else 0
        if 0 < tile_count <= most_tiles:
            best_plan, best_bytes = with_tile(plan, block_rows, tile_columns), moved_bytes + tile_count * bytes_per_tile
    return best_plan


def with_tile(plan: Plan, block_rows: int, tile_columns: int) -> Plan:
    """The recompute plan with blocks of ``block_rows`` rows and tiles of ``tile_columns`` columns. Hidden's gradient
    adds up in fp32 where there are several tiles, where fp16 gradients are scaled, or where a product cannot be stored
    in the gradient's dtype."""
    sizes, hidden_sum_dtype = plan.sizes, plan.sizes.hidden_dtype
    needs_fp32 = tile_columns < sizes.vocab or sizes.dtype == torch.float16 or not sizes.sums_into(hidden_sum_dtype)
    if needs_fp32 and hidden_sum_dtype.itemsize < 4:
        hidden_sum_dtype = torch.float32
    return replace(plan, block_tokens=block_rows, tile_columns=tile_columns, hidden_accumulate=hidden_sum_dtype)


def widest_tile(plan: Plan, bytes_of: Callable[[int], int], fitting_columns: int) -> int:
    """Number of columns of a tile, for the fewest tiles of nearly equal width that the budget allows; 0 where no tile
    fits. ``bytes_of(tile_columns)``: bytes of the plan. ``fitting_columns``: a number of columns that is known to
    fit."""
    vocab = plan.sizes.vocab
    if plan.sizes.deterministic:
        tile_columns = min(vocab, FIXED_TILE)
        return tile_columns if bytes_of(tile_columns) <= plan.budget else 0
    most_columns = largest(bytes_of, plan.budget, vocab, TILE_MULTIPLE, fitting_columns)
    if most_columns < TILE_MULTIPLE:
        return most_columns
    columns = math.ceil(vocab / math.ceil(vocab / most_columns))
    return min(vocab, math.ceil(columns / TILE_MULTIPLE) * TILE_MULTIPLE)


def e4m3_copy(sizes: Sizes) -> int:
    """Bytes of the e4m3 copies of the weight that a call makes, for chunks of any size."""
    has_transposed = sizes.e4m3_gradients and sizes.hidden_grad
    return sizes.hidden * (sizes.vocab * (sizes.fp8_copy == "made") + padded_e4m3(sizes.vocab) * has_transposed)
