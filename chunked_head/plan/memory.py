"""What a call costs in memory: the terms that a plan adds up.

Bytes are counted per phase of a call (a sweep for statistics, the loop that makes gradients, and the finish that hands
them over), because what waits in the loop and what is handed over never lie in memory with everything else.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from ..kernels.common.cache import Cache
from ..kernels.common.tiles import LEAST_SECTION, piece_bytes
from .sizes import BYTES_PER_COLUMN, BYTES_PER_EVALUATED, Sizes

MiB = 1 << 20
CHUNK_MULTIPLE = 128
# target, validity, weights, statistics and coefficients of a call that asks for nothing further
BYTES_PER_TOKEN = 56
CAST_BYTES = 16 * MiB


class Term(NamedTuple):
    """One line of the memory table: bytes while the loop runs, while the gradients are handed over, and (where the
    gradients are recomputed) in the sweep for statistics before."""

    name: str
    loop: int
    finish: int = 0
    sweep: int = 0
    kind: Literal["extra", "gradient", "cast"] = "extra"  # the budget limits the first


class Memory:
    """What one schedule costs, by the number of rows in its chunks or of columns in its tiles: ``sized`` makes the
    terms that it decides, between those of ``gradients`` and ``common``, which are the same for all of them."""

    def __init__(self, gradients: Sequence[Term], sized: Callable[[int], tuple[Term, ...]], common: Sequence[Term]):
        self.gradients, self.sized, self.common = gradients, sized, common
        # a plan is sought by asking for many sizes, some of them twice
        fixed = [*gradients, *common]
        self.fixed = tuple([summed([t for t in fixed if t.kind == kind], kind) for kind in ("extra", "gradient")])
        self.known: dict[int, int] = {}

    def terms(self, size: int) -> tuple[Term, ...]:
        return (*self.gradients, *self.sized(size), *self.common)

    def extra(self, size: int) -> int:
        """What the budget limits."""
        found = self.known.get(size)
        if found is None:
            found = self.known[size] = extra_of((*self.fixed, *self.sized(size)))
        return found

    def largest(self, budget: int, most: int, multiple: int = CHUNK_MULTIPLE) -> int:
        """The largest size up to ``most`` that fits, a multiple of ``multiple`` unless it is ``most`` or no such
        fits."""
        if self.extra(most) <= budget:
            return most
        for step, top in ((multiple, most // multiple), (1, multiple - 1)):
            low, high = 0, top  # what fits is monotone: bisect
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self.extra(middle * step) <= budget else (low, middle - 1)
            if low:
                return low * step
        return 0


def summed(terms: Sequence[Term], kind: Literal["extra", "gradient"]) -> Term:
    return Term("", sum(t.loop for t in terms), sum(t.finish for t in terms), sum(t.sweep for t in terms), kind)


def peak_of(terms: Sequence[Term]) -> int:
    return max(sum([t.sweep for t in terms]), sum([t.loop for t in terms]), sum([t.finish for t in terms]))


def extra_of(terms: Sequence[Term]) -> int:
    """The peak beside the gradients, a cast of the weight not counted."""
    counted = [t for t in terms if t.kind != "cast"]
    return max(0, peak_of(counted) - sum([t.finish for t in counted if t.kind == "gradient"]))


def sweep_memory(sizes: Sizes) -> Memory:
    """A pass that keeps statistics and no gradient, by rows."""
    kept = sizes.keeps_sweep
    row_bytes = kept * sizes.kept_bytes + sizes.swept_bytes(kept)

    def sized(rows: int) -> tuple[Term, ...]:
        return (
            Term("logits of a chunk and its rows", 0, sweep=rows * row_bytes),
            Term("work space of tiles", 0, sweep=work_space(sizes, sizes.vocab, rows)),
        )

    return Memory((), sized, common_terms(sizes))


FORWARD: Cache[tuple, Memory] = Cache(16)


def forward_memory(sizes: Sizes, hidden_acc: torch.dtype, weight_acc: torch.dtype) -> Memory:
    """Gradients in the forward pass, by rows: they wait in ``*_acc`` and are the gradients where that is their
    dtype."""
    key = sizes, hidden_acc, weight_acc
    return FORWARD.made(key, lambda: forward_memory_of(*key))


def forward_memory_of(sizes: Sizes, hidden_acc: torch.dtype, weight_acc: torch.dtype) -> Memory:
    d_hidden, d_weight = gradient_terms(sizes)
    wait_h = sizes.own_tokens * sizes.hidden * hidden_acc.itemsize if sizes.hidden_grad else 0
    wait_w = sizes.weight_elements * weight_acc.itemsize if sizes.own_weight_grad else 0
    cast_h, cast_w = hidden_acc != sizes.hidden_dtype, weight_acc != sizes.weight_dtype
    # the gradient of hidden is handed over first, and its accumulator is gone before the weight's gradient comes
    left_h = max(0, wait_h - d_weight.finish) if cast_h and cast_w else wait_h if cast_h else 0
    gradients = (
        d_hidden._replace(loop=0 if cast_h else d_hidden.finish),
        d_weight._replace(loop=0 if cast_w else d_weight.finish),
        Term("gradient of hidden, waiting", wait_h if cast_h else 0, left_h),
        Term("gradient of weight, waiting", wait_w if cast_w else 0, wait_w if cast_w else 0),
    )
    swept, scattered, scaled = sizes.swept_bytes(kept=True), sizes.scattered_bytes(hidden_acc), scaled_tile(sizes)

    def sized(rows: int) -> tuple[Term, ...]:
        return (
            Term("logits of a chunk and its rows", sizes.gradient_kept_bytes(rows) + rows * swept),
            Term("gradient of hidden, of all ranks", rows * scattered),
            Term("target's terms of dweight", target_rows(sizes, rows) if sizes.store == "fast" else 0),
            Term("gradient of hidden, parts", part_sums(sizes, rows)),
            Term("work space of tiles", work_space(sizes, sizes.vocab, rows) + scaled),
        )

    return Memory(gradients, sized, common_terms(sizes))


def recompute_memory(
    sizes: Sizes, rows: int, block: int, weight_acc: torch.dtype, hidden_acc: torch.dtype | None = None
) -> Memory:
    """Gradients in backward, once the upstream gradient is known, by columns: blocks of tokens, tiles of vocabulary
    inside, after a sweep in chunks of ``rows``. ``hidden_acc``: where the width of a tile does not say."""
    d_hidden, d_weight = gradient_terms(sizes)
    cast_w = sizes.own_weight_grad and weight_acc != sizes.weight_dtype
    waiting = sizes.weight_elements * weight_acc.itemsize if cast_w else 0
    swept, *common = sweep_memory(sizes).terms(rows)
    gradients = (
        d_hidden._replace(loop=d_hidden.finish),
        d_weight._replace(loop=0 if cast_w else d_weight.finish),
        Term("gradient of weight, waiting", waiting, waiting),
    )

    def sized(tile: int) -> tuple[Term, ...]:
        wide = sizes.hidden_grad and (hidden_acc or sizes.hidden_accumulator(tile)) != sizes.hidden_dtype
        product = tile * sizes.hidden * 4 if sizes.weight_grad and sizes.through_fp32(weight_acc) else 0
        return (
            Term("gradient of hidden, a block", block * sizes.hidden * 4 if wide else 0),
            Term("gradient of hidden, of all ranks", block * sizes.scattered_bytes(sizes.hidden_dtype)),
            Term("gradients of a block's tile", block * sizes.tile_bytes(tile)),
            Term("hidden states of a block", block * (sizes.operand_bytes + sizes.teacher_width * sizes.element)),
            Term("work space of tiles", product + work_space(sizes, tile, block), sweep=common[0].sweep),
        )

    return Memory(gradients, sized, (swept, *common[1:]))


def gradient_terms(sizes: Sizes) -> tuple[Term, ...]:
    """The gradients that are handed over, as they stand during the finish."""
    d_hidden = sizes.own_tokens * sizes.hidden * sizes.hidden_dtype.itemsize if sizes.hidden_grad else 0
    d_weight = sizes.weight_elements * sizes.weight_dtype.itemsize if sizes.own_weight_grad else 0
    d_bias = (sizes.vocab + sizes.padding) * sizes.weight_dtype.itemsize if sizes.bias_grad else 0
    return (
        Term("gradient of hidden", 0, d_hidden, kind="gradient"),
        Term("gradient of weight", 0, d_weight + d_bias, kind="gradient"),
    )


def common_terms(sizes: Sizes) -> tuple[Term, ...]:
    """What every schedule needs from start to end."""
    copy = sizes.own_tokens * sizes.hidden * sizes.hidden_dtype.itemsize if sizes.copied else 0
    cast = sizes.weight_elements * sizes.element if sizes.weight_dtype != sizes.dtype else 0
    cast += sizes.teacher_columns * sizes.teacher_width * sizes.element if sizes.teacher_cast else 0
    teacher = 0 if sizes.spread == 1 else sizes.tokens * sizes.teacher_width * sizes.element
    # a loss that sees all tokens at once does its arithmetic for all of them at once, as does one whose values are last
    at_once = sizes.coupled or sizes.by_segments or sizes.teacher_last
    evaluated = BYTES_PER_EVALUATED + BYTES_PER_COLUMN * sizes.demand.columns if at_once else 0
    vectors = sizes.tokens * (BYTES_PER_TOKEN + 8 * sizes.demand.vectors + 16 * sizes.demand.columns + evaluated)
    return (
        Term("contiguous hidden states", copy, copy, copy),
        Term("teacher's hidden states of all ranks", teacher, teacher, teacher),
        Term("weight cast for autocast", cast, 0, cast, kind="cast"),
        Term("per-token vectors", vectors, vectors, vectors),
    )


def target_rows(sizes: Sizes, rows: int) -> int:
    """The fast path's tokens sorted by target, and sums of their rows; chunk by chunk where hidden states come so.
    The sums lie in the buffer of exponentials, but where that is too small for those of the least section: said of
    128 rows, whatever their number, since more rows should never need less."""
    at_once = sizes.tokens if sizes.spread == 1 else rows
    sums = piece_bytes(min(at_once, LEAST_SECTION), sizes.hidden)
    if sums <= CHUNK_MULTIPLE * sizes.vocab * 2:
        sums = 0
    return sizes.tokens * 4 + at_once * 24 + sums if sizes.weight_grad else 0


def part_sums(sizes: Sizes, rows: int) -> int:
    """Sums of dhidden's parts, where it is made in several; its product, where BLAS makes that of exponentials."""
    if sizes.gpu is None or not sizes.hidden_grad:
        return 0
    if sizes.store == "fast" and not sizes.own_dhidden:
        return rows * sizes.hidden * 4
    return sizes.dhidden_split(rows).units * sizes.gpu.product.elements * 4


