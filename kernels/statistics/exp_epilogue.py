"""From a tile of the logits matmul to statistics of its strips, and to exponentials or relative logits."""

import triton
import triton.language as tl

from ..common.blocks import column_halves, store_tile
from ..common.transform import ln_2, log2_e

# nats above a row's given offset that its exponentials may reach: e^60 times e^-60 stay well inside bf16's range
REACH = tl.constexpr(60.0)


@triton.jit
def first_column(i, moved, WIDTH: tl.constexpr):
    """First column of tile or strip ``i``."""
    if moved is None:
        return i * WIDTH
    else:
        return i * WIDTH + moved


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
    row_start,
    strip,
    moved,  # by how many columns strips are away from where they follow each other; None for 0
    vocab,  # where the columns end that are summed
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
    offs_col = first_column(strip, moved, STRIP) + tl.arange(0, STRIP)
    in_rows = offs_row < out[3]
    in_vocab = offs_col < vocab
    stats_at = strip.to(tl.int64) * strip_stride + offs_row
    STORED: tl.constexpr = out[0] is not None or out[1] is not None
    # in blocks exponentials are rounded alike whatever sums are asked for
    RELATIVE: tl.constexpr = (STORED and row_offset is None) or moved is not None
    SHIFTED: tl.constexpr = shifted_sum_ptr is not None
    SECOND: tl.constexpr = sum2_ptr is not None
    SHIFTED2: tl.constexpr = shifted_sum2_ptr is not None
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
    first, shift_behind = first_column(strip, moved, STRIP), None
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
    row_start,
    tile_n,
    moved,
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
            out, strips, strip_stride, x, class_weights_ptr, row_offset, target, row_start, tile_n, moved, vocab,
            second, BLOCK_M, STRIP, BLOCK_N // 2, EDGE, SPLIT,
        )  # fmt: skip
    else:
        left, right = column_halves(x, BLOCK_M, BLOCK_N)
        sums = finish_strip(
            out, strips, strip_stride, left, class_weights_ptr, row_offset, target, row_start, tile_n * 2, moved,
            vocab, second, BLOCK_M, STRIP, STRIP, EDGE, SPLIT,
        )  # fmt: skip
        offs_row = row_start + tl.arange(0, BLOCK_M)
        tl.store(strips[1] + (tile_n * 2).to(tl.int64) * strip_stride + offs_row, sums, mask=offs_row < out[3])
        # past the vocabulary the right strip writes what merges to nothing (-inf, 0), and its store falls outside
        return finish_strip(
            out, strips, strip_stride, right, class_weights_ptr, row_offset, target, row_start, tile_n * 2 + 1, moved,
            vocab, second, BLOCK_M, STRIP, STRIP, EDGE, SPLIT,
        )  # fmt: skip
