"""Statistics [rows] fp32, merged from those of parts of a row.

``merge_strips`` merges those of strips [strips, rows] that ``exp_logits`` has written. It replaces the target's term by
the term of its exact logit:

    lse = log sum_s sum[s] exp(offset[s]),  log p = (x - start) + rest,  start = max_s offset[s],  rest = start - lse

``merge_ranks`` merges those of pieces of the vocabulary [ranks, numbers, rows], which the ranks have sent:

    lse = log sum_r exp(lse[r]),  share[r] = exp(lse[r] - lse)

Both are bodies of kernels that are generated for the statistics beside the softmax (``lists.py``).

``sum_rows_kernel`` sums a table [rows, tokens] of losses' and metrics' values over tokens, and adds up the losses:

    out[r] = factor[r] * sum_i table[r, i],  total = sum_r coefficient[r] out[r]
"""

import triton
import triton.language as tl

from ..common.launcher import kernel
from ..common.transform import ln_2, log2_e, times
from .exp_logits import LEAST_OFFSET


@triton.jit
def merge_strips(
    # outputs
    lse_ptr,  # [rows] fp32 or None
    start_ptr,  # [rows] fp32: log p = (x - start) + rest
    rest_ptr,  # [rows] fp32
    logprob_ptr,  # [rows] fp32, 0 where the row does not count; or None
    level_ptr,  # [rows] fp32: one offset for all of the row; None: each strip has its own
    outputs,  # a tuple of [rows]: the statistics' vectors
    # inputs
    strip_offset_ptr,  # [strips, rows] fp32; with a level only where the sum is negative
    strip_sum_ptr,  # [strips, rows] fp32; with a level, negative where the offset is not it
    strips,  # a tuple of [strips, rows]: what each of the vectors is made of
    target_logit_ptr,  # [rows] fp32, with a level also the given offset; None without targets
    tile_logit_ptr,  # [rows] fp32: the target's in the strips; None where that is exact
    target_ptr,  # [rows] int64, -1 where the row does not count; None without targets
    # sizes
    rows,
    strip_stride,  # from strip to strip, a multiple of BLOCK_ROWS: reads may pass the rows
    strip_count,
    columns,  # that the softmax is over
    # scalars
    ratio,  # inverse temperature relative to the logits'; float or None for 1
    IS_FIRST: tl.constexpr,  # False: sums of a further softmax, which may be over fewer columns
    ZERO: tl.constexpr,
    ADD_EXPONENTIALS: tl.constexpr,
    ADD_STRIPS: tl.constexpr,
    EXCHANGE_TARGET: tl.constexpr,
    MERGE_STRIPS: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_STRIPS: tl.constexpr,
):
    """``lse = log sum_s sum[s] exp(offset[s])``, and the other statistics that strips have."""
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < rows
    run_max = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    run_sum = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    if VECTORS > 0:
        states = ZERO(BLOCK_ROWS, tl.float32)
    largest_offset = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    if target_ptr is not None:
        exact_logit = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
        target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1)
        counts = (target >= 0) & (target < columns)
        if ratio is not None:
            # ``where`` keeps the compiler from a fused multiply-add, so that rounding is that of the strips' offsets
            exact_logit = tl.where(counts, exact_logit * ratio, 0.0)
        run_max = tl.where(counts, exact_logit, run_max)
    for start in range(0, strip_count, BLOCK_STRIPS):
        offs_strip = start + tl.arange(0, BLOCK_STRIPS)
        offsets = offs_strip[:, None].to(tl.int64) * strip_stride + offs_row[None, :]
        mask = tl.broadcast_to(offs_strip[:, None] < strip_count, (BLOCK_STRIPS, BLOCK_ROWS))
        s = tl.load(strip_sum_ptr + offsets, mask=mask, other=0.0)
        if level_ptr is not None:
            has_offset = s < 0.0
            m = tl.load(strip_offset_ptr + offsets, mask=mask & has_offset, other=float("-inf"))
            m = tl.where(has_offset, m, exact_logit[None, :])
            s = tl.abs(s)
        else:
            m = tl.load(strip_offset_ptr + offsets, mask=mask, other=float("-inf"))
        m = times(m, ratio)
        if not IS_FIRST:
            m = tl.where(s > 0.0, m, float("-inf"))
        strips_max = tl.max(m, 0)
        largest_offset = tl.maximum(largest_offset, strips_max)
        new_max = tl.maximum(run_max, strips_max)
        offset = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2((run_max - offset) * log2_e)
        distance = m - offset[None, :]
        weight = tl.exp2(distance * log2_e)
        if VECTORS > 0:
            states = ADD_EXPONENTIALS(
                states, strips, offsets, mask, run_max, run_sum, offset, rescale, s, distance, weight
            )
        run_sum = run_sum * rescale + tl.sum(s * weight, 0)
        run_max = new_max
        if VECTORS > 0:
            states = ADD_STRIPS(states, strips, offsets, mask)
    if tile_logit_ptr is not None:
        tile_logit = tl.load(tile_logit_ptr + offs_row, mask=in_rows, other=0.0)
        if ratio is not None:
            tile_logit = tl.where(counts, tile_logit * ratio, 0.0)
        offset = tl.where(run_max == float("-inf"), 0.0, run_max)
        removed = tl.where(counts, tl.exp2((tile_logit - offset) * log2_e), 0.0)
        added = tl.where(counts, tl.exp2((exact_logit - offset) * log2_e), 0.0)
        without_target = run_sum - removed
        run_sum = tl.where(without_target < 0.0, 0.0, without_target) + added
        if VECTORS > 0:
            states = EXCHANGE_TARGET(states, removed, tile_logit - offset, added, exact_logit - offset)
    if target_ptr is not None:
        least = times(LEAST_OFFSET + 0.0, ratio)
        # strips have no sums so far below: a row whose maximum is there becomes nan
        run_sum = tl.where(counts & (run_max < least) & (run_max > float("-inf")), float("nan"), run_sum)
    log_sum = tl.log2(run_sum) * ln_2
    lse = run_max + log_sum
    if lse_ptr is not None:
        tl.store(lse_ptr + offs_row, lse, mask=in_rows)
    tl.store(start_ptr + offs_row, run_max, mask=in_rows)
    tl.store(rest_ptr + offs_row, -log_sum, mask=in_rows)
    # exact_logit - lse would lose all that is below an ulp of the logits
    if logprob_ptr is not None:
        logprob = (exact_logit - run_max) - log_sum
        logprob = tl.where(counts, tl.where(logprob > 0.0, 0.0, logprob), 0.0)
        tl.store(logprob_ptr + offs_row, logprob, mask=in_rows)
    if level_ptr is not None:
        tl.store(level_ptr + offs_row, tl.where(largest_offset > exact_logit, lse, exact_logit), mask=in_rows)
    if VECTORS > 0:
        vectors = MERGE_STRIPS(states, run_sum, log_sum)
        for i in tl.static_range(VECTORS):
            tl.store(outputs[i] + offs_row, vectors[i], mask=in_rows)


