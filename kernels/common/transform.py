"""Functions that load stored logits and turn them into the logits of the softmax.

Raw logits get bias, scale and cap; relative logits get their strip's offset.
"""

import triton
import triton.language as tl

from ...core import gpus

STRIP = tl.constexpr(gpus.RELATIVE_STRIP)

log2_e = tl.constexpr(1.4426950408889634)
ln_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    # 1 - 2 / (e^2x + 1) saturates to 1 and -1 without overflow; near 0, where the difference cancels, a series
    series = x * (1.0 - x * x * (1.0 / 3.0 - x * x * (2.0 / 15.0 - x * x * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def transform_logits(
    x,  # hidden @ weight.T + bias, fp32
    logit_scale,  # float or None for 1
    softcap,  # float or None for no cap
    row_scale,  # last factor of a row's logits; None for 1
):
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
    """``d transformed / d raw``, computed from the transformed logit; 1.0 without a transform."""
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
    """``factor * x``; x if ``factor`` is None."""
    if factor is None:
        return x
    else:
        return x * factor


@triton.jit
def load_number(ptr, row):
    """The number of a row; None if ``ptr`` is None."""
    if ptr is None:
        return  # Triton 3.5 cannot compile ``return None``
    else:
        return tl.load(ptr + row)


@triton.jit
def load_column(ptr, offs_row, in_rows):
    """A number per row as [rows, 1]; None if ``ptr`` is None."""
    if ptr is None:
        return
    else:
        return tl.load(ptr + offs_row, mask=in_rows, other=0.0)[:, None]


@triton.jit
def load_columns(pointers, offs_row, in_rows, COUNT: tl.constexpr):
    """A tuple of COUNT numbers per row, each as [rows, 1]."""
    columns = (load_column(pointers[0], offs_row, in_rows),)
    for i in tl.static_range(1, COUNT):
        columns = columns + (load_column(pointers[i], offs_row, in_rows),)
    return columns


@triton.jit
def load_row(
    logits_ptr,  # of the row: raw, or fp16 relative to strips' offsets in base 2
    strip_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    bias_ptr,  # [columns] or None
    row,
    strip_stride,  # from strip to strip of the offsets
    offs,
    inside,
    logit_scale,
    softcap,
    row_scale,
):
    """The softmax's logits of the columns ``offs`` of one row; any numbers where ``inside`` is false."""
    x = tl.load(logits_ptr + offs, mask=inside, other=float("-inf")).to(tl.float32)
    if strip_offset_ptr is not None:
        offset_at = strip_offset_ptr + (offs // STRIP).to(tl.int64) * strip_stride + row
        x = x * ln_2 + tl.load(offset_at, mask=inside, other=0.0)
    else:
        if bias_ptr is not None:
            x += tl.load(bias_ptr + offs, mask=inside, other=0.0).to(tl.float32)
        x = transform_logits(x, logit_scale, softcap, row_scale)
    return x


@triton.jit
def load_block(
    logits_ptr,  # [rows, columns]: raw, or fp16 relative to strips' offsets in base 2
    strip_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    bias_ptr,  # [columns] or None
    offs_row,
    in_rows,
    strip_stride,  # from strip to strip of the offsets
    stride,
    start,  # the first of offs, which are all in one strip if logits are relative; None: they are in several strips
    offs,
    in_columns,
    logit_scale,
    softcap,
    row_scale,
    row_start=None,  # for relative logits: returns log-probabilities (x - row_start) + row_rest; None: logits
    row_rest=None,
):
    """The softmax's logits of a block of rows and columns. Outside of rows and columns they are -inf if logits are
    relative, else any numbers."""
    pointers = logits_ptr + offs_row.to(tl.int64)[:, None] * stride + offs[None, :]
    mask = in_rows[:, None] & in_columns[None, :]
    if strip_offset_ptr is not None:
        if start is None:
            offset_at = strip_offset_ptr + (offs // STRIP).to(tl.int64)[None, :] * strip_stride + offs_row[:, None]
            offset = tl.load(offset_at, mask=mask, other=0.0)
        else:
            offset_at = strip_offset_ptr + tl.cast(start // STRIP, tl.int64) * strip_stride + offs_row
            offset = tl.load(offset_at, mask=in_rows, other=0.0)[:, None]
        if row_start is not None:
            offset = (offset - row_start) + row_rest
        return tl.load(pointers, mask=mask, other=float("-inf")).to(tl.float32) * ln_2 + offset
    else:
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + offs, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        return transform_logits(x, logit_scale, softcap, row_scale)
