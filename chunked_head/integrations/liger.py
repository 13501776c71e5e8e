"""Liger's fused linear cross-entropy by its names and signatures (0.8.5), computed by this library's head.

    from chunked_head.integrations.liger import LigerFusedLinearCrossEntropyLoss

in the place of the same import from ``liger_kernel.transformers``. Values are Liger's, with these differences: no
tokens that count give loss 0 rather than nan, logits are not rounded to 16 bits, and the weight's gradient is summed as
the plan says where ``accum_dtype`` is None. Liger itself is not needed.
"""

import torch
from torch import Tensor

from .. import losses
from ..call.options import OptionsModule
from ..core.checks import refuse
from ..functions.loss import linear_loss
from .cut_cross_entropy import SWITCH, Ours, init_of, translated

ONE_LOSS: dict[object, dict[str, object]] = {False: {}}  # further outputs are ``linear_loss``'s
OPTIONS: dict[str, Ours] = {  # in the order of Liger's signatures, and ours
    "ce_weight": "class_weights", "ignore_index": "ignore_index", "lse_square_scale": "z_loss",
    "label_smoothing": "label_smoothing", "reduction": "reduction", "softcap": "softcap", "return_z_loss": ONE_LOSS,
    "accum_dtype": "accumulate_dtype", "use_token_scaling": SWITCH, "return_token_accuracy": ONE_LOSS,
    "return_predicted_tokens": ONE_LOSS, "memory_budget": "memory_budget",
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
) -> Tensor:
    """Liger's functional of this name: the loss.

    Args:
        ce_weight, lse_square_scale, accum_dtype: ``class_weights``, ``z_loss`` and ``accumulate_dtype`` of
            ``linear_cross_entropy``; label_smoothing, ignore_index, reduction, softcap by its names.
        memory_budget: stands for ``chunk_mem_const``, which must be 1.
        use_token_scaling: multiplies a token's values by its own probability, without gradient (DFT); not with
            ``lse_square_scale``.
        return_z_loss, return_token_accuracy, return_predicted_tokens: False; ``linear_loss`` and ``linear_logprobs``
            return these.
    """
    options = translated(OPTIONS | {"chunk_mem_const": {1: {}}}, locals())
    refuse({"use_token_scaling does not go with lse_square_scale": use_token_scaling and lse_square_scale})
    loss = losses.cross_entropy(options.pop("label_smoothing"), options.pop("class_weights"), use_token_scaling)
    z_loss = options.pop("z_loss")
    if z_loss:
        loss += float(z_loss) * losses.z_loss()
    return linear_loss(input, weight, target, loss, bias=bias, **options).loss


class LigerFusedLinearCrossEntropyLoss(OptionsModule):
    """Liger's module of this name: ``module(lin_weight, _input, target, bias)``; options as the functional's."""

    __init__ = init_of(liger_fused_linear_cross_entropy, OPTIONS)

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **self.options())
