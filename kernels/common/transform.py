"""From a raw logit to the logit that the softmax sees, as functions of values."""

import triton
import triton.language as tl

log2_e = tl.constexpr(1.4426950408889634)
ln_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    # 1 - 2 / (e^2x + 1): saturates to 1 and -1 without overflow; near 0 the subtraction would cancel, so a series there
    series = x * (1.0 - x * x * (1.0 / 3.0 - x * x * (2.0 / 15.0 - x * x * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def transform_logits(
    x,  # hidden @ weight.T + bias, fp32
    logit_scale,  # float or None for 1
    softcap,  # float or None for no cap
    row_scale,  # what a row's logits are multiplied by at last; None for 1
):
    if logit_scale is not None:
        x = x * logit_scale
    if softcap is not None:
        x = softcap * tanh(x / softcap)
    if row_scale is not None:
        x = x * row_scale
    return x


@triton.jit
def transform_derivative(
    x,  # the transformed logit
    logit_scale,
    softcap,
    row_scale,
):
    """d transformed / d raw, from the transformed logit; 1.0 where there is no transform."""
    slope = 1.0
    if softcap is not None:
        capped = x / softcap
        if row_scale is not None:
            capped = capped / row_scale
        slope = 1.0 - capped * capped
    if logit_scale is not None:
        slope = slope * logit_scale
    if row_scale is not None:
        slope = slope * row_scale
    return slope


@triton.jit
def part_below(
    p,
    q,
    tie,  # relative difference of probabilities that count as equal; None for 0
):
    """``p (1 - sign(p - q))``"""
    near = 0.0 * p
    if tie is not None:
        near = tl.maximum(p, q) * tie
    return tl.where(p - q > near, 0.0, tl.where(q - p > near, 2.0 * p, p))


@triton.jit
def log_mixture(
    log_a,  # log-probabilities
    log_b,
    log_share_a,  # logarithms of the shares, which add up to 1
    log_share_b,
):
    """``log(share_a exp(log_a) + share_b exp(log_b))``, -inf where both are."""
    a = log_a + log_share_a
    b = log_b + log_share_b
    largest = tl.maximum(a, b)
    offset = tl.where(largest == float("-inf"), 0.0, largest)
    return offset + tl.log2(tl.exp2((a - offset) * log2_e) + tl.exp2((b - offset) * log2_e)) * ln_2
