"""Gradients of few columns of each row, by the identity of ``identity.py``.

From exact logits of entries [n], some of each row, ``column_grad_kernel``: written over dlogits [rows, columns], or
where a row's softmax is over a set of columns, [n] fp32.
"""

import triton.language as tl

from ..common.launcher import kernel
from ..common.transform import load_number, load_row
from .identity import logits_gradient


@kernel
def column_grad_kernel(
    # in and out
    dlogits_ptr,  # [rows, columns]; of rows with sets [entries] fp32
    # inputs
    logit_ptr,  # [entries] fp32, exact
    column_ptr,  # [entries] int64 or int32, -1 for none
    sparse_ptr,  # [entries] fp32, what each adds to its column's gradient; or None
    begin_ptr,  # [rows] int64: where the set of a row begins; None without sets: each row has ``count`` entries
    end_ptr,  # [rows] int64: and ends
    class_weights_ptr,  # [columns] or None for 1
    target_ptr,  # [rows] int64
    target_logit_ptr,  # [rows] fp32, like all that follow
    beta_ptr,  # or None
    kappa_ptr,  # or None
    start_ptr,  # log p = (x - start) + rest
    rest_ptr,
    alpha_ptr,  # or None, with eta
    eta_ptr,  # or None
    start2_ptr,  # at the second temperature, or None with all that follow
    rest2_ptr,
    alpha2_ptr,
    eta2_ptr,  # or None
    teacher_ptr,  # [rows, teacher_columns], or None; with all that follow as `row_grad_kernel` has them
    teacher_offset_ptr,
    teacher_bias_ptr,
    teacher_start_ptr,
    teacher_rest_ptr,
    gamma_ptr,
    rho_ptr,
    tau_ptr,
    theta_ptr,
    below_ptr,
    # sizes
    columns,
    first_column,
    columns2,
    teacher_columns,
    count,
    stride,
    teacher_stride,
    strip_stride,  # from strip to strip of the teacher's offsets
    # scalars
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32 or None
    ratio2,
    teacher_scale,
    teacher_softcap,
    teacher_row_scale_ptr,
    log_beta,  # of a mixture's shares, the teacher's first; float or None without one
    log_rest,
    tie,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients from exact logits, which overwrite those of some columns: ``p - t`` out of a rounded ``p`` would lose
    everything as the student nears the teacher. A column that is named twice gets both terms, once."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = row * count, row * count + count
    if begin_ptr is not None:
        begin, end = tl.load(begin_ptr + row), tl.load(end_ptr + row)
    target = tl.load(target_ptr + row)
    target_logit = load_number(target_logit_ptr, row)
    row_scale = load_number(row_scale_ptr, row)
    beta = load_number(beta_ptr, row)
    kappa = load_number(kappa_ptr, row)
    start = load_number(start_ptr, row)
    rest = load_number(rest_ptr, row)
    alpha = load_number(alpha_ptr, row)
    eta = load_number(eta_ptr, row)
    start2 = load_number(start2_ptr, row)
    rest2 = load_number(rest2_ptr, row)
    alpha2 = load_number(alpha2_ptr, row)
    eta2 = load_number(eta2_ptr, row)
    gamma = load_number(gamma_ptr, row)
    rho = load_number(rho_ptr, row)
    tau = load_number(tau_ptr, row)
    theta = load_number(theta_ptr, row)
    below = load_number(below_ptr, row)
    for block in range(begin, end, BLOCK):
        entry = block + tl.arange(0, BLOCK)
        column = tl.load(column_ptr + entry, mask=entry < end, other=-1)
        x = tl.load(logit_ptr + entry, mask=column >= 0, other=0.0)
        offs = column - first_column
        here = (column >= 0) & (offs >= 0) & (offs < columns)
        sparse = None
        if sparse_ptr is not None:
            sparse = tl.zeros((BLOCK,), dtype=tl.float32)
            for other in range(begin, end):
                same = column == tl.load(column_ptr + other)
                sparse += tl.where(same, tl.load(sparse_ptr + other), 0.0)
                here = here & ((same & (entry > other)) == 0)
        omega = None
        if kappa_ptr is not None and class_weights_ptr is not None:
            omega = tl.load(class_weights_ptr + offs, mask=here, other=0.0).to(tl.float32)
        log_q = None
        if teacher_ptr is not None:
            in_teacher = here & (offs < teacher_columns)
            y = load_row(
                teacher_ptr + row * teacher_stride, teacher_offset_ptr, teacher_bias_ptr, row, strip_stride, offs,
                in_teacher, teacher_scale, teacher_softcap, load_number(teacher_row_scale_ptr, row),
            )  # fmt: skip
            log_q = (y - tl.load(teacher_start_ptr + row)) + tl.load(teacher_rest_ptr + row)
            log_q = tl.where(in_teacher, log_q, float("-inf"))
        grad = logits_gradient(
            x, column == target, offs, omega, log_q, sparse, target_logit, beta, kappa, start, rest, alpha, eta,
            start2, rest2, alpha2, eta2, gamma, rho, tau, theta, below, logit_scale, softcap, row_scale, ratio2,
            columns2, log_beta, log_rest, tie, SECOND, False,
        )  # fmt: skip
        if begin_ptr is not None:
            tl.store(dlogits_ptr + entry, tl.where(here, grad, 0.0), mask=entry < end)
        else:
            tl.store(dlogits_ptr + row * stride + offs, grad.to(dlogits_ptr.dtype.element_ty), mask=here)
