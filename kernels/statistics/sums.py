"""Sums over the vocabulary, from stored logits and the statistics of their softmaxes, one program per row.

``row_sums`` is the body of generated kernels (``common/sums.py``). It makes ``sum_j f(log p_j, log q_j)`` for the
student's softmax p and a dense teacher's q, or ``sum_j f(log p_j)``. If a gradient needs the sum of the slopes of f, it
makes that sum too.
"""

import triton
import triton.language as tl

from ..common.transform import load_number, load_row


@triton.jit
def row_sums(
    output_ptrs,  # a tuple of [rows] fp32: for each sum its value and, if it has a total, the sum of its slopes
    # inputs
    logits_ptr,  # [rows, columns or more] the student's
    strip_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    bias_ptr,  # [columns] or None
    lse_base_ptr,  # [rows] fp32: log p = (x - lse_base) + neg_log_sum
    neg_log_sum_ptr,  # [rows] fp32
    teacher,  # None, or a tuple of a dense teacher's pointers and numbers, as ``sums.FLAT`` names them
    # sizes
    strip_stride,  # elements from strip to strip of the student's and the teacher's offsets; 0 for raw logits
    columns,  # number of columns that both vocabularies have
    stride,  # elements from row to row of the student's logits
    # scalars
    logit_scale,  # float or None for 1
    softcap,  # float or None
    row_scale_ptr,  # [rows] fp32, or None for 1
    ratio,  # the softmax's inverse temperature relative to the logits'; float or None for 1
    scalars,  # a tuple of floats, the numbers of the sums' functions
    tie_tolerance,  # relative difference up to which p and q count as equal; None for 0
    ADD_SUMS: tl.constexpr,  # generated function of ``common/sums.py``
    IS_PAIRED: tl.constexpr,  # True: the sums read a teacher
    NUM_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes all sums over the vocabulary of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    row_scale = load_number(row_scale_ptr, row)
    lse_base_p, neg_log_sum_p = tl.load(lse_base_ptr + row), tl.load(neg_log_sum_ptr + row)
    if IS_PAIRED:
        (
            teacher_ptr, teacher_offset_ptr, teacher_bias_ptr, teacher_lse_base_ptr, teacher_neg_log_sum_ptr, _,
            teacher_stride, teacher_scale, teacher_softcap, teacher_row_scale_ptr,
        ) = teacher  # fmt: skip
        teacher_row_scale = load_number(teacher_row_scale_ptr, row)
        teacher_ptr += row * teacher_stride
        lse_base_q, neg_log_sum_q = tl.load(teacher_lse_base_ptr + row), tl.load(teacher_neg_log_sum_ptr + row)
    sums = (tl.zeros((BLOCK,), dtype=tl.float32),)
    for _ in tl.static_range(1, NUM_SUMS):
        sums = sums + (tl.zeros((BLOCK,), dtype=tl.float32),)
    for block_start in range(0, columns, BLOCK):
        offs = block_start + tl.arange(0, BLOCK)
        in_columns = offs < columns
        x = load_row(
            logits_ptr, strip_offset_ptr, bias_ptr, row, strip_stride, offs, in_columns, logit_scale, softcap,
            row_scale,
        )  # fmt: skip
        if ratio is not None:
            x = x * ratio
        log_p = tl.where(in_columns, (x - lse_base_p) + neg_log_sum_p, float("-inf"))
        log_q = log_p
        if IS_PAIRED:
            teacher_x = load_row(
                teacher_ptr, teacher_offset_ptr, teacher_bias_ptr, row, strip_stride, offs, in_columns, teacher_scale,
                teacher_softcap, teacher_row_scale,
            )  # fmt: skip
            log_q = tl.where(in_columns, (teacher_x - lse_base_q) + neg_log_sum_q, float("-inf"))
        sums = ADD_SUMS(sums, (log_p,), log_q, in_columns, scalars, tie_tolerance)
    for i in tl.static_range(NUM_SUMS):
        tl.store(output_ptrs[i] + row, tl.sum(sums[i], 0))
