"""A training framework as a record: the versions that were tested, and the names in it that ours replace. A computation
in the place of a module's own, inside of the module's hooks. Options of another library's function as one table: this
library's option for each, or the reason of a refusal."""

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from torch import nn

from ..call.options import CHECKS, OptionsModule, check_options
from ..core.checks import flag, nearest

Place = tuple[str, str]  # a framework's module, and a name in it
REPLACED: dict[Place, tuple[Any, Any]] = {}  # theirs and ours


@dataclass(frozen=True)
class Framework:
    """A training framework.

    Attributes:
        package: its name on the package index.
        lowest, below: tested are versions of at least ``lowest`` and smaller than ``below``.
        module: its module, whose ``__version__`` counts where that has been imported (a checkout).
        places: what this library replaces, each with the names of its parameters, in order, without ``ctx``. Empty:
            they are not compared.
        bound: modules that have the same names too, where they are imported already.
    """

    package: str
    lowest: str
    below: str
    module: str = ""
    places: Mapping[Place, Sequence[str]] = field(default_factory=dict)
    bound: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises ImportError where it is not installed, RuntimeError where its version was not tested."""
        wanted = f"pip install '{self.package}>={self.lowest},<{self.below}'"
        version = getattr(sys.modules.get(self.module), "__version__", None)
        if version is None:
            try:
                version = metadata.version(self.package)
            except metadata.PackageNotFoundError:
                raise ImportError(f"{self.package} is not installed: {wanted}") from None
        if not numbers(self.lowest) <= numbers(version) < numbers(self.below):
            raise RuntimeError(
                f"{self.package} {version} is none of the versions that were tested, from {self.lowest} to below "
                f"{self.below}; it may compute its losses otherwise, and nothing was changed. {wanted}, or a "
                "chunked_head that knows it"
            )

    def theirs(self) -> list[Any]:
        """The framework's functions in their places. Raises where version or parameters are not those tested."""
        self.check()
        found = []
        for (path, name), wanted in self.places.items():
            function = REPLACED.get((path, name), [getattr(importlib.import_module(path), name, None)])[0]
            forward = getattr(function, "forward", None)
            takes = list(inspect.signature(forward or function).parameters) if callable(function) and wanted else []
            if function is None or takes[forward is not None :] != list(wanted):
                raise RuntimeError(
                    f"{path}.{name} takes ({', '.join(takes[forward is not None :])}) instead of ({', '.join(wanted)}) "
                    "or is missing; nothing was changed. Install a chunked_head that knows it"
                )
            found.append(function)
        return found

    def replace(self, *ours: Any) -> None:
        """Puts one of ours in each place; before that, ``theirs`` raises what is wrong."""
        for place, theirs, mine in zip(self.places, self.theirs(), ours, strict=True):
            REPLACED[place] = theirs, mine
            self.put(place, mine)

    def give_back(self) -> None:
        """Puts the framework's functions back; raises where somebody has replaced ours since."""
        for path, name in REPLACED.keys() & self.places.keys():
            theirs, ours = REPLACED[path, name]
            found = getattr(importlib.import_module(path), name)
            if found is not ours:
                raise RuntimeError(f"{path}.{name} is {found!r}, not what chunked_head put there; undo that first")
            self.put((path, name), theirs)
            del REPLACED[path, name]

    def put(self, place: Place, value: Any) -> None:
        for path in (place[0], *self.bound):
            module = sys.modules.get(path)
            if module is not None and hasattr(module, place[1]):
                setattr(module, place[1], value)

    @contextlib.contextmanager
    def replaced(self, *ours: Any) -> Iterator[None]:
        """``replace`` for the length of a ``with`` block; what stood there before stands there after it."""
        before = [REPLACED[place][1] for place in self.places if place in REPLACED]
        self.replace(*ours)
        try:
            yield
        finally:
            if before:
                self.replace(*before)
            else:
                self.give_back()


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version: ``(0, 4, 11)`` of ``"0.4.11.dev0"``."""
    release = re.match(r"\d+(\.\d+)*", version)
    return () if release is None else tuple(int(part) for part in release[0].split("."))


def call_through(module: nn.Module, compute: Callable[..., Any], *args: Any) -> Any:
    """``compute(*args)`` where ``module(*args)`` would run its forward: between the module's hooks.

    Hooks are what gathers a sharded weight before its use (FSDP, Megatron's overlapped parameter gather) and frees it
    again, and makes both known to autograd.
    """
    before = vars(module).get("forward")
    module.forward = compute
    try:
        return module(*args)
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def check_named(options: Mapping[str, Any], known: Collection[str], note: str = "") -> None:
    """Raises what is wrong with options by keyword: one of another name, or a value that is wrong by itself."""
    for name, value in options.items():
        if name not in known:
            names = ", ".join(sorted(known))
            raise TypeError(f"unknown option {name!r}; options are {names}{note}{nearest(name, set(known))}")
        CHECKS[name](value)


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
