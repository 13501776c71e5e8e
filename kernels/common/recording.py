"""A sweep as a list of steps, recorded once and run again on other tensors.

Sweeps of equal sizes allocate tensors of the same sizes, launch the same kernels and multiply the same matrices; only
addresses differ. A ``Recorder`` observes one sweep. A tensor of the sweep is an input or comes from ``empty``. Each
argument of a step that is a tensor has a place: the tensor of the sweep that contains the argument, and an offset in
bytes. A ``Recording`` allocates such tensors again, computes the addresses, and runs the steps.

``Recorder.end`` returns None if a sweep cannot be recorded: a step's argument lies in no tensor of the sweep, but in
the result of a torch operator; inputs share memory; or an operator outside of the steps has written to a tensor of the
sweep, which the tensor's version shows.
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
from .launcher import COMPILATION_SETTINGS, LAUNCH_HOOKS, RUNTIME_SETTINGS, Compiled, Launcher
from .operands import described

MAX_STEPS = 4096  # maximum number of steps of a recording
ALIGNMENT = 16  # bytes, the alignment of pointers for which Triton specialises kernels
ALLOCATOR_ALIGNMENT = 512  # bytes, the alignment of torch's allocations
MAX_ADDRESSES = 64  # maximum number of addresses for which a descriptor's encoded fields are kept


class TensorPlace(NamedTuple):
    """A tensor within the memory of a slot, which is an input or an allocated tensor of the sweep."""

    slot: int  # index in ``Recorder.tensors``
    offset: int  # bytes from the slot's beginning to the tensor's
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def moved(self, slot: int, offset: int) -> "TensorPlace":
        """The same tensor at another slot and offset."""
        return self._replace(slot=slot, offset=offset)

    def view(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the tensor, a view of its slot. ``tensors``: one for each slot."""
        base = tensors[self.slot]
        begin_byte = base.storage_offset() * base.element_size() + self.offset
        first_element, remainder = divmod(begin_byte, self.dtype.itemsize)
        assert not remainder
        if base.dtype == self.dtype:
            return base.as_strided(self.shape, self.stride, first_element)
        return base.new_empty(0, dtype=self.dtype).set_(base.untyped_storage(), first_element, self.shape, self.stride)


