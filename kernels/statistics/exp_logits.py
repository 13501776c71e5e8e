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

No logit is ever rounded by its own size. The target's own column is left out of E and of the sums, to be added from its
exact logit: then loss and gradient see one and the same logit.

Operands may be e4m3, with a scale for each row of hidden states and one for the weight.
"""

import triton
import triton.language as tl

from ..common.blocks import column_halves, counted_rows, dot, load_rows, scaled, store_tile, tile_place
from ..common.launcher import kernel
from ..common.transform import ln_2, log2_e, transform_logits

# nats above a row's given offset that its exponentials may reach: e^60 times e^-60 stay well inside bf16's range
REACH = tl.constexpr(60.0)


@triton.jit
def finish_half(
    out,
    x,  # [BLOCK_M, COLUMNS] fp32
    shift,  # [BLOCK_M] the strip's offset
    shift_behind,  # [BLOCK_M] the offset of columns from columns2 on; None where the tile has not both kinds
    target,
    row_start,
    first_column,
    columns2,
    ratio2,
    STORED: tl.constexpr,
    RELATIVE: tl.constexpr,
    SHIFTED: tl.constexpr,
    SECOND: tl.constexpr,
    SHIFTED2: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Stores half of a tile; its sums: of exponentials, of those times their exponents, and both at the second softmax;
    with ``shift_behind`` the first two up to columns2, and then from there on."""
    offs_col = first_column + tl.arange(0, COLUMNS)
    if RELATIVE or SECOND:
        z = x - shift[:, None]
        if shift_behind is not None:
            shared = tl.broadcast_to((offs_col < columns2)[None, :], x.shape)
            z = tl.where(shared, z, x - shift_behind[:, None])
        e = tl.exp2(z * log2_e)
    else:
        # one fused multiply-add; its constant's rounding is one for a row, and taken out of the sums
        z = tl.math.fma(x, tl.full(x.shape, log2_e, tl.float32), tl.broadcast_to((shift * -log2_e)[:, None], x.shape))
        e = tl.exp2(z)
    if target is not None:
        is_target = offs_col[None, :] == target[:, None]
        e = tl.where(is_target, 0.0, e)
    sums = tl.sum(e, 1)
    shifted, sums2, shifted2, behind, shifted_behind = sums, sums, sums, sums, sums
    if SHIFTED:
        moments = e * tl.maximum(z, -160.0)  # 0 below, where a logit of -inf would make it nan
        shifted = tl.sum(moments, 1)
    if shift_behind is not None:
        sums, behind = tl.sum(tl.where(shared, e, 0.0), 1), tl.sum(tl.where(shared, 0.0, e), 1)
        if SHIFTED:
            shifted = tl.sum(tl.where(shared, moments, 0.0), 1)
            shifted_behind = tl.sum(tl.where(shared, 0.0, moments), 1)
    if SECOND:
        z2 = z
        if ratio2 is not None:
            z2 = z * ratio2
        e2 = tl.exp2(z2 * log2_e)
        if target is not None:
            e2 = tl.where(is_target, 0.0, e2)
        if shift_behind is not None:
            e2 = tl.where(shared, e2, 0.0)
        elif columns2 is not None:
            e2 = tl.where(first_column < columns2, e2, 0.0)
        sums2 = tl.sum(e2, 1)
        if SHIFTED2:
            shifted2 = tl.sum(tl.where(e2 > 0.0, e2 * z2, 0.0), 1)
    if STORED:
        if RELATIVE:
            store_tile(out, row_start, first_column, z)
        else:
            store_tile(out, row_start, first_column, e)
    return sums, shifted, sums2, shifted2, behind, shifted_behind


