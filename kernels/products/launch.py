"""Launches of the kernels for dhidden and dweight, on torch tensors."""

from typing import NamedTuple

import torch

from ...core.gpus import UNCUT, DhiddenSplit, gpu_of, multiprocessors_of, programs_of
from ...core.memory import RECORDERS, empty, recorder
from ...core.records import ALL_ROWS, CountedRows
from ...core.tiles import INTERPRETED, Matrix, Quantised, Tile, cdiv, power_of_2
from ..common.operands import as_quantised, matrix, row_stride
from .dhidden import dhidden_kernel, finish_dhidden_kernel, finish_with_sparse_kernel
from .dweight import add_rows_kernel, dweight_kernel, pick_columns_kernel, put_rows_kernel, sort_columns_kernel

PIECE_ENTRIES = 16  # number of entries that ``add_rows_kernel`` sums at a time, a piece
SPARSE_PIECES = 16  # number of pieces for each program where most entries have no place
MAX_COMPARED = 8192  # most entries that one launch sorts by comparing all pairs, in place of torch's ten launches


# What turns the product of exponentials and the weight into dhidden, each [rows]. ``target`` int64: the target's row of
# the weight, -1 where a row does not count; ``softmax`` fp32: factor of the product; ``at_target`` fp32: factor of the
# target's row of the weight
RowFactors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def dhidden(
    out: torch.Tensor,  # [rows, hidden]
    grad: torch.Tensor,  # [rows, vocab] 16 bit
    weight: torch.Tensor,  # [vocab, hidden] contiguous
    tile: Tile,
    factors: RowFactors | None = None,  # None: the product is dhidden itself
    counted: CountedRows = ALL_ROWS,
    add: bool = False,  # True: adds to ``out``; False: stores
    split: DhiddenSplit = UNCUT,
    scratch: torch.Tensor | None = None,  # [n] fp32 for parts of cut tiles, n at least split[1] * tile.elements
    finished: torch.Tensor | None = None,  # [multiprocessors] int32 of 0: numbers of finished parts of cut tiles
) -> None:
    """Writes ``out (+)= softmax * (grad @ weight) + at_target * weight[target]``, of the three ``factors``."""
    (rows, vocab), hidden, (num_counted, first_row) = grad.shape, weight.shape[1], counted
    is_cut = split != UNCUT
    # the split assumes one program per multiprocessor
    programs = multiprocessors_of(grad.device) if is_cut else programs_of(tile, rows, hidden, grad.device)
    dhidden_kernel[(programs,)](
        out, *((scratch, finished) if is_cut else (None, None)),
        *matrix(grad, tile.block_m, tile.block_k, tile),
        matrix(weight, tile.block_k, tile.block_n, tile)[0],
        weight, num_counted, *(factors or (None, None, None)), first_row, rows, vocab, hidden, *split,
        row_stride(grad, tile),
        ADD=add, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        EVEN_VOCAB=tile.described or vocab % 8 == 0, BLOCK_ROWS=min(32, tile.block_m), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def finish_dhidden(
    out: torch.Tensor,  # [rows, hidden]
    product: torch.Tensor,  # [rows, hidden] fp32: BLAS's product of exponentials and the weight
    weight: torch.Tensor,  # [vocab, hidden] contiguous
    factors: RowFactors,
) -> None:
    """Writes ``out = softmax * product + at_target * weight[target]``, of the three ``factors``; 0 where a row does
    not count."""
    (rows, hidden), block = product.shape, min(power_of_2(product.shape[1]), 1024)
    finish_dhidden_kernel[cdiv(rows, 4), cdiv(hidden, block)](
        out, product, weight, *factors, rows, hidden, BLOCK_ROWS=4, BLOCK_COLUMNS=block, num_warps=4
    )


def finish_with_sparse(
    out: torch.Tensor,  # [rows, hidden]
    product: torch.Tensor,  # [rows, hidden] fp32, of e4m3 operands
    weight: torch.Tensor,  # [vocab, hidden] contiguous
    target: torch.Tensor,  # [rows] int64, -1 where a row does not count
    softmax_factor: torch.Tensor,  # [rows] fp32
    ids: torch.Tensor,  # [rows, n] int32: ids whose dlogits the product lacks, -1 for none
    terms: torch.Tensor,  # [rows, n] fp32: dlogits of these ids
    counted: CountedRows = ALL_ROWS,
) -> None:
    """Writes ``out[r] = softmax_factor[r] product[r] + sum_i terms[r, i] weight[ids[r, i]]``; 0 if r does not count."""
    (rows, hidden), num_ids = product.shape, ids.shape[1]
    block = min(power_of_2(hidden), 1024)
    finish_with_sparse_kernel[rows, cdiv(hidden, block)](
        out, product, weight, target, softmax_factor, ids, terms, *counted, rows, hidden,
        NUM_IDS=num_ids, BLOCK_IDS=power_of_2(num_ids), BLOCK_COLUMNS=block, num_warps=4,
    )  # fmt: skip


def dweight(
    out: torch.Tensor,  # [vocab, hidden] contiguous
    grad: Matrix,  # [rows, vocab] 16 bit; or e4m3 [vocab, padded rows]
    hidden: Matrix,  # [rows, hidden] contiguous; or e4m3 [hidden, padded rows]
    is_first: bool,  # True: stores to ``out``; False: adds to ``out``
    tile: Tile,
    counted: CountedRows = ALL_ROWS,
    # with e4m3 operands: sums of grad [vocab] and mean of hidden states [hidden], fp32. Their outer product is added
    grad_sums_and_hidden_mean: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None),
    promoted: int | None = None,  # number of rows that tensor cores sum before the sum is added in fp32; None: all
) -> None:
    """Writes ``out = grad.T @ hidden``, or adds the product to ``out`` if not ``is_first``."""
    scale, (vocab, hidden_size) = None, out.shape
    tile = tile.for_operand(hidden)
    grad_block, hidden_block = (tile.block_k, tile.block_m), (tile.block_k, tile.block_n)
    if isinstance(hidden, Quantised):
        hidden, scale, rows = hidden.values, hidden.scale, hidden.values.shape[1]
        grad_block, hidden_block = (tile.block_m, tile.block_k), (tile.block_n, tile.block_k)
    else:
        rows = len(hidden)
    grad = as_quantised(grad)[0]
    programs = programs_of(tile, vocab, hidden_size, grad.device)
    dweight_kernel[(programs,)](
        *matrix(out, tile.block_m, tile.block_n // 2, tile),
        *matrix(grad, *grad_block, tile),
        *matrix(hidden, *hidden_block, tile),
        scale, *grad_sums_and_hidden_mean, *counted, rows, vocab, hidden_size, row_stride(grad, tile),
        ADD=not is_first, PROMOTED_ROWS=promoted,
        IS_ATOMIC=tile.described and out.dtype == torch.float32 and not INTERPRETED,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


class SortedColumns(NamedTuple):
    """Columns of entries, sorted in ascending order; the sort is stable."""

    columns: torch.Tensor  # [entries] int32
    order: torch.Tensor | None  # [entries] int64: index of each column before the sort; None: 0, 1, 2, ...
    occurrences: torch.Tensor | None = None  # [entries] int32, in the order before the sort: number of equal columns


def sort_columns(columns: torch.Tensor, counts_occurrences: bool = False) -> SortedColumns:
    """Sorts ``columns`` [entries] int32 or int64, indices of columns. ``counts_occurrences``: the result also has for
    each entry the number of entries with the same column."""
    entries = columns.shape[0]
    if entries > MAX_COMPARED:
        columns = columns.to(torch.int32)  # half as many passes as for int64
        sorted_columns, order = torch.sort(columns, stable=True)
        if not counts_occurrences:
            return SortedColumns(sorted_columns, order)
        first_index = torch.searchsorted(sorted_columns, columns, out_int32=True)
        end_index = torch.searchsorted(sorted_columns, columns, out_int32=True, right=True)
        return SortedColumns(sorted_columns, order, end_index.sub_(first_index))
    sorted_columns = empty(entries, dtype=torch.int32, device=columns.device)
    order = empty(entries, dtype=torch.int64, device=columns.device)
    occurrences = empty(entries, dtype=torch.int32, device=columns.device) if counts_occurrences else None
    block = 16
    sort_columns_kernel[(cdiv(entries, block),)](
        sorted_columns, order, occurrences, columns, entries, BLOCK=block, BLOCK_COMPARED=256, num_warps=8
    )
    return SortedColumns(sorted_columns, order, occurrences)


def sort_sparse(columns: torch.Tensor) -> tuple[SortedColumns, torch.Tensor]:
    """Sorts ``columns`` [entries] int32. Also returns how many columns are -1, [1] int64; these columns come first."""
    dtypes = torch.int32, torch.int64
    sorted_columns, order = (empty(len(columns), dtype=dtype, device=columns.device) for dtype in dtypes)
    num_none = empty(1, dtype=torch.int64, device=columns.device)
    sort_into(sorted_columns, order, num_none, columns)
    return SortedColumns(sorted_columns, order), num_none


def sort_into(sorted_columns: torch.Tensor, order: torch.Tensor, num_none: torch.Tensor, columns: torch.Tensor) -> None:
    """Writes the results of ``sort_sparse(columns)`` to the other three tensors, as one step of a recording."""
    torch.sort(columns, stable=True, out=(sorted_columns, order))
    torch.sum(sorted_columns < 0, 0, keepdim=True, out=num_none)
    if RECORDERS and (active_recorder := recorder()) is not None:
        written_tensors = sorted_columns, order, num_none
        active_recorder.record_call(
            sort_into, sorted_columns, order, num_none, columns, written_tensors=written_tensors
        )


def pick_columns(
    out: torch.Tensor,  # [rows, num_picked] contiguous
    grad: torch.Tensor,  # [rows, vocab] 16 bit
    columns: torch.Tensor,  # [tokens] int32 in ascending order, -1 for none
    step: int,  # every ``step``-th column is picked
    counted: CountedRows = ALL_ROWS,
) -> None:
    """Writes ``out[:, i] = grad[:, columns[step * i]]``; 0 where a column is -1, and in rows after those that count."""
    rows, num_picked = out.shape
    pick_columns_kernel[cdiv(rows, 32), cdiv(num_picked, 32)](
        out,
        grad,
        columns,
        *counted,
        rows,
        num_picked,
        step,
        grad.stride(0),
        BLOCK_ROWS=32,
        BLOCK_COLUMNS=32,
        num_warps=4,
    )


def put_rows(
    out: torch.Tensor,  # [places, width] contiguous
    rows: torch.Tensor,  # [num_picked, width] fp32
    places: torch.Tensor,  # [tokens] int32 in ascending order, -1 for none
    step: int,  # every ``step``-th place has a row
) -> None:
    """Writes ``out[places[step * i]] = rows[i]``; if several i have the same place, the row of the first."""
    num_picked, row_size = rows.shape
    block = min(power_of_2(row_size), 1024)
    put_rows_kernel[num_picked, cdiv(row_size, block)](out, rows, places, step, row_size, BLOCK=block, num_warps=4)


def add_rows(
    out: torch.Tensor,  # [places, width] contiguous
    rows: torch.Tensor,  # [rows, width]
    places: torch.Tensor | SortedColumns,  # [entries] int32 or int64, -1 for none; or sorted already
    factors: torch.Tensor,  # [entries] fp32
    # [entries / entries_per_row] int64 or int32: rows of entries, -1 for none; None: 0, 1, 2, ...
    row: torch.Tensor | None = None,
    is_grouped: bool = False,  # places are int32, and equal places are neighbours
    # softmax_factor and ratio, [entries] fp32 each
    softmax_factors_and_ratios: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None),
    entries_per_row: int = 1,  # number of neighbouring entries that have the same row; above 1 most places are -1
) -> None:
    """Adds ``out[places[i]] += factors[i] * rows[row[i // entries_per_row]]`` for each entry i. Each sum is rounded
    once and has the same bits in every run. With ``softmax_factors_and_ratios`` the kernel also adds ``ratio (s -
    bf16(s))`` to ``out[places[i]]``, where s is ``softmax_factor`` times the entry's row."""
    num_none, is_sparse = None, entries_per_row > 1
    if is_grouped:
        places = SortedColumns(places, None)
    elif is_sparse and not isinstance(places, SortedColumns):
        places, num_none = sort_sparse(places)
    elif not isinstance(places, SortedColumns):
        places = sort_columns(places)
    entries, row_size = places.columns.shape[0], rows.shape[1]
    if not entries:
        return
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    block, gpu = 128 if row_size >= 128 else max(16, power_of_2(row_size)), gpu_of(out.device)
    # fewer at a time where rows are not aligned, whose loads take more registers
    block_entries = 32 if row_size % 16 == 0 else 16
    num_pieces = cdiv(entries, PIECE_ENTRIES * SPARSE_PIECES if is_sparse else PIECE_ENTRIES)
    add_rows_kernel[num_pieces, cdiv(row_size, block)](
        out, rows, row, factors, *softmax_factors_and_ratios, *places[:2], num_none, entries, row_size, rows.stride(0),
        ENTRIES_PER_ROW=entries_per_row, BLOCK=block, BLOCK_PIECE=PIECE_ENTRIES, BLOCK_ENTRIES=block_entries,
        BLOCK_SCAN=256,
        PRECISION="ieee" if gpu is None else gpu.fp32_products, num_warps=2,
    )  # fmt: skip
