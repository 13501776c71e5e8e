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
from .merge import GatheredRows, ScatteredRows, SummedRows, pack

# largest difference of two ranks' sums of one row of hidden states, relative to the row's sum of absolute values: ranks
# may have rounded the row differently
MOST_RELATIVE_DIFFERENCE = 1e-3


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of the vocabulary in a call, and the messages between ranks. All ranks send messages in the same
    order, since they have the same plan."""

    parallel: VocabParallel
    vocab: int  # number of ids on all ranks together
    ids_by_rank: tuple[int, ...]  # number of ids on each rank
    compares_hidden: bool = False  # ranks compare hidden states, and not targets, to notice different tokens
    zero_or_nan: Tensor | None = None  # [] 0, or nan if ranks make different calls

    @property
    def group(self) -> Any:
        return self.parallel.group

    @functools.cached_property
    def local_ids(self) -> slice:
        """The range of the vocabulary's ids that this rank has."""
        rank = self.parallel.rank
        first_id = sum(self.ids_by_rank[:rank])
        return slice(first_id, first_id + self.ids_by_rank[rank])

    @property
    def num_columns(self) -> int:
        """Number of ids on this rank."""
        return self.local_ids.stop - self.local_ids.start

    @property
    def size_fields(self) -> dict[str, int]:
        """The fields of ``Sizes`` that depend on ranks, by name."""
        ranks = self.parallel.ranks
        hidden_ranks = ranks if self.parallel.sequence_sharded else 1
        return {"ranks": ranks, "hidden_ranks": hidden_ranks, "largest_part": max(self.ids_by_rank)}

    def local_targets(self, target: Tensor) -> Tensor:
        """Targets [tokens] as columns of this rank: ``ELSEWHERE`` for an id of another rank, -1 for -1."""
        columns, last_column = target - self.local_ids.start, self.num_columns - 1
        return columns.masked_fill_(columns.clamp(0, last_column) != columns, ELSEWHERE).masked_fill_(target < 0, -1)

    def local_columns(self, ids: Tensor) -> Tensor:
        """The vocabulary's ``ids`` [tokens, K] as columns of this rank: -1 for an id of another rank, and for -1."""
        is_local = (ids >= self.local_ids.start) & (ids < self.local_ids.stop)
        return torch.where(is_local, ids - self.local_ids.start, -1)

    def agreed_on(self, fields: dict[str, str], device: torch.device) -> "Shard":
        """Compares the fields of a call over ranks. Returns a copy of the shard, with the result as ``zero_or_nan``.
        ValueError if the host knows that the fields differ."""
        shard_fields = {ROWS: str(list(self.ids_by_rank)), "vocab_size": str(self.vocab)}
        shard_fields["sequence_sharded"] = str(self.parallel.sequence_sharded)
        return replace(self, zero_or_nan=agree(shard_fields | fields, self.group, device, "VocabParallel"))

    def token_checks(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """``target`` [tokens] modulo 2^24 in ``dtype``: numbers that ranks compare, exact in fp32."""
        return (target % MAX_IDS).to(dtype)

    def add_targets(self, target_logit: Tensor) -> None:
        """Sums ``target_logit`` [rows] over ranks, in place. A logit is 0 on ranks without the row's target."""
        all_reduce(target_logit, self.group)

    def merge_stats(
        self,
        merge_ranks: Callable[..., None],
        hidden: Tensor,  # [rows, hidden]
        target: Tensor,  # [rows]
        token_checks: Tensor,  # [rows] numbers that differ where ranks have different tokens
        stats: RowStats,
        demand: Demand,
        has_target_logits: bool,
    ) -> None:
        """Sends this rank's statistics ``stats`` of a chunk in one message. Merges all ranks' statistics by a backend's
        ``merge_ranks``, and writes statistics over the vocabulary to ``stats``.

        The message also has ``token_checks`` [rows], or with ``compares_hidden`` the sum of each row of hidden states.
        If these numbers differ between ranks, results are nan: a data-parallel group may have been passed by mistake.
        ``has_target_logits``: every rank has the complete logits of the targets.
        """
        layout, dtype = layout_of(demand), stats.lse.dtype
        for name in layout.message_indices:  # ids that are not sent stay columns of this rank
            if layout.forms[name][1] is not None:
                stats.by_name[name].add_(self.local_ids.start)
        check_numbers = hidden.sum(1, dtype=dtype) if self.compares_hidden else token_checks
        message = pack(stats, layout.message_indices, check_numbers)
        gathered_messages = message.new_empty(self.parallel.ranks, *message.shape)
        all_gather(gathered_messages.view(-1, message.shape[1]), message, self.group)
        is_same_token = gathered_messages[:, -1] == check_numbers
        if self.compares_hidden:
            # ranks may have rounded the same hidden states differently, so the comparison is not exact
            hidden_norms = torch.linalg.vector_norm(hidden, 1, dim=1, dtype=dtype)
            is_same_token = (gathered_messages[:, -1] - check_numbers).abs() <= MOST_RELATIVE_DIFFERENCE * hidden_norms
        assert self.zero_or_nan is not None
        zero_or_nan = torch.where(is_same_token.all(), self.zero_or_nan, torch.nan).to(dtype)
        merge_ranks(stats, gathered_messages, demand, target, has_target_logits, zero_or_nan)

    def add_sums(self, stats: RowStats, demand: Demand) -> None:
        """Sums over ranks, in place, the statistics that are sums over the vocabulary; sends one message."""
        local_sums = [stats.by_name[name] for name in names_of_sums(demand)]
        message = torch.stack(local_sums)
        all_reduce(message, self.group)
        for local_sum, total in zip(local_sums, message, strict=True):
            local_sum.copy_(total)

    def hidden_gradient(self) -> SummedRows | ScatteredRows | None:
        """The object that sums the gradient of hidden states over ranks; None if each rank keeps its share."""
        if self.parallel.sequence_sharded:
            return ScatteredRows(self.group)
        return SummedRows(self.group) if self.parallel.reduce_dhidden else None

    def gathered(self, hidden: Tensor, most_rows: int) -> GatheredRows | None:
        """The object that gathers chunks of ``hidden`` from all ranks, up to ``most_rows`` rows each; None if every
        rank has all rows."""
        return GatheredRows(hidden, most_rows, self.group) if self.parallel.sequence_sharded else None

    def own_tokens(self, values: Tensor) -> Tensor:
        """Selects this rank's tokens from ``values`` [tokens of all ranks, ...]; differentiable. Returns
        ``values`` if all tokens are this rank's."""
        if not self.parallel.sequence_sharded:
            return values
        return values.unflatten(0, (-1, self.parallel.ranks))[:, self.parallel.rank]

    def upstream_of_all_ranks(self, upstream: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Sums upstream gradients [tokens of all ranks] over ranks. An element is 0 on a rank without the token.
        Returns ``upstream`` if all ranks have the same tokens."""
        if not self.parallel.sequence_sharded:
            return upstream
        summed_gradients = [None if gradient is None else gradient.clone() for gradient in upstream]
        for gradient in summed_gradients:
            if gradient is not None:
                all_reduce(gradient, self.group)
        return tuple(summed_gradients)
