"""Launches of the kernels of statistics on torch tensors: grids, block sizes, warps."""

from collections.abc import Sequence

import torch

from ...core.gpus import programs_of
from ...core.records import (
    ALL_ROWS,
    PLAIN,
    ColumnSets,
    CountedRows,
    SoftmaxVectors,
    Stored,
    SumVectors,
    TeacherSoftmax,
    Transform,
)
from ...core.tiles import HEAVY, INTERPRETED, Matrix, Tile, cdiv, power_of_2, row_block
from ..common.operands import Strips, as_quantised, even, matrix, row_stride, strip_stride, teacher_operands
from ..common.sums import code_of_sums, kernel_of, kinds_of
from . import merge as kernels
from .columns import clean_rows_kernel, dot_columns_kernel
from .exp_logits import exp_logits as body_of_tiles
from .heavy import mend_heavy as body_of_heavy
from .ids import kept_entries_kernel, kept_rows_kernel, read_fields_kernel, read_targets_kernel
from .lists import code_of_lanes, code_of_pieces, code_of_strips, code_of_tile
from .merge import sum_rows_kernel
from .row_stats import row_stats as body_of_rows
from .sums import row_sums

MAX_LOSSES = 4  # most losses that ``sum_rows_kernel`` adds up


def read_targets(
    target: torch.Tensor,  # [...] int64
    mask: torch.Tensor | None,  # [...] bool
    shift: int,  # tokens between a row and the token that it predicts
    ignore_index: int,  # id of targets that do not count
    vocab: int,  # ids from ``vocab`` on are out of range
    dtype: torch.dtype,  # dtype of the three numbers
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the target [tokens] int64 that each row predicts, -1 where a row does not count; and three numbers []:
    ``counted``, the number of rows that count; ``one_or_nan``, 1, or nan if an id is out of range; and
    ``one_or_nan / max(counted, 1)``."""
    tokens, line_length = target.numel(), target.shape[-1] if target.dim() else 1
    paired = torch.empty(tokens, dtype=torch.int64, device=target.device)
    counted, one_or_nan, inverse = torch.empty(3, dtype=dtype, device=target.device).unbind()
    read_targets_kernel[(1,)](
        paired, counted, one_or_nan, inverse,
        target.contiguous(), None if mask is None else mask.contiguous().view(torch.uint8),
        tokens, line_length, vocab, shift, ignore_index, BLOCK=4096, num_warps=16,
    )  # fmt: skip
    return paired, counted, one_or_nan, inverse


def read_fields(
    values: Sequence[torch.Tensor],  # fields, each floating point of the shape of the caller's target
    target: torch.Tensor,  # [tokens] int64, -1 where a row does not count
    shift: int,  # tokens between a row and the token that it predicts
    dtype: torch.dtype,  # dtype of the results
    maxima: Sequence[float],  # for each field the largest allowed number
) -> Sequence[torch.Tensor]:
    """Returns each field as [tokens]: a row has the number of the token that it predicts; 0 where a row does not count,
    and nan where a number is above the field's maximum."""
    tokens, block_tokens = len(target), 1024
    out = torch.empty(len(values), tokens, dtype=dtype, device=target.device)
    for first_field in range(0, len(values) if tokens else 0, 4):
        fields = [value.contiguous() for value in values[first_field : first_field + 4]]
        missing_count = 4 - len(fields)
        read_fields_kernel[(cdiv(tokens, block_tokens),)](
            out[first_field], *fields, *[None] * missing_count, target, tokens, shift,
            *maxima[first_field : first_field + 4], *[0.0] * missing_count, BLOCK=block_tokens, num_warps=4,
        )  # fmt: skip
    return out.unbind()


def clean_rows(
    out: torch.Tensor,  # [rows, hidden] contiguous
    source: torch.Tensor,  # [rows, hidden]
    target: torch.Tensor,  # [rows] int64, -1 where a row does not count
    order: torch.Tensor | None = None,  # [rows] int64: each row's index in ``source``; None: row i has index i
    logit: torch.Tensor | None = None,  # [rows] fp32, with ``weight``: receives the targets' logits
    weight: torch.Tensor | None = None,  # [vocab, hidden] contiguous
    bias: torch.Tensor | None = None,
    transform: Transform = PLAIN,
    counters: torch.Tensor | None = None,  # [n] int32 that become 0, for a later kernel to count in
    tile_logit: torch.Tensor | None = None,  # [rows] fp32: receives the targets' logits as ``exp_logits`` sums them
) -> None:
    """Writes ``out = source[order]``, 0 where a row does not count; and the logits of targets, if there is a ``logit``
    or a ``tile_logit``."""
    rows, hidden = out.shape
    # a product takes 16 rows at a time; without products a program per row is faster
    block_rows, block_columns, warps = 1, min(power_of_2(hidden), 2048), 4
    if tile_logit is not None:
        block_rows, block_columns, warps = 16, 64 if INTERPRETED else 512, 8
    clean_rows_kernel[(cdiv(rows, block_rows),)](
        out, logit, tile_logit, counters, source, weight, bias, target, order, rows,
        0 if counters is None else len(counters), hidden, *source.stride(), *transform,
        BLOCK_ROWS=block_rows, BLOCK=block_columns, num_warps=warps,
    )  # fmt: skip


def sum_rows(
    table: torch.Tensor,  # [rows, tokens] fp32 contiguous
    inverse: torch.Tensor,  # [] one_or_nan over the number of rows that count
    one_or_nan: torch.Tensor,  # [] 1, or nan if an id is out of range
    coefficients: Sequence[float],  # one for each loss; losses are the first rows of ``table``
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the total loss [], the sum of losses times coefficients; and the sum [rows] of each row of ``table``
    over tokens, times ``inverse`` for losses and ``one_or_nan`` for other rows. The two tensors share no memory."""
    loss_count = len(coefficients)
    total, sums = table.new_empty(()), table.new_empty(table.shape[0])
    coefficient_args = (*coefficients, *[0.0] * MAX_LOSSES)[:MAX_LOSSES]
    sum_rows_kernel[(table.shape[0],)](
        total, sums, table, inverse, one_or_nan, table.shape[1], loss_count, *coefficient_args, BLOCK=4096, num_warps=8
    )
    if loss_count > MAX_LOSSES:
        total = torch.stack([factor * value for factor, value in zip(coefficients, sums, strict=False)]).sum()
    return total, sums


def exp_logits(
    out: torch.Tensor | None,  # [rows, vocab] exponentials or fp16 relative logits, row stride a multiple of 8
    strips: Strips,
    hidden: Matrix,  # [rows, hidden] contiguous
    weight: Matrix,  # [vocab, hidden] contiguous, of the same dtype
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    row_offset: torch.Tensor | None,  # [rows] fp32: ``out`` gets exponentials; None: it gets relative logits
    transform: Transform,
    tile: Tile,
    # for each softmax its inverse temperature relative to the logits'; None for 1, which the first has
    ratios: Sequence[float | None] = (None,),
    # for each softmax the number of its columns, a multiple of a strip's; None for all, which the first has
    widths: Sequence[int | None] = (None,),
    counted: CountedRows = ALL_ROWS,
    target: torch.Tensor | None = None,  # [rows] int64, -1 where a row does not count; with ``target_logit``
    target_logit: torch.Tensor | None = None,  # [rows] fp32: replaces the target's logit in the product
) -> None:
    """Makes the logits of ``hidden @ weight.T``. Writes their exponentials or relative logits to ``out``, and the
    statistics of strips to ``strips``."""
    tile = tile.for_operand(weight)
    hidden, hidden_scale, hidden_common = as_quantised(hidden)
    weight, weight_scale, weight_common = as_quantised(weight)
    rows, vocab = hidden.shape[0], weight.shape[0]
    num_column_tiles = cdiv(vocab, tile.block_n)
    strip_width = tile.block_n // (strips.offset.shape[0] // num_column_tiles)
    assert not any((width or 0) % strip_width for width in widths)
    vocab_divisor = next(size for size in (tile.block_n, tile.block_n // 2, 1) if vocab % size == 0)
    programs = programs_of(tile, rows, vocab, hidden.device)
    kernel_of(body_of_tiles, "exp_logits_kernel", code_of_tile, strips.kinds)[(programs,)](
        *matrix(out, tile.block_m, tile.block_n // 2, tile),
        strips.offset, *strips.sums, *strips.statistic_vectors,
        *matrix(hidden, tile.block_m, tile.block_k, tile),
        *matrix(weight, tile.block_n, tile.block_k, tile),
        bias, class_weights, row_offset, target, hidden_scale, weight_scale, hidden_common, weight_common, target_logit,
        *counted, rows, strips.offset.stride(0), row_stride(out, tile), vocab, hidden.shape[1], *widths, *transform,
        *ratios, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STRIP=strip_width,
        GROUP_M=tile.group_m, VOCAB_DIVISOR=vocab_divisor, EVEN_HIDDEN=even(hidden.shape[1], tile),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def mend_heavy(
    ids: torch.Tensor,  # [rows, HEAVY] int32 contiguous: receives heavy ids
    logits: torch.Tensor,  # [rows, HEAVY] fp32 contiguous: receives their exact logits
    stored: torch.Tensor,  # [rows, vocab] what ``exp_logits`` has stored: mended in place
    strips: Strips,  # what ``exp_logits`` has written: mended in place
    hidden: torch.Tensor,  # [rows, hidden] contiguous, 16 bit
    weight: torch.Tensor,  # [vocab, hidden] contiguous, 16 bit
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    target: torch.Tensor,  # [rows] int64, -1 where a row does not count
    target_logit: torch.Tensor,  # [rows] fp32: the target's exact logit, the offset of the row's exponentials
    transform: Transform,
    strip_width: int,  # columns of a strip
    ratios: Sequence[float | None] = (None,),  # for each softmax, like the argument of ``exp_logits``
    widths: Sequence[int | None] = (None,),  # for each softmax, like the argument of ``exp_logits``
    counted: CountedRows = ALL_ROWS,
) -> None:
    """Replaces the logits of heavy ids (``heavy.py``) from e4m3 operands by exact ones, in ``stored`` and ``strips``.
    Writes each row's heavy ids and their logits to ``ids`` and ``logits``."""
    (rows, vocab), hidden_size, strip_count = stored.shape, hidden.shape[1], strips.offset.shape[0]
    kernel_of(body_of_heavy, "mend_heavy_kernel", code_of_tile, strips.kinds)[(rows,)](
        ids, logits, stored, *strips.sums, *strips.statistic_vectors,
        strips.offset, hidden, weight, bias, class_weights, target, target_logit, *counted,
        vocab, strip_count, strips.offset.stride(0), stored.stride(0), hidden_size, *widths, *transform, *ratios,
        IS_RELATIVE=stored.dtype == torch.float16, HEAVY=HEAVY, STRIP=strip_width,
        BLOCK_STRIPS=min(power_of_2(strip_count), 2048), BLOCK=min(power_of_2(hidden_size), 2048), num_warps=4,
    )  # fmt: skip


def merge_strips(
    out: SoftmaxVectors[torch.Tensor],  # all but ``target_logit`` are written
    level: torch.Tensor | None,  # [rows] fp32: receives the rows' levels of exponentials; None for relative logits
    strips: Strips,
    target_logit: torch.Tensor | None,  # [rows] fp32: the target's exact logit
    tile_logit: torch.Tensor | None,  # [rows] fp32: the target's logit in the strips' sums; None: the exact logit
    target: torch.Tensor | None,  # [rows] int64, -1 where a row does not count
    columns: int,  # number of columns that the softmax is over
    ratio: float | None = None,  # the softmax's inverse temperature relative to the logits'
    view: int = 0,  # index of the softmax
) -> None:
    """Merges all strips' statistics of the softmax with index ``view`` into ``out``."""
    strip_count, rows = strips.offset.shape
    strip_vectors = [vector for _, vectors in strips.statistics[view] for vector in vectors]
    kernel_of(kernels.merge_strips, "merge_strips_kernel", code_of_strips, out.kinds)[(cdiv(rows, 8),)](
        out.lse, out.lse_base, out.neg_log_sum, out.logprob, level if view == 0 else None, *out.statistic_vectors,
        strips.offset, strips.sums[view], *strip_vectors, target_logit, tile_logit, target,
        rows, strips.offset.stride(0), strip_count, columns, ratio,
        IS_FIRST_SOFTMAX=view == 0, BLOCK_ROWS=8, BLOCK_STRIPS=512, num_warps=8,
    )  # fmt: skip


def row_stats(
    out: SoftmaxVectors[torch.Tensor],
    stored: Stored,  # raw logits
    columns: int,
    target: torch.Tensor | None = None,  # [rows] int64, -1 where a row does not count
    class_weights: torch.Tensor | None = None,  # [columns]
    ratio: float | None = None,  # the softmax's inverse temperature relative to the logits'
) -> None:
    """Writes the statistics of a softmax over complete rows of raw logits to ``out``."""
    logits = stored.logits
    assert stored.offset is None
    block_columns, warps = row_block(columns)
    kernel_of(body_of_rows, "row_stats_kernel", code_of_lanes, out.kinds)[(logits.shape[0],)](
        *out[:-1], *out.statistic_vectors, logits, None, None, None, target, stored.bias, class_weights, columns,
        logits.stride(0), *stored.transform, ratio, FILLS_ZEROS=False, BLOCK=block_columns, num_warps=warps,
    )  # fmt: skip


def set_stats(
    out: SoftmaxVectors[torch.Tensor],  # without a weighted sum
    logit: torch.Tensor,  # [entries] fp32
    sets: ColumnSets,
    target: torch.Tensor,  # [rows] int64: the target's column, -1 where a row does not count
    ratio: float | None,  # the softmax's inverse temperature relative to the logits'
) -> None:
    """Writes the statistics of rows with a set of columns to ``out``. Rows without a set get 0 if every row that
    counts has a set, and else stay as they are."""
    kernel_of(body_of_rows, "row_stats_kernel", code_of_lanes, out.kinds)[(len(target),)](
        *out[:-1], *out.statistic_vectors, logit, sets.columns, sets.begins, sets.ends, target, None, None,
        0, 0, *PLAIN, ratio, FILLS_ZEROS=sets.everywhere, BLOCK=128, num_warps=1,
    )  # fmt: skip


def sums(
    # of one softmax of the student; all sums read the teacher, or no sum does
    outputs: Sequence[SumVectors[torch.Tensor | None]],
    student: Stored,
    softmax: tuple[torch.Tensor, torch.Tensor],  # lse_base and neg_log_sum, [rows] fp32 each
    ratio: float | None,  # the softmax's inverse temperature relative to the logits'
    teacher: TeacherSoftmax | None,
    columns: int,  # number of columns that both vocabularies have
    tie_tolerance: float | None,  # relative difference up to which probabilities count as equal; None for 0
) -> None:
    """Writes sums over the vocabulary to ``outputs``, from stored logits and the statistics of their softmaxes."""
    tensors = [tensor for output in outputs for tensor in (output.value, output.total) if tensor is not None]
    numbers = [number for output in outputs for number in output.numbers]
    kernel_of(row_sums, "sums_kernel", code_of_sums, kinds_of(outputs))[(student.logits.shape[0],)](
        *tensors, student.logits, student.offset, student.bias, *softmax, *teacher_operands(teacher),
        strip_stride(student, teacher), columns, student.logits.stride(0), *student.transform, ratio, *numbers,
        tie_tolerance, BLOCK=min(row_block(columns)[0], 2048), num_warps=4,
    )  # fmt: skip


def dot_columns(
    logit: torch.Tensor,  # [rows, n] or [entries] fp32, contiguous
    hidden: torch.Tensor,  # [rows, hidden]
    weight: torch.Tensor,  # [vocab, hidden]
    columns: torch.Tensor,  # int64 or int32 of the shape of ``logit``, contiguous, -1 for no column
    bias: torch.Tensor | None,
    transform: Transform,
    rows: torch.Tensor | None = None,  # [entries] int64: each entry's row; None: row i of ``logit`` [rows, n] is row i
    fill_value: float = 0.0,  # logit of an entry without a column
) -> None:
    """Writes the exact logits of ``columns`` to ``logit``, and ``fill_value`` where a column is -1."""
    entries, entries_per_row, hidden_size = columns.numel(), columns.shape[-1], hidden.shape[1]
    dot_columns_kernel[(cdiv(entries, 8),)](
        logit, hidden, weight, columns, rows, bias, entries, entries_per_row, hidden_size,
        *hidden.stride(), *weight.stride(), fill_value, *transform, BLOCK_ENTRIES=8,
        BLOCK=min(power_of_2(hidden_size), 256), num_warps=4,
    )  # fmt: skip


def merge_softmax(
    out: SoftmaxVectors[torch.Tensor],
    gathered: torch.Tensor,  # [ranks, numbers, rows] fp32: the numbers that each rank has sent
    zero_or_nan: torch.Tensor,  # [] fp32: added to the results
    target: torch.Tensor,  # [rows] int64
    ratio: float,  # the softmax's inverse temperature relative to the logits'
    indices: SoftmaxVectors[int],  # indices of the statistics among the numbers
    has_target_logits: bool,  # True: all ranks have sent the target's logit; False: one rank, the others 0
) -> None:
    """Merges the statistics of a softmax that the ranks have sent, each over a piece of the vocabulary, into
    ``out``."""
    ranks, num_numbers, rows = gathered.shape
    kernel_of(kernels.merge_ranks, "merge_ranks_kernel", code_of_pieces, out.kinds)[(cdiv(rows, 64),)](
        out.lse_base, out.neg_log_sum, out.lse, out.logprob, out.target_logit, *out.statistic_vectors, gathered,
        zero_or_nan, target, ranks, num_numbers, rows, *indices.statistic_vectors, ratio, LSE_BASE=indices.lse_base,
        NEG_LOG_SUM=indices.neg_log_sum, TARGET_LOGIT=indices.target_logit,
        HAS_TARGET_LOGITS=has_target_logits, BLOCK=64, num_warps=4,
    )  # fmt: skip


def kept_sets(
    begins: torch.Tensor,  # [tokens] int64: index of a row's first entry
    ends: torch.Tensor,  # [tokens] int64: index after a row's last entry
    rows: torch.Tensor,  # [entries + tokens] int64: an entry's row
    columns: torch.Tensor,  # [entries + tokens] int32: an entry's column
    entry_bias: torch.Tensor | None,  # [entries + tokens] fp32: added to an entry's logit
    one_or_nan: torch.Tensor,  # [] fp32: becomes nan if an id, an offset or a set is wrong
    inverse: torch.Tensor,  # [] fp32: becomes nan in the same cases
    target: torch.Tensor,  # [tokens] int64: the target that a row predicts, -1 where the row does not count
    ids: torch.Tensor,  # [entries] int: ids that tokens keep, -1 for no id
    offsets: torch.Tensor | None,  # [tokens + 1] int64: index of a token's first id; None: all have equally many ids
    bias: torch.Tensor | None,  # [entries] fp32
    line_length: int,  # size of the last dimension of the caller's tensors
    shift: int,  # tokens between a row and the token that it predicts
    vocab: int,  # ids from ``vocab`` on are out of range
    everywhere: bool,  # True: a row that counts and keeps no ids is wrong
) -> None:
    """Writes the rows' sets of ids as entries to ``begins``, ``ends``, ``rows``, ``columns`` and ``entry_bias``."""
    tokens, entries, block_entries = len(target), len(ids), 128
    sizes = entries, entries // tokens, tokens, line_length
    kept_rows_kernel[(tokens,)](
        begins, ends, one_or_nan, inverse, ids, offsets, target, *sizes, shift,
        KEPT_EVERYWHERE=everywhere, BLOCK=block_entries, num_warps=1,
    )  # fmt: skip
    kept_entries_kernel[(cdiv(entries + tokens, block_entries),)](
        rows, columns, entry_bias, one_or_nan, inverse, begins, ends, ids, offsets, bias, target, *sizes, vocab,
        tokens.bit_length(), shift, BLOCK=block_entries, BLOCK_COMPARED=16, num_warps=4,
    )  # fmt: skip
