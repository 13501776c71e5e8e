"""Functions with the names and signatures of Liger's fused linear cross-entropy (0.8.5), computed by this library's
head.

    from chunked_head.integrations.liger import LigerFusedLinearCrossEntropyLoss

replaces the import of this name from ``liger_kernel.transformers``, which need not be installed. Values are Liger's,
with these differences: if no token counts, the loss is 0 rather than nan; logits are not rounded to 16 bits; a returned
z-loss is fp32; with ``accum_dtype=None`` the plan chooses the dtype in which the weight's gradient is summed.
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
from .cut_cross_entropy import SWITCH, Translation, init_of, translated

OPTIONS: dict[str, Translation] = {  # in the order of the parameters of Liger's functions, then ours
    "ce_weight": "class_weights", "ignore_index": "ignore_index", "lse_square_scale": "z_loss",
    "label_smoothing": "label_smoothing", "reduction": "reduction", "softcap": "softcap", "return_z_loss": SWITCH,
    "accum_dtype": "accumulate_dtype", "use_token_scaling": SWITCH, "return_token_accuracy": SWITCH,
    "return_predicted_tokens": SWITCH, "memory_budget": "memory_budget",
}  # fmt: skip
KERNEL_OPTIONS: dict[str, Translation] = {"chunk_mem_const": {1: {}}, "ce_impl": {None: {}}, "ce_mode": {None: {}}}


@dataclass
class CrossEntropyOutput:
    """The loss, and further results without gradient. A result that the call does not request is None.

    ``z_loss``: what ``lse_square_scale`` adds to the loss, in the shape of the loss. ``token_accuracy``: the fraction
    of counted tokens whose target is the likeliest id; with ``reduction="none"`` 1 or 0 for each token [...].
    ``predicted_tokens`` [...] int64: the likeliest ids, -1 where a token does not count.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def scaled_z_loss(stats: Stats, batch: Batch) -> Tensor:
    """``lse ** 2`` of each token [tokens], times the detached probability of the token's target."""
    return stats.logprob.detach().exp() * stats.lse.square()


def liger_fused_linear_cross_entropy(
    input: Tensor,  # [..., hidden]
    weight: Tensor,  # [vocab, hidden]
    target: Tensor,  # [...] int64
    bias: Tensor | None = None,  # [vocab]
    ce_weight: Tensor | None = None,  # [vocab] class weights
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,  # coefficient of the z-loss
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,  # bound of the logits by tanh
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,  # must be 1
    *,
    memory_budget: int | str | None = None,
) -> Tensor | CrossEntropyOutput:
    """Liger's function of this name. Returns the loss, or a ``CrossEntropyOutput`` if a ``return_`` argument is True.

    Args:
        ce_weight, lse_square_scale, accum_dtype: ``class_weights``, ``z_loss`` and ``accumulate_dtype`` of
            ``chunked_head.linear_cross_entropy``.
        label_smoothing, ignore_index, reduction, softcap, memory_budget: as in ``chunked_head.linear_cross_entropy``.
        chunk_mem_const: must be 1; ``memory_budget`` replaces it.
        use_token_scaling: multiply each token's loss by the detached probability of the token's target (DFT).
        return_z_loss, return_token_accuracy, return_predicted_tokens: see ``CrossEntropyOutput``. Predicted tokens, and
            z-loss or accuracy with ``reduction="none"``, need a second pass over the logits: one matmul more.
    """
    options = translated(OPTIONS | KERNEL_OPTIONS, locals())
    z_loss_factor, is_unreduced = float(options.pop("z_loss")), reduction == "none"
    loss = losses.cross_entropy(options.pop("label_smoothing"), options.pop("class_weights"), use_token_scaling)
    if z_loss_factor:
        loss += z_loss_factor * (make("z_loss", scaled_z_loss, {}) if use_token_scaling else losses.z_loss())
    metric_functions = [metrics.accuracy()] if return_token_accuracy and not is_unreduced else []
    loss_output = linear_loss(input, weight, target, loss, bias=bias, metrics=metric_functions, **options)
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens):
        return loss_output.loss
    output = CrossEntropyOutput(loss_output.loss)
    if return_z_loss and not is_unreduced:
        if z_loss_factor:
            output.z_loss = z_loss_factor * loss_output.parts["z_loss"]
        else:
            output.z_loss = torch.zeros_like(loss_output.loss)
    if metric_functions:
        output.token_accuracy = loss_output.metrics["accuracy"].value
    if return_predicted_tokens or (is_unreduced and (return_z_loss or return_token_accuracy)):
        head_options = {name: options[name] for name in ("ignore_index", "softcap", "memory_budget")}
        with torch.no_grad():
            token_outputs = linear_logprobs(input, weight, target, bias=bias, lse=True, argmax=True, **head_options)
        is_counted = target != ignore_index
        if return_predicted_tokens:
            output.predicted_tokens = torch.where(is_counted, token_outputs.argmax, -1)
        if is_unreduced and return_z_loss:
            token_factors = token_outputs.logprobs.exp() if use_token_scaling else 1.0
            output.z_loss = z_loss_factor * token_outputs.lse.square() * token_factors
        if is_unreduced and return_token_accuracy:
            output.token_accuracy = (is_counted & (token_outputs.argmax == target)).to(loss_output.loss.dtype)
    return output


class LigerFusedLinearCrossEntropyFunction:
    """A class with the ``apply`` of Liger's autograd function of this name."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,  # [vocab] class weights
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,  # coefficient of the z-loss
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: None = None,  # must be None
        ce_mode: None = None,  # must be None
        chunk_mem_const: int = 1,  # must be 1
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Returns loss, z-loss, token accuracy and predicted tokens. The last three are None unless requested.

        Arguments are as in ``liger_fused_linear_cross_entropy``. ``ce_impl`` and ``ce_mode``, which choose among
        Liger's kernels, must be None.
        """
        options = {name: value for name, value in locals().items() if name not in ("_input", "ce_impl", "ce_mode")}
        translated(KERNEL_OPTIONS, {"ce_impl": ce_impl, "ce_mode": ce_mode})
        output = liger_fused_linear_cross_entropy(_input, **options)
        if isinstance(output, Tensor):
            return output, None, None, None
        return output.loss, output.z_loss, output.token_accuracy, output.predicted_tokens


class LigerFusedLinearCrossEntropyLoss(OptionsModule):
    """A module with the interface of Liger's module of this name, called as ``module(lin_weight, _input, target,
    bias)``. The options are options of ``liger_fused_linear_cross_entropy``."""

    __init__ = init_of(liger_fused_linear_cross_entropy, OPTIONS)

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **self.options())
