"""The store of rows whose softmax is over a set of columns: rows of the weight are gathered, and no matmul runs.

A row's set is a range of entries, one for each column (``stores.operands.Kept``). A vector [n] has a number for each of
the call's n entries.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..core.records import KeptEntries
from ..core.stats import SUFFIX, Coefficients, Demand, RowStats, layout_of
from .gradients import Gradients
from .operands import Head, Kept, Rows
from .store import Store, outputs_of, ratio_of, terms_of, transform
from .torch_functions import of_rows, slope, transformed

# by vector: its number for a row that has no probability anywhere
NOWHERE = {name + suffix: value for name, value in (("lse_base", torch.inf), ("neg_log_sum", 0.0)) for suffix in SUFFIX}


class SetStore(Store):
    """The store of logits [n] fp32 (fp64) of the sets' entries, which the constructor makes for all rows of a call.
    The methods leave statistics and gradients of rows without a set as they are."""

    name = "kept"
    description = "none: every token keeps a set of ids"
    bounds_rows = True
    multiplies = False

    def __init__(
        self,
        backend: Any,
        head: Head,
        column_sets: Kept,
        operand: Tensor,
        targets: Tensor,
        scale: Tensor | None,
        demand: Demand,
        exist: bool = False,
        gradient: Tensor | None = None,
    ):
        """``operand``: hidden states [tokens, hidden], or with ``exist`` logits [tokens, vocab], whose gradient is
        stored in ``gradient``. ``targets`` [tokens] are this rank's; ``scale`` [tokens]: each row's factor, None: 1."""
        self.backend, self.head, self.column_sets = backend, head, column_sets
        self.operand, self.targets = operand, targets
        self.demand, self.softmaxes, self.gradient = demand, layout_of(demand).softmaxes, gradient
        self.transform, wide_dtype = transform(head, scale), torch.promote_types(head.weight.dtype, torch.float32)
        # each tensor has memory of its own, since kernels are compiled for the alignment of its address
        self.logits = torch.empty(len(column_sets.columns), dtype=wide_dtype, device=head.weight.device)
        self.dlogits = torch.empty_like(self.logits)
        if exist:
            self.entry_index = column_sets.rows.clamp(min=0), column_sets.columns.clamp(min=0).long()
            entry_logits = operand[self.entry_index].to(wide_dtype).unsqueeze(1)
            logits = transformed(entry_logits, None, of_rows(self.transform, column_sets.rows)).squeeze(1)
            self.logits.copy_(logits.masked_fill(column_sets.columns < 0, -torch.inf))
        else:
            entry_arguments = column_sets.columns, head.bias, self.transform, column_sets.rows, -math.inf
            self.backend.dot_columns(self.logits, operand, head.weight, *entry_arguments)
        if column_sets.bias is not None:
            self.logits += column_sets.bias if scale is None else column_sets.bias * scale[column_sets.rows]

    def entries(self, tokens: slice) -> KeptEntries:
        """The sets of the rows ``tokens``."""
        return KeptEntries(
            self.column_sets.columns,
            self.column_sets.starts[tokens],
            self.column_sets.ends[tokens],
            self.targets[tokens],
        )

    def statistics(self, rows: Rows, out: RowStats) -> None:
        """Writes statistics of rows with a set. If every row that counts has a set, statistics of other rows become
        0."""
        if not self.demand.columns_only:
            entries, everywhere = self.entries(rows.tokens), self.column_sets.everywhere
            for i, view in enumerate(self.demand.views):
                outputs = outputs_of(out.by_name, self.softmaxes[i])
                self.backend.set_stats(outputs, self.logits, entries, ratio_of(view.ratio), everywhere)
            return
        out.zero_()
        for statistic in self.demand.lists:
            entry_logits = self.logits.masked_fill(self.column_sets.columns < 0, 0.0).view(-1, self.demand.columns)
            out.by_name[statistic.vectors[0]].copy_(entry_logits[rows.tokens])

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        """Adds gradients of hidden states; or stores the gradient of logits that exist. Gradients of rows without a
        set become 0 if every row that counts has one, else they stay. ``finish`` makes the weight's gradient."""
        tokens, column_sets = rows.tokens, self.column_sets
        if not self.demand.columns_only:
            entries, row_transform = self.entries(tokens), of_rows(self.transform, tokens)
            terms = terms_of(self.demand, entries.target, stats, coefficients)
            self.backend.set_grad(self.dlogits, self.logits, entries, terms, row_transform)
        elif coefficients.columns is not None:
            entry_block = slice(tokens.start * self.demand.columns, tokens.stop * self.demand.columns)
            row_transform = of_rows(self.transform, column_sets.rows[entry_block])
            entry_gradient = coefficients.columns.view(-1, 1) * slope(self.logits[entry_block, None], row_transform)
            self.dlogits[entry_block] = entry_gradient.squeeze(1).masked_fill(column_sets.columns[entry_block] < 0, 0.0)
        if grads.hidden is None:
            return
        if self.gradient is not None:
            if column_sets.everywhere:
                self.gradient.zero_()
            values = torch.where(column_sets.columns < 0, 0.0, self.dlogits).to(self.gradient.dtype)
            self.gradient.index_put_(self.entry_index, values, accumulate=True)
        else:
            out = grads.hidden_rows(tokens)
            if column_sets.everywhere:
                out.zero_()
            places = torch.where(
                (column_sets.rows >= tokens.start) & (column_sets.rows < tokens.stop),
                column_sets.rows - tokens.start,
                -1,
            )
            self.backend.add_rows(
                out, self.head.weight, places.int(), self.dlogits, column_sets.columns, is_grouped=True
            )
        grads.hidden_done(tokens)

    def finish(self, grads: Gradients) -> None:
        """Adds the gradients of weight and bias, from all rows of the call."""
        column_sets = self.column_sets
        if grads.weight is not None:
            if column_sets.everywhere and grads.fresh:
                grads.weight.zero_()
            self.backend.add_rows(grads.weight, self.operand, column_sets.columns, self.dlogits, column_sets.rows)
        if grads.bias is not None:
            if column_sets.everywhere:
                grads.bias.zero_()
            unit_column = self.dlogits.new_ones(len(self.operand), 1)
            self.backend.add_rows(
                grads.bias.unsqueeze(1), unit_column, column_sets.columns, self.dlogits, column_sets.rows
            )


