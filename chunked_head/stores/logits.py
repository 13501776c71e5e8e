"""The store of logits that exist already."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..core.stats import Coefficients, RowStats
from .gradients import Gradients
from .operands import Rows
from .store import Store


class LogitsView(NamedTuple):
    """Rows of logits that exist already, of which one stride reaches every row."""

    at: slice  # of the call's rows
    rows: Rows  # ``hidden`` are the logits [rows, vocab] with contiguous columns, of any floating-point dtype
    gradient: Tensor | None = None  # [rows, vocab] where their gradient goes; may be the logits


class GivenLogits(Store):
    """Logits of the caller's, the rows of all views at once; ``view_store`` makes the store of one view."""

    def __init__(self, view_store: Callable[[LogitsView], Store], views: tuple[LogitsView, ...]):
        self.view_store, self.views = view_store, views

    def fill(self, rows: Rows, out: RowStats) -> None:
        """Does nothing: the logits are there."""

    def statistics(self, rows: Rows, out: RowStats) -> None:
        for view in self.views:
            self.view_store(view).statistics(view.rows, out.at(view.at))

    def pair_statistics(self, rows: Rows, out: RowStats) -> None:
        for view in self.views:
            self.view_store(view).pair_statistics(view.rows, out.at(view.at))

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        for view in self.views:
            of_rows = stats.at(view.at), coefficients.at(view.at)
            self.view_store(view).add_gradients(view.rows, *of_rows, grads)
