"""Launches of the kernels of logits' gradients on torch tensors: grids, block sizes, warps."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...core.gpus import RELATIVE_STRIP, multiprocessors_of, programs_of
from ...core.records import (
    ALL_ROWS,
    Counted,
    KeptEntries,
    Stored,
    SumTerm,
    TeacherSoftmax,
    Terms,
    Transform,
)
from ...core.tiles import ELSEWHERE, STRIPS_AT_ONCE, Matrix, Tile, cdiv, power_of_2, row_block
from ..common.operands import Strips, as_quantised, even, matrix, row_stride, strip_stride, teacher_operands
from ..common.sums import Kind, kernel_of
from . import grad_logits as matmul
from . import row_grad as kernels
from .identity import Gradient, code_of_gradient
from .row_grad import level_rows_kernel, scale_kernel, scale_rows_kernel


def row_programs(columns: int) -> int:
    """The number of programs that share a row of relative logits."""
    return cdiv(cdiv(columns, RELATIVE_STRIP), STRIPS_AT_ONCE)


class TermArguments(NamedTuple):
    """The arguments of a generated kernel that a gradient's terms give."""

    kinds: Gradient
    vectors: list[torch.Tensor]
    starts: tuple[torch.Tensor, ...]  # of softmaxes
    rests: tuple[torch.Tensor, ...]
    ratios: tuple[float | None, ...]
    widths: tuple[int | None, ...]


