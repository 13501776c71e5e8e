"""Results of a call and their derivatives: from statistics to values, and from upstream gradients to coefficients.

A call returns a sum of losses as one number, with parts and metrics (``ScalarObjective``); or a sum of losses for each
token (``TokenObjective``); or the statistics themselves (``StatsObjective``). The sweep calls ``run_losses`` for each
chunk, and gets coefficients if the forward pass makes gradients. After the sweep, ``results`` is called once. A
backward that makes gradients calls ``coefficients_for`` with the upstream gradients. ``evaluate.py`` has the
arithmetic.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core.memory import empty
from ..core.records import ColumnSets
from ..core.stats import SUFFIX, Coefficients, Demand, RowStats
from ..metrics import Metric, MetricValue
from ..metrics.values import OF_NOTHING
from ..parallel.tokens import metrics_of_all_ranks
from ..plan.sizes import slices
from ..stores import Backend
from ..stores.operands import TeacherHead
from .demand import Structure
from .evaluate import Inputs, TensorsByName, coefficients_of, evaluate, masked, totals

MOST_AT_ONCE = 1 << 16  # most tokens in one evaluation of coefficients in backward


def snapshot(value: float | Tensor, template: Tensor) -> float | Tensor:
    """A number as a float; a tensor as a copy in the dtype and on the device of ``template``. The caller may change the
    tensor before backward."""
    if isinstance(value, Tensor):
        return value.detach().to(device=template.device, dtype=template.dtype, copy=True)
    return float(value)


def product_of(value: Tensor, *factors: float | Tensor) -> Tensor:
    """``value`` times the factors. A factor that is the number 1 launches no kernel."""
    for factor in factors:
        if isinstance(factor, Tensor) or factor != 1.0:
            value = value * factor
    return value


@dataclass(eq=False, kw_only=True)
class Objective:
    """Computes a call's results and its gradient's coefficients, from statistics. Coefficients also take upstream
    gradients."""

    demand: Demand
    structure: Structure
    targets: Tensor  # [tokens] int64, -1 where a token does not count
    columns: Tensor | None  # [tokens, K] int64: the field ``teacher_ids``, -1 for no id; None if no statistic reads it
    teacher: TeacherHead | None
    class_weights: Tensor | None
    scale: Tensor | None  # [tokens] factor of a token's logits; None: 1
    column_sets: ColumnSets | None  # the sets of columns that softmaxes are over; None: all are over the vocabulary
    one_or_nan: Tensor  # [] a factor of all results: nan if an id is out of range, else 1
    dtype: torch.dtype  # dtype of statistics and values
    output_names: tuple[str, ...]  # of divergences, the names of their statistics
    differentiable: int = 1  # number of the first outputs that take a gradient
    # True where ranks hold different tokens. Losses that sum segments over ranks are then evaluated once, in the
    # forward pass: ranks have different plans and must send the same messages.
    exchanges: bool = False  # ranks exchange sums over segments

    def run_losses(
        self, stats: RowStats, rows: slice, needs_slopes: bool, is_closed: bool = False, keeps_values: bool = True
    ) -> Coefficients | None:
        """Runs losses and metrics on the tokens ``rows``. Returns the tokens' coefficients, or None without
        ``needs_slopes``. Runs nothing and returns None if the losses read statistics of tokens beyond ``rows``:
        ``results`` then runs the losses on all tokens at once.

        ``is_closed``: no segment of these tokens has a token beyond ``rows``. ``keeps_values``: values are kept for
        ``results``; False if a teacher's statistics are made later, with the gradients, so that ``results`` computes
        all values.
        """

    @functools.cached_property
    def unit_slopes(self) -> Tensor:
        """[tokens] -1 for tokens that count, 0 for others. The gradient of a target's log-probability has these numbers
        as alpha and as beta."""
        return (self.targets >= 0).to(self.dtype).neg_()

    def unit_coefficients(self, stats: RowStats, rows: slice, keeps_values: bool = True) -> Coefficients:
        """Coefficients of the tokens ``rows``, without the factor per token that ``token_factors`` returns.
        ``keeps_values``: the tokens' values are kept for ``results``."""
        slopes = self.unit_slopes[rows]
        return Coefficients.from_dict({"alpha": slopes, "beta": slopes})

    def token_factors(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Tensor:
        """[tokens] the factors that turn ``unit_coefficients`` into coefficients. ``upstream``: the upstream gradients
        of the outputs."""
        raise NotImplementedError

    def results(self, stats: RowStats) -> tuple[Tensor, ...]:
        """Returns the call's outputs. Called once, with the statistics of all tokens."""
        raise NotImplementedError

    def coefficients_for(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Coefficients:
        """Coefficients of all tokens, from their statistics and the upstream gradients of the outputs."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class LossObjective(Objective):
    """A sum of losses.

    ``table`` and ``unit_values`` collect the values of a pass: ``evaluate_rows`` adds the values of a chunk;
    ``take_values`` returns and empties both at the end. Both are empty before and after a pass.
    """

    inputs: Inputs  # of all tokens; the expected upstream gradient is a factor of ``summand_factors``
    loss_coefficients: list[float | Tensor]  # of the summands; tensors are []
    backend: Backend | None  # kernels of the arithmetic; None: plain PyTorch
    # The forward pass keeps coefficients for backward, since a user's function might return others when it runs again,
    # or since the losses' values are computed at the same time. False: backward computes coefficients again.
    keeps_coefficients: bool
    forward_coefficients: dict[int, TensorsByName] = field(default_factory=dict)  # by the first row of a chunk
    # [values, tokens]: values of tokens; they are summed over all tokens at once, so that sums do not depend on chunks
    table: Tensor | None = None
    unit_values: list[list[Tensor]] = field(default_factory=list)  # values of segments and pairs, by chunk
    coupled: bool = False  # a loss of a token or segment reads statistics of several tokens

    def evaluate_rows(
        self, stats: RowStats, rows: slice, needs_slopes: bool, keeps_values: bool = True
    ) -> TensorsByName:
        """Coefficients of the tokens ``rows`` by name; an empty dict if neither ``needs_slopes`` nor
        ``keeps_coefficients``. With ``keeps_values``, the tokens' values go to ``table`` and ``unit_values``."""
        structure = self.structure if needs_slopes or self.keeps_coefficients else self.structure.values_only
        table = self.table
        if table is None:
            table = empty(sum(structure.widths), len(self.targets), dtype=self.dtype, device=self.targets.device)
        coefficients, unit_values = evaluate(structure, stats, self.inputs, rows, self.backend, table)
        if keeps_values:
            self.table = table
            self.unit_values.append(unit_values)
        if self.keeps_coefficients:
            self.forward_coefficients[rows.start] = coefficients
        return coefficients

    def take_values(self) -> tuple[Tensor | None, list[list[Tensor]]]:
        """Returns ``table`` and ``unit_values``, and empties both."""
        table, unit_values = self.table, self.unit_values
        self.table, self.unit_values = None, []
        return table, unit_values

    def coefficients_at_once(self, stats: RowStats) -> TensorsByName:
        """Coefficients of all tokens by name, for the upstream gradient that the call expects. Returns the coefficients
        that the forward pass has kept, or computes coefficients if none were kept."""
        chunk_coefficients = [self.forward_coefficients[first_row] for first_row in sorted(self.forward_coefficients)]
        if not chunk_coefficients:
            tokens = len(self.targets)
            blocks = slices(tokens, MOST_AT_ONCE) if tokens and not self.coupled else [slice(0, tokens)]
            chunk_coefficients = [self.evaluate_rows(stats, rows, True, keeps_values=False) for rows in blocks]
        if len(chunk_coefficients) == 1:
            return chunk_coefficients[0]
        return {name: torch.cat([chunk[name] for chunk in chunk_coefficients]) for name in chunk_coefficients[0]}


@dataclass(eq=False, kw_only=True)
class ScalarObjective(LossObjective):
    """A sum of losses, each of which is reduced to a number before the sum.

    ``results`` sets ``stats``, ``loss_values`` and ``metric_totals``, from which parts and metrics are returned.
    """

    inverses: list[Tensor]  # [] 1 / D of each summand: 0 for a normalizer of 0, nan if an id is out of range
    is_normalized: bool  # some denominator is a normalizer, which may be 0
    expected_upstream: float | Tensor  # the upstream gradient [] for which the forward pass makes gradients
    counts: list[Tensor]  # [] divisors of the metrics
    stats: RowStats | None = None  # of all tokens
    loss_values: Sequence[Tensor] = ()  # [] the reduced value of each summand
    metric_totals: Sequence[Tensor] = ()  # sums or extrema of the metrics' values; without ``segment_metrics``

    def run_losses(
        self, stats: RowStats, rows: slice, needs_slopes: bool, is_closed: bool = False, keeps_values: bool = True
    ) -> Coefficients | None:
        if keeps_values and self.coupled and not is_closed and rows.stop - rows.start < len(self.targets):
            return None
        coefficients = self.evaluate_rows(stats, rows, needs_slopes, keeps_values)
        return Coefficients.from_dict(coefficients) if needs_slopes else None

    def results(self, stats: RowStats) -> tuple[Tensor]:
        self.stats = stats
        if self.table is None and (self.targets.shape[0] or (self.coupled and self.exchanges)):
            self.evaluate_rows(stats, slice(0, len(self.targets)), False)
        (table, unit_values), structure, summand_count = self.take_values(), self.structure, len(self.inverses)
        has_one_denominator = not self.is_normalized and len({id(inverse) for inverse in self.inverses}) == 1
        number_coefficients = [c for c in self.loss_coefficients if type(c) is float]
        has_row_sums_only = {*structure.widths} == {1} and all(m.reduce == "mean" for m, _ in structure.metrics)
        has_number_factors = has_one_denominator and len(number_coefficients) == summand_count
        if table is not None and self.backend is not None and has_number_factors and has_row_sums_only:
            # one launch makes the sums of all rows and the sum of losses
            total, row_sums = self.backend.sum_rows(table, self.inverses[0], self.one_or_nan, number_coefficients)
            sums = list(row_sums.unbind())
            self.loss_values, self.metric_totals = sums[:summand_count], sums[summand_count:]
            return (total,)
        if table is None:
            loss_values = [inverse * 0.0 for inverse in self.inverses]
            self.metric_totals = self.totals_without_tokens(structure.metrics)
        else:
            sums = totals(structure, table, unit_values, self.one_or_nan)
            loss_values = list(map(torch.mul, sums[:summand_count], self.inverses))
            self.metric_totals = sums[summand_count:]
            if self.is_normalized:  # by selection: a normalizer of 0 gives 0 even for an infinite sum
                loss_values = [torch.where(d == 0, d, v) for d, v in zip(self.inverses, loss_values, strict=True)]
        self.loss_values = loss_values
        # the sum has memory of its own: a caller may write to it
        first_term, *other_terms = map(torch.mul, loss_values, self.loss_coefficients)
        return (sum(other_terms, first_term),)

    def metric_values(self) -> dict[str, MetricValue]:
        """Metrics of all tokens by name. Called after ``results``. Computes ``Structure.segment_metrics``, which read
        all tokens at once and have no totals in ``metric_totals``."""
        stats, metric_totals, segment_metrics = self.stats, [*self.metric_totals], self.structure.segment_metrics
        assert stats is not None
        if segment_metrics and not self.targets.shape[0] and not self.exchanges:
            metric_totals += self.totals_without_tokens(segment_metrics)
        elif segment_metrics:
            structure = replace(self.structure.values_only, summands=(), metrics=segment_metrics)
            all_rows = slice(0, len(self.targets))
            table = stats.lse.new_empty(sum(structure.widths), len(self.targets))
            _, unit_values = evaluate(structure, stats, self.inputs, all_rows, None, table)
            metric_totals += totals(structure, table, [unit_values], self.one_or_nan)
        values, rank_sums = {}, self.inputs.rank_sums
        measured_metrics = (*self.structure.metrics, *segment_metrics)
        for (metric, _), total, count in zip(measured_metrics, metric_totals, self.counts, strict=True):
            if metric.reduce == "mean":
                values[metric.label] = MetricValue("mean", total, count, finish=metric.finish)
            else:
                values[metric.label] = MetricValue(metric.reduce, extremum=total)
        return values if rank_sums is None else metrics_of_all_ranks(values, rank_sums.parallel)

    def totals_without_tokens(self, metrics: Sequence[tuple[Metric, int]]) -> list[Tensor]:
        """Totals of metrics in a call without tokens: [], or [c] for c components."""
        return [
            self.one_or_nan.new_full(() if metric.components == 1 else (metric.components,), OF_NOTHING[metric.reduce])
            for metric, _ in metrics
        ]

    def coefficients_for(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Coefficients:
        (loss_upstream,) = upstream
        assert loss_upstream is not None
        return Coefficients.from_dict(self.coefficients_at_once(stats)) * self.upstream_ratio(loss_upstream)

    def upstream_ratio(self, upstream: Tensor) -> Tensor:
        """[] the ratio of the upstream gradient ``upstream`` [] to the expected upstream gradient. Gradients that the
        forward pass has made are multiplied by this ratio."""
        ratio = upstream.to(self.dtype)
        if isinstance(self.expected_upstream, Tensor) or self.expected_upstream != 1.0:
            ratio = torch.where(upstream == self.expected_upstream, 1.0, ratio / self.expected_upstream)
        return ratio

    def one_or_nan_for(self, upstream: Tensor) -> Tensor:
        """[] the factor of gradients in a caller's buffer: ``one_or_nan`` if ``upstream`` [] is the expected upstream
        gradient, else nan, since the buffer may hold gradients of further calls and cannot be rescaled."""
        return torch.where(upstream == self.expected_upstream, self.one_or_nan, torch.nan).to(self.dtype)

    def token_factors(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Tensor:
        """[tokens] the loss's derivatives by log-probabilities."""
        beta = self.coefficients_for(stats, upstream).beta
        assert beta is not None
        return -beta


class TokenObjective(LossObjective):
    """The weighted sum of the losses for each token, not reduced over tokens."""

    def unit_coefficients(self, stats: RowStats, rows: slice, keeps_values: bool = True) -> Coefficients:
        return Coefficients.from_dict(self.evaluate_rows(stats, rows, True, keeps_values))

    def token_factors(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Tensor:
        return counted_upstream(upstream[0], self.targets)

    def results(self, stats: RowStats) -> tuple[Tensor]:
        if self.table is None:
            self.evaluate_rows(stats, slice(0, len(self.targets)), False)
        table, _ = self.take_values()
        assert table is not None
        first_term, *other_terms = map(product_of, table, self.loss_coefficients)
        return (sum(other_terms, first_term) * self.one_or_nan,)

    def coefficients_for(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Coefficients:
        token_upstream = counted_upstream(upstream[0], self.targets)
        # 0 by selection where the upstream gradient is 0: a loss may have an infinite slope there
        coefficients = self.coefficients_at_once(stats)
        products = {name: value * over_columns(token_upstream, value) for name, value in coefficients.items()}
        return Coefficients.from_dict(masked(products, token_upstream != 0))


def counted_upstream(upstream: Tensor | None, targets: Tensor) -> Tensor:
    """[tokens] upstream gradients of values per token, 0 where a token does not count."""
    assert upstream is not None
    return torch.where(targets >= 0, upstream, 0.0)


def over_columns(values: Tensor, template: Tensor) -> Tensor:
    """``values`` [n] as they are if ``template`` is [n]; as [n, 1] if ``template`` is [n, c]."""
    return values if template.dim() == 1 else values[:, None]


STATISTIC_OF_OUTPUT = {"logprobs": "logprob"}  # names of statistics by name of the output, where the two names differ


class StatsObjective(Objective):
    """The statistics themselves, for a loss that the caller computes."""

    def results(self, stats: RowStats) -> tuple[Tensor, ...]:
        if self.output_names == ("logprobs",):
            return (stats.logprob * self.one_or_nan,)  # the kernels store 0 where a token does not count
        is_token_counted, zero_or_nan = self.targets >= 0, self.one_or_nan - self.one_or_nan
        values = []
        for name in self.output_names:
            value = self.output(stats.by_name, name)
            is_value_counted = over_columns(is_token_counted, value)
            if value.is_floating_point():
                values.append(torch.where(is_value_counted, value + zero_or_nan, zero_or_nan))
            else:
                values.append(value * is_value_counted)  # integers are never nan, so a product suffices
        return tuple(values)

    def output(self, vectors: TensorsByName, name: str) -> Tensor:
        """The output ``name`` [tokens] or [tokens, K] from the statistics ``vectors``; unspecified where a token does
        not count."""
        for statistic in self.demand.lists:
            if name in statistic.words:
                softmax_vectors = vectors["lse_base"], vectors["neg_log_sum"], vectors["lse"]
                return statistic.values([vectors[v] for v in statistic.vectors], softmax_vectors, 1.0, 0)[name]
        if name == "mean_logit":
            return vectors["weighted_sum"] / self.structure.vocab
        if name == "log_sum_sq_probs":
            # a difference of two lse would lose all that is below an ulp of the logits
            differences = (vectors[key + SUFFIX[1]] - 2 * vectors[key] for key in ("lse_base", "neg_log_sum"))
            return torch.sub(*differences)
        value = vectors[STATISTIC_OF_OUTPUT.get(name, name)]
        return value if value.is_floating_point() else value.long()

    def unit_coefficients(self, stats: RowStats, rows: slice, keeps_values: bool = True) -> Coefficients:
        if self.output_names[0] == "logprobs":
            return super().unit_coefficients(stats, rows, keeps_values)
        chunk_objective = replace(self, targets=self.targets[rows])
        return chunk_objective.coefficients_for(stats.narrow(rows), (-self.unit_slopes[rows],))

    def token_factors(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Tensor:
        return counted_upstream(upstream[0], self.targets).to(self.dtype)

    def coefficients_for(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Coefficients:
        slopes_by_statistic = {
            STATISTIC_OF_OUTPUT.get(name, name): gradient.to(self.dtype)
            for name, gradient in zip(self.output_names[: self.differentiable], upstream, strict=False)
            if gradient is not None
        }
        if "logprob" not in slopes_by_statistic:  # kernels read alpha and beta in every call
            slopes_by_statistic["logprob"] = torch.zeros_like(self.targets, dtype=self.dtype)
        if (slope := slopes_by_statistic.pop("mean_logit", None)) is not None:
            slopes_by_statistic["weighted_sum"] = slope / self.structure.vocab
        if (slope := slopes_by_statistic.pop("log_sum_sq_probs", None)) is not None:
            slopes_by_statistic["lse" + SUFFIX[1]] = slope
            slopes_by_statistic["lse"] = (
                slopes_by_statistic["lse"] - 2 * slope if "lse" in slopes_by_statistic else -2 * slope
            )
        coefficients = coefficients_of(self.structure, slopes_by_statistic, stats.by_name)
        # by selection: where a token does not count, statistics may be uninitialised or nan
        return Coefficients.from_dict(masked(coefficients, self.targets >= 0))
