"""Liger's fused linear cross-entropy by its names and signatures (0.8.5), computed by this library's head.

    from chunked_head.integrations.liger import LigerFusedLinearCrossEntropyLoss

in the place of the same import from ``liger_kernel.transformers``. Values are Liger's, with these differences: no
tokens that count give loss 0 rather than nan, logits are not rounded to 16 bits, further outputs are fp32,
and the weight's gradient is summed as the plan says where ``accum_dtype`` is None. Liger itself is not needed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import losses, metrics
from ..call.options import OptionsModule
from ..functions.logprobs import linear_logprobs
from ..functions.loss import linear_loss
from .cut_cross_entropy import SWITCH, Ours, init_of, translated


@dataclass
class CrossEntropyOutput:
    """The loss, and further outputs that were asked for, without gradient.

    ``z_loss``: the part of the loss that ``lse_square_scale`` makes. ``token_accuracy``: share of the tokens that
    count, or 0 and 1 [...] for ``reduction="none"``. ``predicted_tokens`` [...] int64: -1 where a token does not count.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


OPTIONS: dict[str, Ours] = {  # in the order of Liger's signatures, and ours
    "ce_weight": "class_weights", "ignore_index": "ignore_index", "lse_square_scale": "z_loss",
    "label_smoothing": "label_smoothing", "reduction": "reduction", "softcap": "softcap", "return_z_loss": SWITCH,
    "accum_dtype": "accumulate_dtype", "use_token_scaling": SWITCH, "return_token_accuracy": SWITCH,
    "return_predicted_tokens": SWITCH, "memory_budget": "memory_budget",
}  # fmt: skip


def liger_fused_linear_cross_entropy(
    input: Tensor,  # [..., hidden]
    weight: Tensor,  # [vocab, hidden]
    target: Tensor,  # [...] int64
    bias: Tensor | None = None,  # [vocab]
    ce_weight: Tensor | None = None,  # [vocab]
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
    *,
    memory_budget: int | str | None = None,
) -> Tensor | CrossEntropyOutput:
    """Liger's functional of this name: the loss, or a ``CrossEntropyOutput`` where more is asked for.

    Args:
        ce_weight, lse_square_scale, accum_dtype: ``class_weights``, ``z_loss`` and ``accumulate_dtype`` of
            ``linear_cross_entropy``; label_smoothing, ignore_index, reduction, softcap by its names.
        memory_budget: stands for ``chunk_mem_const``, which must be 1.
        use_token_scaling: multiplies a token's values by its own probability, without gradient (DFT).
        return_z_loss, return_token_accuracy, return_predicted_tokens: see ``CrossEntropyOutput``.

    Token scaling, predicted tokens, and accuracy or z-loss of each token (``reduction="none"``) take a pass over the
    logits before the loss: one matmul more.
    """
    options = translated(OPTIONS | {"chunk_mem_const": {1: {}}}, locals())
    head = {name: options[name] for name in ("ignore_index", "softcap", "memory_budget")} | {"bias": bias}
    each = reduction == "none"
    batch: dict[str, Tensor] = {}
    seen: Any = None  # what the loss's own pass does not return
    if use_token_scaling or return_predicted_tokens or (each and (return_token_accuracy or return_z_loss)):
        with torch.no_grad():
            seen = linear_logprobs(input, weight, target, lse=True, argmax=True, **head)
    if use_token_scaling:
        batch["token_weights"] = seen.logprobs.exp()
    loss = losses.cross_entropy(label_smoothing, ce_weight)
    if lse_square_scale:
        loss = loss + float(lse_square_scale) * losses.z_loss()
    measured = [metrics.accuracy()] if return_token_accuracy and not each else []
    out = linear_loss(
        input, weight, target, loss, batch=batch, metrics=measured, reduction=reduction, accumulate_dtype=accum_dtype,
        **head,
    )  # fmt: skip
    found = CrossEntropyOutput(out.loss)
    if return_z_loss:
        if each:
            squares = seen.lse.square() * batch.get("token_weights", 1.0)
        else:
            squares = out.parts.get("z_loss", torch.zeros_like(out.loss))
        found.z_loss = (lse_square_scale * squares).detach()
    if return_token_accuracy:
        correct = (seen.argmax == target) & (target != ignore_index) if each else out.metrics["accuracy"].value
        found.token_accuracy = correct.to(out.loss.dtype)
    if return_predicted_tokens:
        found.predicted_tokens = torch.where(target != ignore_index, seen.argmax, -1)
    return found if return_z_loss or return_token_accuracy or return_predicted_tokens else out.loss


class LigerFusedLinearCrossEntropyLoss(OptionsModule):
    """Liger's module of this name: ``module(lin_weight, _input, target, bias)``; options as the functional's."""

    __init__ = init_of(liger_fused_linear_cross_entropy, OPTIONS)

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **self.options())
