"""Launches of the kernels for the gradients of logits, on torch tensors: grids, block sizes, warps."""

from collections.abc import Sequence
from typing import Any

import torch

from ...core.gpus import RELATIVE_STRIP, multiprocessors_of, programs_of
from ...core.records import (
    ALL_ROWS,
    ColumnSets,
    CountedRows,
    Stored,
    SumVectors,
    TeacherSoftmax,
    Terms,
    Transform,
)
from ...core.tiles import ELSEWHERE, STRIPS_AT_ONCE, Matrix, Tile, cdiv, power_of_2, row_block
from ..common.launcher import Launcher
from ..common.operands import Strips, as_quantised, even, matrix, row_stride, strip_stride, teacher_operands
from ..common.sums import kernel_of, kinds_of
from . import grad_logits as matmul
from . import row_grad as kernels
from .identity import code_of_gradient
from .row_grad import level_rows_kernel, scale_kernel, scale_rows_kernel


def row_programs(columns: int) -> int:
    """The number of programs that share one row of ``columns`` relative logits."""
    return cdiv(cdiv(columns, RELATIVE_STRIP), STRIPS_AT_ONCE)


def gradient_kernel_of(
    body: Any,
    name: str,
    terms: Terms,
    sums: Sequence[SumVectors[torch.Tensor | None]] = (),
    has_entries: bool = False,
    is_fused: bool = False,
) -> tuple[Launcher, list[torch.Tensor]]:
    """Returns the kernel ``name`` of a gradient, and the vectors [rows] that ADD_TERMS reads, in order: coefficients
    and sums of slopes. ``is_fused``: the gradient is without the target's term, and uses ``fused_softmax_term``."""
    vectors = [vector for softmax in terms.softmaxes for vector in (softmax.alpha, softmax.eta)]
    vectors += [None if is_fused else terms.beta, terms.kappa]
    has_coefficients = tuple([vector is not None for vector in vectors])
    kernel = kernel_of(body, name, code_of_gradient, has_coefficients, kinds_of(sums), has_entries, is_fused)
    vectors += [vector for term in sums for vector in (term.coefficient, term.total)]
    return kernel, [vector for vector in vectors if vector is not None]


