"""Checks of a call's arguments, which raise before the call does any work. The text of an error names the argument,
what it must be, what it is, and a remedy."""

import difflib
import inspect
import math
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from .divergences import SOFT_TARGETS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of operands
INFINITY = float("inf")
PLAIN = frozenset({type(None), bool, int, float, str})  # types of options that caches compare by value
BACKENDS = (None, "triton", "torch")
NUMBERS = (int, float)  # not ``int | float``, which torch.compile of torch 2.9 cannot take
MAX_ROUNDED_LOGPROB = 0.5  # bound of log-probabilities, above 0 by the rounding of 16-bit logits below 256
SWAPPED = "hidden and weight look swapped: hidden comes first"  # remedy of an error

PACKAGE = __name__.partition(".")[0]


def is_dtensor(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor" and isinstance(tensor, torch.Tensor)


def check_operands(rows: Tensor, weight: Tensor | None, target: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """Checks shapes, dtypes and devices of a head's operands, or of logits and their targets. ``rows``: hidden states;
    logits if ``weight`` is None. Returns the dtype of the matmuls, or of the logits."""
    rows_name = "logits" if weight is None else "hidden"
    tensors = {rows_name: rows, "weight": weight, "target": target, "bias": bias}
    for argument, tensor in tensors.items():
        check_tensor(argument, tensor, optional=argument != rows_name)
    if weight is None:
        check_shape("logits", rows, rows.dim() >= 1 and rows.shape[-1] > 0, "[..., vocab]")
    else:
        check_shape("hidden", rows, rows.dim() >= 1, "[..., hidden]")
        if weight.dim() != 2:
            remedy = SWAPPED if are_swapped(rows, weight, target) else "pass lm_head.weight"
            check_shape("weight", weight, False, "[vocab, hidden]", remedy)
        if rows.shape[-1] != weight.shape[1] or 0 in weight.shape:
            raise ValueError(
                f"weight must be [vocab, hidden] with the {rows.shape[-1]} columns of hidden {tuple(rows.shape)}, got "
                f"{tuple(weight.shape)}; {weight_remedy(rows, weight)}"
            )
        if bias is not None:
            check_shape("bias", bias, bias.shape == weight.shape[:1], f"({weight.shape[0]},), one per class")
    if target is not None:
        check_ids("target", target)
        leading_shape = tuple(rows.shape[:-1])
        if target.shape != leading_shape:
            remedy = target_remedy(rows, weight, target)
            check_shape("target", target, False, f"{leading_shape}, the leading shape of {rows_name}", remedy)
    for argument, tensor in tensors.items():
        check_device(argument, tensor, rows.device, rows_name)
    return matmul_dtype({name: tensor for name, tensor in tensors.items() if tensor is not None and name != "target"})


def weight_remedy(rows: Tensor, weight: Tensor) -> str:
    """The remedy in the error for a weight and hidden states with different numbers of columns."""
    if 0 in weight.shape or rows.shape[-1] != weight.shape[0]:
        return "if a sharding framework left an empty or partial weight, gather it first"
    remedies = [
        "the weight looks transposed: pass weight.T",
        "hidden looks like logits, which logits_loss and logits_logprobs take",
    ]
    likely_remedy, other_remedy = remedies if weight.shape[0] <= weight.shape[1] else reversed(remedies)
    return f"{likely_remedy}; or {other_remedy}"


def are_swapped(rows: Tensor, weight: Tensor, target: Tensor | None) -> bool:
    """True if hidden states and weight are probably swapped: the weight has as many rows as there are targets."""
    is_same_width = rows.dim() == 2 and weight.dim() > 1 and rows.shape[-1] == weight.shape[-1]
    return is_same_width and target is not None and math.prod(weight.shape[:-1]) == target.numel()


def target_remedy(rows: Tensor, weight: Tensor | None, target: Tensor) -> str:
    """The remedy in the error for targets whose shape differs from ``rows.shape[:-1]``."""
    rows_name, leading, shape = "logits" if weight is None else "hidden", tuple(rows.shape[:-1]), tuple(target.shape)
    if weight is not None and are_swapped(rows, weight, target):
        return SWAPPED
    if leading and shape and shape == (*leading[:-1], leading[-1] - 1):
        return (
            f"it looks shifted by hand: pass all labels with shift=1, or {rows_name}[{':, ' * (len(leading) - 1)}:-1]"
        )
    return "reshape it" if math.prod(leading) == target.numel() else f"pass one id for each row of {rows_name}"


def matmul_dtype(operands: Mapping[str, Tensor]) -> torch.dtype:
    """Returns the dtype of the matmuls: under autocast, with a weight, autocast's dtype; else the operands' own.

    ``operands``: by name, hidden states or logits first. TypeError if dtypes differ or are not in DTYPES. ValueError
    for operands on the meta device."""
    for argument, tensor in operands.items():
        check_dtype(argument, tensor.dtype)
    rows_name, rows = next(iter(operands.items()))
    device = rows.device.type
    if device == "meta":
        raise ValueError(f"{rows_name} is on the meta device, where there is nothing to compute; move it to a real one")
    if "weight" in operands and torch.is_autocast_enabled(device) and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        check_dtype("the autocast dtype", dtype)
        return dtype
    for argument, tensor in operands.items():
        if tensor.dtype != rows.dtype:
            raise TypeError(
                f"{argument} must have the dtype of {rows_name}, {name(rows.dtype)}, got {name(tensor.dtype)}; "
                f"cast one of them or run under torch.autocast({device!r})"
            )
    return rows.dtype


def check_ids(argument: str, target: Tensor) -> None:
    """Raises TypeError unless ``target`` is int64."""
    if target.dtype != torch.int64:
        remedy = "use target.long()"
        if target.is_floating_point():
            remedy = (
                "ids need .long(); for class probabilities p [..., vocab] call linear_loss or logits_loss with "
                f'target=None, {SOFT_TARGETS} and batch={{"teacher_logits": p.log()}}'
            )
        raise TypeError(f"{argument} must hold token ids of dtype int64, got {name(target.dtype)}; {remedy}")


def check_weights(
    argument: str, weights: Any, shape: tuple[int, ...] | None = None, device: torch.device | None = None
) -> None:
    """Checks the type of class weights or token weights. A ``shape`` or ``device`` of None is not checked."""
    check_tensor(argument, weights, optional=False)
    if shape is not None:
        check_shape(argument, weights, weights.shape == shape, f"{shape}", "nothing is broadcast")
    if weights.requires_grad or not weights.is_floating_point():
        raise ValueError(
            f"{argument} must be floating-point and takes no gradient, got {weights.dtype} with "
            f"requires_grad={weights.requires_grad}; pass .float().detach()"
        )
    if device is not None:
        check_device(argument, weights, device, "the other operands")


def check_logprobs(argument: str, values: Tensor, most: float = MAX_ROUNDED_LOGPROB) -> None:
    """Raises ValueError if a value is above ``most`` or all values look like probabilities. Reads the values, so that
    ``values`` must be on a CPU."""
    if not values.numel():
        return
    smallest, largest = map(float, values.aminmax())  # a nan compares as False
    if smallest >= 0 and MAX_ROUNDED_LOGPROB / 2 < largest <= 1:
        raise ValueError(
            f"{argument} must hold log-probabilities, at most 0, got numbers in [{smallest:g}, {largest:g}], "
            "which look like probabilities; pass their .log()"
        )
    if largest > most:
        raise ValueError(f"{argument} must hold log-probabilities, at most 0, got {largest:g}; negate them if losses")


def check_tensor(argument: str, tensor: Tensor | None, optional: bool) -> None:
    if tensor is None and optional:
        return
    if not isinstance(tensor, Tensor):
        remedy = ""
        if isinstance(tensor, torch.nn.Module):
            remedy = "; pass its .weight, and its .bias as bias= where it has one"
        raise TypeError(f"{argument} must be a torch.Tensor, got {type(tensor).__name__}{remedy}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{argument} must be a dense tensor, got layout {tensor.layout}; pass {argument}.to_dense()")
    if is_dtensor(tensor):
        raise TypeError(
            f"{argument} is a DTensor, as a head's operands and their targets alone may be; pass .full_tensor(), or "
            ".to_local() with parallel=VocabParallel(...) or TokenParallel(...)"
        )


def check_shape(argument: str, tensor: Tensor, is_right: bool, expected: str, remedy: str = "") -> None:
    if not is_right:
        raise ValueError(
            f"{argument} must have shape {expected}, got {tuple(tensor.shape)}" + (f"; {remedy}" if remedy else "")
        )


def check_dtype(argument: str, dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{argument} must be a torch.dtype, such as torch.float32, got {dtype!r}")
    if dtype not in DTYPES:
        raise TypeError(f"{argument} must be one of {', '.join(map(name, DTYPES))}, got {dtype}")


def check_device(argument: str, tensor: Tensor | None, device: torch.device, operand: str) -> None:
    if tensor is not None and tensor.device != device:
        raise ValueError(f"{argument} is on {tensor.device}, {operand} on {device}; move one of them")


def check_temperature(temperature: float | Tensor) -> None:
    """Checks the value of a temperature that is a number, and the dtype of a tensor with a number per token."""
    if not isinstance(temperature, Tensor):
        number(None, "temperature", temperature, 0.0, is_open=True)
        return
    if is_dtensor(temperature):
        raise TypeError("temperature is a DTensor; pass .to_local(): that of this rank's tokens")
    if not temperature.is_floating_point():
        raise TypeError(f"temperature must be a number or floating-point, got {name(temperature.dtype)}; cast it")
    if temperature.requires_grad:
        raise ValueError("temperature takes no gradient here; pass it .detach()ed")


def check_softcap(softcap: float | None) -> None:
    if softcap is not None:
        number(None, "softcap", softcap, 0.0, is_open=True)


def check_int(argument: str, value: int, least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be an int, got {value!r}")
    least = -(1 << 63) if least is None else least
    if not least <= value < 1 << 63:
        expected = f"at least {least}" if value < least else "below 2 ** 63"
        raise ValueError(f"{argument} must be {expected}, got {value}")


def check_factor(argument: str, value: float | Tensor | None, device: torch.device | None = None) -> None:
    """Checks a normalizer, a coefficient or an upstream gradient: None, a number, or a 0-d tensor on ``device``. If
    ``device`` is None, the tensor may be on any device."""
    if value is None:
        return
    if isinstance(value, Tensor):
        is_on_device = value.device == (device or value.device)
        if value.dim() != 0 or value.is_complex() or value.requires_grad or not is_on_device:
            raise ValueError(
                f"{argument} must be a number or a 0-d tensor{f' on {device}' if device else ''} that needs no "
                f"gradient, got shape {tuple(value.shape)} of {value.dtype} on {value.device}, "
                f"requires_grad={value.requires_grad}"
            )
        return
    number(None, argument, value, 0.0 if argument.startswith("normalizer") else -INFINITY)
    if argument == "upstream" and value == 0:
        raise ValueError("upstream must not be 0: nothing could undo that factor; leave it at None")


def name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def number(
    owner: str | None,
    argument: str,
    value: Any,
    least: float = -INFINITY,
    most: float = INFINITY,
    is_open: bool = False,
) -> float:
    """Returns ``value`` as a float. TypeError if it is no number; ValueError if it is infinite, below ``least`` or
    above ``most``. With ``is_open``, ``least`` itself raises too. ``owner``: in the error, the name of the function
    that has the argument; None for an option of calls."""
    is_number = isinstance(value, NUMBERS) and not isinstance(value, bool)
    if is_number and least <= value <= most and not (is_open and value == least) and -INFINITY < value < INFINITY:
        return float(value)
    full_name = argument if owner is None else f"{argument} of {owner}"
    interval = f"{'(' if is_open or least == -INFINITY else '['}{least:g}, {most:g}{')' if most == INFINITY else ']'}"
    remedy = "; for T = 0 train on the argmax as the target" if argument.endswith("temperature") else ""
    raise (ValueError if is_number else TypeError)(f"{full_name} must be a number in {interval}, got {value!r}{remedy}")


def bound(owner: str, argument: str, value: Any, least: float = 0.0, is_open: bool = False) -> float:
    """Returns ``value`` as a float, which may be infinity. Raises like ``number`` for a value below ``least``; with
    ``is_open`` also for ``least``."""
    if type(value) is float and (value > least or (value == least and not is_open)):
        return value
    return number(owner, argument, value, least, is_open=is_open)


def choice(owner: str | None, argument: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """Returns ``value``, a string or None. ValueError if it is not in ``allowed``. ``owner`` as in ``number``."""
    if not (value is None or isinstance(value, str)) or value not in allowed:
        full_name = argument if owner is None else f"{argument} of {owner}"
        raise ValueError(f"{full_name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def refuse(errors: Mapping[str, Any]) -> None:
    """Raises ValueError with the first message whose condition is true. ``errors``: conditions by message."""
    for message, is_wrong in errors.items():
        if is_wrong:
            raise ValueError(message)


def flag(argument: str, value: Any) -> bool:
    """Returns ``value``. Raises TypeError unless it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {value!r}")
    return value


def nearest(name: Any, names: Iterable[str]) -> str:
    """A suggestion for the end of an error's text: the name most similar to ``name``; "" if no name is similar."""
    similar_names = difflib.get_close_matches(str(name), names, 1)
    return f"; did you mean {similar_names[0]!r}?" if similar_names else ""


# by an option's name that another library or function has: the option of ours that replaces it, and the remedy's text
# for functions that have our option
REMEDIES_BY_OPTION = {
    "cu_seqlens": ("segment_lengths", "pass segment_lengths=cu_seqlens.cpu(), which may be cumulated"),
    "num_items_in_batch": ("normalizer", "pass normalizer=num_items_in_batch"),
    "temperature": ("label_smoothing", "linear_loss takes it: linear_loss(..., losses.cross_entropy(), temperature=T)"),
    "label_smoothing": ("loss", "pass the loss losses.cross_entropy(label_smoothing=...)"),
    "class_weights": ("loss", "pass the loss losses.cross_entropy(class_weights=...)"),
    "z_loss": ("normalizer", "add it to the loss: + z_loss * losses.z_loss()"),
    "beta": ("rollout", "add the KL to the loss: + beta * losses.kl_to_reference()"),
}


def answer_names(module: str, hints: Mapping[str, str]) -> None:
    """Gives a module a ``__getattr__`` that raises AttributeError for a missing name, with a remedy or a similar name.
    ``hints``: for each remedy the missing names that get it, separated by spaces, in small letters without ``_``."""
    package, remedies = sys.modules[module], {name: remedy for remedy, names in hints.items() for name in names.split()}

    def raise_for(name: str) -> NoReturn:
        remedy = remedies.get(name.lower().replace("_", ""))
        hint = f"; that is {remedy}" if remedy else "" if name.startswith("__") else nearest(name, package.__all__)
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")

    # through vars, since type checkers that saw a __getattr__ would accept every name
    vars(package)["__getattr__"] = raise_for


def remedy_for(unknown: Any, options: Collection[str]) -> str:
    """A remedy for the end of an error's text about the option ``unknown``, which is not in ``options``."""
    required_option, remedy = REMEDIES_BY_OPTION.get(unknown, ("", ""))
    return f"; {remedy}" if required_option in options else nearest(unknown, options)


def refuse_unknown(module: str, factory: str, options: Iterable[str], common: Iterable[str]) -> None:
    """Raises TypeError for an option that the factory ``chunked_head.<module>.<factory>`` does not take. ``common``:
    options that every factory takes."""
    unknown = sorted(set(options) - set(common))
    if unknown:
        parameters = inspect.signature(getattr(sys.modules[f"{PACKAGE}.{module}"], factory)).parameters.values()
        names = dict.fromkeys([*(p.name for p in parameters if p.kind is not p.VAR_KEYWORD), *common])
        hint = remedy_for(unknown[0], names)
        raise TypeError(f"{module}.{factory} has no option {unknown[0]!r}{hint}; its options are {', '.join(names)}")


def in_a_line(error: BaseException) -> str:
    """The type and text of an error, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def mismatch(cached_name: str, made_for: Any, used_for: Any) -> RuntimeError:
    """Returns the error for a cached object that a call of another kind has made: two kinds of calls share a key."""
    return RuntimeError(
        f"{cached_name} was made for {made_for} and is used for {used_for}: two kinds of calls share a key, which is a "
        "mistake in chunked_head and none of yours; please report it with the losses, metrics and options of the "
        "calls before"
    )
