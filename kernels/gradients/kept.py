"""Gradients where a row's softmax is over a set of columns per row.

    dlogit[e] by the identity of ``identity.py``;  dhidden[i] = sum_{begin[i] <= e < end[i]} dlogit[e] weight[column[e]]

Logits' gradients are [n] fp32, one for each entry of a set.
"""

import triton.language as tl

from ..common.kernel import kernel
from ..common.stored import load_number
from .identity import logits_gradient


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
    """The identity, for the columns of each row that are there."""
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
