"""Numbers of several ranks, merged: statistics of their columns (with equal bits on every rank), hidden states,
gradients."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ..core.stats import Demand, RowStats
from .agreement import all_gather, all_reduce, reduce_scatter


class GatheredStats(NamedTuple):
    """Statistics of a chunk's rows as all ranks have sent them, each over its own columns of the vocabulary."""

    message: Tensor  # [ranks, numbers + 1, rows] in the order of ``Layout.places``; last the tokens' check numbers
    demand: Demand  # the statistics that the call needs
    target: Tensor  # [rows] int64, -1 where a row does not count
    known_targets: bool  # every rank has sent the target's complete logit
    zero_or_nan: Tensor  # [] 0, or nan if ranks have different tokens


def pack(stats: RowStats, names: Iterable[str], token_checks: Tensor) -> Tensor:
    """[numbers + 1, rows]: this rank's statistics ``names`` in one message, and last the check numbers of tokens
    [rows]. Ids become floats, which hold them exactly."""
    message_rows = []
    for name in names:
        vector = stats.by_name[name].to(stats.lse.dtype)
        message_rows.append(vector.unsqueeze(0) if vector.dim() == 1 else vector.t())
    return torch.cat([*message_rows, token_checks.unsqueeze(0)])


class SummedRows:
    """Sums over ranks of the gradient of hidden states, in place, if every rank has all rows and a share of their
    gradient. A sum runs while the next matmuls run."""

    def __init__(self, group: Any):
        self.group = group
        self.pending_works: list[Any] = []

    def buffer_of(self, hidden: Tensor, rows: slice) -> Tensor:
        """The memory that matmuls write the gradient of ``rows`` to."""
        return hidden[rows]

    def reduce(self, hidden: Tensor, rows: slice) -> None:
        """Starts the sum of ``rows`` over ranks."""
        self.pending_works.append(all_reduce(hidden[rows], self.group, async_op=True))

    def wait(self) -> None:
        """Makes the device wait for all sums."""
        for pending_work in self.pending_works:
            pending_work.wait()
        self.pending_works.clear()


class ScatteredRows:
    """Reduce-scatters of the gradient of hidden states, if every rank has some of the rows, and a share of the gradient
    of all rows. Row i of rank r is row i * ranks + r of the call, so that a chunk has the same rows of every rank."""

    def __init__(self, group: Any):
        self.group, self.num_ranks = group, distributed.get_world_size(group)
        self.buffer: Tensor | None = None
        self.pending_reduction: tuple[Any, Tensor] | None = None

    def buffer_of(self, hidden: Tensor, rows: slice) -> Tensor:
        """The memory that matmuls write the gradient of ``rows`` to."""
        num_rows = rows.stop - rows.start
        if self.buffer is None:
            # the first chunk is the largest
            self.buffer = hidden.new_empty(num_rows, hidden.shape[1])
        return self.buffer[:num_rows]

    def reduce(self, hidden: Tensor, rows: slice) -> None:
        """Starts the reduce-scatter of ``rows`` into ``hidden``, this rank's rows."""
        assert self.buffer is not None
        self.wait()
        local_rows = hidden[rows.start // self.num_ranks : rows.stop // self.num_ranks]
        rows_by_rank = self.buffer[: rows.stop - rows.start].view(len(local_rows), self.num_ranks, -1).transpose(0, 1)
        # always a copy, since the next products write to the buffer while the message is sent
        rows_by_rank = rows_by_rank.clone(memory_format=torch.contiguous_format)
        self.pending_reduction = (
            reduce_scatter(local_rows, rows_by_rank.view(-1, hidden.shape[1]), self.group),
            rows_by_rank,
        )

    def wait(self) -> None:
        """Makes the device wait for the last reduce-scatter."""
        if self.pending_reduction is not None:
            self.pending_reduction[0].wait()
            self.pending_reduction = None


def interleaved(local_rows: Tensor, group: Any) -> Tensor:
    """Gathers the rows [tokens / ranks, ...] of every rank as [tokens, ...], where row i of rank r has the index
    i * ranks + r."""
    num_ranks = distributed.get_world_size(group)
    contiguous_rows = local_rows.contiguous()
    sent_rows = contiguous_rows.view(torch.uint8) if contiguous_rows.dtype == torch.bool else contiguous_rows
    gathered_rows = sent_rows.new_empty(num_ranks * len(contiguous_rows), *contiguous_rows.shape[1:])
    all_gather(gathered_rows, sent_rows, group)
    ordered_rows = (
        gathered_rows.view(num_ranks, len(contiguous_rows), *contiguous_rows.shape[1:])
        .transpose(0, 1)
        .reshape(gathered_rows.shape)
    )
    return ordered_rows.view(contiguous_rows.dtype)


class GatheredRows:
    """Gathers the hidden states of chunks from all ranks into a buffer that all chunks share. ``rows``: number of rows
    of the largest chunk."""

    def __init__(self, hidden: Tensor, rows: int, group: Any):
        self.hidden, self.group, self.num_ranks = hidden, group, distributed.get_world_size(group)
        self.buffer = hidden.new_empty(rows, hidden.shape[1])

    def chunk(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Returns the hidden states of the call's ``rows``, first those of rank 0, then those of rank 1 and so on; and
        the index in them of each of the call's rows."""
        local_rows = self.hidden[rows.start // self.num_ranks : rows.stop // self.num_ranks]
        gathered_rows = self.buffer[: rows.stop - rows.start]
        all_gather(gathered_rows, local_rows.contiguous(), self.group)
        row_indices = (
            torch.arange(len(gathered_rows), device=local_rows.device)
            .view(self.num_ranks, len(local_rows))
            .t()
            .reshape(-1)
        )
        return gathered_rows, row_indices
