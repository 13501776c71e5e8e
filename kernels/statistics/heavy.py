"""Exact logits of heavy ids, the probable ids of a row, which replace their logits from e4m3 operands.

An id that is not the row's target is heavy if its exact logit ``x`` gives a probability above ``2^t``, and its logit
from e4m3 operands ``x_e4m3`` nearly does:

    x > lse + t log 2,  x_e4m3 > lse + (t - MARGIN_LOG2) log 2

``lse`` is the log-sum-exp, over this rank's columns, of logits from e4m3 operands with the target's exact logit. ``t``
is the first of T, T + 1 and T + 2, T = LEAST_HEAVY_LOG2, with which at most HEAVY ids pass the second test. T + 2 needs
no test: at most 2^-t = HEAVY ids can be heavy. A row's heavy ids depend on no other row.

``mend_heavy`` opens the strips of columns in which an id can be heavy and lists the row's heavy ids in ascending order.
In what ``exp_logits`` has stored, it mends the ids' exponentials or relative logits and the statistics of their strips.
It is the body of kernels that are generated for the statistics beside each softmax (``lists.py``).
"""

import triton
import triton.language as tl

from ...core import tiles
from ..common.blocks import counted_rows, rounded
from ..common.transform import ln_2, log2_e, transform_logits
from .exp_logits import MIN_OFFSET
from .top import NO_INDEX

LEAST_HEAVY_LOG2, MARGIN_LOG2 = tl.constexpr(tiles.LEAST_HEAVY_LOG2), tl.constexpr(tiles.MARGIN_LOG2)


@triton.jit
def load_strips(offset_ptr, sum_ptr, offs, mask, target_logit, IS_RELATIVE: tl.constexpr):
    """Returns offsets, sums and upper bounds of the logits of strips. A bound is the strip's maximum, or inf if the
    strip's exponentials have another offset than the row's. Where ``mask`` is false, the sum is 0 and the bound
    -inf."""
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
    """Returns the indices of BLOCK_STRIPS strips from ``start`` on; a mask of strips in which an id, the target
    excepted, may have a probability above ``2^log_p``; and an upper bound of the number of such ids. Pointers point
    at the row."""
    offs_strip = start + tl.arange(0, BLOCK_STRIPS)
    mask = offs_strip < strip_count
    offset, total, top = load_strips(
        offset_ptr, sum_ptr, offs_strip.to(tl.int64) * strip_stride, mask, target_logit, IS_RELATIVE
    )
    has_target = offs_strip == target // STRIP
    mass = total * tl.exp2((offset - lse) * log2_e)  # probability of a strip, without the target
    mass -= tl.where(has_target, tl.exp2((target_logit - lse) * log2_e), 0.0)
    largest = tl.where(has_target | (top == float("inf")), 0.0, tl.exp2((top - lse) * log2_e))
    is_open = mask & ((top - lse) * log2_e > log_p) & (mass > 0.99 * tl.exp2(log_p))  # sums are rounded
    most_ids = 1.0 + tl.floor((mass - largest) * 1.01 / tl.exp2(log_p))
    return offs_strip, is_open, tl.sum(tl.where(is_open, tl.maximum(most_ids, 1.0), 0.0), 0)


@triton.jit
def open_strip(
    strip, stored_ptr, offset_ptr, sum_ptr, target, target_logit, lse, vocab, IS_RELATIVE: tl.constexpr,
    STRIP: tl.constexpr
):  # fmt: skip
    """Loads a strip of a row. Returns its ``shift``, the logit that stored numbers are relative to; logits less
    ``shift`` in base 2, with the target's exact logit; and logits less ``lse`` in base 2, -inf for the target.
    ``stored_ptr`` points at the row; ``offset_ptr`` and ``sum_ptr`` point at the row's element of the strip."""
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
    """Returns the product of two vectors, summed in the order in which ``clean_rows_kernel`` sums a target's logit."""
    lanes = tl.zeros((1, BLOCK), dtype=tl.float32)
    for start in range(0, length, BLOCK):
        offs = start + tl.arange(0, BLOCK)[None, :]
        a = tl.load(a_ptr + offs, mask=offs < length, other=0.0).to(tl.float32)
        lanes += a * tl.load(b_ptr + offs, mask=offs < length, other=0.0).to(tl.float32)
    return tl.sum(tl.sum(lanes, 1), 0)


