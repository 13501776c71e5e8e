"""Logits of rows that keep sets of columns, in Triton kernels."""

from torch import Tensor

from ...core.stats import Coefficients, RowStats
from ...kernels.common.operands import KeptEntries
from ...kernels.gradients import launch as gradients
from ...kernels.products import launch as products
from ...kernels.statistics import launch as statistics
from ..sets import SetStore
from .store import outputs_of, ratio_of, terms_of, transform


class TritonSets(SetStore):
    def make_logits(self) -> None:
        head, kept = self.head, self.kept
        statistics.kept_logits(
            self.logits, self.rows.hidden, head.weight, head.bias, kept.rows, kept.columns,
            transform(head, self.rows.scale),
        )  # fmt: skip

    def entries(self, at: slice) -> KeptEntries:
        return KeptEntries(self.kept.columns, self.kept.starts[at], self.kept.ends[at], self.rows.target[at])

    def softmax_stats(self, at: slice, out: RowStats) -> None:
        for suffix, view in zip(("", "2"), self.demand.views, strict=False):
            outputs, ratio = outputs_of(out.named(), suffix), ratio_of(view.ratio)
            statistics.kept_stats(outputs, self.logits, self.entries(at), ratio, self.kept.everywhere)

    def softmax_grad(self, at: slice, stats: RowStats, coefficients: Coefficients) -> None:
        scale = None if self.rows.scale is None else self.rows.scale[at]
        entries = self.entries(at)
        terms = terms_of(self.demand, entries.target, stats, coefficients)
        gradients.kept_grad(self.dlogits, self.logits, entries, terms, transform(self.head, scale))

    def put_dhidden(self, at: slice, out: Tensor) -> None:
        gradients.kept_dhidden(out, self.dlogits, self.head.weight, self.entries(at), self.kept.everywhere)

    def put_dweight(self, out: Tensor, hidden: Tensor, dlogits: Tensor, add: bool) -> None:
        rows = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        products.put_column_rows(out, rows, self.kept.columns, dlogits, self.kept.rows, add)
