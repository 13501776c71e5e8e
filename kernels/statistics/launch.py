"""Launches of the kernels of statistics on torch tensors: grids, block sizes, warps."""

from collections.abc import Sequence

import torch

from ...core.gpus import programs_of
from ...core.records import (
    ALL_ROWS,
    PLAIN,
    Counted,
    KeptEntries,
    Outputs,
    Places,
    Stored,
    SumOutputs,
    TeacherSoftmax,
    Transform,
)
from ...core.tiles import HEAVY, INTERPRETED, Matrix, Tile, cdiv, power_of_2, row_block
from ..common.operands import Strips, as_quantised, even, matrix, row_stride, strip_stride, teacher_operands
from ..common.sums import flat_outputs, kernel_of
from . import merge as kernels
from .columns import clean_rows_kernel, dot_columns_kernel
from .exp_logits import exp_logits as body_of_tiles
from .heavy import mend_heavy as body_of_heavy
from .ids import kept_entries_kernel, kept_rows_kernel, read_fields_kernel, read_targets_kernel
from .lists import code_of_lanes, code_of_pieces, code_of_strips, code_of_tile
from .merge import sum_rows_kernel
from .row_stats import row_stats as body_of_rows
from .sums import row_sums

MOST_PARTS = 4  # most losses that sum_rows_kernel adds up


