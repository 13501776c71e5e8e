"""Gradients of raw logits [rows, columns], which overwrite the stored logits or exponentials of a chunk.

``row_grad`` computes gradients from logits, by ``identity.py``: for all columns, or for entries, a few columns of each
row, from exact logits [n]. If the gradient depends on no sum over the vocabulary, ``row_grad`` also computes such sums:
each program that shares a row writes a part, [rows] fp32. It is the body of generated kernels (``common/sums.py``).

``level_rows_kernel`` prepares exponentials E that ``exp_logits`` has stored, so that products read E in place of
dlogits. It rescales E so that each row has one offset, the row's level; writes factors [rows] fp32; and multiplies
hidden states, the other operand of dweight, by the softmax factor:

    E = exp(x - level),  dlogits[i] = softmax_factor[i] E[i] + target_factor[i] onehot(target[i])
    softmax_factor = alpha exp(level - lse),  target_factor = alpha p(target) - beta - softmax_factor E(target)

If more than ``MAX_RARE_TOKENS`` tokens of the call have a row's target, the kernel writes a 16-bit number ``ratio``
into E(target), chosen so that target_factor is nearly 0. In dweight's row of a frequent id, softmax terms and targets'
terms nearly cancel, and must cancel before the row is rounded. For a rarer target E(target) becomes 0, and the target's
term is added to dweight after the product. This term is most of dweight's row, which is then rounded once.

``scale_kernel`` multiplies gradients [numel] by a factor that is known only in backward, in place or with a cast:

    out = in * factor * one_or_nan

``scale_rows_kernel`` multiplies each row by a factor:

    out[row] = in[row] * factor[row], 0 where factor[row] is 0
"""

import triton
import triton.language as tl

from ...core import tiles
from ..common.blocks import counted_rows
from ..common.launcher import kernel
from ..common.transform import load_block, load_column, load_columns, log2_e, transform_derivative
from .identity import log_probabilities

PRODUCT_ROWS = tl.constexpr(tiles.PRODUCT_ROWS)
# most tokens of a rare target. Relative error of dweight in two chunks: with 4 it is 1.66e-3 on flat heads and 1.96e-3
# on Zipf's, with 0 it is 2.56e-3 and 1.93e-3
MAX_RARE_TOKENS = tl.constexpr(4)
MIN_FACTOR = tl.constexpr(2.0**-80)  # minimum softmax factor; bf16's range contains the factor and its inverse


