"""Launches of compiled kernels without the work that Triton repeats before each launch.

The first launch of a kind is Triton's, which compiles. Later launches find the compiled kernel by one key, and call the
C function that Triton's launches end with.

Triton specialises a kernel for integers that are 1 or a multiple of 16, and for pointers that are aligned to 16 bytes.
Sizes that depend on the number of tokens are not specialised, since their code does not gain by it. The number of
tokens decides only whether a chunk's products are stored or added, whether tiles of dhidden are cut, and whether a size
needs 64 bits.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel

from ...core.memory import RECORDERS, Cache, recorder
from ...core.tiles import INTERPRETED

# Triton's versions that specialise arguments by the rules of ``specialization``
OLDEST, NEWEST = (3, 5), (3, 9)
# option with which a product and a sum become one instruction; from Triton 3.10 on it is off by default
FUSED = {"enable_fp_fusion": True}
# Triton's settings, and hooks around each launch
RUNTIME, COMPILATION = vars(knobs.runtime), vars(knobs.compilation)
NOTHING = (None,)
AROUND = [getattr(hook, "calls", ()) for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)]


def specialization(parameter: Any) -> str:
    """The Python expression of an argument's specialisation: if its value changes, Triton compiles the kernel again.

    For a constant it is the constant; for a descriptor dtype and block; for a pointer dtype, and whether its address is
    a multiple of 16 bytes; for an integer whether it is 1, a multiple of 16, and within 32 bits; else the type.
    """
    name = parameter.name
    if parameter.is_constexpr:
        return name
    if name.endswith("_desc"):
        return f"None if {name} is None else ({name}.base.dtype, *{name}.block_shape)"
    if name.endswith("_ptr"):
        if parameter.do_not_specialize_on_alignment:
            return f"None if {name} is None else {name}.dtype"
        aligned = f"not ({name}_address := {name}.data_ptr()) & 15"
        return f"None if {name} is None else {name}.dtype if {aligned} else ({name}.dtype,)"
    if parameter.do_not_specialize:
        return f"-2147483648 <= {name} <= 2147483647"
    integer = f"({name} & 15 and 1 + ({name} == 1), {name} >> 31)"
    return f"{integer} if {name}.__class__ is int else {name}.__class__"


def launched(parameter: Any) -> str:
    """The Python expression of an argument for the C function: a tensor's address, a descriptor's fields. In the source
    it stands after the argument's ``specialization``, whose variables it reads."""
    name = parameter.name
    if parameter.is_constexpr:
        return name
    if name.endswith("_desc"):
        return f"*(NOTHING if {name} is None else {name}.fields.get(of_{name}) or of_{name}({name}))"
    if name.endswith("_ptr"):
        address = f"{name}.data_ptr()" if parameter.do_not_specialize_on_alignment else f"{name}_address"
        return f"None if {name} is None else {address}"
    return name


# source of the function that each kernel gets, since a loop over the arguments takes twice as long
SOURCE = """
def launch(grid, {arguments}, *, {constants}num_warps, num_stages=None):
    device = current_device()
    key = device, {specializations}, num_warps, num_stages
    compiled = find(key)
    if compiled is None or RUNTIME or COMPILATION or hooks or ENTER or EXIT:
        if compiled is None or not launcher.direct():
            return launcher.by_triton(grid, key, ({arguments},), dict({named}num_warps=num_warps), num_stages)
    x, y, z = grid
    [{descriptors}] = compiled.fields
    given = {launched},
    if RECORDERS and (listening := recorder()) is not None:
        listening.launched(launcher, grid, ({arguments},), compiled, given)
    if compiled.in_a_row:
        compiled.run(x, y, z, stream(device), *compiled.prefix, *given)
    else:
        compiled.run(x, y, z, stream(device), *compiled.prefix, given)
"""


class Fields:
    """Turns a descriptor at one position of a compiled kernel's arguments into the fields that the C function takes.

    ``wrapped``: Triton's function that expands descriptors, around a function that returns its arguments; None if the C
    function takes descriptors."""

    def __init__(self, wrapped: Callable[..., Sequence[Any]] | None, prefix: int, in_a_row: bool):
        self.wrapped, self.prefix, self.in_a_row = wrapped, (None,) * prefix, in_a_row

    def __call__(self, descriptor: Any) -> tuple:
        if self.wrapped is None:
            fields: tuple = (descriptor,)
        elif self.in_a_row:
            fields = tuple(self.wrapped(*self.prefix, descriptor)[len(self.prefix) :])
        else:
            fields = tuple(self.wrapped(*self.prefix, (descriptor,))[-1])
        descriptor.fields[self] = fields
        return fields


