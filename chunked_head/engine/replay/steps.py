"""The steps of a tape: memory, operations of torch and launches, as they are recorded and as they are done again.

A tensor is known by where it lies: in an input's memory, or in memory that a step has made.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.common.recording import Launched

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

    def tensor(self, held: Sequence[Any]) -> Tensor:
        """No view of what the slot holds, as autograd sees it: whoever gets it may change it in place."""
        base: Tensor = held[self.slot]
        if self.whole:
            return base
        memory = base.untyped_storage()
        first = (base.data_ptr() - memory.data_ptr() + self.offset) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(memory, first, self.shape, self.stride)

    def view(self, held: Sequence[Any]) -> Tensor:
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

    @classmethod
    def of(
        cls, what: Launched, pointers: list[tuple[int, int, int]], descriptors: list[tuple[int, int, int]]
    ) -> "Launch":
        arguments = list(what.arguments)
        attributes = [(type(arguments[i]), dict(vars(arguments[i]), base=None)) for i, *_ in descriptors]
        for i, *_ in (*pointers, *descriptors):
            arguments[i] = None
        return cls(what.run, arguments, what.stream_at, pointers, descriptors, attributes)

    @property
    def used(self) -> tuple[int, ...]:
        return tuple([slot for _, slot, _ in (*self.pointers, *self.descriptors)])

    def moved(self, parts: Mapping[int, int], memory: int) -> "Launch":
        """With slots that are parts of the memory in slot ``memory``, by the byte where each begins."""
        pointers, descriptors = (
            [(i, memory, parts[slot] + offset) if slot in parts else (i, slot, offset) for i, slot, offset in each]
            for each in (self.pointers, self.descriptors)
        )
        return self._replace(pointers=pointers, descriptors=descriptors)


Record = Allocation | Operation | Launch
Step = Callable[[list[Any], list[int], int], None]  # of what slots hold, their addresses, and the stream


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


def operation(record: Operation) -> Step:
    function, arguments, names, kept = record
    first = len(arguments) - len(names)

    def step(held: list[Any], addresses: list[int], stream: int) -> None:
        given = mapped(arguments, lambda one: one.view(held) if isinstance(one, Place) else one)
        results = function(*given[:first], **dict(zip(names, given[first:], strict=True)))
        for at, slot in kept:
            held[slot] = result = results[at] if isinstance(results, (tuple, list)) else results
            addresses[slot] = result.data_ptr()

    return step


def launch(record: Launch) -> Step:
    run, arguments, stream_at, pointers, descriptors, described = record
    known = [(*at, *kind) for at, kind in zip(descriptors, described, strict=True)]

    def step(held: list[Any], addresses: list[int], stream: int) -> None:
        given = arguments.copy()
        given[stream_at] = stream
        for i, slot, offset in pointers:
            given[i] = addresses[slot] + offset
        for i, slot, offset, kind, attributes in known:
            descriptor: Any = object.__new__(kind)
            given[i] = descriptor
            descriptor.__dict__.update(attributes, base=Address(addresses[slot] + offset))
        run(*given)

    return step
