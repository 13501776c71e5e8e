"""Functions with the names and signatures of Apple's cut cross-entropy, computed by this library's head.

    from chunked_head.integrations.cut_cross_entropy import linear_cross_entropy

replaces the import of this name from ``cut_cross_entropy``, which need not be installed. Gradients are exact: none of
their elements is filtered out. If no token counts, the loss is 0, not nan.

``translated`` and ``init_of`` read a table of another library's options. ``liger.py`` uses these two functions too.
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

# Translation of another library's option: the name of our option that takes the same value; or a mapping from values to
# our options, each a dict or the name of our option that takes the value. The key ``...`` stands for any other value.
Translation = str | Mapping[Any, str | dict[str, Any]]


def translated(translations: Mapping[str, Translation], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Translates ``arguments``, another library's options by name, into this library's options. Names that are not in
    ``translations`` are left out.

    Raises:
        TypeError, ValueError: a value is wrong, or has no translation. The message has the other library's name of
            the option.
    """
    options: dict[str, Any] = {}
    for name in [name for name in translations if name in arguments]:
        option, value = translations[name], arguments[name]
        value = value.name.lower() if isinstance(value, enum.Enum) else value
        if not isinstance(option, str):
            is_plain, is_bool = type(value) in PLAIN, isinstance(value, bool)
            equal_keys = [key for key in option if is_plain and isinstance(key, bool) == is_bool and key == value]
            if not equal_keys and ... not in option:
                choices = " or ".join(map(repr, option))
                raise ValueError(f"{name} must be {choices}, got {value!r}; docs/coming-from.md has what stands for it")
            option = option[equal_keys[0] if equal_keys else ...]
        if isinstance(option, str):
            try:
                CHECKS[option](value)
            except (TypeError, ValueError) as error:
                raise type(error)(str(error).replace(option, name)) from None
            option = {option: value}
        options |= option
    return options


def init_of(function: Callable[..., Any], translations: Mapping[str, Translation]) -> Any:
    """Makes the ``__init__`` of a subclass of ``OptionsModule``. The parameters are the names in ``translations``, in
    order, with the defaults of ``function``."""
    parameters = inspect.signature(function).parameters
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([self_parameter, *(parameters[name] for name in translations)])

    def init(*args: Any, **kwargs: Any) -> None:
        bound_arguments = signature.bind(*args, **kwargs)
        bound_arguments.apply_defaults()
        module = bound_arguments.arguments.pop("self")
        super(OptionsModule, module).__init__()
        translated(translations, bound_arguments.arguments)
        module.keep(bound_arguments.arguments)

    init.__signature__ = signature  # type: ignore[attr-defined]
    return init


SWITCH: dict[Any, str | dict[str, Any]] = {True: {}, False: {}}  # translation of a flag without an effect
EXACT = {"accumulate_dtype": torch.float32}  # our option for gradients that are summed over chunks in fp32
IMPLEMENTATIONS: dict[Any, str | dict[str, Any]] = {  # our options for each of Apple's implementations
    "cce": {}, "torch_compile": {"backend": "torch"}, "cce_exact": EXACT, "cce_kahan": EXACT, "cce_kahan_full": EXACT,
    "cce_kahan_full_c": EXACT, "cce_kahan_full_e": EXACT, "cce_kahan_full_c_full_e": EXACT,
}  # fmt: skip
OPTIONS: dict[str, Translation] = {  # in the order of the parameters of Apple's module, then ours
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
    filter_eps: float | str | None = "auto",  # no effect
    accum_e_fp32: bool = False,  # gradients are summed in fp32
    accum_c_fp32: bool = False,  # gradients are summed in fp32
    filter_e_grad: bool = True,  # no effect
    filter_c_grad: bool = True,  # no effect
    impl: str | enum.Enum = "cce",  # name of an implementation
    vocab_parallel_options: Any = None,  # must be None
    *,
    memory_budget: int | str | None = None,
    skip_ignored: bool | str = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``F.cross_entropy((e @ c.T).float(), targets)`` without the logits, with Apple's signature.

    Args:
        e, c, targets: ``hidden``, ``weight`` and ``target`` of ``chunked_head.linear_cross_entropy``.
        bias, ignore_index, softcap, memory_budget, skip_ignored: as in ``chunked_head.linear_cross_entropy``.
        reduction: ``"mean"``, ``"sum"``, or ``"none"``: returns values [...] without the first ``shift`` positions.
        shift: pairs position t of ``e`` with target t + shift; True is 1.
        return_lse: return the log-sum-exp too: fp32, differentiable, [...] without the first ``shift`` positions.
        filter_eps, filter_e_grad, filter_c_grad: have no effect, since gradients are exact; ValueError for a
            ``filter_eps`` other than 0, None and "auto".
        accum_e_fp32, accum_c_fp32: if either is True, gradients are summed over chunks in fp32. If both are False, the
            plan chooses the dtype.
        impl: a name of Apple's implementations, or a member of its enumeration. ``"torch_compile"``:
            ``backend="torch"``. ``"cce"``: the device's default backend. Any other: the default backend, with gradients
            summed in fp32.
        vocab_parallel_options: must be None. For ranks that share the classifier, call
            ``chunked_head.linear_cross_entropy`` with ``parallel``.

    Returns:
        The loss, fp32, or ``(loss, lse)``.
    """
    options = translated(OPTIONS | {"vocab_parallel_options": {None: {}}}, locals())
    reduction, shift_steps = options.pop("reduction"), options["shift"]
    num_positions = targets.shape[-1] if isinstance(targets, Tensor) and targets.dim() else 1
    if shift_steps >= max(1, num_positions):
        raise ValueError(f"shift must be in [0, {num_positions}), the last dimension of targets, got {shift}")
    options["bias"] = bias
    if not return_lse:
        loss = head.linear_cross_entropy(e, c, targets, reduction=reduction, **options)
        return loss[..., shift_steps:] if reduction == "none" else loss
    token_outputs = linear_logprobs(e, c, targets, lse=True, **options)
    loss, lse = -token_outputs.logprobs[..., shift_steps:], token_outputs.lse[..., shift_steps:]
    if reduction == "none":
        return loss, lse
    if reduction == "sum":
        return loss.sum(), lse
    return loss.sum() / (targets[..., shift_steps:] != ignore_index).sum().clamp(min=1), lse


class LinearCrossEntropy(OptionsModule):
    """A module with the interface of Apple's module of this name, called as ``module(e, c, targets, bias)``. The
    options are options of ``linear_cross_entropy``."""

    __init__ = init_of(linear_cross_entropy, OPTIONS)

    def forward(
        self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        return linear_cross_entropy(e, c, targets, bias, **self.options())
