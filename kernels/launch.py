"""Launching the kernels on torch tensors: grids, block sizes and warps, and nothing of losses or schedules."""

import functools
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .exp_logits import exp_logits_kernel
from .products import dhidden_kernel, dweight_kernel, join_parts_kernel
from .rows import copy_rows_kernel
from .scale import scale_kernel
from .strips import level_rows_kernel, merge_strips_kernel
from .tiles import FUSED, INTERPRETED, PRODUCT_TILE, WHOLE, Split, Tile, cdiv, exp_tile, power_of_2

# nats above a row's given offset that its exponentials may reach: e^60 times e^-60 stay well inside bf16's range
REACH = 60.0


HOPPER_MULTIPROCESSORS = 132  # what a plan for a GPU assumes where there is none to ask


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter runs programs one after the other; 4 of them still test the persistent loop
    if not torch.cuda.is_available():
        return HOPPER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs_of(tile: Tile, rows: int, columns: int, device: torch.device) -> int:
    """Programs of a persistent matmul: as many as are resident at a time, and no more than it has tiles."""
    tiles = cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n)
    return min(tile.per_multiprocessor * multiprocessors(device), tiles)


class Counted(NamedTuple):
    """How many rows of a call count, and where a chunk begins among them: rows behind are not computed."""

    count: torch.Tensor | None = None  # [] int64; None: all
    first_row: int = 0


ALL_ROWS = Counted()


