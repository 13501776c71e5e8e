"""Rows whose softmax is over columns that they keep: gathered rows of the weight in the place of matmuls.

Every backend's functions work on entries, one for each column of a row's set (``core.stats.Kept``).
"""

import functools
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.stats import Coefficients, Demand, Head, Kept, RowStats
from .gradients import Gradients
from .torch.tiles import slope, transform_


class KeptRows(NamedTuple):
    """The rows of a call as they keep columns."""

    kept: Kept
    target: Tensor  # [tokens] int64, of these columns, -1 where a row does not count
    scale: Tensor | None  # [tokens] what their logits are multiplied by
    hidden: Tensor  # [tokens, hidden]
    logits: tuple[tuple[slice, Tensor], ...] = ()  # of rows, where they exist already


class KeptColumns(ABC):
    """One call's logits of kept columns [n] fp32 (fp64), and what is made of them; statistics and gradients of rows
    without a set are left as they are."""

    known_targets = False

    def __init__(self, head: Head, rows: KeptRows, demand: Demand):
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
        """Which entries [n] are of rows ``at``; their rows there and their columns, 0 for the others."""
        rows, columns = self.kept.rows, self.kept.columns
        here = (rows >= at.start) & (rows < at.stop) & (columns >= 0)
        return here, torch.where(here, rows - at.start, 0), torch.where(here, columns, 0).long()

    def pick_logits(self) -> None:
        """Out of logits that exist."""
        self.logits.fill_(-torch.inf)
        for at, view in self.rows.logits:
            here, rows, columns = self.among(at)
            self.logits.copy_(torch.where(here, view[rows, columns].to(self.wide), self.logits))
        transform_(self.logits.unsqueeze(1), None, self.head, self.scale)
        self.logits.masked_fill_(self.kept.columns < 0, -torch.inf)

    def add_to(self, at: slice, out: Tensor) -> None:
        """The entries' gradients, into the gradient of logits ``at``, where it is 0."""
        here, rows, columns = self.among(at)
        values = torch.where(here, self.dlogits, 0.0).to(out.dtype)
        out.index_put_((rows, columns), values, accumulate=True)

    @abstractmethod
    def make_logits(self) -> None:
        """The entries' logits."""

    def stats(self, at: slice, out: RowStats) -> None:
        """Statistics of rows ``at`` of the call, of these columns alone; where every row that counts keeps some, the
        others' are 0."""
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

    @abstractmethod
    def softmax_stats(self, at: slice, out: RowStats) -> None:
        """Statistics of rows' softmaxes."""

    @abstractmethod
    def softmax_grad(self, at: slice, stats: RowStats, coefficients: Coefficients) -> None:
        """What their gradients are."""

    @abstractmethod
    def put_dhidden(self, at: slice, out: Tensor) -> None:
        """Hidden states' gradients of rows ``at`` into ``out``. Where every row that counts keeps some the others'
        are 0, elsewhere they stay as they are."""

    @abstractmethod
    def put_dweight(self, out: Tensor, hidden: Tensor, dlogits: Tensor, add: bool) -> None:
        """``out[column] (+)= dlogits * hidden[row]`` for all entries; without ``add`` 0 for columns that have none."""

    def add_gradients(
        self,
        at: slice,
        stats: RowStats,
        coefficients: Coefficients,
        grads: Gradients,
    ) -> None:
        """Gradients of rows ``at``, from their statistics, which are all there is where every row keeps a set; the
        weight's wait for ``finish``."""
        self.differentiate(at, stats, coefficients)
        if grads.hidden is not None:
            self.put_dhidden(at, grads.hidden_rows(at))

    def finish(self, grads: Gradients) -> None:
        """The weight's and the bias's gradients, of all rows."""
        if grads.weight is not None:
            add = not grads.stores(self.kept.everywhere)
            self.put_dweight(grads.weight, self.rows.hidden, self.dlogits, add)
        if grads.bias is not None:
            ones = torch.ones(len(self.rows.hidden), 1, dtype=self.wide, device=self.dlogits.device)
            self.put_dweight(grads.bias.unsqueeze(1), ones, self.dlogits, not self.kept.everywhere)
