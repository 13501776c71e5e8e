"""Apple's cut cross-entropy by its names and signatures, computed by this library's head.

    from chunked_head.integrations.cut_cross_entropy import linear_cross_entropy

replaces the same import from ``cut_cross_entropy``, which need not be installed. Gradients are exact, with nothing
filtered out of them. Without a token that counts, the loss is 0, not nan.

``translated`` and ``init_of``, which read a table of another library's options, are used by ``liger.py`` as well.
"""

import enum
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..call.options import CHECKS, OptionsModule
from ..core.checks import PLAIN
from ..functions import cross_entropy as head
from ..functions.logprobs import linear_logprobs

# for an option of another library: the name of ours with the same meaning; or for each of its values our options, where
# the key ``...`` is any other value
Ours = str | Mapping[Any, str | dict[str, Any]]


def translated(table: Mapping[str, Ours], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Translates those of ``arguments``, another library's options, that the table has. Returns this library's options.

    Raises:
        TypeError, ValueError: a value is wrong, or refused; the message has the other library's name of the option.
    """
    options: dict[str, Any] = {}
    for name in [name for name in table if name in arguments]:
        option, value = table[name], arguments[name]
        value = value.name.lower() if isinstance(value, enum.Enum) else value
        if not isinstance(option, str):
            is_plain, is_bool = type(value) in PLAIN, isinstance(value, bool)
            keys = [key for key in option if is_plain and isinstance(key, bool) == is_bool and key == value]
            if not keys and ... not in option:
                choices = " or ".join(map(repr, option))
                raise ValueError(f"{name} must be {choices}, got {value!r}; docs/coming-from.md has what stands for it")
            option = option[keys[0] if keys else ...]
        if isinstance(option, str):
            try:
                CHECKS[option](value)
            except (TypeError, ValueError) as error:
                raise type(error)(str(error).replace(option, name)) from None
            option = {option: value}
        options |= option
    return options


def init_of(function: Callable[..., Any], table: Mapping[str, Ours]) -> Any:
    """The ``__init__`` of an ``OptionsModule``. Its options are those of the table, in order, with the defaults of
    ``function``."""
    parameters = inspect.signature(function).parameters
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([self_parameter, *(parameters[name] for name in table)])

    def init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        module = bound.arguments.pop("self")
        super(OptionsModule, module).__init__()
        translated(table, bound.arguments)
        module.keep(bound.arguments)

    init.__signature__ = signature  # type: ignore[attr-defined]
    return init


SWITCH: dict[Any, str | dict[str, Any]] = {True: {}, False: {}}
EXACT = {"accumulate_dtype": torch.float32}
IMPLEMENTATIONS: dict[Any, str | dict[str, Any]] = {
    "cce": {}, "torch_compile": {"backend": "torch"}, "cce_exact": EXACT, "cce_kahan": EXACT, "cce_kahan_full": EXACT,
    "cce_kahan_full_c": EXACT, "cce_kahan_full_e": EXACT, "cce_kahan_full_c_full_e": EXACT,
}  # fmt: skip
OPTIONS: dict[str, Ours] = {  # in the order of Apple's module, and ours
    "ignore_index": "ignore_index", "softcap": "softcap", "reduction": "reduction",
    "shift": {True: {"shift": 1}, False: {"shift": 0}, ...: "shift"}, "filter_eps": {"auto": {}, None: {}, 0.0: {}},
    "accum_e_fp32": SWITCH | {True: EXACT}, "accum_c_fp32": SWITCH | {True: EXACT}, "filter_e_grad": SWITCH,
    "filter_c_grad": SWITCH, "impl": IMPLEMENTATIONS, "return_lse": SWITCH, "memory_budget": "memory_budget",
    "skip_ignored": "skip_ignored",
}  # fmt: skip


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
    options = translated(OPTIONS | {"vocab_parallel_options": {None: {}}}, locals())
    reduction, steps = options.pop("reduction"), options["shift"]
    length = targets.shape[-1] if isinstance(targets, Tensor) and targets.dim() else 1
    if steps >= max(1, length):
        raise ValueError(f"shift must be in [0, {length}), the last dimension of targets, got {shift}")
    options["bias"] = bias
    if not return_lse:
        loss = head.linear_cross_entropy(e, c, targets, reduction=reduction, **options)
        return loss[..., steps:] if reduction == "none" else loss
    results = linear_logprobs(e, c, targets, lse=True, **options)
    loss, lse = -results.logprobs[..., steps:], results.lse[..., steps:]
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
