"""Launches of the kernels that make dhidden and dweight, on torch tensors."""

from typing import NamedTuple

import torch

from ...core.gpus import UNCUT, DhiddenSplit, gpu_of, multiprocessors_of, programs_of
from ...core.memory import RECORDERS, empty, recorder
from ...core.records import ALL_ROWS, Counted
from ...core.tiles import INTERPRETED, Matrix, Quantised, Tile, cdiv, power_of_2
from ..common.operands import as_quantised, matrix, row_stride
from .dhidden import dhidden_kernel, finish_dhidden_kernel, finish_with_apart_kernel
from .dweight import add_rows_kernel, dweight_kernel, pick_columns_kernel, put_rows_kernel, sort_columns_kernel

PIECE = 16  # entries of equal or neighbouring columns that a program adds up
SPARSE = 16  # pieces for each program where most entries are none
MOST_COUNTED = 8192  # up to so many entries, a sort compares all pairs, in one launch in place of ten


class Factors(NamedTuple):
    """Factors per row that turn products with exponentials into gradients: of the product, and of the target's row of
    the weight."""

    target: torch.Tensor | None = None  # [rows] int64, -1 where a row does not count
    softmax: torch.Tensor | None = None  # [rows] fp32
    at_target: torch.Tensor | None = None  # [rows] fp32


NO_FACTORS = Factors()