def extent(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """The number of bytes from the first byte to the last byte of a strided tensor."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * itemsize


class EncodedDescriptor:
    """An argument of a kernel: a descriptor of the tensor at ``place``, with a cache of its encoded fields."""

    def __init__(self, place: TensorPlace, block: Sequence[int], fields_of: Callable[[Any], tuple] | None, count: int):
        """``block``: shape of the descriptor's block. ``fields_of``: returns the ``count`` fields that the kernel takes
        for a descriptor; None: the kernel takes the descriptor itself."""
        self.place, self.block, self.fields_of, self.num_fields = place, block, fields_of, count
        self.fields_by_address: dict[int, tuple] = {}  # by the tensor's address

    def fields_at(self, address: int, tensors: Sequence[torch.Tensor]) -> tuple:
        """Returns the encoded fields of a descriptor of the tensor, which lies at ``address``. Caches the fields if the
        kernel takes fields. ``tensors``: one for each slot."""
        descriptor = described(self.place.view(tensors), *self.block)
        if self.fields_of is None:
            return (descriptor,)
        if len(self.fields_by_address) >= MAX_ADDRESSES:
            self.fields_by_address.clear()
        self.fields_by_address[address] = fields = descriptor.fields.get(self.fields_of) or self.fields_of(descriptor)
        return fields


# the name of a list of the recorder ("constants", "pointers", "views" or "descriptors"), an index in the list, and the
# index of a descriptor's field, else 0
Argument = tuple[str, int, int]


class Recorder:
    """Collects the steps of a sweep on ``inputs`` while they run in this thread."""

    def __init__(self, inputs: Sequence[torch.Tensor]):
        self.tensors: list[torch.Tensor] = []  # inputs, then allocated tensors; referenced, so that addresses differ
        self.ranges: list[tuple[int, int]] = []  # for each tensor the addresses of its beginning and end
        self.versions: list[int] = []  # for each tensor its version if only recorded steps write to it
        self.constants: list[Any] = [None]  # arguments that are equal in all replays; the first stands for the stream
        self.pointers: list[tuple[int, int]] = []  # slot and offset of each pointer
        self.views: list[TensorPlace] = []  # tensors that are arguments of torch's functions
        self.descriptors: list[EncodedDescriptor] = []
        self.steps: list[tuple[Callable[..., Any], list[Argument]]] = []
        self.kernels: list[tuple[Launcher, Compiled]] = []
        self.is_refused = False
        for tensor in inputs:
            self.add_tensor(tensor)
        self.num_inputs = len(self.tensors)
        # inputs that share memory cannot be told apart
        ranges = sorted(begin_and_end for begin_and_end in self.ranges if begin_and_end[0] < begin_and_end[1])
        self.is_refused |= any(lower[1] > higher[0] for lower, higher in itertools.pairwise(ranges))

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """Gives the next slot to a tensor."""
        begin = tensor.data_ptr()
        self.tensors.append(tensor)
        self.ranges.append((begin, begin + extent(tensor.shape, tensor.stride(), tensor.element_size())))
        self.is_refused |= tensor.is_inference()  # an inference tensor has no version
        self.versions.append(0 if self.is_refused else tensor._version)

    def add_memory(self, tensor: torch.Tensor) -> None:
        """Gives the next slot to a tensor that the sweep has allocated."""
        self.add_tensor(tensor)
        self.is_refused |= not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT > 0

    def place_at(self, address: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> TensorPlace:
        """The place of a tensor that begins at ``address``. Refuses the sweep if no slot contains the tensor."""
        end = address + extent(shape, stride, dtype.itemsize)
        for slot, (begin, range_end) in enumerate(self.ranges):
            if begin <= address < range_end and end <= range_end:
                return TensorPlace(slot, address - begin, dtype, tuple(shape), tuple(stride))
        self.is_refused = True
        return TensorPlace(0, 0, dtype, tuple(shape), tuple(stride))

    def place_of(self, tensor: torch.Tensor) -> TensorPlace:
        """The place of a tensor. Refuses the sweep if no slot contains the tensor."""
        if tensor.numel() == 0:  # without memory, so that it must be the slot's tensor itself
            slot = next((slot for slot, slot_tensor in enumerate(self.tensors) if slot_tensor is tensor), None)
            self.is_refused |= slot is None
            return TensorPlace(slot or 0, 0, tensor.dtype, tuple(tensor.shape), tensor.stride())
        return self.place_at(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())

    def add_constant(self, value: Any) -> Argument:
        """Adds an argument that is equal in all replays."""
        self.constants.append(value)
        return "constants", len(self.constants) - 1, 0

    def pointer(self, tensor: torch.Tensor) -> Argument:
        """Notes the tensor's place in the recording, once; returns the kernel argument that stands for its address."""
        slot_and_offset = self.place_of(tensor)[:2]
        if slot_and_offset not in self.pointers:
            self.pointers.append(slot_and_offset)
        return "pointers", self.pointers.index(slot_and_offset), 0

    def view(self, tensor: torch.Tensor) -> Argument:
        """Adds the tensor itself as an argument of a function."""
        self.views.append(self.place_of(tensor))
        return "views", len(self.views) - 1, 0

    def descriptor(self, descriptor: Any, fields_of: Callable[[Any], tuple] | None) -> list[Argument]:
        """Adds a descriptor, and returns an argument for each field of ``fields_of(descriptor)``; one argument, the
        descriptor itself, if ``fields_of`` is None."""
        num_fields = 1 if fields_of is None else len(descriptor.fields.get(fields_of) or fields_of(descriptor))
        place = self.place_at(descriptor.base.data_ptr(), descriptor.base.dtype, descriptor.shape, descriptor.strides)
        self.descriptors.append(EncodedDescriptor(place, descriptor.block_shape, fields_of, num_fields))
        return [("descriptors", len(self.descriptors) - 1, field) for field in range(num_fields)]

    def record_launch(
        self,
        launcher: Launcher,
        grid: Sequence[int],
        arguments: Sequence[Any],
        compiled: Compiled,
        c_arguments: Sequence[Any],
    ) -> None:
        """Records a launch by a kernel's C function. ``arguments``: of the kernel, without its constants.
        ``c_arguments``: of the C function, with addresses, constants and the fields of descriptors."""
        remaining_arguments = iter(arguments)
        fields_of = dict(zip(launcher.descriptor_indices, compiled.fields, strict=True))  # by index
        step_arguments: list[Argument] = []
        for i, parameter in enumerate(launcher.kernel.params):
            argument = None if parameter.is_constexpr else next(remaining_arguments)
            if argument is not None and i in fields_of:
                step_arguments += self.descriptor(argument, fields_of[i])
            elif isinstance(argument, torch.Tensor):
                step_arguments.append(self.pointer(argument))
            else:
                step_arguments.append(self.add_constant(c_arguments[len(step_arguments)]))
        self.is_refused |= len(step_arguments) != len(c_arguments)
        prefix = [*map(self.add_constant, grid), ("constants", 0, 0), *map(self.add_constant, compiled.prefix)]
        run = compiled.run if compiled.is_unpacked else functools.partial(run_with_tuple, compiled.run, len(prefix))
        self.kernels.append((launcher, compiled))
        self.steps.append((run, prefix + step_arguments))

    def record_call(
        self, function: Callable[..., Any], *arguments: Any, written_tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        """Records a call of ``function``: a launch by Triton, or operators of torch. ``written_tensors``: the arguments
        to which operators have written; an argument is listed once for each write."""
        step_arguments: list[Argument] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                step_arguments.append(self.view(argument))
            elif hasattr(argument, "block_shape"):
                step_arguments += self.descriptor(argument, None)
            else:
                step_arguments.append(self.add_constant(argument))
        for tensor in written_tensors:
            self.versions[self.place_of(tensor).slot] += 1
        self.steps.append((function, step_arguments))

    def end(self, results: Sequence[torch.Tensor], num_sharing: int = 0) -> "Recording | None":
        """Returns the recording; None if the sweep cannot be recorded. A replay returns new tensors in place of
        ``results``. The first ``num_sharing`` new tensors may be views of one tensor."""
        places = [self.place_of(result) for result in results]
        are_complete_slots = all(
            self.tensors[place.slot].shape == result.shape
            and self.tensors[place.slot].dtype == result.dtype and result.is_contiguous()
            for place, result in zip(places, results, strict=True)
        )  # fmt: skip
        if self.is_refused or not are_complete_slots or len(self.steps) > MAX_STEPS:
            return None
        if any(tensor._version != version for tensor, version in zip(self.tensors, self.versions, strict=True)):
            return None
        return Recording(self, [place.slot for place in places], num_sharing)


def is_row(tensor: torch.Tensor, reference: torch.Tensor) -> bool:
    """True if ``tensor`` is an fp32 vector of the length of ``reference`` and has a multiple of ALIGNMENT bytes."""
    return tensor.dtype == torch.float32 and tensor.shape == reference.shape and tensor.nbytes % ALIGNMENT == 0


def run_with_tuple(run: Callable[..., Any], num_leading: int, *arguments: Any) -> None:
    """Calls the C function ``run`` with the first ``num_leading`` arguments one by one and the others as a tuple."""
    run(*arguments[:num_leading], arguments[num_leading:])


class Recording:
    """The allocations and steps of a sweep, without its tensors.

    A replay makes one list, the argument pool, of constants, addresses, views and fields of descriptors. Each step
    picks its arguments from the pool by index.
    """

    def __init__(self, recorder: Recorder, results: Sequence[int], num_sharing: int):
        """``results``: slots of the results, of which the first ``num_sharing`` may be views of one tensor."""
        # results have separate memory; all other tensors are in one block of bytes, freed at the end of the replay
        tensors, separate_slots = recorder.tensors, dict.fromkeys(s for s in results if s >= recorder.num_inputs)
        # results that may share memory and are vectors of one length become aligned rows of one matrix
        row_slots = [slot for slot in results[:num_sharing] if is_row(tensors[slot], reference=tensors[results[0]])]
        separate_slots = [slot for slot in separate_slots if slot not in row_slots]
        self.row_matrix_shape = (len(row_slots), tensors[row_slots[0]].numel()) if row_slots else None
        self.allocations = [(tensors[slot].shape, tensors[slot].dtype, tensors[slot].device) for slot in separate_slots]
        # by slot of the recorder: the slot of a replay, and the offset in bytes
        replay_places = {
            slot: (i, 0) for i, slot in enumerate([*range(recorder.num_inputs), *row_slots, *separate_slots])
        }
        block_slot, block_end = len(replay_places), 0
        for slot, tensor in enumerate(tensors):
            if slot not in replay_places:
                replay_places[slot] = block_slot, block_end
                block_end += -(-tensor.nbytes // ALLOCATOR_ALIGNMENT) * ALLOCATOR_ALIGNMENT
        self.allocations.append((torch.Size([block_end]), torch.uint8, tensors[-1].device))

        def replay_place(slot: int, offset: int) -> tuple[int, int]:
            replay_slot, begin = replay_places[slot]
            return replay_slot, begin + offset

        self.constants, self.results = recorder.constants, [replay_places[slot][0] for slot in results]
        self.pointers = [replay_place(*pointer) for pointer in recorder.pointers]
        self.views = [place.moved(*replay_place(*place[:2])) for place in recorder.views]
        self.descriptors = recorder.descriptors  # the recorder ends here
        for encoded in self.descriptors:
            encoded.place = encoded.place.moved(*replay_place(*encoded.place[:2]))
        self.kernels = recorder.kernels  # a reference, since Triton unloads kernels without one
        self.launchers = list(dict.fromkeys([launcher for launcher, _ in recorder.kernels]))
        self.hooks = [launcher.kernel.pre_run_hooks for launcher in self.launchers]
        # how many elements of the argument pool each argument takes
        pool_sizes = [1] * (len(self.constants) + len(self.pointers) + len(self.views))
        pool_sizes += [encoded.num_fields for encoded in self.descriptors]
        pool_indices = list(itertools.accumulate(pool_sizes, initial=0))
        first_index = {"constants": 0, "pointers": len(self.constants)}
        first_index["views"] = first_index["pointers"] + len(self.pointers)
        first_index["descriptors"] = first_index["views"] + len(self.views)

        def getter(arguments: Sequence[Argument]) -> Callable[[Sequence[Any]], tuple]:
            return operator.itemgetter(
                *[pool_indices[first_index[kind] + index] + field for kind, index, field in arguments]
            )

        self.steps = [(run, getter(arguments)) for run, arguments in recorder.steps]

    def usable(self) -> bool:
        """True if no hook is set and no setting is changed, so that Triton would only launch compiled kernels."""
        has_hooks = LAUNCH_HOOKS[0] or LAUNCH_HOOKS[1] or any(self.hooks)
        return not (RUNTIME_SETTINGS or COMPILATION_SETTINGS or has_hooks) or all(
            launcher.direct() for launcher in self.launchers
        )

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Runs the steps and returns the sweep's results. ``inputs``: of the recorded shapes, dtypes and strides.
        Returns None, and runs no step, if the recording is not usable or memory allocated for it is not aligned."""
        if not self.usable():
            return None
        new_tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in self.allocations]
        result_rows: Sequence[torch.Tensor] = ()
        if self.row_matrix_shape is not None:
            device = new_tensors[-1].device
            result_rows = torch.empty(self.row_matrix_shape, dtype=torch.float32, device=device).unbind()
        tensors = [*inputs, *result_rows, *new_tensors]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if functools.reduce(operator.or_, addresses[len(inputs) :], 0) % ALIGNMENT:
            return None
        argument_pool = self.constants.copy()
        if self.launchers:
            argument_pool[0] = triton.runtime.driver.active.get_current_stream(torch.cuda.current_device())
        argument_pool += [addresses[slot] + offset for slot, offset in self.pointers]
        if self.views:
            argument_pool += [place.view(tensors) for place in self.views]
        for encoded in self.descriptors:
            address = addresses[encoded.place.slot] + encoded.place.offset
            argument_pool += encoded.fields_by_address.get(address) or encoded.fields_at(address, tensors)
        for run, get_arguments in self.steps:
            run(*get_arguments(argument_pool))
        return [tensors[slot] for slot in self.results]


@contextmanager
def recording(inputs: Sequence[torch.Tensor]) -> Iterator[Recorder]:
    """A context in which a ``Recorder`` observes the sweep that this thread runs."""
    recorder = RECORDERS[get_ident()] = Recorder(inputs)
    try:
        yield recorder
    finally:
        del RECORDERS[get_ident()]
