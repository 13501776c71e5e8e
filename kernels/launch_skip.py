"""Launching the kernels that skip tiles of exponentials."""

from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import ALL_ROWS, Counted, Factors, Strips, multiprocessors
from .skip_means import strip_means_kernel, strip_shares_kernel
from .skip_products import skip_dhidden_kernel, skip_dweight_kernel
from .skip_tiles import (
    add_totals_kernel,
    list_kept_kernel,
    longest_first_kernel,
    threshold_kernel,
    tile_masses_kernel,
)
from .target_terms import finish_dhidden_kernel
from .tiles import FUSED, INTERPRETED, RELATIVE_STRIP, SKIP_STEP, SKIP_TILE, Tile, cdiv, power_of_2


class Lists(NamedTuple):
    """Kept items of lines of tiles: of each line first, how many, and the lines with the most first; int32."""

    items: torch.Tensor  # [lines, items]
    length: torch.Tensor  # [lines]
    order: torch.Tensor  # [lines]


class Tiles(NamedTuple):
    """Which tiles of a chunk are kept, and what the others held."""

    kept: torch.Tensor  # [row blocks, strips] int32
    moved: torch.Tensor  # [strips, rows] 16 bit, in the units of a row's exponentials
    moved_share: torch.Tensor  # [row blocks, strips] fp32: probability, summed over a tile's rows
    by_rows: Lists  # strips of each row block
    by_strips: Lists  # row blocks of each strip
    next: torch.Tensor  # [2] int32: how many tiles of either product have been taken, which so is made once


def choose_tiles(
    strips: Strips,
    level: torch.Tensor,  # [rows] fp32
    target_logit: torch.Tensor,
    start: torch.Tensor,
    rest: torch.Tensor,
    softmax_factor: torch.Tensor,
    target_factor: torch.Tensor,
    dtype: torch.dtype,  # of the exponentials
    worth: torch.Tensor,  # [strips] fp32: what a mass squared counts for
    missed: float,
    counted: Counted = ALL_ROWS,
) -> Tiles:
    """Skips tiles whose row masses, times the rows' coefficients, are small beside the gradient at the targets.

    Masses squared times ``worth``, summed over all skipped tiles, stay within ``missed ** 2`` of the targets' squares.
    """
    count, rows = strips.sum.shape
    device, tile_rows = level.device, SKIP_TILE.block_m
    row_blocks = cdiv(rows, tile_rows)
    threshold = torch.empty((), dtype=torch.float32, device=device)
    following = torch.empty(2, dtype=torch.int32, device=device)
    threshold_kernel[(1,)](
        threshold, following, target_factor, counted.count, counted.first_row, rows, count, missed * missed,
        TILE_ROWS=tile_rows, BLOCK=1024, num_warps=4, **FUSED,
    )  # fmt: skip
    kept = torch.empty(row_blocks, count, dtype=torch.int32, device=device)
    moved = torch.empty(count, rows, dtype=dtype, device=device)
    moved_share = torch.empty(row_blocks, count, dtype=torch.float32, device=device)
    at_once = 16
    tile_masses_kernel[(row_blocks, cdiv(count, at_once))](
        kept, moved, moved_share, strips.offset, strips.sum, level, target_logit, start, rest, softmax_factor,
        worth, threshold, counted.count, counted.first_row, rows, count,
        TILE_ROWS=tile_rows, STRIPS=at_once, num_warps=4, **FUSED,
    )  # fmt: skip
    return Tiles(kept, moved, moved_share, lists_of(kept), lists_of(kept.t()), following)


def add_totals(
    totals: torch.Tensor,  # [4] fp32: probability that moved, tokens that count, tiles kept, tiles
    tiles: Tiles,
    target: torch.Tensor,  # [rows] int64
    counted: Counted = ALL_ROWS,
) -> None:
    add_totals_kernel[(1,)](
        totals, tiles.moved_share, tiles.by_rows.length, target, counted.count, counted.first_row,
        len(target), tiles.kept.shape[1], TILE_ROWS=SKIP_TILE.block_m, BLOCK=1024, num_warps=4, **FUSED,
    )  # fmt: skip


def lists_of(kept: torch.Tensor) -> Lists:
    lines, items = kept.shape
    found = torch.empty(lines, items, dtype=torch.int32, device=kept.device)
    length, order = (torch.empty(lines, dtype=torch.int32, device=kept.device) for _ in range(2))
    block = min(1024, power_of_2(items))
    list_kept_kernel[(lines,)](found, length, kept, items, *kept.stride(), BLOCK=block, num_warps=4, **FUSED)
    longest_first_kernel[(cdiv(lines, 16),)](
        order, length, lines, LINES=16, BLOCK=min(512, power_of_2(lines)), num_warps=4, **FUSED
    )
    return Lists(found, length, order)