class Strips(NamedTuple):
    """What the logits matmul leaves of each strip of columns, [strips, rows]; None what was not asked for."""

    offset: torch.Tensor
    sum: torch.Tensor
    shifted_sum: torch.Tensor | None
    weighted_sum: torch.Tensor | None
    top: torch.Tensor | None
    argmax: torch.Tensor | None  # int32
    sum2: torch.Tensor | None  # of a second softmax
    shifted_sum2: torch.Tensor | None

    @classmethod
    def empty(
        cls,
        rows: int,
        strips: int,
        device: torch.device,
        shifted: bool = False,
        weighted: bool = False,
        top: bool = False,
        second: bool = False,
        shifted2: bool = False,
    ) -> "Strips":
        def make(wanted: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
            return torch.empty(strips * rows, dtype=dtype, device=device) if wanted else None

        always = [torch.empty(strips * rows, dtype=torch.float32, device=device) for _ in range(2)]
        return cls(
            *always, make(shifted), make(weighted), make(top), make(top, torch.int32), make(second), make(shifted2)
        )  # fmt: skip

    def of_rows(self, rows: int, strips: int) -> "Strips":
        """The first of the buffer, for a chunk of so many rows."""
        return Strips(*(None if t is None else t[: strips * rows].view(strips, rows) for t in self))


def exp_logits(
    out: torch.Tensor | None,  # [rows, vocab] 16 bit, row stride a multiple of 8: exponentials, or fp16 relative logits
    strips: Strips,
    hidden: torch.Tensor,  # [rows, hidden] contiguous
    weight: torch.Tensor,  # [vocab, hidden] contiguous
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    row_offset: torch.Tensor | None,  # [rows] fp32: then exponentials are stored, else relative logits
    target: torch.Tensor | None,  # [rows] int64
    logit_scale: float | None,
    softcap: float | None,
    ratio2: float | None = None,
    columns2: int = 0,
    counted: Counted = ALL_ROWS,
    tile: Tile | None = None,
) -> None:
    rows, vocab = hidden.shape[0], weight.shape[0]
    tile = tile or exp_tile(hidden.shape[1])
    programs = programs_of(tile, rows, vocab, hidden.device)
    exp_logits_kernel[(programs,)](
        None if out is None else TensorDescriptor.from_tensor(out, [tile.block_m, tile.block_n // 2]),
        *strips,
        TensorDescriptor.from_tensor(hidden, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
        bias, class_weights, row_offset, target, counted.count,
        counted.first_row, rows, vocab, hidden.shape[1], columns2, logit_scale, softcap, ratio2,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        STRIP=tile.block_n // (strips.offset.shape[0] // cdiv(vocab, tile.block_n)),
        GROUP_M=tile.group_m, PROGRAMS=programs, REACH=REACH,
        EVEN_VOCAB=vocab % tile.block_n == 0, UPCAST=INTERPRETED, num_warps=tile.warps, num_stages=tile.stages, **FUSED,
    )  # fmt: skip


def merge_strips(
    lse: torch.Tensor | None,
    start: torch.Tensor,
    rest: torch.Tensor,
    logprob: torch.Tensor | None,
    entropy: torch.Tensor | None,
    weighted_sum: torch.Tensor | None,
    top: torch.Tensor | None,
    argmax: torch.Tensor | None,
    level: torch.Tensor | None,  # [rows] fp32
    strips: Strips,
    target_logit: torch.Tensor | None,
    target: torch.Tensor | None,
    columns: int,
    ratio: float | None = None,
    second: bool = False,
) -> None:
    """Statistics of the softmax over ``columns``; or of the second, its sums given as ``sum`` and ``shifted_sum``."""
    count, rows = strips.offset.shape
    block_rows, block_strips = 8, 512
    merge_strips_kernel[(cdiv(rows, block_rows),)](
        lse, start, rest, logprob, entropy, weighted_sum, top, argmax, level,
        *strips[:6], target_logit, target,
        rows, count, columns, ratio, SECOND=second, BLOCK_ROWS=block_rows, BLOCK_STRIPS=block_strips,
        num_warps=8, **FUSED,
    )  # fmt: skip


def level_rows(
    exp: torch.Tensor,  # [rows, vocab] 16 bit
    softmax_factor: torch.Tensor,
    target_factor: torch.Tensor,
    strips: Strips,
    strip: int,  # columns
    level: torch.Tensor,
    target_logit: torch.Tensor,
    start: torch.Tensor,
    rest: torch.Tensor,
    logprob: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    logit_scale: float | None,
    counted: Counted = ALL_ROWS,
) -> None:
    rows, vocab = exp.shape
    block_rows, splits = 16, 8
    count = strips.offset.shape[0]
    level_rows_kernel[(cdiv(rows, block_rows), splits)](
        exp, softmax_factor, target_factor,
        strips.offset, strips.sum, level, target_logit, start, rest, logprob, alpha, beta, counted.count,
        counted.first_row, rows, vocab, count, exp.stride(0), logit_scale,
        BLOCK_ROWS=block_rows, STRIP=strip, SPLITS=splits, num_warps=4, **FUSED,
    )  # fmt: skip


def copy_rows(
    out: torch.Tensor,  # [rows, hidden] contiguous
    source: torch.Tensor,  # [rows, hidden]
    target: torch.Tensor,  # [rows] int64, -1 where the row does not count
    factor: torch.Tensor | None,  # [rows] fp32
    order: torch.Tensor | None = None,  # [rows] int64, rows of ``source``; None: its first
) -> None:
    """``out = factor * source[order]``, 0 where a row does not count."""
    rows, hidden = out.shape
    block = min(power_of_2(hidden), 2048)
    copy_rows_kernel[(rows, cdiv(hidden, block))](
        out, source, target, factor, order, hidden, source.stride(0), source.stride(1),
        BLOCK=block, num_warps=4, **FUSED,
    )  # fmt: skip


class Factors(NamedTuple):
    """What makes gradients of products with exponentials: a factor per row, and the target's own term."""

    target: torch.Tensor | None = None  # [rows] int64, -1 where the row does not count
    softmax: torch.Tensor | None = None  # [rows] fp32
    at_target: torch.Tensor | None = None  # [rows] fp32


NO_FACTORS = Factors()


def dhidden(
    out: torch.Tensor,  # [rows, hidden], or with an order all of the call's [tokens, hidden]
    scratch: torch.Tensor | None,  # [split.units * TILE_ELEMENTS] fp32, or more
    grad: torch.Tensor,  # [rows, vocab] 16 bit
    weight: torch.Tensor,  # [vocab, hidden] contiguous
    factors: Factors = NO_FACTORS,
    order: torch.Tensor | None = None,  # [rows] int64, rows of ``out``
    counted: Counted = ALL_ROWS,
    add: bool = False,
    split: Split = WHOLE,
) -> None:
    """``out (+)= softmax * (grad @ weight) + at_target * weight[target]``"""
    (rows, vocab), hidden, tile = grad.shape, weight.shape[1], PRODUCT_TILE
    cut = split.parts > 1
    # whole turns are of all multiprocessors
    programs = multiprocessors(grad.device) if cut else programs_of(tile, rows, hidden, grad.device)
    divided = {"PARTS": split.parts, "UNITS": split.units, "ADD": add, "PROGRAMS": programs}
    sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "GROUP_M": tile.group_m}
    dhidden_kernel[(programs,)](
        out, scratch if cut else None,
        TensorDescriptor.from_tensor(grad, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.block_k, tile.block_n]),
        weight, counted.count, order, *factors, counted.first_row, rows, vocab, hidden,
        **divided, **sizes, BLOCK_K=tile.block_k, UPCAST=INTERPRETED,
        num_warps=tile.warps, num_stages=tile.stages, **FUSED,
    )  # fmt: skip
    if cut:
        tiles, joined = cdiv(rows, tile.block_m) * cdiv(hidden, tile.block_n), min(16, tile.block_m)
        # how many tiles are cut where fewer rows count, the device knows
        left = tiles % programs if counted.count is None else min(tiles, programs - 1)
        join_parts_kernel[(left, tile.block_m // joined)](
            out, scratch, weight, counted.count, order, *factors, counted.first_row, rows, hidden,
            **divided, **sizes, ROWS=joined, num_warps=4, **FUSED,
        )  # fmt: skip


def dweight(
    out: torch.Tensor,  # [vocab, hidden] contiguous
    grad: torch.Tensor,  # [rows, vocab] 16 bit
    hidden: torch.Tensor,  # [rows, hidden] contiguous
    first: bool,
    counted: Counted = ALL_ROWS,
) -> None:
    """``out (+)= grad.T @ hidden``, stored rather than added where ``first``"""
    (rows, vocab), width, tile = grad.shape, hidden.shape[1], PRODUCT_TILE
    programs = programs_of(tile, vocab, width, grad.device)
    dweight_kernel[(programs,)](
        TensorDescriptor.from_tensor(out, [tile.block_m, tile.block_n // 2]),
        TensorDescriptor.from_tensor(grad, [tile.block_k, tile.block_m]),
        TensorDescriptor.from_tensor(hidden, [tile.block_k, tile.block_n]),
        counted.count, counted.first_row, rows, vocab, width,
        ADD=not first, BY_MEMORY=out.dtype == torch.float32 and not INTERPRETED,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        PROGRAMS=programs, UPCAST=INTERPRETED, num_warps=tile.warps, num_stages=tile.stages, **FUSED,
    )  # fmt: skip


def scale(out: torch.Tensor, source: torch.Tensor, factor: torch.Tensor) -> None:
    """``out = source * factor`` for contiguous tensors of one shape; ``out`` may be ``source``."""
    block = 1024 if INTERPRETED else 4096
    programs = min(8 * multiprocessors(source.device), cdiv(source.numel(), block))
    scale_kernel[(programs,)](
        out, source, factor, source.numel(), cdiv(source.numel(), programs * block),
        PROGRAMS=programs, BLOCK=block, IN_PLACE=out.data_ptr() == source.data_ptr(), num_warps=8, **FUSED,
    )  # fmt: skip
