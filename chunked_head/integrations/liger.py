"""Liger's fused linear cross-entropy by its names and signatures (0.8.5), computed by this library's head.

    from chunked_head.integrations.liger import LigerFusedLinearCrossEntropyLoss

in the place of the same import from ``liger_kernel.transformers``. Values are Liger's, with these differences: no
tokens that count give 0 rather than nan, logits are not rounded to 16 bits, a returned z-loss is fp32, and the weight's
gradient is summed as the plan says where ``accum_dtype`` is None. Liger itself is not needed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import losses, metrics
from ..call.options import OptionsModule
from ..functions.logprobs import linear_logprobs
from ..functions.loss import linear_loss
from ..losses.base import make
from ..losses.batch import Batch, Stats
from .cut_cross_entropy import SWITCH, Ours, init_of, translated

OPTIONS: dict[str, Ours] = {  # in the order of Liger's signatures, and ours
    "ce_weight": "class_weights", "ignore_index": "ignore_index", "lse_square_scale": "z_loss",
    "label_smoothing": "label_smoothing", "reduction": "reduction", "softcap": "softcap", "return_z_loss": SWITCH,
    "accum_dtype": "accumulate_dtype", "use_token_scaling": SWITCH, "return_token_accuracy": SWITCH,
    "return_predicted_tokens": SWITCH, "memory_budget": "memory_budget",
}  # fmt: skip
KERNELS: dict[str, Ours] = {"chunk_mem_const": {1: {}}, "ce_impl": {None: {}}, "ce_mode": {None: {}}}


@dataclass
class CrossEntropyOutput:
    """The loss, and what else was asked for, without gradient.

    ``z_loss``: the part of the loss that ``lse_square_scale`` makes, reduced as the loss is. ``token_accuracy``: the
    share of the tokens that count whose target is the likeliest id, or 1 and 0 [...] with ``reduction="none"``.
    ``predicted_tokens`` [...] int64: the likeliest ids, -1 where a token does not count.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def scaled_z_loss(stats: Stats, batch: Batch) -> Tensor:
    return stats.logprob.detach().exp() * stats.lse.square()


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
        return_z_loss, return_token_accuracy, return_predicted_tokens: see ``CrossEntropyOutput``. Predicted tokens, and
            z-loss or accuracy with ``reduction="none"``, take a pass of their own over the logits: one matmul more.
    """
    options = translated(OPTIONS | KERNELS, locals())
    z_loss, is_each = float(options.pop("z_loss")), reduction == "none"
    loss = losses.cross_entropy(options.pop("label_smoothing"), options.pop("class_weights"), use_token_scaling)
    if z_loss:
        loss += z_loss * (make("z_loss", scaled_z_loss, {}) if use_token_scaling else losses.z_loss())
    measured = [metrics.accuracy()] if return_token_accuracy and not is_each else []
    out = linear_loss(input, weight, target, loss, bias=bias, metrics=measured, **options)
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens):
        return out.loss
    output = CrossEntropyOutput(out.loss)
    if return_z_loss and not is_each:
        output.z_loss = z_loss * out.parts["z_loss"] if z_loss else torch.zeros_like(out.loss)
    if measured:
        output.token_accuracy = out.metrics["accuracy"].value
    if return_predicted_tokens or (is_each and (return_z_loss or return_token_accuracy)):
        head = {name: options[name] for name in ("ignore_index", "softcap", "memory_budget")}
        with torch.no_grad():
            tokens = linear_logprobs(input, weight, target, bias=bias, lse=True, argmax=True, **head)
        counts = target != ignore_index
        if return_predicted_tokens:
            output.predicted_tokens = torch.where(counts, tokens.argmax, -1)
        if is_each and return_z_loss:
            output.z_loss = z_loss * tokens.lse.square() * (tokens.logprobs.exp() if use_token_scaling else 1.0)
        if is_each and return_token_accuracy:
            output.token_accuracy = (counts & (tokens.argmax == target)).to(out.loss.dtype)
    return output


class LigerFusedLinearCrossEntropyFunction:
    """Liger's autograd function of this name, as its callers see it: ``apply``."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
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
        ce_impl: None = None,
        ce_mode: None = None,
        chunk_mem_const: int = 1,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Loss, z-loss, token accuracy and predicted tokens, None where not asked for; arguments as the functional's.

        ``ce_impl`` and ``ce_mode``, which choose among Liger's own kernels, must be None.
        """
        options = {name: value for name, value in locals().items() if name not in ("_input", "ce_impl", "ce_mode")}
        translated(KERNELS, {"ce_impl": ce_impl, "ce_mode": ce_mode})
        output = liger_fused_linear_cross_entropy(_input, **options)
        if isinstance(output, Tensor):
            return output, None, None, None
        return output.loss, output.z_loss, output.token_accuracy, output.predicted_tokens


class LigerFusedLinearCrossEntropyLoss(OptionsModule):
    """Liger's module of this name: ``module(lin_weight, _input, target, bias)``; options as the functional's."""

    __init__ = init_of(liger_fused_linear_cross_entropy, OPTIONS)

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **self.options())
