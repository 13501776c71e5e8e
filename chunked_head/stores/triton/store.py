"""``HalfStore``, the base of stores of 16-bit operands, and ``GradStore``, whose matmul writes dlogits in the recompute
schedule."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.memory import empty
from ...core.records import CountedRows, Stored
from ...core.stats import Coefficients, RowStats
from ...core.tiles import Matrix, Quantised, cdiv
from ...kernels.e4m3 import launch as e4m3
from ...kernels.gradients import launch as gradients
from ...kernels.products import launch as products
from ...plan.plans import Plan, own_dweight
from ...plan.sizes import LOOP, SWEEP, Buffer, Sizes, padded_columns
from ..matmul import add_dweight
from ..operands import CallRows, Head, Rows
from ..quantised import empty_quantised
from ..store import MatmulStore, heavy_columns, own_columns, terms_of, transform

TMA_BYTES = 16  # alignment of rows for tensor descriptors
# least number of tokens of a frequent id; largest number of frequent ids, for which that least number grows
FREQUENT, MOST_FREQUENT = 32, 512


def counted_of(rows: Rows) -> CountedRows:
    """The rows that count, as kernels take them."""
    return CountedRows(rows.counted, rows.tokens.start)


def zero_uncounted_(dlogits: Tensor, rows: Rows) -> Tensor:
    """Fills the rows of ``dlogits`` that do not count with 0, for sums over all rows: our products do not write
    them. Returns ``dlogits``."""
    return dlogits if rows.counted is None else dlogits.masked_fill_((rows.target < 0).unsqueeze(1), 0.0)


def is_aligned(out: Tensor) -> bool:
    """True where each row of ``out`` starts on 16 bytes; a buffer of the caller's may start anywhere."""
    return out.data_ptr() % TMA_BYTES == 0 and out.stride(0) * out.element_size() % TMA_BYTES == 0


class FrequentRows:
    """Rows of the weight's gradient for frequent ids, the targets of many tokens, summed over chunks in float32.

    The terms of a frequent id nearly cancel. A 16-bit sum rounds the remainder twice in every chunk, since cuBLAS
    rounds a product before it adds it. On Zipf-distributed ids the error was 2.3e-3 with two chunks, 1.7e-3 with one.
    """

    def __init__(self, targets: Tensor, sizes: Sizes, rows: int):
        """``targets``: [tokens] int32 targets of all tokens in ascending order, -1 where a token does not count.
        ``rows``: number of rows of the largest chunk."""
        # every step-th target is picked: all ids of at least ``step`` tokens are, and some rarer ones
        self.targets, self.step, device = targets, step_of_frequent(sizes.tokens), targets.device
        picked_count = cdiv(sizes.tokens, self.step)
        self.sums = empty(picked_count, sizes.hidden, dtype=torch.float32, device=device)
        self.picked = empty(rows, picked_count, dtype=sizes.dtype, device=device)

    def add_chunk(self, dlogits: Tensor, rows: Rows, is_first: bool) -> None:
        """Adds a chunk's terms of the frequent ids' rows; stores them for the ``is_first`` chunk."""
        picked = self.picked[: len(dlogits)]
        products.pick_columns(picked, dlogits, self.targets, self.step, counted_of(rows))
        add_dweight(picked, rows.hidden, self.sums, is_first)

    def replace(self, out: Tensor) -> None:
        """Overwrites the rows of frequent ids in ``out``, the weight's gradient, with the sums."""
        products.put_rows(out, self.sums, self.targets, self.step)

    @staticmethod
    def buffers(sizes: Sizes, rows: int) -> Iterator[Buffer]:
        if sums_frequent(sizes, rows, sizes.weight_dtype):
            picked_count = cdiv(sizes.tokens, step_of_frequent(sizes.tokens))
            yield Buffer("frequent rows of the gradient", (picked_count, sizes.hidden), torch.float32, SWEEP, LOOP)
            yield Buffer("gradients of frequent ids' logits", (rows, picked_count), sizes.dtype, SWEEP, LOOP)


def step_of_frequent(tokens: int) -> int:
    """Number of tokens from which on an id is frequent, so that there are at most ``MOST_FREQUENT`` such ids."""
    return max(FREQUENT, cdiv(tokens, MOST_FREQUENT))


