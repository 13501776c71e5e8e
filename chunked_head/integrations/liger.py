"""Liger's fused linear cross-entropy by its names and signatures (0.8.5), computed by this library's head.

    from chunked_head.integrations.liger import LigerFusedLinearCrossEntropyLoss

in the place of the same import from ``liger_kernel.transformers``. Values are Liger's, with these differences: no
tokens that count give loss 0 rather than nan, logits are not rounded to 16 bits, the outputs beside the loss are fp32,
and the weight's gradient is summed as the plan says where ``accum_dtype`` is None. Liger itself is not needed.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import losses, metrics
from ..api.cross_entropy import linear_cross_entropy
from ..api.logprobs import linear_logprobs
from ..api.loss import linear_loss
from ..engine.execution import check_options
from ..program import checks


@dataclass
class CrossEntropyOutput:
    """The loss and what was asked for beside it, without gradient.

    ``z_loss``: the part of the loss that ``lse_square_scale`` makes. ``token_accuracy``: share of the tokens that
    count, or 0 and 1 [...] for ``reduction="none"``. ``predicted_tokens`` [...] int64: -1 where a token does not count.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class Asked(NamedTuple):
    """Liger's options, as its signatures order them."""

    ce_weight: Tensor | None = None
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    accum_dtype: torch.dtype | None = None
    use_token_scaling: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False

    def check(self) -> None:
        """Raises what is wrong with the options that this library's functions do not check by the same name."""
        for name in ("return_z_loss", "use_token_scaling", "return_token_accuracy", "return_predicted_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        checks.check_number("lse_square_scale", self.lse_square_scale, 0.0, float("inf"))
        checks.check_tensor("ce_weight", self.ce_weight, optional=True)
        if self.accum_dtype is not None:
            checks.check_dtype("accum_dtype", self.accum_dtype)
        check_options(
            {name: getattr(self, name) for name in ("ignore_index", "label_smoothing", "reduction", "softcap")}
        )

    @property
    def looks_first(self) -> bool:
        """Whether per-token statistics are wanted that the loss's own pass does not return: one matmul more."""
        per_token = self.reduction == "none" and (self.return_token_accuracy or self.return_z_loss)
        return self.use_token_scaling or self.return_predicted_tokens or per_token


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
        ce_weight, label_smoothing, ignore_index, reduction, softcap: ``class_weights`` and the rest of
            ``linear_cross_entropy``.
        lse_square_scale: coefficient of ``lse ** 2``, its mean over the number of tokens, with ``ce_weight`` too.
        accum_dtype: of the weight's gradient over chunks; None: as the plan says.
        use_token_scaling: multiplies a token's values by its own probability, without gradient (DFT).
        return_z_loss, return_token_accuracy, return_predicted_tokens: see ``CrossEntropyOutput``.
        chunk_mem_const: 1; ``memory_budget`` says here how much may be held.
        memory_budget: as in ``linear_cross_entropy``.

    Token scaling, predicted tokens, and accuracy or z-loss of each token (``reduction="none"``) take a pass over the
    logits before the loss: one matmul more.

    Raises:
        TypeError, ValueError, IndexError: as ``linear_cross_entropy``.
    """
    if chunk_mem_const != 1 or isinstance(chunk_mem_const, bool):
        raise ValueError(f"chunk_mem_const must be 1, got {chunk_mem_const!r}; memory_budget= says what may be held")
    asked = Asked(
        ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype,
        use_token_scaling, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    found = computed(input, weight, target, bias, asked, memory_budget)
    return found if return_z_loss or return_token_accuracy or return_predicted_tokens else found.loss


class LigerFusedLinearCrossEntropyFunction:
    """Liger's autograd function as its callers see it: ``apply`` of the same arguments and four results."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *options: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Loss, z-loss, token accuracy and predicted tokens, None where not asked for. ``options``: those of
        ``liger_fused_linear_cross_entropy`` in its order, then ``ce_impl`` and ``ce_mode``, which must be None, and
        ``chunk_mem_const``, which must be 1."""
        count = len(Asked._fields)
        ours, chosen = options[:count], options[count:]
        for name, value, only in zip(("ce_impl", "ce_mode", "chunk_mem_const"), chosen, (None, None, 1), strict=False):
            if value != only:
                raise ValueError(f"{name} must be {only!r}, got {value!r}: it chooses among Liger's own kernels")
        if len(chosen) > 3:
            raise TypeError(f"apply takes at most {count + 7} arguments, got {len(options) + 4}")
        found = computed(_input, weight, target, bias, Asked(*ours), None)
        return found.loss, found.z_loss, found.token_accuracy, found.predicted_tokens


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Liger's module of this name: ``module(lin_weight, _input, target, bias)``; options as the functional's."""

    def __init__(
        self,
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
        *,
        memory_budget: int | str | None = None,
    ):
        super().__init__()
        asked = Asked(
            ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype,
            use_token_scaling, return_token_accuracy, return_predicted_tokens,
        )  # fmt: skip
        asked.check()
        check_options({"memory_budget": memory_budget})
        for name, value in asked._asdict().items():  # attributes, as Liger's module has them
            setattr(self, name, value)
        self.memory_budget = memory_budget

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        options = {name: getattr(self, name) for name in Asked._fields}
        return liger_fused_linear_cross_entropy(
            _input, lin_weight, target, bias, **options, memory_budget=self.memory_budget
        )


def computed(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, asked: Asked, memory_budget: int | str | None
) -> CrossEntropyOutput:
    """The loss and everything that was asked for beside it."""
    asked.check()
    head: dict[str, Any] = {
        "bias": bias, "ignore_index": asked.ignore_index, "softcap": asked.softcap, "memory_budget": memory_budget,
    }  # fmt: skip
    seen = None
    if asked.looks_first:
        with torch.no_grad():
            seen = linear_logprobs(hidden, weight, target, lse=True, argmax=True, **head)
    head["accumulate_dtype"] = asked.accum_dtype
    scaling = seen.logprobs.exp() if seen is not None and asked.use_token_scaling else None
    found = unreduced if asked.reduction == "none" else reduced
    out = found(hidden, weight, target, asked, head, scaling, seen)
    if asked.return_predicted_tokens:
        assert seen is not None
        out.predicted_tokens = torch.where(target != asked.ignore_index, seen.argmax, -1)
    return out


def reduced(
    hidden: Tensor, weight: Tensor, target: Tensor, asked: Asked, head: dict[str, Any], scaling: Tensor | None, _: Any
) -> CrossEntropyOutput:
    loss = losses.cross_entropy(asked.label_smoothing, asked.ce_weight)
    if asked.lse_square_scale:
        loss = loss + float(asked.lse_square_scale) * losses.z_loss()
    out = linear_loss(
        hidden, weight, target, loss, reduction=asked.reduction,
        batch={} if scaling is None else {"token_weights": scaling},
        metrics=[metrics.accuracy()] if asked.return_token_accuracy else (), **head,
    )  # fmt: skip
    part = out.parts.get("z_loss", torch.zeros_like(out.loss))
    return CrossEntropyOutput(
        out.loss,
        (asked.lse_square_scale * part).detach() if asked.return_z_loss else None,
        out.metrics["accuracy"].value if asked.return_token_accuracy else None,
    )


def unreduced(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    asked: Asked,
    head: dict[str, Any],
    scaling: Tensor | None,
    seen: Any,
) -> CrossEntropyOutput:
    loss = linear_cross_entropy(
        hidden, weight, target, reduction="none", class_weights=asked.ce_weight, label_smoothing=asked.label_smoothing,
        z_loss=asked.lse_square_scale, token_weights=scaling, **head,
    )  # fmt: skip
    squares = correct = None
    if asked.return_z_loss:
        squares = asked.lse_square_scale * seen.lse.square()
        squares = squares if scaling is None else squares * scaling
    if asked.return_token_accuracy:
        correct = ((seen.argmax == target) & (target != asked.ignore_index)).to(loss.dtype)
    return CrossEntropyOutput(loss, squares, correct)
