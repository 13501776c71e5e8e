"""The steps of a tape: memory, operations of torch and launches, as they are recorded and as they are done again.

A tensor is known by where it lies: in an input's memory, or in memory that a step has made.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.common.recording import CALL_SIZES, Launched

Held = Sequence[Any] | Mapping[int, Any]  # what slots hold
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, stride, dtype


def form_of(tensor: Tensor) -> Form:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


class Place(NamedTuple):
    """A tensor within the memory of a slot."""

    slot: int
    offset: int  # bytes
    whole: bool  # it is what the slot holds
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def form(self) -> Form:
        return self.shape, self.stride, self.dtype

    def reaches(self, end: int) -> bool:
        """Whether it is all of a slot's memory, whose bytes end there."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self.offset == 0 and (last + 1) * self.dtype.itemsize == end

    def tensor(self, held: Held) -> Tensor:
        """No view of what the slot holds, as autograd sees it: whoever gets it may change it in place."""
        base: Tensor = held[self.slot]
        if self.whole:
            return base
        memory = base.untyped_storage()
        first = (base.data_ptr() - memory.data_ptr() + self.offset) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(memory, first, self.shape, self.stride)

    def view(self, held: Held) -> Tensor:
        """The same in a third of the time, for whoever reads it, or writes it here and now."""
        base: Tensor = held[self.slot]
        if self.whole:
            return base
        if base.dtype != self.dtype:
            return self.tensor(held)
        return base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset // self.dtype.itemsize)


class Address:
    """Stands for a tensor of which only the address is asked."""

    __slots__ = ("address",)

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class Allocation(NamedTuple):
    slot: int
    form: Form
    device: torch.device
    bytes: int

    @property
    def used(self) -> tuple[int, ...]:
        return (self.slot,)


class Operation(NamedTuple):
    function: Callable[..., Any]
    arguments: list[Any]  # places for tensors
    names: tuple[str, ...]  # of the last arguments
    results: list[tuple[int, int]]  # which of them are kept, and in which slots

    @property
    def used(self) -> tuple[int, ...]:
        found = [slot for _, slot in self.results]
        mapped(self.arguments, lambda one: found.append(one.slot) if isinstance(one, Place) else None)
        return tuple(found)


class Launch(NamedTuple):
    run: Callable[..., None]
    arguments: list[Any]  # without those that are of tensors
    stream_at: int
    pointers: list[tuple[int, int, int]]  # which of the arguments, their slots, and bytes into them
    descriptors: list[tuple[int, int, int]]
    described: list[tuple[type, dict[str, Any]]]  # kind and attributes of each descriptor but its tensor
    sizes: list[tuple[int, int]]  # which of the arguments are the call's sizes, and which of these

    @classmethod
    def of(
        cls, what: Launched, pointers: list[tuple[int, int, int]], descriptors: list[tuple[int, int, int]]
    ) -> "Launch":
        arguments = list(what.arguments)
        attributes = [(type(arguments[i]), dict(vars(arguments[i]), base=None)) for i, *_ in descriptors]
        for i, *_ in (*pointers, *descriptors):
            arguments[i] = None
        return cls(what.run, arguments, what.stream_at, pointers, descriptors, attributes, list(what.sizes))

    @property
    def numbers(self) -> list[tuple[int, int, int]]:
        """Which of the arguments are numbers among a tape's addresses, of which the last are the call's sizes; where
        each stands there, and what is added."""
        return [*self.pointers, *((i, which - len(CALL_SIZES), 0) for i, which in self.sizes)]

    @property
    def used(self) -> tuple[int, ...]:
        return tuple([slot for _, slot, _ in (*self.pointers, *self.descriptors)])

    def moved(self, shared: Mapping[int, Place]) -> "Launch":
        """With slots that are parts of other slots' memory."""
        pointers, descriptors = (
            [(i, shared[slot].slot, shared[slot].offset + offset) if slot in shared else (i, slot, offset)
             for i, slot, offset in each]
            for each in (self.pointers, self.descriptors)
        )  # fmt: skip
        return self._replace(pointers=pointers, descriptors=descriptors)


Record = Allocation | Operation | Launch
# of what slots hold, their addresses and the call's sizes behind them, and the stream
Step = Callable[[list[Any], list[int], int], None]


def mapped(arguments: Sequence[Any], each: Callable[[Any], Any]) -> list[Any]:
    """An operation's arguments, one by one; a list's as well."""
    return [[each(part) for part in one] if isinstance(one, list) else each(one) for one in arguments]


def step_of(record: Record) -> Step:
    if isinstance(record, Launch):
        return launch(record)
    return allocation(record) if isinstance(record, Allocation) else operation(record)


def allocation(record: Allocation) -> Step:
    slot, (shape, stride, dtype), device, _ = record

    def step(held: list[Any], addresses: list[int], stream: int) -> None:
        held[slot] = made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        addresses[slot] = made.data_ptr()

    return step


# functions of torch that do the same with less work of the host
PLAINER: dict[Any, Callable[..., Any]] = {torch.ops.aten.mm.out: torch.mm, torch.ops.aten.addmm.out: torch.addmm}


def operation(record: Operation) -> Step:
    function, arguments, names, kept = record
    function, first = PLAINER.get(function, function), len(arguments) - len(names)

    def step(held: list[Any], addresses: list[int], stream: int) -> None:
        given = mapped(arguments, lambda one: one.view(held) if isinstance(one, Place) else one)
        results = function(*given[:first], **dict(zip(names, given[first:], strict=True)))
        for at, slot in kept:
            held[slot] = result = results[at] if isinstance(results, (tuple, list)) else results
            addresses[slot] = result.data_ptr()

    return step


def launch(record: Launch) -> Step:
    run, arguments, stream_at, _, descriptors, described, _ = record
    numbers = record.numbers
    known = [(*at, *kind) for at, kind in zip(descriptors, described, strict=True)]

    def step(held: list[Any], addresses: list[int], stream: int) -> None:
        given = arguments.copy()
        given[stream_at] = stream
        for i, slot, offset in numbers:
            given[i] = addresses[slot] + offset
        for i, slot, offset, kind, attributes in known:
            descriptor: Any = object.__new__(kind)
            given[i] = descriptor
            descriptor.__dict__.update(attributes, base=Address(addresses[slot] + offset))
        run(*given)

    return step
