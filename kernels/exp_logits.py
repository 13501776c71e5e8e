"""The logits matmul whose epilogue leaves statistics, and exponentials or relative logits instead of logits.

A persistent GEMM over ``[BLOCK_M, BLOCK_N]`` tiles. Each tile is finished in column strips of ``BLOCK_N / 2``: from the
fp32 accumulator come the strip's offset, its row sum of exponentials and what else was asked for. What goes out, 16
bits wide, is one of three things:

- exponentials ``E = exp(x - offset)`` in the operands' type, relative to an offset of the whole row that was given
  beforehand (the target's logit): the rest of the gradient is a factor per row and needs no pass over E. A strip whose
  maximum lies more than REACH above takes a larger offset, the sign that the row has to be levelled afterwards.
- relative logits ``x - offset`` in fp16, relative to the row's maximum in the strip: off by 2^-12 of their distance
  from the maximum, so a probability ``p`` by ``2^-12 log(p_max / p)`` of itself, for any row up to 65504 nats wide.
  Every statistic and every gradient can be made from them.
- nothing, where only statistics are wanted.

No logit is ever rounded by its own size. The target's own column is left out of E and of the sums, to be added from its
exact logit: then loss and gradient see one and the same logit.
"""

import triton
import triton.language as tl

from .transform import log2_e, transform_logits


@triton.jit
def finish_strip(
    # outputs
    out_desc,
    strip_offset_ptr,
    strip_sum_ptr,
    strip_shifted_sum_ptr,
    strip_weighted_sum_ptr,
    strip_top_ptr,
    strip_argmax_ptr,
    strip_sum2_ptr,
    strip_shifted_sum2_ptr,
    # inputs
    acc,
    bias_ptr,
    class_weights_ptr,
    row_offset_ptr,
    target_ptr,
    # sizes
    row_start,
    strip,
    rows,
    vocab,
    columns2,
    # scalars
    logit_scale,
    softcap,
    ratio2,
    BLOCK_M: tl.constexpr,
    STRIP: tl.constexpr,
    REACH: tl.constexpr,
    EVEN_VOCAB: tl.constexpr,
):
    offs_row = row_start + tl.arange(0, BLOCK_M)
    offs_col = strip * STRIP + tl.arange(0, STRIP)
    in_rows = offs_row < rows
    in_vocab = offs_col < vocab
    stats_at = strip.to(tl.int64) * rows + offs_row
    x = acc
    if bias_ptr is not None:
        x += tl.load(bias_ptr + offs_col, mask=in_vocab, other=0.0).to(tl.float32)[None, :]
    x = transform_logits(x, logit_scale, softcap)
    if strip_weighted_sum_ptr is not None:
        omega = tl.where(in_vocab, 1.0, 0.0)
        if class_weights_ptr is not None:
            omega = tl.load(class_weights_ptr + offs_col, mask=in_vocab, other=0.0).to(tl.float32)
        # selection, so that a logit of -inf with weight 0 does not become nan
        weighted = tl.where(omega[None, :] != 0.0, x * omega[None, :], 0.0)
        tl.store(strip_weighted_sum_ptr + stats_at, tl.sum(weighted, 1), mask=in_rows)
    if not EVEN_VOCAB:
        x = tl.where(in_vocab[None, :], x, float("-inf"))

    top = tl.max(x, 1)
    if strip_top_ptr is not None:
        here = tl.where(x == top[:, None], offs_col[None, :], 2147483647)
        tl.store(strip_top_ptr + stats_at, top, mask=in_rows)
        tl.store(strip_argmax_ptr + stats_at, tl.min(here, 1), mask=in_rows)
    strip_offset = top
    if row_offset_ptr is not None:
        row_offset = tl.load(row_offset_ptr + offs_row, mask=in_rows, other=0.0)
        strip_offset = tl.where(strip_offset - row_offset > REACH, strip_offset - REACH, row_offset)
    shift = tl.where(strip_offset == float("-inf"), 0.0, strip_offset)  # a strip of -inf alone: exp(-inf - 0) = 0
    # subtracted first: one fused multiply-add would leave the largest term 1 +- 1e-7 |x|, and lse off by as much
    z = x - shift[:, None]
    e = tl.exp2(z * log2_e)
    if target_ptr is not None:
        target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1).to(tl.int32)
        e = tl.where(offs_col[None, :] == target[:, None], 0.0, e)
    tl.store(strip_offset_ptr + stats_at, strip_offset, mask=in_rows)
    tl.store(strip_sum_ptr + stats_at, tl.sum(e, 1), mask=in_rows)
    if strip_shifted_sum_ptr is not None:
        tl.store(strip_shifted_sum_ptr + stats_at, tl.sum(tl.where(e > 0.0, e * z, 0.0), 1), mask=in_rows)
    if strip_sum2_ptr is not None:
        z2 = z
        if ratio2 is not None:
            z2 = z * ratio2
        e2 = tl.exp2(z2 * log2_e)
        if target_ptr is not None:
            e2 = tl.where(offs_col[None, :] == target[:, None], 0.0, e2)
        e2 = tl.where((offs_col < columns2)[None, :], e2, 0.0)
        tl.store(strip_sum2_ptr + stats_at, tl.sum(e2, 1), mask=in_rows)
        if strip_shifted_sum2_ptr is not None:
            tl.store(strip_shifted_sum2_ptr + stats_at, tl.sum(tl.where(e2 > 0.0, e2 * z2, 0.0), 1), mask=in_rows)

    if out_desc is not None:
        if row_offset_ptr is not None:
            out_desc.store([row_start, strip * STRIP], e.to(out_desc.dtype))
        else:
            out_desc.store([row_start, strip * STRIP], z.to(out_desc.dtype))