def term_arguments(
    terms: Terms, sums: Sequence[SumTerm] = (), has_entries: bool = False, is_fused: bool = False
) -> TermArguments:
    """The arguments for ``terms`` and ``sums``. ``has_entries``: of a gradient of entries. ``is_fused``: without the
    target's term, and with ``fused_softmax_term``."""
    starts, rests, alphas, etas, ratios, widths = zip(*terms.softmaxes, strict=True)
    factors = [*itertools.chain(*zip(alphas, etas, strict=True)), None if is_fused else terms.beta, terms.kappa]
    has_factors = tuple([factor is not None for factor in factors])
    kinds = [
        Kind(term.function, term.view, term.partial is not None, term.total is not None, term.coefficient is not None)
        for term in sums
    ]
    gradient = Gradient(len(starts), has_factors, tuple(kinds), has_entries, is_fused)
    factors += [vector for term in sums for vector in (term.coefficient, term.total)]
    vectors = [factor for factor in factors if factor is not None]
    return TermArguments(gradient, vectors, starts, rests, ratios, widths)


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
    own_columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    # columns, what each adds to the gradient, begins and ends of rows' sets; None for all columns
    entries: tuple[torch.Tensor | None, ...] = (None, None, None, None),
) -> None:
    """Writes the gradient of all columns to ``dlogits``; with ``entries``, of these columns only."""
    rows, columns, count = len(terms.target), dlogits.shape[-1], None
    # one program walks over a row, since a narrower gradient overwrites logits of earlier columns
    block_rows, column_programs = 1, 1
    if entries[0] is not None:
        count = entries[0].shape[-1]
        block, warps = power_of_2(count), 1
        if entries[2] is not None:
            block, columns = 128, ELSEWHERE  # larger than any column
    elif stored.offset is not None:
        # a program has several strips, so that it loads numbers per row once for all of them
        block_rows, column_programs = 8, row_programs(columns)
        block, warps = RELATIVE_STRIP, 4
    else:
        block, warps = row_block(columns)
        block = min(block, 4096) if sums else block
    if count is not None:
        sums = [term._replace(partial=None) for term in sums]
    flat = term_arguments(terms, sums, count is not None)
    partial_sums = [term.partial for term in sums if term.partial is not None]
    kernel = kernel_of(kernels.row_grad, "row_grad_kernel", flat.kinds, code_of_gradient)
    kernel[(column_programs * cdiv(rows, block_rows),)](
        dlogits, *partial_sums, stored.logits, stored.offset, stored.bias,
        *(() if count is None else (*entries, count)), None if terms.kappa is None else class_weights, terms.target,
        terms.target_logit, *flat.starts, *flat.rests, *teacher_operands(teacher), *flat.vectors,
        rows, columns, first_column, *flat.widths, stored.logits.stride(0), dlogits.stride(0),
        strip_stride(stored, teacher), partial_sums[0].stride(0) if partial_sums else None, *counted, *transform,
        *flat.ratios, *[number for term in sums for number in term.numbers], tie if sums else None,
        COLUMN_PROGRAMS=column_programs, BLOCK_ROWS=block_rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    if own_columns is not None:
        ids, added, exact = own_columns
        operands = class_weights, terms, teacher, sums, tie, first_column, transform
        row_grad(dlogits, Stored(exact, None), *operands, entries=(ids, added, None, None))


def set_grad(
    dlogits: torch.Tensor,  # [entries] fp32
    logit: torch.Tensor,  # [entries] fp32
    sets: KeptEntries,
    terms: Terms,
    transform: Transform,
) -> None:
    """Writes the gradient of the logits of sets' entries to ``dlogits``; entries of no row are not written."""
    entries = sets.columns, None, sets.begins, sets.ends
    row_grad(dlogits, Stored(logit, None), None, terms, None, (), None, 0, transform, entries=entries)


def grad_logits(
    dlogits: torch.Tensor,  # [rows, columns] 16 bit, row stride a multiple of 8
    hidden: Matrix,  # [rows, hidden] contiguous
    weight: Matrix,  # [columns, hidden] contiguous, of the same dtype
    bias: torch.Tensor | None,  # [columns], as class_weights
    class_weights: torch.Tensor | None,
    terms: Terms,
    transform: Transform,
    tile: Tile,
    counted: Counted = ALL_ROWS,
) -> None:
    """Writes to ``dlogits`` the gradient of the logits ``hidden @ weight.T``, without the targets' terms."""
    tile = tile.for_operand(weight)
    (hidden, hidden_scale, hidden_common), (weight, weight_scale, common) = as_quantised(hidden), as_quantised(weight)
    rows, columns, width = *dlogits.shape, hidden.shape[1]
    programs = programs_of(tile, rows, columns, hidden.device)
    flat = term_arguments(terms, is_fused=True)
    widths = [None if limit is None or limit >= columns else limit for limit in flat.widths]
    kernel_of(matmul.grad_logits, "grad_logits_kernel", flat.kinds, code_of_gradient)[(programs,)](
        *matrix(dlogits, tile.block_m, tile.block_n // 2, tile),
        *matrix(hidden, tile.block_m, tile.block_k, tile),
        *matrix(weight, tile.block_n, tile.block_k, tile),
        bias, None if terms.kappa is None else class_weights, hidden_scale, weight_scale, hidden_common,
        common, terms.target, *flat.starts, *flat.rests, *flat.vectors, *counted, rows, columns, width, *widths,
        row_stride(dlogits, tile), *transform, *flat.ratios,
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
    apart: bool = False,  # exponentials at targets are 0 in all rows
) -> None:
    rows, vocab = exp.shape
    block_rows, splits = 16, 8
    width = 0 if hidden is None else hidden.shape[1]
    count, (softmax,) = strips.offset.shape[0], terms.softmaxes
    level_rows_kernel[(cdiv(rows, block_rows), splits)](
        exp, hidden, *factors,
        strips.offset, strips.sums[0], level, terms.target, occurrences, terms.target_logit, *softmax[:2], logprob,
        softmax.alpha, terms.beta, *counted, rows, vocab, count, strips.offset.stride(0), exp.stride(0), width,
        transform.logit_scale, transform.row_scale,
        BLOCK_ROWS=block_rows, STRIP=strip, APART=apart, SPLITS=splits, BLOCK=min(power_of_2(max(width, 1)), 256),
        num_warps=4,
    )  # fmt: skip


def scale(
    out: torch.Tensor,
    source: torch.Tensor,
    factor: torch.Tensor,  # []
    one_or_nan: torch.Tensor | None = None,  # []
    second: torch.Tensor | None = None,
) -> None:
    """``out = source * factor * one_or_nan``, for contiguous tensors of one shape; ``out`` may be ``source``. The same
    launch scales ``second``, contiguous and of any shape, in place."""
    block, most = 4096, 8 * multiprocessors_of(source.device)
    numel, second_numel = source.numel(), 0 if second is None else second.numel()
    programs = min(most, cdiv(numel, block))
    scale_kernel[(programs + min(most, cdiv(second_numel, block)),)](
        out, second, source, factor, one_or_nan, numel, second_numel, programs,
        BLOCK=block, EVEN=source.shape[-1] % 16 == 0, SECOND_EVEN=second is not None and second.shape[-1] % 16 == 0,
        IN_PLACE=out.data_ptr() == source.data_ptr(), num_warps=8,
    )  # fmt: skip


def scale_rows(out: torch.Tensor, source: torch.Tensor, factors: torch.Tensor) -> None:
    """``out = source * factors[:, None]`` for contiguous tensors [rows, columns], 0 where a factor is 0; ``out`` may be
    ``source``."""
    rows, columns = source.shape
    if rows:
        block = min(2048, power_of_2(columns))
        scale_rows_kernel[(rows,)](out, source, factors, columns, BLOCK=block, num_warps=4)
