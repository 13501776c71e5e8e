"""What becomes of a tile of the logits matmul: statistics of its strips, and exponentials or relative logits."""

import triton
import triton.language as tl

from ..common.blocks import column_halves, store_tile
from ..common.transform import log2_e

# nats above a row's given offset that its exponentials may reach: e^60 times e^-60 stay well inside bf16's range
REACH = tl.constexpr(60.0)
# nats below a strip's offset where exponentials still have all their bits, and above it where fp32 holds a strip's sum
DEEP, HIGH = tl.constexpr(70.0), tl.constexpr(75.0)


@triton.jit
def first_column(i, moved, WIDTH: tl.constexpr):
    """Of a tile or a strip."""
    if moved is None:
        return i * WIDTH
    else:
        return i * WIDTH + moved


@triton.jit
def finish_half(
    out,
    x,  # [BLOCK_M, COLUMNS] fp32
    shift,  # [BLOCK_M] the strip's offset
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
    """Stores half of a tile; its sums: of exponentials, of those times their exponents, and at the second softmax."""
    offs_col = first_column + tl.arange(0, COLUMNS)
    if RELATIVE or SHIFTED or SECOND:
        z = x - shift[:, None]
        e = tl.exp2(z * log2_e)
    else:
        # one fused multiply-add; the rounding of its constant is the whole row's alike, and taken out of the sum
        z = x
        exponent = tl.math.fma(
            x, tl.full(x.shape, log2_e, tl.float32), tl.broadcast_to((shift * -log2_e)[:, None], x.shape)
        )
        e = tl.exp2(exponent)
    if target is not None:
        is_target = offs_col[None, :] == target[:, None]
        e = tl.where(is_target, 0.0, e)
    sums = tl.sum(e, 1)
    shifted, sums2, shifted2 = sums, sums, sums
    if SHIFTED:
        shifted = tl.sum(tl.where(e > 0.0, e * z, 0.0), 1)
    if SECOND:
        z2 = z
        if ratio2 is not None:
            z2 = z * ratio2
        e2 = tl.exp2(z2 * log2_e)
        if target is not None:
            e2 = tl.where(is_target, 0.0, e2)
        e2 = tl.where((offs_col < columns2)[None, :], e2, 0.0)
        sums2 = tl.sum(e2, 1)
        if SHIFTED2:
            shifted2 = tl.sum(tl.where(e2 > 0.0, e2 * z2, 0.0), 1)
    if STORED:
        if RELATIVE:
            store_tile(out, row_start, first_column, z)
        else:
            store_tile(out, row_start, first_column, e)
    return sums, shifted, sums2, shifted2


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
    second,  # columns and ratio of the second softmax
    BLOCK_M: tl.constexpr,
    STRIP: tl.constexpr,
    STORE: tl.constexpr,
    EDGE: tl.constexpr,
):
    """A strip's statistics but for its sum of exponentials, which is returned: negative where the offset is its own
    instead of the row's."""
    offset_ptr, _, shifted_sum_ptr, weighted_sum_ptr, top_ptr, argmax_ptr, sum2_ptr, shifted_sum2_ptr = strips
    columns2, ratio2 = second
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
    if SECOND:
        before = first_column(strip, moved, STRIP)
        if (before < columns2) & (columns2 < before + STRIP):
            # what the second softmax is not over may be so far above what it is over that nothing would be left of that
            top2 = tl.max(tl.where((offs_col < columns2)[None, :], x, float("-inf")), 1)
            lower = tl.minimum(tl.maximum((top - top2) - DEEP, 0.0), HIGH)
            offset = tl.where(top2 == float("-inf"), top, top - lower)
    if row_offset is not None:
        offset = tl.where(top - row_offset > REACH, top - REACH, row_offset)
    shift = tl.where(offset == float("-inf"), 0.0, offset)  # a strip of -inf alone: exp(-inf - 0) = 0

    first = first_column(strip, moved, STRIP)
    if STORE == STRIP:
        sums, shifted, sums2, shifted2 = finish_half(
            out, x, shift, target, row_start, first, columns2, ratio2,
            STORED, RELATIVE, SHIFTED, SECOND, SHIFTED2, STORE,
        )  # fmt: skip
    else:
        left, right = column_halves(x, BLOCK_M, STRIP)
        sums, shifted, sums2, shifted2 = finish_half(
            out, left, shift, target, row_start, first, columns2, ratio2,
            STORED, RELATIVE, SHIFTED, SECOND, SHIFTED2, STORE,
        )  # fmt: skip
        more, more_shifted, more2, more_shifted2 = finish_half(
            out, right, shift, target, row_start, first + STORE, columns2, ratio2,
            STORED, RELATIVE, SHIFTED, SECOND, SHIFTED2, STORE,
        )  # fmt: skip
        sums, shifted, sums2, shifted2 = sums + more, shifted + more_shifted, sums2 + more2, shifted2 + more_shifted2
    if not (RELATIVE or SHIFTED or SECOND):
        # what the fused multiply-add's constant was rounded by
        sums = sums * tl.exp2(-tl.math.fma(shift, tl.full(shift.shape, log2_e, tl.float32), shift * -log2_e))
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
):
    """All of a tile but its last strip's sum, which is returned."""
    if STRIP == BLOCK_N:
        return finish_strip(
            out, strips, strip_stride, x, class_weights_ptr, row_offset, target, row_start, tile_n, moved, vocab,
            second, BLOCK_M, STRIP, BLOCK_N // 2, EDGE,
        )  # fmt: skip
    else:
        left, right = column_halves(x, BLOCK_M, BLOCK_N)
        sums = finish_strip(
            out, strips, strip_stride, left, class_weights_ptr, row_offset, target, row_start, tile_n * 2, moved,
            vocab, second, BLOCK_M, STRIP, STRIP, EDGE,
        )  # fmt: skip
        offs_row = row_start + tl.arange(0, BLOCK_M)
        tl.store(strips[1] + (tile_n * 2).to(tl.int64) * strip_stride + offs_row, sums, mask=offs_row < out[3])
        # past the vocabulary the right strip writes what merges to nothing (-inf, 0), and its store falls outside
        return finish_strip(
            out, strips, strip_stride, right, class_weights_ptr, row_offset, target, row_start, tile_n * 2 + 1, moved,
            vocab, second, BLOCK_M, STRIP, STRIP, EDGE,
        )  # fmt: skip
