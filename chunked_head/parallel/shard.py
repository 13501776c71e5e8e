"""A rank's part of the vocabulary in a call, and every message that ranks exchange for it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.stats import Demand, RowStats, layout_of, names_of_sums
from ..core.tiles import ELSEWHERE
from .agreement import agree, all_gather, all_reduce
from .groups import MOST_IDS, ROWS, VocabParallel
from .merge import GatheredRows, GatheredStats, ScatteredRows, SummedRows, pack

# of a row's sum of absolute values: less than between different rows, more than between roundings of one row
SAME_HIDDEN = 1e-3


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's columns of the vocabulary. The plan alone decides the order of messages."""

    parallel: VocabParallel
    vocab: int  # ids on all ranks
    rows: tuple[int, ...]  # ids on each rank
    compares_hidden: bool = False  # ranks compare hidden states, not targets, to find different tokens
    zero_or_nan: Tensor | None = None  # [] nan where ranks make different calls

    @property
    def group(self) -> Any:
        return self.parallel.group

    @functools.cached_property
    def local_ids(self) -> slice:
        """Ids of this rank."""
        rank = self.parallel.rank
        first = sum(self.rows[:rank])
        return slice(first, first + self.rows[rank])

    @property
    def columns(self) -> int:
        """Number of ids on this rank."""
        return self.local_ids.stop - self.local_ids.start

    @property
    def size_fields(self) -> dict[str, int]:
        """Fields of ``Sizes``, by which ranks decide a plan."""
        ranks = self.parallel.ranks
        hidden_ranks = ranks if self.parallel.sequence_sharded else 1
        return {"ranks": ranks, "hidden_ranks": hidden_ranks, "largest_part": max(self.rows)}

    def local_targets(self, target: Tensor) -> Tensor:
        """This rank's columns for targets [tokens] of the vocabulary, ``ELSEWHERE`` for other ranks', -1 kept."""
        column, last = target - self.local_ids.start, self.columns - 1
        return column.masked_fill_(column.clamp(0, last) != column, ELSEWHERE).masked_fill_(target < 0, -1)

    def local_columns(self, ids: Tensor) -> Tensor:
        """Columns of this rank's for ids that a row names [tokens, K]; -1 for other ranks' too."""
        is_local = (ids >= self.local_ids.start) & (ids < self.local_ids.stop)
        return torch.where(is_local, ids - self.local_ids.start, -1)

    def agreed_on(self, fields: dict[str, str], device: torch.device) -> "Shard":
        """This part, in a call that all ranks agree on; raises where the host sees that ``fields`` differ."""
        split = {ROWS: str(list(self.rows)), "vocab_size": str(self.vocab)}
        split["sequence_sharded"] = str(self.parallel.sequence_sharded)
        return replace(self, zero_or_nan=agree(split | fields, self.group, device, "VocabParallel"))

    def token_checks(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens] numbers, equal on ranks with the same tokens: ``target`` modulo 2^24, which floats hold."""
        return (target % MOST_IDS).to(dtype)

    def add_targets(self, target_logit: Tensor) -> None:
        """Every row's target logit, in place, from 0 where the target is elsewhere."""
        all_reduce(target_logit, self.group)

    def merge_stats(
        self,
        merge_ranks: Callable[[GatheredStats, RowStats], None],
        hidden: Tensor,  # [rows, hidden]
        target: Tensor,  # [rows]
        token_checks: Tensor,
        stats: RowStats,
        demand: Demand,
        known_targets: bool,
    ) -> None:
        """Merges statistics of ranks' columns into the vocabulary's, by a backend's ``merge_ranks``: a message a chunk.

        ``token_checks`` [rows] go along, or without targets sums of the hidden states (logits have neither): ranks with
        different tokens, such as those of a data-parallel group, get nan.
        """
        layout, dtype = layout_of(demand), stats.lse.dtype
        for name, form in layout.forms.items():
            if form.ids is not None:
                stats.by_name[name].add_(self.local_ids.start)
        tokens = hidden.sum(1, dtype=dtype) if self.compares_hidden else token_checks
        local = pack(stats, layout.places, tokens)
        gathered = local.new_empty(self.parallel.ranks, *local.shape)
        all_gather(gathered.view(-1, local.shape[1]), local, self.group)
        same = gathered[:, -1] == tokens
        if self.compares_hidden:
            # ranks that each computed the same hidden states may have rounded them differently
            size = torch.linalg.vector_norm(hidden, 1, dim=1, dtype=dtype)
            same = (gathered[:, -1] - tokens).abs() <= SAME_HIDDEN * size
        assert self.zero_or_nan is not None
        zero_or_nan = torch.where(same.all(), self.zero_or_nan, torch.nan).to(dtype)
        merge_ranks(GatheredStats(gathered, demand, target, known_targets, zero_or_nan), stats)

    def add_sums(self, stats: RowStats, demand: Demand) -> None:
        """Sums over the vocabulary, of all ranks' columns: one message for the chunk."""
        sums = [stats.by_name[name] for name in names_of_sums(demand)]
        packed = torch.stack(sums)
        all_reduce(packed, self.group)
        for value, total in zip(sums, packed, strict=True):
            value.copy_(total)

    def hidden_gradient(self) -> SummedRows | ScatteredRows | None:
        """The message that this rank's share of hidden states' gradient takes; None for none."""
        if self.parallel.sequence_sharded:
            return ScatteredRows(self.group)
        return SummedRows(self.group) if self.parallel.reduce_dhidden else None

    def gathered(self, hidden: Tensor, rows: int) -> GatheredRows | None:
        """Hidden states of up to ``rows`` rows from other ranks; None where each has all."""
        return GatheredRows(hidden, rows, self.group) if self.parallel.sequence_sharded else None

    def own_tokens(self, values: Tensor) -> Tensor:
        """Values of this rank's tokens, of the call's [tokens, ...]; differentiable."""
        if not self.parallel.sequence_sharded:
            return values
        return values.unflatten(0, (-1, self.parallel.ranks))[:, self.parallel.rank]

    def upstream_of_all_ranks(self, upstream: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Upstream gradients of values per token, each rank's those of its own tokens and 0 elsewhere."""
        if not self.parallel.sequence_sharded:
            return upstream
        summed = [None if gradient is None else gradient.clone() for gradient in upstream]
        for gradient in summed:
            if gradient is not None:
                all_reduce(gradient, self.group)
        return tuple(summed)