@triton.jit
def merge_ranks(
    # outputs
    start_ptr,  # [rows] fp32: log p = (x - start) + rest
    rest_ptr,  # [rows] fp32
    lse_ptr,  # [rows] fp32; None for a teacher's softmax, like all that follow
    logprob_ptr,  # [rows] fp32, 0 where the row does not count
    target_logit_ptr,  # [rows] fp32, or None if another launch writes it
    outputs,  # a tuple of [rows]: the statistics' vectors
    # inputs
    gathered_ptr,  # [ranks, numbers, rows] fp32: each piece's statistics, and last a check of its tokens
    zero_or_nan_ptr,  # [] fp32: nan where pieces are of different tokens
    target_ptr,  # [rows] int64, -1 where a row does not count
    # sizes
    ranks,
    numbers,
    rows,
    places,  # a tuple of the outputs' places among a piece's numbers
    # scalars
    ratio,  # of the temperature to that of the logits, inverse
    START: tl.constexpr,  # place of a piece's number
    REST: tl.constexpr,
    TARGET: tl.constexpr,
    ZERO: tl.constexpr,
    ADD_PIECE: tl.constexpr,
    MERGE_PIECES: tl.constexpr,
    VECTORS: tl.constexpr,
    KNOWN_TARGETS: tl.constexpr,  # every piece has the target's complete logit
    BLOCK: tl.constexpr,
):
    """Merges pieces' softmaxes in fp64, since their logarithms are rounded already; in the same order on every rank."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    stride = tl.cast(rows, tl.int64)
    piece = numbers * stride
    poison = tl.load(zero_or_nan_ptr)
    # shares are relative to the most probable piece
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float64)
    first_start = tl.full((BLOCK,), float("-inf"), dtype=tl.float64)
    first_rest = tl.zeros((BLOCK,), dtype=tl.float64)
    for rank in range(0, ranks):
        piece_pointers = gathered_ptr + rank * piece + row
        start = tl.load(piece_pointers + START * stride, mask=mask, other=0.0).to(tl.float64)
        rest = tl.load(piece_pointers + REST * stride, mask=mask, other=0.0).to(tl.float64)
        better = (start - rest > best) | (rank == 0)
        best = tl.where(better, start - rest, best)
        first_start, first_rest = tl.where(better, start, first_start), tl.where(better, rest, first_rest)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    target_logit = tl.zeros((BLOCK,), dtype=tl.float64)
    if VECTORS > 0:
        states = ZERO(BLOCK, tl.float64)
    for rank in range(0, ranks):
        piece_pointers = gathered_ptr + rank * piece + row
        start = tl.load(piece_pointers + START * stride, mask=mask, other=0.0).to(tl.float64)
        rest = tl.load(piece_pointers + REST * stride, mask=mask, other=0.0).to(tl.float64)
        log_share = (start - first_start) - (rest - first_rest)
        share = tl.exp(log_share)
        total += share
        if logprob_ptr is not None:
            piece_logit = tl.load(piece_pointers + TARGET * stride, mask=mask, other=0.0).to(tl.float64)
            if KNOWN_TARGETS:
                target_logit = tl.where(rank == 0, piece_logit, target_logit)
            else:
                target_logit += piece_logit
        if VECTORS > 0:
            values = (tl.load(piece_pointers + places[0] * stride, mask=mask, other=0.0).to(tl.float64),)
            for i in tl.static_range(1, VECTORS):
                values = values + (tl.load(piece_pointers + places[i] * stride, mask=mask, other=0.0).to(tl.float64),)
            states = ADD_PIECE(states, values, share, log_share, rank == 0)
    log_sum = tl.log(total)
    merged_rest = first_rest - log_sum
    tl.store(start_ptr + row, first_start.to(tl.float32) + poison, mask=mask)
    tl.store(rest_ptr + row, merged_rest.to(tl.float32), mask=mask)
    if logprob_ptr is not None:
        rounded = target_logit.to(tl.float32)
        counts = tl.load(target_ptr + row, mask=mask, other=-1) >= 0
        logprob = (rounded.to(tl.float64) * ratio - first_start) + merged_rest
        tl.store(logprob_ptr + row, tl.where(counts, logprob, 0.0).to(tl.float32) + poison, mask=mask)
        tl.store(lse_ptr + row, (first_start - merged_rest).to(tl.float32) + poison, mask=mask)
        if target_logit_ptr is not None:
            tl.store(target_logit_ptr + row, rounded, mask=mask)
    if VECTORS > 0:
        vectors = MERGE_PIECES(states, total, log_sum)
        for i in tl.static_range(VECTORS):
            value = vectors[i]
            if value.dtype.is_floating():
                value = value.to(tl.float32) + poison
            tl.store(outputs[i] + row, value, mask=mask)


@kernel
def sum_rows_kernel(
    # outputs
    total_ptr,  # [] the first ``loss_rows`` sums times their coefficients
    out_ptr,  # [rows]
    # inputs
    table_ptr,  # [rows, tokens] contiguous
    inverse_ptr,  # [] factor of the first ``loss_rows`` rows
    one_or_nan_ptr,  # [] factor of the others
    # sizes
    tokens,
    loss_rows,
    # scalars
    coefficient0,
    coefficient1,
    coefficient2,
    coefficient3,
    BLOCK: tl.constexpr,
):
    """``out[r] = factor[r] * sum_i table[r, i]``"""
    row = tl.program_id(0)
    factor = tl.load(inverse_ptr) if row < loss_rows else tl.load(one_or_nan_ptr)
    value = row_sum(table_ptr, row, tokens, BLOCK) * factor
    tl.store(out_ptr + row, value)
    if row == 0:
        total = value * coefficient0
        for loss_row in range(1, loss_rows):
            coefficient = tl.where(loss_row == 1, coefficient1, tl.where(loss_row == 2, coefficient2, coefficient3))
            total += row_sum(table_ptr, loss_row, tokens, BLOCK) * factor * coefficient
        tl.store(total_ptr, total)


@triton.jit
def row_sum(table_ptr, row, tokens, BLOCK: tl.constexpr):
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        sums += tl.load(table_ptr + tl.cast(row, tl.int64) * tokens + token, mask=token < tokens, other=0.0)
    return tl.sum(sums, 0)