def sums_frequent(sizes: Sizes, rows: int, dtype: torch.dtype) -> bool:
    """True where a weight's gradient that adds up in ``dtype`` over chunks of ``rows`` rows needs ``FrequentRows``."""
    # more ranks add rows after each chunk, or most of their terms stand apart
    has_several_chunks = rows < sizes.tokens and sizes.hidden_ranks == 1 and not sizes.e4m3_gradients
    return has_several_chunks and sizes.returns_weight_grad and dtype == sizes.dtype == torch.bfloat16


class HalfStore(MatmulStore):
    """A store of 16-bit operands. Rows of its buffer start on 16 bytes, as our products need."""

    bounds_rows = True  # its matmuls can stop at a number of rows that only the device knows

    @classmethod
    def tile_buffers(cls, sizes: Sizes, rows: int, columns: int) -> Iterator[Buffer]:
        if sizes.grads_in_matmul:
            yield Buffer("gradients of a tile's logits", (rows, padded_columns(columns)), sizes.dtype, LOOP, LOOP)
        else:
            yield from super().tile_buffers(sizes, rows, columns)

    def __init__(self, backend: Any, head: Head, plan: Plan, all_rows: CallRows, tiled: bool):
        super().__init__(backend, head, plan, all_rows, tiled)
        assert self.sizes.gpu is not None
        self.gpu = self.sizes.gpu
        if self.sizes.fp8:
            self.hidden8 = empty_quantised(self.rows, self.sizes.hidden, head.weight.device, each_row=True)

    def operands(self, rows: Rows, head: Head, is_new: bool) -> tuple[Matrix, Matrix]:
        """Operands of the product that makes the logits. ``is_new``: the rows are others than at the last call, so e4m3
        operands are made again."""
        if head.fp8 is None:
            return rows.hidden, head.weight
        row_count = rows.target.shape[0]
        quantised = Quantised(*[each[:row_count] for each in self.hidden8 if each is not None])
        if is_new:
            e4m3.quantise(quantised, rows.hidden, head.fp8.direction, quantised.common)
        return quantised, head.fp8.weight

    def add_dweight(self, dlogits: Tensor, rows: Rows, out: Tensor, is_first: bool, gain: Tensor | None = None) -> None:
        if gain is None and is_aligned(out) and own_dweight(self.plan, is_stored=is_first):
            products.dweight(out, dlogits, rows.hidden, is_first, self.gpu.product, counted_of(rows))
        else:
            super().add_dweight(zero_uncounted_(dlogits, rows), rows, out, is_first, gain)


class GradStore(HalfStore):
    """The store of tiles whose statistics are known: its matmul writes the gradient of the logits, and no logits."""

    def __init__(self, backend: Any, head: Head, plan: Plan, all_rows: CallRows, tiled: bool):
        super().__init__(backend, head, plan, all_rows, tiled)
        elements = self.rows * padded_columns(self.columns)
        self.buffer = torch.empty(elements, dtype=self.sizes.dtype, device=head.weight.device)

    def gradient(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        head, count, columns = self.head.columns(tile), rows.target.shape[0], tile.stop - tile.start
        # a row starts on 16 bytes
        row_stride = padded_columns(columns)
        dlogits = self.buffer[: count * row_stride].view(count, row_stride)[:, :columns]
        terms = terms_of(self.demand, rows.target, stats, coefficients, tile.start, columns)
        logit_transform = transform(head, rows.scale)
        gradients.grad_logits(
            dlogits,
            *self.operands(rows, head, tile.start == 0),
            head.bias,
            head.class_weights,
            terms,
            logit_transform,
            self.gpu.logits,
            counted_of(rows),
        )
        targets = rows.target[:, None], None, terms.target_logit[:, None]
        for columns in (targets, heavy_columns(stats), own_columns(rows, stats, coefficients)):
            if columns is not None:
                ids, entry_coefficients, exact_logits = columns
                gradients.row_grad(
                    dlogits,
                    Stored(exact_logits, None),
                    head.class_weights,
                    terms,
                    None,
                    (),
                    None,
                    tile.start,
                    logit_transform,
                    entries=(ids, entry_coefficients, None, None),
                )
        return zero_uncounted_(dlogits, rows) if self.sizes.bias_grad else dlogits

    def add_dhidden(self, dlogits: Tensor, rows: Rows, weight: Tensor, out: Tensor, is_first: bool) -> None:
        # BLAS chooses its algorithm by the number of rows, and cannot stop at those that count
        if rows.counted is None and not self.sizes.deterministic:
            super().add_dhidden(dlogits, rows, weight, out, is_first)
        else:
            products.dhidden(out, dlogits, weight, self.gpu.product, counted=counted_of(rows), add=not is_first)
