"""Messages between ranks that hold different tokens of a batch: sums, counts, metrics.

The number of messages depends on a call's losses and metrics, and on nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..losses.base import Summand
from ..metrics.values import MetricValue, name_and_number, over_ranks
from .agreement import all_gather, all_reduce
from .groups import TokenParallel


def add_up(values: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Sums each of ``values`` over ranks. Returns sums in the shapes and dtypes of the values. One message carries all
    values in float64, in which counts are exact."""
    message = torch.cat([value.reshape(-1).double() for value in values])
    all_reduce(message, group)
    flat_sums = message.split([value.numel() for value in values])
    return [total.view(value.shape).to(value.dtype) for total, value in zip(flat_sums, values, strict=True)]


class AddOverRanks(torch.autograd.Function):
    """A sum over ranks. Backward sums gradients over ranks too: each rank differentiates its share of the loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group, value_sum = group, values.clone()
        all_reduce(value_sum, group)
        return value_sum

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return AddOverRanks.apply(gradient, ctx.group), None


@dataclass(frozen=True, eq=False)
class RankSums:
    """Counts and denominators over the tokens of all ranks. ``segment_sum`` sums values of segments over ranks."""

    parallel: TokenParallel
    counts: Mapping[str, Tensor]  # [num_segments] fp32, by field of segment ids: number of tokens that count
    totals: Mapping[Summand, Tensor]  # denominators of losses that have ``denominator_terms_of``

    def segment_sum(self, local_sums: Tensor) -> Tensor:
        """The sum over ranks of ``local_sums`` [num_segments], this rank's sums over segments."""
        return AddOverRanks.apply(local_sums, self.parallel.group)

    def own_share(self, num_values: int, device: torch.device) -> Tensor:
        """[num_values] bool: true for segments (or pairs) in this rank's share of the loss. Segment i is in the share
        of rank ``i % ranks``."""
        return torch.arange(num_values, device=device) % self.parallel.ranks == self.parallel.rank


def metrics_of_all_ranks(metrics: Mapping[str, MetricValue], parallel: TokenParallel) -> dict[str, MetricValue]:
    """Returns metrics over the tokens of all ranks, by name, equal on all ranks; sends one message. ``metrics``:
    metrics with sums and extrema of this rank's tokens, and counts of all ranks' tokens."""
    reduced_metrics = over_ranks(metrics, parallel.group, sums_counts=False, gather=all_gather)
    group_id = name_and_number(parallel.group)
    return {name: replace(value, whole_of=group_id) for name, value in reduced_metrics.items()}
