"""The arguments of losses and metrics: ``Stats``, statistics of tokens, and ``Batch``, fields. Also functions on
numbers per token that several losses share."""

import copy
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor


class Copies(Mapping[str, Tensor]):
    """Tensors by name. Each is copied when it is first read, so that a user's function may write to it."""

    def __init__(self, shared: Mapping[str, Tensor]):
        self.shared, self.copies = shared, dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.copies:
            self.copies[name] = self.shared[name].clone()
        return self.copies[name]

    def __contains__(self, name: object) -> bool:
        return name in self.shared

    def __iter__(self) -> Iterator[str]:
        return iter(self.shared)

    def __len__(self) -> int:
        return len(self.shared)


class Stats:
    """Statistics [n] of tokens' logits ``x`` [n, V] at one temperature, in fp32 (fp64 for fp64 operands). Logarithms
    are natural.

    ``logprob``: log-probability of the target. ``lse``: ``logsumexp(x)``. ``entropy``: of the softmax. ``mean_logit``:
    mean of ``x`` over the vocabulary. ``argmax``: first id of the largest logit, int64. ``top_logprob``: its
    log-probability; ``runner_up_logprob``: of the second largest logit. ``topk_logprobs`` [n, K]: log-probabilities
    of ``teacher_ids``. ``weighted_sum``: ``sum(class_weights * x)``. With a dense teacher ``q``: ``forward_kl``
    KL(q || p), ``reverse_kl`` KL(p || q), ``jsd``, ``tvd``, ``overlap`` sum min(p, q), ``teacher_entropy`` and
    ``teacher_argmax``. All are differentiable but teacher_entropy, teacher_argmax, argmax, top_logprob and
    runner_up_logprob. A statistic that no loss or metric ``needs`` is missing.
    """

    def __init__(self, values: Mapping[str, Tensor]):
        self.values, self.read = values, set[str]()  # names of the statistics that were read

    def __getattr__(self, name: str) -> Tensor:
        values = self.__dict__.get("values", {})
        if name not in values:
            raise AttributeError(
                f"statistic {name!r} was not asked for; there are {', '.join(values)}. What a loss or metric reads in "
                f"some calls alone it declares: losses.custom(needs=[{name!r}])"
            )
        self.read.add(name)
        return values[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.values]


