"""Memory that shows who wrote where: what nobody has written is nan, or an integer that means nothing, and bytes stand
guard before and behind each new tensor, in which a kernel that leaves its memory shows."""

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Maker = Callable[..., torch.Tensor]
EMPTY = [
    (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]  # fmt: skip
# what callers make operands of, and the library its sums
WRITTEN = [
    *[(torch, name) for name in ("zeros", "zeros_like", "ones", "full", "full_like", "tensor", "arange")],
    *[(torch, name) for name in ("randn", "rand", "randint")],
    *[(torch.Tensor, name) for name in ("new_zeros", "new_full")],
]
GUARD = 1024  # bytes on each side: most rows that are written past a table end within them
ALIGNED = 64  # bytes, as torch's allocator aligns on a CPU
PATTERN = b"\xa5"
MOST_BYTES = 1 << 28  # of memory that waits to be looked at
TORCH = torch.__path__[0]
plain_empty = torch.empty


class OutOfBoundsError(AssertionError):
    """Raised for memory written outside of a tensor."""


class Guarded:
    """The memory of a tensor with its guards, and where the tensor was made."""

    def __init__(self, tensor: torch.Tensor, extent: int):
        self.kind, self.line = (tensor.shape, tensor.dtype), caller()
        if tensor.device.type == "cpu":
            self.raw: Any = bytearray(extent + 2 * GUARD + ALIGNED)
            self.begin = GUARD + -address(self.raw) % ALIGNED
            inside = torch.frombuffer(self.raw, dtype=torch.uint8, count=extent, offset=self.begin)
            self.storage, self.first = inside.untyped_storage(), 0
        else:
            self.raw, self.begin = plain_empty(extent + 2 * GUARD, dtype=torch.uint8, device=tensor.device), GUARD
            self.storage, self.first = self.raw.untyped_storage(), GUARD
        self.end = self.begin + extent
        self.sides = slice(self.begin), slice(self.end, len(self.raw))
        for side in self.sides:
            if isinstance(self.raw, bytearray):
                self.raw[side] = PATTERN * (side.stop - (side.start or 0))
            else:
                self.raw[side].fill_(PATTERN[0])

    def __str__(self) -> str:
        (shape, dtype), (file, line) = self.kind, self.line
        return f"{list(shape)} of {dtype}, made at {file}:{line}"

    def take(self) -> torch.UntypedStorage:
        """Gives up and returns the storage, so that only a tensor holds it."""
        storage = self.storage
        del self.storage
        return storage

    @property
    def is_free(self) -> bool:
        """True if no tensor holds the memory any more."""
        return sys.getrefcount(self.raw) <= 2 if isinstance(self.raw, bytearray) else holders(self.raw) <= ALONE

    def broken(self) -> str:
        """Which guard was written to: "before", "behind", or "" for none."""
        for name, side in zip(("before", "behind"), self.sides, strict=True):
            guard = self.raw[side]
            same = guard == PATTERN * len(guard) if isinstance(guard, bytearray) else bool((guard == PATTERN[0]).all())
            if not same:
                return name
        return ""


class Watched(list[Guarded]):
    """A list of guarded memory whose guards are not checked yet."""

    bytes = 0
    on = False

    def add(self, guarded: Guarded) -> None:
        self.append(guarded)
        self.bytes += len(guarded.raw)
        if self.bytes > MOST_BYTES:
            self.look()

    def look(self) -> None:
        """Raises OutOfBoundsError if a guard was written to. Forgets memory that no tensor holds."""
        everything, self[:] = [*self], []
        wrong = [f"{side} a tensor {one}" for one in everything if (side := one.broken())]
        self += [one for one in everything if not one.is_free]
        self.bytes = sum(len(one.raw) for one in self)
        if self.bytes > MOST_BYTES // 2:
            self.forget()
        if wrong:
            self.forget()
            raise OutOfBoundsError(f"memory was written to {'; '.join(wrong[:3])}")

    def forget(self) -> None:
        self.clear()
        self.bytes = 0


WATCHED = Watched()


def address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def holders(tensor: torch.Tensor) -> int:
    """The number of tensors and other objects that hold a tensor's memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[no-any-return]


ALONE = holders(plain_empty(1))  # of a tensor that shares its memory with none


def caller() -> tuple[str, int]:
    """File and line of the innermost caller outside of this file."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@contextmanager
def shown(gpu: bool = False) -> Iterator[None]:
    """A context in which torch's new memory lies between guards, and uninitialised memory is filled. The end of the
    context checks the guards. ``gpu``: guards on a GPU too, where they change measured memory."""
    makers = [(place, name, getattr(place, name)) for place, name in (*EMPTY, *WRITTEN)]
    WATCHED.forget()
    WATCHED.on = True
    for place, name, maker in makers:
        setattr(place, name, making(maker, (place, name) in EMPTY, gpu))
    try:
        yield
    finally:
        WATCHED.on = False
        for place, name, maker in makers:
            setattr(place, name, maker)
    WATCHED.look()
    WATCHED.forget()


def making(make: Maker, is_empty: bool, gpu: bool) -> Maker:
    @functools.wraps(make)  # whoever overrides torch's functions gets this one by its name
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        # not a compiler's tensors, which hold nothing; nor what a mode or a transform watches, to which a step is one
        # more operation
        if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor or is_watched():
            return tensor
        if tensor.device.type == "cpu" or (gpu and tensor.device.type == "cuda"):
            put_between_guards(tensor, is_empty)
        if is_empty:
            fill(tensor)
        return tensor

    return made


def is_watched() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None


def put_between_guards(tensor: torch.Tensor, is_empty: bool = False) -> torch.Tensor:
    """Moves a tensor to guarded memory if ``WATCHED`` is on. It keeps graph and, unless ``is_empty``, numbers."""
    plain = tensor.layout == torch.strided and not (tensor._is_view() or tensor.is_pinned())
    # torch's own code may resize its memory, as FSDP does
    if not (WATCHED.on and plain and tensor.numel()) or caller()[0].startswith(TORCH):
        return tensor
    shape, stride, itemsize, own = tensor.shape, tensor.stride(), tensor.element_size(), tensor.detach()
    elements = tensor.numel()
    if not tensor.is_contiguous():
        elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    guarded = Guarded(tensor, elements * itemsize)
    moved = plain_empty(0, dtype=tensor.dtype, device=tensor.device)
    moved.set_(guarded.take(), guarded.first // itemsize, shape, stride)
    if not is_empty:
        moved.copy_(own)
    tensor.data = moved
    WATCHED.add(guarded)
    return tensor


def fill(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.detach().fill_(torch.nan)
    elif tensor.dtype != torch.bool and not tensor.is_complex():
        info = torch.iinfo(tensor.dtype)
        tensor.detach().fill_(info.min or info.max)
