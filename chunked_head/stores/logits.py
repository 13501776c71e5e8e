"""The store of logits that exist already."""

from ..core.stats import Coefficients, Demand, Head, Rows, RowStats
from .gradients import Gradients
from .protocol import Backend
from .sets import LogitsView
from .store import Store


class GivenLogits(Store):
    """Logits of the caller's, the rows of all views at once."""

    def __init__(self, backend: Backend, head: Head, demand: Demand, views: tuple[LogitsView, ...]):
        self.backend, self.head, self.demand, self.views = backend, head, demand, views

    def fill(self, rows: Rows, out: RowStats) -> None:
        """Does nothing: the logits are there."""

    def statistics(self, rows: Rows, out: RowStats) -> None:
        for view in self.views:
            self.backend.logits_stats(view.rows, self.head, self.demand, out.at(view.at))

    def pair_statistics(self, rows: Rows, out: RowStats) -> None:
        for view in self.views:
            self.backend.logits_pair_stats(view.rows, self.head, self.demand, out.at(view.at))

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        for view in self.views:
            assert view.gradient is not None
            of_rows = stats.at(view.at), coefficients.at(view.at)
            self.backend.logits_grad(view.gradient, view.rows, self.head, self.demand, *of_rows)
