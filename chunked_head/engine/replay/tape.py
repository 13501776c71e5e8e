"""What a function did on tensors, to be done again on others like them without the Python in between: launches,
operations of torch, and memory.

A tape holds no tensor. A tensor is known by where it lies: in an input's memory, or in memory that an operation of the
tape has made. So a tape is good for inputs of the same shapes, strides, dtypes and alignment to 16 bytes, and only
where the function does nothing else that depends on its tensors: what asks the device for a number is not recorded.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.private import private
from ...kernels.common.recording import RECORDING

ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
# operations whose results depend on more than their arguments, or on what tensors hold
UNKNOWN = ("nondeterministic_seeded", "data_dependent_output", "dynamic_output_shape")


class NotRecordedError(Exception):
    """Of what a tape cannot hold."""


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
        base: Tensor = held[self.slot]
        if self.whole:
            return base
        memory = base.untyped_storage()
        first = (base.data_ptr() - memory.data_ptr() + self.offset) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(memory, first, self.shape, self.stride)


class Address:
    """Stands for a tensor of which only the address is asked."""

    __slots__ = ("address",)

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        return self.address


Step = Callable[[list[Any], list[int]], None]  # of what slots hold, and the addresses of that
Check = Callable[[], bool]  # whether a launch may be done again


def allocation(slot: int, like: Tensor) -> Step:
    shape, stride, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device

    def step(held: list[Any], addresses: list[int]) -> None:
        held[slot] = made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        addresses[slot] = made.data_ptr()

    return step


def mapped(arguments: Sequence[Any], each: Callable[[Any], Any]) -> list[Any]:
    """An operation's arguments, one by one; a list's as well."""
    return [[each(part) for part in one] if isinstance(one, list) else each(one) for one in arguments]


def operation(
    function: Callable[..., Any], arguments: Sequence[Any], names: Sequence[str], slots: Sequence[tuple[int, int]]
) -> Step:
    """``names``: of the last arguments. ``slots``: which of the results are kept, and where."""
    first = len(arguments) - len(names)

    def step(held: list[Any], addresses: list[int]) -> None:
        given = mapped(arguments, lambda one: one.tensor(held) if isinstance(one, Place) else one)
        results = function(*given[:first], **dict(zip(names, given[first:], strict=True)))
        for at, slot in slots:
            held[slot] = result = results[at] if isinstance(results, (tuple, list)) else results
            addresses[slot] = result.data_ptr()

    return step


def launch(
    start: Callable[..., None],
    arguments: Sequence[Any],
    pointers: Sequence[tuple[int, int, int]],
    descriptors: Sequence[tuple[int, int, int]],
) -> Step:
    """``pointers`` and ``descriptors``: which of the arguments, their slots and bytes into them."""
    template, descriptor_class = list(arguments), type(arguments[descriptors[0][0]]) if descriptors else object
    for i, _, _ in pointers:
        template[i] = 0
    known = [
        (i, slot, offset, {name: value for name, value in vars(arguments[i]).items() if name != "base"})
        for i, slot, offset in descriptors
    ]
    for i, *_ in known:
        template[i] = None

    def step(held: list[Any], addresses: list[int]) -> None:
        given = template.copy()
        for i, slot, offset in pointers:
            given[i] = addresses[slot] + offset
        for i, slot, offset, values in known:
            given[i] = descriptor = object.__new__(descriptor_class)
            descriptor.__dict__.update(values, base=Address(addresses[slot] + offset))
        start(*given)

    return step


class Tape:
    """``tape(inputs)`` does what has been recorded, and returns what the slots hold that are ``kept``."""

    def __init__(
        self, steps: Sequence[tuple[Step, Sequence[int]]], slots: int, kept: Set[int], checks: Sequence[Check]
    ):
        """``steps`` with the slots that each reads or makes."""
        last = {slot: i for i, (_, used) in enumerate(steps) for slot in used}
        last.update(dict.fromkeys(kept, len(steps)))
        # memory is let go of after the last step that reads it
        self.steps = [
            (step, tuple([slot for slot in set(used) if last[slot] == i])) for i, (step, used) in enumerate(steps)
        ]
        self.slots, self.checks = slots, tuple(dict.fromkeys(checks))

    def usable(self) -> bool:
        """Whether all that it launches may be launched as it does."""
        return all(check() for check in self.checks)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Any]:
        made = self.slots - len(inputs)
        held: list[Any] = [*inputs, *[None] * made]
        addresses = [*[tensor.data_ptr() for tensor in inputs], *[0] * made]
        for step, done in self.steps:
            step(held, addresses)
            for slot in done:
                held[slot] = None
        return held


class Recorder:
    """Records what is done inside of its ``with``, unless there is a ``failure``."""

    def __init__(self, inputs: Sequence[Tensor]):
        self.failure: str | None = None
        self.mode: Any = None
        self.bases: list[Form] = []  # by slot
        self.spans: dict[int, tuple[int, int]] = {}  # addresses of slots that nothing newer lies over
        self.inputs = len(inputs)
        self.steps: list[tuple[Step, Sequence[int]]] = []
        self.checks: list[Check] = []
        for tensor in inputs:
            if not tensor.numel():
                self.failure = "an input is empty"
                return
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            end = begin + (last + 1) * tensor.element_size()
            if (begin, end) in self.spans.values():
                self.bases.append(form_of(tensor))  # the same again, which inputs of the tape are to be as well
            elif any(begin < other[1] and other[0] < end for other in self.spans.values()):
                self.failure = "inputs share memory"
                return
            else:
                self.add_slot(tensor, begin, end)

    def __enter__(self) -> "Recorder":
        mode = private("utils._python_dispatch.TorchDispatchMode")
        if mode is None:
            self.failure = "this torch does not show its operations"
        else:
            # a class for each: its method is what torch calls
            method = {"__torch_dispatch__": lambda mode, *call: self.dispatched(*call)}
            self.mode = type("Watch", mode, method)()
            self.mode.__enter__()
            RECORDING.recorder = self
        return self

    def __exit__(self, *raised: Any) -> None:
        self.stop(self.failure)

    def stop(self, failure: str | None) -> None:
        """Records no more; what is done from here on, such as a compiled function, finds no mode around it."""
        self.failure = failure
        if self.mode is not None:
            mode, self.mode, RECORDING.recorder = self.mode, None, None
            mode.__exit__(None, None, None)

    def add_slot(self, tensor: Tensor, begin: int, end: int) -> int:
        for slot in [slot for slot, span in self.spans.items() if begin < span[1] and span[0] < end]:
            if slot < self.inputs:
                raise NotRecordedError("memory of an input is made anew")
            del self.spans[slot]  # what lay there has been let go of
        slot = len(self.bases)
        self.bases.append(form_of(tensor))
        self.spans[slot] = begin, end
        return slot

    def slot_of(self, address: int) -> tuple[int, int]:
        for slot, (begin, end) in self.spans.items():
            if begin <= address < end:
                return slot, address - begin
        raise NotRecordedError("memory that is neither an input's nor made on the way")

    def place(self, tensor: Tensor) -> Place:
        if not tensor.numel():
            raise NotRecordedError("an empty tensor")
        slot, offset = self.slot_of(tensor.data_ptr())
        form = form_of(tensor)
        return Place(slot, offset, offset == 0 and form == self.bases[slot], *form)

    def dispatched(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if self.failure is None and RECORDING.recorder is self:
            try:
                self.record(func, args, kwargs, results)
            except NotRecordedError as error:
                self.failure = f"{func}: {error}"
        return results

    def record(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Any) -> None:
        arguments, given = [*args, *kwargs.values()], list[Tensor]()
        mapped(arguments, lambda one: given.append(one) if isinstance(one, Tensor) else None)
        results = results if isinstance(results, (tuple, list)) else [results]
        made = [(i, result) for i, result in enumerate(results) if isinstance(result, Tensor)]
        if not given and not made:
            return  # of dtypes alone
        schema = func._schema
        # an index by numbers has a size of its own; one by truth values has not
        by_numbers = schema.name == "aten::index" and all(tensor.dtype != torch.bool for tensor in given[1:])
        unknown = not by_numbers and any(getattr(torch.Tag, name) in func.tags for name in UNKNOWN)
        if func.namespace != "aten" or not made or unknown:
            raise NotRecordedError("not a function of tensors alone")
        if schema.name in ALLOCATIONS:
            ((_, result),) = made
            if not result.numel():
                return  # what reads it is not recorded
            slot = self.new_slot(result)
            self.steps.append((allocation(slot, result), (slot,)))
            return
        memory = {tensor.untyped_storage().data_ptr() for tensor in given}
        fresh = [(i, result) for i, result in made if result.untyped_storage().data_ptr() not in memory]
        if not fresh and not schema.is_mutable:
            return  # a view
        places = mapped(arguments, lambda one: self.place(one) if isinstance(one, Tensor) else one)
        used = list[int]()
        mapped(places, lambda one: used.append(one.slot) if isinstance(one, Place) else None)
        slots = [(i, self.new_slot(result)) for i, result in fresh]
        self.steps.append((operation(func, places, tuple(kwargs), slots), [*used, *[slot for _, slot in slots]]))

    def new_slot(self, tensor: Tensor) -> int:
        memory = tensor.untyped_storage()
        begin = memory.data_ptr()
        if not tensor.numel() or tensor.data_ptr() != begin:
            raise NotRecordedError("a result that is empty, or not where its memory begins")
        return self.add_slot(tensor, begin, begin + memory.nbytes())

    def launched(
        self,
        start: Callable[..., None],
        arguments: Sequence[Any],
        pointers: Sequence[int],
        descriptors: Sequence[int],
        check: Check,
    ) -> None:
        """A launch of a compiled kernel, ``start(*arguments)``: which of the arguments are addresses or descriptors,
        and whether it may be done again like this."""
        if any(isinstance(argument, Tensor) for argument in arguments):
            self.failure = "a launch: a tensor that is no pointer"
        if self.failure is not None:
            return
        try:
            at = [(i, *self.slot_of(arguments[i])) for i in pointers if arguments[i] is not None]
            of = [(i, *self.slot_of(arguments[i].base.data_ptr())) for i in descriptors if arguments[i] is not None]
        except NotRecordedError as error:
            self.failure = f"a launch: {error}"
            return
        self.steps.append((launch(start, arguments, at, of), [slot for _, slot, _ in (*at, *of)]))
        self.checks.append(check)

    def tape(self, kept: Set[int]) -> Tape:
        """Of all that has been recorded, which keeps what lies in these slots."""
        return Tape(self.steps, len(self.bases), kept, self.checks)
