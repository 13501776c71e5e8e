"""The logits matmul whose epilogue leaves statistics, and exponentials or relative logits instead of logits.

A persistent GEMM over ``[BLOCK_M, BLOCK_N]`` tiles, each one or two column strips: from the fp32 accumulator come a
strip's offset, its row sum of exponentials and what else was asked for. What goes out, 16 bits wide, is one of three
things:

- exponentials ``E = exp(x - offset)`` in the operands' type, relative to an offset of the row that was given
  beforehand (the target's logit): the rest of the gradient is a factor per row and needs no pass over E. A strip whose
  maximum lies more than REACH above takes a larger offset, the sign that the row has to be levelled afterwards.
- relative logits ``x - offset`` in fp16, relative to the row's maximum in the strip: off by 2^-12 of their distance
  from the maximum, so a probability ``p`` by ``2^-12 log(p_max / p)`` of itself, for any row up to 65504 nats wide.
  Every statistic and every gradient can be made from them.
- nothing, where only statistics are wanted.

Where the vocabulary is summed in blocks (``block_columns``, nothing stored), tiles begin anew with each block's first
column and the last of a block leaves out the next one's: a block's strips are the same wherever the block lies.

No logit is ever rounded by its own size. The target's own column is left out of E and of the sums, to be added from its
exact logit: then loss and gradient see one and the same logit.
"""

import triton.language as tl

from ..common.blocks import counted_rows, dot, load_rows, tile_place
from ..common.kernel import kernel
from ..common.transform import transform_logits
from .exp_epilogue import finish_tile, first_column


