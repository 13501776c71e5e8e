"""Gradients of raw logits [rows, columns], which overwrite the stored logits or exponentials of a chunk.

``row_grad`` makes them from logits by ``identity.py``: for all columns, or for few columns of each row, whose exact
logits are entries [n]. It also makes sums over the vocabulary that no gradient waits for [rows] fp32, one part per
program. It is the body of kernels that are generated for the terms of a call (``common/sums.py``).

``level_rows_kernel`` prepares exponentials E that ``exp_logits`` has stored: it brings them to one offset per row,
writes their factors, and multiplies hidden states, dweight's other operand, by the softmax factor [rows] fp32:

    E = exp(x - level),  dlogits[i] = softmax_factor[i] E[i] + target_factor[i] onehot(target[i])
    softmax_factor = alpha exp(level - lse),  target_factor = alpha p(target) - beta - softmax_factor E(target)

For a target with more than ``MOST_APART`` tokens, the kernel writes a 16-bit number into E(target), ``ratio``, with
which target_factor is nearly 0: in a frequent id's row of dweight the sums of softmax terms and targets' terms nearly
cancel, and must cancel before the row is rounded. For a rarer target, E(target) becomes 0, and the target's term is
added after the product: it is most of the row, which is then rounded once.

``scale_kernel`` multiplies gradients [numel] by their last factor, known only in backward, in place or with a cast:

    out = in * factor * one_or_nan

``scale_rows_kernel``:

    out[row] = in[row] * factor[row], 0 where that factor is 0
"""

import triton
import triton.language as tl

from ...core import tiles
from ..common.blocks import counted_rows
from ..common.launcher import kernel
from ..common.transform import load_block, load_column, load_columns, log2_e, transform_derivative
from .identity import log_probabilities

PRODUCT_ROWS = tl.constexpr(tiles.PRODUCT_ROWS)
# dweight's error in two chunks: 1.66e-3 with 4, 2.56e-3 with 0 on flat heads; 1.96e-3 and 1.93e-3 on Zipf's
MOST_APART = tl.constexpr(4)
LEAST_FACTOR = tl.constexpr(2.0**-80)  # least softmax factor; it and its inverse are far inside bf16's range


