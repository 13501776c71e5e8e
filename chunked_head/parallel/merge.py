"""Messages between ranks that share the vocabulary: statistics, hidden states, and gradients of hidden states."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from ..core.stats import RowStats
from .agreement import all_gather, all_reduce, reduce_scatter


def pack(stats: RowStats, names: Iterable[str], token_checks: Tensor) -> Tensor:
    """Returns one message [numbers + 1, rows]: this rank's statistics ``names``, and last ``token_checks`` [rows]. Ids
    become floats, which are exact for ids up to ``MAX_IDS``."""
    message_rows = []
    for name in names:
        vector = stats.by_name[name].to(stats.lse.dtype)
        message_rows.append(vector.unsqueeze(0) if vector.dim() == 1 else vector.t())
    return torch.cat([*message_rows, token_checks.unsqueeze(0)])


class SummedRows:
    """Sums the gradient of hidden states over ranks, in place. Every rank has all rows, and a share of their gradient.
    A chunk's sum runs while the next matmuls run."""

    def __init__(self, group: Any):
        self.group = group
        self.pending_works: list[Any] = []

    def buffer_of(self, dhidden: Tensor, rows: slice) -> Tensor:
        """The memory [rows, hidden] that matmuls write a chunk's gradient to: ``rows`` of ``dhidden``."""
        return dhidden[rows]

    def reduce(self, dhidden: Tensor, rows: slice) -> None:
        """Starts the sum of ``rows`` of ``dhidden`` over ranks."""
        self.pending_works.append(all_reduce(dhidden[rows], self.group, async_op=True))

    def wait(self) -> None:
        """Makes the device wait for all sums that have been started."""
        for pending_work in self.pending_works:
            pending_work.wait()
        self.pending_works.clear()


class ScatteredRows:
    """Reduce-scatters the gradient of hidden states. Every rank has some rows of hidden states, and a share of the
    gradient of all rows. Row i of rank r is row i * ranks + r of the call: ranks have equally many rows in a chunk."""

    def __init__(self, group: Any):
        self.group, self.num_ranks = group, distributed.get_world_size(group)
        self.buffer: Tensor | None = None  # a chunk's gradient [rows of all ranks, hidden]
        self.pending_reduction: tuple[Any, Tensor] | None = None  # ``Work`` to wait for, and the memory that it reads

    def buffer_of(self, dhidden: Tensor, rows: slice) -> Tensor:
        """The memory [rows, hidden] that matmuls write a chunk's gradient to: a buffer that all chunks share."""
        num_rows = rows.stop - rows.start
        if self.buffer is None:
            # the first chunk is the largest
            self.buffer = dhidden.new_empty(num_rows, dhidden.shape[1])
        return self.buffer[:num_rows]

    def reduce(self, dhidden: Tensor, rows: slice) -> None:
        """Starts the reduce-scatter of ``rows`` of the call, from the buffer to this rank's rows, ``dhidden``."""
        assert self.buffer is not None
        self.wait()
        local_rows = dhidden[rows.start // self.num_ranks : rows.stop // self.num_ranks]
        rows_by_rank = self.buffer[: rows.stop - rows.start].view(len(local_rows), self.num_ranks, -1).transpose(0, 1)
        # always a copy, since the next products write to the buffer while the message is sent
        rows_by_rank = rows_by_rank.clone(memory_format=torch.contiguous_format)
        work = reduce_scatter(local_rows, rows_by_rank.view(-1, dhidden.shape[1]), self.group)
        self.pending_reduction = work, rows_by_rank

    def wait(self) -> None:
        """Makes the device wait for the last reduce-scatter."""
        if self.pending_reduction is not None:
            self.pending_reduction[0].wait()
            self.pending_reduction = None


def interleaved(local_rows: Tensor, group: Any) -> Tensor:
    """Gathers every rank's rows [tokens / ranks, ...]. Returns [tokens, ...], where row i of rank r has the index
    i * ranks + r."""
    num_ranks, local_rows = distributed.get_world_size(group), local_rows.contiguous()
    sent_rows = local_rows.view(torch.uint8) if local_rows.dtype == torch.bool else local_rows
    gathered_rows = sent_rows.new_empty(num_ranks * len(local_rows), *local_rows.shape[1:])
    all_gather(gathered_rows, sent_rows, group)
    rows_by_rank = gathered_rows.view(num_ranks, *local_rows.shape)
    return rows_by_rank.transpose(0, 1).reshape(gathered_rows.shape).view(local_rows.dtype)


class GatheredRows:
    """Gathers the hidden states of a chunk from all ranks, into a buffer that all chunks share. ``most_rows``: number
    of rows of the largest chunk."""

    def __init__(self, hidden: Tensor, most_rows: int, group: Any):
        self.hidden, self.group, self.num_ranks = hidden, group, distributed.get_world_size(group)
        self.buffer = hidden.new_empty(most_rows, hidden.shape[1])

    def chunk(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Returns the hidden states [rows, hidden] of ``rows`` of the call, sorted by rank, and an index [rows] int64
        for each of these rows of the call: its position among the returned hidden states."""
        local_rows = self.hidden[rows.start // self.num_ranks : rows.stop // self.num_ranks]
        gathered_rows = self.buffer[: rows.stop - rows.start]
        all_gather(gathered_rows, local_rows.contiguous(), self.group)
        row_indices = torch.arange(len(gathered_rows), device=local_rows.device)
        return gathered_rows, row_indices.view(self.num_ranks, len(local_rows)).t().reshape(-1)
