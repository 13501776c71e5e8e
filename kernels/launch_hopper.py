"""Launching the kernels for Hopper GPUs, where Triton has the Gluon that they are written in."""

import functools

import torch
import triton

from .tiles import HOPPER_LOGITS, INTERPRETED, HopperTile, cdiv, hopper_tile

# Gluon is experimental and changes from one version of Triton to the next: these are the ones that were tried
KNOWN_TRITON = ("3.6.",)
HAS_GLUON = not INTERPRETED and triton.__version__.startswith(KNOWN_TRITON)
if HAS_GLUON:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .hopper_logits import hopper_exp_logits_kernel
    from .hopper_products import hopper_dweight_kernel


@functools.cache
def runs_hopper_products(device: torch.device) -> bool:
    if not (HAS_GLUON and device.type == "cuda" and torch.cuda.is_available()):
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def hopper_dweight(
    out: torch.Tensor,  # [vocab, hidden] contiguous, of grad's dtype or fp32
    grad: torch.Tensor,  # [rows, vocab] 16 bit, row stride a multiple of 8
    hidden: torch.Tensor,  # [rows, hidden] contiguous, of grad's dtype
    first: bool,
    count: torch.Tensor | None,  # [] int64
    first_row: int,
    multiprocessors: int,
    tile: HopperTile | None = None,
) -> None:
    """``out (+)= grad.T @ hidden``, stored rather than added where ``first``"""
    tile = tile or hopper_tile(out.element_size())
    (rows, vocab), width = grad.shape, hidden.shape[1]
    programs = min(multiprocessors, cdiv(vocab, tile.block_m) * cdiv(width, tile.block_n))
    half = tile.block_m // 2
    hopper_dweight_kernel[(programs,)](
        descriptor(out, half, tile.block_n),
        descriptor(out, half, 128 // out.element_size()),
        descriptor(grad, tile.block_k, half),
        descriptor(hidden, tile.block_k, tile.block_n),
        count, first_row, rows, vocab, width,
        ADD=not first, STAGES=tile.stages, LAG=tile.lag, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m, PROGRAMS=programs, REGISTERS=tile.registers, num_warps=4, maxnreg=tile.average_registers,
    )  # fmt: skip


def hopper_exp_logits(
    out: torch.Tensor | None,  # [rows, vocab] 16 bit, row stride a multiple of 8
    strip_offset: torch.Tensor,  # [strips, rows] fp32, as strip_sum
    strip_sum: torch.Tensor,
    hidden: torch.Tensor,  # [rows, hidden] contiguous, of out's dtype
    weight: torch.Tensor,  # [vocab, hidden] contiguous, likewise
    row_offset: torch.Tensor | None,  # [rows] fp32, with ``out``; else each strip's own maximum
    target: torch.Tensor,  # [rows] int64
    count: torch.Tensor | None,  # [] int64
    first_row: int,
    logit_scale: float | None,
    reach: float,
    multiprocessors: int,
    tile: HopperTile = HOPPER_LOGITS,
) -> None:
    """``exp(logit_scale * hidden @ weight.T - offset)`` without the targets' columns, and its strips' sums"""
    (rows, width), vocab, half = hidden.shape, weight.shape[0], tile.block_m // 2
    programs = min(multiprocessors, cdiv(rows, tile.block_m) * cdiv(vocab, tile.block_n))
    hopper_exp_logits_kernel[(programs,)](
        None if out is None else descriptor(out, half, tile.block_n), strip_offset, strip_sum,
        descriptor(hidden, tile.block_m, tile.block_k), descriptor(weight, tile.block_n, tile.block_k),
        row_offset, target, count, first_row, rows, vocab, width, logit_scale,
        STAGES=tile.stages, LAG=tile.lag, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        PROGRAMS=programs, REACH=reach, EVEN_VOCAB=vocab % tile.block_n == 0, REGISTERS=tile.registers, num_warps=4,
        maxnreg=tile.average_registers,
    )  # fmt: skip


def descriptor(tensor: torch.Tensor, *block: int) -> "TensorDescriptor":
    return TensorDescriptor.from_tensor(tensor, list(block), shared_layout(tensor.dtype, block))


@functools.cache
def shared_layout(dtype: torch.dtype, block: tuple[int, ...]) -> "gl.NVMMASharedLayout":
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block), element)
