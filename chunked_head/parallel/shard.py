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

# relative difference of two sums of absolute values up to which they are of one row, rounded differently
SAME_HIDDEN = 1e-3


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of the vocabulary, and the messages between ranks. Their order follows from the plan alone,
    which is equal on all ranks."""

    parallel: VocabParallel
    vocab: int  # ids on all ranks
    rows: tuple[int, ...]  # ids on each rank
    compares_hidden: bool = False  # ranks compare hidden states, not targets, to detect that they have different tokens
    zero_or_nan: Tensor | None = None  # [] 0, or nan if ranks make different calls

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
        """Fields of ``Sizes`` about ranks, by name."""
        ranks = self.parallel.ranks
        hidden_ranks = ranks if self.parallel.sequence_sharded else 1
        return {"ranks": ranks, "hidden_ranks": hidden_ranks, "largest_part": max(self.rows)}

    def local_targets(self, target: Tensor) -> Tensor:
        """This rank's columns for targets [tokens] of the vocabulary, ``ELSEWHERE`` for other ranks', -1 kept."""
        column, last = target - self.local_ids.start, self.columns - 1
        return column.masked_fill_(column.clamp(0, last) != column, ELSEWHERE).masked_fill_(target < 0, -1)

    def local_columns(self, ids: Tensor) -> Tensor:
        """This rank's columns for ``ids`` [tokens, K] of the vocabulary; -1 for ids of other ranks, and for -1."""
        is_local = (ids >= self.local_ids.start) & (ids < self.local_ids.stop)
        return torch.where(is_local, ids - self.local_ids.start, -1)

    def agreed_on(self, fields: dict[str, str], device: torch.device) -> "Shard":
        """Sends the agreement on ``fields``; returns the shard with its ``zero_or_nan``. Raises where the host knows
        that they differ."""
        split = {ROWS: str(list(self.rows)), "vocab_size": str(self.vocab)}
        split["sequence_sharded"] = str(self.parallel.sequence_sharded)
        return replace(self, zero_or_nan=agree(split | fields, self.group, device, "VocabParallel"))

    def token_checks(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens] numbers, equal on ranks with the same tokens: ``target`` modulo 2^24, which floats hold."""
        return (target % MOST_IDS).to(dtype)

    def add_targets(self, target_logit: Tensor) -> None:
        """Adds ``target_logit`` [rows] over ranks in place: a row's logit is 0 on all ranks but its target's."""
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
        """Sends this rank's statistics of a chunk in one message, and merges all ranks' into ``stats``, the statistics
        over the vocabulary, by a backend's ``merge_ranks``.

        The message has ``token_checks`` [rows] as well; without targets, sums of the hidden states. Where they differ
        between ranks, as in a data-parallel group that was passed by mistake, results are nan.
        """
        layout, dtype = layout_of(demand), stats.lse.dtype
        for name, form in layout.forms.items():
            if form.ids is not None and form.sent:  # what stays here is of this rank's columns
                stats.by_name[name].add_(self.local_ids.start)
        tokens = hidden.sum(1, dtype=dtype) if self.compares_hidden else token_checks
        local = pack(stats, layout.places, tokens)
        gathered = local.new_empty(self.parallel.ranks, *local.shape)
        all_gather(gathered.view(-1, local.shape[1]), local, self.group)
        same = gathered[:, -1] == tokens
        if self.compares_hidden:
            # ranks may have rounded the same hidden states differently, so the comparison is not exact
            size = torch.linalg.vector_norm(hidden, 1, dim=1, dtype=dtype)
            same = (gathered[:, -1] - tokens).abs() <= SAME_HIDDEN * size
        assert self.zero_or_nan is not None
        zero_or_nan = torch.where(same.all(), self.zero_or_nan, torch.nan).to(dtype)
        merge_ranks(GatheredStats(gathered, demand, target, known_targets, zero_or_nan), stats)

    def add_sums(self, stats: RowStats, demand: Demand) -> None:
        """Adds up sums over the vocabulary over ranks, in place: one message for the chunk."""
        sums = [stats.by_name[name] for name in names_of_sums(demand)]
        packed = torch.stack(sums)
        all_reduce(packed, self.group)
        for value, total in zip(sums, packed, strict=True):
            value.copy_(total)

    def hidden_gradient(self) -> SummedRows | ScatteredRows | None:
        """The object that adds up the gradient of hidden states over ranks; None if each rank keeps its share."""
        if self.parallel.sequence_sharded:
            return ScatteredRows(self.group)
        return SummedRows(self.group) if self.parallel.reduce_dhidden else None

    def gathered(self, hidden: Tensor, rows: int) -> GatheredRows | None:
        """The object that gathers chunks of up to ``rows`` rows of ``hidden`` from all ranks; None if each rank has all
        rows."""
        return GatheredRows(hidden, rows, self.group) if self.parallel.sequence_sharded else None

    def own_tokens(self, values: Tensor) -> Tensor:
        """The part of ``values`` [tokens, ...] that is of this rank's own tokens; differentiable."""
        if not self.parallel.sequence_sharded:
            return values
        return values.unflatten(0, (-1, self.parallel.ranks))[:, self.parallel.rank]

    def upstream_of_all_ranks(self, upstream: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Upstream gradients of values per token, for all tokens. ``upstream`` has those of this rank's own tokens, and
        0 elsewhere."""
        if not self.parallel.sequence_sharded:
            return upstream
        summed = [None if gradient is None else gradient.clone() for gradient in upstream]
        for gradient in summed:
            if gradient is not None:
                all_reduce(gradient, self.group)
        return tuple(summed)
