"""Sums over columns out of the parts that programs of ``row_grad`` left."""

import triton
import triton.language as tl

from ..common.kernel import kernel


@triton.jit
def sum_of_parts(part_ptr, offs_row, in_rows, count, stride, BLOCK_ROWS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for start in range(0, count, BLOCK_PARTS):
        offs = start + tl.arange(0, BLOCK_PARTS)
        at = part_ptr + offs[:, None].to(tl.int64) * stride + offs_row[None, :]
        total += tl.sum(tl.load(at, mask=(offs < count)[:, None] & in_rows[None, :], other=0.0), 0)
    return total


@kernel
def add_parts_kernel(
    # outputs
    forward_kl_ptr,  # [rows] fp32 or None
    teacher_entropy_ptr,  # [rows] fp32 or None
    # inputs
    forward_kl_part_ptr,  # [count, rows] fp32 or None
    teacher_entropy_part_ptr,
    # sizes
    count,
    rows,
    parts_stride,  # from part to part
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < rows
    if forward_kl_ptr is not None:
        total = sum_of_parts(forward_kl_part_ptr, offs_row, in_rows, count, parts_stride, BLOCK_ROWS, BLOCK_PARTS)
        tl.store(forward_kl_ptr + offs_row, total, mask=in_rows)
    if teacher_entropy_ptr is not None:
        total = sum_of_parts(teacher_entropy_part_ptr, offs_row, in_rows, count, parts_stride, BLOCK_ROWS, BLOCK_PARTS)
        tl.store(teacher_entropy_ptr + offs_row, total, mask=in_rows)
