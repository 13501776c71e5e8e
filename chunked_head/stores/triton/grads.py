"""The session of gradients whose statistics are known: they leave the matmul, and no logits are stored."""

import torch
from torch import Tensor

from ...core.stats import Coefficients, Head, Rows, RowStats
from ...kernels.gradients import launch as gradients
from ...kernels.products import launch as products
from ...plan.buffers import padded_columns
from ...plan.plans import Plan
from .session import OwnProducts, counted_of, transform, zero_uncounted_


class GradSession(OwnProducts):
    def __init__(self, head: Head, plan: Plan):
        super().__init__(head, plan)
        elements = plan.block_tokens * padded_columns(plan.tile_columns)
        self.buffer = torch.empty(elements, dtype=self.sizes.dtype, device=head.weight.device)

    def tile_grad(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        head, count, columns = self.head.columns(tile), rows.target.shape[0], tile.stop - tile.start
        # a row starts on 16 bytes
        stride = padded_columns(columns)
        dlogits = self.buffer[: count * stride].view(count, stride)[:, :columns]
        common = self.terms(rows, stats, coefficients, tile.start, columns)
        gradients.grad_logits(
            dlogits, rows.hidden, head.weight, head.bias, head.class_weights, common, tile.start,
            transform(head, rows.scale), self.gpu.exp_tile(self.sizes.hidden), counted_of(rows),
        )  # fmt: skip
        self.replace_columns_(dlogits, head, tile.start, rows, stats, coefficients, common)
        return zero_uncounted_(dlogits, rows) if self.sizes.bias_grad else dlogits

    def tile_dhidden(self, dlogits: Tensor, rows: Rows, weight: Tensor, out: Tensor, first: bool) -> None:
        # BLAS chooses by the number of rows, and computes all of them
        if rows.counted is None and not self.sizes.deterministic:
            super().tile_dhidden(dlogits, rows, weight, out, first)
        else:
            products.dhidden(out, None, dlogits, weight, self.gpu.product, counted=counted_of(rows), add=not first)
