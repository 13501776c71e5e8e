"""Functions of numbers for kernels that are written by programs: as exact as PyTorch's own."""

import triton
import triton.language as tl

from .tiles import INTERPRETED

if INTERPRETED:

    @triton.jit
    def expm1(x):
        # of no use on a GPU: exact enough where numpy's functions are exact
        y = tl.exp(x)
        near = x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0)))))
        return tl.where(tl.abs(x) < 0.05, near, y - 1.0)

    @triton.jit
    def log1p(x):
        y = 1.0 + x
        return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))

    @triton.jit
    def power(x, y):
        return tl.exp2(y * tl.log2(x))  # of what is not negative

    @triton.jit
    def exp(x):
        return tl.exp(x)

    @triton.jit
    def log(x):
        return tl.log(x)
else:
    from triton.language.extra import libdevice

    exp, log, expm1, log1p, power = libdevice.exp, libdevice.log, libdevice.expm1, libdevice.log1p, libdevice.pow


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + exp(-x))