@triton.jit
def exp_logits_kernel(
    # outputs
    out_desc,  # [rows, vocab] 16 bit, store block [BLOCK_M, BLOCK_N / 2], or None
    strip_offset_ptr,  # [strips, rows] fp32, strips = 2 * ceil(vocab / BLOCK_N)
    strip_sum_ptr,  # [strips, rows] fp32: sum of exp(x - offset)
    strip_shifted_sum_ptr,  # [strips, rows] fp32: sum of exp(x - offset) (x - offset), or None
    strip_weighted_sum_ptr,  # [strips, rows] fp32: sum of omega * x, or None
    strip_top_ptr,  # [strips, rows] fp32: largest x, or None
    strip_argmax_ptr,  # [strips, rows] int32: the first column that has it, or None
    strip_sum2_ptr,  # [strips, rows] fp32: sum of exp(ratio2 (x - offset)) over the first columns2; or None
    strip_shifted_sum2_ptr,  # [strips, rows] fp32: the same times ratio2 (x - offset), or None
    # inputs
    hidden_desc,  # [rows, hidden] 16 bit, block [BLOCK_M, BLOCK_K]
    weight_desc,  # [vocab, hidden] 16 bit, block [BLOCK_N, BLOCK_K]
    bias_ptr,  # [vocab] or None
    class_weights_ptr,  # [vocab] or None
    row_offset_ptr,  # [rows] fp32, or None for each strip's own maximum
    target_ptr,  # [rows] int64, -1 where the row does not count; None without targets
    # sizes
    rows,
    vocab,
    hidden,
    columns2,
    # scalars
    logit_scale,  # float or None for 1
    softcap,  # float or None
    ratio2,  # of a second temperature to that of the logits, inverse; float or None for 1
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
    REACH: tl.constexpr,
    EVEN_VOCAB: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter's product of bf16 operands is wrong, of fp32 ones right
):
    STRIP: tl.constexpr = BLOCK_N // 2
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(vocab, BLOCK_N)
    # `flatten` merges the tile loop with the loop over K, so that the next tile's loads run under this one's epilogue
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        # row tiles fastest within a group: one strip of the weight serves GROUP_M row tiles while it is in L2
        group = tile // (GROUP_M * tiles_n)
        group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
        within = tile % (GROUP_M * tiles_n)
        row_start = (group * GROUP_M + within % group_rows) * BLOCK_M
        tile_n = within // group_rows

        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, hidden, BLOCK_K):
            h = hidden_desc.load([row_start, k])
            w = weight_desc.load([tile_n * BLOCK_N, k])
            if UPCAST:
                h, w = h.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(h, w.T, acc)

        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, STRIP)), (0, 2, 1))
        left, right = tl.split(halves)
        finish_strip(
            out_desc, strip_offset_ptr, strip_sum_ptr, strip_shifted_sum_ptr, strip_weighted_sum_ptr, strip_top_ptr,
            strip_argmax_ptr, strip_sum2_ptr, strip_shifted_sum2_ptr, left, bias_ptr, class_weights_ptr,
            row_offset_ptr, target_ptr, row_start, tile_n * 2, rows, vocab, columns2, logit_scale, softcap, ratio2,
            BLOCK_M, STRIP, REACH, EVEN_VOCAB,
        )  # fmt: skip
        # past the vocabulary the right strip writes what merges to nothing (-inf, 0), and its store falls outside
        finish_strip(
            out_desc, strip_offset_ptr, strip_sum_ptr, strip_shifted_sum_ptr, strip_weighted_sum_ptr, strip_top_ptr,
            strip_argmax_ptr, strip_sum2_ptr, strip_shifted_sum2_ptr, right, bias_ptr, class_weights_ptr,
            row_offset_ptr, target_ptr, row_start, tile_n * 2 + 1, rows, vocab, columns2, logit_scale, softcap, ratio2,
            BLOCK_M, STRIP, REACH, EVEN_VOCAB,
        )  # fmt: skip
