"""A sweep as a list of steps, recorded once and run again on other tensors.

Sweeps of equal sizes allocate tensors of the same sizes, launch the same kernels and multiply the same matrices; only
addresses differ. A ``Recorder`` observes one sweep. For each tensor among the arguments of a step it notes the place:
the input or allocated tensor whose memory it is in, and the offset in bytes. A ``Recording`` allocates such tensors
again, computes the addresses, and runs the steps.

``Recorder.finish`` returns None if a sweep cannot be recorded: a step's tensor is in the memory of no input and no
tensor from ``empty``, or of two of them; or an operator of torch has written to one of them, which its version shows. A
result of another operator has memory of its own, so that a step that reads it is noticed.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
import triton

from ...core.memory import RECORDERS
from .launcher import AROUND, COMPILATION, RUNTIME, Compiled, Launcher
from .operands import described

MOST_STEPS = 4096
ALIGNED = 16  # bytes: the alignment for which Triton specialises kernels
BLOCK_BYTES = 512  # bytes: the alignment of torch's allocator
MOST_ADDRESSES = 64  # most addresses for which a descriptor's encoded fields are kept


class Place(NamedTuple):
    """A tensor in the memory of another one."""

    slot: int  # index of the tensor in whose memory it is
    offset: int  # bytes from that tensor's beginning
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def moved(self, slot: int, offset: int) -> "Place":
        return self._replace(slot=slot, offset=offset)

    def view(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        base = tensors[self.slot]
        begin = base.storage_offset() * base.element_size() + self.offset
        first_element, remainder = divmod(begin, self.dtype.itemsize)
        assert not remainder
        if base.dtype == self.dtype:
            return base.as_strided(self.shape, self.stride, first_element)
        return base.new_empty(0, dtype=self.dtype).set_(base.untyped_storage(), first_element, self.shape, self.stride)


def extent(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes from the beginning of a tensor's first element to the end of its last."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * itemsize


class Encoded(NamedTuple):
    """A descriptor among a kernel's arguments, and its fields by address."""

    place: Place
    block: tuple[int, ...]
    fields_of: Callable[[Any], tuple] | None  # descriptor -> the fields that a compiled kernel takes; None: it takes it
    count: int  # number of fields
    fields_by_address: dict[int, tuple]

    def fields_at(self, address: int, tensors: Sequence[torch.Tensor]) -> tuple:
        descriptor = described(self.place.view(tensors), *self.block)
        if self.fields_of is None:
            return (descriptor,)
        if len(self.fields_by_address) >= MOST_ADDRESSES:
            self.fields_by_address.clear()
        self.fields_by_address[address] = fields = descriptor.fields.get(self.fields_of) or self.fields_of(descriptor)
        return fields


Argument = tuple[str, int, int]  # a kind of argument, its index among those of the kind, and a descriptor's field


