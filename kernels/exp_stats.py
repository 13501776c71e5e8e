"""From the strips that `exp_logits` left: statistics of the whole row, then the gradient in place."""

import triton
import triton.language as tl

from .transform import ln_2, log2_e, transform_derivative


@triton.jit
def merge_strips_kernel(
    # outputs
    lse_ptr,  # [rows] fp32
    weighted_sum_ptr,  # [rows] fp32 or None
    level_ptr,  # [rows] fp32: offset that all of the row is to have; None with offsets of each strip's own
    # inputs
    strip_offset_ptr,  # [strips, rows] fp32
    strip_sum_ptr,  # [strips, rows] fp32, without the target's term
    strip_weighted_sum_ptr,  # [strips, rows] fp32 or None
    target_logit_ptr,  # [rows] fp32, and the offset that was asked for where there is a level
    target_ptr,  # [rows] int64, -1 where the row does not count
    # sizes
    rows,
    strips,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_STRIPS: tl.constexpr,
):
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < rows
    run_max = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    run_sum = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    run_weighted = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    largest_offset = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    asked = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
    counts = tl.load(target_ptr + offs_row, mask=in_rows, other=-1) >= 0
    run_max = tl.where(counts, asked, run_max)
    run_sum = tl.where(counts & (asked != float("-inf")), 1.0, run_sum)
    for start in range(0, strips, BLOCK_STRIPS):
        offs_strip = start + tl.arange(0, BLOCK_STRIPS)
        at = offs_strip[:, None].to(tl.int64) * rows + offs_row[None, :]
        mask = (offs_strip[:, None] < strips) & in_rows[None, :]
        m = tl.load(strip_offset_ptr + at, mask=mask, other=float("-inf"))
        s = tl.load(strip_sum_ptr + at, mask=mask, other=0.0)
        strips_max = tl.max(m, 0)
        largest_offset = tl.maximum(largest_offset, strips_max)
        new_max = tl.maximum(run_max, strips_max)
        offset = tl.where(new_max == float("-inf"), 0.0, new_max)
        run_sum = run_sum * tl.exp2((run_max - offset) * log2_e)
        run_sum += tl.sum(s * tl.exp2((m - offset[None, :]) * log2_e), 0)
        run_max = new_max
        if weighted_sum_ptr is not None:
            run_weighted += tl.sum(tl.load(strip_weighted_sum_ptr + at, mask=mask, other=0.0), 0)
    lse = run_max + tl.log2(run_sum) * ln_2
    tl.store(lse_ptr + offs_row, lse, mask=in_rows)
    if level_ptr is not None:
        tl.store(level_ptr + offs_row, tl.where(largest_offset > asked, lse, asked), mask=in_rows)
    if weighted_sum_ptr is not None:
        tl.store(weighted_sum_ptr + offs_row, run_weighted, mask=in_rows)


@triton.jit
def exp_grad_kernel(
    # in and out
    exp_ptr,  # [rows, vocab] 16 bit: exponentials of each strip, becomes dlogits
    # inputs
    strip_offset_ptr,  # [strips, rows] fp32
    lse_ptr,  # [rows] fp32
    target_logit_ptr,  # [rows] fp32
    target_ptr,  # [rows] int64, -1 where the row does not count
    alpha_ptr,  # [rows] fp32, coefficient of the softmax
    beta_ptr,  # [rows] fp32, coefficient of the target
    kappa_ptr,  # [rows] fp32, coefficient of the class weights, or None
    class_weights_ptr,  # [vocab] or None for 1
    # sizes
    rows,
    vocab,
    stride,  # elements from row to row of exp
    # scalars
    logit_scale,
    softcap,
    BLOCK_ROWS: tl.constexpr,
    STRIP: tl.constexpr,
    GAIN: tl.constexpr,
):
    strip = tl.program_id(0)
    offs_row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_col = strip * STRIP + tl.arange(0, STRIP)
    in_rows = offs_row < rows
    mask = in_rows[:, None] & (offs_col < vocab)[None, :]
    at = exp_ptr + offs_row.to(tl.int64)[:, None] * stride + offs_col[None, :]

    strip_offset = tl.load(strip_offset_ptr + strip.to(tl.int64) * rows + offs_row, mask=in_rows, other=float("-inf"))
    lse = tl.load(lse_ptr + offs_row, mask=in_rows, other=0.0)
    target_logit = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
    target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1).to(tl.int32)
    alpha = tl.load(alpha_ptr + offs_row, mask=in_rows, other=0.0)
    beta = tl.load(beta_ptr + offs_row, mask=in_rows, other=0.0)
    to_grad = tl.exp2((strip_offset - lse) * log2_e) * alpha * (1.0 / GAIN)
    # at the target, from fp32 statistics: p - 1 out of a rounded p would lose everything as p nears 1
    target_grad = tl.exp2((target_logit - lse) * log2_e) * alpha - beta

    e = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    grad = e * to_grad[:, None]
    slope = 1.0
    target_slope = 1.0
    if softcap is not None:
        # e = 0 lies 87 below its strip's maximum or further: there grad is 0, whatever the slope
        x = strip_offset[:, None] + tl.where(e > 0.0, tl.log2(e * (1.0 / GAIN)) * ln_2, 0.0)
        slope = transform_derivative(x, logit_scale, softcap)
        target_slope = transform_derivative(target_logit, logit_scale, softcap)
    elif logit_scale is not None:
        slope = logit_scale
        target_slope = logit_scale
    if kappa_ptr is not None:
        kappa = tl.load(kappa_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
        if class_weights_ptr is not None:
            omega = tl.load(class_weights_ptr + offs_col, mask=offs_col < vocab, other=0.0).to(tl.float32)
            kappa = kappa * omega[None, :]
        grad = grad - kappa
        is_target = offs_col[None, :] == target[:, None]
        grad = tl.where(is_target, target_grad[:, None] - kappa, grad)
    else:
        grad = tl.where(offs_col[None, :] == target[:, None], target_grad[:, None], grad)
    if softcap is not None:
        slope = tl.where(offs_col[None, :] == target[:, None], target_slope[:, None], slope)
    tl.store(at, (grad * slope).to(exp_ptr.dtype.element_ty), mask=mask)


@triton.jit
def level_rows_kernel(
    # in and out
    exp_ptr,  # [rows, vocab] 16 bit
    # inputs
    strip_offset_ptr,  # [strips, rows] fp32
    level_ptr,  # [rows] fp32
    target_logit_ptr,  # [rows] fp32, the offset of rows that need nothing
    # sizes
    rows,
    vocab,
    strips,
    stride,
    BLOCK_ROWS: tl.constexpr,
    STRIP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Brings rows whose strips differ in offset to one offset; blocks with no such row, nearly all, return at once."""
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < rows
    level = tl.load(level_ptr + offs_row, mask=in_rows, other=0.0)
    uneven = in_rows & (level != tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0))
    if tl.max(uneven.to(tl.int32), 0) > 0:
        for strip in range(tl.program_id(1), strips, SPLITS):
            offs_col = strip * STRIP + tl.arange(0, STRIP)
            offset = tl.load(strip_offset_ptr + tl.cast(strip, tl.int64) * rows + offs_row, mask=uneven, other=0.0)
            at = exp_ptr + offs_row.to(tl.int64)[:, None] * stride + offs_col[None, :]
            mask = uneven[:, None] & (offs_col < vocab)[None, :]
            e = tl.load(at, mask=mask, other=0.0).to(tl.float32) * tl.exp2((offset - level) * log2_e)[:, None]
            tl.store(at, e.to(exp_ptr.dtype.element_ty), mask=mask)
