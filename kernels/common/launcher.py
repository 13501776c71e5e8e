"""Launching compiled kernels without what Triton does before each launch, most of which is the same every time."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel

from .cache import Cache
from .recording import RECORDING, Launched, refuse, sizes_among

# versions whose rules of what is compiled anew are those of ``specialization``
OLDEST, NEWEST = (3, 5), (3, 9)
STREAM_AT = 3  # behind the three sizes of the grid
# what somebody has set in place of what environment variables say
RUNTIME, COMPILATION = vars(knobs.runtime), vars(knobs.compilation)


def fits(name: str) -> str:
    return f"-2147483648 <= {name} <= 2147483647"


def launched(parameter: Any) -> str:
    """An expression of an argument as what is compiled takes it: of a tensor the address, which need not be asked for
    and looked up by the driver then. It comes after the argument's ``specialization``."""
    name = parameter.name
    if not name.endswith("_ptr"):
        return name
    address = f"{name}.data_ptr()" if parameter.do_not_specialize_on_alignment else f"{name}_address"
    return f"None if {name} is None else {address}"


def specialization(parameter: Any) -> str:
    """An expression of an argument for what Triton compiles a kernel anew for, where the argument is no constant.

    A descriptor: dtype and block. A pointer: dtype, and whether it is a multiple of 16 bytes. An integer: whether it is
    1, a multiple of 16, within 32 bits. Any other number: its type.
    """
    name = parameter.name
    if name.endswith("_desc"):
        return f"None if {name} is None else ({name}.base.dtype, *{name}.block_shape)"
    if name.endswith("_ptr"):
        if parameter.do_not_specialize_on_alignment:
            return f"None if {name} is None else {name}.dtype"
        aligned = f"not ({name}_address := {name}.data_ptr()) & 15"
        return f"None if {name} is None else {name}.dtype if {aligned} else ({name}.dtype,)"
    if parameter.do_not_specialize:
        return fits(name)
    return f"{name}.__class__ if {name}.__class__ is not int else 1 if {name} == 1 else (not {name} & 15, {fits(name)})"


def is_known(kernel: Any) -> bool:
    """Whether this is a kernel for an NVIDIA GPU, by a Triton whose rules are known."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    nvidia = torch.cuda.is_available() and torch.version.hip is None
    return isinstance(kernel, triton.JITFunction) and OLDEST <= version <= NEWEST and nvidia


def no_settings() -> bool:
    """Whether nobody has set what Triton looks at before a launch: hooks, debugging, ways to compile."""
    return not (any(RUNTIME.values()) or any(COMPILATION.values()))


def is_plain(compiled: Any) -> bool:
    """Whether a kernel was compiled at once and in the usual way; environment variables are read at import."""
    unusual = (
        knobs.runtime.debug
        or getattr(knobs.runtime, "add_stages_inspection_hook", None)
        or getattr(knobs.compilation, "instrumentation_mode", "")
    )
    return isinstance(compiled, CompiledKernel) and not unusual


@functools.cache
def stream_of() -> Callable[[int], int]:
    """The current stream of a device, as Triton asks torch for it."""
    return triton.runtime.driver.active.get_current_stream


class Launcher:
    """A kernel that is launched as Triton's are, ``kernel[grid](*arguments, **constants)``, all constants by name.

    The first launch of a kind is Triton's, which compiles; later ones take what was compiled. Where Triton might do
    more than launch it (interpreted, a hook, a setting, a version nobody has looked at) every launch is Triton's.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        # threads that meet a kind at once both have it compiled, and one of the two is kept
        self.kept: Cache[tuple, tuple[Any, Any, Any, tuple]] = Cache(4096)

    @functools.cached_property
    def known(self) -> bool:
        return is_known(self.kernel)

    def direct(self) -> bool:
        """Whether Triton would do no more than launch what it has compiled."""
        return self.known and self.unhooked() and no_settings()

    def unhooked(self) -> bool:
        return not self.kernel.pre_run_hooks

    @functools.cached_property
    def read(self) -> Callable[..., tuple[tuple, tuple]]:
        """Of the arguments that are no constants what is compiled anew for, and what is launched with; one function,
        since a loop over them would take twice as long."""
        arguments = [parameter for parameter in self.kernel.params if not parameter.is_constexpr]
        names = ", ".join(parameter.name for parameter in arguments)
        both = (", ".join(map(expression, arguments)) for expression in (specialization, launched))
        return eval(f"lambda {names}: (({next(both)},), ({next(both)},))")

    @functools.cached_property
    def addressed(self) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """Which of the arguments are pointers, which are descriptors, and which are sizes of the call."""
        names = [parameter.name for parameter in self.kernel.params if not parameter.is_constexpr]
        pointers, descriptors = ([i for i, name in enumerate(names) if name.endswith(e)] for e in ("_ptr", "_desc"))
        return pointers, descriptors, sizes_among(names)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            if not self.direct():
                refuse("a kernel that is launched by Triton")
                self.kernel[grid](*arguments, **constants)
                return
            device = torch.cuda.current_device()
            special, given = self.read(*arguments)
            key = device, special, *constants, *constants.values()
            kept = self.kept.get(key)
            if kept is None:
                refuse("a kernel that is compiled")
                compiled = self.kernel[grid](*arguments, **constants)
                if is_plain(compiled):
                    self.keep(key, compiled, constants)
            else:
                run, function, metadata, last = kept
                # without a hook before or after: these are Triton's to call
                first = *(*grid, 1, 1)[:3], stream_of()(device), function, metadata, None, None, None
                run(*first, *given, *last)
                if RECORDING.recorder is not None:
                    stream = functools.partial(stream_of(), device)
                    *addressed, sizes = self.addressed
                    sizes = [(i + len(first), which) for i, which in sizes]
                    what = Launched(run, (*first, *given, *last), STREAM_AT, stream, sizes)
                    pointers, descriptors = ([i + len(first) for i in at] for at in addressed)
                    RECORDING.recorder.launched(what, pointers, descriptors, self.unhooked, no_settings)

        return launch

    def keep(self, key: tuple, compiled: Any, constants: dict[str, Any]) -> None:
        names = [parameter.name for parameter in self.kernel.params if parameter.is_constexpr]
        last = tuple(constants[name] for name in names)
        self.kept[key] = compiled.run, compiled.function, compiled.packed_metadata, last
