"""Exact logits of a row's probable ids, in the places of those of e4m3 operands.

An id of a row is heavy if its exact logit ``x`` gives a probability above ``2^t``, its e4m3 one nearly:

    x > lse + t log 2,  x_e4m3 > lse + (t - MARGIN_LOG2) log 2

with the log-sum-exp ``lse`` of e4m3 logits, the target's exact among them, over these columns. ``t`` is the least of
LEAST_HEAVY_LOG2, 1 more and 2 more at which no more than HEAVY ids pass the second test; at the last one the mass of a
row bounds their number. No other row decides anything. The target is none of them.

``mend_heavy`` opens the strips of columns that have such a mass, lists their heavy ids in ascending order, and mends
what ``exp_logits`` has left: the stored numbers, and the statistics of strips, of all that is stored of these. It is
the body of kernels that are generated as those of ``exp_logits.py`` are, for the same statistics.
"""

import triton
import triton.language as tl

from ...core import tiles
from ..common.blocks import counted_rows, rounded
from ..common.transform import ln_2, log2_e, transform_logits
from .exp_logits import MIN_OFFSET

LEAST_HEAVY_LOG2, MARGIN_LOG2 = tl.constexpr(tiles.LEAST_HEAVY_LOG2), tl.constexpr(tiles.MARGIN_LOG2)
BEHIND = tl.constexpr(2147483647)


@triton.jit
def load_strips(offset_ptr, sum_ptr, offs, mask, target_logit, IS_RELATIVE: tl.constexpr):
    """Offsets, sums and maxima of strips, -inf and 0 where there is none. The maximum is inf where a strip has not the
    row's offset."""
    total = tl.load(sum_ptr + offs, mask=mask, other=0.0)
    offset = tl.load(offset_ptr + offs, mask=mask, other=float("-inf"))
    top = offset
    if not IS_RELATIVE:
        top = tl.where(total < 0.0, float("inf"), offset)
        offset = tl.where(total < 0.0, offset, target_logit)
    return offset, tl.abs(total), top


@triton.jit
def strips_above(
    log_p, start, offset_ptr, sum_ptr, strip_count, strip_stride, target, target_logit, lse, IS_RELATIVE: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_STRIPS: tl.constexpr,
):  # fmt: skip
    """The next strips of a row, from ``start`` on; a mask of those in which an id, the target excepted, may have a
    probability above ``2^log_p``; and how many such ids they have at most. Both pointers are the row's."""
    offs_strip = start + tl.arange(0, BLOCK_STRIPS)
    mask = offs_strip < strip_count
    offset, total, top = load_strips(
        offset_ptr, sum_ptr, offs_strip.to(tl.int64) * strip_stride, mask, target_logit, IS_RELATIVE
    )
    has_target = offs_strip == target // STRIP
    mass = total * tl.exp2((offset - lse) * log2_e)
    mass -= tl.where(has_target, tl.exp2((target_logit - lse) * log2_e), 0.0)
    largest = tl.where(has_target | (top == float("inf")), 0.0, tl.exp2((top - lse) * log2_e))
    opened = mask & ((top - lse) * log2_e > log_p) & (mass > 0.99 * tl.exp2(log_p))  # sums are rounded
    count = 1.0 + tl.floor((mass - largest) * 1.01 / tl.exp2(log_p))
    return offs_strip, opened, tl.sum(tl.where(opened, tl.maximum(count, 1.0), 0.0), 0)


@triton.jit
def open_strip(
    strip, stored_ptr, offset_ptr, sum_ptr, target, target_logit, lse, vocab, IS_RELATIVE: tl.constexpr,
    STRIP: tl.constexpr
):  # fmt: skip
    """A strip of a row: the logit that it is stored relative to; logits in base 2 relative to that, the target's exact
    among them; logits in base 2 relative to ``lse``, -inf for the target. ``stored_ptr``: the row; ``offset_ptr`` and
    ``sum_ptr``: those of row and strip."""
    top = tl.load(offset_ptr)
    if not IS_RELATIVE:
        top = tl.where(tl.load(sum_ptr) < 0.0, top, target_logit)
    shift = tl.where(top < MIN_OFFSET, MIN_OFFSET, top)
    column = strip * STRIP + tl.arange(0, STRIP)
    in_vocab, is_target = column < vocab, column == target
    if IS_RELATIVE:
        z = tl.load(stored_ptr + column, mask=in_vocab, other=float("-inf")).to(tl.float32)
    else:
        z = tl.log2(tl.load(stored_ptr + column, mask=in_vocab, other=0.0).to(tl.float32))
    z = tl.where(is_target, (target_logit - shift) * log2_e, z)
    return shift, z, tl.where(in_vocab & (is_target == 0), z + (shift - lse) * log2_e, float("-inf"))


