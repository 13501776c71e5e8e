"""Logits to the gradient of raw logits, in place: the gradient identity, each term absent where its pointer is None.

    g_j = p_j (alpha + eta log p_j) + [the same at a second temperature] - beta 1[j = target] - kappa omega_j
        - gamma q_j - rho p_j log q_j + tau p_j (log p_j - log m_j) + theta p_j sign(p_j - q_j)

with q a teacher's softmax and m a mixture of p and q; then times the slope of scale and cap.
"""

import triton
import triton.language as tl

from ..common.stored import load_block
from ..common.transform import log2_e, log_mixture, softmax_term, transform_derivative


@triton.jit
def teacher_terms(
    log_p,
    log_q,
    gamma,  # or None, like all that follow
    rho,
    tau,
    theta,
    LOG_BETA: tl.constexpr,
    LOG_REST: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """The second line of the identity."""
    p, q = tl.exp2(log_p * log2_e), tl.exp2(log_q * log2_e)
    grad = tl.zeros(p.shape, dtype=tl.float32)
    if gamma is not None:
        grad -= gamma * q
    if rho is not None:
        grad -= tl.where(p > 0.0, rho * p * tl.maximum(log_q, FLOOR), 0.0)
    if tau is not None:
        grad += tl.where(p > 0.0, tau * p * (log_p - log_mixture(log_q, log_p, LOG_BETA, LOG_REST)), 0.0)
    if theta is not None:
        grad += theta * tl.where(p > q, p, tl.where(p < q, -p, 0.0))
    return grad


@triton.jit
def row_grad_kernel(
    # outputs
    dlogits_ptr,  # [rows, columns], may share the bytes of logits, in a type no wider
    # inputs
    logits_ptr,  # [rows, columns]: raw, or fp16 relative to the strips' offsets
    strip_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    bias_ptr,  # [columns] or None
    class_weights_ptr,  # [columns] or None for 1
    target_ptr,  # [rows] int64, -1 where the row does not count
    target_logit_ptr,  # [rows] fp32, like all that follow
    beta_ptr,  # or None
    kappa_ptr,  # or None
    start_ptr,  # log p = (x - start) + rest
    rest_ptr,
    alpha_ptr,  # or None, with eta
    eta_ptr,  # or None
    start2_ptr,  # at the second temperature, or None
    rest2_ptr,
    alpha2_ptr,
    eta2_ptr,  # or None
    teacher_ptr,  # [rows, teacher_columns], or None
    teacher_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    teacher_bias_ptr,
    teacher_start_ptr,
    teacher_rest_ptr,
    gamma_ptr,  # or None
    rho_ptr,  # or None
    tau_ptr,  # or None
    theta_ptr,  # or None
    # sizes
    rows,
    columns,
    first_column,  # of these columns in the vocabulary
    columns2,  # of these that the second softmax is over
    teacher_columns,  # of these that the teacher has
    logits_stride,  # elements from row to row
    dlogits_stride,
    teacher_stride,
    # scalars
    logit_scale,
    softcap,
    ratio2,  # of the second temperature, inverse, to the first; float or None for 1
    teacher_scale,
    teacher_softcap,
    SECOND: tl.constexpr,  # p beside the teacher is of the second temperature
    LOG_BETA: tl.constexpr,
    LOG_REST: tl.constexpr,
    FLOOR: tl.constexpr,
    COLUMN_PROGRAMS: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # STRIP where logits are relative
):
    column_program = tl.program_id(0) % COLUMN_PROGRAMS
    offs_row = (tl.program_id(0) // COLUMN_PROGRAMS) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < rows
    wide_row = offs_row.to(tl.int64)[:, None]
    target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1)[:, None]
    counts = target >= 0
    target = (target - first_column).to(tl.int32)
    target_logit = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
    # per row, and so before the loop over columns
    row_start = tl.load(start_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
    row_rest = tl.load(rest_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
    if alpha_ptr is not None:
        alpha = tl.load(alpha_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
        if eta_ptr is not None:
            eta = tl.load(eta_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
    if kappa_ptr is not None:
        kappa = tl.load(kappa_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
    if start2_ptr is not None:
        start2 = tl.load(start2_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
        rest2 = tl.load(rest2_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
        if alpha2_ptr is not None:
            alpha2 = tl.load(alpha2_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
            if eta2_ptr is not None:
                eta2 = tl.load(eta2_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
    if teacher_ptr is not None:
        teacher_start = tl.load(teacher_start_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
        teacher_rest = tl.load(teacher_rest_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
        gamma = None
        rho = None
        tau = None
        theta = None
        if gamma_ptr is not None:
            gamma = tl.load(gamma_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
        if rho_ptr is not None:
            rho = tl.load(rho_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
        if tau_ptr is not None:
            tau = tl.load(tau_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
        if theta_ptr is not None:
            theta = tl.load(theta_ptr + offs_row, mask=in_rows, other=0.0)[:, None]
    for start in range(column_program * BLOCK, columns, COLUMN_PROGRAMS * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        in_columns = offs < columns
        mask = in_rows[:, None] & in_columns[None, :]
        x = load_block(
            logits_ptr, strip_offset_ptr, bias_ptr, offs_row, in_rows, rows, logits_stride, start, offs, in_columns,
            logit_scale, softcap, STRIP,
        )  # fmt: skip
        # the target's column from its exact logit: p - 1 out of a rounded p would lose everything as p nears 1
        is_target = offs[None, :] == target
        x = tl.where(is_target, target_logit, x)
        grad = tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32)
        log_p = (x - row_start) + row_rest
        if alpha_ptr is not None:
            if eta_ptr is not None:
                grad += softmax_term(log_p, alpha, eta)
            else:
                grad += softmax_term(log_p, alpha, None)
        if start2_ptr is not None:
            x2 = x
            if ratio2 is not None:
                x2 = x * ratio2
            log_p2 = (x2 - start2) + rest2
            log_p2 = tl.where(offs[None, :] < columns2, log_p2, float("-inf"))
            if alpha2_ptr is not None:
                if eta2_ptr is not None:
                    grad += softmax_term(log_p2, alpha2, eta2)
                else:
                    grad += softmax_term(log_p2, alpha2, None)
        if beta_ptr is not None:
            grad = tl.where(is_target, grad - beta, grad)
        if kappa_ptr is not None:
            if class_weights_ptr is not None:
                omega = tl.load(class_weights_ptr + offs, mask=in_columns, other=0.0).to(tl.float32)
                grad -= kappa * omega[None, :]
            else:
                grad -= kappa
        if teacher_ptr is not None:
            in_teacher = in_rows[:, None] & (offs < teacher_columns)[None, :]
            y = load_block(
                teacher_ptr, teacher_offset_ptr, teacher_bias_ptr, offs_row, in_rows, rows, teacher_stride, start, offs,
                offs < teacher_columns, teacher_scale, teacher_softcap, STRIP,
            )  # fmt: skip
            log_q = (y - teacher_start) + teacher_rest
            log_q = tl.where(in_teacher, log_q, float("-inf"))
            lp = log_p2 if SECOND else log_p
            grad += teacher_terms(lp, log_q, gamma, rho, tau, theta, LOG_BETA, LOG_REST, FLOOR)
        # selection: where a row does not count a teacher's logits, or a bias, may be nan
        grad = tl.where(counts, grad * transform_derivative(x, logit_scale, softcap), 0.0)
        # a narrower dlogits[j] lands on the bytes of logits[j / 2]: all of the block must have been read
        tl.debug_barrier()
        at = dlogits_ptr + wide_row * dlogits_stride + offs[None, :]
        tl.store(at, grad.to(dlogits_ptr.dtype.element_ty), mask=mask)
