"""Gradients from stored exponentials: a dense part by products of e4m3 operands, and a sparse part for targets and
heavy ids."""

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

SUMMED_ROWS = 4096  # most rows that tensor cores sum, which keep 13 bits of a sum; further sums are added in fp32
E4M3 = torch.float8_e4m3fn


class RoundedGradients:
    """Gradients of hidden states and weight, with memory for the e4m3 operands of a chunk.

    The dense part of dhidden is a product of a chunk's exponentials and the transposed weight; the dense part of
    dweight is a product of the transposed exponentials and hidden states. The sparse part has the gradients of the
    logits of a row's target and heavy ids. Its terms are added to dhidden with each chunk, and to dweight after the
    last chunk.
    """

    @staticmethod
    def buffers(sizes: Sizes, rows: int) -> Iterator[Buffer]:
        """Yields the buffers that the constructor and ``add_sparse`` allocate, for the plan."""
        padded_rows, columns, list_size = padded_e4m3(rows), padded_e4m3(sizes.vocab), 1 + sizes.demand.heavy
        if sizes.hidden_grad:
            yield Buffer("exponentials in e4m3", (rows, columns), E4M3, SWEEP, LOOP)
        if sizes.weight_grad:
            yield Buffer("exponentials in e4m3, transposed", (columns, padded_rows), E4M3, SWEEP, LOOP)
            yield Buffer("hidden states in e4m3, transposed", (sizes.hidden, padded_rows), E4M3, SWEEP, LOOP)
            shape = cdiv(rows, E4M3_ROWS) + 1, columns
            yield Buffer("sums of exponentials in e4m3", shape, torch.float32, SWEEP, LOOP)
            yield Buffer("order of sparse gradients", (sizes.tokens, list_size, 5), torch.int32, LOOP, LOOP)
        yield Buffer("sparse gradients", (sizes.tokens, list_size, 2), torch.float32, SWEEP, LOOP)

    def __init__(self, sizes: Sizes, rows: int, head: Head):
        """``rows``: number of rows of the largest chunk."""
        device, padded_rows, columns = head.weight.device, padded_e4m3(rows), padded_e4m3(sizes.vocab)
        self.head, self.sizes, self.columns, list_size = head, sizes, columns, 1 + sizes.demand.heavy
        assert sizes.gpu is not None
        self.tile = sizes.gpu.product
        if sizes.hidden_grad:
            self.exp = empty(rows, columns, dtype=E4M3, device=device)
        if sizes.weight_grad:
            self.transposed_exp = empty(columns * padded_rows, dtype=E4M3, device=device)
            self.transposed_hidden = empty(sizes.hidden * padded_rows, dtype=E4M3, device=device)
            self.scale = empty(1, dtype=torch.float32, device=device)[0]
            self.hidden_mean = empty(sizes.hidden, dtype=torch.float32, device=device)
            # sums of exponentials over blocks of rows, and last their sum
            self.column_sums = empty(cdiv(rows, E4M3_ROWS) + 1, columns, dtype=torch.float32, device=device)
        self.divisor, self.hidden_factor, self.row_max = empty(3, rows, dtype=torch.float32, device=device).unbind()
        # each row's target and heavy ids, -1 for no id, and the gradients of their logits
        self.sparse_ids = empty(sizes.tokens, list_size, dtype=torch.int32, device=device)
        self.sparse_dlogits = empty(sizes.tokens, list_size, dtype=torch.float32, device=device)

    def make_operands(
        self,
        exp: Tensor,  # [rows, vocab] exponentials
        factors: Tensor,  # [3, tokens] factors per row, which ``level_rows`` has written, from the chunk's first row on
        strips: Strips,
        strip_width: int,
        level: Tensor,  # [rows] the logit that exponentials are relative to
        rows: Rows,
        stats: RowStats,
        counted: CountedRows,
    ) -> None:
        """Makes the operands of a chunk's products, and the sparse part of its gradients."""
        row_count, fp8 = len(exp), self.head.fp8
        assert fp8 is not None and stats.heavy_ids is not None and stats.heavy_logits is not None
        mean, hidden = None, None
        if self.sizes.weight_grad:
            hidden, mean = rows.hidden, self.hidden_mean
            e4m3.mean_of_rows(mean, hidden, rows.target)
        e4m3.split_sparse(
            exp, self.sparse_ids[rows.tokens], self.sparse_dlogits[rows.tokens], self.divisor, self.hidden_factor,
            self.row_max, hidden, mean, stats.heavy_ids, stats.heavy_logits, strips, strip_width, level, rows.target,
            stats.target_logit, factors, fp8.weight.scale, counted,
        )  # fmt: skip
        padded_rows, e4m3_exp, exp_transpose, block_sums = padded_e4m3(row_count), None, None, None
        if self.sizes.hidden_grad:
            e4m3_exp = self.exp[:row_count]
        if mean is not None:
            block_sums, self.mean_term = self.column_sums[: cdiv(padded_rows, E4M3_ROWS)], (self.column_sums[-1], mean)
            exp_transpose = self.transposed_exp[: self.columns * padded_rows].view(self.columns, padded_rows)
            e4m3_states = self.transposed_hidden[: self.sizes.hidden * padded_rows].view(self.sizes.hidden, padded_rows)
            self.operands = Quantised(exp_transpose[: self.sizes.vocab], self.scale), Quantised(e4m3_states, self.scale)
            e4m3.transposed_rows(self.operands[1], rows.hidden, mean, self.hidden_factor, self.row_max, counted)
        e4m3.both_orders(e4m3_exp, exp_transpose, exp, self.divisor, self.hidden_factor, block_sums, counted)
        if block_sums is not None:
            sum_rows(block_sums, self.column_sums[-1])

    def write_dhidden(
        self, out: Tensor, product: Tensor, softmax_factor: Tensor, rows: Rows, counted: CountedRows
    ) -> None:
        """Writes the gradient of a chunk's hidden states to ``out``. ``product`` [rows, hidden] fp32: scratch for the
        dense part."""
        assert self.head.fp8 is not None and self.head.fp8.transposed is not None
        weight, unit_scale = self.head.fp8.transposed[:2]
        multiply_e4m3(self.exp[: len(out)], weight, product, unit_scale)
        sparse_part = self.sparse_ids[rows.tokens], self.sparse_dlogits[rows.tokens]
        products.finish_with_sparse(out, product, self.head.weight, rows.target, softmax_factor, *sparse_part, counted)

    def add_dweight(self, out: Tensor, is_first: bool, counted: CountedRows) -> None:
        """Adds a chunk's dense part to ``out``, the weight's gradient, or stores it if the chunk ``is_first``."""
        tile = self.tile if is_aligned(out) else self.tile._replace(described=False)
        rows_per_sum = SUMMED_ROWS if self.operands[1].values.shape[1] > SUMMED_ROWS else None
        products.dweight(out, *self.operands, is_first, tile, counted, self.mean_term, rows_per_sum)

    def add_sparse(self, out: Tensor, hidden: Tensor, order: Tensor | None) -> None:
        """Adds the sparse part of all tokens to the weight's gradient ``out``, each id's terms in the order of
        tokens."""
        ids, dlogits, list_size = self.sparse_ids.view(-1), self.sparse_dlogits.view(-1), self.sparse_ids.shape[1]
        products.add_rows(out, hidden, ids, dlogits, order, entries_per_row=list_size)
