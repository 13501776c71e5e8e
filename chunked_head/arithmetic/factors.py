"""Factors of values and coefficients: numbers, or 0-d tensors on the device that no host waits for."""

from typing import NamedTuple

import torch
from torch import Tensor


class Inverse(NamedTuple):
    """1 / D of a summand."""

    value: Tensor  # [] of the statistics' dtype: 0 for a normalizer of 0, nan where an id is out of range
    given: bool  # by a normalizer, and so perhaps 0

    def of(self, total: Tensor) -> Tensor:
        """``total / D``. By selection: a normalizer of 0 gives 0 whatever the total is."""
        share = total * self.value
        return torch.where(self.value == 0, self.value, share) if self.given else share


def kept(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A number as it is, of a tensor a copy: the caller may change his before backward comes."""
    if isinstance(value, Tensor):
        return value.detach().to(device=like.device, dtype=like.dtype, copy=True)
    return float(value)


def times(value: Tensor, *factors: float | Tensor) -> Tensor:
    """The product, without a launch for a factor that is the number 1."""
    for factor in factors:
        if isinstance(factor, Tensor) or factor != 1.0:
            value = value * factor
    return value


def stacked(factors: list[Tensor]) -> Tensor:
    """A row for each summand."""
    return torch.stack(factors) if len(factors) > 1 else factors[0].unsqueeze(0)
