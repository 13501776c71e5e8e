"""Launching the kernels of logits' gradients on torch tensors: grids, block sizes, warps; nothing of losses."""

from collections.abc import Sequence

import torch

from ..common.gpus import RELATIVE_STRIP, multiprocessors_of, programs_of
from ..common.operands import Strips, even, matrix, row_stride, strip_stride, with_scale
from ..common.records import (
    ALL_ROWS,
    NOT_STORED,
    Counted,
    KeptEntries,
    Stored,
    SumTerm,
    TeacherSoftmax,
    Terms,
    Transform,
)
from ..common.sums import flat_terms, kernel_of
from ..common.tiles import ELSEWHERE, EXACT_BLOCK, STRIPS_AT_ONCE, Matrix, Tile, cdiv, power_of_2, row_block
from . import row_grad as kernels
from .grad_logits import grad_logits_kernel
from .row_grad import level_rows_kernel, scale_kernel


def row_programs(columns: int) -> int:
    """Programs that share a row of relative logits."""
    return cdiv(cdiv(columns, RELATIVE_STRIP), STRIPS_AT_ONCE)


def row_grad(
    dlogits: torch.Tensor,  # [rows, columns], may share the logits' bytes; with sets [entries] fp32
    stored: Stored,  # of entries their exact logits, fp32
    class_weights: torch.Tensor | None,
    terms: Terms,
    teacher: TeacherSoftmax | None,
    sums: Sequence[SumTerm],  # over the vocabulary
    tie: float | None,  # relative difference of probabilities that count as equal
    first_column: int,
    transform: Transform,
    counted: Counted = ALL_ROWS,  # rows behind the last that counts may be left unwritten
    # own columns of each row, [rows, count] each: ids (-1 for none), what is added there, exact logits
    own: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    # columns, what each adds to the gradient, begins and ends of rows' sets; None for all columns
    entries: tuple[torch.Tensor | None, ...] = (None, None, None, None),
) -> None:
    """Gradients of all columns, or of entries alone; others stay as they are."""
    rows, columns, columns2, count = len(terms.target), dlogits.shape[-1], terms.second.columns, None
    # one program walks a row, because a narrower gradient overwrites logits that lie before it
    block_rows, column_programs = 1, 1
    if entries[0] is not None:
        count = entries[0].shape[-1]
        block, warps = power_of_2(count), 1
        if entries[2] is not None:
            block, columns, columns2 = 128, ELSEWHERE, ELSEWHERE  # behind every column
    elif stored.offset is not None:
        # several strips a program: what is per row is loaded once for them
        block_rows, column_programs = 8, row_programs(columns)
        block, warps = RELATIVE_STRIP, 4
    else:
        block, warps = row_block(columns)
        block = min(block, 4096) if sums else block
    other, tensors, teacher_columns, teacher_stride = NOT_STORED, (None, None), 0, 0
    if teacher is not None:
        other, tensors, teacher_columns = teacher.stored, teacher[1:3], teacher.columns
        teacher_stride = other.logits.stride(0)
    kinds, parts, vectors, numbers = flat_terms(sums if count is None else [each._replace(part=None) for each in sums])
    kernel_of(kernels.row_grad, "row_grad_kernel", kinds)[(column_programs * cdiv(rows, block_rows),)](
        dlogits, *parts, stored.logits, stored.offset, stored.bias, *entries, class_weights, *terms.tensors,
        *other[:3], *tensors, *vectors,
        rows, columns, first_column, columns2, teacher_columns, count, stored.logits.stride(0), dlogits.stride(0),
        teacher_stride, strip_stride(stored) if teacher is None else strip_stride(stored, other),
        parts[0].stride(0) if parts else None,
        *counted, *transform, terms.second.ratio, *other.transform, *numbers, tie if sums else None,
        COLUMN_PROGRAMS=column_programs, BLOCK_ROWS=block_rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    if own is not None:
        ids, added, exact = own
        given = class_weights, terms, teacher, sums, tie, first_column, transform
        row_grad(dlogits, Stored(exact, None), *given, entries=(ids, added, None, None))


def set_grad(
    dlogits: torch.Tensor,  # [entries] fp32
    logit: torch.Tensor,  # [entries] fp32
    sets: KeptEntries,
    terms: Terms,
    transform: Transform,
) -> None:
    """Gradients of the logits of sets; other rows' entries stay as they are."""
    entries = sets.columns, None, sets.begins, sets.ends
    row_grad(dlogits, Stored(logit, None), None, terms, None, (), None, 0, transform, entries=entries)


def grad_logits(
    dlogits: torch.Tensor,  # [rows, columns] 16 bit, row stride a multiple of 8
    hidden: Matrix,  # [rows, hidden] contiguous
    weight: Matrix,  # [columns, hidden] contiguous, of the same dtype
    bias: torch.Tensor | None,  # [columns], as class_weights
    class_weights: torch.Tensor | None,
    terms: Terms,
    first_column: int,  # of these columns in the vocabulary
    transform: Transform,
    tile: Tile,
    counted: Counted = ALL_ROWS,
    blocks: torch.Tensor | None = None,  # [n] int32: of ``EXACT_BLOCK`` ids, only these; None for all columns
) -> None:
    """``dlogits`` of ``hidden @ weight.T``, as ``row_grad`` makes them of stored logits, but for the targets' terms."""
    tile = tile.of(weight)
    hidden, hidden_scale, weight, weight_scale = *with_scale(hidden), *with_scale(weight)
    rows, columns, width = *dlogits.shape, hidden.shape[1]
    made = columns if blocks is None else len(blocks) * EXACT_BLOCK
    programs = programs_of(tile, rows, made, hidden.device)
    second = terms.second
    columns2 = None if second.alpha is None or second.columns >= columns else second.columns
    grad_logits_kernel[(programs,)](
        *matrix(dlogits, tile.block_m, tile.block_n // 2, tile),
        *matrix(hidden, tile.block_m, tile.block_k, tile),
        *matrix(weight, tile.block_n, tile.block_k, tile),
        bias, class_weights, hidden_scale, weight_scale, blocks, terms.target, *terms.tensors[3:], *counted, rows,
        columns, made, width, first_column, columns2, row_stride(dlogits, tile), *transform, second.ratio,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        EVEN_HIDDEN=even(width, tile), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def level_rows(
    exp: torch.Tensor,  # [rows, vocab] 16 bit
    factors: torch.Tensor,  # [3, rows] fp32: softmax_factor, target_factor, ratio
    hidden: torch.Tensor | None,  # [rows, hidden] contiguous, times the softmax factor in place; None: not
    strips: Strips,
    strip: int,  # columns
    level: torch.Tensor,
    logprob: torch.Tensor,
    terms: Terms,  # of one softmax, alpha and beta
    transform: Transform,  # without a cap
    counted: Counted = ALL_ROWS,
    occurrences: torch.Tensor | None = None,  # [rows] int32: tokens of the call with the row's target
) -> None:
    rows, vocab = exp.shape
    block_rows, splits = 16, 8
    width = 0 if hidden is None else hidden.shape[1]
    count = strips.offset.shape[0]
    level_rows_kernel[(cdiv(rows, block_rows), splits)](
        exp, hidden, *factors,
        strips.offset, strips.sum, level, terms.target, occurrences, terms.target_logit, *terms.first[:2], logprob,
        terms.first.alpha, terms.beta, *counted, rows, vocab, count, strips.offset.stride(0), exp.stride(0), width,
        transform.logit_scale, transform.row_scale,
        BLOCK_ROWS=block_rows, STRIP=strip, SPLITS=splits, BLOCK=min(power_of_2(max(width, 1)), 256),
        num_warps=4,
    )  # fmt: skip


def scale(
    out: torch.Tensor,
    source: torch.Tensor,
    factor: torch.Tensor,  # []
    one_or_nan: torch.Tensor | None = None,  # []
    more: torch.Tensor | None = None,
) -> None:
    """``out = source * factor * one_or_nan`` for contiguous tensors of one shape; ``out`` may be ``source``, and
    ``more``, contiguous, is then scaled in place as well."""
    block, most = 4096, 8 * multiprocessors_of(source.device)
    numel, more_numel = source.numel(), 0 if more is None else more.numel()
    programs = min(most, cdiv(numel, block))
    scale_kernel[(programs + min(most, cdiv(more_numel, block)),)](
        out, more, source, factor, one_or_nan, numel, more_numel, programs,
        BLOCK=block, EVEN=source.shape[-1] % 16 == 0, MORE_EVEN=more is not None and more.shape[-1] % 16 == 0,
        IN_PLACE=out.data_ptr() == source.data_ptr(), num_warps=8,
    )  # fmt: skip
