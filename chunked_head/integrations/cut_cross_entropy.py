"""Apple's cut cross-entropy by its names and signatures, computed by this library's head.

    from chunked_head.integrations.cut_cross_entropy import linear_cross_entropy

in the place of the same import from ``cut_cross_entropy``, which is not needed. Gradients are exact, with nothing
filtered out of them. No tokens that count give loss 0 rather than nan.

Here too, for Liger's as well: options of another library's function as one table, which has this library's option for
each, or the reason of a refusal.
"""

import enum
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..call.options import OptionsModule, check_options
from ..core.checks import flag
from ..functions import cross_entropy as head
from ..functions.logprobs import linear_logprobs

# an option's name and value to ours; raises for a value that is wrong or refused
Translation = Callable[[str, Any], dict[str, Any]]


def translated(table: Mapping[str, Translation], given: Mapping[str, Any]) -> dict[str, Any]:
    """This library's options for those of ``given`` that the table has."""
    found: dict[str, Any] = {}
    for name, translate in table.items():
        if name in given:
            found |= translate(name, given[name])
    return found


def init_of(function: Callable[..., Any], table: Mapping[str, Translation]) -> Any:
    """``__init__`` of an ``OptionsModule`` of a function's options, those and in the order of the table."""
    taken = inspect.signature(function).parameters
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([itself, *(taken[name] for name in table)])

    def init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        module = bound.arguments.pop("self")
        super(OptionsModule, module).__init__()
        translated(table, bound.arguments)
        module.keep(bound.arguments)

    init.__signature__ = signature  # type: ignore[attr-defined]
    return init


def same(name: str, value: Any) -> dict[str, Any]:
    """An option of this library's name and meaning."""
    check_options({name: value})
    return {name: value}


def renamed(ours: str, check: Callable[[str, Any], Any]) -> Translation:
    """An option of this library's meaning, checked by its name in the other library."""

    def translate(name: str, value: Any) -> dict[str, Any]:
        check(name, value)
        return {ours: value}

    return translate


def switch(**on: Any) -> Translation:
    """A bool, and our options where it is True."""
    return lambda name, value: on if flag(name, value) else {}


def only(*allowed: Any, reason: str) -> Translation:
    """Values that need nothing of this library; any other is refused."""

    def refuse(name: str, value: Any) -> dict[str, Any]:
        if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
            raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}: {reason}")
        return {}

    return refuse


EXACT = {"accumulate_dtype": torch.float32}
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "cce": {}, "torch_compile": {"backend": "torch"}, "cce_exact": EXACT, "cce_kahan": EXACT, "cce_kahan_full": EXACT,
    "cce_kahan_full_c": EXACT, "cce_kahan_full_e": EXACT, "cce_kahan_full_c_full_e": EXACT,
}  # fmt: skip


def implementation(name: str, value: str | enum.Enum) -> dict[str, Any]:
    chosen = value.name.lower() if isinstance(value, enum.Enum) else value
    if chosen not in IMPLEMENTATIONS:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {value!r}")
    return IMPLEMENTATIONS[chosen]


def steps(name: str, value: bool | int) -> dict[str, Any]:
    if not isinstance(value, int):
        raise TypeError(f"{name} must be True, False or an int, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}; 1 pairs position t with target t + 1")
    return {"shift": int(value)}


OPTIONS: dict[str, Translation] = {  # in the order of Apple's module, and ours
    "ignore_index": same, "softcap": same, "reduction": same, "shift": steps,
    "filter_eps": only("auto", None, 0, 0.0, reason="no part of a gradient is left out here"),
    "accum_e_fp32": switch(**EXACT), "accum_c_fp32": switch(**EXACT), "filter_e_grad": switch(),
    "filter_c_grad": switch(), "impl": implementation, "return_lse": switch(), "memory_budget": same,
    "skip_ignored": same,
}  # fmt: skip
ONE_RANK = only(None, reason="give parallel=VocabParallel(group) to chunked_head.linear_cross_entropy")


def linear_cross_entropy(
    e: Tensor,  # [..., hidden]
    c: Tensor,  # [vocab, hidden]
    targets: Tensor,  # [...] int64
    bias: Tensor | None = None,  # [vocab]
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: str | enum.Enum = "cce",
    vocab_parallel_options: Any = None,
    *,
    memory_budget: int | str | None = None,
    skip_ignored: bool | str = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Apple's function of this name: ``F.cross_entropy((e @ c.T).float(), targets)`` without the logits.

    Args:
        e, c, targets, bias, ignore_index, softcap, memory_budget, skip_ignored: ``hidden``, ``weight``, ``target`` and
            the rest of ``chunked_head.linear_cross_entropy``.
        reduction: ``"mean"``, ``"sum"``, or ``"none"``: values [...] without the first ``shift`` positions.
        shift: pairs position t of ``e`` with target t + shift; True is 1.
        return_lse: whether to return log-sum-exp too, shaped as unreduced values are and differentiable.
        filter_eps, filter_e_grad, filter_c_grad: no part of a gradient is left out; a nonzero threshold is refused.
        accum_e_fp32, accum_c_fp32: either of them sums both gradients over chunks in fp32; without, the plan chooses.
        impl: one of Apple's names, or its enumeration: ``"torch_compile"`` runs in torch's operations, any other on
            the device's own backend, all but ``"cce"`` with fp32 sums.
        vocab_parallel_options: None; ``parallel=`` of ``chunked_head.linear_cross_entropy`` is for ranks that share the
            classifier.

    Returns:
        The loss, fp32, or ``(loss, lse)``.
    """
    options = translated(OPTIONS | {"vocab_parallel_options": ONE_RANK}, locals())
    reduction, steps = options.pop("reduction"), options["shift"]
    length = targets.shape[-1] if isinstance(targets, Tensor) and targets.dim() else 1
    if steps >= max(1, length):
        raise ValueError(f"shift must be in [0, {length}), the last dimension of targets, got {shift}")
    options["bias"] = bias
    if not return_lse:
        loss = head.linear_cross_entropy(e, c, targets, reduction=reduction, **options)
        return loss[..., steps:] if reduction == "none" else loss
    found = linear_logprobs(e, c, targets, lse=True, **options)
    loss, lse = -found.logprobs[..., steps:], found.lse[..., steps:]
    if reduction == "none":
        return loss, lse
    if reduction == "sum":
        return loss.sum(), lse
    return loss.sum() / (targets[..., steps:] != ignore_index).sum().clamp(min=1), lse


class LinearCrossEntropy(OptionsModule):
    """Apple's module of this name: ``module(e, c, targets, bias)``; options as ``linear_cross_entropy``'s."""

    __init__ = init_of(linear_cross_entropy, OPTIONS)

    def forward(
        self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        return linear_cross_entropy(e, c, targets, bias, **self.options())
