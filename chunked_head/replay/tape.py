"""What a function did on tensors, to be done again on others like them without the Python in between: launches,
operations of torch, and memory.

A tape holds no tensor. It is good for inputs of the same shapes, strides, dtypes and alignment to 16 bytes, and only
where the function does nothing else that depends on its tensors: what asks the device for a number is not recorded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from .steps import Allocation, Held, Launch, Operation, Place, Record, Step, mapped, step_of

Check = Callable[[], bool]  # whether a launch may be done again
# the most bytes of a block that only kernels read for it to share an allocation: with those that stay, with the others
LASTING, PASSING = 1 << 18, 1 << 25
ALIGNMENT = 512  # bytes, as torch's own allocations


class Tape:
    """``tape(inputs)`` does what has been recorded, and returns what the slots hold that are ``kept``. What is asked
    for ``later``, if at all, may share its memory with other such (``memory``)."""

    def __init__(
        self,
        records: Sequence[Record],
        slots: int,
        kept: Set[int],
        later: Set[int],
        checks: Sequence[Check],
        stream: Callable[[], int] | None,
    ):
        """``stream``: the current one, where something is launched."""
        self.checks, self.stream = tuple(dict.fromkeys(checks)), stream
        records, self.shared = in_common(as_read(records, kept | later), slots, kept, later)
        self.slots = slots + len({place.slot for place in self.shared.values()})
        kept |= {self.shared[slot].slot if slot in self.shared else slot for slot in later}
        last = {slot: i for i, record in enumerate(records) for slot in record.used}
        self.steps: list[tuple[Step, tuple[int, ...]]] = []
        for i, record in enumerate(records):
            # memory is let go of after the last step that reads it
            done = tuple([slot for slot in set(record.used) if last[slot] == i and slot not in kept])
            self.steps.append((step_of(record), done))

    def usable(self) -> bool:
        """Whether all that it launches may be launched as it does."""
        return all(check() for check in self.checks)

    def __call__(self, inputs: Sequence[Tensor], sizes: tuple[int, ...] = ()) -> list[Any]:
        """``sizes``: ``CALL_SIZES``, where a launch has them."""
        more = self.slots - len(inputs)
        held: list[Any] = [*inputs, *[None] * more]
        addresses = [*[tensor.data_ptr() for tensor in inputs], *[0] * more, *sizes]
        stream = 0 if self.stream is None else self.stream()
        for step, done in self.steps:
            step(held, addresses, stream)
            for slot in done:
                held[slot] = None
        return held

    def part(self, held: Sequence[Any], slots: Iterable[int]) -> dict[int, Any]:
        """The memory that these slots lie in: what of ``held`` to keep for ``memory``."""
        places = [self.shared[slot].slot if slot in self.shared else slot for slot in slots]
        return {place: held[place] for place in places}

    def memory(self, held: Held, slots: Iterable[int]) -> dict[int, Any]:
        """What these slots hold, by slot, of what the tape has returned or ``part`` has kept."""
        return {slot: self.shared[slot].tensor(held) if slot in self.shared else held[slot] for slot in slots}


def as_read(records: Sequence[Record], kept: Set[int]) -> list[Record]:
    """The same with memory allocated in the shape and dtype in which operations take it, where all take the same: a
    view of another dtype takes the host as long as a launch."""
    made = {record.slot: record for record in records if isinstance(record, Allocation) and record.slot not in kept}
    places: dict[int, set[Place]] = {slot: set() for slot in made}

    def look(one: Any) -> None:
        if isinstance(one, Place) and one.slot in places:
            places[one.slot].add(one)

    for record in records:
        if isinstance(record, Operation):
            mapped(record.arguments, look)
    alike = {slot: next(iter(found)) for slot, found in places.items() if len(found) == 1}
    forms = {slot: place.form for slot, place in alike.items() if place.reaches(made[slot].bytes)}

    def read(one: Any) -> Any:
        return one._replace(whole=True) if isinstance(one, Place) and one.slot in forms else one

    found: list[Record] = []
    for record in records:
        if isinstance(record, Allocation):
            record = record._replace(form=forms.get(record.slot, record.form))
        elif isinstance(record, Operation):
            record = record._replace(arguments=mapped(record.arguments, read))
        found.append(record)
    return found


def in_common(
    records: Sequence[Record], slots: int, kept: Set[int], later: Set[int]
) -> tuple[list[Record], dict[int, Place]]:
    """The same with two allocations for most of what only kernels read, and where in these each slot lies; their own
    slots are those from ``slots`` on."""
    last = {slot: i for i, record in enumerate(records) for slot in record.used}
    as_tensors = set(kept).union(*[record.used for record in records if isinstance(record, Operation)])
    made = {
        record.slot: (i, record)
        for i, record in enumerate(records)
        if isinstance(record, Allocation) and record.slot not in as_tensors
    }
    shared: dict[int, Place] = {}
    first: list[Record] = []
    for lasting, most in ((True, LASTING), (False, PASSING)):
        blocks = {
            slot: (i, len(records) if lasting else last[slot], record.bytes)
            for slot, (i, record) in made.items()
            if (slot in later) == lasting and record.bytes <= most
        }
        if blocks:
            starts, size = packed(blocks)
            memory, device = slots + len(first), made[next(iter(blocks))][1].device
            first.append(Allocation(memory, ((size,), (1,), torch.uint8), device, size))
            shared |= {slot: Place(memory, start, False, *made[slot][1].form) for slot, start in starts.items()}
    rest = [record for record in records if not (isinstance(record, Allocation) and record.slot in shared)]
    return [*first, *[one.moved(shared) if isinstance(one, Launch) else one for one in rest]], shared


def packed(blocks: Mapping[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """Of blocks of memory, each with its first and last step and its bytes, where each of them lies in one allocation
    and how large that is: no two that some step finds in use have a byte in common. In order of their first steps."""
    starts: dict[int, int] = {}
    for slot, (first, _, size) in blocks.items():
        begin = 0
        for other in sorted(starts, key=starts.__getitem__):
            _, until, taken = blocks[other]
            if until >= first and starts[other] < begin + size:
                begin = max(begin, -(-(starts[other] + taken) // ALIGNMENT) * ALIGNMENT)
        starts[slot] = begin
    return starts, max((starts[slot] + size for slot, (_, _, size) in blocks.items()), default=0)
