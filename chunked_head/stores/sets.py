"""The store of rows whose softmax is over a set of columns: it gathers rows of the weight, and runs no matmul.

A row's set is a range of entries, one entry for each column (``ColumnSets``). A call has n entries.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..core.records import ColumnSets
from ..core.stats import SUFFIX, Coefficients, Demand, RowStats, layout_of
from .gradients import Gradients
from .operands import Head, Rows
from .store import Store, ratio_of, terms_of, transform, vectors_of
from .torch_functions import of_rows, slope, transformed

# by name of a vector: its number in a row that has a probability of 0 for each column
EMPTY_ROW = {name + end: value for name, value in (("lse_base", torch.inf), ("neg_log_sum", 0.0)) for end in SUFFIX}


class SetStore(Store):
    """The store of the logits [n] fp32 (fp64) of sets' entries. The constructor makes all logits of a call.

    If every row that counts has a set, methods write 0 for rows without a set. Else another store has the rows without
    a set, and methods leave these rows' statistics and gradients unchanged.
    """

    name = "kept"
    description = "none: every token keeps a set of ids"
    stops_at_device_count = True
    has_matmul = False

    def __init__(
        self,
        backend: Any,
        head: Head,
        column_sets: ColumnSets,
        operand: Tensor,
        targets: Tensor,
        scale: Tensor | None,
        demand: Demand,
        has_logits: bool = False,
        gradient: Tensor | None = None,
    ):
        """``operand``: hidden states [tokens, hidden], or with ``has_logits`` the caller's logits [tokens, vocab],
        whose gradient the store writes to ``gradient``. ``targets`` [tokens]: columns on this rank. ``scale`` [tokens]:
        factor of each row's logits, None for 1."""
        self.backend, self.head, self.column_sets = backend, head, column_sets
        self.operand, self.targets = operand, targets
        self.demand, self.softmaxes, self.gradient = demand, layout_of(demand).softmaxes, gradient
        self.transform, wide_dtype = transform(head, scale), torch.promote_types(head.weight.dtype, torch.float32)
        # two tensors, each with its own memory: kernels are compiled for the alignment of an address
        self.logits = torch.empty(len(column_sets.columns), dtype=wide_dtype, device=head.weight.device)
        self.dlogits = torch.empty_like(self.logits)
        if has_logits:
            self.entry_index = column_sets.rows.clamp(min=0), column_sets.columns.clamp(min=0).long()
            entry_logits = operand[self.entry_index].to(wide_dtype).unsqueeze(1)
            logits = transformed(entry_logits, None, of_rows(self.transform, column_sets.rows)).squeeze(1)
            self.logits.copy_(logits.masked_fill(column_sets.columns < 0, -torch.inf))
        else:
            entry_arguments = column_sets.columns, head.bias, self.transform, column_sets.rows, -math.inf
            self.backend.dot_columns(self.logits, operand, head.weight, *entry_arguments)
        if column_sets.bias is not None:
            self.logits += column_sets.bias if scale is None else column_sets.bias * scale[column_sets.rows]

    def statistics(self, rows: Rows, out: RowStats) -> None:
        if not self.demand.columns_only:
            sets, targets = self.column_sets.narrow(rows.tokens), self.targets[rows.tokens]
            for i, (ratio, _) in enumerate(self.demand.views):
                outputs = vectors_of(self.softmaxes[i], out.by_name)
                self.backend.set_stats(outputs, self.logits, sets, targets, ratio_of(ratio))
            return
        out.zero_()
        for statistic in self.demand.lists:
            entry_logits = self.logits.masked_fill(self.column_sets.columns < 0, 0.0).view(-1, self.demand.columns)
            out.by_name[statistic.vectors[0]].copy_(entry_logits[rows.tokens])

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        """Writes the gradient of hidden states, or of the caller's logits; ``finish`` makes the weight's gradient."""
        tokens, column_sets = rows.tokens, self.column_sets
        if not self.demand.columns_only:
            terms = terms_of(self.demand, self.targets[tokens], stats, coefficients)
            row_transform = of_rows(self.transform, tokens)
            self.backend.set_grad(self.dlogits, self.logits, column_sets.narrow(tokens), terms, row_transform)
        elif coefficients.columns is not None:
            block = slice(tokens.start * self.demand.columns, tokens.stop * self.demand.columns)  # the rows' entries
            row_transform = of_rows(self.transform, column_sets.rows[block])
            dlogits = coefficients.columns.view(-1, 1) * slope(self.logits[block, None], row_transform)
            self.dlogits[block] = dlogits.squeeze(1).masked_fill(column_sets.columns[block] < 0, 0.0)
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
            entry_rows = column_sets.rows
            is_in_chunk = (entry_rows >= tokens.start) & (entry_rows < tokens.stop)
            places = torch.where(is_in_chunk, entry_rows - tokens.start, -1).int()
            self.backend.add_rows(out, self.head.weight, places, self.dlogits, column_sets.columns, is_grouped=True)
        grads.sum_over_ranks(tokens)

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
            unit_column, dbias = self.dlogits.new_ones(len(self.operand), 1), grads.bias.unsqueeze(1)
            self.backend.add_rows(dbias, unit_column, column_sets.columns, self.dlogits, column_sets.rows)


class WithSets(Store):
    """The store of a call in which some rows have sets of columns: a ``SetStore`` for these rows, and another store for
    all others."""

    def __init__(self, store: Store, sets: SetStore):
        self.store, self.sets = store, sets
        self.has_target_logits = store.has_target_logits

    def fill(self, rows: Rows, out: RowStats) -> None:
        self.store.fill(rows, out)

    def statistics(self, rows: Rows, out: RowStats) -> None:
        self.store.statistics(rows, out)
        self.sets.statistics(rows, out)

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        # for the other store, rows with a set have probabilities and coefficients of 0
        has_set, vectors = self.sets.column_sets.has_set[rows.tokens], dict(stats.by_name)
        for name, number in EMPTY_ROW.items():
            if name in vectors:
                vectors[name] = vectors[name].masked_fill(has_set, number)
        masked = {name: value.masked_fill(has_set, 0.0) for name, value in coefficients.by_name.items()}
        over_ranks, grads.over_ranks = grads.over_ranks, None  # sums over ranks start after both stores have added
        self.store.add_gradients(rows, RowStats.from_dict(vectors), Coefficients.from_dict(masked), grads)
        grads.over_ranks = over_ranks
        self.sets.add_gradients(rows, stats, coefficients, grads)

    def finish(self, grads: Gradients) -> None:
        self.store.finish(grads)
        self.sets.finish(grads)
