"""The oracle: every option on full logits in plain PyTorch, in whatever dtype the tensors have (float64 for truth)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float, softcap: float | None) -> Tensor:
    """[..., vocab]: rounded to the dtype of ``hidden`` by the matmul, then fp32 at least, as models do it."""
    x = F.linear(hidden, weight, bias)
    x = x.to(torch.promote_types(x.dtype, torch.float32)) * logit_scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    token_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    shift: int = 0,
) -> Tensor:
    """``chunked_head.linear_cross_entropy`` on full logits; autograd makes the gradients."""
    if shift:
        length = target.shape[-1]
        kept = linear_cross_entropy(
            hidden[..., : max(0, length - shift), :], weight, target[..., shift:],
            bias=bias, class_weights=class_weights, ignore_index=ignore_index, reduction=reduction,
            normalizer=normalizer, token_weights=None if token_weights is None else token_weights[..., shift:],
            label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, logit_scale=logit_scale,
        )  # fmt: skip
        return kept if reduction != "none" else F.pad(kept, (min(shift, length), 0))
    counts = target != ignore_index
    # rows that count, alone: whatever stands in the others cannot matter
    x = logits(hidden[counts], weight, bias, logit_scale, softcap)
    y = target[counts]
    omega = None if class_weights is None else class_weights.to(x.dtype)
    values = F.cross_entropy(x, y, omega, reduction="none", label_smoothing=label_smoothing)
    values = values + z_loss * x.logsumexp(-1).square()
    if token_weights is not None:
        values = values * token_weights[counts].to(x.dtype)
    if reduction == "none":
        return torch.zeros(target.shape, dtype=x.dtype, device=x.device).masked_scatter(counts, values)
    total = values.sum()
    if reduction == "sum":
        return total
    if normalizer is None:
        normalizer = float(len(y)) if omega is None else omega[y].sum()
        normalizer = torch.as_tensor(normalizer, dtype=x.dtype, device=x.device)
        return total / torch.where(normalizer == 0, 1.0, normalizer)
    return total * 0.0 if normalizer == 0 else total / normalizer
