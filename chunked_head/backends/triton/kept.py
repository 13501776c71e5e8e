"""Rows that keep columns, in Triton kernels."""

from torch import Tensor

from ...core.stats import Coefficients, RowStats
from ...kernels.gradients import launch as gradients
from ...kernels.gradients.launch import NO_SOFTMAX, Softmax, Terms
from ...kernels.products import launch as products
from ...kernels.statistics import launch as statistics
from ..kept import KeptColumns
from .session import outputs_of, ratio_of, transform


class TritonKeptColumns(KeptColumns):
    def make_logits(self) -> None:
        head, kept = self.head, self.kept
        statistics.kept_logits(
            self.logits, self.rows.hidden, head.weight, head.bias, kept.sources, kept.rows, kept.columns,
            transform(head, self.rows.scale),
        )  # fmt: skip

    def of(self, at: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The entries' columns, where those of rows ``at`` begin and end, and those rows' targets."""
        return self.kept.columns, self.kept.starts[at], self.kept.ends[at], self.rows.target[at]

    def softmax_stats(self, at: slice, out: RowStats) -> None:
        for suffix, view in zip(("", "2"), self.demand.views, strict=False):
            outputs, ratio = outputs_of(out.named(), suffix), ratio_of(view.ratio)
            statistics.kept_stats(outputs, self.logits, *self.of(at), ratio, self.kept.everywhere)

    def softmax_grad(self, at: slice, stats: RowStats, coefficients: Coefficients) -> None:
        c, second = coefficients, NO_SOFTMAX
        if len(self.demand.views) > 1:
            second = Softmax(stats.start2, stats.rest2, c.alpha2, c.eta2, ratio_of(self.demand.views[1].ratio))
        scale = None if self.rows.scale is None else self.rows.scale[at]
        *entries, target = self.of(at)
        first = Softmax(stats.start, stats.rest, c.alpha, c.eta)
        terms = Terms(target, stats.target_logit, c.beta, None, first, second)
        gradients.kept_grad(self.dlogits, self.logits, *entries, terms, transform(self.head, scale))

    def put_dhidden(self, at: slice, out: Tensor, gain: Tensor | None) -> None:
        columns, begins, ends, _ = self.of(at)
        order = None if self.rows.order is None else self.rows.order[at]
        gradients.kept_dhidden(
            out, self.dlogits, self.head.weight, columns, begins, ends, order, gain, self.kept.everywhere
        )

    def put_dweight(self, out: Tensor, hidden: Tensor, dlogits: Tensor, add: bool) -> None:
        rows = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        products.put_column_rows(out, rows, self.kept.columns, dlogits, self.kept.sources, add)
