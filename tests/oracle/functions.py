"""Functions of log-probabilities, as users hand them to divergences and to sums over the vocabulary."""

from collections.abc import Mapping

import torch
from torch import Tensor


def alpha_divergence(log_p: Tensor, log_q: Tensor, options: Mapping[str, Tensor]) -> Tensor:
    a = options["alpha"]
    return ((a * log_q + (1 - a) * log_p).exp() - log_q.exp()) / (a * (a - 1))


def hellinger(log_p: Tensor, log_q: Tensor) -> Tensor:
    return ((log_p / 2).exp() - (log_q / 2).exp()).square()


def power(log_p: Tensor, options: Mapping[str, Tensor]) -> Tensor:
    return (options["power"] * log_p).exp()


def likely(log_p: Tensor) -> Tensor:
    """The mass of ids that are likelier than a hundredth or so."""
    return torch.sigmoid(4.0 * (log_p + 4.6)) * log_p.exp()
