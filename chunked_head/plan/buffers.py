"""The tensors that a call makes: their shapes, dtypes and lifetimes. A plan's memory is the sum over this list.

A call runs through four phases, and a buffer lies in memory from its first to its last one.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple

import torch

from ..core.stats import BLOCKS, numbers_sent
from ..kernels.common.gpus import split_strips
from ..kernels.common.tiles import LEAST_SECTION, piece_bytes
from .sizes import CHUNK_MULTIPLE, MiB, Sizes

# temporaries of the losses' arithmetic for each token that it runs for, and for each column of the token's
BYTES_PER_EVALUATED = 80
BYTES_PER_COLUMN = 96
BYTES_PER_ROW = 24  # temporaries of torch's gradient of a row of logits
CAST_BYTES = 16 * MiB
BYTE = torch.uint8


class Phase(IntEnum):
    """A part of a call, in the order in which they run."""

    SWEEP = 0  # logits and statistics of a chunk
    LOSSES = 1  # the losses' arithmetic, on vectors of tokens
    LOOP = 2  # gradients of a chunk, or of all tokens in backward
    HIDDEN = 3  # the gradient of hidden gets its dtype and the upstream gradient's factor, and is handed over
    WEIGHT = 4  # the gradients of weight and bias likewise


SWEEP, LOSSES, LOOP, HIDDEN, WEIGHT = Phase


class Buffer(NamedTuple):
    """A tensor that a call makes, or several of one lifetime as one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # uint8: bytes of several dtypes
    first: Phase
    last: Phase
    kind: Literal["extra", "gradient", "cast"] = "extra"  # the budget limits the first

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def peak_of(buffers: Iterable[Buffer], since: Sequence[int] = (0,) * len(Phase)) -> int:
    """Bytes of the phase that needs most, where ``since`` are there already."""
    return max(map(sum, zip(since, phase_bytes(buffers), strict=True)))


def phase_bytes(buffers: Iterable[Buffer]) -> list[int]:
    """[phases] bytes in memory in each."""
    change = [0] * (len(Phase) + 1)
    for _, shape, dtype, first, last, _ in buffers:
        size = math.prod(shape) * dtype.itemsize
        change[first] += size
        change[last + 1] -= size
    return list(itertools.accumulate(change[:-1]))


def extra_of(buffers: Sequence[Buffer]) -> int:
    """The peak beside the gradients, a cast of the weight not counted: the bytes that a budget limits."""
    return max(0, peak_of(b for b in buffers if b.kind != "cast") - gradients_of(buffers))


def gradients_of(buffers: Sequence[Buffer]) -> int:
    return sum(buffer.bytes for buffer in buffers if buffer.kind == "gradient")


def gradient_buffers(sizes: Sizes, hidden_acc: torch.dtype, weight_acc: torch.dtype, begin: Phase) -> Iterator[Buffer]:
    """The gradients that are handed over; where they wait in another dtype, they are made of that at the end."""
    if sizes.hidden_grad:
        shape, waits = (sizes.own_tokens, sizes.hidden), hidden_acc != sizes.hidden_dtype
        yield Buffer("gradient of hidden", shape, sizes.hidden_dtype, HIDDEN if waits else begin, WEIGHT, "gradient")
        if waits:
            yield Buffer("gradient of hidden, waiting", shape, hidden_acc, begin, HIDDEN)
    rows, waits = sizes.vocab + sizes.padding, weight_acc != sizes.weight_dtype
    first = WEIGHT if sizes.returns_weight_grad and waits else begin
    if sizes.returns_weight_grad:
        yield Buffer("gradient of weight", (rows, sizes.hidden), sizes.weight_dtype, first, WEIGHT, "gradient")
        if waits:
            yield Buffer("gradient of weight, waiting", (rows, sizes.hidden), weight_acc, begin, WEIGHT)
    if sizes.bias_grad:
        yield Buffer("gradient of bias", (rows,), sizes.weight_dtype, first, WEIGHT, "gradient")


