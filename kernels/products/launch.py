"""Launching the products with logits' gradients, and what goes with them, on torch tensors."""

from typing import NamedTuple

import torch

from ..common.gpus import UNCUT, DhiddenSplit, gpu_of, multiprocessors_of, programs_of
from ..common.operands import ALL_ROWS, Counted, matrix, row_stride
from ..common.tiles import INTERPRETED, LEAST_SECTION, PIECE, Tile, cdiv, piece_bytes, power_of_2
from .dhidden import dhidden_kernel, finish_dhidden_kernel, join_parts_kernel
from .dweight import (
    add_target_rows_kernel,
    column_begins_kernel,
    column_pieces_kernel,
    column_rows_kernel,
    dweight_kernel,
    join_pieces_kernel,
    sort_targets_kernel,
)

COLUMN_PIECE = 256  # entries of one column that a program adds up
MOST_COUNTED = 8192  # tokens that are sorted by comparing each with each: one launch instead of ten


class Factors(NamedTuple):
    """Factors per row that make gradients of products with exponentials: of the softmax, and of the target's term."""

    target: torch.Tensor | None = None  # [rows] int64, -1 where the row does not count
    softmax: torch.Tensor | None = None  # [rows] fp32
    at_target: torch.Tensor | None = None  # [rows] fp32


NO_FACTORS = Factors()


