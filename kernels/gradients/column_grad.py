"""Gradients of few columns of each row, by the identity of ``identity.py``.

At some columns [rows, count] from exact logits, written over dlogits [rows, columns], ``column_grad_kernel``.

Where a row's softmax is over a set of columns, [n] fp32, one for each entry of a set, ``kept_grad_kernel`` and
``kept_dhidden_kernel``:

    dhidden[i] = sum_{begin[i] <= e < end[i]} dlogit[e] weight[column[e]]
"""

import triton.language as tl

from ..common.launcher import kernel
from ..common.transform import load_number, load_row
from .identity import logits_gradient


@kernel
def column_grad_kernel(
    # in and out
    dlogits_ptr,  # [rows, columns]
    # inputs
    logit_ptr,  # [rows, count] fp32, exact
    ids_ptr,  # [rows, count] int64, -1 for none
    sparse_ptr,  # [rows, count] fp32, what each adds to its column's gradient
    class_weights_ptr,  # [columns] or None for 1
    target_ptr,  # [rows] int64
    target_logit_ptr,  # [rows] fp32, like all that follow
    beta_ptr,  # or None
    kappa_ptr,  # or None
    start_ptr,  # log p = (x - start) + rest
    rest_ptr,
    alpha_ptr,  # or None, with eta
    eta_ptr,  # or None
    start2_ptr,  # or None
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
    """Overwrites the gradient of some columns with what exact logits give: ``p - t`` out of a rounded ``p`` would lose
    everything as the student nears the teacher. A column that is named twice gets both terms, once."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    column = tl.load(ids_ptr + row * count + k, mask=k < count, other=-1)
    x = tl.load(logit_ptr + row * count + k, mask=k < count, other=0.0)
    sparse = tl.zeros((BLOCK,), dtype=tl.float32)
    first = k < count
    for other in range(0, count):
        same = column == tl.load(ids_ptr + row * count + other)
        sparse += tl.where(same, tl.load(sparse_ptr + row * count + other), 0.0)
        first = first & ((same & (k > other)) == 0)
    target = tl.load(target_ptr + row)
    offs = column - first_column
    here = first & (column >= 0) & (offs >= 0) & (offs < columns)
    at = dlogits_ptr + row * stride + offs
    row_scale = load_number(row_scale_ptr, row)
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
        x, column == target, offs, omega, log_q, sparse, load_number(target_logit_ptr, row),
        load_number(beta_ptr, row), load_number(kappa_ptr, row), load_number(start_ptr, row),
        load_number(rest_ptr, row), load_number(alpha_ptr, row), load_number(eta_ptr, row),
        load_number(start2_ptr, row), load_number(rest2_ptr, row), load_number(alpha2_ptr, row),
        load_number(eta2_ptr, row), load_number(gamma_ptr, row), load_number(rho_ptr, row), load_number(tau_ptr, row),
        load_number(theta_ptr, row), load_number(below_ptr, row), logit_scale, softcap, row_scale, ratio2, columns2,
        log_beta, log_rest, tie, SECOND, False,
    )  # fmt: skip
    tl.store(at, grad.to(dlogits_ptr.dtype.element_ty), mask=here)


@kernel
def kept_grad_kernel(
    # outputs
    dlogit_ptr,  # [n] fp32, of raw logits
    # inputs
    logit_ptr,  # [n] fp32
    column_ptr,  # [n] int32, -1 for none
    begin_ptr,  # [rows] int64: where a row's entries begin
    end_ptr,  # [rows] int64: and end
    target_ptr,  # [rows] int64
    target_logit_ptr,  # [rows] fp32, like all that follow
    beta_ptr,  # or None
    start_ptr,  # log p = (x - start) + rest
    rest_ptr,
    alpha_ptr,  # or None, with eta
    eta_ptr,  # or None
    start2_ptr,  # at the second temperature, or None with all that follow
    rest2_ptr,
    alpha2_ptr,
    eta2_ptr,  # or None
    # scalars
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32 or None
    ratio2,
    BLOCK: tl.constexpr,
):
    """Gradients of the logits of columns that rows keep, by the identity."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(begin_ptr + row), tl.load(end_ptr + row)
    target = tl.load(target_ptr + row)
    row_scale = load_number(row_scale_ptr, row)
    beta = load_number(beta_ptr, row)
    alpha = load_number(alpha_ptr, row)
    eta = load_number(eta_ptr, row)
    start2 = load_number(start2_ptr, row)
    rest2 = load_number(rest2_ptr, row)
    alpha2 = load_number(alpha2_ptr, row)
    eta2 = load_number(eta2_ptr, row)
    target_logit = tl.load(target_logit_ptr + row)
    start, rest = tl.load(start_ptr + row), tl.load(rest_ptr + row)
    for first in range(begin, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        column = tl.load(column_ptr + entry, mask=entry < end, other=-1)
        here = column >= 0
        x = tl.load(logit_ptr + entry, mask=here, other=0.0)
        grad = logits_gradient(
            x, here & (column == target), column, None, None, None, target_logit, beta, None, start, rest, alpha, eta,
            start2, rest2, alpha2, eta2, None, None, None, None, None, logit_scale, softcap, row_scale, ratio2,
            None, None, None, None, False, False,
        )  # fmt: skip
        tl.store(dlogit_ptr + entry, tl.where(here, grad, 0.0), mask=entry < end)


@kernel
def kept_dhidden_kernel(
    # outputs
    dhidden_ptr,  # [rows, hidden], of rows that keep columns only
    # inputs
    dlogit_ptr,  # [n] fp32
    weight_ptr,  # [vocab, hidden]
    column_ptr,  # [n] int32, -1 for none
    begin_ptr,  # [rows] int64: where a row's entries begin
    end_ptr,  # [rows] int64: and end
    # sizes
    hidden,
    weight_row_stride,
    weight_column_stride,
    FILL: tl.constexpr,  # 0 where a row keeps none, instead of what is there
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(begin_ptr + row), tl.load(end_ptr + row)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < hidden
    if not FILL:
        inside = offs < tl.where(end > begin, hidden, 0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(begin, end, AT_ONCE):
        entry = first + tl.arange(0, AT_ONCE)
        column = tl.load(column_ptr + entry, mask=entry < end, other=-1).to(tl.int64)
        g = tl.load(dlogit_ptr + entry, mask=column >= 0, other=0.0)
        mask = (column >= 0)[:, None] & inside[None, :]
        at = weight_ptr + column[:, None] * weight_row_stride + offs.to(tl.int64)[None, :] * weight_column_stride
        w = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(w * g[:, None], 0)
    at = dhidden_ptr + row * hidden + offs
    tl.store(at, total.to(dhidden_ptr.dtype.element_ty), mask=inside)