@triton.jit
def dot(a_ptr, b_ptr, length, BLOCK: tl.constexpr):
    """The product of two vectors, summed as a target's is."""
    lanes = tl.zeros((1, BLOCK), dtype=tl.float32)
    for start in range(0, length, BLOCK):
        offs = start + tl.arange(0, BLOCK)[None, :]
        a = tl.load(a_ptr + offs, mask=offs < length, other=0.0).to(tl.float32)
        lanes += a * tl.load(b_ptr + offs, mask=offs < length, other=0.0).to(tl.float32)
    return tl.sum(tl.sum(lanes, 1), 0)


@triton.jit
def mend_heavy(
    # outputs
    ids_ptr,  # [rows, HEAVY] int32, ascending, -1 behind the last
    logit_ptr,  # [rows, HEAVY] fp32, 0 behind the last
    # in and out
    stored_ptr,  # [rows, vocab] 16 bit: exponentials, or relative logits in base 2
    sum_ptrs,  # a tuple, of each softmax [strips, rows] fp32
    strip_ptrs,  # a tuple of [strips, rows]: what the vectors of statistics are made of
    # inputs
    strip_offset_ptr,  # [strips, rows] fp32; of exponentials where the first sum is not negative the maximum
    hidden_ptr,  # [rows, hidden] contiguous
    weight_ptr,  # [vocab, hidden] contiguous
    bias_ptr,  # [vocab] or None
    class_weights_ptr,  # [vocab] or None
    target_ptr,  # [rows] int64, -1 where the row does not count
    target_logit_ptr,  # [rows] fp32, exact; the offset of exponentials
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    vocab,
    strip_count,
    strip_stride,  # from strip to strip of the statistics
    stride,  # from row to row
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
    NUM_SOFTMAXES: tl.constexpr,
    IS_RELATIVE: tl.constexpr,
    HEAVY: tl.constexpr,  # most that a row has
    STRIP: tl.constexpr,
    BLOCK_STRIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its heavy ids, and what is mended of it."""
    row = tl.program_id(0).to(tl.int64)
    target, target_logit = tl.load(target_ptr + row), tl.load(target_logit_ptr + row)
    sum_ptr, offset_ptr = sum_ptrs[0] + row, strip_offset_ptr + row
    counts = (target >= 0) & (row < counted_rows(count_ptr, first_row, tl.num_programs(0)))
    strip_count = tl.where(counts, strip_count, 0)
    row_scale = None
    if row_scale_ptr is not None:
        row_scale = tl.load(row_scale_ptr + row)
    slots = tl.arange(0, HEAVY)
    ids, logits, count = tl.full((HEAVY,), -1, tl.int32), tl.zeros((HEAVY,), dtype=tl.float32), 0
    ends = (vocab,)
    for i in tl.static_range(1, NUM_SOFTMAXES):
        ends = ends + (vocab if widths[i] is None else widths[i],)

    run_max, run_sum = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    row_top, least = run_max, run_sum + (LEAST_HEAVY_LOG2 - MARGIN_LOG2)
    for start in range(0, strip_count, BLOCK_STRIPS):
        offs_strip = start + tl.arange(0, BLOCK_STRIPS)
        offs, mask = offs_strip.to(tl.int64) * strip_stride, offs_strip < strip_count
        offset, total, top = load_strips(offset_ptr, sum_ptr, offs, mask, target_logit, IS_RELATIVE)
        row_top = tl.maximum(row_top, tl.max(top, 0))
        offset = tl.where(total > 0.0, offset, float("-inf"))
        new_max = tl.maximum(run_max, tl.max(offset, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        run_sum = run_sum * tl.exp2((run_max - shift) * log2_e)
        run_sum += tl.sum(total * tl.exp2((offset - shift) * log2_e), 0)
        run_max = new_max
    lse = run_max + tl.log2(run_sum) * ln_2
    strip_count = tl.where((row_top - lse) * log2_e <= least, 0, strip_count)  # nothing to open

    # the row's threshold, above LEAST_HEAVY_LOG2 where it has too many candidates: they are counted if there may be
    most, low_count, high_count = run_sum * 0.0, 0, 0
    for start in range(0, strip_count, BLOCK_STRIPS):
        most += strips_above(
            least, start, offset_ptr, sum_ptr, strip_count, strip_stride, target, target_logit, lse,
            IS_RELATIVE, STRIP, BLOCK_STRIPS,
        )[2]  # fmt: skip
    for start in range(0, tl.where(most > HEAVY, strip_count, 0), BLOCK_STRIPS):
        offs_strip, opened, _ = strips_above(
            least, start, offset_ptr, sum_ptr, strip_count, strip_stride, target, target_logit, lse,
            IS_RELATIVE, STRIP, BLOCK_STRIPS,
        )  # fmt: skip
        for _ in range(0, tl.sum(opened.to(tl.int32), 0)):
            strip = tl.min(tl.where(opened, offs_strip, BEHIND), 0)
            opened &= offs_strip != strip
            strip_at = strip.to(tl.int64) * strip_stride
            shift, z, log_p = open_strip(
                strip, stored_ptr + row * stride, offset_ptr + strip_at, sum_ptr + strip_at, target, target_logit,
                lse, vocab, IS_RELATIVE, STRIP,
            )  # fmt: skip
            low_count += tl.sum((log_p > least).to(tl.int32), 0)
            high_count += tl.sum((log_p > least + 1.0).to(tl.int32), 0)
    threshold = LEAST_HEAVY_LOG2 + tl.where(low_count > HEAVY, 1.0, 0.0) + tl.where(high_count > HEAVY, 1.0, 0.0)

    for start in range(0, strip_count, BLOCK_STRIPS):
        offs_strip, opened, _ = strips_above(
            threshold - MARGIN_LOG2, start, offset_ptr, sum_ptr, strip_count, strip_stride, target, target_logit, lse,
            IS_RELATIVE, STRIP, BLOCK_STRIPS,
        )  # fmt: skip
        for _ in range(0, tl.sum(opened.to(tl.int32), 0)):
            strip = tl.min(tl.where(opened, offs_strip, BEHIND), 0)
            opened &= offs_strip != strip
            strip_at = strip.to(tl.int64) * strip_stride
            shift, z, log_p = open_strip(
                strip, stored_ptr + row * stride, offset_ptr + strip_at, sum_ptr + strip_at, target, target_logit,
                lse, vocab, IS_RELATIVE, STRIP,
            )  # fmt: skip
            is_negative = tl.load(sum_ptr + strip_at) < 0.0
            offs_col = strip * STRIP + tl.arange(0, STRIP)
            in_vocab = offs_col < vocab
            x = tl.where(offs_col == target, target_logit, shift + z * ln_2)
            candidates = log_p > threshold - MARGIN_LOG2
            mended = candidates & (z != z)  # none
            for _ in range(0, tl.sum(candidates.to(tl.int32), 0)):
                column = tl.min(tl.where(candidates, offs_col, BEHIND), 0)
                candidates &= offs_col != column
                exact = dot(hidden_ptr + row * hidden, weight_ptr + column.to(tl.int64) * hidden, hidden, BLOCK)
                if bias_ptr is not None:
                    exact += tl.load(bias_ptr + column).to(tl.float32)
                exact = transform_logits(exact, logit_scale, softcap, row_scale)
                # all of a block, since the interpreter makes no mask of a block and a number
                is_found = (tl.where(offs_col == column, exact, float("-inf")) - lse) * log2_e > threshold
                is_found &= offs_col * 0 + count < HEAVY
                mended |= is_found
                x = tl.where(is_found, exact, x)
                z = tl.where(is_found, (exact - shift) * log2_e, z)
                found_count = tl.max(is_found.to(tl.int32), 0)
                slot = slots == count + (1 - found_count) * HEAVY  # nowhere
                ids, logits = tl.where(slot, column, ids), tl.where(slot, exact, logits)
                count += found_count
            if tl.max(mended.to(tl.int32), 0) > 0:
                e = tl.exp2(z)
                value = z if IS_RELATIVE else e
                tl.store(stored_ptr + row * stride + offs_col, rounded(value, stored_ptr.dtype.element_ty), mask=mended)
                # as the epilogue of ``exp_logits`` takes a row and half a strip, some of whose logits may be -inf
                stats_at, in_rows = strip_at + row + tl.arange(0, 1), tl.arange(0, 1) == 0
                row_x, no_shift = x[None, :], tl.zeros((1,), dtype=tl.float32)
                STORE_LOGITS(strip_ptrs, stats_at, in_rows, row_x, offs_col, in_vocab, class_weights_ptr)
                largest = tl.max(row_x, 1)
                STORE_STRIP(strip_ptrs, stats_at, in_rows, row_x, largest, offs_col)
                totals = ADD_HALF((largest,), z[None, :], e[None, :], ratios, strip * STRIP, ends, True, False, True)
                STORE_SUMS(totals, sum_ptrs, strip_ptrs, stats_at, in_rows, no_shift, ratios)
                tl.store(sum_ptrs[0] + stats_at, tl.where(is_negative, -totals[0], totals[0]), mask=in_rows)
    tl.store(ids_ptr + row * HEAVY + slots, ids)
    tl.store(logit_ptr + row * HEAVY + slots, logits)
