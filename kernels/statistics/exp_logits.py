"""The logits matmul whose epilogue writes statistics, and exponentials or relative logits instead of logits.

The matmul is a persistent GEMM over tiles [BLOCK_M, BLOCK_N] of one or two strips of columns. From the fp32 accumulator
the epilogue makes, for each row and strip, an offset, the sum of exponentials, and numbers for other statistics. It
also writes one of three:

- exponentials ``E = exp(x - offset)`` in the operands' 16-bit dtype. A row's offset is its target's logit, so that the
  gradient is E times a factor per row, without a pass over E. If a strip's maximum is more than REACH above the offset,
  the strip gets a larger offset; ``level_rows_kernel`` brings such rows to one offset afterwards.
- relative logits ``(x - offset) / log 2`` in fp16, where the offset is the row's maximum in the strip. Their error is
  2^-12 of their distance to the maximum, so that the error of a probability ``p`` is ``2^-12 log(p_max / p)`` of p, in
  rows whose logits lie within 45,000 nats. Every statistic and every gradient can be made from relative logits.
- nothing, if the call needs statistics only.

No rounding error grows with the size of a logit itself. The target's term of a sum is made here from the accumulator's
logit. ``merge.py`` and ``level_rows_kernel`` replace the term by one of the exact logit, so that loss and gradient read
the same logit.

Operands may be e4m3, with a scale for each row of hidden states and one scale for the weight. Exact logits then replace
logits of the accumulator: the target's here, those of other probable ids later (``heavy.py``).

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

# nats by which a logit may exceed its offset: e^60 and e^-60 are well inside bf16's range
REACH = tl.constexpr(60.0)
# Least offset. If a bias excludes all ids of a strip, the strip's maximum may be lower. Its product with log2_e would
# have a rounding error with which exponentials overflow. A power of 2 has an exact product with log2_e.
MIN_OFFSET = tl.constexpr(-(2.0**30))


@triton.jit
def finish_tile(
    out_matrix,  # a ``matrix`` of ``blocks.py``: the output; descriptor and pointer None: nothing is stored
    offset_ptr,  # [strips, rows] fp32: offsets of strips
    sum_ptrs,  # a tuple, for each softmax [strips, rows] fp32: sums of exponentials
    strip_ptrs,  # a tuple of [strips, rows]: numbers that the vectors of statistics are made of
    strip_stride,  # elements from strip to strip of the statistics
    tile,  # [BLOCK_M, BLOCK_N] fp32 logits as the softmax sees them
    class_weights_ptr,  # [vocab] or None
    row_offset,  # [BLOCK_M] fp32 offsets of rows; None: each strip's maximum is its offset
    row_start,  # first row of the tile
    tile_n,  # index of the tile along the vocabulary
    vocab,
    ratios,  # a tuple, for each softmax its inverse temperature relative to the logits'
    widths,  # a tuple, for each softmax the number of columns that it is over
    STORE_LOGITS: tl.constexpr,  # generated function of ``lists.py``
    STORE_STRIP: tl.constexpr,  # generated function of ``lists.py``
    ADD_HALF: tl.constexpr,  # generated function of ``lists.py``
    STORE_SUMS: tl.constexpr,  # generated function of ``lists.py``
    NUM_SOFTMAXES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIP: tl.constexpr,  # columns of a strip
    VOCAB_DIVISOR: tl.constexpr,  # a divisor of the vocabulary: BLOCK_N, half of it, or 1
    MAY_BE_INFINITE: tl.constexpr,  # True: a logit may be -inf
    STORE_TOP: tl.constexpr,  # True: if a strip's offset is the row's, the strip's maximum is stored in its place
):
    """Stores the output of a tile and the statistics of its strips. Stores the first softmax's sum of exponentials with
    a minus sign if the strip's offset is not the row's offset."""
    TILE_STRIPS: tl.constexpr = BLOCK_N // STRIP
    HALF: tl.constexpr = BLOCK_N // 2
    HAS_OUTPUT: tl.constexpr = out_matrix[0] is not None or out_matrix[1] is not None
    IS_RELATIVE: tl.constexpr = HAS_OUTPUT and row_offset is None
    offs_row = row_start + tl.arange(0, BLOCK_M)
    in_rows = offs_row < out_matrix[3]
    ends = (vocab,)  # for each softmax the end of its columns
    for i in tl.static_range(1, NUM_SOFTMAXES):
        ends = ends + (vocab if widths[i] is None else widths[i],)
    # a strip past the vocabulary writes an offset of -inf and a sum of 0, which add nothing when strips are merged
    for i in tl.static_range(TILE_STRIPS):
        x = tile if TILE_STRIPS == 1 else column_halves(tile, BLOCK_M, BLOCK_N)[i]
        strip = tile_n * TILE_STRIPS + i
        offs_col = strip * STRIP + tl.arange(0, STRIP)
        in_vocab = offs_col < vocab
        strip_indices = strip.to(tl.int64) * strip_stride + offs_row
        STORE_LOGITS(strip_ptrs, strip_indices, in_rows, x, offs_col, in_vocab, class_weights_ptr)
        if VOCAB_DIVISOR == 1:
            x = tl.where(in_vocab[None, :], x, float("-inf"))
        # a half past the vocabulary adds no sums; this takes no operation per element
        if VOCAB_DIVISOR == HALF:
            strip_max = row_offset
            for half in tl.static_range(2 // TILE_STRIPS):
                half_tile = x if TILE_STRIPS == 2 else column_halves(x, BLOCK_M, STRIP)[half]
                largest = tl.where(strip * STRIP + half * HALF < vocab, tl.max(half_tile, 1), float("-inf"))
                strip_max = largest if half == 0 else tl.maximum(strip_max, largest)
        else:
            strip_max = tl.max(x, 1)
        STORE_STRIP(strip_ptrs, strip_indices, in_rows, x, strip_max, offs_col)
        offset = strip_max
        if row_offset is not None:
            offset = tl.where(strip_max - row_offset > REACH, strip_max - REACH, row_offset)
        shift = tl.where(offset < MIN_OFFSET, MIN_OFFSET, offset)  # exponentials below it are 0, as those of -inf
        totals = (strip_max,)  # ADD_HALF does not read it at the first half
        for half in tl.static_range(2 // TILE_STRIPS):
            half_tile = x if TILE_STRIPS == 2 else column_halves(x, BLOCK_M, STRIP)[half]
            half_start = strip * STRIP + half * HALF
            # one fused multiply-add, with a rounding error per row, which the sums are rid of below
            neg_shift_log2 = tl.broadcast_to((shift * -log2_e)[:, None], half_tile.shape)
            z = tl.math.fma(half_tile, tl.full(half_tile.shape, log2_e, tl.float32), neg_shift_log2)
            e = tl.exp2(z)
            totals = ADD_HALF(
                totals, z, e, ratios, half_start, ends, half == 0, VOCAB_DIVISOR == HALF, MAY_BE_INFINITE
            )  # fmt: skip
            if HAS_OUTPUT:
                store_tile(out_matrix, row_start, half_start, z if IS_RELATIVE else e)
        # the rounding error of ``shift * log2_e``
        shift_error = tl.math.fma(shift, tl.full(shift.shape, log2_e, tl.float32), shift * -log2_e)
        scale = tl.exp2(-shift_error)
        total, stores_offset = totals[0] * scale, in_rows
        if row_offset is not None:
            has_own_offset = offset != row_offset
            total = tl.where(has_own_offset, -total, total)
            if STORE_TOP:
                offset = tl.where(has_own_offset, offset, strip_max)
            else:
                stores_offset = in_rows & has_own_offset
        tl.store(offset_ptr + strip_indices, offset, mask=stores_offset)
        STORE_SUMS(totals, sum_ptrs, strip_ptrs, strip_indices, in_rows, shift_error, ratios)
        tl.store(sum_ptrs[0] + strip_indices, total, mask=in_rows)


@triton.jit
def exp_logits(
    # outputs
    out_desc,  # [rows, vocab] 16 bit, block [BLOCK_M, BLOCK_N / 2]; or None
    out_ptr,  # the output where it has no descriptor; both None: nothing is stored
    # [strips, rows] fp32: offsets of strips; with ``row_offset_ptr`` written only where a strip's offset is not the
    # row's, and with e4m3 operands elsewhere the strip's maximum
    strip_offset_ptr,
    # a tuple, for each softmax [strips, rows] fp32: sum of exp(ratio (x - offset)) over the softmax's columns; the sum
    # of the first softmax has a minus sign where the strip's offset is not the row's
    sum_ptrs,
    strip_ptrs,  # a tuple of [strips, rows]: numbers that the vectors of statistics are made of
    # inputs
    hidden_desc,  # [rows, hidden] 16 bit or e4m3, block [BLOCK_M, BLOCK_K]; or None
    hidden_ptr,  # hidden states where they have no descriptor
    weight_desc,  # [vocab, hidden] of the dtype of hidden states, block [BLOCK_N, BLOCK_K]; or None
    weight_ptr,  # the weight where it has no descriptor
    bias_ptr,  # [vocab] or None
    class_weights_ptr,  # [vocab] or None
    row_offset_ptr,  # [rows] fp32; None: each strip's maximum is its offset
    target_ptr,  # [rows] int64, -1 where the row does not count; None without ``target_logit_ptr``
    # of e4m3 operands only, else None:
    hidden_scale_ptr,  # [rows] fp32: scale of each row's numbers
    weight_scale_ptr,  # [] fp32: scale of the weight's numbers
    hidden_common_ptr,  # [rows] fp32: a row's component along one direction, which its e4m3 numbers lack
    weight_common_ptr,  # [vocab] fp32: the weight times that direction
    target_logit_ptr,  # [rows] fp32: the target's exact logit, which replaces the accumulator's
    count_ptr,  # [] int64: number of rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    strip_stride,  # elements from strip to strip of the statistics, a multiple of 16
    out_stride,  # elements from row to row
    vocab,
    hidden,  # hidden size
    widths,  # a tuple, for each softmax the number of columns that it is over, a multiple of STRIP; None for all
    # scalars
    logit_scale,  # float or None for 1
    softcap,  # float or None
    row_scale_ptr,  # [rows] fp32, or None for 1
    ratios,  # a tuple, for each softmax its inverse temperature relative to the logits'; float or None for 1
    STORE_LOGITS: tl.constexpr,  # generated function of ``lists.py``
    STORE_STRIP: tl.constexpr,  # generated function of ``lists.py``
    ADD_HALF: tl.constexpr,  # generated function of ``lists.py``
    STORE_SUMS: tl.constexpr,  # generated function of ``lists.py``
    NUM_SOFTMAXES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIP: tl.constexpr,  # columns of a strip: BLOCK_N or half of it
    GROUP_M: tl.constexpr,
    VOCAB_DIVISOR: tl.constexpr,  # the largest divisor of the vocabulary among BLOCK_N, half of it, and 1
    EVEN_HIDDEN: tl.constexpr,  # True: BLOCK_K divides the hidden size
):
    """Makes logits x from ``hidden @ weight.T``. Stores ``exp(x - offset)`` or ``(x - offset) / log 2``, and the offset
    and the sums of each strip."""
    tiles_m = tl.cdiv(counted_rows(count_ptr, first_row, rows), BLOCK_M)
    tiles_n = tl.cdiv(vocab, BLOCK_N)
    out_matrix = out_desc, out_ptr, out_stride, rows, vocab
    hidden_matrix = hidden_desc, hidden_ptr, hidden, rows, hidden
    weight_matrix = weight_desc, weight_ptr, hidden, vocab, hidden
    # flattened with the loop over K, so that the next tile's loads overlap this tile's epilogue
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=hidden_desc is not None):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row_start = tile_m * BLOCK_M
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, hidden, BLOCK_K):
            hidden_tile = load_rows(hidden_matrix, row_start, k, BLOCK_M, BLOCK_K, EVEN_HIDDEN)
            weight_tile = load_rows(weight_matrix, tile_n * BLOCK_N, k, BLOCK_N, BLOCK_K, EVEN_HIDDEN)
            acc = dot(hidden_tile, weight_tile.T, acc)

        offs_row = row_start + tl.arange(0, BLOCK_M)
        in_rows = offs_row < rows
        offs_col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        x = descaled(
            acc, hidden_scale_ptr, weight_scale_ptr, hidden_common_ptr, weight_common_ptr, offs_row, rows, offs_col,
            vocab,
        )  # fmt: skip
        row_scale = None
        if row_scale_ptr is not None:
            row_scale = tl.load(row_scale_ptr + offs_row, mask=in_rows, other=1.0)[:, None]
        if bias_ptr is not None:
            x += tl.load(bias_ptr + offs_col, mask=offs_col < vocab, other=0.0).to(tl.float32)[None, :]
        x = transform_logits(x, logit_scale, softcap, row_scale)
        if target_logit_ptr is not None:
            target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1).to(tl.int32) - tile_n * BLOCK_N
            exact_logit = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
            x = tl.where(tl.arange(0, BLOCK_N)[None, :] == target[:, None], exact_logit[:, None], x)
        row_offset = row_offset_ptr
        if row_offset_ptr is not None:
            row_offset = tl.load(row_offset_ptr + offs_row, mask=in_rows, other=0.0)
        finish_tile(
            out_matrix, strip_offset_ptr, sum_ptrs, strip_ptrs, strip_stride, x, class_weights_ptr, row_offset,
            row_start, tile_n, vocab, ratios, widths, STORE_LOGITS, STORE_STRIP, ADD_HALF, STORE_SUMS, NUM_SOFTMAXES,
            BLOCK_M, BLOCK_N, STRIP, VOCAB_DIVISOR, VOCAB_DIVISOR == 1 or bias_ptr is not None,
            target_logit_ptr is not None,
        )  # fmt: skip