class WithSets(Store):
    """A store of chunks in which some rows have sets of columns: a ``SetStore`` for these rows, and another store
    for all others."""

    def __init__(self, store: Store, sets: SetStore):
        self.store, self.sets = store, sets
        self.known_targets = store.known_targets

    def fill(self, rows: Rows, out: RowStats) -> None:
        self.store.fill(rows, out)

    def statistics(self, rows: Rows, out: RowStats) -> None:
        self.store.statistics(rows, out)
        self.sets.statistics(rows, out)

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        # for the other store, rows with a set have probabilities and coefficients of 0
        has_set, stats_by_name = self.sets.column_sets.has[rows.tokens], stats.by_name
        empty_softmax = {
            name: stats_by_name[name].masked_fill(has_set, missing_value)
            for name, missing_value in NOWHERE.items()
            if name in stats_by_name
        }
        masked_coefficients = {name: value.masked_fill(has_set, 0.0) for name, value in coefficients.by_name.items()}
        over_ranks, grads.over_ranks = grads.over_ranks, None  # sums over ranks start after both stores have added
        self.store.add_gradients(
            rows, RowStats.from_dict(stats_by_name | empty_softmax), Coefficients.from_dict(masked_coefficients), grads
        )
        grads.over_ranks = over_ranks
        self.sets.add_gradients(rows, stats, coefficients, grads)

    def finish(self, grads: Gradients) -> None:
        self.store.finish(grads)
        self.sets.finish(grads)
