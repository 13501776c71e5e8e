"""Masks, weights and denominators: the only place that divides by anything."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import Objective

FP16_LARGEST = 64.0


@dataclass(frozen=True, eq=False)
class Reduction:
    """How the tokens' values become the loss, and what its gradient multiplies each token's by.

    ``inverse`` is 1 / D on the device: 0 for a normalizer of 0, nan where a target is out of range, so that one bad
    target makes the whole loss and every gradient nan rather than any of them silently wrong.
    """

    kind: str
    inverse: Tensor  # [] fp32 or fp64
    one_or_nan: Tensor  # [] nan where a target is out of range
    upstream: Tensor | float  # the factor that the caller foretold
    unit: Tensor | float  # size of a token's gradient of logits at scale 1 [tokens]
    token_scale: Tensor  # [tokens], token weights less `gain`, 0 where a token does not count
    gain: Tensor | float  # what was split off

    def value(self, values: Tensor) -> Tensor:
        """The loss: 0-d, or per token for ``reduction="none"``."""
        return values * self.inverse if self.kind == "none" else values.sum() * self.inverse

    @property
    def known_scale(self) -> Tensor:
        """What multiplies each token's gradient and is known before backward, less ``rest`` [tokens]."""
        if isinstance(self.gain, Tensor):
            return self.token_scale
        return self.scaled(self.inverse * self.upstream)

    def rest(self, upstream: Tensor) -> Tensor:
        """What is left to multiply the gradients by when the upstream gradient has come: 1 where it was foretold."""
        declared = self.upstream
        ratio = torch.where(upstream == declared, 1.0, upstream / declared).to(self.inverse.dtype) * self.one_or_nan
        if isinstance(self.gain, Tensor):
            return ratio * (self.gain * self.inverse * declared)
        return ratio

    def scaled(self, factor: Tensor) -> Tensor:
        """Token scales times a 0-d or per-token factor, 0 where a token does not count [tokens]."""
        return torch.where(self.token_scale != 0, self.token_scale * factor, 0.0)


def split_gain(scale: Tensor, unit: Tensor | float) -> tuple[Tensor, Tensor]:
    """Per-token scales that make fp16 gradients of logits at most about 64, and the factor that was taken out.

    What a loss scale, 1 / D or class weights would push out of fp16's range comes later, in fp32. 64 keeps the
    probabilities of a 128K vocabulary among the normal numbers, and leaves a factor of 1000 to z-loss.
    """
    size = (scale * unit).abs()
    gain = (size.amax() if size.numel() else scale.new_ones(())) / FP16_LARGEST
    gain = torch.where(gain == 0, 1.0, gain)
    return scale / gain, gain


def make_reduction(
    kind: str,
    objective: Objective,
    bad: Tensor,  # [] bool, whether a target is out of range
    normalizer: float | Tensor | None,
    upstream: float | Tensor | None,
    logit_scale: float,
    split: bool,  # keep gradients of logits within fp16
) -> Reduction:
    """The reduction of a call; nothing here waits for the device."""
    target, weights, class_weights = objective.target, objective.token_weights, objective.class_weights
    counts, dtype = target >= 0, objective.dtype
    if kind != "mean":
        inverse = torch.ones((), dtype=dtype, device=target.device)
    elif normalizer is None:
        total = (
            counts.sum()
            if class_weights is None
            else torch.where(counts, class_weights[target.clamp(min=0)], 0.0).sum()
        )
        inverse = 1.0 / torch.where(total == 0, 1, total).to(dtype)
    else:
        if not isinstance(normalizer, Tensor):  # filled on the device: a copy from the host would be waited for
            normalizer = torch.full((), float(normalizer), dtype=dtype, device=target.device)
        total = normalizer.detach().to(dtype)
        inverse = torch.where(total == 0, 0.0, 1.0 / total)
    one_or_nan = torch.where(bad, torch.nan, torch.ones((), dtype=dtype, device=target.device))
    inverse = inverse * one_or_nan
    scale = counts.to(dtype) if weights is None else torch.where(counts, weights, 0.0)
    gain: Tensor | float = 1.0
    unit: Tensor | float = 1.0
    if split:
        label, everywhere = objective.shares(slice(None))
        unit = (label + everywhere) * abs(logit_scale)
        scale, gain = split_gain(scale, unit)
    # a copy: the caller may change his loss scale before backward comes
    declared = (
        upstream.detach().clone() if isinstance(upstream, Tensor) else float(1.0 if upstream is None else upstream)
    )
    return Reduction(kind, inverse, one_or_nan, declared, unit, scale, gain)
