"""Metrics that follow a token through all streams of a call."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...metrics import Metric, MetricValue
from ...parallel.tokens import whole_metrics
from ..arithmetic.compiled import run
from ..arithmetic.objective import ScalarObjective
from ..call import Outcome


def value_over_streams(metric: Metric, outcomes: Sequence[Outcome]) -> MetricValue:
    """``sum over i of v_1 * ... * v_i`` of the metric's values v in the streams, summed over the tokens that count in
    the first; a stream in which a token does not count ends its product."""
    with torch.no_grad():
        product = total = None
        for ran in outcomes:
            values = values_of(metric, ran)
            product = values if product is None else product * values
            total = product if total is None else total + product
        first = outcomes[0].objective
        assert total is not None
        one_or_nan = [ran.prepared.one_or_nan for ran in outcomes]
        count = first.counts[names_of(first).index(metric.label)]
        value = MetricValue("mean", total.sum() * torch.stack(one_or_nan).prod(), count)
    return value if first.spread is None else whole_metrics({metric.label: value}, first.spread.parallel)[metric.label]


def names_of(objective: ScalarObjective) -> list[str]:
    return [own.label for own, _ in objective.structure.metrics]


def values_of(metric: Metric, ran: Outcome) -> Tensor:
    """Of each of the call's tokens where it stands, 0 where it does not count."""
    objective, packing = ran.objective, ran.prepared.packing
    own = objective.structure.metrics[names_of(objective).index(metric.label)]
    structure = replace(objective.structure, summands=(), metrics=(own,), leaves=frozenset())
    values = run(structure, ran.stats.named(), objective.inputs, False).table[0]
    return values if packing is None else packing.unpack(values)
