"""Messages of ranks that have different tokens of a batch: sums, counts, metrics.

The number of messages depends only on a call's losses and metrics: not on tokens, the plan or wanted gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..losses.base import Summand
from ..metrics.values import Group, MetricValue, over_ranks
from .agreement import all_gather, all_reduce
from .groups import TokenParallel


def add_up(values: Sequence[Tensor], group: Any) -> list[Tensor]:
    """The sums over ranks in one message of float64, in which counts are exact; returned in their own dtypes."""
    packed = torch.cat([value.reshape(-1).double() for value in values])
    all_reduce(packed, group)
    pieces = packed.split([value.numel() for value in values])
    return [piece.view(value.shape).to(value.dtype) for piece, value in zip(pieces, values, strict=True)]


class AddOverRanks(torch.autograd.Function):
    """A sum over ranks, each of which differentiates its share of the loss: the gradient is summed too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group, total = group, values.clone()
        all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return AddOverRanks.apply(gradient, ctx.group), None


@dataclass(frozen=True, eq=False)
class RankSums:
    """Sums over the tokens of all ranks, computed before the logits."""

    parallel: TokenParallel
    counts: Mapping[str, Tensor]  # by field of ids: tokens that count in each segment [num_segments] fp32
    totals: Mapping[Summand, Tensor]  # denominators of losses whose tokens add other numbers to it than 1

    def segment_sum(self, local: Tensor) -> Tensor:
        """Sums over all ranks [num_segments] where ``local`` are this rank's."""
        return AddOverRanks.apply(local, self.parallel.group)

    def own_share(self, number: int, device: torch.device) -> Tensor:
        """[number] bool: segments or pairs whose values this rank adds to its loss. All ranks have all values; each
        adds every ``ranks``-th one."""
        return torch.arange(number, device=device) % self.parallel.ranks == self.parallel.rank


def metrics_of_all_ranks(metrics: Mapping[str, MetricValue], parallel: TokenParallel) -> dict[str, MetricValue]:
    """Metrics of the tokens of all ranks, the same on each: one message."""
    metrics_by_name = over_ranks(metrics, parallel.group, counts=False, gather=all_gather)
    return {
        name: replace(value, whole_of=Group.from_process_group(parallel.group))
        for name, value in metrics_by_name.items()
    }
