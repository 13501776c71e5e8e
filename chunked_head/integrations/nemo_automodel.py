"""NeMo Automodel's fused linear cross-entropy on this library's head, chosen in a recipe's YAML:

    loss_fn:
      _target_: chunked_head.integrations.nemo_automodel.ChunkedHeadCrossEntropy

Automodel still chooses the weight, gathers a sharded weight, and reduces its gradient over ``grad_reduce_group``.
"""

from typing import Any, Unpack

from torch import Tensor

from ..call.options import Execution
from ..functions.cross_entropy import linear_cross_entropy
from .frameworks import Framework, check_named, object_at

BASE_PATH = ("nemo_automodel.components.loss.linear_ce_base", "LinearCrossEntropy")
AUTOMODEL = Framework(
    "nemo-automodel", ("0.7.0",),
    {
        BASE_PATH: "*", (BASE_PATH[0], f"{BASE_PATH[1]}.materialize_lm_weight"): "lm_weight, grad_reduce_group",
        ("nemo_automodel.components.loss.linear_ce", "FusedLinearCrossEntropy"):
            "hidden_states, labels, lm_weight, num_label_tokens, grad_reduce_group, loss_weights",
    },
    module="nemo_automodel",
)  # fmt: skip
IS_SUPPORTED = AUTOMODEL.has_tested_parameters()
LinearCrossEntropy: Any = object_at(BASE_PATH) if IS_SUPPORTED else object


class ChunkedHeadCrossEntropy(LinearCrossEntropy):
    """A loss with the arguments of Automodel's ``FusedLinearCrossEntropy``, without the package ``cut_cross_entropy``.

    Args:
        ignore_index: label of tokens that do not count.
        logit_softcapping: bound of the logits by tanh; no bound for 0 or None.
        reduction: ``"mean"`` or ``"sum"``. A call with ``num_label_tokens`` divides the sum by this number.
        label_smoothing, z_loss: as in ``chunked_head.linear_cross_entropy``.
        options: as in ``chunked_head.Execution`` without ``parallel`` and ``accumulate_into``.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        logit_softcapping: float | None = 0,  # bound of the logits by tanh; 0 or None: no bound
        reduction: str = "sum",
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,  # coefficient of the z-loss
        **options: Unpack[Execution],
    ):
        AUTOMODEL.require(IS_SUPPORTED, "ChunkedHeadCrossEntropy")
        super().__init__()
        if reduction not in ("sum", "mean"):
            raise ValueError(f'reduction must be "sum" or "mean", got {reduction!r}')
        check_named(options, Execution.__annotations__.keys() - {"parallel", "accumulate_into"})
        self.ignore_index, self.logit_softcapping, self.reduction = ignore_index, logit_softcapping, reduction
        self.options: dict[str, Any] = {
            "label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": logit_softcapping or None,
            "ignore_index": ignore_index,
        }  # fmt: skip
        check_named(self.options, self.options.keys())
        self.options |= options

    def forward(
        self,
        hidden_states: Tensor,  # [batch, sequence, hidden]
        labels: Tensor,  # [batch, sequence]
        lm_weight: Tensor,  # [vocab, hidden], a tensor or a DTensor that FSDP shards
        num_label_tokens: int | None = None,  # denominator of the loss
        grad_reduce_group: Any = None,  # process group over which Automodel reduces the weight's gradient
        loss_weights: Tensor | None = None,  # [batch, sequence]
    ) -> Tensor:
        """The loss of this rank's tokens, a scalar. With ``num_label_tokens``, the sum over the tokens is divided by
        ``num_label_tokens``: the result is this rank's share of the mean over the tokens of all ranks.

        Raises:
            ValueError: ``num_label_tokens`` or ``loss_weights`` with ``reduction="mean"``; a sharded weight without
            ``grad_reduce_group``.
        """
        for name, value in (("num_label_tokens", num_label_tokens), ("loss_weights", loss_weights)):
            if value is not None and self.reduction != "sum":
                raise ValueError(f'{name} goes with reduction="sum", this loss has "mean"')
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        if loss_weights is not None:
            loss_weights = loss_weights.to(hidden_states.device).float()
        return linear_cross_entropy(
            hidden_states, weight, labels, token_weights=loss_weights, normalizer=num_label_tokens,
            reduction=self.reduction if num_label_tokens is None else "mean", **self.options,
        )  # fmt: skip