@triton.jit
def finish_strip(
    out,  # matrix: exponentials or relative logits; a descriptor and a pointer of None where nothing is stored
    strips,  # pointers to what is left of each strip
    strip_stride,  # from strip to strip of these
    x,  # [BLOCK_M, STRIP] fp32
    class_weights_ptr,
    row_offset,  # None: each strip's own maximum
    target,  # None where no column of these is one
    exact,  # [BLOCK_M] the target's logit, in place of the one of e4m3 operands; None where x has it
    row_start,
    strip,
    vocab,
    second,  # columns (None for all) and ratio of the second softmax, and the strip of those behind its last
    BLOCK_M: tl.constexpr,
    STRIP: tl.constexpr,
    STORE: tl.constexpr,
    EDGE: tl.constexpr,
    SPLIT: tl.constexpr,  # the second softmax may end within the strip
):
    """A strip's statistics but for its sum of exponentials, which is returned: negative where the offset is its own
    instead of the row's.

    A strip within which the second softmax ends is two: its columns behind that have an offset and sums of their own in
    a strip after all others. Either kind may be so far above the other that of this nothing would be left."""
    offset_ptr, _, shifted_sum_ptr, weighted_sum_ptr, top_ptr, argmax_ptr, sum2_ptr, shifted_sum2_ptr = strips
    columns2, ratio2, strip_behind = second
    offs_row = row_start + tl.arange(0, BLOCK_M)
    first = strip * STRIP
    offs_col = first + tl.arange(0, STRIP)
    in_rows = offs_row < out[3]
    in_vocab = offs_col < vocab
    stats_at = strip.to(tl.int64) * strip_stride + offs_row
    STORED: tl.constexpr = out[0] is not None or out[1] is not None
    RELATIVE: tl.constexpr = STORED and row_offset is None
    SHIFTED: tl.constexpr = shifted_sum_ptr is not None
    SECOND: tl.constexpr = sum2_ptr is not None
    SHIFTED2: tl.constexpr = shifted_sum2_ptr is not None
    if exact is not None:
        x = tl.where(offs_col[None, :] == target[:, None], exact[:, None], x)
    if weighted_sum_ptr is not None:
        omega = tl.where(in_vocab, 1.0, 0.0)
        if class_weights_ptr is not None:
            omega = tl.load(class_weights_ptr + offs_col, mask=in_vocab, other=0.0).to(tl.float32)
        # selection, so that a logit of -inf with weight 0 does not become nan
        weighted = tl.where(omega[None, :] != 0.0, x * omega[None, :], 0.0)
        tl.store(weighted_sum_ptr + stats_at, tl.sum(weighted, 1), mask=in_rows)
    if EDGE:
        x = tl.where(in_vocab[None, :], x, float("-inf"))
    top = tl.max(x, 1)
    if top_ptr is not None:
        here = tl.where(x == top[:, None], offs_col[None, :], 2147483647)
        tl.store(top_ptr + stats_at, top, mask=in_rows)
        tl.store(argmax_ptr + stats_at, tl.min(here, 1), mask=in_rows)
    offset = top
    if row_offset is not None:
        offset = tl.where(top - row_offset > REACH, top - REACH, row_offset)
    shift_behind = None
    if SPLIT:
        shared = (offs_col < columns2)[None, :]
        top_behind = tl.max(tl.where(shared, float("-inf"), x), 1)
        offset = tl.where(first < columns2, tl.max(tl.where(shared, x, float("-inf")), 1), top_behind)
        shift_behind = tl.where(top_behind == float("-inf"), 0.0, top_behind)
    shift = tl.where(offset == float("-inf"), 0.0, offset)  # a strip of nothing but -inf: exp(-inf - 0) = 0

    if STORE == STRIP:
        sums, shifted, sums2, shifted2, behind, shifted_behind = finish_half(
            out, x, shift, shift_behind, target, row_start, first, columns2, ratio2,
            STORED, RELATIVE, SHIFTED, SECOND, SHIFTED2, STORE,
        )  # fmt: skip
    else:
        left, right = column_halves(x, BLOCK_M, STRIP)
        sums, shifted, sums2, shifted2, behind, shifted_behind = finish_half(
            out, left, shift, shift_behind, target, row_start, first, columns2, ratio2,
            STORED, RELATIVE, SHIFTED, SECOND, SHIFTED2, STORE,
        )  # fmt: skip
        more, more_shifted, more2, more_shifted2, more_behind, more_shifted_behind = finish_half(
            out, right, shift, shift_behind, target, row_start, first + STORE, columns2, ratio2,
            STORED, RELATIVE, SHIFTED, SECOND, SHIFTED2, STORE,
        )  # fmt: skip
        sums, shifted, sums2, shifted2 = sums + more, shifted + more_shifted, sums2 + more2, shifted2 + more_shifted2
        behind, shifted_behind = behind + more_behind, shifted_behind + more_shifted_behind
    if SPLIT:
        split = (first < columns2) & (columns2 < first + STRIP)
        # what merges to nothing of statistics that the strip has of all its columns
        behind_at, here = strip_behind.to(tl.int64) * strip_stride + offs_row, offs_row < tl.where(split, out[3], 0)
        tl.store(offset_ptr + behind_at, top_behind, mask=here)
        tl.store(strips[1] + behind_at, behind, mask=here)
        tl.store(sum2_ptr + behind_at, tl.zeros_like(behind), mask=here)
        if SHIFTED:
            tl.store(shifted_sum_ptr + behind_at, shifted_behind, mask=here)
        if SHIFTED2:
            tl.store(shifted_sum2_ptr + behind_at, tl.zeros_like(behind), mask=here)
        if weighted_sum_ptr is not None:
            tl.store(weighted_sum_ptr + behind_at, tl.zeros_like(behind), mask=here)
        if top_ptr is not None:
            tl.store(top_ptr + behind_at, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=here)
            tl.store(argmax_ptr + behind_at, tl.full((BLOCK_M,), 2147483647, tl.int32), mask=here)
        sums, shifted = tl.where(split, sums, sums + behind), tl.where(split, shifted, shifted + shifted_behind)
    if not (RELATIVE or SECOND):
        # what the fused multiply-add's constant was rounded by; exponents are of base 2
        rounded = tl.math.fma(shift, tl.full(shift.shape, log2_e, tl.float32), shift * -log2_e)
        shifted = (shifted - rounded * sums) * (tl.exp2(-rounded) * ln_2)
        sums = sums * tl.exp2(-rounded)
    if row_offset is not None:
        own = offset != row_offset
        tl.store(offset_ptr + stats_at, offset, mask=in_rows & own)
        sums = tl.where(own, -sums, sums)
    else:
        tl.store(offset_ptr + stats_at, offset, mask=in_rows)
    if SHIFTED:
        tl.store(shifted_sum_ptr + stats_at, shifted, mask=in_rows)
    if SECOND:
        tl.store(sum2_ptr + stats_at, sums2, mask=in_rows)
        if SHIFTED2:
            tl.store(shifted_sum2_ptr + stats_at, shifted2, mask=in_rows)
    return sums


