"""Messages of ranks that hold different tokens of a batch: sums, counts, metrics.

The number of messages depends on a call's losses and metrics only, and not on its tokens, plan or gradients.
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
    """Sums of each of ``values`` over ranks, in its dtype. One message carries all in float64, which is exact for
    counts."""
    packed = torch.cat([value.reshape(-1).double() for value in values])
    all_reduce(packed, group)
    pieces = packed.split([value.numel() for value in values])
    return [piece.view(value.shape).to(value.dtype) for piece, value in zip(pieces, values, strict=True)]


class AddOverRanks(torch.autograd.Function):
    """A sum over ranks. Its gradient is summed over ranks too, since each rank differentiates its share of the loss."""

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
    """Counts and denominators over the tokens of all ranks, made before the logits; and ``segment_sum`` over ranks."""

    parallel: TokenParallel
    counts: Mapping[str, Tensor]  # by field of ids: [num_segments] fp32 number of tokens that count in each segment
    totals: Mapping[Summand, Tensor]  # denominators of the losses with ``counted``, whose tokens do not count 1 each

    def segment_sum(self, local: Tensor) -> Tensor:
        """The sum over ranks of ``local`` [num_segments], this rank's sums over segments."""
        return AddOverRanks.apply(local, self.parallel.group)

    def own_share(self, number: int, device: torch.device) -> Tensor:
        """[number] bool: true for the segments or pairs whose values this rank adds to its loss. All ranks have all
        values, and each adds every ``ranks``-th of them."""
        return torch.arange(number, device=device) % self.parallel.ranks == self.parallel.rank


def metrics_of_all_ranks(metrics: Mapping[str, MetricValue], parallel: TokenParallel) -> dict[str, MetricValue]:
    """Metrics over the tokens of all ranks, equal on each rank; one message."""
    metrics_by_name = over_ranks(metrics, parallel.group, counts=False, gather=all_gather)
    return {
        name: replace(value, whole_of=Group.from_process_group(parallel.group))
        for name, value in metrics_by_name.items()
    }