@triton.jit
def row_grad(
    # outputs
    dlogits_ptr,  # [rows, columns], may overwrite logits of at least as many bits; of sets' entries [n] fp32
    output_ptrs,  # a tuple, for each sum over the vocabulary [COLUMN_PROGRAMS, rows] fp32: each program's sum
    # inputs
    logits_ptr,  # [rows, columns]: raw, or fp16 relative to strips' offsets; of entries [n] fp32, exact
    strip_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    bias_ptr,  # [columns] or None
    # None: gradients of all columns. Else of entries only, a tuple: column_ptr [n] int64 or int32, -1 for none;
    # added_ptr [n] fp32, added to the column's gradient, or None; begin_ptr and end_ptr [rows] int64, the range of a
    # row's entries, or None; entries_per_row, the number of entries of each row without begin_ptr
    entries,  # None, or a tuple of five about the entries
    class_weights_ptr,  # [columns] or None for 1
    target_ptr,  # [rows] int64, -1 where a row does not count
    target_logit_ptr,  # [rows] fp32
    lse_base_ptrs,  # a tuple, for each softmax [rows] fp32: log p = (ratio x - lse_base) + neg_log_sum
    neg_log_sum_ptrs,  # a tuple, for each softmax [rows] fp32
    teacher,  # None, or a tuple of a dense teacher's pointers and numbers, as ``sums.FLAT`` names them
    coefficient_ptrs,  # a tuple of [rows] fp32: coefficients, and sums of slopes, that ADD_TERMS reads
    # sizes
    rows,  # number of the chunk's rows
    columns,  # number of columns
    first_column,  # column of the vocabulary that column 0 is
    widths,  # a tuple, for each softmax the number of columns that it is over; None for all
    logits_stride,  # elements from row to row
    dlogits_stride,  # elements from row to row
    strip_stride,  # elements from strip to strip of the student's and the teacher's offsets; 0 for raw logits
    partial_stride,  # elements from program to program of ``output_ptrs``; None without sums
    count_ptr,  # [] int64: rows of the call that count; None for all
    first_row,  # of the chunk in the call
    # scalars
    logit_scale,  # float or None for 1
    softcap,  # float or None
    row_scale_ptr,  # [rows] fp32, or None for 1
    ratios,  # a tuple, for each softmax its inverse temperature relative to the first's; float or None for 1
    scalars,  # a tuple of floats, the numbers of the sums' functions
    tie_tolerance,  # relative difference up to which p and q count as equal; None for 0
    ADD_SUMS: tl.constexpr,  # generated function; None without sums
    ADD_TERMS: tl.constexpr,  # generated function
    IS_PAIRED: tl.constexpr,  # there is a teacher
    HAS_ENTRIES: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    NUM_COEFFICIENTS: tl.constexpr,
    NUM_SOFTMAXES: tl.constexpr,
    COLUMN_PROGRAMS: tl.constexpr,  # number of programs that share a row
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # number of columns or entries at a time; for relative logits the width of a strip
):
    """Writes ``dlogits = g(logits)``, g the gradient of ``identity.py``; 0 where a row does not count.

    With entries, only gradients of the entries' columns are written. Entries have exact logits: with a rounded ``p``
    the difference ``p - q`` would lose all accuracy where the student is near a teacher's ``q``. If several entries of
    a row have the same column, the first entry writes it, with ``added_ptr``'s gradients of all of them."""
    column_program = tl.program_id(0) % COLUMN_PROGRAMS
    offs_row = (tl.program_id(0) // COLUMN_PROGRAMS) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < rows
    begin, end, begin_ptr = column_program * BLOCK, columns, None
    if HAS_ENTRIES:
        column_ptr, added_ptr, begin_ptr, end_ptr, entries_per_row = entries
        if begin_ptr is None:
            begin = tl.program_id(0).to(tl.int64) * entries_per_row
            end = begin + entries_per_row
        else:
            begin, end = tl.load(begin_ptr + tl.program_id(0)), tl.load(end_ptr + tl.program_id(0))
    if count_ptr is not None:
        # rows after those that count are written up to a multiple of a tile's rows, since products read them
        end_row = tl.cdiv(counted_rows(count_ptr, first_row, rows), PRODUCT_ROWS) * PRODUCT_ROWS
        end = tl.where((tl.program_id(0) // COLUMN_PROGRAMS) * BLOCK_ROWS < end_row, columns, 0)
    row_int64, is_written = offs_row.to(tl.int64)[:, None], in_rows
    target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1)
    is_counted = target >= 0
    target = (target - first_column).to(tl.int32)[:, None]
    # Without a second softmax or a cap, relative logits are loaded as log-probabilities, with one addition per element.
    # Rows that do not count are not loaded and write no sum.
    LOADS_LOG_PROBABILITIES: tl.constexpr = strip_offset_ptr is not None and NUM_SOFTMAXES == 1 and softcap is None
    if LOADS_LOG_PROBABILITIES:
        in_rows = in_rows & is_counted
    # numbers per row, loaded before the loop over columns
    target_logit = load_column(target_logit_ptr, offs_row, in_rows)
    row_scale = load_column(row_scale_ptr, offs_row, in_rows)
    lse_bases = load_columns(lse_base_ptrs, offs_row, in_rows, NUM_SOFTMAXES)
    neg_log_sums = load_columns(neg_log_sum_ptrs, offs_row, in_rows, NUM_SOFTMAXES)
    softmaxes = lse_bases, neg_log_sums, ratios, widths
    coefficients = load_columns(coefficient_ptrs, offs_row, in_rows, NUM_COEFFICIENTS)
    if IS_PAIRED:
        (
            teacher_ptr, teacher_offset_ptr, teacher_bias_ptr, teacher_lse_base_ptr, teacher_neg_log_sum_ptr,
            teacher_columns, teacher_stride, teacher_scale, teacher_softcap, teacher_row_scale_ptr,
        ) = teacher  # fmt: skip
        teacher_row_scale = load_column(teacher_row_scale_ptr, offs_row, in_rows)
        teacher_lse_base = load_column(teacher_lse_base_ptr, offs_row, in_rows)
        teacher_neg_log_sum = load_column(teacher_neg_log_sum_ptr, offs_row, in_rows)
    loaded_lse_base, loaded_neg_log_sum = None, None
    if LOADS_LOG_PROBABILITIES:
        loaded_lse_base, loaded_neg_log_sum = lse_bases[0], neg_log_sums[0]
        target_logit = (target_logit - loaded_lse_base) + loaded_neg_log_sum
    if NUM_SUMS > 0:
        sums = (tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32),)
        for _ in tl.static_range(1, NUM_SUMS):
            sums = sums + (tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32),)
    for block_start in range(begin, end, COLUMN_PROGRAMS * BLOCK):
        # for plain rows a sum that starts from zeros takes 32 registers, one that starts from the first term 49
        initial_grad = tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32)
        offs = block_start + tl.arange(0, BLOCK)
        if not HAS_ENTRIES:
            in_columns = offs < columns
            x = load_block(
                logits_ptr, strip_offset_ptr, bias_ptr, offs_row, in_rows, strip_stride, logits_stride, block_start,
                offs, in_columns, logit_scale, softcap, row_scale, loaded_lse_base, loaded_neg_log_sum,
            )  # fmt: skip
        else:
            entry = offs
            column = tl.load(column_ptr + entry, mask=entry < end, other=-1)
            x = tl.load(logits_ptr + entry, mask=column >= 0, other=0.0)[None, :]
            offs = column - first_column
            in_columns = (column >= 0) & (offs >= 0) & (offs < columns)
            if added_ptr is not None:
                for compared_entry in range(begin, end):
                    is_same_column = column == tl.load(column_ptr + compared_entry)
                    initial_grad += tl.where(is_same_column, tl.load(added_ptr + compared_entry), 0.0)[None, :]
                    in_columns &= (is_same_column & (entry > compared_entry)) == 0
        omega = 1.0  # class weights
        if class_weights_ptr is not None:
            omega = tl.load(class_weights_ptr + offs, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        log_q, in_both = None, None  # in_both: mask of columns that student and teacher have
        if IS_PAIRED:
            in_teacher, in_teacher_rows, strip_start = offs < teacher_columns, in_rows, block_start
            if not HAS_ENTRIES:
                # a block: the interpreter makes no mask of a block and a scalar
                has_strip = tl.full((BLOCK_ROWS,), block_start, tl.int32) < teacher_columns
                in_teacher_rows &= has_strip  # strips after the teacher's last one have no offset
            else:
                in_teacher &= in_columns
                strip_start = None
            log_q = load_block(
                teacher_ptr, teacher_offset_ptr, teacher_bias_ptr, offs_row, in_teacher_rows, strip_stride,
                teacher_stride, strip_start, offs, in_teacher, teacher_scale, teacher_softcap, teacher_row_scale,
                teacher_lse_base, teacher_neg_log_sum,
            )  # fmt: skip
            if teacher_offset_ptr is None:
                log_q = (log_q - teacher_lse_base) + teacher_neg_log_sum
                log_q = tl.where(in_rows[:, None] & in_teacher[None, :], log_q, float("-inf"))
            in_both = in_teacher_rows[:, None] & in_teacher[None, :]
        logs = (x,)
        if NUM_SUMS > 0:
            if not LOADS_LOG_PROBABILITIES:
                logs = log_probabilities(x, offs[None, :], softmaxes, NUM_SOFTMAXES)
            sums = ADD_SUMS(sums, logs, log_q, in_both, scalars, tie_tolerance)
        # the target's column has its exact logit: with a rounded p, p - 1 would lose all accuracy for p near 1
        is_target = offs[None, :] == target
        x = tl.where(is_target, target_logit, x)
        logs = (x,)
        if not LOADS_LOG_PROBABILITIES:
            logs = log_probabilities(x, offs[None, :], softmaxes, NUM_SOFTMAXES)
        grad = ADD_TERMS(
            initial_grad, x, logs, log_q, offs[None, :], is_target, omega, in_both, softmaxes, coefficients, scalars,
            tie_tolerance,
        )  # fmt: skip
        grad *= transform_derivative(x, logit_scale, softcap, row_scale)
        if not LOADS_LOG_PROBABILITIES:
            # by selection: where a row does not count, a teacher's logits or a bias may be nan
            grad = tl.where(is_counted[:, None], grad, 0.0)
        # a narrower dlogits[j] overwrites bytes of logits[j / 2]: all threads must have read the block
        tl.debug_barrier()
        pointers = dlogits_ptr + row_int64 * dlogits_stride + offs[None, :]
        mask = is_written[:, None] & in_columns[None, :]
        if begin_ptr is not None:  # entries without a column get 0
            grad = tl.where(mask, grad, 0.0)
            pointers, mask = (dlogits_ptr + entry)[None, :], (entry < end)[None, :]
        tl.store(pointers, grad.to(dlogits_ptr.dtype.element_ty), mask=mask)
    if NUM_SUMS > 0:
        for i in tl.static_range(NUM_SUMS):
            sum_pointers = output_ptrs[i] + column_program * partial_stride + offs_row
            tl.store(sum_pointers, tl.sum(sums[i], 1), mask=in_rows)


@kernel
def level_rows_kernel(
    # in and out
    exp_ptr,  # [rows, vocab] 16 bit
    hidden_ptr,  # [rows, hidden], times the softmax factor in place; or None
    # outputs
    softmax_factor_ptr,  # [rows] fp32: factor of E in dlogits
    target_factor_ptr,  # [rows] fp32: dlogits at the target, less softmax_factor * E(target)
    ratio_ptr,  # [rows] fp32: E(target) after this kernel
    # inputs
    strip_offset_ptr,  # [strips, rows] fp32, read where the sum is negative; elsewhere the offset is target_logit
    strip_sum_ptr,  # [strips, rows] fp32
    level_ptr,  # [rows] fp32: the offset that a row gets
    target_ptr,  # [rows] int64, -1 where a row does not count
    occurrences_ptr,  # [rows] int32: tokens of the call with the row's target; None: all targets are frequent
    target_logit_ptr,  # [rows] fp32
    lse_base_ptr,  # [rows] fp32
    neg_log_sum_ptr,  # [rows] fp32
    logprob_ptr,  # [rows] fp32
    alpha_ptr,  # [rows] fp32
    beta_ptr,  # [rows] fp32
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,  # number of the chunk's rows
    vocab,  # number of columns of the logits
    strip_count,  # number of strips in a row
    strip_stride,  # elements from strip to strip of the statistics
    stride,  # elements from row to row of the exponentials
    hidden,  # hidden size
    # scalars
    logit_scale,  # float or None for 1
    row_scale_ptr,  # [rows] fp32, or None for 1
    BLOCK_ROWS: tl.constexpr,
    STRIP: tl.constexpr,
    CLEARS_TARGETS: tl.constexpr,  # E(target) becomes 0 in all rows
    SPLITS: tl.constexpr,  # number of programs that share a block of rows
    BLOCK: tl.constexpr,  # elements of hidden states at a time
):
    """Writes the factors of rows. Rescales strips of exponentials whose offset is not the row's level; nearly all have
    this offset already."""
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < counted_rows(count_ptr, first_row, rows)
    level = tl.load(level_ptr + offs_row, mask=in_rows, other=0.0)
    target_logit = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
    is_uneven = in_rows & (level != target_logit)  # some strips may have another offset than the level
    if (tl.program_id(1) == 0) | (hidden_ptr is not None):
        alpha = tl.load(alpha_ptr + offs_row, mask=in_rows, other=0.0)
        beta = tl.load(beta_ptr + offs_row, mask=in_rows, other=0.0)
        if logit_scale is not None:
            alpha, beta = alpha * logit_scale, beta * logit_scale
        if row_scale_ptr is not None:
            row_scale = tl.load(row_scale_ptr + offs_row, mask=in_rows, other=1.0)
            alpha, beta = alpha * row_scale, beta * row_scale
        lse_base = tl.load(lse_base_ptr + offs_row, mask=in_rows, other=0.0)
        neg_log_sum = tl.load(neg_log_sum_ptr + offs_row, mask=in_rows, other=0.0)
        logprob = tl.load(logprob_ptr + offs_row, mask=in_rows, other=0.0)
        level_probability = tl.exp2(((level - lse_base) + neg_log_sum) * log2_e)
        # one of a row's programs writes its factors; the mask is a block, since the interpreter takes no scalar
        is_writer = in_rows & (offs_row * 0 + tl.program_id(1) == 0)
        target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1)
        is_counted = target >= 0
        factor, target_term = alpha * level_probability, alpha * tl.exp2(logprob * log2_e) - beta
        # 0 where 16 bits would lose the factor beside hidden states; rows that are levelled below have 0, or less than
        # e^-60 of the largest
        in_vocab = is_writer & is_counted & (target < vocab)
        has_ratio = in_vocab & (level == target_logit) & (tl.abs(factor) > MIN_FACTOR)
        if CLEARS_TARGETS:
            has_ratio &= target < 0
        if occurrences_ptr is not None:
            has_ratio &= tl.load(occurrences_ptr + offs_row, mask=in_rows, other=0) > MAX_RARE_TOKENS
        ratio = target_term / tl.where(has_ratio, factor, 1.0)
        has_ratio &= tl.abs(ratio) < 1.0 / MIN_FACTOR
        stored_ratio = tl.where(has_ratio, ratio, 0.0).to(exp_ptr.dtype.element_ty)
        tl.store(exp_ptr + offs_row.to(tl.int64) * stride + target, stored_ratio, mask=in_vocab)
        ratio = stored_ratio.to(tl.float32)
        tl.store(softmax_factor_ptr + offs_row, factor, mask=is_writer)
        tl.store(target_factor_ptr + offs_row, target_term - factor * ratio, mask=is_writer)
        tl.store(ratio_ptr + offs_row, ratio, mask=is_writer)
        if hidden_ptr is not None:
            for block in range(tl.program_id(1), tl.cdiv(hidden, BLOCK), SPLITS):
                offs_hidden = block * BLOCK + tl.arange(0, BLOCK)
                pointers = hidden_ptr + offs_row.to(tl.int64)[:, None] * hidden + offs_hidden[None, :]
                mask = is_counted[:, None] & (offs_hidden < hidden)[None, :]
                scaled_hidden = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * factor[:, None]
                tl.store(pointers, scaled_hidden.to(hidden_ptr.dtype.element_ty), mask=mask)
    if tl.max(is_uneven.to(tl.int32), 0) > 0:
        for strip in range(tl.program_id(1), strip_count, SPLITS):
            offs_col = strip * STRIP + tl.arange(0, STRIP)
            strip_indices = tl.cast(strip, tl.int64) * strip_stride + offs_row
            has_offset = tl.load(strip_sum_ptr + strip_indices, mask=is_uneven, other=0.0) < 0.0
            offset = tl.where(
                has_offset, tl.load(strip_offset_ptr + strip_indices, mask=has_offset, other=0.0), target_logit
            )
            pointers = exp_ptr + offs_row.to(tl.int64)[:, None] * stride + offs_col[None, :]
            mask = is_uneven[:, None] & (offs_col < vocab)[None, :]
            exponential = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
            exponential *= tl.exp2((offset - level) * log2_e)[:, None]
            tl.store(pointers, exponential.to(exp_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scale_blocks(out_ptr, in_ptr, factor, numel, program, programs, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Writes ``out = in * factor`` for every ``programs``-th block of [numel] elements, from block ``program`` on."""
    if EVEN:
        numel = numel // 16 * 16  # shows the multiple to the compiler, which then loads vectors
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
    second_ptr,  # [second_numel], scaled in place; or None
    # inputs
    in_ptr,  # [numel]
    factor_ptr,  # [] on the device
    one_or_nan_ptr,  # [] fp32, a second factor, or None
    # sizes
    numel,  # number of elements of the output
    second_numel,  # number of elements of the second tensor
    programs,  # number of programs that scale ``in_ptr``; further programs scale ``second_ptr``
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,  # numel is a multiple of 16
    SECOND_EVEN: tl.constexpr,  # second_numel is a multiple of 16
    IN_PLACE: tl.constexpr,  # out_ptr is in_ptr
):
    """Writes ``out = in * factor * one_or_nan``, and ``second *= factor * one_or_nan``."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if one_or_nan_ptr is not None:
        factor *= tl.load(one_or_nan_ptr)
    # a factor of 1, as in nearly every step, changes nothing in place
    if (not IN_PLACE) or factor != 1.0:
        program, all_programs = tl.program_id(0), tl.num_programs(0)
        if second_ptr is None:
            scale_blocks(out_ptr, in_ptr, factor, numel, program, all_programs, BLOCK, EVEN)
        elif program < programs:
            scale_blocks(out_ptr, in_ptr, factor, numel, program, programs, BLOCK, EVEN)
        else:
            second_program, second_programs = program - programs, all_programs - programs
            scale_blocks(
                second_ptr, second_ptr, factor, second_numel, second_program, second_programs, BLOCK, SECOND_EVEN
            )


@kernel
def scale_rows_kernel(
    out_ptr,  # [rows, columns], may be the input itself
    in_ptr,  # [rows, columns]
    factor_ptr,  # [rows] fp32
    columns,  # number of columns
    BLOCK: tl.constexpr,
):
    """Writes ``out[row] = in[row] * factor[row]``; 0 where the factor is 0, even if ``in[row]`` has nan."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr + row)
    for block in range(0, tl.cdiv(columns, BLOCK)):
        offs = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(in_ptr + row * columns + offs, mask=offs < columns, other=0.0).to(tl.float32) * factor
        value = tl.where(factor == 0.0, 0.0, value)
        tl.store(out_ptr + row * columns + offs, value.to(out_ptr.dtype.element_ty), mask=offs < columns)
