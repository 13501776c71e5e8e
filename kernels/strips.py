"""From the strips that `exp_logits` left: statistics of whole rows, and rows of exponentials brought to one offset."""

import triton
import triton.language as tl

from .blocks import counted_rows
from .transform import ln_2, log2_e


@triton.jit
def merge_strips_kernel(
    # outputs
    lse_ptr,  # [rows] fp32 or None
    start_ptr,  # [rows] fp32: log p = (x - start) + rest, without the rounding of lse
    rest_ptr,  # [rows] fp32
    logprob_ptr,  # [rows] fp32, 0 where the row does not count; or None
    entropy_ptr,  # [rows] fp32 or None
    weighted_sum_ptr,  # [rows] fp32 or None
    top_ptr,  # [rows] fp32 or None: the largest logit
    argmax_ptr,  # [rows] int32 or None: the first column that has it
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
    strips,
    columns,  # that the softmax is over
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
        counts = (target >= 0) & (target < columns)
        if ratio is not None:
            asked = asked * ratio
        run_max = tl.where(counts, asked, run_max)
        run_sum = tl.where(counts & (asked != float("-inf")), 1.0, run_sum)
    for start in range(0, strips, BLOCK_STRIPS):
        offs_strip = start + tl.arange(0, BLOCK_STRIPS)
        at = offs_strip[:, None].to(tl.int64) * rows + offs_row[None, :]
        mask = (offs_strip[:, None] < strips) & in_rows[None, :]
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


@triton.jit
def level_rows_kernel(
    # in and out
    exp_ptr,  # [rows, vocab] 16 bit
    # outputs
    softmax_factor_ptr,  # [rows] fp32: what E times gives the softmax's part of dlogits
    target_factor_ptr,  # [rows] fp32: dlogits at the target
    # inputs
    strip_offset_ptr,  # [strips, rows] fp32, where the sum is negative
    strip_sum_ptr,  # [strips, rows] fp32
    level_ptr,  # [rows] fp32
    target_logit_ptr,  # [rows] fp32, the offset of rows that need nothing
    start_ptr,  # [rows] fp32
    rest_ptr,  # [rows] fp32
    logprob_ptr,  # [rows] fp32
    alpha_ptr,  # [rows] fp32
    beta_ptr,  # [rows] fp32
    count_ptr,  # [] int64: how many rows of the call count, or None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    vocab,
    strips,
    stride,
    # scalars
    logit_scale,  # float or None for 1
    BLOCK_ROWS: tl.constexpr,
    STRIP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The factors of rows, and rows whose strips differ in offset brought to one: nearly all blocks have none."""
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < counted_rows(count_ptr, first_row, rows)
    level = tl.load(level_ptr + offs_row, mask=in_rows, other=0.0)
    if tl.program_id(1) == 0:
        alpha = tl.load(alpha_ptr + offs_row, mask=in_rows, other=0.0)
        beta = tl.load(beta_ptr + offs_row, mask=in_rows, other=0.0)
        if logit_scale is not None:
            alpha, beta = alpha * logit_scale, beta * logit_scale
        start = tl.load(start_ptr + offs_row, mask=in_rows, other=0.0)
        rest = tl.load(rest_ptr + offs_row, mask=in_rows, other=0.0)
        logprob = tl.load(logprob_ptr + offs_row, mask=in_rows, other=0.0)
        softmax = tl.exp2(((level - start) + rest) * log2_e)
        tl.store(softmax_factor_ptr + offs_row, alpha * softmax, mask=in_rows)
        tl.store(target_factor_ptr + offs_row, alpha * tl.exp2(logprob * log2_e) - beta, mask=in_rows)
    target_logit = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
    uneven = in_rows & (level != target_logit)
    if tl.max(uneven.to(tl.int32), 0) > 0:
        for strip in range(tl.program_id(1), strips, SPLITS):
            offs_col = strip * STRIP + tl.arange(0, STRIP)
            stats_at = tl.cast(strip, tl.int64) * rows + offs_row
            own = tl.load(strip_sum_ptr + stats_at, mask=uneven, other=0.0) < 0.0
            offset = tl.where(own, tl.load(strip_offset_ptr + stats_at, mask=own, other=0.0), target_logit)
            at = exp_ptr + offs_row.to(tl.int64)[:, None] * stride + offs_col[None, :]
            mask = uneven[:, None] & (offs_col < vocab)[None, :]
            e = tl.load(at, mask=mask, other=0.0).to(tl.float32) * tl.exp2((offset - level) * log2_e)[:, None]
            tl.store(at, e.to(exp_ptr.dtype.element_ty), mask=mask)
