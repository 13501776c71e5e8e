"""Results of a call and their derivatives: from statistics to values, and from upstream gradients to coefficients.

A call returns a sum of losses as one number, with parts and metrics (``ScalarObjective``), a sum of losses for each
token (``TokenObjective``), or the statistics themselves (``StatsObjective``). The sweep calls ``visit`` for each chunk,
which gives coefficients where the forward pass makes gradients; ``outputs`` follows once, at its end. A backward that
makes gradients calls ``coefficients_for`` with the upstream gradients. The arithmetic is that of ``evaluate.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.stats import SUFFIX, Coefficients, Demand, RowStats
from ..kernels.common.memory import empty
from ..metrics import Metric, MetricValue
from ..metrics.values import OF_NOTHING
from ..parallel.tokens import metrics_of_all_ranks
from ..plan.sizes import slices
from ..stores import Backend
from ..stores.operands import Kept, TeacherHead
from .demand import Structure
from .evaluate import Inputs, Named, coefficients_of, evaluate, masked, totals

MOST_AT_ONCE = 1 << 16  # tokens whose coefficients are made at once


def snapshot(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A number as it is, a tensor as a copy, since the caller may change it before backward."""
    if isinstance(value, Tensor):
        return value.detach().to(device=like.device, dtype=like.dtype, copy=True)
    return float(value)


def times(value: Tensor, *factors: float | Tensor) -> Tensor:
    """The product, without a launch for a factor that is the number 1."""
    for factor in factors:
        if isinstance(factor, Tensor) or factor != 1.0:
            value = value * factor
    return value


