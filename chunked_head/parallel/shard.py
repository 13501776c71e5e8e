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
from .groups import MAX_IDS, ROWS, VocabParallel
from .merge import GatheredRows, GatheredStats, ScatteredRows, SummedRows, pack

# difference of two ranks' sums of a row of hidden states, relative to its sum of absolute values, up to which they are
# sums of one row, rounded differently
HIDDEN_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of the vocabulary in a call, and the messages between ranks. The order of messages follows from
    the plan, which is equal on all ranks."""

    parallel: VocabParallel
    vocab: int  # ids on all ranks
    rows: tuple[int, ...]  # ids on each rank
    compares_hidden: bool = False  # ranks compare hidden states rather than targets, to find different tokens
    zero_or_nan: Tensor | None = None  # [] 0, or nan if ranks make different calls

    @property
    def group(self) -> Any:
        return self.parallel.group

    @functools.cached_property
    def local_ids(self) -> slice:
        """The range of ids of the vocabulary that this rank has."""
        rank = self.parallel.rank
        first_id = sum(self.rows[:rank])
        return slice(first_id, first_id + self.rows[rank])

    @property
    def columns(self) -> int:
        """Number of ids on this rank."""
        return self.local_ids.stop - self.local_ids.start

    @property
    def size_fields(self) -> dict[str, int]:
        """Fields of ``Sizes`` that depend on ranks, by name."""
        ranks = self.parallel.ranks
        hidden_ranks = ranks if self.parallel.sequence_sharded else 1
        return {"ranks": ranks, "hidden_ranks": hidden_ranks, "largest_part": max(self.rows)}

    def local_targets(self, target: Tensor) -> Tensor:
        """Targets [tokens] as this rank's columns: ``ELSEWHERE`` for ids of other ranks, and -1 for -1."""
        columns, last_column = target - self.local_ids.start, self.columns - 1
        return columns.masked_fill_(columns.clamp(0, last_column) != columns, ELSEWHERE).masked_fill_(target < 0, -1)

    def local_columns(self, ids: Tensor) -> Tensor:
        """``ids`` [tokens, K] of the vocabulary as this rank's columns: -1 for ids of other ranks, and for -1."""
        is_local = (ids >= self.local_ids.start) & (ids < self.local_ids.stop)
        return torch.where(is_local, ids - self.local_ids.start, -1)

    def agreed_on(self, fields: dict[str, str], device: torch.device) -> "Shard":
        """Compares the fields of a call over ranks. Returns a copy of the shard whose ``zero_or_nan`` is the result.
        ValueError if the host knows that the fields differ."""
        shard_fields = {ROWS: str(list(self.rows)), "vocab_size": str(self.vocab)}
        shard_fields["sequence_sharded"] = str(self.parallel.sequence_sharded)
        return replace(self, zero_or_nan=agree(shard_fields | fields, self.group, device, "VocabParallel"))

    def token_checks(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens] numbers that are equal on ranks with equal tokens: ``target`` modulo 2^24, which floats hold
        exactly."""
        return (target % MAX_IDS).to(dtype)

    def add_targets(self, target_logit: Tensor) -> None:
        """Sums ``target_logit`` [rows] over ranks, in place. A row's logit is 0 on all ranks but the one that has its
        target."""
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
        """Sends this rank's statistics of a chunk in one message, and merges those of all ranks into ``stats``, the
        statistics over the vocabulary, by a backend's ``merge_ranks``.

        The message also has ``token_checks`` [rows], or if ``compares_hidden`` sums of the hidden states. If these
        differ between ranks, results are nan: a data-parallel group may have been passed by mistake. ``known_targets``:
        every rank has the complete logits of the targets.
        """
        layout, dtype = layout_of(demand), stats.lse.dtype
        for name, vector_form in layout.forms.items():
            if vector_form.ids is not None and vector_form.sent:  # ids that are not sent stay columns of this rank
                stats.by_name[name].add_(self.local_ids.start)
        checks = hidden.sum(1, dtype=dtype) if self.compares_hidden else token_checks
        message = pack(stats, layout.places, checks)
        gathered_messages = message.new_empty(self.parallel.ranks, *message.shape)
        all_gather(gathered_messages.view(-1, message.shape[1]), message, self.group)
        is_same_token = gathered_messages[:, -1] == checks
        if self.compares_hidden:
            # ranks may have rounded the same hidden states differently, so the comparison is not exact
            hidden_norms = torch.linalg.vector_norm(hidden, 1, dim=1, dtype=dtype)
            is_same_token = (gathered_messages[:, -1] - checks).abs() <= HIDDEN_TOLERANCE * hidden_norms
        assert self.zero_or_nan is not None
        zero_or_nan = torch.where(is_same_token.all(), self.zero_or_nan, torch.nan).to(dtype)
        merge_ranks(GatheredStats(gathered_messages, demand, target, known_targets, zero_or_nan), stats)

    def add_sums(self, stats: RowStats, demand: Demand) -> None:
        """Sums over ranks, in place, the statistics that are sums over the vocabulary: one message for the chunk."""
        local_sums = [stats.by_name[name] for name in names_of_sums(demand)]
        message = torch.stack(local_sums)
        all_reduce(message, self.group)
        for local_sum, total_sum in zip(local_sums, message, strict=True):
            local_sum.copy_(total_sum)

    def hidden_gradient(self) -> SummedRows | ScatteredRows | None:
        """The object that sums the gradient of hidden states over ranks; None if each rank keeps its share."""
        if self.parallel.sequence_sharded:
            return ScatteredRows(self.group)
        return SummedRows(self.group) if self.parallel.reduce_dhidden else None

    def gathered(self, hidden: Tensor, rows: int) -> GatheredRows | None:
        """The object that gathers chunks of up to ``rows`` rows of ``hidden`` from all ranks; None if each rank has all
        rows."""
        return GatheredRows(hidden, rows, self.group) if self.parallel.sequence_sharded else None

    def own_tokens(self, values: Tensor) -> Tensor:
        """Values of this rank's tokens, differentiable. ``values`` [tokens, ...]: those of all ranks' tokens."""
        if not self.parallel.sequence_sharded:
            return values
        return values.unflatten(0, (-1, self.parallel.ranks))[:, self.parallel.rank]

    def upstream_of_all_ranks(self, upstream: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Upstream gradients of values per token, of all ranks' tokens. ``upstream``: those of this rank's tokens, and
        0 for other ranks' tokens."""
        if not self.parallel.sequence_sharded:
            return upstream
        summed_gradients = [None if gradient is None else gradient.clone() for gradient in upstream]
        for gradient in summed_gradients:
            if gradient is not None:
                all_reduce(gradient, self.group)
        return tuple(summed_gradients)
