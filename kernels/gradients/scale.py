"""The last factor of a gradient, known only in backward: in place, or into the dtype that the gradient should have."""

import triton.language as tl

from ..common.kernel import kernel


@kernel
def scale_kernel(
    # outputs
    out_ptr,  # [numel], may be the input itself
    # inputs
    in_ptr,  # [numel]
    factor_ptr,  # [] fp32, on the device
    # sizes
    numel,
    steps,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,  # numel is a multiple of 16
    IN_PLACE: tl.constexpr,
):
    factor = tl.load(factor_ptr)
    # in place there is nothing to do for a factor of 1, which is what nearly every step asks for
    if (not IN_PLACE) or factor != 1.0:
        if EVEN:
            numel = numel // 16 * 16  # the compiler sees it, and reads vectors
        offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        for _ in range(0, steps):
            value = tl.load(in_ptr + offs, mask=offs < numel).to(tl.float32) * factor
            tl.store(out_ptr + offs, value.to(out_ptr.dtype.element_ty), mask=offs < numel)
            offs += tl.num_programs(0).to(tl.int64) * BLOCK
