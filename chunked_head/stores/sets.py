"""The store of rows whose softmax is over a set of columns: gathered rows of the weight in the place of matmuls.

A row's set is some entries, one for each of its columns (``stores.operands.Kept``); a vector of n numbers has one for
each.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..core.records import KeptEntries
from ..core.stats import SUFFIX, Coefficients, Demand, RowStats
from .gradients import Gradients
from .operands import Head, Kept, Rows
from .store import Store, outputs_of, ratio_of, softmax_names, terms_of, transform
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
        kept: Kept,
        rows: Rows,
        demand: Demand,
        exist: bool = False,
        gradient: Tensor | None = None,
    ):
        """``rows``: of the call, as given; hidden states, or logits that ``exist``, whose ``gradient`` is stored."""
        self.backend, self.head, self.kept, self.rows = backend, head, kept, rows
        self.demand, self.gradient = demand, gradient
        self.transform, wide = transform(head, rows.scale), torch.promote_types(head.weight.dtype, torch.float32)
        # each in memory of its own: kernels are compiled for where it begins
        self.logits = torch.empty(len(kept.columns), dtype=wide, device=head.weight.device)
        self.dlogits = torch.empty_like(self.logits)
        if exist:
            self.at = kept.rows.clamp(min=0), kept.columns.clamp(min=0).long()
            x = rows.hidden[self.at].to(wide).unsqueeze(1)
            made = transformed(x, None, of_rows(self.transform, kept.rows)).squeeze(1)
            self.logits.copy_(made.masked_fill(kept.columns < 0, -torch.inf))
        else:
            of_entries = kept.columns, head.bias, self.transform, kept.rows, -math.inf
            self.backend.dot_columns(self.logits, rows.hidden, head.weight, *of_entries)
        if kept.bias is not None:
            self.logits += kept.bias if rows.scale is None else kept.bias * rows.scale[kept.rows]

    def entries(self, at: slice) -> KeptEntries:
        """The sets of rows ``at``."""
        return KeptEntries(self.kept.columns, self.kept.starts[at], self.kept.ends[at], self.rows.target[at])

    def statistics(self, rows: Rows, out: RowStats) -> None:
        """Statistics over the sets' columns; 0 for other rows where every row that counts keeps a set."""
        if not self.demand.columns_only:
            entries, everywhere = self.entries(rows.tokens), self.kept.everywhere
            for i, view in enumerate(self.demand.views):
                outputs = outputs_of(out.as_dict(), softmax_names(self.demand, i))
                self.backend.set_stats(outputs, self.logits, entries, ratio_of(view.ratio), everywhere)
            return
        out.zero_()
        if out.column_logits is not None:
            x = self.logits.masked_fill(self.kept.columns < 0, 0.0).view(-1, self.demand.columns)
            out.column_logits.copy_(x[rows.tokens])

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        """Gradients of hidden states, or of logits that exist, 0 in other rows where every row that counts keeps a
        set; the weight's wait for ``finish``."""
        at, kept = rows.tokens, self.kept
        if not self.demand.columns_only:
            entries, made = self.entries(at), of_rows(self.transform, at)
            terms = terms_of(self.demand, entries.target, stats, coefficients)
            self.backend.set_grad(self.dlogits, self.logits, entries, terms, made)
        elif coefficients.columns is not None:
            own = slice(at.start * self.demand.columns, at.stop * self.demand.columns)
            made = of_rows(self.transform, kept.rows[own])
            grad = coefficients.columns.view(-1, 1) * slope(self.logits[own, None], made)
            self.dlogits[own] = grad.squeeze(1).masked_fill(kept.columns[own] < 0, 0.0)
        if grads.hidden is None:
            return
        if self.gradient is not None:
            if kept.everywhere:
                self.gradient.zero_()
            values = torch.where(kept.columns < 0, 0.0, self.dlogits).to(self.gradient.dtype)
            self.gradient.index_put_(self.at, values, accumulate=True)
        else:
            out = grads.hidden_rows(at)
            if kept.everywhere:
                out.zero_()
            places = torch.where((kept.rows >= at.start) & (kept.rows < at.stop), kept.rows - at.start, -1)
            self.backend.add_rows(out, self.head.weight, places.int(), self.dlogits, kept.columns, together=True)
        grads.hidden_done(at)

    def finish(self, grads: Gradients) -> None:
        """The weight's and the bias's gradients, of all rows."""
        kept = self.kept
        if grads.weight is not None:
            if kept.everywhere and grads.fresh:
                grads.weight.zero_()
            self.backend.add_rows(grads.weight, self.rows.hidden, kept.columns, self.dlogits, kept.rows)
        if grads.bias is not None:
            if kept.everywhere:
                grads.bias.zero_()
            ones = self.dlogits.new_ones(len(self.rows.hidden), 1)
            self.backend.add_rows(grads.bias.unsqueeze(1), ones, kept.columns, self.dlogits, kept.rows)


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
        has, named = self.sets.kept.has[rows.tokens], stats.as_dict()
        nowhere = {name: named[name].masked_fill(has, none) for name, none in NOWHERE.items() if name in named}
        factors = {name: value.masked_fill(has, 0.0) for name, value in coefficients.as_dict().items()}
        over_ranks, grads.over_ranks = grads.over_ranks, None  # their sums begin where rows are complete
        self.store.add_gradients(rows, RowStats.from_dict(named | nowhere), Coefficients.from_dict(factors), grads)
        grads.over_ranks = over_ranks
        self.sets.add_gradients(rows, stats, coefficients, grads)

    def finish(self, grads: Gradients) -> None:
        self.store.finish(grads)
        self.sets.finish(grads)
