"""NeMo Automodel's fused linear cross-entropy on this library's head, chosen in a recipe's YAML:

    loss_fn:
      _target_: chunked_head.integrations.nemo_automodel.ChunkedHeadCrossEntropy

What Automodel does around it stays its own: which weight it is, that a sharded one is gathered, that its gradient is
reduced over ``grad_reduce_group``.
"""

from typing import Any, Unpack

from torch import Tensor

from ..call.options import Execution
from ..functions.cross_entropy import linear_cross_entropy
from .frameworks import Framework, check_named, looked_up

BASE = ("nemo_automodel.components.loss.linear_ce_base", "LinearCrossEntropy")
AUTOMODEL = Framework(
    "nemo-automodel", ("0.7.0",),
    {
        BASE: "*", (BASE[0], f"{BASE[1]}.materialize_lm_weight"): "lm_weight, grad_reduce_group",
        ("nemo_automodel.components.loss.linear_ce", "FusedLinearCrossEntropy"):
            "hidden_states, labels, lm_weight, num_label_tokens, grad_reduce_group, loss_weights",
    },
    module="nemo_automodel",
)  # fmt: skip
FITS = AUTOMODEL.fits()
LinearCrossEntropy: Any = looked_up(BASE) if FITS else object


class ChunkedHeadCrossEntropy(LinearCrossEntropy):
    """Automodel's ``FusedLinearCrossEntropy`` by its arguments; ``cut_cross_entropy`` is not needed.

    Args:
        ignore_index: label of tokens that do not count.
        logit_softcapping: cap of the logits; 0 or None: none.
        reduction: ``"sum"``, which Automodel divides by ``num_label_tokens``, or ``"mean"``.
        label_smoothing, z_loss: as in ``chunked_head.linear_cross_entropy``.
        options: as in ``chunked_head.Execution`` without ``parallel`` and ``accumulate_into``.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        logit_softcapping: float | None = 0,
        reduction: str = "sum",
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        **options: Unpack[Execution],
    ):
        AUTOMODEL.require(FITS, "ChunkedHeadCrossEntropy")
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
        num_label_tokens: int | None = None,
        grad_reduce_group: Any = None,
        loss_weights: Tensor | None = None,  # [batch, sequence]
    ) -> Tensor:
        """The loss of this rank's tokens: with ``num_label_tokens``, their share of the mean over all ranks' tokens.

        Raises:
            ValueError: ``num_label_tokens`` or ``loss_weights`` with ``reduction="mean"``; a sharded weight without the
            group that its gradient is reduced over.
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
