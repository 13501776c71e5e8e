"""The last factor of gradients [numel], known only in backward: ``out = in * factor * one_or_nan``.

In place, or into the dtype that a gradient should have.
"""

import triton
import triton.language as tl

from ..common.kernel import kernel


@triton.jit
def scale_part(out_ptr, in_ptr, factor, numel, steps, program, programs, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        numel = numel // 16 * 16  # the compiler sees it, and reads vectors
    offs = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(0, steps):
        value = tl.load(in_ptr + offs, mask=offs < numel).to(tl.float32) * factor
        tl.store(out_ptr + offs, value.to(out_ptr.dtype.element_ty), mask=offs < numel)
        offs += programs.to(tl.int64) * BLOCK


@kernel
def scale_kernel(
    # outputs
    out_ptr,  # [numel], may be the input itself
    more_ptr,  # [more_numel] to be scaled in place as well, or None
    # inputs
    in_ptr,  # [numel]
    factor_ptr,  # [] on the device
    one_or_nan_ptr,  # [] a second factor, or None
    # sizes
    numel,
    more_numel,
    steps,
    more_steps,
    programs,  # that scale the first
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,  # numel is a multiple of 16
    MORE_EVEN: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    factor = tl.load(factor_ptr).to(tl.float32)
    if one_or_nan_ptr is not None:
        factor *= tl.load(one_or_nan_ptr)
    # in place there is nothing to do for a factor of 1, which is what nearly every step asks for
    if (not IN_PLACE) or factor != 1.0:
        program, all_programs = tl.program_id(0), tl.num_programs(0)
        if more_ptr is None:
            scale_part(out_ptr, in_ptr, factor, numel, steps, program, all_programs, BLOCK, EVEN)
        elif program < programs:
            scale_part(out_ptr, in_ptr, factor, numel, steps, program, programs, BLOCK, EVEN)
        else:
            more, of_more = program - programs, all_programs - programs
            scale_part(more_ptr, more_ptr, factor, more_numel, more_steps, more, of_more, BLOCK, MORE_EVEN)