class Compiled:
    """A compiled kernel and its launch, ``run(x, y, z, stream, *prefix, *arguments)``; the last is ``arguments``, a
    tuple, if not ``in_a_row``."""

    def __init__(self, kernel: Any, arguments: int, descriptors: Sequence[int]):
        """``arguments``: the number of arguments. ``descriptors``: indices of those that may be descriptors."""
        self.kernel, self.in_a_row, self.run = kernel, True, kernel.run
        self.prefix: tuple = kernel.function, kernel.packed_metadata, None, None, None  # no hooks
        function, wrapped = c_function(kernel, arguments), dict[int, Callable[..., Any]]()
        if function is not None:
            self.run, self.prefix, self.in_a_row = function
            kinds = [*kernel.src.signature.values()]
            indices = [i for i in descriptors if kinds[i].startswith("tensordesc")]
            metadata = getattr(kernel.metadata, "tensordesc_meta", None) or [None] * len(indices)
            wrap = sys.modules[type(kernel.run).__module__].wrap_handle_tensordesc
            for i, description in zip(indices, metadata, strict=True):
                wrapped[i] = wrap(lambda *arguments: arguments, {0: kinds[i]}, [description])
        self.fields = [Fields(wrapped.get(i), 4 + len(self.prefix), self.in_a_row) for i in descriptors]


def c_function(kernel: Any, arguments: int) -> tuple[Callable[..., None], tuple, bool] | None:
    """Returns the C function that launches a kernel with ``arguments`` arguments; the values that it takes between the
    stream and the arguments; and whether it takes arguments one by one (True) or as a tuple. None if Triton does more
    than call it."""
    run = kernel.run
    function = getattr(run, "launch", None)
    if inspect.isfunction(function):  # around that in C, for descriptors
        function = inspect.getclosurevars(function).nonlocals.get("launcher")
    scratch = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if not inspect.isbuiltin(function) or scratch != [0, 0]:
        return None
    calls: list[tuple] = []
    watched, first, last = copy.copy(run), *(tuple(object() for _ in range(count)) for count in (4, arguments))
    watched.launch = lambda *c_arguments: calls.append(c_arguments)
    watched(*first, kernel.function, kernel.packed_metadata, None, None, None, *last)
    (c_arguments,) = calls
    in_a_row = c_arguments[-arguments:] == last
    is_expected = c_arguments[:4] == first and (in_a_row or c_arguments[-1] == last)
    return (function, c_arguments[4 : -arguments if in_a_row else -1], in_a_row) if is_expected else None


def is_known() -> bool:
    """True for NVIDIA GPUs and versions of Triton from OLDEST to NEWEST."""
    version = tuple(int(number) for number in triton.__version__.split(".")[:2])
    compiles = torch.cuda.is_available() and torch.version.hip is None and not INTERPRETED
    return compiles and OLDEST <= version <= NEWEST


def is_plain(kernel: Any) -> bool:
    """True for a kernel that Triton has compiled synchronously, with its default settings."""
    unusual = (
        knobs.runtime.debug
        or getattr(knobs.runtime, "add_stages_inspection_hook", None)
        or getattr(knobs.compilation, "instrumentation_mode", "")
    )
    return isinstance(kernel, CompiledKernel) and not unusual


