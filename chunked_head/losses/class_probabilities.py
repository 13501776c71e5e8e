"""Cross-entropy whose targets are class probabilities: that of a dense teacher which has them."""

import torch
from torch import Tensor

from ..core.shift import shift_left

MASS = "target_mass"  # field: what a token's probabilities add up to


def fields_of(
    probabilities: Tensor,  # [..., V]
    label_smoothing: float,
    class_weights: Tensor | None,  # [V]
    token_weights: Tensor | None,  # [...]
    shift: int,
) -> dict[str, Tensor]:
    """Fields of ``forward_kl("cross_entropy", token_weights=MASS)``: with the sum ``s`` per token of ``q =
    class_weights * ((1 - e) * probabilities + e / V)`` the cross-entropy is s times that of ``softmax(log q) = q / s``.

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
    # other summands, such as a z-loss, know nothing of the mass
    return fields | {MASS: mass * token_weights, "token_weights": token_weights}
