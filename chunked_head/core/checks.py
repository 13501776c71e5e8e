"""Every argument error, raised once and before any work: which argument, what was expected, what came, what to do."""

import difflib
import inspect
import math
import sys
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INFINITY = float("inf")
PLAIN = frozenset({type(None), bool, int, float, str})  # types whose values are equal where they mean the same
BACKENDS = ("triton", "torch")
NUMBERS = (int, float)  # not ``int | float``, which torch.compile of torch 2.9 cannot take

PACKAGE = __name__.partition(".")[0]


def is_dtensor(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor" and isinstance(tensor, torch.Tensor)


def check_operands(hidden: Tensor, weight: Tensor, target: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """Checks shapes, dtypes and devices; returns the dtype of the matmuls."""
    tensors = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
    for argument, tensor in tensors.items():
        check_tensor(argument, tensor, optional=argument in ("target", "bias"))
    check_shape("hidden", hidden, hidden.dim() >= 1, "[..., hidden]", "")
    check_shape("weight", weight, weight.dim() == 2, "[vocab, hidden]", "pass lm_head.weight")
    if hidden.shape[-1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(
            f"weight must be [vocab, hidden] with the {hidden.shape[-1]} columns of hidden {tuple(hidden.shape)}, got "
            f"{tuple(weight.shape)}; if a sharding framework left an empty or partial weight, gather it first"
        )
    check_target(target, hidden, "hidden")
    if bias is not None:
        check_per_class("bias", bias, weight.shape[0])
    for argument, tensor in tensors.items():
        check_device(argument, tensor, hidden.device, "hidden")
    return matmul_dtype(hidden, weight, bias)


def check_logits(logits: Tensor, target: Tensor | None) -> torch.dtype:
    """Checks logits that exist already; returns their dtype."""
    check_tensor("logits", logits, optional=False)
    check_tensor("target", target, optional=True)
    check_shape("logits", logits, logits.dim() >= 1 and logits.shape[-1] > 0, "[..., vocab]", "")
    check_target(target, logits, "logits")
    check_device("target", target, logits.device, "logits")
    check_dtype("logits", logits.dtype)
    if logits.device.type == "meta":
        raise ValueError("logits are on the meta device, where there is nothing to compute; move them to a real one")
    return logits.dtype


def check_target(target: Tensor | None, rows: Tensor, what: str) -> None:
    if target is not None:
        check_ids("target", target)
        leading = tuple(rows.shape[:-1])
        same = tuple(target.shape) == leading
        check_shape("target", target, same, f"{leading}, the leading shape of {what}", "reshape")


def check_ids(argument: str, target: Tensor) -> None:
    if target.dtype != torch.int64:
        remedy = "use target.long()"
        if target.is_floating_point():
            remedy = (
                "ids need .long(); for class probabilities p [..., vocab] call linear_loss or logits_loss with "
                'target=None, losses.forward_kl("cross_entropy") and batch={"teacher_logits": p.log()}'
            )
        raise TypeError(f"{argument} must hold token ids of dtype int64, got {name(target.dtype)}; {remedy}")


def check_per_class(argument: str, vector: Tensor, vocab: int) -> None:
    check_shape(argument, vector, tuple(vector.shape) == (vocab,), f"({vocab},), one per class", "")


def check_class_weights(
    weights: Tensor | None, vocab: int, device: torch.device, argument: str = "class_weights"
) -> None:
    """Weights that a loss holds for each class."""
    check_tensor(argument, weights, optional=True)
    if weights is not None:
        check_per_class(argument, weights, vocab)
        check_constant(argument, weights)
        check_device(argument, weights, device, "the logits")


def check_token_weights(token_weights: Tensor | None, leading: tuple[int, ...], device: torch.device) -> None:
    check_tensor("token_weights", token_weights, optional=True)
    if token_weights is not None:
        same = tuple(token_weights.shape) == leading
        check_shape("token_weights", token_weights, same, f"{leading}, the shape of target", "expand it to that shape")
        check_constant("token_weights", token_weights)
        check_device("token_weights", token_weights, device, "hidden")


def check_constant(argument: str, vector: Tensor) -> None:
    if vector.requires_grad or not vector.is_floating_point():
        raise ValueError(
            f"{argument} must be floating-point and takes no gradient, got {name(vector.dtype)} with "
            f"requires_grad={vector.requires_grad}; pass {argument}.float().detach()"
        )


def check_tensor(argument: str, tensor: Tensor | None, optional: bool) -> None:
    if tensor is None and optional:
        return
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{argument} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{argument} must be a dense tensor, got layout {tensor.layout}; pass {argument}.to_dense()")
    if is_dtensor(tensor):
        raise TypeError(
            f"{argument} is a DTensor, which of a head's operands, logits and targets alone are taken as such; pass "
            f"{argument}.full_tensor(), or .to_local() where it is split as they are"
        )


def check_shape(argument: str, tensor: Tensor, right: bool, expected: str, remedy: str) -> None:
    if not right:
        raise ValueError(
            f"{argument} must have shape {expected}, got {tuple(tensor.shape)}" + (f"; {remedy}" if remedy else "")
        )


def matmul_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """Autocast's dtype where it is on, else the one dtype that all operands have."""
    operands = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    for argument, tensor in operands.items():
        check_dtype(argument, tensor.dtype)
    device = hidden.device.type
    if device == "meta":
        raise ValueError(
            "hidden is on the meta device, where there is nothing to compute; move the tensors to a real one"
        )
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        check_dtype("the autocast dtype", dtype)
        return dtype
    for argument, tensor in operands.items():
        if tensor.dtype != hidden.dtype:
            raise TypeError(
                f"{argument} must have the dtype of hidden, {name(hidden.dtype)}, got {name(tensor.dtype)}; "
                f"cast one of them or run under torch.autocast({device!r})"
            )
    return hidden.dtype


def check_dtype(argument: str, dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{argument} must be a torch.dtype, such as torch.float32, got {dtype!r}")
    if dtype not in DTYPES:
        raise TypeError(f"{argument} must be one of {', '.join(map(name, DTYPES))}, got {dtype}")


def check_device(argument: str, tensor: Tensor | None, device: torch.device, of: str) -> None:
    if tensor is not None and tensor.device != device:
        raise ValueError(f"{argument} is on {tensor.device}, {of} on {device}; move one of them")


def check_reduction(reduction: str, allowed: tuple[str, ...] = ("mean", "sum", "none"), remedy: str = "") -> None:
    if reduction not in allowed:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, allowed))}, got {reduction!r}{remedy}")


def check_ignore_index(ignore_index: int) -> None:
    check_int("ignore_index", ignore_index)
    if not -(1 << 63) <= ignore_index < 1 << 63:
        raise ValueError(f"ignore_index must fit int64 as targets do, got {ignore_index}")


def check_temperatures(temperatures: Tensor, leading: tuple[int, ...], device: torch.device) -> None:
    """Raises where ``temperatures`` are not one float per token, on the operands' device."""
    if tuple(temperatures.shape) != leading:
        raise ValueError(
            f"temperature must be a number or have the target's shape {leading}, got shape "
            f"{tuple(temperatures.shape)}; nothing is broadcast: expand it to that shape"
        )
    check_device("temperature", temperatures, device, "the other operands")


def check_temperature(temperature: float | Tensor) -> None:
    """Checks a number, or of a tensor with one per token what needs no tokens."""
    if isinstance(temperature, Tensor):
        if is_dtensor(temperature):
            raise TypeError("temperature is a DTensor; pass .to_local(): that of this rank's tokens")
        if not temperature.is_floating_point():
            raise TypeError(f"temperature must be a number or floating-point, got {name(temperature.dtype)}; cast it")
        if temperature.requires_grad:
            raise ValueError("temperature takes no gradient here; pass it .detach()ed")
        return
    check_number("temperature", temperature, 0.0, math.inf)
    if temperature == 0:
        raise ValueError("temperature must be positive, got 0; for greedy choices compare with the argmax")


def check_softcap(softcap: float | None) -> None:
    if softcap is not None:
        check_number("softcap", softcap, 0.0, math.inf)
        if softcap == 0:
            raise ValueError("softcap must be positive or None, got 0; None caps nothing")


def check_shift_along(shift: int, leading: tuple[int, ...]) -> None:
    """Raises where a target of this shape has no dimension to shift along."""
    if shift and not leading:
        raise ValueError(f"shift={shift} needs a target with a dimension to shift along, got a 0-d target")


def check_int(argument: str, value: int, least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be an int, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{argument} must be at least {least}, got {value}")


def check_number(argument: str, value: float, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{argument} must be a number, got {value!r}")
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{argument} must be finite and in [{least:g}, {most:g}], got {value!r}")


def check_scalar(argument: str, value: float | Tensor | None, device: torch.device, applies: bool, where: str) -> None:
    """A normalizer or upstream gradient: a number or a 0-d tensor on the device."""
    if value is None:
        return
    if not applies:
        raise ValueError(f"{argument} goes with {where} only; multiply the result instead")
    check_factor(argument, value, device)


def check_factor(argument: str, value: float | Tensor | None, device: torch.device | None = None) -> None:
    """Checks such a factor, on any device where none is given."""
    if value is None:
        return
    if isinstance(value, Tensor):
        there = value.device == (device or value.device)
        if value.dim() != 0 or value.is_complex() or value.requires_grad or not there:
            raise ValueError(
                f"{argument} must be a number or a 0-d tensor{f' on {device}' if device else ''} that needs no "
                f"gradient, got shape {tuple(value.shape)} of {value.dtype} on {value.device}, "
                f"requires_grad={value.requires_grad}"
            )
        return
    check_number(argument, value, 0.0 if argument.startswith("normalizer") else -math.inf, math.inf)
    if argument == "upstream" and value == 0:
        raise ValueError("upstream must not be 0: nothing could undo that factor; leave it at None")


def name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def exact(value: Any) -> Hashable:
    """A key of a plain value or a tuple of some, by type too: True, 1, 1.0 and -1.0 are four, 0.0 and -0.0 are two, and
    nan equals nan."""
    if isinstance(value, tuple):
        return type(value), *map(exact, value)
    return type(value), value.hex() if isinstance(value, float) else value


def number(
    where: str, argument: str, value: Any, least: float = -INFINITY, most: float = INFINITY, open_: bool = False
) -> float:
    """A finite number in ``[least, most]``, or ``(least, most]`` where ``open_``, as a float."""
    right = isinstance(value, NUMBERS) and not isinstance(value, bool) and least <= value <= most
    if not right or (open_ and value == least) or not -INFINITY < value < INFINITY:
        interval = f"{'(' if open_ or least == -INFINITY else '['}{least:g}, {most:g}{')' if most == INFINITY else ']'}"
        raise ValueError(f"{argument} of {where} must be a number in {interval}, got {value!r}")
    return float(value)


def bound(where: str, argument: str, value: Any, least: float = 0.0, open_: bool = False) -> float:
    """A number from ``least`` on, or infinity, which bounds nothing, as a float."""
    if type(value) is float and (value > least or (value == least and not open_)):
        return value
    return number(where, argument, value, least, open_=open_)


def choice(where: str, argument: str, value: Any, allowed: tuple[str, ...]) -> str:
    """The option ``value``, where it is one of those ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{argument} of {where} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def refuse(errors: Mapping[str, Any]) -> None:
    """A ValueError with the first message, of those in order, whose condition holds."""
    for message, holds in errors.items():
        if holds:
            raise ValueError(message)


def flag(argument: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {value!r}")
    return value


def check_backend(name: str | None) -> None:
    if name is not None and not (isinstance(name, str) and name in BACKENDS):
        raise ValueError(f"backend must be None or one of {', '.join(map(repr, BACKENDS))}, got {name!r}")


def check_precision(precision: str | None) -> None:
    if precision is not None and precision != "fp8":
        raise ValueError(f'precision must be None (of the operands\' own dtype) or "fp8", got {precision!r}')


def check_view_temperature(where: str, temperature: Any) -> None:
    if temperature is not None and not (type(temperature) in (int, float) and 0 < temperature < INFINITY):
        zero = isinstance(temperature, NUMBERS) and temperature == 0
        remedy = "; for T = 0 train on the argmax as the target instead" if zero else ""
        raise ValueError(f"temperature of {where} must be a positive number, got {temperature!r}{remedy}")


def nearest(name: Any, known: Iterable[str]) -> str:
    """The name that was probably meant, for the end of an error; empty where no name is like it."""
    found = difflib.get_close_matches(str(name), known, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def refuse_unknown(module: str, kind: str, given: Iterable[str], common: Iterable[str]) -> None:
    """Raises for options of ``chunked_head.<module>.<kind>`` that are neither its own nor ``common`` to all."""
    unknown = sorted(set(given) - set(common))
    if unknown:
        factory = getattr(sys.modules[f"{PACKAGE}.{module}"], kind)
        parameters = inspect.signature(factory).parameters.values()
        names = dict.fromkeys([*(p.name for p in parameters if p.kind is not p.VAR_KEYWORD), *common])
        meant = nearest(unknown[0], names)
        raise TypeError(f"{module}.{kind} has no option {unknown[0]!r}{meant}; its options are {', '.join(names)}")


def in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
