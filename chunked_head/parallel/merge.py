"""Merges of ranks' numbers: statistics of their columns (with equal bits on every rank), hidden states, gradients."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ..core.stats import Demand, RowStats
from .agreement import all_gather, all_reduce, reduce_scatter


class GatheredStats(NamedTuple):
    """Statistics of a chunk's rows, of each rank's own columns: pieces of the vocabulary."""

    message: Tensor  # [pieces, numbers + 1, rows] as ``Layout.places`` has them, and last a check of the tokens
    demand: Demand
    target: Tensor  # [rows] int64, -1 where a row does not count
    known_targets: bool  # every rank has sent the target's complete logit
    zero_or_nan: Tensor  # [] nan where pieces are of different tokens


def pack(stats: RowStats, names: Iterable[str], tokens: Tensor) -> Tensor:
    """[numbers + 1, rows]: this rank's statistics in one message, and last the check numbers ``tokens`` [rows]. Ids
    become floats, which hold them exactly."""
    lines = []
    for name in names:
        value = stats.by_name[name].to(stats.lse.dtype)
        lines.append(value.unsqueeze(0) if value.dim() == 1 else value.t())
    return torch.cat([*lines, tokens.unsqueeze(0)])


class SummedRows:
    """The sum over ranks of the gradient of hidden states, where every rank has all rows and a share of their gradient.
    It runs in place, while the next products run."""

    def __init__(self, group: Any):
        self.group = group
        self.works: list[Any] = []

    def buffer_of(self, hidden: Tensor, rows: slice) -> Tensor:
        """The memory that products of ``rows`` are written to."""
        return hidden[rows]

    def reduce(self, hidden: Tensor, rows: slice) -> None:
        """Starts the sum over ranks of ``rows``."""
        self.works.append(all_reduce(hidden[rows], self.group, async_op=True))

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


class ScatteredRows:
    """The reduce-scatter of the gradient of hidden states, where every rank has its own rows, and a share of all rows'
    gradient. Row i of rank r is row i * ranks + r of the call, so that a chunk has the same rows of every rank."""

    def __init__(self, group: Any):
        self.group, self.ranks = group, distributed.get_world_size(group)
        self.buffer: Tensor | None = None
        self.last: tuple[Any, Tensor] | None = None

    def buffer_of(self, hidden: Tensor, rows: slice) -> Tensor:
        count = rows.stop - rows.start
        if self.buffer is None:
            # the first chunk is the largest
            self.buffer = hidden.new_empty(count, hidden.shape[1])
        return self.buffer[:count]

    def reduce(self, hidden: Tensor, rows: slice) -> None:
        assert self.buffer is not None
        self.wait()
        local = hidden[rows.start // self.ranks : rows.stop // self.ranks]
        by_rank = self.buffer[: rows.stop - rows.start].view(len(local), self.ranks, -1).transpose(0, 1)
        # always a copy, since the next products write to the buffer while the message is sent
        by_rank = by_rank.clone(memory_format=torch.contiguous_format)
        self.last = reduce_scatter(local, by_rank.view(-1, hidden.shape[1]), self.group), by_rank

    def wait(self) -> None:
        if self.last is not None:
            self.last[0].wait()
            self.last = None


def interleaved(local: Tensor, group: Any) -> Tensor:
    """Gathers ``local`` [tokens / ranks, ...] of every rank as [tokens, ...], with row i of rank r at i * ranks + r."""
    ranks = distributed.get_world_size(group)
    sent = local.contiguous()
    as_bytes = sent.view(torch.uint8) if sent.dtype == torch.bool else sent
    gathered = as_bytes.new_empty(ranks * len(sent), *sent.shape[1:])
    all_gather(gathered, as_bytes, group)
    ordered = gathered.view(ranks, len(sent), *sent.shape[1:]).transpose(0, 1).reshape(gathered.shape)
    return ordered.view(sent.dtype)


class GatheredRows:
    """Hidden states of a chunk from all ranks, in a reused buffer, rank by rank."""

    def __init__(self, hidden: Tensor, rows: int, group: Any):
        self.hidden, self.group, self.ranks = hidden, group, distributed.get_world_size(group)
        self.buffer = hidden.new_empty(rows, hidden.shape[1])

    def chunk(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Returns the hidden states of ``rows`` of the call, rank by rank, and for each row of the call its index in
        them."""
        local = self.hidden[rows.start // self.ranks : rows.stop // self.ranks]
        gathered = self.buffer[: rows.stop - rows.start]
        all_gather(gathered, local.contiguous(), self.group)
        order = torch.arange(len(gathered), device=local.device).view(self.ranks, len(local)).t().reshape(-1)
        return gathered, order
