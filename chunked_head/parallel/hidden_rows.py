"""Rows of hidden states and of their gradient over ranks: summed where every rank has all, gathered and scattered where
each has its own."""

from typing import Any

import torch
from torch import Tensor, distributed

from ..core.collectives import all_gather, reduce_scatter


class SummedRows:
    """Every rank has all rows and a share of their gradient: summed in place, while the next products run."""

    def __init__(self, group: Any):
        self.group = group
        self.works: list[Any] = []

    def rows(self, hidden: Tensor, at: slice) -> Tensor:
        """Where the products of rows ``at`` go."""
        return hidden[at]

    def done(self, hidden: Tensor, at: slice) -> None:
        """Rows ``at`` have this rank's share."""
        self.works.append(distributed.all_reduce(hidden[at], group=self.group, async_op=True))

    def wait(self, hidden: Tensor) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


class ScatteredRows:
    """Every rank has rows of its own, and a share of everybody's gradient. Row i of rank r is the call's i * ranks + r:
    a chunk is the same rows of every rank."""

    def __init__(self, group: Any):
        self.group, self.ranks = group, distributed.get_world_size(group)
        self.buffer: Tensor | None = None
        self.last: tuple[Any, Tensor] | None = None

    def rows(self, hidden: Tensor, at: slice) -> Tensor:
        count = at.stop - at.start
        if self.buffer is None:
            # the first chunk is the largest
            self.buffer = hidden.new_empty(count, hidden.shape[1])
        return self.buffer[:count]

    def done(self, hidden: Tensor, at: slice) -> None:
        assert self.buffer is not None
        self.wait(hidden)
        own = hidden[at.start // self.ranks : at.stop // self.ranks]
        by_rank = self.buffer[: at.stop - at.start].view(len(own), self.ranks, -1).transpose(0, 1)
        # a copy even of one row for each rank, which lies as it should: the next products write the buffer meanwhile
        by_rank = by_rank.clone(memory_format=torch.contiguous_format)
        work = reduce_scatter(own, by_rank.view(-1, hidden.shape[1]), self.group)
        self.last = work, by_rank

    def wait(self, hidden: Tensor) -> None:
        if self.last is not None:
            self.last[0].wait()
            self.last = None


def interleaved(own: Tensor, group: Any) -> Tensor:
    """Values [tokens / ranks, ...] of every rank as the call's [tokens, ...]: row i of rank r at i * ranks + r."""
    ranks = distributed.get_world_size(group)
    sent = own.contiguous()
    as_bytes = sent.view(torch.uint8) if sent.dtype == torch.bool else sent
    gathered = as_bytes.new_empty(ranks * len(sent), *sent.shape[1:])
    all_gather(gathered, as_bytes, group)
    whole = gathered.view(ranks, len(sent), *sent.shape[1:]).transpose(0, 1).reshape(gathered.shape)
    return whole.view(sent.dtype) if sent.dtype == torch.bool else whole


class GatheredRows:
    """Hidden states of a chunk from all ranks, in a reused buffer, rank by rank."""

    def __init__(self, hidden: Tensor, rows: int, group: Any):
        self.hidden, self.group, self.ranks = hidden, group, distributed.get_world_size(group)
        self.buffer = hidden.new_empty(rows, hidden.shape[1])

    def chunk(self, at: slice) -> tuple[Tensor, Tensor]:
        """Rows ``at`` of the call as they came, and where in them each of the call's is."""
        own = self.hidden[at.start // self.ranks : at.stop // self.ranks]
        gathered = self.buffer[: at.stop - at.start]
        all_gather(gathered, own.contiguous(), self.group)
        order = torch.arange(len(gathered), device=own.device).view(self.ranks, len(own)).t().reshape(-1)
        return gathered, order
