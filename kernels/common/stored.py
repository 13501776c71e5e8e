"""Loads of rows' numbers, and of logits out of a buffer: raw ones through bias, scale and cap, relative ones by adding
their strip's offset."""

import triton
import triton.language as tl

from . import gpus
from .transform import transform_logits

STRIP = tl.constexpr(gpus.RELATIVE_STRIP)


@triton.jit
def load_number(ptr, row):
    """A row's number; None where there is no such number."""
    if ptr is None:
        return  # Triton 3.5 cannot take a None that is written down
    else:
        return tl.load(ptr + row)


@triton.jit
def load_column(ptr, offs_row, in_rows):
    """A number per row, as a column; None where there is no such number."""
    if ptr is None:
        return
    else:
        return tl.load(ptr + offs_row, mask=in_rows, other=0.0)[:, None]


@triton.jit
def load_row(
    logits_ptr,  # of the row: raw, or fp16 relative to the strips' offsets
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
    """Columns ``offs`` of one row, as the softmax sees them; anything outside."""
    x = tl.load(logits_ptr + offs, mask=inside, other=float("-inf")).to(tl.float32)
    if strip_offset_ptr is not None:
        x += tl.load(strip_offset_ptr + (offs // STRIP).to(tl.int64) * strip_stride + row, mask=inside, other=0.0)
    else:
        if bias_ptr is not None:
            x += tl.load(bias_ptr + offs, mask=inside, other=0.0).to(tl.float32)
        x = transform_logits(x, logit_scale, softcap, row_scale)
    return x


@triton.jit
def load_block(
    logits_ptr,  # [rows, columns]: raw, or fp16 relative to the strips' offsets
    strip_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    bias_ptr,  # [columns] or None
    offs_row,
    in_rows,
    strip_stride,  # from strip to strip of the offsets
    stride,
    start,  # the first of offs, of one strip where logits are relative
    offs,
    in_columns,
    logit_scale,
    softcap,
    row_scale,
    row_start=None,  # of relative logits, with row_rest: their log-probabilities (x - row_start) + row_rest are wanted
    row_rest=None,
    columns2=None,  # of a softmax that may end within the strip, with offset_behind
    offset_behind=None,  # [rows, 1] the strip's offset from there on
):
    """A block of rows and columns, as the softmax sees it; outside -inf where logits are relative, else anything."""
    at = logits_ptr + offs_row.to(tl.int64)[:, None] * stride + offs[None, :]
    mask = in_rows[:, None] & in_columns[None, :]
    if strip_offset_ptr is not None:
        offset_at = strip_offset_ptr + tl.cast(start // STRIP, tl.int64) * strip_stride + offs_row
        offset = tl.load(offset_at, mask=in_rows, other=0.0)[:, None]
        if row_start is not None:
            offset = (offset - row_start) + row_rest
        if offset_behind is not None:
            behind = offs >= tl.where(start < columns2, columns2, start + STRIP)
            offset = tl.where(behind[None, :], offset_behind, offset)
        return tl.load(at, mask=mask, other=float("-inf")).to(tl.float32) + offset
    else:
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + offs, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        return transform_logits(x, logit_scale, softcap, row_scale)
