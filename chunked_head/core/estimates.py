"""Functions of numbers per token that losses and metrics share."""

import torch
from torch import Tensor


def clamped(values: Tensor, bound: float | None) -> Tensor:
    """Within [-bound, bound], no gradient outside, infinite values included; a nan stays."""
    if bound is None:
        return values
    # not torch.clamp, whose gradient at a bound is another in some versions, and for a bound that is a tensor
    return torch.where(values > bound, bound, torch.where(values < -bound, -bound, values))


def gate(x: Tensor) -> Tensor:
    """``sigmoid(x)``; its gradient does not need ``1 - sigmoid(x)``, which rounds to 0 where the value is near 1."""
    return torch.where(x > 0, 1 - torch.sigmoid(-x), torch.sigmoid(x))


def kl_estimate(difference: Tensor, estimator: str) -> Tensor:
    """KL of the policy that sampled, to the other, by k1, abs, k2 or k3 (Schulman 2020); ``difference``:
    log-probability of the other less the sampler's."""
    if estimator == "k1":
        return -difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    return torch.expm1(difference) - difference