class Batch(Mapping[str, Tensor]):
    """Fields of n tokens of a call: token fields [n, ...]; segment, pair and constant fields complete.

    Where a token does not count, token fields hold 0 (segments -1), whatever the caller had there. ``target`` [n] is
    a valid id everywhere (0 where a token does not count), ``mask`` [n] bool is true where a token counts.
    ``batch.advantages`` is ``batch["advantages"]``. Where ranks hold different tokens, the tokens are this rank's;
    sums, counts and means over segments are those of all ranks' tokens.
    """

    def __init__(
        self,
        fields: Mapping[str, Tensor],
        target: Tensor,  # [n] int64, -1 where a token does not count
        num_segments: int | None,
        vocab: int,
        rank_sums: Any = None,  # parallel.tokens.RankSums, where ranks hold different tokens
        withheld: Collection[str] = (),  # fields of the call that no loss or metric has declared
    ):
        self.withheld, self.read = withheld, set[str]()  # names of the fields that were read
        self.fields, self.num_segments, self.vocab, self.rank_sums = fields, num_segments, vocab, rank_sums
        self.memo = dict[Hashable, tuple["Stats", Tensor]]()  # what metrics of a call share, by statistics
        self.mask = target >= 0
        self.target = target.clamp(min=0)

    def copies(self) -> "Batch":
        """A batch whose tensors are copies, for one call of a user's function."""
        duplicate, sums = copy.copy(self), self.rank_sums
        duplicate.fields, duplicate.read = Copies(self.fields), set()
        duplicate.mask, duplicate.target = self.mask.clone(), self.target.clone()
        duplicate.rank_sums = None if sums is None else replace(sums, counts=Copies(sums.counts))
        return duplicate

    def __getitem__(self, name: str) -> Tensor:
        if name in self.withheld:  # ``get`` and ``in`` would take a KeyError for a missing field
            raise ValueError(
                f"field {name!r} of this call was not asked for; declare it, losses.custom(fields=[{name!r}]) or "
                f"Metric(fields=({name!r},)), and give num_segments where it is of segments"
            )
        self.read.add(name)
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
        """Sums [num_segments] of ``values`` [n] over each segment's tokens that count; tokens of segment -1 are in
        no sum. ``name``: the field of segment ids."""
        assert self.num_segments is not None
        ids = self[name]
        in_segment = self.mask & (ids >= 0)
        # tokens of no segment go into an extra last one, which is dropped
        index = torch.where(in_segment, ids, self.num_segments)
        # A GPU adds in any order (index_put has a fixed order, but waits for the device to check the ids). Sums in fp64
        # have equal fp32 results in any order, so that ranks that share a vocabulary get the same loss.
        wide = values.dtype if values.device.type == "mps" else torch.float64  # mps has no float64
        zeros = values.new_zeros(self.num_segments + 1, dtype=wide)
        local_sums = zeros.index_add(0, index, torch.where(in_segment, values, 0.0).to(wide))[:-1].to(values.dtype)
        return local_sums if self.rank_sums is None else self.rank_sums.segment_sum(local_sums)

    def segment_place(self, name: str = "segments") -> Tensor:
        """[n] int64: the number of tokens that count, of the same segment, before each token."""
        if self.rank_sums is not None:
            raise ValueError(
                "a token's place in its segment, which ld_alpha needs, is not known where ranks hold different tokens "
                "of it; leave it out, or leave out parallel=TokenParallel(...)"
            )
        ids = self[name]
        # rows may run in another order than the caller's, but the tokens of a segment that count keep their order
        groups, order = torch.where(self.mask & (ids >= 0), ids, ids.new_full((), 2**62)).sort(stable=True)
        place = torch.arange(len(ids), device=ids.device)
        begins = torch.searchsorted(groups, groups)
        return torch.empty_like(place).scatter_(0, order, place - begins)

    def segment_count(self, name: str = "segments") -> Tensor:
        """[num_segments] fp32: the number of tokens that count in each segment."""
        if self.rank_sums is not None and name in self.rank_sums.counts:
            return self.rank_sums.counts[name]
        return self.segment_sum(torch.ones_like(self.mask, dtype=torch.float32), name)

    def segment_mean(self, values: Tensor, name: str = "segments") -> Tensor:
        """Means [num_segments] of ``values`` [n] over each segment's tokens that count; 0 for segments without any."""
        return self.segment_sum(values, name) / self.segment_count(name).clamp(min=1.0).to(values.dtype)

    def per_token(self, values: Tensor, name: str = "segments") -> Tensor:
        """[n] for each token the value of its segment in ``values`` [num_segments]; 0 for tokens of segment -1."""
        ids = self[name]
        return torch.where(ids >= 0, values[ids.clamp(min=0)], 0.0)


def clamped(values: Tensor, bound: float | None) -> Tensor:
    """Values clamped to [-bound, bound]. The gradient is 0 outside, at infinite values too. A nan stays nan. None: no
    clamp."""
    if bound is None:
        return values
    # torch.clamp's gradient at a bound depends on torch's version, and on whether the bound is a tensor
    return torch.where(values > bound, bound, torch.where(values < -bound, -bound, values))


def gate(x: Tensor) -> Tensor:
    """``sigmoid(x)``. Its gradient does not contain ``1 - sigmoid(x)``, which would round to 0 for large x."""
    return torch.where(x > 0, 1 - torch.sigmoid(-x), torch.sigmoid(x))


def kl_estimate(difference: Tensor, estimator: str) -> Tensor:
    """The estimate k1, abs, k2 or k3 (Schulman 2020) of KL(sampling policy || other policy). ``difference``: the
    log-probability under the other policy minus that under the sampling policy."""
    if estimator == "k1":
        return -difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    return torch.expm1(difference) - difference