def read_targets(
    target: torch.Tensor,  # [...] int64
    mask: torch.Tensor | None,  # [...] bool
    shift: int,
    ignore_index: int,
    vocab: int,
    dtype: torch.dtype,  # of the numbers
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the targets [tokens] that rows predict, -1 where one does not count; and three numbers []: the count;
    1, or nan if an id is out of range; and the latter divided by the former."""
    tokens, length = target.numel(), target.shape[-1] if target.dim() else 1
    paired = torch.empty(tokens, dtype=torch.int64, device=target.device)
    counted, one_or_nan, inverse = torch.empty(3, dtype=dtype, device=target.device).unbind()
    read_targets_kernel[(1,)](
        paired, counted, one_or_nan, inverse,
        target.contiguous(), None if mask is None else mask.contiguous().view(torch.uint8),
        tokens, length, vocab, shift, ignore_index, BLOCK=4096, num_warps=16,
    )  # fmt: skip
    return paired, counted, one_or_nan, inverse


def read_fields(
    values: Sequence[torch.Tensor],  # [...] floating point each, tokens in all
    target: torch.Tensor,  # [tokens] int64, -1 where a row does not count
    shift: int,
    dtype: torch.dtype,
    most: Sequence[float],
) -> Sequence[torch.Tensor]:
    """Fields [tokens], shifted as ``read_targets`` shifts targets; nan where a number is above the field's ``most``."""
    tokens, block = len(target), 1024
    outs = torch.empty(len(values), tokens, dtype=dtype, device=target.device)
    for first in range(0, len(values) if tokens else 0, 4):
        fields = [value.contiguous() for value in values[first : first + 4]]
        missing = 4 - len(fields)
        read_fields_kernel[(cdiv(tokens, block),)](
            outs[first], *fields, *[None] * missing, target, tokens, shift, *most[first : first + 4], *[0.0] * missing,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return outs.unbind()


def clean_rows(
    out: torch.Tensor,  # [rows, hidden] contiguous
    source: torch.Tensor,  # [rows, hidden]
    target: torch.Tensor,  # [rows] int64, -1 where a row does not count
    order: torch.Tensor | None = None,  # [rows] int64, rows of ``source``; None: its first
    logit: torch.Tensor | None = None,  # [rows] fp32
    weight: torch.Tensor | None = None,  # [vocab, hidden] contiguous
    bias: torch.Tensor | None = None,
    transform: Transform = PLAIN,
    zeros: torch.Tensor | None = None,  # [counters] int32 that become 0, for a later kernel to count in
    tile_logit: torch.Tensor | None = None,  # [rows] fp32: ``logit`` as ``exp_logits`` sums it
) -> None:
    """``out = source[order]``, 0 where a row does not count. With ``weight``, also writes the targets' logits to
    ``logit`` and ``tile_logit``."""
    rows, hidden = out.shape
    # a product takes 16 rows at a time; without products a program per row is faster
    at_once, block, warps = 1, min(power_of_2(hidden), 2048), 4
    if tile_logit is not None:
        at_once, block, warps = 16, 64 if INTERPRETED else 512, 8
    clean_rows_kernel[(cdiv(rows, at_once),)](
        out, logit, tile_logit, zeros, source, weight, bias, target, order, rows, 0 if zeros is None else len(zeros),
        hidden, *source.stride(), *transform, ROWS=at_once, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def sum_rows(
    table: torch.Tensor,  # [rows, tokens] fp32 contiguous
    inverse: torch.Tensor,  # []
    one_or_nan: torch.Tensor,  # []
    coefficients: Sequence[float],  # of losses, whose rows come first
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of losses times their coefficients [], in memory of its own; and the sums over tokens [rows] of
    ``table``, those of losses times ``inverse``, the others times ``one_or_nan``."""
    loss_count = len(coefficients)
    total, sums = table.new_empty(()), table.new_empty(table.shape[0])
    first = (*coefficients, *[0.0] * MOST_PARTS)[:MOST_PARTS]
    sum_rows_kernel[(table.shape[0],)](
        total, sums, table, inverse, one_or_nan, table.shape[1], loss_count, *first, BLOCK=4096, num_warps=8
    )
    if loss_count > MOST_PARTS:
        total = torch.stack([c * value for c, value in zip(coefficients, sums, strict=False)]).sum()
    return total, sums


def exp_logits(
    out: torch.Tensor | None,  # [rows, vocab] exponentials or fp16 relative logits, row stride a multiple of 8
    strips: Strips,
    hidden: Matrix,  # [rows, hidden] contiguous
    weight: Matrix,  # [vocab, hidden] contiguous, of the same dtype
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    row_offset: torch.Tensor | None,  # [rows] fp32: then exponentials are stored, else relative logits
    transform: Transform,
    tile: Tile,
    ratios: Sequence[float | None] = (None,),  # of softmaxes; None for 1, as the first has
    widths: Sequence[int | None] = (None,),  # columns, multiples of a strip; None for all, as the first has
    counted: Counted = ALL_ROWS,
    target: torch.Tensor | None = None,  # [rows] int64, with ``target_logit``
    target_logit: torch.Tensor | None = None,  # [rows] fp32, in the place of the product's
) -> None:
    tile = tile.for_operand(weight)
    (hidden, hidden_scale, hidden_common), (weight, weight_scale, common) = as_quantised(hidden), as_quantised(weight)
    rows, vocab = hidden.shape[0], weight.shape[0]
    tiles = cdiv(vocab, tile.block_n)
    strip = tile.block_n // (strips.offset.shape[0] // tiles)
    assert not any((width or 0) % strip for width in widths)
    end = next(width for width in (tile.block_n, tile.block_n // 2, 1) if vocab % width == 0)
    programs = programs_of(tile, rows, vocab, hidden.device)
    kernel_of(body_of_tiles, "exp_logits_kernel", strips.kinds, code_of_tile)[(programs,)](
        *matrix(out, tile.block_m, tile.block_n // 2, tile),
        strips.offset, *strips.sums, *strips.vectors,
        *matrix(hidden, tile.block_m, tile.block_k, tile),
        *matrix(weight, tile.block_n, tile.block_k, tile),
        bias, class_weights, row_offset, target, hidden_scale, weight_scale, hidden_common, common, target_logit,
        *counted, rows, strips.offset.stride(0), row_stride(out, tile), vocab, hidden.shape[1], *widths, *transform,
        *ratios, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STRIP=strip,
        GROUP_M=tile.group_m, END=end, EVEN_HIDDEN=even(hidden.shape[1], tile), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def mend_heavy(
    ids: torch.Tensor,  # [rows, HEAVY] int32, as the logits contiguous
    logits: torch.Tensor,  # [rows, HEAVY] fp32
    stored: torch.Tensor,  # [rows, vocab] as ``exp_logits`` left it, mended, as the strips
    strips: Strips,
    hidden: torch.Tensor,  # [rows, hidden] contiguous, 16 bit, as the weight
    weight: torch.Tensor,  # [vocab, hidden]
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    target: torch.Tensor,  # [rows] int64, -1 where a row does not count
    target_logit: torch.Tensor,  # [rows] fp32, in the strips, and with exponentials the given offset
    transform: Transform,
    strip: int,  # columns
    ratios: Sequence[float | None] = (None,),  # as of ``exp_logits``, all that follow
    widths: Sequence[int | None] = (None,),
    counted: Counted = ALL_ROWS,
) -> None:
    """Exact logits in the places of heavy ids' e4m3 ones, and a list of these."""
    (rows, vocab), width, count = stored.shape, hidden.shape[1], strips.offset.shape[0]
    kernel_of(body_of_heavy, "mend_heavy_kernel", strips.kinds, code_of_tile)[(rows,)](
        ids, logits, stored, *strips.sums, *strips.vectors,
        strips.offset, hidden, weight, bias, class_weights, target, target_logit, *counted,
        vocab, count, strips.offset.stride(0), stored.stride(0), width, *widths, *transform, *ratios,
        IS_RELATIVE=stored.dtype == torch.float16, HEAVY=HEAVY, STRIP=strip,
        BLOCK_STRIPS=min(power_of_2(count), 2048), BLOCK=min(power_of_2(width), 2048), num_warps=4,
    )  # fmt: skip


def merge_strips(
    out: Outputs,  # without the target's logit
    level: torch.Tensor | None,  # [rows] fp32
    strips: Strips,
    target_logit: torch.Tensor | None,  # [rows] fp32, the exact logit
    tile_logit: torch.Tensor | None,  # [rows] fp32, the logit in the strips' sums; None: the exact one
    target: torch.Tensor | None,
    columns: int,
    ratio: float | None = None,
    view: int = 0,
) -> None:
    """Merges the strips' statistics of the softmax ``view``, which has ``columns`` columns, into ``out``."""
    count, rows = strips.offset.shape
    vectors = [vector for s in strips.statistics[view] for vector in s.vectors]
    kernel_of(kernels.merge_strips, "merge_strips_kernel", out.kinds, code_of_strips)[(cdiv(rows, 8),)](
        out.lse, out.start, out.rest, out.logprob, level if view == 0 else None, *out.vectors,
        strips.offset, strips.sums[view], *vectors, target_logit, tile_logit, target,
        rows, strips.offset.stride(0), count, columns, ratio,
        IS_FIRST=view == 0, BLOCK_ROWS=8, BLOCK_STRIPS=512, num_warps=8,
    )  # fmt: skip


def row_stats(
    out: Outputs,
    stored: Stored,  # raw
    columns: int,
    target: torch.Tensor | None = None,
    class_weights: torch.Tensor | None = None,
    ratio: float | None = None,
) -> None:
    logits = stored.logits
    assert stored.offset is None
    block, warps = row_block(columns)
    kernel_of(body_of_rows, "row_stats_kernel", out.kinds, code_of_lanes)[(logits.shape[0],)](
        *out[:-1], *out.vectors, logits, None, None, None, target, stored.bias, class_weights, columns,
        logits.stride(0), *stored.transform, ratio, FILL=False, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def set_stats(
    out: Outputs,  # but the weighted sum
    logit: torch.Tensor,  # [entries] fp32
    sets: KeptEntries,
    ratio: float | None,
    fill: bool,
) -> None:
    """Writes statistics of rows with sets to ``out``. With ``fill`` those of other rows become 0; else they are not
    written."""
    kernel_of(body_of_rows, "row_stats_kernel", out.kinds, code_of_lanes)[(len(sets.target),)](
        *out[:-1], *out.vectors, logit, *sets, None, None, 0, 0, *PLAIN, ratio, FILL=fill, BLOCK=128, num_warps=1
    )


def sums(
    outputs: Sequence[SumOutputs],  # of one softmax of the student, all with a teacher or none
    student: Stored,
    softmax: tuple[torch.Tensor, torch.Tensor],  # start and rest, [rows] fp32
    ratio: float | None,
    teacher: TeacherSoftmax | None,
    columns: int,  # that both have
    tie: float | None,  # relative difference of probabilities that count as equal
) -> None:
    """Writes sums over the vocabulary to ``outputs``, from stored logits and known softmaxes."""
    kinds, tensors, numbers = flat_outputs(outputs)
    kernel_of(row_sums, "sums_kernel", kinds)[(student.logits.shape[0],)](
        *tensors, student.logits, student.offset, student.bias, *softmax, *teacher_operands(teacher),
        strip_stride(student, teacher), columns, student.logits.stride(0), *student.transform, ratio, *numbers, tie,
        BLOCK=min(row_block(columns)[0], 2048), num_warps=4,
    )  # fmt: skip


def dot_columns(
    logit: torch.Tensor,  # [rows, count] or [entries] fp32, contiguous
    hidden: torch.Tensor,  # [rows, hidden]
    weight: torch.Tensor,  # [vocab, hidden]
    columns: torch.Tensor,  # of logit's shape, int64 or int32, contiguous, -1 for none
    bias: torch.Tensor | None,
    transform: Transform,
    rows: torch.Tensor | None = None,  # [entries] int64; None: those of ``logit``
    nothing: float = 0.0,
) -> None:
    """Writes exact logits of ``columns`` to ``logit``, and ``nothing`` where a column is -1."""
    entries, count, width = columns.numel(), columns.shape[-1], hidden.shape[1]
    at_once = 8
    dot_columns_kernel[(cdiv(entries, at_once),)](
        logit, hidden, weight, columns, rows, bias, entries, count, width, *hidden.stride(), *weight.stride(), nothing,
        *transform, AT_ONCE=at_once, BLOCK=min(power_of_2(width), 256), num_warps=4,
    )  # fmt: skip


def merge_softmax(
    out: Outputs,
    gathered: torch.Tensor,  # [ranks, numbers, rows] fp32
    zero_or_nan: torch.Tensor,  # [] fp32
    target: torch.Tensor,  # [rows] int64
    ratio: float,
    places: Places,
    known_targets: bool,
) -> None:
    """Merges the pieces' statistics into ``out``, those of the softmax over the vocabulary."""
    ranks, numbers, rows = gathered.shape
    block = 64
    kernel_of(kernels.merge_ranks, "merge_ranks_kernel", out.kinds, code_of_pieces)[(cdiv(rows, block),)](
        out.start, out.rest, out.lse, out.logprob, out.target_logit, *out.vectors, gathered, zero_or_nan, target,
        ranks, numbers, rows, *places.vectors, ratio, START=places.start, REST=places.rest, TARGET=places.target,
        KNOWN_TARGETS=known_targets, BLOCK=block, num_warps=4,
    )  # fmt: skip


def kept_sets(
    begins: torch.Tensor,  # [tokens] int64
    ends: torch.Tensor,  # [tokens] int64
    rows: torch.Tensor,  # [entries + tokens] int64
    columns: torch.Tensor,  # [entries + tokens] int32
    entry_bias: torch.Tensor | None,  # [entries + tokens] fp32
    one_or_nan: torch.Tensor,  # [] fp32
    inverse: torch.Tensor,  # [] fp32
    target: torch.Tensor,  # [tokens] int64
    ids: torch.Tensor,  # [entries] int
    offsets: torch.Tensor | None,  # [tokens + 1] int64; None: each token has as many
    bias: torch.Tensor | None,  # [entries] fp32
    length: int,  # of the last dimension
    shift: int,
    vocab: int,
    everywhere: bool,
) -> None:
    """Writes each row's set of ids as entries, to the first five arguments. ``one_or_nan`` and ``inverse`` are nan if
    an id or an offset is wrong."""
    tokens, entries, block = len(target), len(ids), 128
    numbers = entries, entries // tokens, tokens, length
    wrong = one_or_nan, inverse
    kept_rows_kernel[(tokens,)](
        begins, ends, *wrong, ids, offsets, target, *numbers, shift,
        EVERYWHERE=everywhere, BLOCK=block, num_warps=1,
    )  # fmt: skip
    kept_entries_kernel[(cdiv(entries + tokens, block),)](
        rows, columns, entry_bias, *wrong, begins, ends, ids, offsets, bias, target, *numbers, vocab,
        tokens.bit_length(), shift, BLOCK=block, AT_ONCE=16, num_warps=4,
    )  # fmt: skip
