"""The store of rows whose softmax is over a set of columns: gathered rows of the weight in the place of matmuls.

Every backend's functions work on entries, one for each column of a row's set (``core.stats.Kept``).
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.stats import Coefficients, Demand, RowStats
from .gradients import Gradients
from .logits import LogitsView
from .operands import Head, Kept, Rows
from .store import Store
from .torch.tiles import slope, transform_


class SetRows(NamedTuple):
    """The rows of a call that keep sets of columns."""

    kept: Kept
    target: Tensor  # [tokens] int64, of these columns, -1 where a row does not count
    scale: Tensor | None  # [tokens] what their logits are multiplied by
    hidden: Tensor  # [tokens, hidden]
    logits: tuple[LogitsView, ...] = ()  # where they exist already


class SetStore(Store):
    """Logits of the columns that rows keep [n] fp32 (fp64), of all rows of a call, made with the store. Statistics and
    gradients of rows without a set are left as they are."""

    def __init__(self, head: Head, rows: SetRows, demand: Demand):
        self.head, self.rows, self.kept, self.demand = head, rows, rows.kept, demand
        self.wide = torch.promote_types(head.weight.dtype, torch.float32)
        count, device = len(self.kept.columns), head.weight.device
        self.logits = torch.empty(count, dtype=self.wide, device=device)
        self.dlogits = torch.empty(count, dtype=self.wide, device=device)
        if rows.logits:
            self.pick_logits()
        else:
            self.make_logits()
        if self.kept.bias is not None:
            self.logits += self.kept.bias if self.scale is None else self.kept.bias * self.scale

    @functools.cached_property
    def scale(self) -> Tensor | None:
        """[n] what an entry's logit is multiplied by."""
        return None if self.rows.scale is None else self.rows.scale[self.kept.rows]

    def among(self, at: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Mask [n] of the entries of rows ``at``; each one's row among these and its column, 0 for other entries."""
        rows, columns = self.kept.rows, self.kept.columns
        here = (rows >= at.start) & (rows < at.stop) & (columns >= 0)
        return here, torch.where(here, rows - at.start, 0), torch.where(here, columns, 0).long()

    def pick_logits(self) -> None:
        """Reads the entries' logits out of logits that exist."""
        self.logits.fill_(-torch.inf)
        for view in self.rows.logits:
            here, rows, columns = self.among(view.at)
            picked = view.rows.hidden[rows, columns]
            self.logits.copy_(torch.where(here, picked.to(self.wide), self.logits))
        transform_(self.logits.unsqueeze(1), None, self.head, self.scale)
        self.logits.masked_fill_(self.kept.columns < 0, -torch.inf)

    def add_to(self, at: slice, out: Tensor) -> None:
        """The entries' gradients, into the gradient of logits ``at``, where it is 0."""
        here, rows, columns = self.among(at)
        values = torch.where(here, self.dlogits, 0.0).to(out.dtype)
        out.index_put_((rows, columns), values, accumulate=True)

    def make_logits(self) -> None:
        """The entries' logits."""
        raise NotImplementedError

    def fill(self, rows: Rows, out: RowStats) -> None:
        """Does nothing: the logits are made with the store."""

    def statistics(self, rows: Rows, out: RowStats) -> None:
        """Statistics over the sets' columns; where every row that counts keeps a set, those of other rows are 0."""
        at = rows.tokens
        if not self.demand.columns_alone:
            self.softmax_stats(at, out)
            return
        out.zero_()
        if out.column_logits is not None:
            x = self.logits.masked_fill(self.kept.columns < 0, 0.0).view(-1, self.demand.columns)
            out.column_logits.copy_(x[at])

    def differentiate(self, at: slice, stats: RowStats, coefficients: Coefficients) -> None:
        """The entries' gradients for rows ``at``."""
        if not self.demand.columns_alone:
            self.softmax_grad(at, stats, coefficients)
        elif coefficients.columns is not None:
            here = slice(at.start * self.demand.columns, at.stop * self.demand.columns)
            bend = slope(self.logits, self.head, self.scale)
            grad = coefficients.columns.flatten() * (bend[here] if isinstance(bend, Tensor) else bend)
            self.dlogits[here] = grad.masked_fill(self.kept.columns[here] < 0, 0.0)

    def softmax_stats(self, at: slice, out: RowStats) -> None:
        """Statistics of the softmaxes of rows ``at``."""
        raise NotImplementedError

    def softmax_grad(self, at: slice, stats: RowStats, coefficients: Coefficients) -> None:
        """Gradients of the entries' logits of rows ``at``, into ``dlogits``."""
        raise NotImplementedError

    def put_dhidden(self, at: slice, out: Tensor) -> None:
        """Hidden states' gradients of rows ``at`` into ``out``. Where every row that counts keeps some the others'
        are 0, elsewhere they stay as they are."""
        raise NotImplementedError

    def put_dweight(self, out: Tensor, hidden: Tensor, dlogits: Tensor, add: bool) -> None:
        """``out[column] (+)= dlogits * hidden[row]`` for all entries; without ``add`` 0 for columns that have none."""
        raise NotImplementedError

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        """Gradients of hidden states, or of logits that exist; the weight's wait for ``finish``."""
        at = rows.tokens
        self.differentiate(at, stats, coefficients)
        if grads.hidden is None:
            return
        for view in self.rows.logits:
            assert view.gradient is not None
            if self.kept.everywhere:
                view.gradient.zero_()
            self.add_to(view.at, view.gradient)
        if not self.rows.logits:
            self.put_dhidden(at, grads.hidden_rows(at))
        grads.hidden_done(at)

    def finish(self, grads: Gradients) -> None:
        """The weight's and the bias's gradients, of all rows."""
        if grads.weight is not None:
            add = not grads.stores(self.kept.everywhere)
            self.put_dweight(grads.weight, self.rows.hidden, self.dlogits, add)
        if grads.bias is not None:
            ones = torch.ones(len(self.rows.hidden), 1, dtype=self.wide, device=self.dlogits.device)
            self.put_dweight(grads.bias.unsqueeze(1), ones, self.dlogits, not self.kept.everywhere)


class WithSets(Store):
    """A store of chunks some of whose rows keep sets of columns."""

    def __init__(self, store: Store, sets: SetStore):
        self.store, self.sets = store, sets
        self.known_targets = store.known_targets

    @property
    def pieces(self) -> Tensor | None:  # type: ignore[override]
        return self.store.pieces

    def fill(self, rows: Rows, out: RowStats) -> None:
        self.store.fill(rows, out)

    def statistics(self, rows: Rows, out: RowStats) -> None:
        self.store.statistics(rows, out)
        self.sets.statistics(rows, out)

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        # sums over ranks begin where a row is complete
        without = without_sets(self.sets.kept.has[rows.tokens], stats, coefficients)
        self.store.add_gradients(rows, *without, grads.of_this_rank())
        self.sets.add_gradients(rows, stats, coefficients, grads)

    def finish(self, grads: Gradients) -> None:
        self.store.finish(grads)
        self.sets.finish(grads)


def without_sets(has: Tensor, stats: RowStats, coefficients: Coefficients) -> tuple[RowStats, Coefficients]:
    """Statistics and coefficients with probabilities and coefficients of 0 in rows that keep a set, where ``has``."""
    found = replace(stats, start=stats.start.masked_fill(has, torch.inf), rest=stats.rest.masked_fill(has, 0.0))
    if stats.start2 is not None and stats.rest2 is not None:
        second = stats.start2.masked_fill(has, torch.inf), stats.rest2.masked_fill(has, 0.0)
        found = replace(found, start2=second[0], rest2=second[1])
    return found, Coefficients(**{name: value.masked_fill(has, 0.0) for name, value in coefficients.named().items()})
