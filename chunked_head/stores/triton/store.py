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
FREQUENT_TOKENS = 32  # least number of tokens of a frequent id; more if there would be more than MOST_FREQUENT such ids
MOST_FREQUENT = 512  # most ids that may count as frequent


def counted_of(rows: Rows) -> CountedRows:
    """Returns the call's number of rows that count, and the chunk's first row. Kernels skip all other rows."""
    return rows.num_counted, rows.tokens.start


def zero_uncounted_(dlogits: Tensor, rows: Rows) -> Tensor:
    """Writes 0 to the rows of ``dlogits`` that do not count, which our products leave unwritten, for a sum over all
    rows. Returns ``dlogits``."""
    return dlogits if rows.num_counted is None else dlogits.masked_fill_((rows.target < 0).unsqueeze(1), 0.0)


def is_aligned(out: Tensor) -> bool:
    """True if each row of ``out`` starts on 16 bytes; a buffer of the caller may start anywhere."""
    return out.data_ptr() % TMA_BYTES == 0 and out.stride(0) * out.element_size() % TMA_BYTES == 0


class FrequentRows:
    """Sums over chunks, in float32, of the rows of the weight's gradient that belong to the targets of many tokens.

    The terms of a frequent id nearly cancel. A 16-bit sum rounds the remainder twice in every chunk, since cuBLAS
    rounds a product before the addition. On Zipf-distributed ids the error was 2.3e-3 with two chunks, 1.7e-3 with one.
    """

    def __init__(self, targets: Tensor, sizes: Sizes, rows: int):
        """``targets``: [tokens] int32 targets of all tokens in ascending order, -1 where a token does not count.
        ``rows``: number of rows of the largest chunk."""
        # every step-th of the sorted targets is picked: each id of at least ``step`` tokens, and some rarer ids
        self.targets, self.step, device = targets, frequent_step(sizes.tokens), targets.device
        id_count = cdiv(sizes.tokens, self.step)
        self.sums = empty(id_count, sizes.hidden, dtype=torch.float32, device=device)
        self.picked_dlogits = empty(rows, id_count, dtype=sizes.dtype, device=device)

    def add_chunk(self, dlogits: Tensor, rows: Rows, is_first: bool) -> None:
        """Adds a chunk's terms to the sums, or stores them if the chunk ``is_first``."""
        picked_dlogits = self.picked_dlogits[: len(dlogits)]
        products.pick_columns(picked_dlogits, dlogits, self.targets, self.step, counted_of(rows))
        add_dweight(picked_dlogits, rows.hidden, self.sums, is_first)

    def replace(self, out: Tensor) -> None:
        """Overwrites the rows of frequent ids in ``out``, the weight's gradient, with the sums."""
        products.put_rows(out, self.sums, self.targets, self.step)

    @staticmethod
    def buffers(sizes: Sizes, rows: int) -> Iterator[Buffer]:
        """Yields the buffers of the sums for the plan, if the call needs them. ``rows``: of the largest chunk."""
        if sums_frequent(sizes, rows, sizes.weight_dtype):
            id_count = cdiv(sizes.tokens, frequent_step(sizes.tokens))
            yield Buffer("frequent rows of the gradient", (id_count, sizes.hidden), torch.float32, SWEEP, LOOP)
            yield Buffer("gradients of frequent ids' logits", (rows, id_count), sizes.dtype, SWEEP, LOOP)


def frequent_step(tokens: int) -> int:
    """Returns the least number of tokens of a frequent id, chosen so that at most ``MOST_FREQUENT`` ids are
    frequent."""
    return max(FREQUENT_TOKENS, cdiv(tokens, MOST_FREQUENT))


def sums_frequent(sizes: Sizes, rows: int, dtype: torch.dtype) -> bool:
    """True if a weight's gradient that adds up in ``dtype`` over chunks of ``rows`` rows needs ``FrequentRows``."""
    # with several ranks targets' terms are added after each chunk; with e4m3 operands, apart from the products
    has_several_chunks = rows < sizes.tokens and sizes.hidden_ranks == 1 and not sizes.e4m3_gradients
    return has_several_chunks and sizes.returns_weight_grad and dtype == sizes.dtype == torch.bfloat16


