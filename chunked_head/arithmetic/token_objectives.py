"""What calls return for each token: the weighted sum of losses, or the statistics themselves."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.stats import Coefficients, RowStats
from ..stores import Backend
from .evaluate import Inputs, coefficients_of, evaluate, masked
from .factors import stacked, times
from .kernels import evaluate_rows
from .objective import Objective


@dataclass(frozen=True, eq=False)
class TokenObjective(Objective):
    """The weighted sum of token losses for each token, unreduced."""

    inputs: Inputs
    coefficients: list[float | Tensor]
    fuse: Backend | None  # whose kernels are to do the arithmetic

    def outputs(self, stats: RowStats) -> tuple[Tensor, ...]:
        inputs, structure = self.inputs, self.structure.values_only
        if self.made is not None:
            inputs, structure = inputs._replace(factors=self.factors(self.one_or_nan)), self.structure
        evaluation = evaluate(structure, stats.named(), inputs)
        if self.made is not None:
            self.made[0] = evaluation.coefficients
        table = evaluation.table
        first, *others = map(times, table, self.coefficients)
        return (sum(others, first) * self.one_or_nan,)

    def factors(self, upstream: Tensor) -> Tensor:
        return stacked([times(upstream, c) for c in self.coefficients])

    def late(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Coefficients:
        (given,) = upstream
        assert given is not None
        given = torch.where(self.target >= 0, given, 0.0)
        if self.made:
            # by selection where nothing is asked for: a loss may have an infinite slope there
            given, nothing = given[:, None], given[:, None] == 0
            found = {name: value.view(len(given), -1) for name, value in self.coefficients_made.items()}
            found = {name: torch.where(nothing, 0.0, value * given) for name, value in found.items()}
            return Coefficients(**{name: value.view_as(self.made[0][name]) for name, value in found.items()})
        inputs = self.inputs._replace(factors=self.factors(given))
        evaluation = evaluate_rows(self.structure, stats, inputs, slice(0, len(self.target)), self.fuse)
        return Coefficients(**evaluation.coefficients)


LEAF = {"logprobs": "logprob"}  # outputs that are called otherwise than the statistic


@dataclass(frozen=True, eq=False)
class StatsObjective(Objective):
    """Statistics for a loss that the caller computes: ``names``, the first ``with_gradient`` of them differentiable."""

    names: tuple[str, ...]
    with_gradient: int

    @property
    def differentiable(self) -> int:
        return self.with_gradient

    def outputs(self, stats: RowStats) -> tuple[Tensor, ...]:
        if self.names == ("logprobs",):
            return (stats.logprob * self.one_or_nan,)  # 0 already where a token does not count
        counts, zero = self.target >= 0, self.one_or_nan - self.one_or_nan  # or nan
        found = []
        for name in self.names:
            value = self.statistic(stats, name)
            here = counts if value.dim() == 1 else counts[:, None]
            if value.is_floating_point():
                found.append(torch.where(here, value + zero, zero))
            else:
                found.append(value * here)  # of ints a product selects
        return tuple(found)

    def statistic(self, stats: RowStats, name: str) -> Tensor:
        if name == "argmax":
            assert stats.argmax is not None
            return stats.argmax.long()
        if name == "top_k_logprobs":
            assert stats.top_k_logits is not None
            return (stats.top_k_logits - stats.start[:, None]) + stats.rest[:, None]
        if name == "mean_logit":
            assert stats.weighted_sum is not None
            return stats.weighted_sum / self.structure.vocab
        if name == "log_sum_sq_probs":
            assert stats.start2 is not None and stats.rest2 is not None
            # lse2 - 2 * lse, which would lose what lies below an ulp of the logits
            return (stats.start2 - 2 * stats.start) - (stats.rest2 - 2 * stats.rest)
        return getattr(stats, LEAF.get(name, name))

    def late(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Coefficients:
        counts = self.target >= 0
        grads = {
            LEAF.get(name, name): given.to(self.dtype)
            for name, given in zip(self.names[: self.with_gradient], upstream, strict=False)
            if given is not None
        }
        if "logprob" not in grads:  # alpha and beta are always there
            grads["logprob"] = torch.zeros(len(self.target), dtype=self.dtype, device=self.target.device)
        if (given := grads.pop("mean_logit", None)) is not None:
            grads["weighted_sum"] = given / self.structure.vocab
        if (given := grads.pop("log_sum_sq_probs", None)) is not None:
            grads["lse2"] = given
            grads["lse"] = grads["lse"] - 2 * given if "lse" in grads else -2 * given
        found = coefficients_of(self.structure, grads, stats.named())
        # by selection: where a token does not count there may be no statistics, or those of a teacher that is nan
        return Coefficients(**{name: masked(value, counts) for name, value in found.items()})
