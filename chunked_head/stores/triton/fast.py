"""The store of bf16 exponentials relative to the target's logit, which our logits matmul writes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.memory import empty
from ...core.stats import Coefficients, RowStats
from ...kernels.common.operands import strip_rows
from ...kernels.gradients import launch as gradients
from ...kernels.products import launch as products
from ...plan.plans import Plan
from ...plan.sizes import BYTE, LOOP, SWEEP, Buffer, Phase, Sizes
from ..gradients import Gradients
from ..operands import CallRows, Head, Rows
from ..store import terms_of, transform
from .relative import RelativeStore
from .rounded import RoundedGradients
from .store import counted_of


class FastStore(RelativeStore):
    """bf16 exponentials E relative to one level per row. ``kernels/gradients/row_grad.py`` defines the factors that
    make gradients of them.

    dhidden is ``E @ weight`` times a factor per row, plus a factor times the target's row of the weight. dweight is
    ``E.T @ (factor * hidden)``, plus hidden states times a factor in their target's row. These targets' terms, with a
    correction for their rounding to 16 bits, are added after the last chunk, for all tokens sorted by target.
    """

    name = "fast"
    description = "exponentials relative to the target"
    adds_by_chunk = False  # True for hidden states of all ranks: targets' terms are added after each chunk
    rounded: RoundedGradients | None = None  # products of e4m3 operands

    @classmethod
    def chunk_buffers(cls, sizes: Sizes, rows: int, last: Phase, stores_logits: bool) -> Iterator[Buffer]:
        yield from super().chunk_buffers(sizes, rows, last, stores_logits)
        if last >= LOOP and sizes.e4m3_gradients:
            yield from RoundedGradients.buffers(sizes, rows)
        if last < LOOP or not sizes.weight_grad or sizes.e4m3_gradients:
            return
        # memory to sort tokens by target: all at once, or a chunk at a time if hidden states are gathered by chunks
        at_once = sizes.tokens if sizes.hidden_ranks == 1 else rows
        yield Buffer("tokens sorted by target", (strip_rows(sizes.tokens) * 12 + at_once * 28,), BYTE, SWEEP, LOOP)

    def __init__(self, backend: Any, head: Head, plan: Plan, all_rows: CallRows, tiled: bool):
        super().__init__(backend, head, plan, all_rows, tiled)
        if self.buffer is None:
            return
        device = head.weight.device
        # on every rank exponentials are relative to the target's logit
        self.known_targets = True
        self.level = empty(self.rows, dtype=torch.float32, device=device)
        # the factors that level_rows writes, [tokens] each; all three start on the same alignment
        self.factors = empty(3, strip_rows(self.sizes.tokens), dtype=torch.float32, device=device)
        self.rounded = RoundedGradients(self.sizes, self.rows, head) if plan.e4m3_gradients else None

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        tokens, exponentials = rows.tokens, self.stored.logits
        assert self.level is not None
        row_factors, sorted_targets, occurrences = self.factors[:, tokens.start :], None, None
        # gathered hidden states of all ranks, which are in memory for this chunk only
        chunk_hidden = rows.source if rows.order is not None and self.all_rows.order is None else None
        if grads.weight is not None and self.rounded is None:
            sorted_targets = self.every_target_sorted if chunk_hidden is None else self.sorted_targets(rows.target)
            occurrences = sorted_targets.occurrences
            if occurrences is not None and chunk_hidden is None:
                occurrences = occurrences[tokens]
        terms = terms_of(self.demand, rows.target, stats, coefficients)
        # level_rows scales the chunk's hidden states in place: only the weight's gradient reads them from here on
        gradients.level_rows(
            exponentials,
            row_factors,
            None if grads.weight is None or self.rounded is not None else rows.hidden,
            self.stored_strips,
            self.gpu.strip_width(relative=False),
            self.level,
            stats.logprob,
            terms,
            transform(self.head, rows.scale),
            counted_of(rows),
            occurrences,
            self.rounded is not None,
        )
        if self.rounded is not None:
            self.add_rounded(self.rounded, rows, stats, grads)
            return
        if grads.hidden is not None:
            factors = products.RowFactors(rows.target, *row_factors[:2])
            self.add_dhidden(exponentials, rows, self.head.weight, grads.hidden_rows(tokens), True, factors)
            grads.hidden_done(tokens)
        if grads.weight is not None and sorted_targets is not None:
            self.add_dweight(exponentials, rows, grads.weight, rows.tokens.start == 0 and grads.fresh)
            if chunk_hidden is not None:
                self.add_target_rows(chunk_hidden, sorted_targets, rows.tokens.start, grads.weight, rows.order)
                self.adds_by_chunk = True

    def add_rounded(self, rounded: RoundedGradients, rows: Rows, stats: RowStats, grads: Gradients) -> None:
        """Adds the products of a chunk's exponentials, which are at one level, with e4m3 operands to ``grads``."""
        tokens, counted, strip = rows.tokens, counted_of(rows), self.gpu.strip_width(relative=False)
        row_factors = self.factors[:, tokens.start :]
        assert self.level is not None
        rounded.make(self.stored.logits, row_factors, self.stored_strips, strip, self.level, rows, stats, counted)
        if grads.hidden is not None:
            out = grads.hidden_rows(tokens)
            product = self.part_sums[: out.numel()].view(out.shape)
            rounded.put_dhidden(out, product, row_factors[0], rows, counted)
            grads.hidden_done(tokens)
        if grads.weight is not None:
            rounded.add_dweight(grads.weight, rows.tokens.start == 0 and grads.fresh, counted)

    def finish(self, grads: Gradients) -> None:
        super().finish(grads)
        if self.rounded is not None:
            if grads.weight is not None:
                self.rounded.add_sparse(grads.weight, self.all_rows.hidden, self.all_rows.order)
        elif grads.weight is not None and not self.adds_by_chunk:
            self.add_target_rows(self.all_rows.hidden, self.every_target_sorted, 0, grads.weight, self.all_rows.order)

    def add_target_rows(
        self, hidden: Tensor, targets: products.SortedColumns, first_row: int, d_weight: Tensor, order: Tensor | None
    ) -> None:
        """Adds the targets' terms to the weight's gradient ``d_weight``, after the products with exponentials.
        ``first_row``: index in the call of the first of the rows."""
        softmax, at_target, ratio = self.factors[:, first_row:]
        products.add_rows(d_weight, hidden, targets, at_target, order, products=(softmax, ratio))
