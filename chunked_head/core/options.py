"""Options as they should be, or an error that names the owner, the option and what came."""

import difflib
import inspect
import sys
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch

INFINITY = float("inf")
PLAIN = frozenset({type(None), bool, int, float, str})  # types whose values are equal where they mean the same
NUMBERS = (int, float)  # not ``int | float``, which torch.compile of torch 2.9 cannot take

PACKAGE = __name__.partition(".")[0]


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
    """One of several."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{argument} of {where} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def flag(argument: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {value!r}")
    return value


def check_temperature(where: str, temperature: Any) -> None:
    if temperature is not None and not (type(temperature) in (int, float) and 0 < temperature < INFINITY):
        zero = isinstance(temperature, NUMBERS) and temperature == 0
        remedy = "; for T = 0 train on the argmax as the target instead" if zero else ""
        raise ValueError(f"temperature of {where} must be a positive number, got {temperature!r}{remedy}")


def nearest(name: Any, known: Iterable[str]) -> str:
    """The name that was probably meant, for the end of an error; empty where no name is like it."""
    found = difflib.get_close_matches(str(name), known, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def split_numbers(values: tuple[Any, ...], numbers: list[float]) -> tuple[Hashable, ...] | None:
    """A key of plain values, or tuples of some, in which every float is replaced by its type and appended to
    ``numbers``: what decides which code runs (strings, flags, None, counts) stays, by type too. None for any other
    value."""
    key: list[Any] = [type(values)]
    for value in values:
        kind = type(value)
        if kind is float:
            numbers.append(value)
            key.append(kind)
        elif kind in PLAIN:
            key += kind, value
        elif isinstance(value, tuple) and (inside := split_numbers(value, numbers)) is not None:
            key.append(inside)
        else:
            return None
    return tuple(key)


def join_numbers(value: Any, numbers: Iterator[Any]) -> Any:
    """``value`` with the next of ``numbers`` in place of each float that ``split_numbers`` finds in it."""
    if type(value) is float:
        return next(numbers)
    if not isinstance(value, tuple):
        return value
    items = [join_numbers(item, numbers) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def refuse_unknown(module: str, kind: str, given: Iterable[str], common: Iterable[str]) -> None:
    """Raises for options of ``chunked_head.<module>.<kind>`` that are neither its own nor ``common`` to all."""
    unknown = sorted(set(given) - set(common))
    if unknown:
        factory = getattr(sys.modules[f"{PACKAGE}.{module}"], kind)
        parameters = inspect.signature(factory).parameters.values()
        names = dict.fromkeys([*(p.name for p in parameters if p.kind is not p.VAR_KEYWORD), *common])
        meant = nearest(unknown[0], names)
        raise TypeError(f"{module}.{kind} has no option {unknown[0]!r}{meant}; its options are {', '.join(names)}")