def row_grad(
    dlogits: torch.Tensor,  # [rows, columns], may share the logits' bytes; of sets' entries [entries] fp32
    stored: Stored,  # with ``entries`` exact logits of the entries, fp32
    class_weights: torch.Tensor | None,  # [columns]
    terms: Terms,
    teacher: TeacherSoftmax | None,
    sums: Sequence[SumVectors[torch.Tensor | None]],  # over the vocabulary: terms, and outputs
    tie_tolerance: float | None,  # relative difference up to which probabilities count as equal; None for 0
    first_column: int,  # column of the vocabulary that column 0 is
    transform: Transform,
    counted: CountedRows = ALL_ROWS,  # rows behind the last row that counts may stay unwritten
    # columns of each row that have exact logits, three tensors [rows, n]: ids (-1 for none), a gradient to add, logits
    own_columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,  # ids, added gradients, logits
    # of entries: columns, gradients to add (or None), and for sets the begins and ends of rows (else None)
    entries: tuple[torch.Tensor | None, ...] = (None, None, None, None),  # columns, added gradients, begins, ends
) -> None:
    """Writes the gradient of the logits to ``dlogits``: in all columns, or, if there are ``entries``, only in the
    entries' columns. A second launch overwrites the gradient in ``own_columns``, computed from exact logits."""
    rows, columns, entries_per_row = len(terms.target), dlogits.shape[-1], None
    # one program walks over a row, since a narrower gradient overwrites logits of earlier columns
    block_rows, column_programs = 1, 1
    if entries[0] is not None:
        entries_per_row = entries[0].shape[-1]
        block, warps = power_of_2(entries_per_row), 1
        if entries[2] is not None:
            block, columns = 128, ELSEWHERE  # larger than any column
    elif stored.offset is not None:
        # a program has several strips, so that it loads numbers per row once for all of them
        block_rows, column_programs = 8, row_programs(columns)
        block, warps = RELATIVE_STRIP, 4
    else:
        block, warps = row_block(columns)
        block = min(block, 4096) if sums else block
    has_entries = entries_per_row is not None
    if has_entries:
        sums = [term._replace(value=None) for term in sums]
    kernel, coefficients = gradient_kernel_of(kernels.row_grad, "row_grad_kernel", terms, sums, has_entries)
    lse_bases, neg_log_sums, _, _, ratios, widths = zip(*terms.softmaxes, strict=True)
    partial_sums = [term.value for term in sums if term.value is not None]
    kernel[(column_programs * cdiv(rows, block_rows),)](
        dlogits, *partial_sums, stored.logits, stored.offset, stored.bias,
        *((*entries, entries_per_row) if has_entries else ()),
        None if terms.kappa is None else class_weights, terms.target, terms.target_logit,
        *lse_bases, *neg_log_sums, *teacher_operands(teacher), *coefficients,
        rows, columns, first_column, *widths, stored.logits.stride(0), dlogits.stride(0),
        strip_stride(stored, teacher), partial_sums[0].stride(0) if partial_sums else None, *counted, *transform,
        *ratios, *[number for term in sums for number in term.numbers], tie_tolerance if sums else None,
        COLUMN_PROGRAMS=column_programs, BLOCK_ROWS=block_rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    if own_columns is not None:
        ids, added_gradients, exact_logits = own_columns
        operands = class_weights, terms, teacher, sums, tie_tolerance, first_column, transform
        row_grad(dlogits, Stored(exact_logits, None), *operands, entries=(ids, added_gradients, None, None))


def set_grad(
    dlogits: torch.Tensor,  # [entries] fp32
    logit: torch.Tensor,  # [entries] fp32
    sets: ColumnSets,
    terms: Terms,
    transform: Transform,
) -> None:
    """Writes to ``dlogits`` the gradient of the entries' logits. An entry that is in no row's set is not written."""
    entry_arguments = sets.columns, None, sets.begins, sets.ends  # nothing is added to the gradient
    row_grad(dlogits, Stored(logit, None), None, terms, None, (), None, 0, transform, entries=entry_arguments)


def grad_logits(
    dlogits: torch.Tensor,  # [rows, columns] 16 bit, row stride a multiple of 8
    hidden: Matrix,  # [rows, hidden] contiguous
    weight: Matrix,  # [columns, hidden] contiguous, of the same dtype
    bias: torch.Tensor | None,  # [columns]
    class_weights: torch.Tensor | None,  # [columns]
    terms: Terms,
    transform: Transform,
    tile: Tile,
    counted: CountedRows = ALL_ROWS,
) -> None:
    """Writes the gradient of the logits ``hidden @ weight.T`` to ``dlogits``, without the targets' terms."""
    tile = tile.for_operand(weight)
    hidden, hidden_scale, hidden_common = as_quantised(hidden)
    weight, weight_scale, weight_common = as_quantised(weight)
    rows, columns, hidden_size = *dlogits.shape, hidden.shape[1]
    programs = programs_of(tile, rows, columns, hidden.device)
    kernel, coefficients = gradient_kernel_of(matmul.grad_logits, "grad_logits_kernel", terms, is_fused=True)
    lse_bases, neg_log_sums, _, _, ratios, widths = zip(*terms.softmaxes, strict=True)
    widths = [None if width is None or width >= columns else width for width in widths]
    kernel[(programs,)](
        *matrix(dlogits, tile.block_m, tile.block_n // 2, tile),
        *matrix(hidden, tile.block_m, tile.block_k, tile),
        *matrix(weight, tile.block_n, tile.block_k, tile),
        bias, None if terms.kappa is None else class_weights, hidden_scale, weight_scale, hidden_common,
        weight_common, terms.target, *lse_bases, *neg_log_sums, *coefficients,
        *counted, rows, columns, hidden_size, *widths, row_stride(dlogits, tile), *transform, *ratios,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m,
        EVEN_HIDDEN=even(hidden_size, tile), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def level_rows(
    exp: torch.Tensor,  # [rows, vocab] 16 bit
    factors: torch.Tensor,  # [3, rows] fp32, written: softmax_factor, target_factor, ratio
    hidden: torch.Tensor | None,  # [rows, hidden] contiguous, multiplied by the softmax factor in place
    strips: Strips,
    strip_width: int,  # number of columns of a strip
    level: torch.Tensor,  # [rows] fp32: the offset that a row's exponentials get
    logprob: torch.Tensor,  # [rows] fp32
    terms: Terms,  # of one softmax, alpha and beta
    transform: Transform,  # without a cap
    counted: CountedRows = ALL_ROWS,
    occurrences: torch.Tensor | None = None,  # [rows] int32: number of the call's tokens with the row's target
    clears_targets: bool = False,  # exponentials at targets become 0 in all rows
) -> None:
    """Rescales ``exp`` so that all exponentials of a row are relative to ``level``, and writes ``factors``."""
    rows, vocab = exp.shape
    block_rows, splits = 16, 8
    hidden_size = 0 if hidden is None else hidden.shape[1]
    strip_count, (softmax,) = strips.offset.shape[0], terms.softmaxes
    level_rows_kernel[(cdiv(rows, block_rows), splits)](
        exp, hidden, *factors,
        strips.offset, strips.sums[0], level, terms.target, occurrences, terms.target_logit, *softmax[:2], logprob,
        softmax.alpha, terms.beta, *counted, rows, vocab, strip_count, strips.offset.stride(0), exp.stride(0),
        hidden_size, transform.logit_scale, transform.row_scale,
        BLOCK_ROWS=block_rows, STRIP=strip_width, CLEARS_TARGETS=clears_targets, SPLITS=splits,
        BLOCK=min(power_of_2(max(hidden_size, 1)), 256), num_warps=4,
    )  # fmt: skip


def scale(
    out: torch.Tensor,
    source: torch.Tensor,
    factor: torch.Tensor,  # []
    one_or_nan: torch.Tensor | None = None,  # [] factor of 1 or nan
    second: torch.Tensor | None = None,  # contiguous, of any shape: multiplied in place
) -> None:
    """Writes ``out = source * factor * one_or_nan`` for contiguous tensors of one shape; ``out`` may be ``source``.
    Multiplies ``second`` by the same factors in place."""
    block, max_programs = 4096, 8 * multiprocessors_of(source.device)
    numel, second_numel = source.numel(), 0 if second is None else second.numel()
    programs = min(max_programs, cdiv(numel, block))
    scale_kernel[(programs + min(max_programs, cdiv(second_numel, block)),)](
        out, second, source, factor, one_or_nan, numel, second_numel, programs,
        BLOCK=block, EVEN=source.shape[-1] % 16 == 0, SECOND_EVEN=second is not None and second.shape[-1] % 16 == 0,
        IN_PLACE=out.data_ptr() == source.data_ptr(), num_warps=8,
    )  # fmt: skip


def scale_rows(out: torch.Tensor, source: torch.Tensor, factors: torch.Tensor) -> None:
    """Writes ``out = source * factors[:, None]`` for contiguous tensors [rows, columns], 0 where a factor is 0. ``out``
    may be ``source``."""
    rows, columns = source.shape
    if rows:
        block = min(2048, power_of_2(columns))
        scale_rows_kernel[(rows,)](out, source, factors, columns, BLOCK=block, num_warps=4)
