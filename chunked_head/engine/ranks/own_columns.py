"""What an objective is to one rank: its own columns of a vocabulary that ranks may share."""

import functools

from torch import Tensor

from ...kernels.common.elsewhere import ELSEWHERE
from ...parallel.shard import Shard
from ..arithmetic.objective import Objective


class OwnColumns:
    """What calls on hidden states and on logits have in common."""

    objective: Objective
    shard: Shard | None  # this rank's part of the vocabulary, where ranks share it

    @functools.cached_property
    def target(self) -> Tensor:
        """[tokens] int64: columns of this rank's, -1 where a token does not count, ``ELSEWHERE`` where it does and its
        column is another rank's."""
        target = self.objective.target
        return target if self.shard is None else self.shard.local_targets(target)

    @functools.cached_property
    def own_target(self) -> Tensor:
        """The same with -1 where the column is another rank's."""
        return self.target if self.shard is None else self.target.masked_fill(self.target == ELSEWHERE, -1)

    @functools.cached_property
    def columns(self) -> Tensor | None:
        """[tokens, K] int64: each row's own columns among this rank's, -1 for none here."""
        columns = self.objective.columns
        return columns if columns is None or self.shard is None else self.shard.local_columns(columns)

    @functools.cached_property
    def token_checks(self) -> Tensor:
        """[tokens] what has to be equal on ranks that share the vocabulary."""
        assert self.shard is not None
        return self.shard.token_checks(self.objective.target, self.objective.dtype)

    @property
    def class_weights(self) -> Tensor | None:
        """Of this rank's columns."""
        weights = self.objective.class_weights
        return weights if weights is None or self.shard is None else weights[self.shard.here].contiguous()
