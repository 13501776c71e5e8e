"""Functions that load stored logits and return the softmax's logits, with bias, scale and cap.

Bias, scale and cap are applied to raw logits after the load. In relative logits they are applied already; after the
load the offset of a logit's strip is added.
"""

import triton
import triton.language as tl

from ...core import gpus

STRIP = tl.constexpr(gpus.RELATIVE_STRIP)

log2_e = tl.constexpr(1.4426950408889634)
ln_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """The hyperbolic tangent of ``x`` fp32: ``1 - 2 / (e^2x + 1)``, which saturates at 1 and -1; near 0 a series,
    since the difference cancels."""
    near_zero = x * (1.0 - x * x * (1.0 / 3.0 - x * x * (2.0 / 15.0 - x * x * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, near_zero, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def transform_logits(
    x,  # hidden @ weight.T + bias, fp32
    logit_scale,  # float or None for 1
    softcap,  # float or None for no cap
    row_scale,  # last factor of a row's logits; None for 1
):
    """Returns the softmax's logits: ``row_scale * softcap * tanh(logit_scale * x / softcap)``."""
    if logit_scale is not None:
        x = x * logit_scale
    if softcap is not None:
        x = softcap * tanh(x / softcap)
    if row_scale is not None:
        x = x * row_scale
    return x


@triton.jit
def transform_derivative(
    x,  # the transformed logit
    logit_scale,
    softcap,
    row_scale,
):
    """The derivative of the transformed logit with respect to the raw one; 1.0 without a transform."""
    slope = 1.0
    if softcap is not None:
        capped = x / softcap
        if row_scale is not None:
            capped = capped / row_scale
        slope = 1.0 - capped * capped
    if logit_scale is not None:
        slope = slope * logit_scale
    if row_scale is not None:
        slope = slope * row_scale
    return slope


@triton.jit
def times(x, factor):
    """Returns ``factor * x``; x if ``factor`` is None."""
    if factor is None:
        return x
    else:
        return x * factor


@triton.jit
def load_number(ptr, row):
    """Loads element ``row`` of the vector at ``ptr``; None if ``ptr`` is None."""
    if ptr is None:
        return  # Triton 3.5 cannot compile ``return None``
    else:
        return tl.load(ptr + row)


@triton.jit
def load_column(ptr, offs_row, in_rows):
    """Loads the elements ``offs_row`` [rows] of the vector at ``ptr`` as [rows, 1], 0 where ``in_rows`` is false; None
    if ``ptr`` is None."""
    if ptr is None:
        return
    else:
        return tl.load(ptr + offs_row, mask=in_rows, other=0.0)[:, None]


@triton.jit
def load_columns(pointers, offs_row, in_rows, COUNT: tl.constexpr):
    """Returns a tuple: ``load_column`` of each pointer in the tuple ``pointers``, whose length is COUNT."""
    columns = (load_column(pointers[0], offs_row, in_rows),)
    for i in tl.static_range(1, COUNT):
        columns = columns + (load_column(pointers[i], offs_row, in_rows),)
    return columns


@triton.jit
def load_row(
    logits_ptr,  # of the row's first logit: raw, or fp16 relative to strips' offsets in base 2
    strip_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    bias_ptr,  # [columns] or None
    row,  # index of the row in the offsets
    strip_stride,  # from strip to strip of the offsets
    offs,  # [n] columns
    in_columns,  # [n] mask
    logit_scale,
    softcap,
    row_scale,
):
    """Returns the softmax's logits in the columns ``offs`` of one row, [n] fp32; any numbers where ``in_columns`` is
    false."""
    x = tl.load(logits_ptr + offs, mask=in_columns, other=float("-inf")).to(tl.float32)
    if strip_offset_ptr is not None:
        offset_pointers = strip_offset_ptr + (offs // STRIP).to(tl.int64) * strip_stride + row
        x = x * ln_2 + tl.load(offset_pointers, mask=in_columns, other=0.0)
    else:
        if bias_ptr is not None:
            x += tl.load(bias_ptr + offs, mask=in_columns, other=0.0).to(tl.float32)
        x = transform_logits(x, logit_scale, softcap, row_scale)
    return x


@triton.jit
def load_block(
    logits_ptr,  # [rows, columns]: raw, or fp16 relative to strips' offsets in base 2
    strip_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    bias_ptr,  # [columns] or None
    offs_row,  # [rows of the block] indices
    in_rows,  # [rows of the block] mask
    strip_stride,  # from strip to strip of the offsets
    logits_stride,  # from row to row of the logits
    first_column,  # the first of ``offs`` if all are in one strip; None: in several strips; unread for raw logits
    offs,  # [columns of the block] indices
    in_columns,  # [columns of the block] mask
    logit_scale,
    softcap,
    row_scale,
    lse_base=None,  # [rows of the block, 1], for relative logits: returns log p = (x - lse_base) + neg_log_sum, not x
    neg_log_sum=None,
):
    """Returns the softmax's logits of a block, [rows, columns] fp32. Outside of ``in_rows`` and ``in_columns`` relative
    logits are -inf; raw logits are any numbers."""
    pointers = logits_ptr + offs_row.to(tl.int64)[:, None] * logits_stride + offs[None, :]
    mask = in_rows[:, None] & in_columns[None, :]
    if strip_offset_ptr is not None:
        if first_column is None:
            offset_pointers = (
                strip_offset_ptr + (offs // STRIP).to(tl.int64)[None, :] * strip_stride + offs_row[:, None]
            )
            offset = tl.load(offset_pointers, mask=mask, other=0.0)
        else:
            offset_pointers = strip_offset_ptr + tl.cast(first_column // STRIP, tl.int64) * strip_stride + offs_row
            offset = tl.load(offset_pointers, mask=in_rows, other=0.0)[:, None]
        if lse_base is not None:
            offset = (offset - lse_base) + neg_log_sum
        return tl.load(pointers, mask=mask, other=float("-inf")).to(tl.float32) * ln_2 + offset
    else:
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + offs, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        return transform_logits(x, logit_scale, softcap, row_scale)
