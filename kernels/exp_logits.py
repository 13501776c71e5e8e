"""The logits matmul whose epilogue leaves statistics and exponentials instead of logits.

A persistent GEMM over ``[BLOCK_M, BLOCK_N]`` tiles. Each tile is finished in column strips of ``BLOCK_N / 2``: from the
fp32 accumulator come the strip's offset and its row sum of exponentials, and

    E[i, j] = GAIN * exp(x[i, j] - offset of row i in the strip)

goes out in the operands' 16-bit type. A probability read back from E is off by one 16-bit rounding of *itself*, whereas
one computed from a 16-bit logit is off by that rounding times the logit. No logit is ever rounded.

Two offsets. Without ``row_offset_ptr``: the row's maximum within the strip, so E lies in [0, GAIN] however peaked the
row is. With it: one offset for the whole row, given beforehand (the target's logit), so that the rest of the gradient
is a factor per row and needs no pass over E. A strip whose maximum lies more than REACH above takes a larger offset,
which is the sign that the row has to be levelled afterwards. The target's own column is left out of E and of the
sums, to be added from its exact logit: then loss and gradient see one and the same logit.
"""

import triton
import triton.language as tl

from .transform import log2_e, transform_logits


@triton.jit
def finish_strip(
    # outputs
    exp_desc,
    strip_offset_ptr,
    strip_sum_ptr,
    strip_weighted_sum_ptr,
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
    # scalars
    logit_scale,
    softcap,
    BLOCK_M: tl.constexpr,
    STRIP: tl.constexpr,
    GAIN: tl.constexpr,
    REACH: tl.constexpr,
    EVEN_VOCAB: tl.constexpr,
):
    offs_row = row_start + tl.arange(0, BLOCK_M)
    offs_col = strip * STRIP + tl.arange(0, STRIP)
    in_rows = offs_row < rows
    in_vocab = offs_col < vocab
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
        tl.store(strip_weighted_sum_ptr + strip.to(tl.int64) * rows + offs_row, tl.sum(weighted, 1), mask=in_rows)
    if not EVEN_VOCAB:
        x = tl.where(in_vocab[None, :], x, float("-inf"))

    strip_offset = tl.max(x, 1)
    if row_offset_ptr is not None:
        row_offset = tl.load(row_offset_ptr + offs_row, mask=in_rows, other=0.0)
        strip_offset = tl.where(strip_offset - row_offset > REACH, strip_offset - REACH, row_offset)
    shift = tl.where(strip_offset == float("-inf"), 0.0, strip_offset)  # a strip of -inf alone: exp(-inf - 0) = 0
    # subtracted first: one fused multiply-add would leave the largest term 1 +- 1e-7 |x|, and lse off by as much
    e = tl.exp2((x - shift[:, None]) * log2_e)
    target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1).to(tl.int32)
    e = tl.where(offs_col[None, :] == target[:, None], 0.0, e)
    stats_at = strip.to(tl.int64) * rows + offs_row
    tl.store(strip_offset_ptr + stats_at, strip_offset, mask=in_rows)
    tl.store(strip_sum_ptr + stats_at, tl.sum(e, 1), mask=in_rows)

    exp_desc.store([row_start, strip * STRIP], (e * GAIN).to(exp_desc.dtype))


@triton.jit
def exp_logits_kernel(
    # outputs
    exp_desc,  # [rows, vocab] 16 bit, store block [BLOCK_M, BLOCK_N / 2]
    strip_offset_ptr,  # [strips, rows] fp32, strips = 2 * ceil(vocab / BLOCK_N)
    strip_sum_ptr,  # [strips, rows] fp32
    strip_weighted_sum_ptr,  # [strips, rows] fp32: sum of omega * x, or None
    # inputs
    hidden_desc,  # [rows, hidden] 16 bit, block [BLOCK_M, BLOCK_K]
    weight_desc,  # [vocab, hidden] 16 bit, block [BLOCK_N, BLOCK_K]
    bias_ptr,  # [vocab] or None
    class_weights_ptr,  # [vocab] or None
    row_offset_ptr,  # [rows] fp32, or None for each strip's own maximum
    target_ptr,  # [rows] int64, -1 where the row does not count
    # sizes
    rows,
    vocab,
    hidden,
    # scalars
    logit_scale,  # float or None for 1
    softcap,  # float or None
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GAIN: tl.constexpr,
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
            exp_desc, strip_offset_ptr, strip_sum_ptr, strip_weighted_sum_ptr,
            left, bias_ptr, class_weights_ptr, row_offset_ptr, target_ptr,
            row_start, tile_n * 2, rows, vocab, logit_scale, softcap, BLOCK_M, STRIP, GAIN, REACH, EVEN_VOCAB,
        )  # fmt: skip
        # past the vocabulary the right strip writes what merges to nothing (-inf, 0), and its store falls outside
        finish_strip(
            exp_desc, strip_offset_ptr, strip_sum_ptr, strip_weighted_sum_ptr,
            right, bias_ptr, class_weights_ptr, row_offset_ptr, target_ptr, row_start, tile_n * 2 + 1, rows, vocab,
            logit_scale, softcap, BLOCK_M, STRIP, GAIN, REACH, EVEN_VOCAB,
        )  # fmt: skip
