"""``Stats`` and ``Batch``, the arguments of losses and metrics, and functions per token that several losses share."""

import copy
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor


class Copies(Mapping[str, Tensor]):
    """A mapping of names to copies of tensors. A user's function may write to the copies. A tensor is copied when it is
    first read."""

    def __init__(self, original_tensors: Mapping[str, Tensor]):
        self.original_tensors, self.copies = original_tensors, dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.copies:
            self.copies[name] = self.original_tensors[name].clone()
        return self.copies[name]

    def __contains__(self, name: object) -> bool:
        return name in self.original_tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.original_tensors)

    def __len__(self) -> int:
        return len(self.original_tensors)


class Stats:
    """Statistics [n] of tokens' logits ``x`` [n, V] at one temperature, in fp32 (fp64 for fp64 operands). Logarithms
    are natural.

    ``logprob``: log-probability of the target. ``lse``: ``logsumexp(x)``. ``entropy``: of the softmax p.
    ``mean_logit``: mean of ``x`` over the vocabulary. ``argmax``: first id with the largest logit, int64.
    ``top_logprob`` and ``runner_up_logprob``: log-probabilities of the ids with the largest and second largest logit.
    ``topk_logprobs`` [n, K]: log-probabilities of ``teacher_ids``. ``weighted_sum``: ``sum(class_weights * x)``. With a
    dense teacher's softmax q: ``forward_kl`` KL(q || p), ``reverse_kl`` KL(p || q), ``overlap`` ``torch.min(p,
    q).sum(-1)``, ``jsd``, ``tvd``, ``teacher_entropy`` and ``teacher_argmax``. Statistics are differentiable, except
    teacher_entropy, teacher_argmax, argmax, top_logprob and runner_up_logprob. AttributeError for a statistic that no
    loss or metric has in ``needs``.
    """

    def __init__(self, values: Mapping[str, Tensor]):
        self.values, self.names_read = values, set[str]()

    def __getattr__(self, name: str) -> Tensor:
        values = self.__dict__.get("values", {})
        if name not in values:
            raise AttributeError(
                f"statistic {name!r} was not asked for; there are {', '.join(values)}. What a loss or metric reads in "
                f"some calls alone it declares: losses.custom(needs=[{name!r}])"
            )
        self.names_read.add(name)
        return values[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.values]