@triton.jit
def row_grad(
    # outputs
    dlogits_ptr,  # [rows, columns], may share the bytes of logits if no wider; of sets [n] fp32
    outputs,  # a tuple of [COLUMN_PROGRAMS, rows] fp32: each program's part of a sum over the vocabulary
    # inputs
    logits_ptr,  # [rows, columns]: raw, or fp16 relative to strips' offsets; of entries [n] fp32, exact
    strip_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    bias_ptr,  # [columns] or None
    entries,  # pointers and ``count``, or None: all columns are made. [n] int64 or int32 their columns, -1 for none;
    # [n] fp32 what each adds to its column's gradient, or None; [rows] int64 where a row's set begins, and where it
    # ends, None where each row has ``count`` entries
    class_weights_ptr,  # [columns] or None for 1
    target_ptr,  # [rows] int64, -1 where a row does not count
    target_logit_ptr,  # [rows] fp32
    starts,  # of each softmax [rows] fp32: log p = (ratio x - start) + rest
    rests,
    teacher,  # pointers as of the logits, start and rest [rows] fp32, and numbers, as FLAT names them; or None
    vectors,  # a tuple of [rows] fp32 that ADD_TERMS reads
    # sizes
    rows,
    columns,
    first_column,  # of these columns in the vocabulary
    widths,  # of these that each softmax is over; None for all
    logits_stride,  # elements from row to row
    dlogits_stride,
    strip_stride,  # from strip to strip of both offsets; 0 for raw logits
    parts_stride,  # from program to program of the parts; None without them
    count_ptr,  # [] int64: rows of the call that count; None for all
    first_row,  # of these rows in the call
    # scalars
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32 or None
    ratios,  # of each softmax's inverse temperature to the first's; float or None for 1
    scalars,  # a tuple of the sums' own numbers
    tie,  # as of ``part_below``, or None
    ADD_SUMS: tl.constexpr,  # or None
    ADD_TERMS: tl.constexpr,
    IS_PAIRED: tl.constexpr,  # with a teacher
    HAS_ENTRIES: tl.constexpr,
    SUMS: tl.constexpr,
    VECTORS: tl.constexpr,
    SOFTMAXES: tl.constexpr,
    COLUMN_PROGRAMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # a strip where logits are relative
):
    """``dlogits = g(logits)``, g the gradient of ``identity.py``, 0 where a row does not count.

    Entries overwrite the gradients of their columns, from exact logits: with a rounded ``p``, ``p - t`` would lose all
    accuracy where the student is near the teacher t. A column with two entries is written once, with both terms."""
    column_program = tl.program_id(0) % COLUMN_PROGRAMS
    offs_row = (tl.program_id(0) // COLUMN_PROGRAMS) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < rows
    first, last, begin_ptr = column_program * BLOCK, columns, None
    if HAS_ENTRIES:
        column_ptr, sparse_ptr, begin_ptr, end_ptr, count = entries
        if begin_ptr is None:
            first = tl.program_id(0).to(tl.int64) * count
            last = first + count
        else:
            first, last = tl.load(begin_ptr + tl.program_id(0)), tl.load(end_ptr + tl.program_id(0))
    if count_ptr is not None:
        # rows after those that count are written up to a multiple of a tile's rows, since products read them
        read_rows = tl.cdiv(counted_rows(count_ptr, first_row, rows), PRODUCT_ROWS) * PRODUCT_ROWS
        last = tl.where((tl.program_id(0) // COLUMN_PROGRAMS) * BLOCK_ROWS < read_rows, columns, 0)
    wide_row, written = offs_row.to(tl.int64)[:, None], in_rows
    target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1)
    counts = target >= 0
    target = (target - first_column).to(tl.int32)[:, None]
    # Without a second softmax or a cap, relative logits are loaded as log-probabilities, with one addition per element.
    # Rows that do not count are not loaded and write no part of a sum.
    LOGARITHMS: tl.constexpr = strip_offset_ptr is not None and SOFTMAXES == 1 and softcap is None
    if LOGARITHMS:
        in_rows = in_rows & counts
    # numbers per row, loaded before the loop over columns
    target_logit = load_column(target_logit_ptr, offs_row, in_rows)
    row_scale = load_column(row_scale_ptr, offs_row, in_rows)
    row_starts = load_columns(starts, offs_row, in_rows, SOFTMAXES)
    row_rests = load_columns(rests, offs_row, in_rows, SOFTMAXES)
    softmaxes = row_starts, row_rests, ratios, widths
    coefficients = load_columns(vectors, offs_row, in_rows, VECTORS)
    if IS_PAIRED:
        (
            teacher_ptr, teacher_offset_ptr, teacher_bias_ptr, teacher_start_ptr, teacher_rest_ptr, teacher_columns,
            teacher_stride, teacher_scale, teacher_softcap, teacher_row_scale_ptr,
        ) = teacher  # fmt: skip
        teacher_row_scale = load_column(teacher_row_scale_ptr, offs_row, in_rows)
        teacher_start = load_column(teacher_start_ptr, offs_row, in_rows)
        teacher_rest = load_column(teacher_rest_ptr, offs_row, in_rows)
    read_start, read_rest = None, None
    if LOGARITHMS:
        read_start, read_rest = row_starts[0], row_rests[0]
        target_logit = (target_logit - read_start) + read_rest
    if SUMS > 0:
        sums = (tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32),)
        for _ in tl.static_range(1, SUMS):
            sums = sums + (tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32),)
    for start in range(first, last, COLUMN_PROGRAMS * BLOCK):
        # for plain rows a sum that starts from zeros takes 32 registers, one that starts from the first term 49
        zero = tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32)
        offs = start + tl.arange(0, BLOCK)
        if not HAS_ENTRIES:
            in_columns = offs < columns
            x = load_block(
                logits_ptr, strip_offset_ptr, bias_ptr, offs_row, in_rows, strip_stride, logits_stride, start, offs,
                in_columns, logit_scale, softcap, row_scale, read_start, read_rest,
            )  # fmt: skip
        else:
            entry = offs
            column = tl.load(column_ptr + entry, mask=entry < last, other=-1)
            x = tl.load(logits_ptr + entry, mask=column >= 0, other=0.0)[None, :]
            offs = column - first_column
            in_columns = (column >= 0) & (offs >= 0) & (offs < columns)
            if sparse_ptr is not None:
                for compared in range(first, last):
                    same = column == tl.load(column_ptr + compared)
                    zero += tl.where(same, tl.load(sparse_ptr + compared), 0.0)[None, :]
                    in_columns &= (same & (entry > compared)) == 0
        omega = 1.0
        if class_weights_ptr is not None:
            omega = tl.load(class_weights_ptr + offs, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        log_q, in_both = None, None
        if IS_PAIRED:
            in_teacher, with_teacher, of_strip = offs < teacher_columns, in_rows, start
            if not HAS_ENTRIES:
                # a block: the interpreter makes no mask of a block and a scalar
                within = tl.full((BLOCK_ROWS,), start, tl.int32) < teacher_columns
                with_teacher &= within  # strips after the teacher's last one have no offset
            else:
                in_teacher &= in_columns
                of_strip = None
            log_q = load_block(
                teacher_ptr, teacher_offset_ptr, teacher_bias_ptr, offs_row, with_teacher, strip_stride,
                teacher_stride, of_strip, offs, in_teacher, teacher_scale, teacher_softcap, teacher_row_scale,
                teacher_start, teacher_rest,
            )  # fmt: skip
            if teacher_offset_ptr is None:
                log_q = (log_q - teacher_start) + teacher_rest
                log_q = tl.where(in_rows[:, None] & in_teacher[None, :], log_q, float("-inf"))
            in_both = with_teacher[:, None] & in_teacher[None, :]
        logs = (x,)
        if SUMS > 0:
            if not LOGARITHMS:
                logs = log_probabilities(x, offs[None, :], softmaxes, SOFTMAXES)
            sums = ADD_SUMS(sums, logs, log_q, in_both, scalars, tie)
        # the target's column has its exact logit: with a rounded p, p - 1 would lose all accuracy for p near 1
        is_target = offs[None, :] == target
        x = tl.where(is_target, target_logit, x)
        logs = (x,)
        if not LOGARITHMS:
            logs = log_probabilities(x, offs[None, :], softmaxes, SOFTMAXES)
        grad = ADD_TERMS(
            zero, x, logs, log_q, offs[None, :], is_target, omega, in_both, softmaxes, coefficients, scalars, tie,
        )  # fmt: skip
        grad *= transform_derivative(x, logit_scale, softcap, row_scale)
        if not LOGARITHMS:
            # by selection: where a row does not count, a teacher's logits or a bias may be nan
            grad = tl.where(counts[:, None], grad, 0.0)
        # a narrower dlogits[j] overwrites bytes of logits[j / 2]: all threads must have read the block
        tl.debug_barrier()
        pointers, mask = dlogits_ptr + wide_row * dlogits_stride + offs[None, :], written[:, None] & in_columns[None, :]
        if begin_ptr is not None:  # entries without a column get 0
            grad = tl.where(mask, grad, 0.0)
            pointers, mask = (dlogits_ptr + entry)[None, :], (entry < last)[None, :]
        tl.store(pointers, grad.to(dlogits_ptr.dtype.element_ty), mask=mask)
    if SUMS > 0:
        for i in tl.static_range(SUMS):
            part_at = outputs[i] + column_program * parts_stride + offs_row
            tl.store(part_at, tl.sum(sums[i], 1), mask=in_rows)


@kernel
def level_rows_kernel(
    # in and out
    exp_ptr,  # [rows, vocab] 16 bit
    hidden_ptr,  # [rows, hidden], times the softmax factor in place; or None
    # outputs
    softmax_factor_ptr,  # [rows] fp32: factor of E in dlogits
    target_factor_ptr,  # [rows] fp32: dlogits at the target, less what E gives of it
    ratio_ptr,  # [rows] fp32: E at the target
    # inputs
    strip_offset_ptr,  # [strips, rows] fp32, where the sum is negative
    strip_sum_ptr,  # [strips, rows] fp32
    level_ptr,  # [rows] fp32
    target_ptr,  # [rows] int64, -1 where a row does not count
    occurrences_ptr,  # [rows] int32: tokens of the call with the row's target; None: as if of a frequent id
    target_logit_ptr,  # [rows] fp32, the offset of rows that need nothing
    start_ptr,  # [rows] fp32
    rest_ptr,  # [rows] fp32
    logprob_ptr,  # [rows] fp32
    alpha_ptr,  # [rows] fp32
    beta_ptr,  # [rows] fp32
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    vocab,
    strips,
    strip_stride,  # from strip to strip of the statistics
    stride,
    hidden,
    # scalars
    logit_scale,  # float or None for 1
    row_scale_ptr,  # [rows] fp32, or None for 1
    BLOCK_ROWS: tl.constexpr,
    STRIP: tl.constexpr,
    APART: tl.constexpr,  # E at the target is 0 in all rows
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the factors of rows, and brings the strips of a row to one offset. Nearly all blocks have the row's offset
    already."""
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < counted_rows(count_ptr, first_row, rows)
    level = tl.load(level_ptr + offs_row, mask=in_rows, other=0.0)
    target_logit = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
    uneven = in_rows & (level != target_logit)
    if (tl.program_id(1) == 0) | (hidden_ptr is not None):
        alpha = tl.load(alpha_ptr + offs_row, mask=in_rows, other=0.0)
        beta = tl.load(beta_ptr + offs_row, mask=in_rows, other=0.0)
        if logit_scale is not None:
            alpha, beta = alpha * logit_scale, beta * logit_scale
        if row_scale_ptr is not None:
            row_scale = tl.load(row_scale_ptr + offs_row, mask=in_rows, other=1.0)
            alpha, beta = alpha * row_scale, beta * row_scale
        start = tl.load(start_ptr + offs_row, mask=in_rows, other=0.0)
        neg_log_sum = tl.load(rest_ptr + offs_row, mask=in_rows, other=0.0)
        logprob = tl.load(logprob_ptr + offs_row, mask=in_rows, other=0.0)
        softmax = tl.exp2(((level - start) + neg_log_sum) * log2_e)
        # one of a row's programs writes its factors; the mask is a block, since the interpreter takes no scalar
        first = in_rows & (offs_row * 0 + tl.program_id(1) == 0)
        target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1)
        counts = target >= 0
        factor, at_target = alpha * softmax, alpha * tl.exp2(logprob * log2_e) - beta
        # 0 where 16 bits would lose the factor beside hidden states; rows that are levelled below have 0, or less than
        # e^-60 of the largest
        in_vocab = first & counts & (target < vocab)
        fits = in_vocab & (level == target_logit) & (tl.abs(factor) > LEAST_FACTOR)
        if APART:
            fits &= target < 0
        if occurrences_ptr is not None:
            fits &= tl.load(occurrences_ptr + offs_row, mask=in_rows, other=0) > MOST_APART
        ratio = at_target / tl.where(fits, factor, 1.0)
        fits &= tl.abs(ratio) < 1.0 / LEAST_FACTOR
        rounded = tl.where(fits, ratio, 0.0).to(exp_ptr.dtype.element_ty)
        tl.store(exp_ptr + offs_row.to(tl.int64) * stride + target, rounded, mask=in_vocab)
        ratio = rounded.to(tl.float32)
        tl.store(softmax_factor_ptr + offs_row, factor, mask=first)
        tl.store(target_factor_ptr + offs_row, at_target - factor * ratio, mask=first)
        tl.store(ratio_ptr + offs_row, ratio, mask=first)
        if hidden_ptr is not None:
            for block in range(tl.program_id(1), tl.cdiv(hidden, BLOCK), SPLITS):
                offs_hidden = block * BLOCK + tl.arange(0, BLOCK)
                pointers = hidden_ptr + offs_row.to(tl.int64)[:, None] * hidden + offs_hidden[None, :]
                mask = counts[:, None] & (offs_hidden < hidden)[None, :]
                h = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * factor[:, None]
                tl.store(pointers, h.to(hidden_ptr.dtype.element_ty), mask=mask)
    if tl.max(uneven.to(tl.int32), 0) > 0:
        for strip in range(tl.program_id(1), strips, SPLITS):
            offs_col = strip * STRIP + tl.arange(0, STRIP)
            stats_at = tl.cast(strip, tl.int64) * strip_stride + offs_row
            has_offset = tl.load(strip_sum_ptr + stats_at, mask=uneven, other=0.0) < 0.0
            offset = tl.where(
                has_offset, tl.load(strip_offset_ptr + stats_at, mask=has_offset, other=0.0), target_logit
            )
            pointers = exp_ptr + offs_row.to(tl.int64)[:, None] * stride + offs_col[None, :]
            mask = uneven[:, None] & (offs_col < vocab)[None, :]
            e = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * tl.exp2((offset - level) * log2_e)[:, None]
            tl.store(pointers, e.to(exp_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scale_part(out_ptr, in_ptr, factor, numel, program, programs, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        numel = numel // 16 * 16  # the compiler sees it, and reads vectors
    offs = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    blocks = (numel - 1) // BLOCK + 1  # a sum with BLOCK may be beyond 32 bits
    for _ in range(0, tl.cdiv(blocks, programs)):
        value = tl.load(in_ptr + offs, mask=offs < numel).to(tl.float32) * factor
        tl.store(out_ptr + offs, value.to(out_ptr.dtype.element_ty), mask=offs < numel)
        offs += programs.to(tl.int64) * BLOCK


@kernel
def scale_kernel(
    # outputs
    out_ptr,  # [numel], may be the input itself
    second_ptr,  # [second_numel] to be scaled in place as well, or None
    # inputs
    in_ptr,  # [numel]
    factor_ptr,  # [] on the device
    one_or_nan_ptr,  # [] a second factor, or None
    # sizes
    numel,
    second_numel,
    programs,  # that scale the first
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,  # numel is a multiple of 16
    SECOND_EVEN: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """``out = in * factor * one_or_nan``"""
    factor = tl.load(factor_ptr).to(tl.float32)
    if one_or_nan_ptr is not None:
        factor *= tl.load(one_or_nan_ptr)
    # a factor of 1, as in nearly every step, changes nothing in place
    if (not IN_PLACE) or factor != 1.0:
        program, all_programs = tl.program_id(0), tl.num_programs(0)
        if second_ptr is None:
            scale_part(out_ptr, in_ptr, factor, numel, program, all_programs, BLOCK, EVEN)
        elif program < programs:
            scale_part(out_ptr, in_ptr, factor, numel, program, programs, BLOCK, EVEN)
        else:
            second_program, second_programs = program - programs, all_programs - programs
            scale_part(
                second_ptr, second_ptr, factor, second_numel, second_program, second_programs, BLOCK, SECOND_EVEN
            )


@kernel
def scale_rows_kernel(
    out_ptr,  # [rows, columns], may be the input itself
    in_ptr,  # [rows, columns]
    factor_ptr,  # [rows] fp32
    columns,
    BLOCK: tl.constexpr,
):
    """``out[row] = in[row] * factor[row]``, 0 where the factor is 0, whatever stands in the row"""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr + row)
    for block in range(0, tl.cdiv(columns, BLOCK)):
        offs = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(in_ptr + row * columns + offs, mask=offs < columns, other=0.0).to(tl.float32) * factor
        value = tl.where(factor == 0.0, 0.0, value)
        tl.store(out_ptr + row * columns + offs, value.to(out_ptr.dtype.element_ty), mask=offs < columns)
