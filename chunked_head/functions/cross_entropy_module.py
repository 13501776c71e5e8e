"""``torch.nn.CrossEntropyLoss`` on logits that exist already."""

from typing import Any, Unpack

from torch import Tensor

from ..call.options import Call, LogitsHead, OptionsModule, check_options, logits_call_of
from ..compile.operation import IN_GRAPH, operation
from ..core import checks
from ..core.checks import is_dtensor
from ..parallel.dtensor import complete
from ..parallel.groups import TokenParallel, VocabParallel
from .cross_entropy import first_output, in_graph_cross_entropy, plain_loss, with_class_weights


class CrossEntropyLoss(OptionsModule):
    """``torch.nn.CrossEntropyLoss`` of class ids, in two passes over the logits and no copy of them.

    ``forward(input, target)``: ``input`` [..., C] with ``target`` [...] int64, any leading dimensions or none, and
    PyTorch's [N, C, d1, ...] with [N, d1, ...]; the latter is copied, its classes last, unless they are contiguous.
    Where a shape could be read either way (all dimensions but the first are equal) it is refused. Ranks that share the
    classes have them last.

    Args:
        weight: [C], a buffer, where columns are padding or other ranks' [vocab_size]; ignore_index, reduction,
            label_smoothing: as PyTorch's. ``size_average`` and ``reduce``, deprecated there, are refused.
        z_loss: coefficient of ``lse ** 2``, with the denominator of the cross-entropy.
        softcap, logit_scale, inplace, vocab_size, backend: as in ``logits_loss``.
        parallel: likewise; with ``reduction="none"`` nothing is the affair of ranks with other tokens, and
            ``average=True`` is refused. A copy of the module shares the process group; to save it, save what it is
            made of.

    Differences from PyTorch: the loss is fp32 for 16-bit input; no tokens, or none that count, give loss 0 with zero
    gradients rather than nan; whatever stands in a row that does not count (nan too) changes nothing; a target out of
    range raises an IndexError on the CPU and makes the loss nan elsewhere.
    """

    weight: Tensor | None
    parallel: VocabParallel | TokenParallel | None

    def __init__(
        self,
        weight: Tensor | None = None,  # [C]
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        inplace: bool = False,
        vocab_size: int | None = None,
        parallel: VocabParallel | TokenParallel | None = None,
        backend: str | None = None,
    ):
        super().__init__()
        for argument, value in (("size_average", size_average), ("reduce", reduce)):
            if value is not None:
                raise ValueError(f"{argument} is deprecated in PyTorch and refused here, got {value!r}; use reduction=")
        options: dict[str, Any] = {
            "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing, "z_loss": z_loss,
            "softcap": softcap, "logit_scale": logit_scale, "inplace": inplace, "vocab_size": vocab_size,
            "parallel": parallel, "backend": backend,
        }  # fmt: skip
        check_options(options)
        if not is_dtensor(weight):
            checks.check_tensor("weight", weight, optional=True)
        self.register_buffer("weight", weight)
        self.keep(options)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if not is_dtensor(input):
            input = classes_last(input, target, isinstance(self.parallel, VocabParallel))
        return logits_cross_entropy(input, target, class_weights=self.weight, **self.options())

    def extra_repr(self) -> str:
        return f"weight={None if self.weight is None else tuple(self.weight.shape)}, {super().extra_repr()}"


@operation
def logits_cross_entropy(
    logits: Tensor,  # [..., C]
    target: Tensor,  # [...] int64
    *,
    class_weights: Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    inplace: bool,
    **options: Unpack[LogitsHead],
) -> Call[Tensor]:
    """The function of the module."""
    call = logits_call_of(
        "CrossEntropyLoss", logits, target, options, inplace, reduction=reduction, result=first_output,
        losses=plain_loss(label_smoothing, z_loss), shares_denominator=True,
    )  # fmt: skip
    return with_class_weights(call, label_smoothing, z_loss, complete("weight", class_weights))


IN_GRAPH["logits_cross_entropy"] = in_graph_cross_entropy


def classes_last(logits: Tensor, target: Tensor, split: bool) -> Tensor:
    """[..., C], from PyTorch's [N, C, d1, ...] too, unless ranks ``split`` the classes."""
    for argument, tensor in (("input", logits), ("target", target)):
        checks.check_tensor(argument, tensor, optional=False)
    checks.check_ids("target", target)
    shape, leading = tuple(logits.shape), tuple(target.shape)
    if len(shape) < 3 or leading != shape[:1] + shape[2:]:
        return logits
    if split or leading == shape[:-1]:
        raise ValueError(
            f"input {shape} with target {leading} may have its classes last or, as in PyTorch, second; flatten both: "
            "input.flatten(0, -2) or input.movedim(1, -1).flatten(0, -2), with target.flatten()"
        )
    return logits.movedim(1, -1)