class Batch(Mapping[str, Tensor]):
    """Fields of n tokens of a call: token fields [n, ...], fields per segment and per pair, and constants.

    Where a token does not count, token fields hold 0 (segments -1), whatever the caller had there, and ``target`` [n]
    holds id 0. ``mask`` [n] bool is true where a token counts. ``batch.advantages`` is ``batch["advantages"]``. If
    ranks hold different tokens, the n tokens are this rank's; sums, counts and means over segments include all ranks'
    tokens.
    """

    def __init__(
        self,
        fields: Mapping[str, Tensor],
        target: Tensor,  # [n] int64, -1 where a token does not count
        num_segments: int | None,
        vocab: int,  # number of ids
        rank_sums: Any = None,  # parallel.tokens.RankSums, where ranks hold different tokens
        withheld: Collection[str] = (),  # names of the call's fields that no loss or metric has declared
    ):
        self.withheld, self.names_read = withheld, set[str]()
        self.fields, self.num_segments, self.vocab, self.rank_sums = fields, num_segments, vocab, rank_sums
        # by key: a tensor that several metrics of a call read, and the statistics that the tensor was computed from
        self.shared_values = dict[Hashable, tuple["Stats", Tensor]]()
        self.mask = target >= 0
        self.target = target.clamp(min=0)

    def copies(self) -> "Batch":
        """A copy of this batch. A user's function may write to the copy's tensors."""
        copied_batch, rank_sums = copy.copy(self), self.rank_sums
        copied_batch.fields, copied_batch.names_read = Copies(self.fields), set()
        copied_batch.mask, copied_batch.target = self.mask.clone(), self.target.clone()
        copied_batch.rank_sums = None if rank_sums is None else replace(rank_sums, counts=Copies(rank_sums.counts))
        return copied_batch

    def __getitem__(self, name: str) -> Tensor:
        if name in self.withheld:  # ``get`` and ``in`` would take a KeyError for a missing field
            raise ValueError(
                f"field {name!r} of this call was not asked for; declare it, losses.custom(fields=[{name!r}]) or "
                f"Metric(fields=({name!r},)), and give num_segments where it is of segments"
            )
        self.names_read.add(name)
        if name not in self.fields:
            raise KeyError(
                f"field {name!r} is not in the batch of this call; it has {', '.join(self.fields) or 'none'}; add it, "
                "or ask for it by batch.get"
            )
        return self.fields[name]

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or "fields" not in self.__dict__:
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def segment_sum(self, values: Tensor, name: str = "segments") -> Tensor:
        """Sums [num_segments] of ``values`` [n] over each segment's tokens that count. No sum contains tokens of
        segment -1. ``name``: name of the field of segment ids."""
        assert self.num_segments is not None
        segment_ids = self[name]
        is_in_segment = self.mask & (segment_ids >= 0)
        # tokens of no segment go into an extra segment at the end, which is dropped
        sum_indices = torch.where(is_in_segment, segment_ids, self.num_segments)
        # A GPU adds in any order (index_put has a fixed order, but waits for the device to check the ids). Sums in fp64
        # have equal fp32 results in any order, so that ranks that share a vocabulary get the same loss.
        sum_dtype = values.dtype if values.device.type == "mps" else torch.float64  # mps has no float64
        zeros = values.new_zeros(self.num_segments + 1, dtype=sum_dtype)
        addends = torch.where(is_in_segment, values, 0.0).to(sum_dtype)
        local_sums = zeros.index_add(0, sum_indices, addends)[:-1].to(values.dtype)
        return local_sums if self.rank_sums is None else self.rank_sums.segment_sum(local_sums)

    def segment_place(self, name: str = "segments") -> Tensor:
        """Positions [n] int64 of tokens in their segments: for a token that counts, the number of earlier tokens that
        count in the same segment. ValueError if ranks hold different tokens."""
        if self.rank_sums is not None:
            raise ValueError(
                "a token's place in its segment, which ld_alpha needs, is not known where ranks hold different tokens "
                "of it; leave it out, or leave out parallel=TokenParallel(...)"
            )
        segment_ids = self[name]
        # rows may run in another order than the caller's, but the tokens of a segment that count keep their order
        sorted_ids, sorting_indices = torch.where(
            self.mask & (segment_ids >= 0), segment_ids, segment_ids.new_full((), 2**62)
        ).sort(stable=True)
        positions = torch.arange(len(segment_ids), device=segment_ids.device)
        first_positions = torch.searchsorted(sorted_ids, sorted_ids)
        return torch.empty_like(positions).scatter_(0, sorting_indices, positions - first_positions)

    def segment_count(self, name: str = "segments") -> Tensor:
        """Numbers [num_segments], fp32, of the tokens that count in each segment."""
        if self.rank_sums is not None and name in self.rank_sums.counts:
            return self.rank_sums.counts[name]
        return self.segment_sum(torch.ones_like(self.mask, dtype=torch.float32), name)

    def segment_mean(self, values: Tensor, name: str = "segments") -> Tensor:
        """Means [num_segments] of ``values`` [n] over each segment's tokens that count; 0 where no token counts."""
        return self.segment_sum(values, name) / self.segment_count(name).clamp(min=1.0).to(values.dtype)

    def per_token(self, values: Tensor, name: str = "segments") -> Tensor:
        """Values [n]: for each token, ``values`` [num_segments] at the token's segment id; 0 for segment -1. ``name``:
        the field with the ids."""
        segment_ids = self[name]
        return torch.where(segment_ids >= 0, values[segment_ids.clamp(min=0)], 0.0)


def clamped(values: Tensor, bound: float | None) -> Tensor:
    """Values clamped to [-bound, bound]; unchanged if ``bound`` is None. The gradient is 0 where a value is clamped,
    also where the value is infinite. A nan stays nan."""
    if bound is None:
        return values
    # torch.clamp's gradient at a bound depends on torch's version, and on whether the bound is a tensor
    return torch.where(values > bound, bound, torch.where(values < -bound, -bound, values))


def gate(x: Tensor) -> Tensor:
    """``sigmoid(x)``. The gradient does not contain ``1 - sigmoid(x)``, which would round to 0 for large x."""
    return torch.where(x > 0, 1 - torch.sigmoid(-x), torch.sigmoid(x))


def kl_estimate(difference: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(sampling policy || other policy) by ``estimator`` "k1", "abs", "k2" or "k3" (Schulman 2020).
    ``difference``: log-probabilities under the other policy minus log-probabilities under the sampling policy."""
    if estimator == "k1":
        return -difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    return torch.expm1(difference) - difference
