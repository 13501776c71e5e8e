"""Sums over the vocabulary, from stored logits whose softmaxes are known, one program per row.

The body of generated kernels (``common/sums.py``): it makes ``sum_j f(log p_j, log q_j)`` for the student's softmax p
and a dense teacher's q, or for p alone; and the sum of the slopes of f, if the gradient needs it.
"""

import triton
import triton.language as tl

from ..common.transform import load_number, load_row


@triton.jit
def row_sums(
    outputs,  # a tuple of [rows] fp32: sums, and of their slopes
    # inputs: p
    logits_ptr,  # [rows, columns or more]
    strip_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    bias_ptr,
    start_ptr,  # [rows] fp32: log p = (x - start) + rest
    rest_ptr,  # [rows] fp32
    teacher,  # of q, a tuple as FLAT names them; or None
    # sizes
    strip_stride,  # from strip to strip of both offsets; 0 for raw logits
    columns,  # that both have
    stride,
    # scalars
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32 or None
    ratio,
    scalars,  # a tuple of the sums' own numbers
    tie,  # of part_below
    ADD_SUMS: tl.constexpr,
    IS_PAIRED: tl.constexpr,  # with a teacher
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    row_scale = load_number(row_scale_ptr, row)
    start_p, rest_p = tl.load(start_ptr + row), tl.load(rest_ptr + row)
    if IS_PAIRED:
        (
            teacher_ptr, teacher_offset_ptr, teacher_bias_ptr, teacher_start_ptr, teacher_rest_ptr, _,
            teacher_stride, teacher_scale, teacher_softcap, teacher_row_scale_ptr,
        ) = teacher  # fmt: skip
        teacher_row_scale = load_number(teacher_row_scale_ptr, row)
        teacher_ptr += row * teacher_stride
        start_q, rest_q = tl.load(teacher_start_ptr + row), tl.load(teacher_rest_ptr + row)
    sums = (tl.zeros((BLOCK,), dtype=tl.float32),)
    for _ in tl.static_range(1, SUMS):
        sums = sums + (tl.zeros((BLOCK,), dtype=tl.float32),)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        in_columns = offs < columns
        x = load_row(
            logits_ptr, strip_offset_ptr, bias_ptr, row, strip_stride, offs, in_columns, logit_scale, softcap,
            row_scale,
        )  # fmt: skip
        if ratio is not None:
            x = x * ratio
        log_p = tl.where(in_columns, (x - start_p) + rest_p, float("-inf"))
        log_q = log_p
        if IS_PAIRED:
            y = load_row(
                teacher_ptr, teacher_offset_ptr, teacher_bias_ptr, row, strip_stride, offs, in_columns, teacher_scale,
                teacher_softcap, teacher_row_scale,
            )  # fmt: skip
            log_q = tl.where(in_columns, (y - start_q) + rest_q, float("-inf"))
        sums = ADD_SUMS(sums, (log_p,), log_q, in_columns, scalars, tie)
    for i in tl.static_range(SUMS):
        tl.store(outputs[i] + row, tl.sum(sums[i], 0))
