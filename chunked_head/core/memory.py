"""The table of what is kept from call to call (``Cache``), and the tensors that a sweep makes (``empty``)."""

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
# by thread, the ``recording.Recorder`` of the sweep that it runs
RECORDERS: dict[int, Any] = {}


class Cache(Generic[Key, Value]):
    """Values by key, at most ``most``: the least recently used go first. No other kind of table outlives a call.

    Threads may share one. Keys are equal as in a dict: where 1, 1.0 and True differ, a key holds their types as well.
    A hit takes no lock and hashes the key once.
    """

    def __init__(self, most: int):
        self.most = most
        self._entries: dict[Key, list[Any]] = {}  # the value, and when it was asked for
        self._clock = itertools.count()
        self._lock = threading.RLock()  # of threads that add or remove

    def get(self, key: Key) -> Value | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[1] = next(self._clock)
        value: Value = entry[0]
        return value

    def get_or_make(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value, made where there is none, outside of the lock: ``make`` may take seconds and ask this cache too.
        Where two threads make one at once, both get that of the first to be done."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._add(key, make(), anew=False)
        else:
            entry[1] = next(self._clock)
        value: Value = entry[0]
        return value

    def __setitem__(self, key: Key, value: Value) -> None:
        self._add(key, value, anew=True)

    def _add(self, key: Key, value: Value, anew: bool) -> list[Any]:
        gone = []  # let go of behind the lock: a destructor may come back here
        with self._lock:
            entries = self._entries
            entry = entries.setdefault(key, [value, 0])
            if anew:
                gone.append(entry[0])
                entry[0] = value
            entry[1] = next(self._clock)
            if len(entries) > self.most:
                oldest = [key for key, _ in sorted(entries.items(), key=lambda item: item[1][1])]
                # a few more at a time, since to find them takes a look at all
                gone += [entries.pop(key) for key in oldest[: len(entries) - self.most + self.most // 64]]
        return entry

    def clear(self) -> None:
        with self._lock:
            gone, self._entries = self._entries, {}
        del gone

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._entries))

    def values(self) -> list[Value]:
        return [entry[0] for entry in list(self._entries.values())]


def recorder() -> Any:
    """The recorder of the sweep that this thread runs, or None."""
    return RECORDERS.get(threading.get_ident()) if RECORDERS else None


def empties(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], device: torch.device
) -> list[torch.Tensor]:
    """``empty`` of each shape and dtype."""
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]
    if RECORDERS and (listening := recorder()) is not None:
        for tensor in tensors:
            listening.add_memory(tensor)
    return tensors


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty`` of stores, statistics and gradients."""
    tensor = torch.empty(*shape, dtype=dtype, device=device)
    if RECORDERS and (listening := recorder()) is not None:
        listening.add_memory(tensor)
    return tensor
