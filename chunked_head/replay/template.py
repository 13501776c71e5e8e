"""Records with places where their tensors were: the same record is made again of other tensors."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.demand import Structure
from ..core.stats import Demand
from ..plan.plans import Plan
from ..stores import Backend
from .recorder import NotRecordedError
from .steps import Place

# what holds no tensor of a call by its kind: records of programs, and functions, which are the library's own
CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, type, frozenset, range, slice, FunctionType, Backend,
    torch.dtype, torch.device, torch.Size, Demand, Plan, Structure,
)  # fmt: skip
Build = Callable[[Any], Any]  # of what the tape's slots hold


class Template:
    """``build(held)``: the record. ``slots``: those that it is made of."""

    def __init__(
        self,
        value: Any,
        place: Callable[[Tensor], Place],
        known: Mapping[int, Build] | None = None,
        tensor: Callable[[Place, Any], Tensor] = Place.view,
    ):
        """``known``: by identity what is built otherwise; ``tensor``: how tensors are."""
        self.places: list[Place] = []
        self.known: dict[int, Build | None] = dict(known or {})
        self.place, self.tensor = place, tensor
        self.build: Build = self.of(value) or (lambda held: value)
        self.slots = {place.slot for place in self.places}
        del self.place, self.known  # which hold what was recorded

    def of(self, value: Any) -> Build | None:
        """None for what holds no tensor."""
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, CONSTANTS):
            return None
        if isinstance(value, Tensor):
            self.places.append(self.place(value))
            return functools.partial(self.tensor, self.places[-1])
        self.known[id(value)] = found = self.of_parts(value)
        return found

    def of_parts(self, value: Any) -> Build | None:
        names: list[str] = []
        make: Callable[[Any], Any]
        if isinstance(value, Mapping):
            names, parts, make = list(value), list(value.values()), dict
        elif isinstance(value, (tuple, list)):
            parts, make = list(value), getattr(value, "_make", type(value))
        elif is_dataclass(value):
            names, parts, make = list(vars(value)), list(vars(value).values()), functools.partial(record, type(value))
        else:
            raise NotRecordedError(f"a {type(value).__name__}")
        builds = [self.of(part) for part in parts]
        if all(build is None for build in builds) and not isinstance(value, (list, Mapping)):
            return None  # a list or mapping is the caller's to change
        each = [build or constant(part) for build, part in zip(builds, parts, strict=True)]
        if names:
            return lambda held: make(zip(names, [build(held) for build in each], strict=True))
        return lambda held: make([build(held) for build in each])


def constant(value: Any) -> Build:
    return lambda held: value


def record(kind: type, attributes: Iterable[tuple[str, Any]]) -> Any:
    """Of a dataclass, without what its ``__init__`` would do."""
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made