def vector_buffers(sizes: Sizes) -> Iterator[Buffer]:
    """Numbers of each token."""
    demand, tokens, wide = sizes.demand, sizes.tokens, wide_dtype(sizes)
    yield Buffer("targets", (tokens,), torch.int64, SWEEP, WEIGHT)
    yield Buffer("columns' ids", (tokens, demand.columns), torch.int64, SWEEP, WEIGHT)
    yield Buffer("fields", (tokens, demand.field_bytes + 4 * demand.columns), BYTE, SWEEP, WEIGHT)
    yield Buffer("statistics", (tokens, 5 + demand.vectors), wide, SWEEP, WEIGHT)
    values = 1 if sizes.late_upstream else demand.values  # the first: a loss of each token
    yield Buffer("values", (tokens, values), wide, SWEEP, WEIGHT)
    if sizes.any_grad:
        numbers = 1 + len(demand.views) + sum(demand.entropy) + demand.weighted_sum + demand.columns
        numbers += 2 * (demand.pairing is not None)
        yield Buffer("coefficients", (tokens, numbers), wide, SWEEP, WEIGHT)


def chunk_buffers(sizes: Sizes, rows: int, last: Phase, stored: bool) -> Iterator[Buffer]:
    """The rows of a chunk, in memory until ``last``. ``stored``: with their logits."""
    demand = sizes.demand
    yield Buffer("statistics of ranks and blocks", (rows, merged_bytes(sizes)), BYTE, SWEEP, SWEEP)
    if sizes.store == "kept":
        if sizes.scratch:  # torch sums hidden's gradient apart
            yield Buffer("sums of hidden's gradient", (rows, sizes.hidden), torch.float32, SWEEP, last)
        return
    if stored:
        yield from logits_buffers(sizes, rows, last)
    yield from operand_buffers(sizes, rows, SWEEP, last)
    if sizes.store != "logits":
        assert sizes.gpu is not None
        relative, block = stored and sizes.store == "relative", None if stored else sizes.block
        strips = sizes.gpu.strips_of(sizes.vocab, sizes.hidden, relative, block)
        strips += split_strips(demand.views[-1].columns)
        two = len(demand.views) > 1
        numbers = 2 + demand.entropy[0] + demand.weighted_sum + 2 * demand.top + two + any(demand.entropy[1:])
        yield Buffer("statistics of strips", (rows, strips, numbers), torch.float32, SWEEP, last)


def logits_buffers(sizes: Sizes, rows: int, last: Phase) -> Iterator[Buffer]:
    """A chunk's stored logits, and its teacher's."""
    if sizes.store == "logits":
        yield Buffer("logits", (rows, sizes.vocab), wide_dtype(sizes), SWEEP, last)
    else:
        yield Buffer("logits", (rows, padded_columns(sizes.vocab)), sizes.dtype, SWEEP, last)
    if sizes.teacher_store is None:
        return
    # where they come last, the buffer is for some rows of a chunk that makes gradients
    teacher_rows = sizes.teacher_rows(rows) if last == LOOP else rows
    if sizes.teacher_store == "logits":
        yield Buffer("teacher's logits", (teacher_rows, sizes.teacher_columns), wide_dtype(sizes), SWEEP, last)
        return
    assert sizes.gpu is not None
    shape = (teacher_rows, padded_columns(sizes.teacher_columns))
    yield Buffer("teacher's logits", shape, sizes.dtype, SWEEP, last)
    # for all rows of a chunk: their strips lie as far apart as the student's
    strips = sizes.gpu.strips_of(sizes.teacher_columns, sizes.teacher_width, relative=True)
    yield Buffer("teacher's statistics of strips", (rows, strips, 2), torch.float32, SWEEP, last)


def operand_buffers(sizes: Sizes, rows: int, first: Phase, last: Phase) -> Iterator[Buffer]:
    """The matmuls' other operand: rows of hidden states in which those that do not count are 0."""
    yield Buffer("hidden states of a chunk", (rows, sizes.hidden), sizes.dtype, first, last)
    yield Buffer("teacher's hidden states of a chunk", (rows, sizes.teacher_width), sizes.dtype, first, last)
    if sizes.spread > 1:
        yield Buffer("hidden states of all ranks", (rows, sizes.hidden), sizes.hidden_dtype, first, last)
    if sizes.half and not sizes.half_products:  # an operand, and a product
        yield Buffer("hidden states in fp32", (2, rows, sizes.hidden), torch.float32, first, last)


