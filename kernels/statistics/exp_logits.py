"""The logits matmul whose epilogue writes statistics, and exponentials or relative logits instead of logits.

A persistent GEMM over ``[BLOCK_M, BLOCK_N]`` tiles of one or two column strips. From the fp32 accumulator the epilogue
makes, for each row and strip, an offset, the sum of exponentials, and numbers for other statistics. Its output, 16 bits
wide, is one of three:

- exponentials ``E = exp(x - offset)`` in the operands' dtype, relative to a given offset per row (the target's logit).
  The gradient is E times a factor per row, without a pass over E. A strip with a maximum more than REACH above the
  offset takes a larger one; ``level_rows_kernel`` brings such rows to one offset afterwards.
- relative logits ``x - offset`` in fp16, in base 2, relative to the row's maximum in the strip. Their error is 2^-12 of
  their distance to the maximum, so that of a probability ``p`` is ``2^-12 log(p_max / p)`` of p, for any row up to
  45,000 nats wide. Every statistic and every gradient can be made from them.
- nothing, if only statistics are wanted.

No rounding error grows with the size of a logit itself. Here the target's term has the logit of the tile; ``merge.py``
and ``level_rows_kernel`` replace it by the exact one, so that loss and gradient have the same logit.

Operands may be e4m3, with a scale for each row of hidden states and one for the weight. The tile then holds the
target's exact logit; those of other probable ids take their places later (``heavy.py``).

``exp_logits`` is the body of kernels that are generated for the statistics beside each softmax (``lists.py``).
"""

import triton
import triton.language as tl

from ..common.blocks import (
    column_halves,
    counted_rows,
    descaled,
    dot,
    load_rows,
    store_tile,
    tile_place,
)
from ..common.transform import log2_e, transform_logits

# most nats of a logit above the row's offset: e^60 times e^-60 stay well inside bf16's range
REACH = tl.constexpr(60.0)
# least offset. Below it (a strip whose ids a bias excludes) the product with log2_e is rounded by so much that
# exponentials overflow. It is a power of 2, whose product with log2_e is exact
LEAST_OFFSET = tl.constexpr(-(2.0**30))