def work_space(sizes: Sizes, columns: int, rows: int) -> int:
    """Elementwise tiles of a backend that needs them, and where 16-bit operands are cast, the tiles of that."""
    demand = sizes.demand
    tiles = 1 + 3 * any(demand.entropy) + 3 * (len(demand.views) > 1) + 6 * (demand.pairing is not None)
    elementwise = tiles * min(sizes.scratch, rows * columns * sizes.logit_bytes)
    if not sizes.half or sizes.half_products:
        return elementwise
    # a tile of the weight, or of its gradient
    return elementwise + 4 * sizes.hidden * min(columns, cast_rows(sizes.hidden))


def scaled_tile(sizes: Sizes) -> int:
    """A tile of the weight's gradient that fp16's factor comes back to before it is added; where operands are cast,
    it is among their tiles."""
    if sizes.dtype != torch.float16 or sizes.store == "kept" or not (sizes.weight_grad and sizes.half_products):
        return 0
    return 4 * sizes.hidden * min(sizes.vocab, cast_rows(sizes.hidden))


def cast_rows(hidden: int) -> int:
    """Rows of the weight whose fp32 copy is about 16 MiB: what is cast at a time."""
    return max(CHUNK_MULTIPLE, CAST_BYTES // (4 * max(hidden, 1)))