class Expected(NamedTuple):
    """The upstream gradient for which the forward pass makes gradients, before backward brings it."""

    upstream: float | Tensor
    one_or_nan: Tensor

    def factors(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of these gradients once the upstream gradient is ``given``; the second one is 1 or nan."""
        ratio = given.to(self.one_or_nan.dtype)
        if isinstance(self.upstream, Tensor) or self.upstream != 1.0:
            ratio = torch.where(given == self.upstream, 1.0, ratio / self.upstream)
        return ratio, self.one_or_nan

    def one_or_nan_for(self, given: Tensor) -> Tensor:
        """``one_or_nan`` for gradients that cannot be scaled: nan unless ``given`` is the expected upstream."""
        return torch.where(given == self.upstream, self.one_or_nan, torch.nan).to(self.one_or_nan.dtype)


@dataclass(eq=False, kw_only=True)
class Objective:
    """Common fields: tensors that losses and kernels read, per token or per column."""

    demand: Demand
    structure: Structure
    target: Tensor  # [tokens] int64, -1 where a token does not count
    columns: Tensor | None  # [tokens, K] int64, -1 for none
    teacher: TeacherHead | None
    class_weights: Tensor | None
    scale: Tensor | None  # [tokens] factor of a token's logits, None for 1
    kept: Kept | None  # sets of columns of softmaxes; None: all are over the vocabulary
    one_or_nan: Tensor  # [] nan where an id is out of range, which makes all results nan
    dtype: torch.dtype  # of statistics and values
    differentiable: int = 1  # how many of the first outputs take a gradient
    expected: Expected | None = None  # upstream gradient of a forward pass that makes gradients
    # Ranks hold different tokens. Losses that sum segments over ranks are evaluated once, in the forward pass: ranks'
    # plans differ, and their messages must not.
    exchanges: bool = False

    def visit(
        self, stats: RowStats, rows: slice, gradient: bool, closed: bool = False, values: bool = True
    ) -> Coefficients | None:
        """Coefficients of the tokens ``rows``; None where gradients need more than these. ``closed``: no other tokens
        belong to their segments. ``values``: False where statistics of a teacher come later, with the gradients:
        ``outputs`` then makes all values."""

    # from statistics of all tokens: values that the call returns, once all chunks have been visited
    outputs: ClassVar[Callable[..., tuple[Tensor, ...]]]
    # from statistics and upstream gradients: coefficients of all tokens
    coefficients_for: ClassVar[Callable[..., Coefficients]]


@dataclass(eq=False, kw_only=True)
class LossObjective(Objective):
    """A sum of losses."""

    inputs: Inputs  # of all tokens; factors at the expected upstream gradient
    loss_coefficients: list[float | Tensor]  # of the summands, tensors 0-d
    backend: Backend | None  # whose kernels may do the arithmetic
    # coefficients that the forward pass has made, by the first row of their chunk: a user's function may compute
    # something else by backward. None where backward computes them anew
    forward_coefficients: dict[int, Named] | None
    # values of each token [rows, tokens], summed at once so that sums do not depend on chunks; None before and after
    table: Tensor | None = None
    apart: list[list[Tensor]] = field(default_factory=list)  # values of segments and pairs, by chunk
    coupled: bool = False  # a loss looks at more than its token

    def evaluate(self, stats: RowStats, rows: slice, gradient: bool) -> Named:
        """Coefficients of some tokens where ``gradient``; their values go into ``table`` and ``apart``."""
        structure = self.structure if gradient or self.forward_coefficients is not None else self.structure.values_only
        if self.table is None:
            number, device = sum(structure.widths), self.target.device
            self.table = empty(number, len(self.target), dtype=self.dtype, device=device)
        coefficients, apart = evaluate(structure, stats, self.inputs, rows, self.backend, self.table)
        self.apart.append(apart)
        if self.forward_coefficients is not None:
            self.forward_coefficients[rows.start] = coefficients
        return coefficients

    def take_values(self) -> tuple[Tensor | None, list[list[Tensor]]]:
        """``table`` and ``apart``, which begin anew."""
        found = self.table, self.apart
        self.table, self.apart = None, []
        return found

    def coefficients_at_once(self, stats: RowStats) -> Named:
        """Coefficients of all tokens at the expected upstream gradient: the forward pass's, or made here."""
        chunks = [chunk for _, chunk in sorted((self.forward_coefficients or {}).items())]
        if not chunks:
            tokens = len(self.target)
            blocks = slices(tokens, MOST_AT_ONCE) if tokens and not self.coupled else [slice(0, tokens)]
            chunks = [self.evaluate(stats, rows, gradient=True) for rows in blocks]
            self.take_values()
        return chunks[0] if len(chunks) == 1 else {n: torch.cat([chunk[n] for chunk in chunks]) for n in chunks[0]}


@dataclass(eq=False, kw_only=True)
class ScalarObjective(LossObjective):
    """A sum of losses, each reduced by itself."""

    inverse: list[Tensor]  # [] 1 / D of each: 0 for a normalizer of 0, nan where an id is out of range
    normalized: bool  # by a normalizer, which may be 0
    expected: Expected
    counts: list[Tensor]  # of the metrics
    parts: list[Tensor] = field(default_factory=list)  # values of the summands
    found: list[Tensor] = field(default_factory=list)  # totals of the metrics

    def visit(
        self, stats: RowStats, rows: slice, gradient: bool, closed: bool = False, values: bool = True
    ) -> Coefficients | None:
        if values and self.coupled and not closed and rows.stop - rows.start < len(self.target):
            return None
        coefficients = self.evaluate(stats, rows, gradient)
        if not values:
            self.take_values()
        return Coefficients.of(coefficients) if gradient else None

    def outputs(self, stats: RowStats) -> tuple[Tensor, ...]:
        if self.table is None and (self.target.shape[0] or (self.coupled and self.exchanges)):
            self.evaluate(stats, slice(0, len(self.target)), gradient=False)
        (table, apart), inverse, count, total = self.take_values(), self.inverse[0], len(self.inverse), None
        alike = not self.normalized and len({id(one) for one in self.inverse}) == 1
        plain = [c for c in self.loss_coefficients if type(c) is float]
        sums = all(metric.reduce == "mean" for metric, _ in self.structure.metrics) and {*self.structure.widths} == {1}
        if table is None:
            self.parts[:] = [one * 0.0 for one in self.inverse]
            self.found[:] = self.of_nothing(self.structure.metrics)
        elif self.backend is not None and alike and sums and len(plain) == count:
            # one launch, which makes the sum of losses too
            total, each_sum = self.backend.sum_rows(table, inverse, self.one_or_nan, plain)
            each = list(each_sum.unbind())
            self.parts[:], self.found[:] = each[:count], each[count:]
        else:
            each = totals(self.structure, table, apart, self.one_or_nan)
            shares = list(map(torch.mul, each[:count], self.inverse))
            if self.normalized:  # by selection: a normalizer of 0 gives 0 at any total
                shares = [torch.where(d == 0, d, share) for d, share in zip(self.inverse, shares, strict=True)]
            self.parts[:], self.found[:] = shares, each[count:]
        if total is None:
            # memory of its own, which a caller may write to
            first, *others = map(torch.mul, self.parts, self.loss_coefficients)
            total = sum(others, first)
        return (total,)

    def metric_values(self, stats: RowStats) -> dict[str, MetricValue]:
        """Metrics of all chunks; those that must see all tokens at once are made here."""
        found, of_segments = [*self.found], self.structure.segment_metrics
        if of_segments and not self.target.shape[0] and not self.exchanges:
            found += self.of_nothing(of_segments)
        elif of_segments:
            structure = replace(self.structure, summands=(), metrics=of_segments, leaves=frozenset())
            everything = slice(0, len(self.target))
            table = stats.lse.new_empty(sum(structure.widths), len(self.target))
            _, apart = evaluate(structure, stats, self.inputs, everything, None, table)
            found += totals(structure, table, [apart], self.one_or_nan)
        values, rank_sums = {}, self.inputs.rank_sums
        measured = (*self.structure.metrics, *of_segments)
        for (metric, _), total, count in zip(measured, found, self.counts, strict=True):
            if metric.reduce == "mean":
                values[metric.label] = MetricValue("mean", total, count, finish=metric.finish)
            else:
                values[metric.label] = MetricValue(metric.reduce, extremum=total)
        return values if rank_sums is None else metrics_of_all_ranks(values, rank_sums.parallel)

    def of_nothing(self, metrics: Sequence[tuple[Metric, int]]) -> list[Tensor]:
        """Totals of the metrics of a call without tokens."""
        shapes = [() if metric.components == 1 else (metric.components,) for metric, _ in metrics]
        nothing = [OF_NOTHING[metric.reduce] for metric, _ in metrics]
        return [self.one_or_nan.new_full(*each) for each in zip(shapes, nothing, strict=True)]

    def coefficients_for(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Coefficients:
        (given,) = upstream
        assert given is not None
        return Coefficients.of(self.coefficients_at_once(stats)).times(self.expected.factors(given)[0])


@dataclass(eq=False, kw_only=True)
class TokenObjective(LossObjective):
    """The weighted sum of token losses for each token, unreduced."""

    def outputs(self, stats: RowStats) -> tuple[Tensor, ...]:
        self.evaluate(stats, slice(0, len(self.target)), gradient=False)
        table, _ = self.take_values()
        assert table is not None
        first, *others = map(times, table, self.loss_coefficients)
        return (sum(others, first) * self.one_or_nan,)

    def coefficients_for(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Coefficients:
        (given,) = upstream
        assert given is not None
        given = torch.where(self.target >= 0, given, 0.0)
        # by selection where nothing is asked for: a loss may have an infinite slope there
        made = self.coefficients_at_once(stats)
        found = {name: value * over_columns(given, value) for name, value in made.items()}
        return Coefficients.of(masked(found, given != 0))


def over_columns(values: Tensor, like: Tensor) -> Tensor:
    """``values`` [n], shaped [n, 1] where ``like`` is [n, c]."""
    return values if like.dim() == 1 else values[:, None]


LEAF = {"logprobs": "logprob"}  # outputs whose statistic has another name


@dataclass(eq=False, kw_only=True)
class StatsObjective(Objective):
    """Statistics for a loss that the caller computes."""

    names: tuple[str, ...]

    def outputs(self, stats: RowStats) -> tuple[Tensor, ...]:
        if self.names == ("logprobs",):
            return (stats.logprob * self.one_or_nan,)  # 0 already where a token does not count
        counts, zero = self.target >= 0, self.one_or_nan - self.one_or_nan  # or nan
        found = []
        for name in self.names:
            value = self.statistic(stats.named(), name)
            here = over_columns(counts, value)
            if value.is_floating_point():
                found.append(torch.where(here, value + zero, zero))
            else:
                found.append(value * here)  # of ints a product selects
        return tuple(found)

    def statistic(self, stats: dict[str, Tensor], name: str) -> Tensor:
        if name == "argmax":
            return stats["argmax"].long()
        if name == "top_k_logprobs":
            return (stats["top_k_logits"] - stats["start"][:, None]) + stats["rest"][:, None]
        if name == "mean_logit":
            return stats["weighted_sum"] / self.structure.vocab
        if name == "log_sum_sq_probs":
            # not the difference of both lse, which has lost what lies below an ulp of the logits
            start, rest = (stats[key + SUFFIX[1]] - 2 * stats[key] for key in ("start", "rest"))
            return start - rest
        return stats[LEAF.get(name, name)]

    def coefficients_for(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Coefficients:
        grads = {
            LEAF.get(name, name): given.to(self.dtype)
            for name, given in zip(self.names[: self.differentiable], upstream, strict=False)
            if given is not None
        }
        if "logprob" not in grads:  # alpha and beta are always there
            grads["logprob"] = torch.zeros(len(self.target), dtype=self.dtype, device=self.target.device)
        if (given := grads.pop("mean_logit", None)) is not None:
            grads["weighted_sum"] = given / self.structure.vocab
        if (given := grads.pop("log_sum_sq_probs", None)) is not None:
            grads["lse" + SUFFIX[1]] = given
            grads["lse"] = grads["lse"] - 2 * given if "lse" in grads else -2 * given
        # by selection: where a token does not count statistics may be missing or nan
        return Coefficients.of(masked(coefficients_of(self.structure, grads, stats.named()), self.target >= 0))
