"""Metrics that follow a token through all streams of a call."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..arithmetic.evaluate import evaluate
from ..arithmetic.objective import ScalarObjective
from ..metrics import Metric, MetricValue
from ..parallel.tokens import whole_metrics
from .run import Outcome


def value_over_streams(metric: Metric, outcomes: Sequence[Outcome]) -> MetricValue:
    """``sum over i of v_1 * ... * v_i`` of the metric's values v in the streams, summed over the tokens that count in
    the first; a stream in which a token does not count ends its product."""
    objective: ScalarObjective = outcomes[0].objective
    with torch.no_grad():
        first, *others = itertools.accumulate([values_of(metric, ran) for ran in outcomes], torch.mul)
        total = sum(others, first).sum() * torch.stack([ran.prepared.one_or_nan for ran in outcomes]).prod()
    value = MetricValue("mean", total, objective.counts[place_of(metric, objective)])
    if objective.spread is None:
        return value
    return whole_metrics({metric.label: value}, objective.spread.parallel)[metric.label]


def place_of(metric: Metric, objective: ScalarObjective) -> int:
    return [own.label for own, _ in objective.structure.metrics].index(metric.label)


def values_of(metric: Metric, ran: Outcome) -> Tensor:
    """Of each of the call's tokens where it stands, 0 where it does not count."""
    objective, packing = ran.objective, ran.prepared.packing
    own = objective.structure.metrics[place_of(metric, objective)]
    structure = replace(objective.structure, summands=(), metrics=(own,), leaves=frozenset())
    values = evaluate(structure, ran.stats.named(), objective.inputs).table[0]
    return values if packing is None else packing.unpack(values)
