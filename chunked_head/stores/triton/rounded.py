"""Gradients of stored exponentials: dense parts by products of e4m3 operands, sparse ones of targets and heavy ids."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.memory import empty
from ...core.records import CountedRows
from ...core.stats import RowStats
from ...core.tiles import E4M3_ROWS, Quantised, cdiv
from ...kernels.common.operands import Strips
from ...kernels.e4m3 import launch as e4m3
from ...kernels.products import launch as products
from ...plan.sizes import LOOP, SWEEP, Buffer, Sizes, padded_e4m3
from ..matmul import multiply_e4m3, sum_rows
from ..operands import Head, Rows
from .store import is_aligned

SUMMED = 4096  # rows of e4m3 operands that tensor cores sum, in 13 bits; sums of more are added up in fp32
E4M3 = torch.float8_e4m3fn


class RoundedGradients:
    """The e4m3 operands of a chunk's products, and the sparse part of the gradient of all tokens' logits.

    dhidden is a product of a chunk's exponentials and the transposed weight, dweight one of the transposed exponentials
    and hidden states. ``sparse_ids`` [tokens, 1 + n] int32: each row's target and heavy ids, -1 for none.
    ``sparse_dlogits``: gradients of their logits, fp32. Their terms of dhidden are added to each chunk's product, those
    of dweight after the last chunk.
    """

    @staticmethod
    def buffers(sizes: Sizes, rows: int) -> Iterator[Buffer]:
        padded, columns, entries = padded_e4m3(rows), padded_e4m3(sizes.vocab), 1 + sizes.demand.heavy
        if sizes.hidden_grad:
            yield Buffer("exponentials in e4m3", (rows, columns), E4M3, SWEEP, LOOP)
        if sizes.weight_grad:
            yield Buffer("exponentials in e4m3, transposed", (columns, padded), E4M3, SWEEP, LOOP)
            yield Buffer("hidden states in e4m3, transposed", (sizes.hidden, padded), E4M3, SWEEP, LOOP)
            shape = cdiv(rows, E4M3_ROWS) + 1, columns
            yield Buffer("sums of exponentials in e4m3", shape, torch.float32, SWEEP, LOOP)
            # sorted by place
            yield Buffer("order of sparse gradients", (sizes.tokens, entries, 5), torch.int32, LOOP, LOOP)
        yield Buffer("sparse gradients", (sizes.tokens, entries, 2), torch.float32, SWEEP, LOOP)

    def __init__(self, sizes: Sizes, rows: int, head: Head):
        device, padded, columns = head.weight.device, padded_e4m3(rows), padded_e4m3(sizes.vocab)
        self.head, self.sizes, self.columns, entries = head, sizes, columns, 1 + sizes.demand.heavy
        assert sizes.gpu is not None
        self.tile = sizes.gpu.product
        if sizes.hidden_grad:
            self.exp = empty(rows, columns, dtype=E4M3, device=device)
        if sizes.weight_grad:
            self.transposed = empty(columns * padded, dtype=E4M3, device=device)
            self.hidden = empty(sizes.hidden * padded, dtype=E4M3, device=device)
            self.scale = empty(1, dtype=torch.float32, device=device)[0]
            self.mean = empty(sizes.hidden, dtype=torch.float32, device=device)
            self.sums = empty(cdiv(rows, E4M3_ROWS) + 1, columns, dtype=torch.float32, device=device)
        self.divisor, self.hidden_factor, self.row_max = empty(3, rows, dtype=torch.float32, device=device).unbind()
        self.sparse_ids = empty(sizes.tokens, entries, dtype=torch.int32, device=device)
        self.sparse_dlogits = empty(sizes.tokens, entries, dtype=torch.float32, device=device)

    def make(
        self,
        exp: Tensor,
        factors: Tensor,
        strips: Strips,
        strip: int,
        level: Tensor,
        rows: Rows,
        stats: RowStats,
        counted: CountedRows,
    ) -> None:
        """Makes the operands of a chunk's products from exponentials, and factors per row, that ``level_rows`` made."""
        count, fp8 = len(exp), self.head.fp8
        assert fp8 is not None and stats.heavy_ids is not None and stats.heavy_logits is not None
        mean, hidden = None, None
        if self.sizes.weight_grad:
            hidden, mean = rows.hidden, self.mean
            e4m3.mean_of_rows(mean, hidden, rows.target)
        e4m3.split_sparse(
            exp,
            self.sparse_ids[rows.tokens],
            self.sparse_dlogits[rows.tokens],
            self.divisor,
            self.hidden_factor,
            self.row_max,
            hidden,
            mean,
            stats.heavy_ids,
            stats.heavy_logits,
            strips,
            strip,
            level,
            rows.target,
            stats.target_logit,
            factors,
            fp8.weight.scale,
            counted,
        )
        padded, out, transposed, sums = padded_e4m3(count), None, None, None
        if self.sizes.hidden_grad:
            out = self.exp[:count]
        if mean is not None:
            sums, self.common = self.sums[: cdiv(padded, E4M3_ROWS)], (self.sums[-1], mean)
            transposed = self.transposed[: self.columns * padded].view(self.columns, padded)
            states = self.hidden[: self.sizes.hidden * padded].view(self.sizes.hidden, padded)
            self.operands = Quantised(transposed[: self.sizes.vocab], self.scale), Quantised(states, self.scale)
            e4m3.transposed_rows(self.operands[1], rows.hidden, mean, self.hidden_factor, self.row_max, counted)
        e4m3.both_orders(out, transposed, exp, self.divisor, self.hidden_factor, sums, counted)
        if sums is not None:
            sum_rows(sums, self.sums[-1])

    def put_dhidden(
        self, out: Tensor, product: Tensor, softmax_factor: Tensor, rows: Rows, counted: CountedRows
    ) -> None:
        """Writes the gradient of a chunk's hidden states to ``out``. ``product`` [rows, hidden] fp32: scratch for the
        dense part."""
        assert self.head.fp8 is not None and self.head.fp8.transposed is not None
        weight, unit = self.head.fp8.transposed[:2]
        multiply_e4m3(self.exp[: len(out)], weight, product, unit)
        entries = self.sparse_ids[rows.tokens], self.sparse_dlogits[rows.tokens]
        products.finish_with_sparse(out, product, self.head.weight, rows.target, softmax_factor, *entries, counted)

    def add_dweight(self, out: Tensor, first: bool, counted: CountedRows) -> None:
        """Adds a chunk's product, or stores it where it is the ``first``."""
        tile = self.tile if is_aligned(out) else self.tile._replace(described=False)
        rows = self.operands[1].values.shape[1]
        products.dweight(out, *self.operands, first, tile, counted, self.common, SUMMED if rows > SUMMED else None)

    def add_sparse(self, out: Tensor, hidden: Tensor, order: Tensor | None) -> None:
        """Adds the sparse part of all tokens to the weight's gradient, each id's terms in the order of tokens."""
        entries = self.sparse_ids.shape[1]
        products.add_rows(
            out, hidden, self.sparse_ids.view(-1), self.sparse_dlogits.view(-1), order, entries_per_row=entries
        )
