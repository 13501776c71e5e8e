"""A call as one rank runs it: targets, sets and columns among those of the vocabulary that are on this rank."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..arithmetic.objective import Objective
from ..core.stats import Head, Kept, Rows, RowStats
from ..parallel.shard import Shard
from ..stores import Backend, Store
from ..stores.gradients import Gradients


class Work(NamedTuple):
    """The work of one sweep."""

    store: Store
    rows: Callable[[slice], Rows]  # of the call's tokens
    spans: Iterable[Sequence[slice]]  # chunks; those of one span wait for each other's statistics


class LocalCall:
    """Base of calls on hidden states and on logits."""

    backend: Backend
    objective: Objective
    logit_scale: float
    softcap: float | None
    shard: Shard | None  # this rank's part of the vocabulary, where ranks share it
    teacher_last = False  # a teacher's statistics come with the gradients
    closed_spans = False  # no other tokens belong to a span's segments

    def new_gradients(self, given: Tensor, known: bool) -> Gradients | None:
        """Buffers of the gradients that a sweep makes; None where it makes none. ``known``: statistics are."""
        raise NotImplementedError

    def begin(self, given: Tensor, head: Head, stats: RowStats, grads: Gradients | None, known: bool) -> Work:
        """The store of the call's chunks and what goes into it."""
        raise NotImplementedError

    def without_teacher(self) -> Self:
        """The call as it may outlive the backward: autograd saves a teacher's tensors, and lets go of them."""
        return self.with_objective(self.objective.without_teacher())

    def with_teacher(self, tensors: Sequence[Tensor]) -> Self:
        return self.with_objective(self.objective.with_teacher(tensors))

    def with_objective(self, objective: Objective) -> Self:
        return self if objective is self.objective else replace(self, objective=objective)  # type: ignore[type-var]

    @functools.cached_property
    def every_target(self) -> Tensor:
        """[tokens] int64: columns of this rank's, -1 where a token does not count, ``ELSEWHERE`` where it does and its
        column is another rank's."""
        target = self.objective.target
        return target if self.shard is None else self.shard.local_targets(target)

    @functools.cached_property
    def target(self) -> Tensor:
        """[tokens] int64: ``every_target`` with -1 where the softmax is over a set of columns."""
        kept, target = self.objective.kept, self.every_target
        return target if kept is None else target.masked_fill(kept.has, -1)

    @functools.cached_property
    def kept(self) -> Kept | None:
        """Sets of columns, those of this rank."""
        kept = self.objective.kept
        if kept is None or self.shard is None:
            return kept
        return replace(kept, columns=self.shard.local_columns(kept.columns))

    @property
    def multiplies(self) -> bool:
        """True where there may be rows whose logits a matmul makes."""
        return self.objective.kept is None or not self.objective.kept.everywhere

    @functools.cached_property
    def columns(self) -> Tensor | None:
        """[tokens, K] int64: the columns of each row, those of this rank, -1 for none here."""
        columns = self.objective.columns
        return columns if columns is None or self.shard is None else self.shard.local_columns(columns)

    @functools.cached_property
    def token_checks(self) -> Tensor:
        """[tokens] what has to be equal on ranks that share the vocabulary."""
        assert self.shard is not None
        numbers, scale, kept = self.objective.target, self.objective.scale, self.objective.kept
        if kept is not None:
            entries = kept.columns if kept.bias is None else kept.columns + kept.bias.float().view(torch.int32)
            numbers = torch.index_add(numbers, 0, kept.rows.clamp(min=0), entries.long())
        if scale is not None:
            numbers = numbers + scale.float().view(torch.int32)
        return self.shard.token_checks(numbers, self.objective.dtype)

    @property
    def class_weights(self) -> Tensor | None:
        """[vocab] of this rank's columns, in the dtype of statistics."""
        weights = self.objective.class_weights
        return weights if weights is None or self.shard is None else weights[self.shard.here].contiguous()
