"""Losses of the target's probability, or of the logits alone: cross-entropy, focal, poly1, unlikelihood, z-loss,
entropy."""

from typing import Any, Unpack

import torch
from torch import Tensor

from ..core.checks import check_shape, check_weights, flag, number
from .base import Losses, SummandOptions, make, sharing_results
from .batch import Batch, Stats


@sharing_results
def cross_entropy(
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
    token_scaling: bool = False,  # values are multiplied by the target's probability
    entropy_scaling: float | None = None,  # values are multiplied by this power of the entropy
    **summand: Unpack[SummandOptions],
) -> Losses:
    """``-logprob``; with label smoothing e, class weights c and target y, as in ``F.cross_entropy``:
    ``-(1 - e) * c[y] * logprob - e / V * (c * p.log()).sum(-1)``.

    ``class_weights`` [V], floating point. With them the default denominator is, as in PyTorch, the sum of the targets'
    weights over the tokens that count. Class weights do not change a ``normalizer`` or the z-loss. ``token_scaling``
    multiplies a token's value by the detached probability of its target (DFT). ``entropy_scaling=a`` multiplies a
    token's value by ``H ** a``: H is the detached entropy in nats (EAFT). Neither scaling changes the denominator.
    """
    loss_name = "losses.cross_entropy"
    checked_smoothing = number(loss_name, "label_smoothing", label_smoothing, 0.0, 1.0)
    options = {
        "label_smoothing": checked_smoothing or None,
        "token_scaling": flag(f"token_scaling of {loss_name}", token_scaling),
    }
    summand_fields: dict[str, Any] = {"needs": set()}
    if entropy_scaling is not None:
        options["entropy_scaling"] = number(loss_name, "entropy_scaling", entropy_scaling, 0.0)
        summand_fields["needs"].add("entropy")
    if checked_smoothing:
        summand_fields["needs"].add("mean_logit" if class_weights is None else "weighted_sum")
    if class_weights is not None:
        check_weights(f"class_weights of {loss_name}", class_weights)
        check_shape(f"class_weights of {loss_name}", class_weights, class_weights.dim() == 1, "[vocab]")
        summand_fields |= {"tensors": {"class_weights": class_weights}, "denominator_terms_of": _target_weight}
    return make("cross_entropy", _cross_entropy, summand, options, **summand_fields)


def _target_weight(batch: Batch, class_weights: Tensor) -> Tensor:
    """Class weights [n] of the tokens' targets."""
    return class_weights[batch.target]


def _cross_entropy(
    stats: Stats,
    batch: Batch,
    label_smoothing: float | None,
    token_scaling: bool,
    entropy_scaling: float | None = None,
    class_weights: Tensor | None = None,
) -> Tensor:
    values = -stats.logprob
    if class_weights is not None:
        class_weights = class_weights.to(values.dtype)
        values = class_weights[batch.target] * values
    if label_smoothing is not None:
        if class_weights is None:
            smoothing_values = stats.lse - stats.mean_logit
        else:
            smoothing_values = (class_weights.sum() * stats.lse - stats.weighted_sum) / batch.vocab
        values = (1 - label_smoothing) * values + label_smoothing * smoothing_values
    if token_scaling:
        values = values * stats.logprob.detach().exp()
    return values if entropy_scaling is None else values * stats.entropy.detach().clamp(min=0.0) ** entropy_scaling


@sharing_results
def focal(gamma: float = 2.0, **summand: Unpack[SummandOptions]) -> Losses:
    """``-(1 - logprob.exp()) ** gamma * logprob``: focal loss (Lin et al., arXiv 1708.02002).

    The paper's alpha is a factor of the loss, or ``token_weights=alpha[target]``.
    """
    return make("focal", _focal, summand, {"gamma": number("losses.focal", "gamma", gamma, 0.0, 1e3) or None})


def _focal(stats: Stats, batch: Batch, gamma: float | None) -> Tensor:
    if gamma is None:
        return -stats.logprob
    wrong_probability = -torch.expm1(stats.logprob)
    # for gamma below 1 the power has an infinite slope at 0, where the loss's slope is 0
    is_certain = wrong_probability <= 0
    return torch.where(is_certain, 0.0, torch.where(is_certain, 1.0, wrong_probability) ** gamma) * -stats.logprob


@sharing_results
def poly1(epsilon: float = 1.0, **summand: Unpack[SummandOptions]) -> Losses:
    """``-logprob + epsilon * (1 - logprob.exp())``: cross-entropy as a series in powers of 1 - p, in which the first
    power has the coefficient 1 + epsilon (Leng et al., arXiv 2204.12511).

    ``epsilon`` is at least -1.
    """
    return make("poly1", _poly1, summand, {"epsilon": number("losses.poly1", "epsilon", epsilon, -1.0, 1e3)})


def _poly1(stats: Stats, batch: Batch, epsilon: float) -> Tensor:
    return -stats.logprob - epsilon * torch.expm1(stats.logprob)


@sharing_results
def unlikelihood(**summand: Unpack[SummandOptions]) -> Losses:
    """``-torch.log(1 - logprob.exp())``: lowers the probability of unwanted tokens (Welleck et al., arXiv 1908.04319).

    ``token_weights`` select the unwanted tokens. A probability above 1 - 1e-6 counts as 1 - 1e-6, and has no gradient.
    """
    return make("unlikelihood", _unlikelihood, summand)


def _unlikelihood(stats: Stats, batch: Batch) -> Tensor:
    logprob = stats.logprob.clamp(max=-1e-6)
    log_complement = torch.log1p(-logprob.clamp(max=-0.5).exp())  # exact for small p; the other branch is for p near 1
    return -torch.where(logprob < -0.5, log_complement, torch.log(-torch.expm1(logprob)))


@sharing_results
def z_loss(**summand: Unpack[SummandOptions]) -> Losses:
    """``lse ** 2``: keeps the softmax's normaliser near 1 (PaLM, arXiv 2204.02311, with a coefficient of 1e-4).

    ``lse`` is the logsumexp of the scaled and capped logits divided by the loss's temperature. The target may be None.
    """
    return make("z_loss", _z_loss, summand, reads_target=False)


def _z_loss(stats: Stats, batch: Batch) -> Tensor:
    return stats.lse.square()


@sharing_results
def entropy(**summand: Unpack[SummandOptions]) -> Losses:
    """``-(p * p.log()).sum(-1)`` in nats, differentiable: ``- 0.01 * entropy()`` is a bonus,
    ``+ 0.01 * entropy()`` a penalty.

    ``p`` is the softmax at the loss's temperature. The target may be None.
    """
    return make("entropy", _entropy, summand, needs=("entropy",), reads_target=False)


def _entropy(stats: Stats, batch: Batch) -> Tensor:
    return stats.entropy
