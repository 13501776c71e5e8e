"""A cache of answers about users' functions, which holds no reference to what they close over."""

import contextlib
import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Hashable
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...kernels.common.cache import Cache

Function = Callable[..., Tensor]
Result = TypeVar("Result")

PLAIN = (type(None), bool, int, complex, torch.dtype, torch.device, CodeType)
MOST_VALUES = 256  # of a function's contents that are looked into
MOST_ITEMS = 8  # of a list or dict, which may be a log that grows at every call
MOST_QUESTIONS = 16  # of one function, such as its options
# by question: of functions, and of methods by their object, as long as these live; and of those made anew, by contents
KNOWN: "weakref.WeakKeyDictionary[Any, Cache[Hashable, Any]]" = weakref.WeakKeyDictionary()
ALIKE: Cache[Hashable, Any] = Cache(256)


def known(function: Function, question: Hashable, find: Callable[[], Result]) -> Result:
    """Result of ``find`` for a function: found once, and once for all of the same code over equal values."""
    owner: Any = function
    code = None
    if isinstance(function, MethodType):
        owner, code = function.__self__, getattr(function.__func__, "__code__", None)
    of_owner: Cache[Hashable, Any] = Cache(MOST_QUESTIONS)
    if type(owner).__eq__ is object.__eq__:  # else an equal one might be taken for it
        with contextlib.suppress(TypeError):  # of what cannot be referred to weakly
            of_owner = KNOWN.setdefault(owner, of_owner)
    found: Result = of_owner.made((code, question), lambda: ALIKE.made((Contents(function).key, question), find))
    return found


class Same:
    """Key that equals only keys of the object itself, while it lives."""

    def __init__(self, value: Any):
        self.reference, self.address = weakref.ref(value), id(value)

    def __hash__(self) -> int:
        return self.address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and (value := self.reference()) is not None and other.reference() is value


class Contents:
    """Parts of values, functions' closures, defaults and objects included. ``key``: equal where code and types are the
    same and plain values are equal; a float enters with its sign, a tensor with dtype, device and dimensions, an
    opaque object as itself. ``devices``: those of tensors, of globals that are read too."""

    def __init__(self, *values: Any):
        self.devices: list[torch.device] = []
        self.left = MOST_VALUES
        self.inside: list[int] = []
        self.key: Hashable = tuple(map(self.of, values))

    def of(self, value: Any) -> Hashable:
        kind = type(value)
        self.left -= 1
        if kind in PLAIN:
            return kind, value
        if kind in (str, bytes):
            return kind, len(value), hash(value)  # none of them is kept, however long
        if kind is float:
            return kind, math.isfinite(value), (value > 0) - (value < 0)
        if isinstance(value, Tensor):
            self.devices.append(value.device)
            return "tensor", value.dtype, value.device, value.dim()
        if id(value) in self.inside:
            return "again", self.inside.index(id(value))
        parts = parts_of(value)
        if parts is None or len(parts) > self.left:
            try:
                return Same(value)
            except TypeError:
                return object()  # equal to nothing
        self.inside.append(id(value))
        found = Same(kind), *map(self.of, parts)
        if kind is FunctionType:
            for name in value.__code__.co_names:
                self.of(value.__globals__.get(name))  # for devices alone
        self.inside.pop()
        return found


class Plain:
    """An object with attributes and nothing else."""


def parts_of(value: Any) -> tuple[Any, ...] | None:
    """All that a value consists of, None where its type is opaque."""
    kind = type(value)
    if kind is FunctionType:
        cells = [None if cell == CellType() else cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, *cells, value.__defaults__, value.__kwdefaults__
    if kind is MethodType:
        return value.__func__, value.__self__
    if kind is functools.partial:
        return value.func, value.args, value.keywords
    if isinstance(value, tuple):
        return (*value,)
    if isinstance(value, list):
        return (*value[:MOST_ITEMS],)
    if isinstance(value, dict):
        items = list(itertools.islice(value.items(), MOST_ITEMS))
        return tuple(itertools.chain(*items))
    if dataclasses.is_dataclass(kind):
        return tuple([getattr(value, each.name, None) for each in dataclasses.fields(kind)])
    if kind is SimpleNamespace or (kind.__basicsize__ == Plain.__basicsize__ and hasattr(value, "__dict__")):
        return *value.__dict__, *value.__dict__.values()
    return None