class HalfStore(MatmulStore):
    """A store of 16-bit operands. Rows of its buffer start on 16 bytes, which our products need."""

    stops_at_device_count = True

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
        if self.sizes.fp8_copy:
            self.e4m3_hidden = empty_quantised(self.rows, self.sizes.hidden, head.weight.device, has_row_scales=True)

    def operands(self, rows: Rows, head: Head, is_new: bool) -> tuple[Matrix, Matrix]:
        """Returns the operands of the product that makes the logits. ``is_new``: False if the latest call of this
        method had the same rows, whose e4m3 numbers are then kept."""
        if head.fp8 is None:
            return rows.hidden, head.weight
        row_count = rows.target.shape[0]
        e4m3_hidden = Quantised(*[tensor[:row_count] for tensor in self.e4m3_hidden if tensor is not None])
        if is_new:
            e4m3.quantise(e4m3_hidden, rows.hidden, head.fp8.direction, e4m3_hidden.common)
        return e4m3_hidden, head.fp8.weight

    def add_dweight(
        self, dlogits: Tensor, rows: Rows, out: Tensor, is_first: bool, dlogits_divisor: Tensor | None = None
    ) -> None:
        if dlogits_divisor is None and is_aligned(out) and own_dweight(self.plan, is_stored=is_first):
            products.dweight(out, dlogits, rows.hidden, is_first, self.gpu.product, counted_of(rows))
        else:
            super().add_dweight(zero_uncounted_(dlogits, rows), rows, out, is_first, dlogits_divisor)


class GradStore(HalfStore):
    """The store of tiles whose statistics are known. Its matmul writes dlogits and no logits."""

    def __init__(self, backend: Any, head: Head, plan: Plan, all_rows: CallRows, tiled: bool):
        super().__init__(backend, head, plan, all_rows, tiled)
        elements = self.rows * padded_columns(self.columns)
        self.buffer = torch.empty(elements, dtype=self.sizes.dtype, device=head.weight.device)

    def gradient(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        head, row_count, columns = self.head.columns(tile), rows.target.shape[0], tile.stop - tile.start
        row_stride = padded_columns(columns)  # so that a row starts on 16 bytes
        dlogits = self.buffer[: row_count * row_stride].view(row_count, row_stride)[:, :columns]
        terms = terms_of(self.demand, rows.target, stats, coefficients, tile.start, columns)
        logit_transform = transform(head, rows.scale)
        gradients.grad_logits(
            dlogits, *self.operands(rows, head, tile.start == 0), head.bias, head.class_weights, terms,
            logit_transform, self.gpu.logits, counted_of(rows),
        )  # fmt: skip
        target_columns = rows.target[:, None], None, terms.target_logit[:, None]
        for exact_columns in (target_columns, heavy_columns(stats), own_columns(rows, stats, coefficients)):
            if exact_columns is not None:
                ids, entry_coefficients, exact_logits = exact_columns
                gradients.row_grad(
                    dlogits, Stored(exact_logits, None), head.class_weights, terms, None, (), None, tile.start,
                    logit_transform, entries=(ids, entry_coefficients, None, None),
                )  # fmt: skip
        return zero_uncounted_(dlogits, rows) if self.sizes.bias_grad else dlogits

    def add_dhidden(self, dlogits: Tensor, rows: Rows, weight: Tensor, out: Tensor, is_first: bool) -> None:
        # BLAS chooses its algorithm by the number of rows, and cannot stop after the rows that count
        if rows.num_counted is None and not self.sizes.deterministic:
            super().add_dhidden(dlogits, rows, weight, out, is_first)
        else:
            products.dhidden(out, dlogits, weight, self.gpu.product, counted=counted_of(rows), add=not is_first)
