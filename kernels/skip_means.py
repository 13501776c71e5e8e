"""What stands for the strips of a tile that is skipped: shares of its columns, and mean rows of the weight in them."""

import triton
import triton.language as tl

from .blocks import counted_rows


@triton.jit
def strip_shares_kernel(
    # outputs
    share_ptr,  # [vocab] fp32: adds up to 1 over each strip
    # inputs
    exp_ptr,  # [rows, vocab] 16 bit
    softmax_factor_ptr,  # [rows] fp32
    kept_ptr,  # [row blocks, strips] int32
    count_ptr,  # [] int64 or None
    # sizes
    first_row,
    rows,
    vocab,
    strips,
    exp_stride,
    TILE_ROWS: tl.constexpr,
    STRIP: tl.constexpr,
    STEP: tl.constexpr,  # one row in so many is looked at
    ROWS: tl.constexpr,  # at a time
):
    """Shares of a strip's columns as its skipped tiles have them."""
    strip = tl.program_id(0)
    counted = counted_rows(count_ptr, first_row, rows)
    offs_vocab = strip * STRIP + tl.arange(0, STRIP)
    in_vocab = offs_vocab < vocab
    total = tl.zeros((STRIP,), dtype=tl.float32)
    for start in range(0, tl.cdiv(counted, STEP), ROWS):
        offs_row = (start + tl.arange(0, ROWS)) * STEP
        in_rows = offs_row < counted
        kept = tl.load(kept_ptr + offs_row // TILE_ROWS * strips + strip, mask=in_rows, other=1)
        factor = tl.abs(tl.load(softmax_factor_ptr + offs_row, mask=in_rows, other=0.0))
        seen = (kept == 0) & (factor != 0.0)
        at = exp_ptr + offs_row.to(tl.int64)[:, None] * exp_stride + offs_vocab[None, :]
        e = tl.load(at, mask=seen[:, None] & in_vocab[None, :], other=0.0).to(tl.float32)
        total += tl.sum(e * factor[:, None], 0)
    whole = tl.sum(total, 0)
    uniform = tl.where(in_vocab, 1.0 / tl.maximum(tl.sum(in_vocab.to(tl.float32), 0), 1.0), 0.0)
    # sums that are no positive number (nothing was seen, or nothing finite) say nothing about shares
    usable = (whole > 0.0) & (whole < float("inf"))
    share = tl.where(usable, total / tl.where(usable, whole, 1.0), uniform)
    tl.store(share_ptr + offs_vocab, share, mask=in_vocab)


@triton.jit
def strip_means_kernel(
    # outputs
    mean_ptr,  # [strips, hidden]: the strip's rows of the weight in their shares
    square_ptr,  # [strips, column blocks] fp32: their squares, summed over columns; or None
    # inputs
    weight_ptr,  # [vocab, hidden]
    share_ptr,  # [vocab] fp32, or None for equal ones
    # sizes
    vocab,
    hidden,
    STRIP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    strip = tl.program_id(0)
    offs_vocab = strip * STRIP + tl.arange(0, STRIP)
    in_vocab = offs_vocab < vocab
    if share_ptr is not None:
        share = tl.load(share_ptr + offs_vocab, mask=in_vocab, other=0.0)
    else:
        share = tl.where(in_vocab, 1.0 / tl.maximum(tl.sum(in_vocab.to(tl.float32), 0), 1.0), 0.0)
    offs_col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_cols = offs_col < hidden
    at = weight_ptr + offs_vocab.to(tl.int64)[:, None] * hidden + offs_col[None, :]
    w = tl.load(at, mask=in_vocab[:, None] & in_cols[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(w * share[:, None], 0)
    tl.store(mean_ptr + strip.to(tl.int64) * hidden + offs_col, mean.to(mean_ptr.dtype.element_ty), mask=in_cols)
    if square_ptr is not None:
        square = tl.sum(tl.sum(w * w * share[:, None], 0), 0)
        tl.store(square_ptr + strip * tl.num_programs(1) + tl.program_id(1), square)
