"""Statistics of rows, or of their blocks of columns, merged from those of the strips that ``exp_logits`` left.

    lse = log sum_s sum[s] exp(offset[s]),  log p = (x - start) + rest,  start = max_s offset[s],  rest = start - lse
    entropy = lse - sum p x, as (log_sum - shifted / sum) relative to start

Strips are [strips, rows] fp32, statistics [rows] fp32; the target's term enters from its exact logit.
"""

import triton.language as tl

from ..common.kernel import kernel
from ..common.transform import ln_2, log2_e


@kernel
def merge_strips_kernel(
    # outputs, [blocks, rows] each where there are blocks
    lse_ptr,  # [rows] fp32 or None
    start_ptr,  # [rows] fp32: log p = (x - start) + rest, without the rounding of lse
    rest_ptr,  # [rows] fp32
    logprob_ptr,  # [rows] fp32, 0 where the row does not count; or None
    entropy_ptr,  # [rows] fp32 or None
    weighted_sum_ptr,  # [rows] fp32 or None
    top_ptr,  # [rows] fp32 or None: the largest logit
    argmax_ptr,  # [rows] int32 or fp32, or None: the first column that has it
    level_ptr,  # [rows] fp32: offset that all of the row is to have; None with offsets of each strip's own
    # inputs
    strip_offset_ptr,  # [strips, rows] fp32; with a level only where the sum is negative
    strip_sum_ptr,  # [strips, rows] fp32, without the target's term; with a level, negative where the offset is not it
    strip_shifted_sum_ptr,  # [strips, rows] fp32 or None
    strip_weighted_sum_ptr,  # [strips, rows] fp32 or None
    strip_top_ptr,  # [strips, rows] fp32 or None
    strip_argmax_ptr,  # [strips, rows] int32 or None
    target_logit_ptr,  # [rows] fp32, and the offset that was asked for where there is a level; None without targets
    target_ptr,  # [rows] int64, -1 where the row does not count; None without targets
    # sizes
    rows,
    strip_stride,  # from strip to strip, a multiple of BLOCK_ROWS: what stands behind the rows may be read
    strips,  # of a row, or of one of its blocks
    columns,  # that the softmax is over
    block_columns,  # of a block, or None for one of all columns
    numbers,  # rows of the outputs from block to block, or None
    # scalars
    ratio,  # of the temperature to that of the logits, inverse; float or None for 1
    SECOND: tl.constexpr,  # sums of a second softmax, which may be over fewer columns
    BLOCK_ROWS: tl.constexpr,
    BLOCK_STRIPS: tl.constexpr,
):
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < rows
    run_max = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    run_sum = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    run_shifted = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    run_weighted = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    run_top = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    run_argmax = tl.full((BLOCK_ROWS,), 2147483647, dtype=tl.int32)
    largest_offset = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    if target_ptr is not None:
        asked = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
        target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1)
        if block_columns is not None:
            # one block has the target's term
            first_column = tl.program_id(1) * block_columns
            counts = (target >= first_column) & (target < tl.minimum(first_column + block_columns, columns))
        else:
            counts = (target >= 0) & (target < columns)
        if ratio is not None:
            asked = asked * ratio
        run_max = tl.where(counts, asked, run_max)
        run_sum = tl.where(counts & (asked != float("-inf")), 1.0, run_sum)
    for start in range(0, strips, BLOCK_STRIPS):
        offs_strip = start + tl.arange(0, BLOCK_STRIPS)
        at = offs_strip[:, None].to(tl.int64) * strip_stride + offs_row[None, :]
        if block_columns is not None:
            at += tl.program_id(1).to(tl.int64) * strips * strip_stride
        mask = tl.broadcast_to(offs_strip[:, None] < strips, (BLOCK_STRIPS, BLOCK_ROWS))
        s = tl.load(strip_sum_ptr + at, mask=mask, other=0.0)
        if level_ptr is not None:
            own = s < 0.0
            m = tl.load(strip_offset_ptr + at, mask=mask & own, other=float("-inf"))
            m = tl.where(own, m, asked[None, :])
            s = tl.abs(s)
        else:
            m = tl.load(strip_offset_ptr + at, mask=mask, other=float("-inf"))
        if ratio is not None:
            m = m * ratio
        if SECOND:
            m = tl.where(s > 0.0, m, float("-inf"))
        strips_max = tl.max(m, 0)
        largest_offset = tl.maximum(largest_offset, strips_max)
        new_max = tl.maximum(run_max, strips_max)
        offset = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2((run_max - offset) * log2_e)
        distance = m - offset[None, :]
        weight = tl.exp2(distance * log2_e)
        if strip_shifted_sum_ptr is not None:
            moved = tl.where(run_max == float("-inf"), 0.0, run_max - offset)
            w = tl.load(strip_shifted_sum_ptr + at, mask=mask, other=0.0)
            part = tl.where(weight > 0.0, weight * (w + s * distance), 0.0)
            run_shifted = rescale * (run_shifted + run_sum * moved) + tl.sum(part, 0)
        run_sum = run_sum * rescale + tl.sum(s * weight, 0)
        run_max = new_max
        if weighted_sum_ptr is not None:
            run_weighted += tl.sum(tl.load(strip_weighted_sum_ptr + at, mask=mask, other=0.0), 0)
        if top_ptr is not None:
            top = tl.load(strip_top_ptr + at, mask=mask, other=float("-inf"))
            best = tl.max(top, 0)
            first = tl.load(strip_argmax_ptr + at, mask=mask, other=2147483647)
            first = tl.min(tl.where(top == best[None, :], first, 2147483647), 0)
            run_argmax = tl.where(best > run_top, first, run_argmax)  # of equals the first block's
            run_top = tl.maximum(run_top, best)
    log_sum = tl.log2(run_sum) * ln_2
    lse = run_max + log_sum
    if block_columns is not None:
        offs_row = offs_row + tl.program_id(1).to(tl.int64) * numbers * rows
    if lse_ptr is not None:
        tl.store(lse_ptr + offs_row, lse, mask=in_rows)
    tl.store(start_ptr + offs_row, run_max, mask=in_rows)
    tl.store(rest_ptr + offs_row, -log_sum, mask=in_rows)
    # not asked - lse, which has lost what lies below an ulp of the logits
    if logprob_ptr is not None:
        logprob = tl.where(counts, (asked - run_max) - log_sum, 0.0)
        tl.store(logprob_ptr + offs_row, logprob, mask=in_rows)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + offs_row, log_sum - run_shifted / run_sum, mask=in_rows)
    if level_ptr is not None:
        tl.store(level_ptr + offs_row, tl.where(largest_offset > asked, lse, asked), mask=in_rows)
    if weighted_sum_ptr is not None:
        tl.store(weighted_sum_ptr + offs_row, run_weighted, mask=in_rows)
    if top_ptr is not None:
        tl.store(top_ptr + offs_row, run_top, mask=in_rows)
        tl.store(argmax_ptr + offs_row, run_argmax, mask=in_rows)