@kernel
def exp_logits_kernel(
    # outputs
    out_desc,  # [rows, vocab] 16 bit, store block [BLOCK_M, BLOCK_N / 2], or None
    out_ptr,  # the same where it is not described; None
    strip_offset_ptr,  # [strips, rows] fp32; with a row offset only where the strip's sum is negative
    strip_sum_ptr,  # [strips, rows] fp32: sum of exp(x - offset); negative where a row offset was not taken
    strip_shifted_sum_ptr,  # [strips, rows] fp32: sum of exp(x - offset) (x - offset), or None
    strip_weighted_sum_ptr,  # [strips, rows] fp32: sum of omega * x, or None
    strip_top_ptr,  # [strips, rows] fp32: largest x, or None
    strip_argmax_ptr,  # [strips, rows] int32: the first column that has it, or None
    strip_sum2_ptr,  # [strips, rows] fp32: sum of exp(ratio2 (x - offset)) over the first columns2; or None
    strip_shifted_sum2_ptr,  # [strips, rows] fp32: the same times ratio2 (x - offset), or None
    # inputs
    hidden_desc,  # [rows, hidden] 16 bit, block [BLOCK_M, BLOCK_K]
    hidden_ptr,
    weight_desc,  # [vocab, hidden] 16 bit, block [BLOCK_N, BLOCK_K]
    weight_ptr,
    bias_ptr,  # [vocab] or None
    class_weights_ptr,  # [vocab] or None
    row_offset_ptr,  # [rows] fp32, or None for each strip's own maximum
    target_ptr,  # [rows] int64, -1 where the row does not count; None without targets
    count_ptr,  # [] int64: how many rows of the call count, or None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    strip_stride,  # from strip to strip of the statistics, a multiple of 16
    out_stride,  # from row to row
    vocab,
    hidden,
    columns2,  # that the second softmax is over; None for all, or without one
    block_columns,  # of a block, behind which tiles begin anew; None for one block
    # scalars
    logit_scale,  # float or None for 1
    softcap,  # float or None
    row_scale_ptr,  # [rows] fp32, or None for 1
    ratio2,  # of a second temperature to that of the logits, inverse; float or None for 1
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIP: tl.constexpr,  # BLOCK_N or half of it
    GROUP_M: tl.constexpr,
    EVEN_VOCAB: tl.constexpr,
    EVEN_HIDDEN: tl.constexpr,
):
    tiles_m = tl.cdiv(counted_rows(count_ptr, first_row, rows), BLOCK_M)
    tiles_n = tl.cdiv(vocab, BLOCK_N)
    if block_columns is not None:
        block_tiles = tl.cdiv(block_columns, BLOCK_N)
        tiles_n = tl.cdiv(vocab, block_columns) * block_tiles
    out = out_desc, out_ptr, out_stride, rows, vocab
    h_matrix = hidden_desc, hidden_ptr, hidden, rows, hidden
    w_matrix = weight_desc, weight_ptr, hidden, vocab, hidden
    strips = (
        strip_offset_ptr, strip_sum_ptr, strip_shifted_sum_ptr, strip_weighted_sum_ptr, strip_top_ptr,
        strip_argmax_ptr, strip_sum2_ptr, strip_shifted_sum2_ptr,
    )  # fmt: skip
    SPLIT: tl.constexpr = columns2 is not None
    second = columns2, ratio2, tiles_n * (BLOCK_N // STRIP)
    # flattened the tile loop is one with the loop over K, so that the next tile's loads run under this one's epilogue
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=hidden_desc is not None):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row_start = tile_m * BLOCK_M
        moved, end = None, vocab
        if block_columns is not None:
            block = tile_n // block_tiles
            # from where the tile would begin if all followed each other
            moved = block * (block_columns - block_tiles * BLOCK_N)
            end = tl.minimum((block + 1) * block_columns, vocab)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, hidden, BLOCK_K):
            h = load_rows(h_matrix, row_start, k, BLOCK_M, BLOCK_K, EVEN_HIDDEN)
            w = load_rows(w_matrix, first_column(tile_n, moved, BLOCK_N), k, BLOCK_N, BLOCK_K, EVEN_HIDDEN)
            acc = dot(h, w.T, acc)

        offs_row = row_start + tl.arange(0, BLOCK_M)
        in_rows = offs_row < rows
        x = acc
        if bias_ptr is not None:
            offs_col = first_column(tile_n, moved, BLOCK_N) + tl.arange(0, BLOCK_N)
            x += tl.load(bias_ptr + offs_col, mask=offs_col < vocab, other=0.0).to(tl.float32)[None, :]
        row_scale = None
        if row_scale_ptr is not None:
            row_scale = tl.load(row_scale_ptr + offs_row, mask=in_rows, other=1.0)[:, None]
        x = transform_logits(x, logit_scale, softcap, row_scale)
        row_offset, target = row_offset_ptr, target_ptr
        special = tile_n < 0
        if row_offset_ptr is not None:
            row_offset = tl.load(row_offset_ptr + offs_row, mask=in_rows, other=0.0)
        if target_ptr is not None:
            target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1).to(tl.int32)
            if block_columns is None:
                special = tl.max((target // BLOCK_N == tile_n).to(tl.int32), 0) > 0
            else:
                column = target - first_column(tile_n, moved, BLOCK_N)
                special = tl.max(((column >= 0) & (column < BLOCK_N)).to(tl.int32), 0) > 0
        if not EVEN_VOCAB:
            if block_columns is None:
                special = special | (tile_n == tiles_n - 1)
            else:
                special = special | (first_column(tile_n, moved, BLOCK_N) + BLOCK_N > end)
        if SPLIT:
            special = special | ((tile_n * BLOCK_N < columns2) & (columns2 < (tile_n + 1) * BLOCK_N))
        # Few tiles hold a target or the end of a softmax. What these need would cost every element of every tile two
        # operations, 3 to 10 % of the time; with its own stores in it, the branch stays a branch.
        if special:
            sums = finish_tile(
                out, strips, strip_stride, x, class_weights_ptr, row_offset, target, row_start, tile_n, moved, end,
                second, BLOCK_M, BLOCK_N, STRIP, not EVEN_VOCAB, SPLIT,
            )  # fmt: skip
        else:
            sums = finish_tile(
                out, strips, strip_stride, x, class_weights_ptr, row_offset, None, row_start, tile_n, moved, end,
                second, BLOCK_M, BLOCK_N, STRIP, False, False,
            )  # fmt: skip
        last_strip = (tile_n + 1) * (BLOCK_N // STRIP) - 1
        tl.store(strip_sum_ptr + last_strip.to(tl.int64) * strip_stride + offs_row, sums, mask=in_rows)
