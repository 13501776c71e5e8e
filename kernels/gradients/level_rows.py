"""Exponentials E [rows, vocab] that ``exp_logits`` left, brought to one offset per row, and their factors.

    E = exp(x - level),  dlogits[i] = softmax_factor[i] E[i] + target_factor[i] onehot(target[i])
    softmax_factor = alpha exp(level - lse),  target_factor = alpha p(target) - beta

Hidden states times the softmax factor [rows] fp32 are the other operand of the weight's gradient.
"""

import triton.language as tl

from ..common.blocks import counted_rows
from ..common.kernel import kernel
from ..common.transform import log2_e


@kernel
def level_rows_kernel(
    # in and out
    exp_ptr,  # [rows, vocab] 16 bit
    hidden_ptr,  # [rows, hidden], times the factor of the softmax where a row counts; or None
    # outputs
    softmax_factor_ptr,  # [rows] fp32: what E times gives the softmax's part of dlogits
    target_factor_ptr,  # [rows] fp32: dlogits at the target
    # inputs
    strip_offset_ptr,  # [strips, rows] fp32, where the sum is negative
    strip_sum_ptr,  # [strips, rows] fp32
    level_ptr,  # [rows] fp32
    target_ptr,  # [rows] int64, -1 where the row does not count
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
    strip_stride,  # from strip to strip of the statistics
    stride,
    hidden,
    # scalars
    logit_scale,  # float or None for 1
    row_scale_ptr,  # [rows] fp32, or None for 1
    BLOCK_ROWS: tl.constexpr,
    STRIP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The factors of rows, and rows whose strips differ in offset brought to one: nearly all blocks have none."""
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < counted_rows(count_ptr, first_row, rows)
    level = tl.load(level_ptr + offs_row, mask=in_rows, other=0.0)
    if (tl.program_id(1) == 0) | (hidden_ptr is not None):
        alpha = tl.load(alpha_ptr + offs_row, mask=in_rows, other=0.0)
        beta = tl.load(beta_ptr + offs_row, mask=in_rows, other=0.0)
        if logit_scale is not None:
            alpha, beta = alpha * logit_scale, beta * logit_scale
        if row_scale_ptr is not None:
            row_scale = tl.load(row_scale_ptr + offs_row, mask=in_rows, other=1.0)
            alpha, beta = alpha * row_scale, beta * row_scale
        start = tl.load(start_ptr + offs_row, mask=in_rows, other=0.0)
        rest = tl.load(rest_ptr + offs_row, mask=in_rows, other=0.0)
        logprob = tl.load(logprob_ptr + offs_row, mask=in_rows, other=0.0)
        softmax = tl.exp2(((level - start) + rest) * log2_e)
        # one program of a row's writes its factors; the interpreter takes no mask that is one number
        first = in_rows & (offs_row * 0 + tl.program_id(1) == 0)
        tl.store(softmax_factor_ptr + offs_row, alpha * softmax, mask=first)
        tl.store(target_factor_ptr + offs_row, alpha * tl.exp2(logprob * log2_e) - beta, mask=first)
        if hidden_ptr is not None:
            counts = tl.load(target_ptr + offs_row, mask=in_rows, other=-1) >= 0
            for block in range(tl.program_id(1), tl.cdiv(hidden, BLOCK), SPLITS):
                offs_hidden = block * BLOCK + tl.arange(0, BLOCK)
                at = hidden_ptr + offs_row.to(tl.int64)[:, None] * hidden + offs_hidden[None, :]
                mask = counts[:, None] & (offs_hidden < hidden)[None, :]
                h = tl.load(at, mask=mask, other=0.0).to(tl.float32) * (alpha * softmax)[:, None]
                tl.store(at, h.to(hidden_ptr.dtype.element_ty), mask=mask)
    target_logit = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
    uneven = in_rows & (level != target_logit)
    if tl.max(uneven.to(tl.int32), 0) > 0:
        for strip in range(tl.program_id(1), strips, SPLITS):
            offs_col = strip * STRIP + tl.arange(0, STRIP)
            stats_at = tl.cast(strip, tl.int64) * strip_stride + offs_row
            own = tl.load(strip_sum_ptr + stats_at, mask=uneven, other=0.0) < 0.0
            offset = tl.where(own, tl.load(strip_offset_ptr + stats_at, mask=own, other=0.0), target_logit)
            at = exp_ptr + offs_row.to(tl.int64)[:, None] * stride + offs_col[None, :]
            mask = uneven[:, None] & (offs_col < vocab)[None, :]
            e = tl.load(at, mask=mask, other=0.0).to(tl.float32) * tl.exp2((offset - level) * log2_e)[:, None]
            tl.store(at, e.to(exp_ptr.dtype.element_ty), mask=mask)