def strip_means(
    exp: torch.Tensor,  # [rows, vocab] 16 bit
    weight: torch.Tensor,  # [vocab, hidden] contiguous
    softmax_factor: torch.Tensor,  # [rows] fp32
    tiles: Tiles,
    counted: Counted = ALL_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares [vocab] fp32 and mean rows [strips, hidden] of the weight."""
    (rows, vocab), hidden, strips = exp.shape, weight.shape[1], tiles.kept.shape[1]
    share = torch.empty(vocab, dtype=torch.float32, device=exp.device)
    strip_shares_kernel[(strips,)](
        share, exp, softmax_factor, tiles.kept, counted.count, counted.first_row, rows, vocab, strips, exp.stride(0),
        TILE_ROWS=SKIP_TILE.block_m, STRIP=RELATIVE_STRIP, STEP=SKIP_STEP, ROWS=min(64, RELATIVE_STRIP),
        num_warps=8, **FUSED,
    )  # fmt: skip
    mean = torch.empty(strips, hidden, dtype=weight.dtype, device=exp.device)
    columns = min(64, power_of_2(hidden))
    strip_means_kernel[(strips, cdiv(hidden, columns))](
        mean, None, weight, share, vocab, hidden, STRIP=RELATIVE_STRIP, COLUMNS=columns, num_warps=4, **FUSED
    )
    return share, mean


def strip_spread(weight: torch.Tensor, strips: int) -> torch.Tensor:
    """How far the rows [vocab, hidden] of each strip lie around their mean, squared, as a share of what all of them do
    around theirs [strips] fp32; 1 where all are equal."""
    vocab, hidden = weight.shape
    columns = min(64, power_of_2(hidden))
    blocks = cdiv(hidden, columns)
    mean = torch.empty(strips, hidden, dtype=torch.float32, device=weight.device)
    square = torch.empty(strips, blocks, dtype=torch.float32, device=weight.device)
    strip_means_kernel[(strips, blocks)](
        mean, square, weight, None, vocab, hidden, STRIP=RELATIVE_STRIP, COLUMNS=columns, num_warps=4, **FUSED
    )
    length = square.sum(1)
    within = (length - mean.square().sum(1)).clamp_(min=0.0)
    first = torch.arange(0, strips * RELATIVE_STRIP, RELATIVE_STRIP, device=weight.device)
    portion = (vocab - first).clamp(0, RELATIVE_STRIP) / vocab
    whole = ((portion * length).sum() - (portion @ mean).square().sum()).clamp_(min=0.0)
    return torch.where(whole > 0.0, within / whole, 1.0)


def skip_dhidden(
    out: torch.Tensor,  # [rows, hidden], or with an order all of the call's [tokens, hidden]
    partial: torch.Tensor,  # [parts + 1, rows, hidden] fp32, the last what the mean rows give
    exp: torch.Tensor,  # [rows, vocab] 16 bit
    weight: torch.Tensor,  # [vocab, hidden] contiguous
    tiles: Tiles,
    factors: Factors,
    order: torch.Tensor | None = None,
    counted: Counted = ALL_ROWS,
    tile: Tile = SKIP_TILE,
) -> None:
    """``out = softmax * (kept exp @ weight + partial[-1]) + at_target * weight[target]``"""
    rows, hidden = exp.shape[0], weight.shape[1]
    parts = partial.shape[0] - 1
    jobs = cdiv(rows, tile.block_m) * cdiv(hidden, tile.block_n) * parts
    programs = min(tile.per_multiprocessor * multiprocessors(exp.device), jobs)
    lists = tiles.by_rows
    skip_dhidden_kernel[(programs,)](
        partial,
        TensorDescriptor.from_tensor(exp, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.block_k, tile.block_n]),
        *lists, tiles.next[:1], rows, hidden, tiles.kept.shape[1],
        PARTS=parts, STRIP=RELATIVE_STRIP, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        UPCAST=INTERPRETED, num_warps=tile.warps, num_stages=tile.stages, **FUSED,
    )  # fmt: skip
    block = min(power_of_2(hidden), 2048)
    finish_dhidden_kernel[(rows, cdiv(hidden, block))](
        out, partial, weight, counted.count, order, *factors, counted.first_row, rows, hidden,
        PARTS=parts + 1, BLOCK=block, num_warps=4, **FUSED,
    )  # fmt: skip


def skip_dweight(
    out: torch.Tensor,  # [vocab, hidden] contiguous
    exp: torch.Tensor,  # [rows, vocab] 16 bit
    hidden: torch.Tensor,  # [rows, hidden] contiguous
    share: torch.Tensor,  # [vocab] fp32
    moved: torch.Tensor,  # [strips, hidden] fp32
    tiles: Tiles,
    first: bool,
    tile: Tile = SKIP_TILE,
) -> None:
    """``out (+)= kept exp.T @ hidden + share * moved``, stored rather than added where ``first``"""
    vocab, width = exp.shape[1], hidden.shape[1]
    row_blocks, strips = tiles.kept.shape
    programs = min(tile.per_multiprocessor * multiprocessors(exp.device), strips * cdiv(width, tile.block_n))
    lists = tiles.by_strips
    skip_dweight_kernel[(programs,)](
        TensorDescriptor.from_tensor(out, [RELATIVE_STRIP, tile.block_n // 2]),
        TensorDescriptor.from_tensor(exp, [tile.block_k, RELATIVE_STRIP]),
        TensorDescriptor.from_tensor(hidden, [tile.block_k, tile.block_n]),
        share, moved, *lists, tiles.next[1:], row_blocks, vocab, width, strips, TILE_ROWS=SKIP_TILE.block_m,
        ADD=not first, BY_MEMORY=out.dtype == torch.float32 and not INTERPRETED,
        BLOCK_M=RELATIVE_STRIP, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        UPCAST=INTERPRETED, num_warps=tile.warps, num_stages=tile.stages, **FUSED,
    )  # fmt: skip
