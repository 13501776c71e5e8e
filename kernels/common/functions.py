"""Elementwise functions that generated kernels call, as accurate as PyTorch's."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ...core import tiles

# the interpreter lacks libdevice; its own functions are accurate
INTERPRETED = tl.constexpr(tiles.INTERPRETED)


@triton.jit
def exp(x):
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def log(x):
    if INTERPRETED:
        return tl.log(x)
    else:
        return libdevice.log(x)


@triton.jit
def expm1(x):
    if INTERPRETED:
        near_zero = x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0)))))
        return tl.where(tl.abs(x) < 0.05, near_zero, tl.exp(x) - 1.0)
    else:
        return libdevice.expm1(x)


@triton.jit
def log1p(x):
    if INTERPRETED:
        u = 1.0 + x
        return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))
    else:
        return libdevice.log1p(x)


@triton.jit
def power(x, y):
    """``x ** y``; under the interpreter for x >= 0 only."""
    if INTERPRETED:
        result = tl.exp2(y.to(tl.float64) * tl.log2(x.to(tl.float64))).to(tl.float32)
        return tl.where(y == 0.0, 1.0, result)
    else:
        return libdevice.pow(x, y)


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def logaddexp(x, y):
    largest = tl.where((x > y) | (x != x), x, y)
    # a difference of equal infinities would be nan
    neg_difference = tl.where(x == y, 0.0, -tl.abs(x - y))
    return largest + log1p(exp(neg_difference))
