"""``Cache``, the table for all that is kept from call to call, and ``empty``, which allocates the tensors of a
sweep."""

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
RECORDERS: dict[int, Any] = {}  # by a thread's identifier: the ``recording.Recorder`` of the thread's sweep


class Cache(Generic[Key, Value]):
    """A table of at most ``capacity`` values by key. The least recently used values are removed first.

    Threads may share a cache. Keys compare as in a dict: where 1, 1.0 and True must differ, a key includes their types.
    Finding a value takes no lock and hashes the key once.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._entries: dict[Key, list[Any]] = {}  # by key: the value, and the number of the lookup that used it last
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
        """Returns the value of a key, and first adds ``make()`` if there is none. ``make`` runs without the lock, since
        it may take seconds and may use this cache. If two threads call ``make`` for one key at the same time, both get
        the value that is added first."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._add(key, make(), replaces=False)
        else:
            entry[1] = next(self._clock)
        value: Value = entry[0]
        return value

    def __setitem__(self, key: Key, value: Value) -> None:
        self._add(key, value, replaces=True)

    def _add(self, key: Key, value: Value, replaces: bool) -> list[Any]:
        removed = []  # values, freed after the lock is released: a destructor may use this cache
        with self._lock:
            entries = self._entries
            entry = entries.setdefault(key, [value, 0])
            if replaces:
                removed.append(entry[0])
                entry[0] = value
            entry[1] = next(self._clock)
            if len(entries) > self.capacity:
                # removes some more at a time, since finding the oldest sorts all entries
                count = len(entries) - self.capacity + self.capacity // 64
                oldest = sorted(entries.items(), key=lambda item: item[1][1])[:count]
                removed += [entries.pop(key) for key, _ in oldest]
        return entry

    def clear(self) -> None:
        with self._lock:
            removed, self._entries = self._entries, {}
        del removed

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


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns ``torch.empty`` for tensors of stores, statistics and gradients. A ``Recorder`` of this thread adds the
    tensor to its memory."""
    tensor = torch.empty(*shape, dtype=dtype, device=device)
    if RECORDERS and (active_recorder := recorder()) is not None:
        active_recorder.add_memory(tensor)
    return tensor
