"""Watches what a call does: the tensors that it makes, how large each is, how many bytes live at the same time; and
whether anything in it waits for the device."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from chunked_head import Plan

MiB = 1 << 20


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that no dispatch mode sees its operators."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


class Tracker(TorchDispatchMode):
    """Counts storages that are made while the mode is active, without those of ``existing``."""

    def __init__(self, *existing: torch.Tensor, large: int = 1 << 62):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in existing}
        self.large = large  # elements from which a tensor is large
        self.live: dict[int, tuple[StorageWeakRef, int, bool]] = {}
        self.peak_bytes = 0
        self.peak_sizes: list[int] = []  # bytes of each storage at that time
        self.most_large = 0
        self.large_operations: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(t, torch.Tensor) and t.numel() >= self.large for t in tree_leaves((args, kwargs, result))):
            self.large_operations.add(func.overloadpacket.__name__)
        # what was freed before this operation is no longer there, and the result of this one is
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known and storage._cdata not in self.live:
                    elements = storage.nbytes() // tensor.element_size()
                    self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), elements >= self.large
        sizes = [size for _, size, _ in self.live.values()]
        if sum(sizes) > self.peak_bytes:
            self.peak_bytes, self.peak_sizes = sum(sizes), sizes
        self.most_large = max(self.most_large, sum(large for _, _, large in self.live.values()))
        return result


class NoProducts(TorchDispatchMode):
    """AssertionError at a matrix product: a call that raises must raise before it begins work."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in ("mm", "addmm", "addmm_", "bmm"), "work was begun"
        return func(*args, **(kwargs or {}))


def peak_of(step: Callable[[], Any], *existing: torch.Tensor) -> int:
    """Peak bytes that a call adds; on a GPU those of a second call, since the first makes cuBLAS' workspace."""
    if existing[0].device.type == "cpu":
        with Tracker(*existing) as tracker:
            step()
        return tracker.peak_bytes
    step()
    for tensor in existing:
        tensor.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def assert_predicted(measured: int, expected: Plan, share: float = 0.03, least: int = 2 * MiB) -> None:
    assert abs(measured - expected.peak_bytes) <= max(share * expected.peak_bytes, least), (
        f"measured {measured / MiB:.2f} MiB, predicted {expected.peak_bytes / MiB:.2f} MiB\n{expected}"
    )


@contextlib.contextmanager
def no_host_synchronisation() -> Iterator[None]:
    """A context in which an operation that waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