@triton.jit
def mend_heavy(
    # outputs
    ids_ptr,  # [rows, HEAVY] int32: heavy ids in ascending order, then -1
    logit_ptr,  # [rows, HEAVY] fp32: their exact logits, then 0
    # inputs that are mended in place
    stored_ptr,  # [rows, vocab] 16 bit: exponentials, or relative logits in base 2
    sum_ptrs,  # a tuple, for each softmax [strips, rows] fp32: sums of exponentials
    strip_ptrs,  # a tuple of [strips, rows]: numbers that the vectors of statistics are made of
    # inputs
    # [strips, rows] fp32: offsets; of exponentials, the maximum where the first sum is not negative
    strip_offset_ptr,
    hidden_ptr,  # [rows, hidden] contiguous
    weight_ptr,  # [vocab, hidden] contiguous
    bias_ptr,  # [vocab] or None
    class_weights_ptr,  # [vocab] or None
    target_ptr,  # [rows] int64, -1 where the row does not count
    target_logit_ptr,  # [rows] fp32: the target's exact logit, which is the row's offset of exponentials
    count_ptr,  # [] int64: number of rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    vocab,
    strip_count,
    strip_stride,  # elements from strip to strip of the statistics
    stride,  # elements from row to row of ``stored_ptr``
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
    IS_RELATIVE: tl.constexpr,
    HEAVY: tl.constexpr,  # most heavy ids of a row
    STRIP: tl.constexpr,  # columns of a strip
    BLOCK_STRIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the heavy ids and their logits of one row, and mends the row's stored numbers and statistics."""
    row = tl.program_id(0).to(tl.int64)
    target, target_logit = tl.load(target_ptr + row), tl.load(target_logit_ptr + row)
    sum_ptr, offset_ptr = sum_ptrs[0] + row, strip_offset_ptr + row
    is_counted = (target >= 0) & (row < counted_rows(count_ptr, first_row, tl.num_programs(0)))
    strip_count = tl.where(is_counted, strip_count, 0)
    row_scale = None
    if row_scale_ptr is not None:
        row_scale = tl.load(row_scale_ptr + row)
    slots = tl.arange(0, HEAVY)
    ids, logits, count = tl.full((HEAVY,), -1, tl.int32), tl.zeros((HEAVY,), dtype=tl.float32), 0
    ends = (vocab,)  # for each softmax the end of its columns
    for i in tl.static_range(1, NUM_SOFTMAXES):
        ends = ends + (vocab if widths[i] is None else widths[i],)

    run_max, run_sum = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    row_top, least = run_max, run_sum + (LEAST_HEAVY_LOG2 - MARGIN_LOG2)  # least: log2 probability
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
    strip_count = tl.where((row_top - lse) * log2_e <= least, 0, strip_count)  # no strip can have a heavy id

    # the row's threshold, above LEAST_HEAVY_LOG2 if it has more than HEAVY candidates, which are counted if they may be
    most_candidates, low_count, high_count = run_sum * 0.0, 0, 0
    for start in range(0, strip_count, BLOCK_STRIPS):
        most_candidates += strips_above(
            least, start, offset_ptr, sum_ptr, strip_count, strip_stride, target, target_logit, lse,
            IS_RELATIVE, STRIP, BLOCK_STRIPS,
        )[2]  # fmt: skip
    for start in range(0, tl.where(most_candidates > HEAVY, strip_count, 0), BLOCK_STRIPS):
        offs_strip, is_open, _ = strips_above(
            least, start, offset_ptr, sum_ptr, strip_count, strip_stride, target, target_logit, lse,
            IS_RELATIVE, STRIP, BLOCK_STRIPS,
        )  # fmt: skip
        for _ in range(0, tl.sum(is_open.to(tl.int32), 0)):
            strip = tl.min(tl.where(is_open, offs_strip, NO_INDEX), 0)
            is_open &= offs_strip != strip
            strip_offs = strip.to(tl.int64) * strip_stride
            shift, z, log_p = open_strip(
                strip, stored_ptr + row * stride, offset_ptr + strip_offs, sum_ptr + strip_offs, target, target_logit,
                lse, vocab, IS_RELATIVE, STRIP,
            )  # fmt: skip
            low_count += tl.sum((log_p > least).to(tl.int32), 0)
            high_count += tl.sum((log_p > least + 1.0).to(tl.int32), 0)
    threshold = LEAST_HEAVY_LOG2 + tl.where(low_count > HEAVY, 1.0, 0.0) + tl.where(high_count > HEAVY, 1.0, 0.0)

    for start in range(0, strip_count, BLOCK_STRIPS):
        offs_strip, is_open, _ = strips_above(
            threshold - MARGIN_LOG2, start, offset_ptr, sum_ptr, strip_count, strip_stride, target, target_logit, lse,
            IS_RELATIVE, STRIP, BLOCK_STRIPS,
        )  # fmt: skip
        for _ in range(0, tl.sum(is_open.to(tl.int32), 0)):
            strip = tl.min(tl.where(is_open, offs_strip, NO_INDEX), 0)
            is_open &= offs_strip != strip
            strip_offs = strip.to(tl.int64) * strip_stride
            shift, z, log_p = open_strip(
                strip, stored_ptr + row * stride, offset_ptr + strip_offs, sum_ptr + strip_offs, target, target_logit,
                lse, vocab, IS_RELATIVE, STRIP,
            )  # fmt: skip
            is_negative = tl.load(sum_ptr + strip_offs) < 0.0
            offs_col = strip * STRIP + tl.arange(0, STRIP)
            in_vocab = offs_col < vocab
            x = tl.where(offs_col == target, target_logit, shift + z * ln_2)
            is_candidate = log_p > threshold - MARGIN_LOG2
            is_mended = is_candidate & (z != z)  # False everywhere
            for _ in range(0, tl.sum(is_candidate.to(tl.int32), 0)):
                column = tl.min(tl.where(is_candidate, offs_col, NO_INDEX), 0)
                is_candidate &= offs_col != column
                exact = dot(hidden_ptr + row * hidden, weight_ptr + column.to(tl.int64) * hidden, hidden, BLOCK)
                if bias_ptr is not None:
                    exact += tl.load(bias_ptr + column).to(tl.float32)
                exact = transform_logits(exact, logit_scale, softcap, row_scale)
                # blocks only, since the interpreter makes no mask of a block and a number
                is_heavy = (tl.where(offs_col == column, exact, float("-inf")) - lse) * log2_e > threshold
                is_heavy &= offs_col * 0 + count < HEAVY
                is_mended |= is_heavy
                x = tl.where(is_heavy, exact, x)
                z = tl.where(is_heavy, (exact - shift) * log2_e, z)
                heavy_count = tl.max(is_heavy.to(tl.int32), 0)  # 0 or 1
                is_slot = slots == count + (1 - heavy_count) * HEAVY  # no slot if the column is not heavy
                ids, logits = tl.where(is_slot, column, ids), tl.where(is_slot, exact, logits)
                count += heavy_count
            if tl.max(is_mended.to(tl.int32), 0) > 0:
                e = tl.exp2(z)
                value = rounded(z if IS_RELATIVE else e, stored_ptr.dtype.element_ty)
                tl.store(stored_ptr + row * stride + offs_col, value, mask=is_mended)
                # the epilogue of ``exp_logits`` for one row, with the strip as a first half, whose logits may be -inf
                offs_stats, in_rows = strip_offs + row + tl.arange(0, 1), tl.arange(0, 1) == 0
                row_x, no_shift = x[None, :], tl.zeros((1,), dtype=tl.float32)
                STORE_LOGITS(strip_ptrs, offs_stats, in_rows, row_x, offs_col, in_vocab, class_weights_ptr)
                largest = tl.max(row_x, 1)
                STORE_STRIP(strip_ptrs, offs_stats, in_rows, row_x, largest, offs_col)
                totals = ADD_HALF((largest,), z[None, :], e[None, :], ratios, strip * STRIP, ends, True, False, True)
                STORE_SUMS(totals, sum_ptrs, strip_ptrs, offs_stats, in_rows, no_shift, ratios)
                tl.store(sum_ptrs[0] + offs_stats, tl.where(is_negative, -totals[0], totals[0]), mask=in_rows)
    tl.store(ids_ptr + row * HEAVY + slots, ids)
    tl.store(logit_ptr + row * HEAVY + slots, logits)