class Launcher:
    """A kernel that is launched as Triton's are: ``kernel[grid](*arguments, **constants)``, with all constants by name.

    If Triton might do more than launch a compiled kernel (under the interpreter, with a hook or a setting, in an
    unknown version), Triton launches it.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        # two threads that launch a new kind at the same time both compile it; one of the results is kept
        self.kept: Cache[tuple, Compiled] = Cache(4096)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self.launch, (*grid, 1, 1)[:3])

    @functools.cached_property
    def launch(self) -> Callable[..., None]:
        if not is_known():
            return self.unknown
        parameters = self.kernel.params
        arguments = [parameter.name for parameter in parameters if not parameter.is_constexpr]
        constants = [parameter.name for parameter in parameters if parameter.is_constexpr]
        source = SOURCE.format(
            arguments=", ".join(arguments), constants=", ".join([*constants, ""]),
            named="".join(f"{name}={name}, " for name in constants),
            descriptors=", ".join(f"of_{arguments[i]}" for i in self.descriptors),
            specializations=", ".join(map(specialization, parameters)), launched=", ".join(map(launched, parameters)),
        )  # fmt: skip
        scope = globals() | {
            "launcher": self, "find": self.kept.get, "hooks": self.kernel.pre_run_hooks, "ENTER": AROUND[0],
            "EXIT": AROUND[1], "current_device": torch.cuda.current_device,
            "stream": triton.runtime.driver.active.get_current_stream, "RECORDERS": RECORDERS,
        }  # fmt: skip
        exec(compile(source, f"<launch of {self.kernel.fn.__name__}>", "exec"), scope)
        return scope["launch"]

    @functools.cached_property
    def descriptors(self) -> list[int]:
        """Indices of the arguments that may be descriptors."""
        return [i for i, name in enumerate(self.kernel.arg_names) if name.endswith("_desc")]

    def unknown(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        run = functools.partial(self.kernel[grid], **constants, **FUSED)
        run(*arguments)
        if (listening := recorder()) is not None:
            listening.called(run, *arguments)

    def direct(self) -> bool:
        """True where Triton would do no more than launch what it has compiled."""
        return not (any(RUNTIME.values()) or any(COMPILATION.values()) or self.kernel.pre_run_hooks or any(AROUND))

    def by_triton(
        self, grid: tuple[int, ...], key: tuple, arguments: Sequence[Any], constants: dict[str, Any], stages: int | None
    ) -> None:
        stages_given = {} if stages is None else {"num_stages": stages}
        compiled = self.kernel[grid](*arguments, **constants, **stages_given, **FUSED)
        if key not in self.kept and self.direct() and is_plain(compiled):
            self.keep(key, compiled)
        if (listening := recorder()) is not None:
            listening.refused = True

    def keep(self, key: tuple, compiled: Any) -> None:
        self.kept[key] = Compiled(compiled, len(self.kernel.params), self.descriptors)


# names of kernels' arguments that are sizes and depend on the number of tokens
PER_CALL = (
    "entries", "first_row", "ids_per_token", "length", "most_parts", "numel", "picked",
    "pieces", "programs", "rows", "second_numel", "step", "steps", "tokens", "units", *[f"place{i}" for i in range(32)],
)  # fmt: skip
# names of pointers to one number, or to one or a few numbers per row: they may start at any row, and no thread reads
# several rows at once, so that alignment does not matter
PER_ROW = (
    "alpha_ptr", "begin_ptr", "beta_ptr", "column_ptr", "count_ptr", "counted_ptr", "dlogit_ptr", "end_ptr",
    "factor_ptr", "hidden_scale_ptr", "ids_ptr", "inverse_ptr", "level_ptr", "logit_ptr", "logprob_ptr", "lse_ptr",
    "mask_ptr", "most_ptr", "occurrences_ptr", "offset_ptr", "one_or_nan_ptr", "order_ptr", "paired_ptr",
    "place_ptr", "power_ptr", "rest_ptr", "row_offset_ptr", "row_ptr", "row_scale_ptr", "share_ptr",
    "softmax_factor_ptr", "sorted_ptr", "sorted_target_ptr", "source_ptr", "sparse_ptr", "start_ptr",
    "target_factor_ptr", "target_logit_ptr", "target_ptr", "teacher_rest_ptr", "teacher_row_scale_ptr",
    "teacher_start_ptr", "term_ptr", "weight_scale_ptr", "zero_or_nan_ptr",
    *[f"{name}{i}_ptr" for name in ("number", "output", "vector", "start", "rest") for i in range(32)],
)  # fmt: skip


def kernel(function: Callable) -> Launcher:
    """The decorator of kernels that are launched: a ``Launcher`` of ``triton.jit(function)``. Functions that kernels
    call have ``triton.jit``."""
    return Launcher(triton.jit(function, do_not_specialize=PER_CALL, do_not_specialize_on_alignment=PER_ROW))
