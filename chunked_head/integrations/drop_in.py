"""Options of another library's function, as one table: this library's option for each, or the reason of a refusal."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..call.options import OptionsModule, check_options
from ..core.options import flag

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
