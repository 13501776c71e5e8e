"""Denominators and counts, settled before any logit: the only place that divides by anything."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arithmetic.evaluate import masked, unit_mask
from ..arithmetic.factors import Inverse
from ..losses.base import Summand
from ..metrics.values import Metric, weights_in
from .prepared import PreparedCall


def inverses(
    prepared: PreparedCall, summands: Sequence[Summand], reduction: str, normalizer: float | Tensor | None
) -> list[Inverse]:
    """1 / D of each summand, on the device; nothing here waits for it."""
    one_or_nan, found, of_units = prepared.one_or_nan, list[Inverse](), dict[str, Tensor]()
    for summand in summands:
        given = summand.normalizer if summand.normalizer is not None else normalizer
        if (summand.reduction or reduction) != "mean":
            found.append(Inverse(one_or_nan, False))
        elif given is None:
            found.append(Inverse(default_inverse(summand, prepared, of_units), False))
        elif isinstance(given, (str, Tensor)):
            total = (prepared.batch[given] if isinstance(given, str) else given.detach()).to(one_or_nan.dtype)
            found.append(Inverse(torch.where(total == 0, total, 1.0 / total) * one_or_nan, True))
        else:
            found.append(Inverse(one_or_nan * (1.0 / given if given else 0.0), True))
    return found


def default_inverse(summand: Summand, prepared: PreparedCall, of_units: dict[str, Tensor]) -> Tensor:
    """Of the sum of what each token adds, or of how many units count; 1 where that is 0. ``of_units`` remembers."""
    if summand.unit == "token" and summand.counted is not None:
        total = local_total(summand, prepared) if prepared.spread is None else prepared.spread.totals[summand]
        return prepared.one_or_nan / torch.where(total == 0, 1.0, total)
    if summand.unit == "token" and prepared.spread is None:
        return prepared.token_rows.inverse
    if summand.unit not in of_units:
        of_units[summand.unit] = prepared.one_or_nan / count_units(summand.unit, prepared).clamp(min=1.0)
    return of_units[summand.unit]


def local_total(summand: Summand, prepared: PreparedCall) -> Tensor:
    """Of what each of this rank's tokens adds to the default denominator."""
    assert summand.counted is not None
    batch = prepared.batch
    return masked(summand.counted(batch, **summand.tensors).to(prepared.statistics_dtype), batch.mask).sum()


def count_units(unit: str, prepared: PreparedCall) -> Tensor:
    """How many units count, in the statistics' dtype."""
    if unit not in prepared.unit_counts:
        prepared.unit_counts[unit] = unit_mask(unit, prepared.batch).sum().to(prepared.statistics_dtype)
    return prepared.unit_counts[unit]


def metric_counts(metrics: tuple[Metric, ...], prepared: PreparedCall) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Weights of tokens for each weighting, and what each metric's sum is divided by."""
    weights: dict[str, Tensor] = {}
    groups: dict[str, Tensor] = {}  # by weighting: segments or documents with a token
    counts = []
    for metric in metrics:
        if metric.unit == "segment" or metric.weighting == "token":
            counts.append(count_units(metric.unit, prepared))
            continue
        if metric.weighting not in weights:
            batch = prepared.batch
            of_ids = batch.segment_count(metric.ids).to(prepared.statistics_dtype)
            weights[metric.weighting] = weights_in(of_ids, batch[metric.ids], batch.mask)
            groups[metric.weighting] = (of_ids > 0).sum().to(prepared.statistics_dtype)
        counts.append(groups[metric.weighting])
    return weights, counts
