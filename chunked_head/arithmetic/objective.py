"""What a call returns and differentiates: from statistics to values, and from upstream gradients to coefficients.

Three kinds: a scalar loss with parts and metrics, a value per token, or the statistics themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.stats import Coefficients, Demand, Kept, RowStats, Teacher
from ..metrics import Metric, MetricValue
from ..parallel.tokens import Spread, whole_metrics
from ..stores import Backend
from .demand import Structure
from .evaluate import Evaluation, Inputs, Named, evaluate, totals, whole_table
from .factors import Inverse, stacked, times
from .kernels import evaluate_rows


class Expected(NamedTuple):
    """The upstream gradient that gradients were made for before it had come."""

    upstream: float | Tensor
    one_or_nan: Tensor

    def factors(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """What is left to multiply the gradients by, the second one 1 or nan."""
        ratio = given.to(self.one_or_nan.dtype)
        if isinstance(self.upstream, Tensor) or self.upstream != 1.0:
            ratio = torch.where(given == self.upstream, 1.0, ratio / self.upstream)
        return ratio, self.one_or_nan

    def one_or_nan_for(self, given: Tensor) -> Tensor:
        """The same for gradients that nobody can scale: nan for another upstream gradient."""
        return torch.where(given == self.upstream, self.one_or_nan, torch.nan).to(self.one_or_nan.dtype)


@dataclass(frozen=True, eq=False)
class Objective:
    """What all kinds share; ``vocab``-sized and per-token tensors that losses and kernels read."""

    demand: Demand
    structure: Structure
    target: Tensor  # [tokens] int64, -1 where a token does not count
    columns: Tensor | None  # [tokens, K] int64, -1 for none
    teacher: Teacher | None
    class_weights: Tensor | None
    scale: Tensor | None  # [tokens] what a token's logits are multiplied by, None for 1
    kept: Kept | None  # columns that tokens' softmaxes are over, None where all are over the vocabulary
    one_or_nan: Tensor  # [] nan where an id is out of range: then everything is, rather than something wrong
    dtype: torch.dtype  # of statistics and values
    # coefficients of the forward pass at its factors, by the first row of a chunk, for backward passes that would make
    # them anew: a user's function may be another by then. None where they do make them
    made: dict[int, Named] | None

    @property
    def coefficients_made(self) -> Named:
        """Of all tokens."""
        chunks = [chunk for _, chunk in sorted((self.made or {}).items())]
        return chunks[0] if len(chunks) == 1 else {n: torch.cat([chunk[n] for chunk in chunks]) for n in chunks[0]}

    @property
    def differentiable(self) -> int:
        """How many of the outputs, the first ones, take a gradient."""
        return 1

    @property
    def exchanges(self) -> bool:
        """Whether the call sends messages to ranks that hold other tokens, and whose plans may be others."""
        return False

    def without_teacher(self) -> "Objective":
        """What may outlive the backward: a teacher's tensors are saved as autograd's own, which lets go of them."""
        return self if self.teacher is None else replace(self, teacher=self.teacher.without_tensors())

    def with_teacher(self, tensors: Sequence[Tensor]) -> "Objective":
        return self if self.teacher is None else replace(self, teacher=self.teacher.with_tensors(tensors))

    @property
    def teacher_tensors(self) -> list[Tensor]:
        return [] if self.teacher is None else self.teacher.tensors

    def visit(
        self, stats: RowStats, rows: slice, gradient: bool, closed: bool = False, values: bool = True
    ) -> Coefficients | None:
        """Statistics of the tokens ``rows`` of all have been made; their coefficients, where gradients are made along
        with them. ``closed``: no other tokens belong to their segments. ``values``: what values depend on has been made
        too; else it comes with the gradients, and ``outputs`` makes all values at once."""

    def outputs(self, stats: RowStats) -> tuple[Tensor, ...]:
        """What the call returns, once all chunks have been visited."""
        raise NotImplementedError

    def late(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Coefficients:
        """Coefficients of all tokens with the upstream gradients known."""
        raise NotImplementedError

    @property
    def expected(self) -> Expected | None:
        """The upstream gradient that a forward pass makes gradients for, where it does."""
        return None

    @property
    def recordable(self) -> bool:
        """Whether a forward pass may be done again from a tape: it does nothing but what the program says."""
        return self.teacher is None


@dataclass(frozen=True, eq=False)
class ScalarObjective(Objective):
    """A sum of losses, each reduced by itself."""

    inputs: Inputs  # of all tokens; factors at the expected upstream gradient
    coefficients: list[float | Tensor]  # of the summands, tensors 0-d
    inverse: list[Inverse]  # 1 / D of each
    declared: Tensor | float  # the expected upstream gradient
    coupled: bool
    counts: list[Tensor]  # of the metrics
    segment_metrics: tuple[tuple[Metric, int], ...]
    fuse: Backend | None  # whose kernels are to do the arithmetic
    spread: Spread | None = None  # where ranks hold different tokens of the batch
    together: bool = False  # whether they must exchange sums of segments for the values
    evaluations: list[Evaluation] = field(default_factory=list)  # of each chunk
    parts: list[Tensor] = field(default_factory=list)  # values of the summands
    found: list[Tensor] = field(default_factory=list)  # totals of the metrics

    @property
    def exchanges(self) -> bool:
        return self.spread is not None

    def visit(
        self, stats: RowStats, rows: slice, gradient: bool, closed: bool = False, values: bool = True
    ) -> Coefficients | None:
        if not values:
            return Coefficients(**self.evaluate(stats, rows, self.inputs.factors, gradient).coefficients)
        if self.coupled and not closed and not (rows.start == 0 and rows.stop == self.target.shape[0]):
            return None
        table = self.evaluations[0].table if self.evaluations else None
        if self.together:
            evaluation = self.exchange(stats)
        else:
            evaluation = self.evaluate(stats, rows, self.inputs.factors, gradient, table)
        if table is None or evaluation.table is not table:  # else it has the chunk's values now
            self.evaluations.append(evaluation)
        if not gradient:
            return None
        return Coefficients(**evaluation.coefficients)

    def exchange(self, stats: RowStats) -> Evaluation:
        """Values and gradients of losses that sum segments over ranks, with all their messages: once for a call, in
        the forward pass, and always both. Ranks' plans differ, as their tokens do; what they send must not."""
        inputs = self.inputs._replace(spread=self.spread)
        evaluation = evaluate(self.structure, stats.named(), inputs)
        assert self.made is not None
        self.made[0] = evaluation.coefficients
        return evaluation

    def evaluate(
        self, stats: RowStats, rows: slice, factors: Tensor, gradient: bool, table: Tensor | None = None
    ) -> Evaluation:
        structure = self.structure if gradient or self.made is not None else self.structure.values_only
        inputs = self.inputs if factors is self.inputs.factors else self.inputs._replace(factors=factors)
        evaluation = evaluate_rows(structure, stats, inputs, rows, self.fuse, table)
        if self.made is not None:
            self.made[rows.start] = evaluation.coefficients
        return evaluation

    def outputs(self, stats: RowStats) -> tuple[Tensor, ...]:
        everything = slice(0, self.target.shape[0])
        if not self.evaluations and self.together:
            self.evaluations.append(self.exchange(stats))
        if not self.evaluations and self.target.shape[0]:
            self.evaluations.append(self.evaluate(stats, everything, self.inputs.factors, gradient=False))
        first = self.settle()
        if first is None or len(self.parts) > 1:
            # memory of its own, which a caller may write to
            first, *others = map(torch.mul, self.parts, self.coefficients)
            return (sum(others, first),)
        return (times(first, *self.coefficients),)

    def settle(self) -> Tensor | None:
        """Adds up what all chunks have found; the first part's value once more, where that costs nothing."""
        count, evaluations, first = len(self.inverse), self.evaluations, None
        if not evaluations:
            self.parts[:] = [inverse.value * 0.0 for inverse in self.inverse]
            self.found[:] = self.of_nothing(self.structure.metrics)
            return None
        inverse = self.inverse[0].value
        alike = all(other.value is inverse and not other.given for other in self.inverse)
        if self.fuse is not None and alike and self.structure.plain_sums:
            first, sums = self.fuse.sum_rows(whole_table(evaluations), count, inverse, self.one_or_nan)
            each = sums.unbind()
            self.parts[:], self.found[:] = each[:count], each[count:]
        else:
            found = totals(self.structure, evaluations, self.one_or_nan)
            self.parts[:] = [inverse.of(total) for total, inverse in zip(found, self.inverse, strict=False)]
            self.found[:] = found[count:]
        evaluations.clear()
        return first

    def metric_values(self, stats: RowStats) -> dict[str, MetricValue]:
        """Metrics of all chunks; those that must see all tokens at once are made here."""
        found = [*self.found]
        if self.segment_metrics and not self.target.shape[0] and self.spread is None:
            found += self.of_nothing(self.segment_metrics)
        elif self.segment_metrics:
            structure = replace(self.structure, summands=(), metrics=self.segment_metrics, leaves=frozenset())
            inputs = self.inputs._replace(spread=self.spread)
            found += totals(structure, [evaluate(structure, stats.named(), inputs)], self.one_or_nan)
        values = {}
        measured = (*self.structure.metrics, *self.segment_metrics)
        for (metric, _), total, count in zip(measured, found, self.counts, strict=True):
            if metric.reduce == "mean":
                values[metric.label] = MetricValue("mean", total, count, finish=metric.finish)
            else:
                values[metric.label] = MetricValue(metric.reduce, extremum=total)
        return values if self.spread is None else whole_metrics(values, self.spread.parallel)

    def of_nothing(self, metrics: Sequence[tuple[Metric, int]]) -> list[Tensor]:
        """Their totals without tokens."""
        like, totals = self.one_or_nan, {"mean": 0.0, "max": -torch.inf, "min": torch.inf}
        shapes = [() if metric.components == 1 else (metric.components,) for metric, _ in metrics]
        return [like.new_full(shape, totals[metric.reduce]) for shape, (metric, _) in zip(shapes, metrics, strict=True)]

    def late(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Coefficients:
        (given,) = upstream
        assert given is not None
        if self.made:
            return Coefficients(**self.coefficients_made).times(self.expected.factors(given)[0])
        factors = stacked([times(i.value, c, given) for c, i in zip(self.coefficients, self.inverse, strict=True)])
        evaluation = self.evaluate(stats, slice(0, self.target.shape[0]), factors, gradient=True)
        return Coefficients(**evaluation.coefficients)

    @property
    def expected(self) -> Expected:
        return Expected(self.declared, self.one_or_nan)

    @property
    def recordable(self) -> bool:
        alone = self.teacher is None and self.spread is None and self.fuse is not None
        return alone and not (self.coupled or self.segment_metrics) and self.structure.own