def dhidden(
    out: torch.Tensor,  # [rows, hidden]
    scratch: torch.Tensor | None,  # [split.units * elements of a tile] fp32, or more
    grad: torch.Tensor,  # [rows, vocab] 16 bit
    weight: torch.Tensor,  # [vocab, hidden] contiguous
    tile: Tile,
    factors: Factors = NO_FACTORS,
    counted: Counted = ALL_ROWS,
    add: bool = False,
    split: DhiddenSplit = UNCUT,
) -> None:
    """``out (+)= softmax * (grad @ weight) + at_target * weight[target]``"""
    (rows, vocab), hidden = grad.shape, weight.shape[1]
    cut = split.parts > 1
    # full turns are of all multiprocessors
    programs = multiprocessors_of(grad.device) if cut else programs_of(tile, rows, hidden, grad.device)
    shared = {"ADD": add, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "GROUP_M": tile.group_m}
    dhidden_kernel[(programs,)](
        out, scratch if cut else None,
        *matrix(grad, tile.block_m, tile.block_k, tile),
        matrix(weight, tile.block_k, tile.block_n, tile)[0],
        weight, counted.count, *factors, counted.first_row, rows, vocab, hidden, *split, row_stride(grad, tile),
        BLOCK_K=tile.block_k, EVEN_VOCAB=tile.described or vocab % 8 == 0, num_warps=tile.warps,
        num_stages=tile.stages, **shared,
    )  # fmt: skip
    if cut:
        tiles, joined = cdiv(rows, tile.block_m) * cdiv(hidden, tile.block_n), min(16, tile.block_m)
        # how many tiles are cut where fewer rows count, the device knows
        left = tiles % programs if counted.count is None else min(tiles, programs - 1)
        join_parts_kernel[(left, tile.block_m // joined)](
            out, scratch, weight, counted.count, *factors, counted.first_row, rows, hidden, *split, programs,
            ROWS=joined, num_warps=4, **shared,
        )  # fmt: skip


def finish_dhidden(
    out: torch.Tensor,  # [rows, hidden]
    product: torch.Tensor,  # [rows, hidden] fp32: BLAS's of exponentials and the weight
    weight: torch.Tensor,  # [vocab, hidden] contiguous
    factors: Factors,
) -> None:
    """``out = softmax * product + at_target * weight[target]``, 0 where a row does not count"""
    (rows, hidden), block = product.shape, min(power_of_2(product.shape[1]), 1024)
    finish_dhidden_kernel[cdiv(rows, 4), cdiv(hidden, block)](
        out, product, weight, *factors, rows, hidden, ROWS=4, COLUMNS=block, num_warps=4
    )


def dweight(
    out: torch.Tensor,  # [vocab, hidden] contiguous
    grad: torch.Tensor,  # [rows, vocab] 16 bit
    hidden: torch.Tensor,  # [rows, hidden] contiguous
    first: bool,
    tile: Tile,
    counted: Counted = ALL_ROWS,
) -> None:
    """``out (+)= grad.T @ hidden``, stored rather than added where ``first``"""
    (rows, vocab), width = grad.shape, hidden.shape[1]
    programs = programs_of(tile, vocab, width, grad.device)
    dweight_kernel[(programs,)](
        *matrix(out, tile.block_m, tile.block_n // 2, tile),
        *matrix(grad, tile.block_k, tile.block_m, tile),
        *matrix(hidden, tile.block_k, tile.block_n, tile),
        *counted, rows, vocab, width, row_stride(grad, tile),
        ADD=not first, BY_MEMORY=tile.described and out.dtype == torch.float32 and not INTERPRETED,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def sort_targets(target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``target`` [tokens] int64 sorted, equal ones in their order, as int32; and where each stood, int64."""
    tokens = target.shape[0]
    if tokens > MOST_COUNTED:
        # half as many passes as for int64
        return torch.sort(target.to(torch.int32), stable=True)
    sorted_target, order = torch.empty_like(target, dtype=torch.int32), torch.empty_like(target)
    block = 16
    sort_targets_kernel[(cdiv(tokens, block),)](
        sorted_target, order, target, tokens, BLOCK=block, AT_ONCE=256, num_warps=8
    )
    return sorted_target, order


def add_target_rows(
    dweight: torch.Tensor,  # [vocab, hidden] contiguous
    hidden: torch.Tensor,  # [tokens, hidden], or others with ``rows``; columns contiguous
    target: torch.Tensor,  # [tokens] int64
    target_factor: torch.Tensor,  # [tokens] fp32
    rows: torch.Tensor | None = None,  # [tokens] int64, rows of ``hidden``; None: in its order
    scratch: torch.Tensor | None = None,  # contiguous, rows of a multiple of 4 bytes, to be overwritten
) -> None:
    """``dweight[target[i]] += target_factor[i] * hidden[rows[i]]``, the same bits whenever it is done.

    Sorted tokens are dealt with in as few sections as the scratch has room for their sums.
    """
    tokens, columns = target.shape[0], hidden.shape[1]
    targets, order = sort_targets(target)
    rows = None if rows is None else rows.index_select(0, order)
    room = tokens if scratch is None else scratch.nbytes // piece_bytes(1, columns) * PIECE
    if scratch is None or room < min(tokens, LEAST_SECTION):
        room = min(tokens, max(room, LEAST_SECTION))
        piece_sum = torch.empty(piece_bytes(room, columns) // 4, dtype=torch.float32, device=hidden.device)
    else:
        piece_sum = scratch.view(torch.float32)
    gpu = gpu_of(dweight.device)
    assert gpu is not None, "exponentials are stored only on GPUs of the table"
    block = 128 if columns >= 128 else max(16, power_of_2(columns))
    wide = 4 * block  # nearly all programs of the second have nothing to add
    # where there is room for all, nothing is sliced
    sections = [slice(first, first + room) for first in range(0, tokens, room)] if room < tokens else [None]
    for at in sections if tokens else ():
        order_, rows_, targets_ = (each if at is None or each is None else each[at] for each in (order, rows, targets))
        count, pieces = targets_.shape[0], cdiv(targets_.shape[0], PIECE)
        add_target_rows_kernel[pieces, cdiv(columns, block)](
            dweight, piece_sum, hidden, order_, rows_, targets_, target_factor, count, columns, hidden.stride(0),
            BLOCK=block, PRECISION=gpu.fp32_products, num_warps=2,
        )  # fmt: skip
        join_pieces_kernel[pieces, cdiv(columns, wide)](
            dweight, piece_sum, targets_, count, columns, pieces, AT_ONCE=16, BLOCK=wide, num_warps=4
        )


def put_column_rows(
    dweight: torch.Tensor,  # [vocab, hidden] contiguous
    hidden: torch.Tensor,  # [rows, hidden], columns contiguous
    columns: torch.Tensor,  # [entries] int32, -1 for none
    factors: torch.Tensor,  # [entries] fp32
    rows: torch.Tensor,  # [entries] int64, of ``hidden``
    add: bool,
) -> None:
    """``dweight[columns[i]] (+)= factors[i] * hidden[rows[i]]``, the sum over all entries of a column rounded once."""
    (vocab, width), entries = dweight.shape, len(columns)
    ordered, order = torch.sort(columns, stable=True)
    begins = torch.empty(vocab + 1, dtype=torch.int32, device=columns.device)
    column_begins_kernel[(cdiv(vocab + 1, 256),)](
        begins, ordered, entries, vocab, entries.bit_length(), BLOCK=256, num_warps=4
    )
    block, pieces = max(16, min(power_of_2(width), 1024)), cdiv(entries, COLUMN_PIECE)
    piece_sum = torch.empty(pieces, width, dtype=torch.float32, device=columns.device)
    given, sizes = (hidden, order, rows, factors, begins), (width, hidden.stride(0))
    shared = {"PIECE": COLUMN_PIECE, "AT_ONCE": 2, "BLOCK": block, "num_warps": max(1, block // 256)}
    if pieces > 1:
        column_pieces_kernel[pieces - 1, cdiv(width, block)](piece_sum, *given, ordered, *sizes, **shared)
    column_rows_kernel[vocab, cdiv(width, block)](dweight, piece_sum, *given, *sizes, ADD=add, **shared)
