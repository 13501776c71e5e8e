"""The collectives of torch.distributed that changed their names (torch 2.13), by one name each."""

from typing import Any

from torch import Tensor, distributed

_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


def all_gather(out: Tensor, own: Tensor, group: Any) -> None:
    """``own`` of every rank into ``out``, rank by rank along the first dimension."""
    _gather(out, own, group=group)


def reduce_scatter(out: Tensor, shares: Tensor, group: Any) -> Any:
    """The ranks' sum of this rank's piece of ``shares`` along the first dimension into ``out``; what to wait for."""
    return _scatter(out, shares, group=group, async_op=True)