@triton.jit
def finish_tile(
    out,  # as all but the tile's number
    strips,
    strip_stride,
    x,
    class_weights_ptr,
    row_offset,
    target,
    exact,
    row_start,
    tile_n,
    vocab,
    second,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIP: tl.constexpr,
    EDGE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """All of a tile but its last strip's sum, which is returned."""
    if STRIP == BLOCK_N:
        return finish_strip(
            out, strips, strip_stride, x, class_weights_ptr, row_offset, target, exact, row_start, tile_n, vocab,
            second, BLOCK_M, STRIP, BLOCK_N // 2, EDGE, SPLIT,
        )  # fmt: skip
    else:
        left, right = column_halves(x, BLOCK_M, BLOCK_N)
        sums = finish_strip(
            out, strips, strip_stride, left, class_weights_ptr, row_offset, target, exact, row_start, tile_n * 2, vocab,
            second, BLOCK_M, STRIP, STRIP, EDGE, SPLIT,
        )  # fmt: skip
        offs_row = row_start + tl.arange(0, BLOCK_M)
        tl.store(strips[1] + (tile_n * 2).to(tl.int64) * strip_stride + offs_row, sums, mask=offs_row < out[3])
        # past the vocabulary the right strip writes what merges to nothing (-inf, 0), and its store falls outside
        return finish_strip(
            out, strips, strip_stride, right, class_weights_ptr, row_offset, target, exact, row_start, tile_n * 2 + 1,
            vocab, second, BLOCK_M, STRIP, STRIP, EDGE, SPLIT,
        )  # fmt: skip


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
    hidden_desc,  # [rows, hidden] 16 bit or e4m3, as the weight, block [BLOCK_M, BLOCK_K]
    hidden_ptr,
    weight_desc,  # [vocab, hidden], block [BLOCK_N, BLOCK_K]
    weight_ptr,
    bias_ptr,  # [vocab] or None
    class_weights_ptr,  # [vocab] or None
    row_offset_ptr,  # [rows] fp32, or None for each strip's own maximum
    target_ptr,  # [rows] int64, -1 where the row does not count; None without targets
    hidden_scale_ptr,  # [rows] fp32 of e4m3 operands, or None
    weight_scale_ptr,  # [] fp32, likewise
    target_logit_ptr,  # [rows] fp32, in place of the one of e4m3 operands; or None
    count_ptr,  # [] int64: how many rows of the call count, or None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    strip_stride,  # from strip to strip of the statistics, a multiple of 16
    out_stride,  # from row to row
    vocab,
    hidden,
    columns2,  # that the second softmax is over; None for all, or without one
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
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, hidden, BLOCK_K):
            h = load_rows(h_matrix, row_start, k, BLOCK_M, BLOCK_K, EVEN_HIDDEN)
            w = load_rows(w_matrix, tile_n * BLOCK_N, k, BLOCK_N, BLOCK_K, EVEN_HIDDEN)
            acc = dot(h, w.T, acc)

        offs_row = row_start + tl.arange(0, BLOCK_M)
        in_rows = offs_row < rows
        x = scaled(acc, hidden_scale_ptr, weight_scale_ptr, offs_row, rows)
        if bias_ptr is not None:
            offs_col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
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
            special = tl.max((target // BLOCK_N == tile_n).to(tl.int32), 0) > 0
        if not EVEN_VOCAB:
            special = special | (tile_n == tiles_n - 1)
        if SPLIT:
            special = special | ((tile_n * BLOCK_N < columns2) & (columns2 < (tile_n + 1) * BLOCK_N))
        # Few tiles hold a target or the end of a softmax. What these need would cost every element of every tile two
        # operations, 3 to 10 % of the time; with its own stores in it, the branch stays a branch.
        if special:
            exact = None
            if target_logit_ptr is not None:
                exact = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
            sums = finish_tile(
                out, strips, strip_stride, x, class_weights_ptr, row_offset, target, exact, row_start, tile_n,
                vocab, second, BLOCK_M, BLOCK_N, STRIP, not EVEN_VOCAB, SPLIT,
            )  # fmt: skip
        else:
            sums = finish_tile(
                out, strips, strip_stride, x, class_weights_ptr, row_offset, None, None, row_start, tile_n, vocab,
                second, BLOCK_M, BLOCK_N, STRIP, False, False,
            )  # fmt: skip
        last_strip = (tile_n + 1) * (BLOCK_N // STRIP) - 1
        tl.store(strip_sum_ptr + last_strip.to(tl.int64) * strip_stride + offs_row, sums, mask=in_rows)
