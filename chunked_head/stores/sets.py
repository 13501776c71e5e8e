"""The store of rows whose softmax is over a set of columns: gathered rows of the weight in the place of matmuls.

A row's set is some entries, one for each of its columns (``stores.operands.Kept``); a vector of n numbers has one for
each.
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

NOWHERE = {name + suffix: value for name, value in (("start", torch.inf), ("rest", 0.0)) for suffix in SUFFIX}


class SetStore(Store):
    """Logits of the columns that rows keep [n] fp32 (fp64), of all rows of a call, made with the store. Statistics and
    gradients of rows without a set are left as they are."""

    name = "kept"
    description = "none: every token keeps a set of ids"
    bounds_rows = True
    multiplies = False

    def __init__(
        self,
        backend: Any,
        head: Head,
        column_sets: Kept,
        rows: Rows,
        demand: Demand,
        exist: bool = False,
        gradient: Tensor | None = None,
    ):
        """``rows``: of the call, as given; hidden states, or logits that ``exist``, whose ``gradient`` is stored."""
        self.backend, self.head, self.column_sets, self.rows = backend, head, column_sets, rows
        self.demand, self.softmaxes, self.gradient = demand, layout_of(demand).softmaxes, gradient
        self.transform, wide = transform(head, rows.scale), torch.promote_types(head.weight.dtype, torch.float32)
        # each in memory of its own: kernels are compiled for where it begins
        self.logits = torch.empty(len(column_sets.columns), dtype=wide, device=head.weight.device)
        self.dlogits = torch.empty_like(self.logits)
        if exist:
            self.entry_index = column_sets.rows.clamp(min=0), column_sets.columns.clamp(min=0).long()
            x = rows.hidden[self.entry_index].to(wide).unsqueeze(1)
            logits = transformed(x, None, of_rows(self.transform, column_sets.rows)).squeeze(1)
            self.logits.copy_(logits.masked_fill(column_sets.columns < 0, -torch.inf))
        else:
            of_entries = column_sets.columns, head.bias, self.transform, column_sets.rows, -math.inf
            self.backend.dot_columns(self.logits, rows.hidden, head.weight, *of_entries)
        if column_sets.bias is not None:
            self.logits += column_sets.bias if rows.scale is None else column_sets.bias * rows.scale[column_sets.rows]

    def entries(self, tokens: slice) -> KeptEntries:
        """The sets of the rows ``tokens``."""
        return KeptEntries(
            self.column_sets.columns,
            self.column_sets.starts[tokens],
            self.column_sets.ends[tokens],
            self.rows.target[tokens],
        )

    def statistics(self, rows: Rows, out: RowStats) -> None:
        """Statistics over the sets' columns; 0 for other rows where every row that counts keeps a set."""
        if not self.demand.columns_only:
            entries, everywhere = self.entries(rows.tokens), self.column_sets.everywhere
            for i, view in enumerate(self.demand.views):
                outputs = outputs_of(out.by_name, self.softmaxes[i])
                self.backend.set_stats(outputs, self.logits, entries, ratio_of(view.ratio), everywhere)
            return
        out.zero_()
        for statistic in self.demand.lists:
            x = self.logits.masked_fill(self.column_sets.columns < 0, 0.0).view(-1, self.demand.columns)
            out.by_name[statistic.vectors[0]].copy_(x[rows.tokens])

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        """Gradients of hidden states, or of logits that exist, 0 in other rows where every row that counts keeps a
        set; the weight's wait for ``finish``."""
        tokens, column_sets = rows.tokens, self.column_sets
        if not self.demand.columns_only:
            entries, row_transform = self.entries(tokens), of_rows(self.transform, tokens)
            terms = terms_of(self.demand, entries.target, stats, coefficients)
            self.backend.set_grad(self.dlogits, self.logits, entries, terms, row_transform)
        elif coefficients.columns is not None:
            block = slice(tokens.start * self.demand.columns, tokens.stop * self.demand.columns)
            row_transform = of_rows(self.transform, column_sets.rows[block])
            grad = coefficients.columns.view(-1, 1) * slope(self.logits[block, None], row_transform)
            self.dlogits[block] = grad.squeeze(1).masked_fill(column_sets.columns[block] < 0, 0.0)
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
            self.backend.add_rows(out, self.head.weight, places.int(), self.dlogits, column_sets.columns, together=True)
        grads.hidden_done(tokens)

    def finish(self, grads: Gradients) -> None:
        """The weight's and the bias's gradients, of all rows."""
        column_sets = self.column_sets
        if grads.weight is not None:
            if column_sets.everywhere and grads.fresh:
                grads.weight.zero_()
            self.backend.add_rows(grads.weight, self.rows.hidden, column_sets.columns, self.dlogits, column_sets.rows)
        if grads.bias is not None:
            if column_sets.everywhere:
                grads.bias.zero_()
            unit_column = self.dlogits.new_ones(len(self.rows.hidden), 1)
            self.backend.add_rows(
                grads.bias.unsqueeze(1), unit_column, column_sets.columns, self.dlogits, column_sets.rows
            )


class WithSets(Store):
    """A store of chunks some of whose rows keep sets of columns."""

    def __init__(self, store: Store, sets: SetStore):
        self.store, self.sets = store, sets
        self.known_targets = store.known_targets

    def fill(self, rows: Rows, out: RowStats) -> None:
        self.store.fill(rows, out)

    def statistics(self, rows: Rows, out: RowStats) -> None:
        self.store.statistics(rows, out)
        self.sets.statistics(rows, out)

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        # softmaxes of rows that keep a set have probabilities of 0 here, and coefficients
        has, vectors = self.sets.column_sets.has[rows.tokens], stats.by_name
        nowhere = {name: vectors[name].masked_fill(has, none) for name, none in NOWHERE.items() if name in vectors}
        factors = {name: value.masked_fill(has, 0.0) for name, value in coefficients.by_name.items()}
        over_ranks, grads.over_ranks = grads.over_ranks, None  # their sums begin where rows are complete
        self.store.add_gradients(rows, RowStats.from_dict(vectors | nowhere), Coefficients.from_dict(factors), grads)
        grads.over_ranks = over_ranks
        self.sets.add_gradients(rows, stats, coefficients, grads)

    def finish(self, grads: Gradients) -> None:
        self.store.finish(grads)
        self.sets.finish(grads)
