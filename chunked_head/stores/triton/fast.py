"""The store of bf16 exponentials that our logits matmul writes, relative to the target's logit."""

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
    """The store of bf16 exponentials E, relative to one logit per row, the row's level. Factors per row, which
    ``kernels/gradients/row_grad.py`` defines, turn E into gradients.

    dhidden is ``E @ weight`` times a factor, plus a factor times the target's row of the weight. dweight is ``E.T @
    (factor * hidden)``, plus, in the row of each token's target, the token's hidden state times a factor. Targets'
    terms of dweight are added after the last chunk, sorted by target, with a correction for the rounding of E.
    """

    name = "fast"
    description = "exponentials relative to the target"
    adds_by_chunk = False  # True: targets' terms of dweight are added after each chunk, for hidden states of all ranks
    rounded: RoundedGradients | None = None  # makes gradients by products of e4m3 operands; None: of 16-bit operands

    @classmethod
    def chunk_buffers(cls, sizes: Sizes, rows: int, last: Phase, stores_logits: bool) -> Iterator[Buffer]:
        yield from super().chunk_buffers(sizes, rows, last, stores_logits)
        if last >= LOOP and sizes.e4m3_gradients:
            yield from RoundedGradients.buffers(sizes, rows)
        if last < LOOP or not sizes.weight_grad or sizes.e4m3_gradients:
            return
        # memory to sort tokens by target: all tokens, or a chunk's if hidden states are gathered by chunks
        sorted_tokens = sizes.tokens if sizes.hidden_ranks == 1 else rows
        byte_count = strip_rows(sizes.tokens) * 12 + sorted_tokens * 28
        yield Buffer("tokens sorted by target", (byte_count,), BYTE, SWEEP, LOOP)

    def __init__(self, backend: Any, head: Head, plan: Plan, all_rows: CallRows, tiled: bool):
        super().__init__(backend, head, plan, all_rows, tiled)
        if self.buffer is None:
            return
        device = head.weight.device
        self.has_target_logits = True  # every rank's exponentials are relative to the target's logit
        self.level = empty(self.rows, dtype=torch.float32, device=device)
        # the three factors per row that level_rows writes; each vector starts on the same alignment
        self.factors = empty(3, strip_rows(self.sizes.tokens), dtype=torch.float32, device=device)
        self.rounded = RoundedGradients(self.sizes, self.rows, head) if plan.e4m3_gradients else None

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        tokens, exponentials = rows.tokens, self.stored.logits
        assert self.level is not None
        row_factors, sorted_targets, occurrences = self.factors[:, tokens.start :], None, None
        # hidden states gathered from all ranks, which are in memory for this chunk only; None: ``call_hidden`` has them
        chunk_hidden = rows.source if rows.order is not None and self.call_order is None else None
        if grads.weight is not None and self.rounded is None:
            sorted_targets = self.sorted_call_targets if chunk_hidden is None else self.sorted_targets(rows.target)
            occurrences = sorted_targets.occurrences
            if occurrences is not None and chunk_hidden is None:
                occurrences = occurrences[tokens]
        terms = terms_of(self.demand, rows.target, stats, coefficients)
        # scales the chunk's hidden states in place, which only the weight's gradient reads afterwards
        gradients.level_rows(
            exponentials, row_factors, None if grads.weight is None or self.rounded is not None else rows.hidden,
            self.stored_strips, self.gpu.strip_width(relative=False), self.level, stats.logprob, terms,
            transform(self.head, rows.scale), counted_of(rows), occurrences, self.rounded is not None,
        )  # fmt: skip
        if self.rounded is not None:
            self.add_rounded(self.rounded, rows, stats, grads)
            return
        if grads.hidden is not None:
            factors = rows.target, row_factors[0], row_factors[1]
            self.add_dhidden(exponentials, rows, self.head.weight, grads.hidden_rows(tokens), True, factors)
            grads.sum_over_ranks(tokens)
        if grads.weight is not None and sorted_targets is not None:
            self.add_dweight(exponentials, rows, grads.weight, rows.tokens.start == 0 and grads.fresh)
            if chunk_hidden is not None:
                self.add_target_rows(chunk_hidden, sorted_targets, rows.tokens.start, grads.weight, rows.order)
                self.adds_by_chunk = True

    def add_rounded(self, rounded: RoundedGradients, rows: Rows, stats: RowStats, grads: Gradients) -> None:
        """Adds a chunk's gradients to ``grads``, by products of exponentials rounded to e4m3. ``level_rows`` has
        brought each row of exponentials to one level."""
        tokens, counted, strip_width = rows.tokens, counted_of(rows), self.gpu.strip_width(relative=False)
        row_factors, strips = self.factors[:, tokens.start :], self.stored_strips
        assert self.level is not None
        rounded.make_operands(self.stored.logits, row_factors, strips, strip_width, self.level, rows, stats, counted)
        if grads.hidden is not None:
            out = grads.hidden_rows(tokens)
            product = self.dhidden_parts[: out.numel()].view(out.shape)
            rounded.write_dhidden(out, product, row_factors[0], rows, counted)
            grads.sum_over_ranks(tokens)
        if grads.weight is not None:
            rounded.add_dweight(grads.weight, tokens.start == 0 and grads.fresh, counted)

    def finish(self, grads: Gradients) -> None:
        super().finish(grads)
        if self.rounded is not None:
            if grads.weight is not None:
                self.rounded.add_sparse(grads.weight, self.call_hidden, self.call_order)
        elif grads.weight is not None and not self.adds_by_chunk:
            self.add_target_rows(self.call_hidden, self.sorted_call_targets, 0, grads.weight, self.call_order)

    def add_target_rows(
        self, hidden: Tensor, targets: products.SortedColumns, first_row: int, dweight: Tensor, order: Tensor | None
    ) -> None:
        """Adds the targets' terms of some rows to ``dweight``, which has the products with exponentials. ``first_row``:
        index in the call of the first of these rows. ``order``: each row's index in ``hidden``."""
        softmax_factor, target_factor, ratio = self.factors[:, first_row:]
        factors_and_ratios = softmax_factor, ratio
        products.add_rows(dweight, hidden, targets, target_factor, order, softmax_factors_and_ratios=factors_and_ratios)
