"""Cross-entropy whose targets are class probabilities: that of a dense teacher which has them."""

import functools

import torch
from torch import Tensor

from ..core.shift import shift_left
from .base import Losses
from .distillation import forward_kl
from .label import z_loss as z_loss_of

MASS = "target_mass"  # field: what a token's probabilities add up to


@functools.lru_cache(maxsize=64)
def loss_of(z_loss: float) -> Losses:
    loss = forward_kl("cross_entropy", token_weights=MASS)
    return loss + z_loss * z_loss_of() if z_loss else loss


def fields_of(
    probabilities: Tensor,  # [..., V]
    label_smoothing: float,
    class_weights: Tensor | None,  # [V]
    token_weights: Tensor | None,  # [...]
    shift: int,
) -> dict[str, Tensor]:
    """Fields of ``loss_of``: with ``q = class_weights * ((1 - e) * probabilities + e / V)`` and its sum ``s`` per token
    the cross-entropy is s times that of ``softmax(log q) = q / s``.

    The logarithm is a copy of the probabilities, in float32 at least. A token whose probabilities are all 0 has loss 0.
    """
    dtype = torch.promote_types(probabilities.dtype, torch.float32)
    q = probabilities.to(dtype)
    if label_smoothing:
        q = (1 - label_smoothing) * q + label_smoothing / q.shape[-1]
    if class_weights is not None:
        q = q * class_weights.to(dtype)
    mass = q.sum(-1)
    logits = q.log().masked_fill_((mass == 0).unsqueeze(-1), 0.0)
    dims = logits.dim() - 1
    fields = {"teacher_logits": shift_left(logits, shift, 0, dims - 1) if dims else logits}
    if token_weights is None:
        return fields | {MASS: mass}
    # the z-loss knows nothing of the mass
    return fields | {MASS: mass * token_weights, "token_weights": token_weights}