def target_buffers(sizes: Sizes, rows: int) -> Iterator[Buffer]:
    """The fast path's tokens sorted by target, and sums of their rows; chunk by chunk where hidden states come so.
    The sums lie in the buffer of exponentials, unless that is too small for those of the least section: said of
    128 rows, whatever their number, since more rows should never need less."""
    at_once = sizes.tokens if sizes.spread == 1 else rows
    yield Buffer("tokens sorted by target", (sizes.tokens * 4 + at_once * 24,), BYTE, LOOP, LOOP)
    sums = piece_bytes(min(at_once, LEAST_SECTION), sizes.hidden)
    if sums > CHUNK_MULTIPLE * sizes.vocab * 2:
        yield Buffer("sums of targets' rows", (sums,), BYTE, LOOP, LOOP)


def work_buffers(sizes: Sizes, rows: int, columns: int, first: Phase, last: Phase) -> Iterator[Buffer]:
    """Elementwise tiles of a backend that needs them, and where 16-bit operands are cast, a tile of the weight or of
    its gradient. A scratch tile stays from ``first`` to ``last``, the others are of each statistic or gradient."""
    demand = sizes.demand
    if sizes.scratch:
        entropy, two = any(demand.entropy), len(demand.views) > 1
        tile = min(sizes.scratch, rows * columns * logit_bytes(sizes))
        yield Buffer("scratch tile", (tile,), BYTE, first, last)
        # three tiles and a mask of an entropy, two of a second softmax
        quarters = 13 * entropy + 24 * (demand.pairing is not None)
        if first == SWEEP:
            tiles = quarters + 4 * (two and not entropy)
            yield Buffer("tiles of statistics", (tiles, tile // 4), BYTE, SWEEP, SWEEP)
        if last == LOOP:
            tiles = quarters + (4 if entropy else 8) * two
            yield Buffer("tiles of gradients", (tiles, tile // 4), BYTE, LOOP, LOOP)
            yield Buffer("numbers of rows", (rows, BYTES_PER_ROW), BYTE, LOOP, LOOP)
    if sizes.half and not sizes.half_products:
        shape = (min(columns, cast_rows(sizes.hidden)), sizes.hidden)
        yield Buffer("a tile of the weight in fp32", shape, torch.float32, first, last)


def row_bytes(sizes: Sizes) -> int:
    """Bytes that one more row in a chunk costs."""
    return sum(buffer.bytes for buffer in chunk_buffers(sizes, 1, LOSSES, stored=True))


def merged_bytes(sizes: Sizes) -> int:
    """Bytes of all pieces' statistics of a row: as they come, as fp64, and the numbers that merge their softmaxes."""
    pieces = sizes.ranks if sizes.block is None else max(sizes.ranks, BLOCKS)
    if pieces == 1:
        return 0
    numbers, demand = 1 + numbers_sent(sizes.demand), sizes.demand
    largest = 8 * 2 * demand.top_k + 8 * demand.columns
    return pieces * (12 * numbers + 48 + largest) + 8 * numbers


def part_sums(sizes: Sizes, rows: int) -> int:
    """Bytes of the sums of dhidden's parts, where it is made in several; of its product, where BLAS makes that of
    exponentials."""
    if sizes.gpu is None or not sizes.hidden_grad:
        return 0
    if sizes.store == "fast" and not sizes.own_dhidden:
        return rows * sizes.hidden * 4
    return sizes.dhidden_split(rows).units * sizes.gpu.product.elements * 4


def wide_dtype(sizes: Sizes) -> torch.dtype:
    """The dtype of logits that are stored as they are."""
    return torch.promote_types(sizes.dtype, torch.float32)


def logit_bytes(sizes: Sizes) -> int:
    """Bytes that the buffer needs for one logit: 16-bit exponentials or relative logits, else fp32 (fp64) logits."""
    return wide_dtype(sizes).itemsize if sizes.store == "logits" else 2


def padded_columns(columns: int) -> int:
    """Elements of a 16-bit row that starts, as the tensor copy engine asks, on 16 bytes."""
    return math.ceil(columns / 8) * 8


def cast_rows(hidden: int) -> int:
    """Rows of the weight whose fp32 copy is about 16 MiB: as many as are cast at a time."""
    return max(CHUNK_MULTIPLE, CAST_BYTES // (4 * max(hidden, 1)))
