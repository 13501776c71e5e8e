"""Watches what a function does on tensors, and makes a tape of it."""

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ..core.private import private
from ..kernels.common.recording import RECORDING, Launched
from .steps import Allocation, Form, Launch, Operation, Place, Record, form_of, mapped
from .tape import Check, Tape

ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
# operations whose results depend on more than their arguments, or on what tensors hold
UNKNOWN = ("nondeterministic_seeded", "data_dependent_output", "dynamic_output_shape")


class NotRecordedError(Exception):
    """Of what a tape cannot hold."""


class Recorder:
    """Records what is done inside of its ``with``, unless there is a ``failure``."""

    def __init__(self, inputs: Sequence[Tensor]):
        self.failure: str | None = None
        self.mode: Any = None
        self.bases: list[Form] = []  # by slot
        self.spans: dict[int, tuple[int, int]] = {}  # addresses of slots that nothing newer lies over
        self.inputs = len(inputs)
        self.records: list[Record] = []
        self.checks: list[Check] = []
        self.stream: Callable[[], int] | None = None  # of what is launched
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
            self.records.append(Allocation(slot, form_of(result), result.device, result.untyped_storage().nbytes()))
            return
        memory = {tensor.untyped_storage().data_ptr() for tensor in given}
        fresh = [(i, result) for i, result in made if result.untyped_storage().data_ptr() not in memory]
        if not fresh and not schema.is_mutable:
            return  # a view
        places = mapped(arguments, lambda one: self.place(one) if isinstance(one, Tensor) else one)
        slots = [(i, self.new_slot(result)) for i, result in fresh]
        self.records.append(Operation(func, places, tuple(kwargs), slots))

    def new_slot(self, tensor: Tensor) -> int:
        memory = tensor.untyped_storage()
        begin = memory.data_ptr()
        if not tensor.numel() or tensor.data_ptr() != begin:
            raise NotRecordedError("a result that is empty, or not where its memory begins")
        return self.add_slot(tensor, begin, begin + memory.nbytes())

    @property
    def operated(self) -> set[int]:
        """Slots that operations of torch read or made."""
        return set().union(*[record.used for record in self.records if isinstance(record, Operation)])

    def launched(self, what: Launched, pointers: Sequence[int], descriptors: Sequence[int], *checks: Check) -> None:
        """Which of the arguments are addresses or descriptors, and whether it may be done again like this."""
        arguments = what.arguments
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
        self.records.append(Launch.of(what, at, of))
        self.checks += checks
        self.stream = what.stream

    def tape(self, kept: Set[int], later: Set[int] = frozenset()) -> Tape:
        """Of all that has been recorded, which keeps what lies in these slots."""
        return Tape(self.records, len(self.bases), kept, later, self.checks, self.stream)
