"""Denominators, counts and the gain of fp16, settled before any logit: the only place that divides by anything."""

import torch
from torch import Tensor

from .batch import Batch
from .evaluate import masked, unit_mask
from .losses.base import Losses, Summand
from .metrics import Metric, unit_weights

FP16_LARGEST = 64.0


def gain_of(largest: Tensor) -> Tensor:
    """What to divide by so that the largest gradient of a logit is about 64: it keeps the probabilities of a 128K
    vocabulary among fp16's normal numbers, and leaves a factor of 1000 to what was not foreseen."""
    gain = largest / FP16_LARGEST
    return torch.where(gain == 0, 1.0, gain)


def reduced(
    losses: Losses,
    batch: Batch,
    reduction: str,
    normalizer: float | Tensor | None,
    one_or_nan: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    """Coefficients of the summands and 1 / D of each, on the device; nothing here waits for it."""
    dtype, device = one_or_nan.dtype, one_or_nan.device
    coefficients, inverse = [], []
    counts: dict[str, Tensor] = {}  # by unit
    for coefficient, summand in losses.terms:
        coefficients.append(on_device(coefficient, dtype, device))
        given = summand.normalizer if summand.normalizer is not None else normalizer
        if (summand.reduction or reduction) != "mean":
            inverse.append(one_or_nan)
        elif given is None:
            total = default_denominator(summand, batch, dtype, counts)
            inverse.append(one_or_nan / torch.where(total == 0, 1.0, total))
        else:
            total = batch[given].to(dtype) if isinstance(given, str) else on_device(given, dtype, device)
            inverse.append(torch.where(total == 0, 0.0, 1.0 / total) * one_or_nan)
    return coefficients, inverse


def default_denominator(summand: Summand, batch: Batch, dtype: torch.dtype, counts: dict[str, Tensor]) -> Tensor:
    """The sum of what each token adds, or how many units count."""
    if summand.unit == "token" and summand.counted is not None:
        return masked(summand.counted(batch, **summand.tensors).to(dtype), batch.mask).sum()
    return count_units(summand.unit, batch, dtype, counts)


def count_units(unit: str, batch: Batch, dtype: torch.dtype, counts: dict[str, Tensor]) -> Tensor:
    """How many units count; ``counts`` remembers."""
    if unit not in counts:
        counts[unit] = unit_mask(unit, batch).sum().to(dtype)
    return counts[unit]


def on_device(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 0-d tensor: filled on the device, because a copy from the host would be waited for."""
    if isinstance(value, Tensor):
        # a copy: the caller may change his before backward comes
        return value.detach().to(device=device, dtype=dtype, copy=True)
    return torch.full((), float(value), dtype=dtype, device=device)


def foreseen_gain(
    losses: Losses, factors: list[Tensor], weights: list[Tensor | None], batch: Batch, logit_scale: float
) -> Tensor:
    """The gain of fp16 gradients that are made before all coefficients are known, from what is: weights and sizes."""
    largest = torch.zeros_like(factors[0])
    for (_, summand), factor, weight in zip(losses.terms, factors, weights, strict=True):
        size = torch.ones_like(batch.target, dtype=factor.dtype)
        if summand.size is not None:
            size = summand.size(batch, **summand.tensors).abs().to(factor.dtype)
        if weight is not None:
            size = size * weight.abs()
        size = torch.where(batch.mask, size, 0.0)
        largest = largest + factor.abs() * abs(logit_scale) * (size.amax() if len(size) else 0.0)
    return gain_of(largest)


def metric_counts(
    metrics: tuple[Metric, ...], batch: Batch, dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Weights of tokens for each weighting, and what each metric's sum is divided by."""
    weights: dict[str, Tensor] = {}
    groups: dict[str, Tensor] = {}  # by weighting: segments or documents with a token
    units: dict[str, Tensor] = {}
    counts = []
    for metric in metrics:
        if metric.unit == "segment" or metric.weighting == "token":
            counts.append(count_units(metric.unit, batch, dtype, units))
            continue
        if metric.weighting not in weights:
            assert batch.num_segments is not None
            found = unit_weights(batch[metric.ids], batch.mask, batch.num_segments, dtype)
            weights[metric.weighting], groups[metric.weighting] = found
        counts.append(groups[metric.weighting])
    return weights, counts
