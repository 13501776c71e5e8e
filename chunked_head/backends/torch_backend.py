"""The head in torch operations, for the CPU and any device that has no Triton.

Logits are kept in fp32 (fp64 for fp64 operands). Elementwise work goes tile by tile, about a mebibyte each: a tile
stays in the processor's cache through all operations on it, and temporaries are no larger.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..gradients import AddsDlogits
from ..matmul import project
from ..memory import Store
from ..plans import Plan, slices
from ..stats import Coefficients, Head, RowStats
from . import Layout

TILE_COLUMNS = 1 << 15
TILE_ELEMENTS = 1 << 18


def store(layout: Layout) -> Store:
    return "logits"


def traits(device: torch.device) -> dict[str, Any]:
    return {"half_products": False, "scratch": 4 * TILE_ELEMENTS}


def clean_rows(out: Tensor, source: Tensor, target: Tensor) -> None:
    out.copy_(source).masked_fill_((target < 0).unsqueeze(1), 0.0)


def scale(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if source.dtype == dtype:
        if source.device.type == "cpu" and factor == 1:  # elsewhere to look would be to wait for the device
            return source
        return source.mul_(factor)
    out = torch.empty_like(source, dtype=dtype)
    for part in slices(source.numel(), TILE_ELEMENTS):
        out.view(-1)[part] = source.view(-1)[part] * factor
    return out


def session(head: Head, plan: Plan, tiled: bool) -> "TorchSession":
    return TorchSession(head, plan, tiled)


class TorchSession(AddsDlogits):
    def __init__(self, head: Head, plan: Plan, tiled: bool):
        self.head = head
        self.dtype = torch.promote_types(head.weight.dtype, torch.float32)
        elements = plan.buffer_elements(tiled)
        self.buffer = torch.empty(elements, dtype=self.dtype, device=head.weight.device)
        self.scratch = torch.empty(min(TILE_ELEMENTS, elements), dtype=self.dtype, device=head.weight.device)
        self.logits = self.buffer

    def stats(self, hidden: Tensor, target: Tensor, out: RowStats) -> None:
        self.logits = self.compute_logits(hidden, self.head)
        for rows in row_blocks(self.logits):
            self.block_stats(self.logits[rows], target[rows], out.at(rows))

    def compute_logits(self, hidden: Tensor, head: Head) -> Tensor:
        shape = hidden.shape[0], head.weight.shape[0]
        logits = self.buffer[: shape[0] * shape[1]].view(shape)
        project(hidden, head.weight, logits)
        if head.bias is not None or head.softcap is not None or head.logit_scale != 1.0:
            for rows in row_blocks(logits):
                for columns in slices(shape[1], TILE_COLUMNS):
                    transform_(logits[rows, columns], columns, head)
        return logits

    def block_stats(self, x: Tensor, target: Tensor, out: RowStats) -> None:
        row_max = x.amax(1, keepdim=True)
        row_max.masked_fill_(row_max == -torch.inf, 0.0)
        total = torch.zeros_like(row_max)
        weighted = torch.zeros_like(row_max)
        omega = self.head.class_weights
        for columns in slices(x.shape[1], TILE_COLUMNS):
            part = x[:, columns]
            scratch = self.scratch[: part.numel()].view(part.shape)
            total += torch.sub(part, row_max, out=scratch).exp_().sum(1, keepdim=True)
            if out.weighted_sum is not None and omega is not None:
                # selection, so that a logit of -inf with weight 0 does not become nan
                torch.mul(part, omega[columns], out=scratch).masked_fill_(omega[columns] == 0, 0.0)
                weighted += scratch.sum(1, keepdim=True)
            elif out.weighted_sum is not None:
                weighted += part.sum(1, keepdim=True)
        out.lse.copy_((row_max + total.log()).squeeze(1))
        out.target_logit.copy_(x.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1))
        if out.weighted_sum is not None:
            out.weighted_sum.copy_(weighted.squeeze(1))

    def grad_(self, target: Tensor, stats: RowStats, coefficients: Coefficients) -> Tensor:
        return self.differentiate_(self.logits, self.head, target, stats, coefficients)

    def tile_grad(
        self, hidden: Tensor, tile: slice, target: Tensor, stats: RowStats, coefficients: Coefficients
    ) -> Tensor:
        head = self.head.columns(tile)
        return self.differentiate_(self.compute_logits(hidden, head), head, target - tile.start, stats, coefficients)

    def differentiate_(
        self, logits: Tensor, head: Head, target: Tensor, stats: RowStats, coefficients: Coefficients
    ) -> Tensor:
        """Logits to the gradient of raw logits in place; ``target`` counts from the logits' first column."""
        # at the target, from the statistics: p - 1 out of a p near 1 would lose everything
        at_target = (stats.target_logit - stats.lse).exp() * coefficients.alpha - coefficients.beta
        if coefficients.kappa is not None:
            omega = torch.ones_like(at_target)
            if head.class_weights is not None:
                omega = head.class_weights[target.clamp(0, logits.shape[1] - 1)]
            at_target = at_target - coefficients.kappa * omega
        at_target = at_target * slope(stats.target_logit, head)
        for rows in row_blocks(logits):
            part, alpha = coefficients.at(rows), coefficients.alpha[rows, None]
            for columns in slices(logits.shape[1], TILE_COLUMNS):
                x = logits[rows, columns]
                bend = slope(x, head)
                x.sub_(stats.lse[rows, None]).exp_().mul_(alpha)
                if part.kappa is not None:
                    kappa = part.kappa[:, None]
                    x.sub_(kappa if head.class_weights is None else kappa * head.class_weights[columns])
                if isinstance(bend, Tensor) or bend != 1.0:
                    x.mul_(bend)
        here = (target >= 0) & (target < logits.shape[1])
        index = target.clamp(0, logits.shape[1] - 1).unsqueeze(1)
        kept = logits.gather(1, index).squeeze(1)
        return logits.scatter_(1, index, torch.where(here, at_target, kept).unsqueeze(1))


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Rows that make a tile of the cache's size."""
    rows, columns = logits.shape
    return slices(rows, max(1, TILE_ELEMENTS // max(1, min(columns, TILE_COLUMNS))))


def transform_(x: Tensor, columns: slice, head: Head) -> None:
    """Bias, scale and cap in place."""
    if head.bias is not None:
        x.add_(head.bias[columns])
    if head.softcap is not None:
        x.mul_(head.logit_scale / head.softcap).tanh_().mul_(head.softcap)
    elif head.logit_scale != 1.0:
        x.mul_(head.logit_scale)


def slope(x: Tensor, head: Head) -> Tensor | float:
    """d x / d raw logit, from the transformed logit."""
    if head.softcap is None:
        return head.logit_scale
    return (x / head.softcap).square_().neg_().add_(1.0).mul_(head.logit_scale)
