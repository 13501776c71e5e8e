"""The gradient of raw logits, as a function of values: every kernel that makes gradients calls it.

    g_j = p_j (alpha + eta log p_j) + [the same at a second temperature] - beta 1[j = target] - kappa omega_j
        + c s_j of each sum over the vocabulary, s its slope (``common/sums.py``)

then times the slope of scale and cap. A term whose factor is None is absent, and no code is generated for it.
"""

import triton
import triton.language as tl

from ..common.transform import log2_e, transform_derivative


@triton.jit
def softmax_term(
    log_p,
    alpha,
    eta,  # or None for 0
):
    """``p (alpha + eta log p)``, 0 where p is, nan where p is."""
    p = tl.exp2(log_p * log2_e)
    return tl.where(p != 0.0, p * (alpha + eta * log_p), 0.0) if eta is not None else p * alpha


@triton.jit
def fused_softmax_term(
    x,
    start,
    rest,
    alpha,
):
    """``p alpha`` with one multiply-add: off by 1e-7 |start| of p, which 16 bits do not show."""
    shift = tl.broadcast_to((rest - start) * log2_e, x.shape)
    return alpha * tl.exp2(tl.fma(x, tl.full(x.shape, log2_e, tl.float32), shift))


@triton.jit
def logits_gradient(
    # per column: a block, or columns of one row
    x,  # logits as the softmax sees them
    is_target,  # None where no column can be the target
    offs,  # of the columns
    omega,  # None for 1
    log_q,  # the teacher's log-probabilities, -inf where it has no column; None without one
    inside,  # where it has one; None without a teacher
    added,  # what else the gradient has, before the slope; None for nothing
    # per row, each None where there is none
    target_logit,
    beta,
    kappa,
    start,  # log p = (x - start) + rest; None with rest where x and target_logit are log p
    rest,
    alpha,
    eta,
    start2,  # at the second temperature
    rest2,
    alpha2,
    eta2,
    vectors,  # a tuple of those that ADD_TERMS reads
    # scalars
    logit_scale,
    softcap,
    row_scale,
    ratio2,
    columns2,  # that the second softmax is over; None for all
    scalars,  # a tuple of those that ADD_TERMS reads
    tie,  # as of ``part_below``, or None
    ADD_TERMS: tl.constexpr,  # of sums over the vocabulary, or None
    ROUNDED: tl.constexpr,  # to 16 bits, and so p may be fused_softmax_term's
):
    """The identity times the slope; anything where a row does not count."""
    # the target's column from its exact logit: p - 1 of a rounded p loses everything as p nears 1
    if is_target is not None:
        x = tl.where(is_target, target_logit, x)
    log_p = x
    if start is not None:
        log_p = (x - start) + rest
    grad = added
    if alpha is not None:
        term = fused_softmax_term(x, start, rest, alpha) if ROUNDED and eta is None else softmax_term(log_p, alpha, eta)
        grad = term if grad is None else grad + term
    log_p2 = log_p
    if start2 is not None:
        x2 = x
        if ratio2 is not None:
            x2 = x * ratio2
        log_p2 = (x2 - start2) + rest2
        if columns2 is not None:
            log_p2 = tl.where(offs < columns2, log_p2, float("-inf"))
        if alpha2 is not None:
            if ROUNDED and eta2 is None:
                term2 = fused_softmax_term(x2, start2, rest2, alpha2)
                if columns2 is not None:
                    term2 = tl.where(offs < columns2, term2, 0.0)
            else:
                term2 = softmax_term(log_p2, alpha2, eta2)
            grad = term2 if grad is None else grad + term2
    if grad is None:
        grad = tl.zeros(x.shape, dtype=tl.float32)
    if beta is not None and is_target is not None:
        grad = tl.where(is_target, grad - beta, grad)
    if kappa is not None:
        grad -= kappa if omega is None else kappa * omega
    if ADD_TERMS is not None:
        inside2 = None
        if columns2 is not None:
            inside2 = offs < columns2
        grad = ADD_TERMS(grad, log_p, log_p2, log_q, inside, inside2, vectors, scalars, tie)
    return grad * transform_derivative(x, logit_scale, softcap, row_scale)