@triton.jit
def finish_tile(
    out,  # matrix: exponentials or relative logits; descriptor and pointer None: nothing is stored
    offset_ptr,  # [strips, rows] fp32, as ``exp_logits`` has it; so are the next three
    sums,
    strips,
    strip_stride,
    tile,  # [BLOCK_M, BLOCK_N] fp32
    class_weights_ptr,
    row_offset,  # None: each strip's own maximum
    row_start,
    tile_n,
    vocab,
    ratios,
    widths,  # whole strips, or None for all
    STORE_LOGITS: tl.constexpr,
    STORE_STRIP: tl.constexpr,
    ADD_HALF: tl.constexpr,
    STORE_SUMS: tl.constexpr,
    SOFTMAXES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIP: tl.constexpr,
    END: tl.constexpr,  # divides the vocabulary: a tile's columns, half of them, or 1
    INFINITE: tl.constexpr,  # a logit may be -inf
    STORE_TOP: tl.constexpr,  # in the offset's place where the row's was taken
):
    """Stores a tile and its strips' statistics. A negative sum of exponentials marks a strip with an offset of its own
    instead of the row's."""
    STRIPS: tl.constexpr = BLOCK_N // STRIP
    HALF: tl.constexpr = BLOCK_N // 2
    STORED: tl.constexpr = out[0] is not None or out[1] is not None
    RELATIVE: tl.constexpr = STORED and row_offset is None
    offs_row = row_start + tl.arange(0, BLOCK_M)
    in_rows = offs_row < out[3]
    ends = (vocab,)
    for i in tl.static_range(1, SOFTMAXES):
        ends = ends + (vocab if widths[i] is None else widths[i],)
    # a strip past the vocabulary writes an offset of -inf and a sum of 0, which merge to nothing; its store is outside
    for i in tl.static_range(STRIPS):
        x = tile if STRIPS == 1 else column_halves(tile, BLOCK_M, BLOCK_N)[i]
        strip = tile_n * STRIPS + i
        offs_col = strip * STRIP + tl.arange(0, STRIP)
        in_vocab = offs_col < vocab
        stats_at = strip.to(tl.int64) * strip_stride + offs_row
        STORE_LOGITS(strips, stats_at, in_rows, x, offs_col, in_vocab, class_weights_ptr)
        if END == 1:
            x = tl.where(in_vocab[None, :], x, float("-inf"))
        # a half past the vocabulary adds no sums; this takes no operation per element
        if END == HALF:
            top = row_offset
            for half in tl.static_range(2 // STRIPS):
                half_tile = x if STRIPS == 2 else column_halves(x, BLOCK_M, STRIP)[half]
                largest = tl.where(strip * STRIP + half * HALF < vocab, tl.max(half_tile, 1), float("-inf"))
                top = largest if half == 0 else tl.maximum(top, largest)
        else:
            top = tl.max(x, 1)
        STORE_STRIP(strips, stats_at, in_rows, x, top, offs_col)
        offset = top
        if row_offset is not None:
            offset = tl.where(top - row_offset > REACH, top - REACH, row_offset)
        shift = tl.where(offset < LEAST_OFFSET, LEAST_OFFSET, offset)  # exponentials below it are 0, as those of -inf
        totals = (top,)  # until the first half's are there
        for half in tl.static_range(2 // STRIPS):
            half_tile = x if STRIPS == 2 else column_halves(x, BLOCK_M, STRIP)[half]
            first = strip * STRIP + half * HALF
            # one fused multiply-add; the rounding error of its constant, one per row, is removed from the sums
            moved = tl.broadcast_to((shift * -log2_e)[:, None], half_tile.shape)
            z = tl.math.fma(half_tile, tl.full(half_tile.shape, log2_e, tl.float32), moved)
            e = tl.exp2(z)
            totals = ADD_HALF(totals, z, e, ratios, first, ends, half == 0, END == HALF, INFINITE)
            if STORED:
                store_tile(out, row_start, first, z if RELATIVE else e)
        # the rounding error of the fused multiply-add's constant, in base 2
        rounded = tl.math.fma(shift, tl.full(shift.shape, log2_e, tl.float32), shift * -log2_e)
        scale = tl.exp2(-rounded)
        total, stores_offset = totals[0] * scale, in_rows
        if row_offset is not None:
            has_offset = offset != row_offset
            total = tl.where(has_offset, -total, total)
            if STORE_TOP:
                offset = tl.where(has_offset, offset, top)
            else:
                stores_offset = in_rows & has_offset
        tl.store(offset_ptr + stats_at, offset, mask=stores_offset)
        STORE_SUMS(totals, sums, strips, stats_at, in_rows, rounded, ratios)
        tl.store(sums[0] + stats_at, total, mask=in_rows)


@triton.jit
def exp_logits(
    # outputs
    out_desc,  # [rows, vocab] 16 bit, store block [BLOCK_M, BLOCK_N / 2], or None
    out_ptr,  # the same where it is not described; None
    # [strips, rows] fp32; with a row offset where the strip's sum is negative, elsewhere nothing, with e4m3 the maximum
    strip_offset_ptr,
    sums,  # a tuple, of each softmax [strips, rows] fp32: sum of exp(ratio (x - offset)) over its first columns;
    # of the first negated where the row's offset was not taken
    strips,  # a tuple of [strips, rows]: what the vectors of statistics are made of
    # inputs
    hidden_desc,  # [rows, hidden] 16 bit or e4m3, as the weight, block [BLOCK_M, BLOCK_K]
    hidden_ptr,
    weight_desc,  # [vocab, hidden], block [BLOCK_N, BLOCK_K]
    weight_ptr,
    bias_ptr,  # [vocab] or None
    class_weights_ptr,  # [vocab] or None
    row_offset_ptr,  # [rows] fp32, or None for each strip's own maximum
    target_ptr,  # [rows] int64, -1 where the row does not count; or None, with target_logit_ptr
    hidden_scale_ptr,  # [rows] fp32 of e4m3 operands, or None
    weight_scale_ptr,  # [] fp32, likewise
    hidden_common_ptr,  # [rows] fp32, likewise: what was taken out of a row, in units of one direction
    common_ptr,  # [vocab] fp32, likewise: the weight times that direction
    target_logit_ptr,  # [rows] fp32, in the place of the product's of e4m3 operands
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    strip_stride,  # from strip to strip of the statistics, a multiple of 16
    out_stride,  # from row to row
    vocab,
    hidden,
    widths,  # a tuple, of each softmax a multiple of STRIP; None for all
    # scalars
    logit_scale,  # float or None for 1
    softcap,  # float or None
    row_scale_ptr,  # [rows] fp32, or None for 1
    ratios,  # of each softmax's inverse temperature to the logits'; float or None for 1
    STORE_LOGITS: tl.constexpr,
    STORE_STRIP: tl.constexpr,
    ADD_HALF: tl.constexpr,
    STORE_SUMS: tl.constexpr,
    SOFTMAXES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIP: tl.constexpr,  # BLOCK_N or half of it
    GROUP_M: tl.constexpr,
    END: tl.constexpr,  # the largest of BLOCK_N, half of it, and 1, that the vocabulary is a multiple of
    EVEN_HIDDEN: tl.constexpr,
):
    """``x = hidden @ weight.T``; stores ``exp(x - offset)`` or ``x - offset``, and sums of both for each strip."""
    tiles_m = tl.cdiv(counted_rows(count_ptr, first_row, rows), BLOCK_M)
    tiles_n = tl.cdiv(vocab, BLOCK_N)
    out = out_desc, out_ptr, out_stride, rows, vocab
    h_matrix = hidden_desc, hidden_ptr, hidden, rows, hidden
    w_matrix = weight_desc, weight_ptr, hidden, vocab, hidden
    # flattened with the loop over K, so that the next tile's loads overlap this tile's epilogue
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=hidden_desc is not None):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row_start = tile_m * BLOCK_M
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, hidden, BLOCK_K):
            h = load_rows(h_matrix, row_start, k, BLOCK_M, BLOCK_K, EVEN_HIDDEN)
            w = load_rows(w_matrix, tile_n * BLOCK_N, k, BLOCK_N, BLOCK_K, EVEN_HIDDEN)
            acc = dot(h, w.T, acc)

        offs_row = row_start + tl.arange(0, BLOCK_M)
        in_rows = offs_row < rows
        offs_col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        x = descaled(
            acc, hidden_scale_ptr, weight_scale_ptr, hidden_common_ptr, common_ptr, offs_row, rows, offs_col, vocab
        )  # fmt: skip
        row_scale = None
        if row_scale_ptr is not None:
            row_scale = tl.load(row_scale_ptr + offs_row, mask=in_rows, other=1.0)[:, None]
        if bias_ptr is not None:
            x += tl.load(bias_ptr + offs_col, mask=offs_col < vocab, other=0.0).to(tl.float32)[None, :]
        x = transform_logits(x, logit_scale, softcap, row_scale)
        if target_logit_ptr is not None:
            target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1).to(tl.int32) - tile_n * BLOCK_N
            exact = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
            x = tl.where(tl.arange(0, BLOCK_N)[None, :] == target[:, None], exact[:, None], x)
        row_offset = row_offset_ptr
        if row_offset_ptr is not None:
            row_offset = tl.load(row_offset_ptr + offs_row, mask=in_rows, other=0.0)
        finish_tile(
            out, strip_offset_ptr, sums, strips, strip_stride, x, class_weights_ptr, row_offset, row_start, tile_n,
            vocab, ratios, widths, STORE_LOGITS, STORE_STRIP, ADD_HALF, STORE_SUMS, SOFTMAXES, BLOCK_M, BLOCK_N,
            STRIP, END, END == 1 or bias_ptr is not None, target_logit_ptr is not None,
        )  # fmt: skip