def dhidden(
    out: torch.Tensor,  # [rows, hidden]
    grad: torch.Tensor,  # [rows, vocab] 16 bit
    weight: torch.Tensor,  # [vocab, hidden] contiguous
    tile: Tile,
    factors: Factors = NO_FACTORS,
    counted: Counted = ALL_ROWS,
    add: bool = False,
    split: DhiddenSplit = UNCUT,
    scratch: torch.Tensor | None = None,  # [split.units * elements of a tile] fp32 or more, for cut tiles
    arrived: torch.Tensor | None = None,  # [multiprocessors] int32 of 0 there, to be counted in
) -> None:
    """``out (+)= softmax * (grad @ weight) + at_target * weight[target]``"""
    (rows, vocab), hidden = grad.shape, weight.shape[1]
    cut = split.pieces > 1
    # full turns are of all multiprocessors
    programs = multiprocessors_of(grad.device) if cut else programs_of(tile, rows, hidden, grad.device)
    dhidden_kernel[(programs,)](
        out, *((scratch, arrived) if cut else (None, None)),
        *matrix(grad, tile.block_m, tile.block_k, tile),
        matrix(weight, tile.block_k, tile.block_n, tile)[0],
        weight, counted.number, *factors, counted.first_row, rows, vocab, hidden, *split, row_stride(grad, tile),
        ADD=add, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        EVEN_VOCAB=tile.described or vocab % 8 == 0, ROWS=min(32, tile.block_m), num_warps=tile.warps,
        num_stages=tile.stages,
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


def finish_with_apart(
    out: torch.Tensor,  # [rows, hidden]
    product: torch.Tensor,  # [rows, hidden] fp32, of e4m3 operands
    weight: torch.Tensor,  # [vocab, hidden] contiguous
    target: torch.Tensor,  # [rows] int64, -1 where a row does not count
    softmax_factor: torch.Tensor,  # [rows] fp32
    places: torch.Tensor,  # [rows, n] int32: ids that stand apart, -1 for none
    terms: torch.Tensor,  # [rows, n] fp32: dlogits there
    counted: Counted = ALL_ROWS,
) -> None:
    """``out = softmax_factor * product + sum_i terms[i] * weight[places[i]]``, 0 where a row does not count"""
    (rows, hidden), count = product.shape, places.shape[1]
    block = min(power_of_2(hidden), 1024)
    finish_with_apart_kernel[rows, cdiv(hidden, block)](
        out, product, weight, target, softmax_factor, places, terms, *counted, rows, hidden,
        PLACES=count, AT_ONCE=power_of_2(count), COLUMNS=block, num_warps=4,
    )  # fmt: skip


def dweight(
    out: torch.Tensor,  # [vocab, hidden] contiguous
    grad: Matrix,  # [rows, vocab] 16 bit; or e4m3 [vocab, padded rows]
    hidden: Matrix,  # [rows, hidden] contiguous; or e4m3 [hidden, padded rows]
    first: bool,
    tile: Tile,
    counted: Counted = ALL_ROWS,
    # of e4m3 operands: sums [vocab] and mean [hidden] fp32, whose outer product is added
    common: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None),
    promoted: int | None = None,  # rows whose products of e4m3 tensor cores sum by themselves; None: all
) -> None:
    """``out (+)= grad.T @ hidden``, stored rather than added where ``first``"""
    scale, (vocab, width) = None, out.shape
    tile = tile.for_operand(hidden)
    blocks = (tile.block_k, tile.block_m), (tile.block_k, tile.block_n)
    if isinstance(hidden, Quantised):
        hidden, scale, rows = hidden.values, hidden.scale, hidden.values.shape[1]
        blocks = (tile.block_m, tile.block_k), (tile.block_n, tile.block_k)
    else:
        rows = len(hidden)
    grad = as_quantised(grad)[0]
    programs = programs_of(tile, vocab, width, grad.device)
    dweight_kernel[(programs,)](
        *matrix(out, tile.block_m, tile.block_n // 2, tile),
        *matrix(grad, *blocks[0], tile),
        *matrix(hidden, *blocks[1], tile),
        scale, *common, *counted, rows, vocab, width, row_stride(grad, tile),
        ADD=not first, PROMOTED=promoted, BY_MEMORY=tile.described and out.dtype == torch.float32 and not INTERPRETED,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


class SortedColumns(NamedTuple):
    """Columns of entries in ascending order; the sort is stable."""

    columns: torch.Tensor  # [entries] int32
    order: torch.Tensor | None  # [entries] int64: each one's index before the sort; None: they were sorted already
    occurrences: torch.Tensor | None = None  # [entries] int32, in the order before the sort: how many columns equal it


def sort_columns(columns: torch.Tensor, counted: bool = False) -> SortedColumns:
    """Sorts ``columns`` [entries]. ``counted``: counts occurrences as well."""
    entries = columns.shape[0]
    if entries > MOST_COUNTED:
        columns = columns.to(torch.int32)  # half as many passes as for int64
        ordered, order = torch.sort(columns, stable=True)
        if not counted:
            return SortedColumns(ordered, order)
        first, end = (torch.searchsorted(ordered, columns, out_int32=True, right=right) for right in (False, True))
        return SortedColumns(ordered, order, end.sub_(first))
    ordered = empty(entries, dtype=torch.int32, device=columns.device)
    order = empty(entries, dtype=torch.int64, device=columns.device)
    occurrences = empty(entries, dtype=torch.int32, device=columns.device) if counted else None
    block = 16
    sort_columns_kernel[(cdiv(entries, block),)](
        ordered, order, occurrences, columns, entries, BLOCK=block, AT_ONCE=256, num_warps=8
    )
    return SortedColumns(ordered, order, occurrences)


def sort_sparse(columns: torch.Tensor) -> tuple[SortedColumns, torch.Tensor]:
    """Sorts ``columns`` [entries] int32; also returns how many are -1 [1] int64, which come first."""
    dtypes = torch.int32, torch.int64
    ordered, order = (empty(len(columns), dtype=dtype, device=columns.device) for dtype in dtypes)
    none = empty(1, dtype=torch.int64, device=columns.device)
    sort_into(ordered, order, none, columns)
    return SortedColumns(ordered, order), none


def sort_into(ordered: torch.Tensor, order: torch.Tensor, none: torch.Tensor, columns: torch.Tensor) -> None:
    torch.sort(columns, stable=True, out=(ordered, order))
    torch.sum(ordered < 0, 0, keepdim=True, out=none)
    if RECORDERS and (listening := recorder()) is not None:
        listening.called(sort_into, ordered, order, none, columns, written=(ordered, order, none))


def pick_columns(
    out: torch.Tensor,  # [rows, picked] contiguous
    grad: torch.Tensor,  # [rows, vocab] 16 bit
    columns: torch.Tensor,  # [tokens] int32 in ascending order, -1 for none
    step: int,
    counted: Counted = ALL_ROWS,
) -> None:
    """``out[:, i] = grad[:, columns[step * i]]``; 0 where a column is -1, and in rows after those that count."""
    rows, picked = out.shape
    pick_columns_kernel[cdiv(rows, 32), cdiv(picked, 32)](
        out, grad, columns, *counted, rows, picked, step, grad.stride(0), ROWS=32, COLUMNS=32, num_warps=4
    )


def put_rows(
    out: torch.Tensor,  # [places, width] contiguous
    rows: torch.Tensor,  # [picked, width] fp32
    places: torch.Tensor,  # [tokens] int32 in ascending order, -1 for none
    step: int,
) -> None:
    """``out[places[step * i]] = rows[i]``; of equal places, the first i."""
    picked, width = rows.shape
    block = min(power_of_2(width), 1024)
    put_rows_kernel[picked, cdiv(width, block)](out, rows, places, step, width, BLOCK=block, num_warps=4)


def add_rows(
    out: torch.Tensor,  # [places, width] contiguous
    rows: torch.Tensor,  # [rows, width]
    places: torch.Tensor | SortedColumns,  # [entries] int32 or int64, -1 for none; or sorted already
    factors: torch.Tensor,  # [entries] fp32
    # [entries / entries_per_row] int64 or int32, -1 for none; None: in the order of ``rows``
    row: torch.Tensor | None = None,
    together: bool = False,  # equal places are together already, and int32
    products: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None),  # softmax_factor, ratio [entries]
    entries_per_row: int = 1,  # so many entries in a row have the same row; of more than 1 most places are -1
) -> None:
    """``out[places[i]] += factors[i] * rows[row[i]]`` for each entry i; each sum is rounded once and has the same bits
    in every run. With ``products`` it also adds ``ratio (s - bf16(s))``, ``s = softmax_factor * rows``."""
    none, is_sparse = None, entries_per_row > 1
    if together:
        places = SortedColumns(places, None)
    elif is_sparse and not isinstance(places, SortedColumns):
        places, none = sort_sparse(places)
    elif not isinstance(places, SortedColumns):
        places = sort_columns(places)
    entries, width = places.columns.shape[0], rows.shape[1]
    if not entries:
        return
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    block, gpu = 128 if width >= 128 else max(16, power_of_2(width)), gpu_of(out.device)
    at_once = 32 if width % 16 == 0 else 16  # registers, where vectors are read in pieces
    pieces = cdiv(entries, PIECE * SPARSE if is_sparse else PIECE)
    add_rows_kernel[pieces, cdiv(width, block)](
        out, rows, row, factors, *products, *places[:2], none, entries, width, rows.stride(0),
        ENTRIES_PER_ROW=entries_per_row, BLOCK=block, PIECE=PIECE, AT_ONCE=at_once, SCAN=256,
        PRECISION="ieee" if gpu is None else gpu.fp32_products, num_warps=2,
    )  # fmt: skip