class Recorder:
    """Collects the steps of a sweep on ``inputs`` while they run in this thread."""

    def __init__(self, inputs: Sequence[torch.Tensor]):
        self.tensors: list[torch.Tensor] = []  # inputs, then allocated ones; kept, so that addresses differ
        self.ranges: list[tuple[int, int]] = []  # for each tensor the addresses of its beginning and its end
        self.versions: list[int] = []
        self.constants: list[Any] = [None]  # the first stands for the stream
        self.pointers: list[tuple[int, int]] = []  # slot and offset of each pointer
        self.views: list[Place] = []
        self.descriptors: list[Encoded] = []
        self.steps: list[tuple[Callable[..., Any], list[Argument]]] = []
        self.kernels: list[tuple[Launcher, Compiled]] = []
        self.refused = False
        for tensor in inputs:
            self.add_tensor(tensor)
        self.inputs = len(self.tensors)
        ranges = sorted(span for span in self.ranges if span[0] < span[1])
        self.refused |= any(lower[1] > higher[0] for lower, higher in itertools.pairwise(ranges))

    def add_tensor(self, tensor: torch.Tensor) -> None:
        begin = tensor.data_ptr()
        self.tensors.append(tensor)
        self.ranges.append((begin, begin + extent(tensor.shape, tensor.stride(), tensor.element_size())))
        self.refused |= tensor.is_inference()  # an inference tensor has no version
        self.versions.append(0 if self.refused else tensor._version)

    def add_memory(self, tensor: torch.Tensor) -> None:
        self.add_tensor(tensor)
        self.refused |= not tensor.is_contiguous() or tensor.data_ptr() % ALIGNED > 0

    def place_at(self, address: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Place:
        end = address + extent(shape, stride, dtype.itemsize)
        for slot, (begin, range_end) in enumerate(self.ranges):
            if begin <= address < range_end and end <= range_end:
                return Place(slot, address - begin, dtype, tuple(shape), tuple(stride))
        self.refused = True
        return Place(0, 0, dtype, tuple(shape), tuple(stride))

    def place_of(self, tensor: torch.Tensor) -> Place:
        if tensor.numel() == 0:  # an empty tensor has no memory
            slot = next((slot for slot, recorded in enumerate(self.tensors) if recorded is tensor), None)
            self.refused |= slot is None
            return Place(slot or 0, 0, tensor.dtype, tuple(tensor.shape), tensor.stride())
        return self.place_at(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())

    def add_constant(self, value: Any) -> Argument:
        self.constants.append(value)
        return "constants", len(self.constants) - 1, 0

    def pointer(self, tensor: torch.Tensor) -> Argument:
        pointer = self.place_of(tensor)[:2]
        if pointer not in self.pointers:
            self.pointers.append(pointer)
        return "pointers", self.pointers.index(pointer), 0

    def view(self, tensor: torch.Tensor) -> Argument:
        self.views.append(self.place_of(tensor))
        return "views", len(self.views) - 1, 0

    def descriptor(self, descriptor: Any, fields_of: Callable[[Any], tuple] | None) -> list[Argument]:
        count = 1 if fields_of is None else len(descriptor.fields.get(fields_of) or fields_of(descriptor))
        place = self.place_at(descriptor.base.data_ptr(), descriptor.base.dtype, descriptor.shape, descriptor.strides)
        self.descriptors.append(Encoded(place, tuple(descriptor.block_shape), fields_of, count, {}))
        return [("descriptors", len(self.descriptors) - 1, field) for field in range(count)]

    def launched(
        self,
        launcher: Launcher,
        grid: Sequence[int],
        arguments: Sequence[Any],
        compiled: Compiled,
        c_arguments: Sequence[Any],
    ) -> None:
        """Records a launch by the C function. ``c_arguments``: its arguments, with constants and fields of
        descriptors."""
        remaining, places = iter(arguments), dict(zip(launcher.descriptors, compiled.fields, strict=True))
        recorded: list[Argument] = []
        for i, parameter in enumerate(launcher.kernel.params):
            argument = None if parameter.is_constexpr else next(remaining)
            if argument is not None and i in places:
                recorded += self.descriptor(argument, places[i])
            elif isinstance(argument, torch.Tensor):
                recorded.append(self.pointer(argument))
            else:
                recorded.append(self.add_constant(c_arguments[len(recorded)]))
        self.refused |= len(recorded) != len(c_arguments)
        leading = [*map(self.add_constant, grid), ("constants", 0, 0), *map(self.add_constant, compiled.prefix)]
        run = compiled.run if compiled.in_a_row else functools.partial(at_once, compiled.run, len(leading))
        self.kernels.append((launcher, compiled))
        self.steps.append((run, leading + recorded))

    def called(self, function: Callable[..., Any], *arguments: Any, written: Sequence[torch.Tensor] = ()) -> None:
        """Records a call of a function: a launch by Triton; or an operation of torch, with the tensors ``written`` that
        it has written to, once each."""
        recorded: list[Argument] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                recorded.append(self.view(argument))
            elif hasattr(argument, "block_shape"):
                recorded += self.descriptor(argument, None)
            else:
                recorded.append(self.add_constant(argument))
        for tensor in written:
            self.versions[self.place_of(tensor).slot] += 1
        self.steps.append((function, recorded))

    def end(self, results: Sequence[torch.Tensor], sharing: int = 0) -> "Recording | None":
        """The recording, or None if the sweep cannot be recorded. A replay returns new tensors in place of ``results``,
        of which the first ``sharing`` may be views of one tensor."""
        places = [self.place_of(result) for result in results]
        fits = all(
            self.tensors[place.slot].shape == result.shape
            and self.tensors[place.slot].dtype == result.dtype and result.is_contiguous()
            for place, result in zip(places, results, strict=True)
        )  # fmt: skip
        if self.refused or not fits or len(self.steps) > MOST_STEPS:
            return None
        if any(tensor._version != version for tensor, version in zip(self.tensors, self.versions, strict=True)):
            return None
        return Recording(self, [place.slot for place in places], sharing)


def is_row(tensor: torch.Tensor, reference: torch.Tensor) -> bool:
    """True for an fp32 vector as long as ``reference``, of a multiple of ALIGNED bytes."""
    return tensor.dtype == torch.float32 and tensor.shape == reference.shape and tensor.nbytes % ALIGNED == 0


def at_once(run: Callable[..., Any], leading: int, *arguments: Any) -> None:
    """Calls ``run``, a C function that takes the kernel's arguments as a tuple, after ``leading`` others."""
    run(*arguments[:leading], arguments[leading:])


class Recording:
    """The allocations and steps of a sweep. Holds no tensor.

    A replay makes one list of constants, addresses, views and fields of descriptors. Each step picks its arguments from
    this list by index.
    """

    def __init__(self, recorder: Recorder, results: Sequence[int], sharing: int):
        # results have memory of their own; all other tensors are in one block of bytes, freed at the end of the replay
        separate, tensors = dict.fromkeys(slot for slot in results if slot >= recorder.inputs), recorder.tensors
        # vectors that may share memory are rows of one tensor, each of them aligned
        rows = [slot for slot in results[:sharing] if is_row(tensors[slot], reference=tensors[results[0]])]
        separate = [slot for slot in separate if slot not in rows]
        self.rows = (len(rows), tensors[rows[0]].numel()) if rows else None
        self.allocations = [(tensors[slot].shape, tensors[slot].dtype, tensors[slot].device) for slot in separate]
        places = {slot: (i, 0) for i, slot in enumerate([*range(recorder.inputs), *rows, *separate])}
        block, block_end = len(places), 0
        for slot, tensor in enumerate(tensors):
            if slot not in places:
                places[slot] = block, block_end
                block_end += -(-tensor.nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self.allocations.append((torch.Size([block_end]), torch.uint8, tensors[-1].device))

        def moved(slot: int, offset: int) -> tuple[int, int]:
            number, begin = places[slot]
            return number, begin + offset

        self.constants, self.results = recorder.constants, [places[slot][0] for slot in results]
        self.pointers = [moved(*pointer) for pointer in recorder.pointers]
        self.views = [place.moved(*moved(*place[:2])) for place in recorder.views]
        self.descriptors = [
            encoded._replace(place=encoded.place.moved(*moved(*encoded.place[:2]))) for encoded in recorder.descriptors
        ]
        self.kernels = recorder.kernels  # a reference, since Triton unloads kernels without one
        self.launchers = list(dict.fromkeys([launcher for launcher, _ in recorder.kernels]))
        self.hooks = [launcher.kernel.pre_run_hooks for launcher in self.launchers]
        counts = [1] * (len(self.constants) + len(self.pointers) + len(self.views))
        index = list(itertools.accumulate([*counts, *[encoded.count for encoded in self.descriptors]], initial=0))
        first_index = {"constants": 0, "pointers": len(self.constants)}
        first_index["views"] = first_index["pointers"] + len(self.pointers)
        first_index["descriptors"] = first_index["views"] + len(self.views)

        def picked(arguments: Sequence[Argument]) -> Callable[[Sequence[Any]], tuple]:
            return operator.itemgetter(
                *[index[first_index[kind] + number] + field for kind, number, field in arguments]
            )

        self.steps = [(run, picked(arguments)) for run, arguments in recorder.steps]

    def usable(self) -> bool:
        """True where Triton would do no more than launch compiled kernels: no hook, no changed setting."""
        unusual = RUNTIME or COMPILATION or AROUND[0] or AROUND[1] or any(self.hooks)
        return not unusual or all(launcher.direct() for launcher in self.launchers)

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Runs the steps on other inputs of equal kinds, and returns the sweep's results. Returns None, before any
        step, if the recording is not usable or an allocated tensor is not aligned."""
        if not self.usable():
            return None
        allocated = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in self.allocations]
        rows = torch.empty(self.rows, dtype=torch.float32, device=allocated[-1].device).unbind() if self.rows else ()
        tensors = [*inputs, *rows, *allocated]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if functools.reduce(operator.or_, addresses[len(inputs) :], 0) % ALIGNED:
            return None
        pool = self.constants.copy()
        if self.launchers:
            pool[0] = triton.runtime.driver.active.get_current_stream(torch.cuda.current_device())
        pool += [addresses[slot] + offset for slot, offset in self.pointers]
        if self.views:
            pool += [place.view(tensors) for place in self.views]
        for encoded in self.descriptors:
            address = addresses[encoded.place.slot] + encoded.place.offset
            pool += encoded.fields_by_address.get(address) or encoded.fields_at(address, tensors)
        for run, arguments in self.steps:
            run(*arguments(pool))
        return [tensors[slot] for slot in self.results]


@contextmanager
def recording(inputs: Sequence[torch.Tensor]) -> Iterator[Recorder]:
    """A context in which a ``Recorder`` observes the sweep that this thread runs."""
    recorder = RECORDERS[get_ident()] = Recorder(inputs)
    try:
        yield recorder
    finally:
        del RECORDERS[get_ident()]
