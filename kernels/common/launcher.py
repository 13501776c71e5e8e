"""Launches of compiled kernels without the work that Triton repeats before each launch.

Triton does the first launch with a new key, and compiles the kernel. Later launches find the compiled kernel by the key
and call the C function that Triton's launches end with.

Triton specialises a kernel for integers that are 1 or a multiple of 16, and for pointers that are aligned to 16 bytes.
Sizes that depend on the number of tokens are not specialised, since that makes no kernel faster. The number of tokens
decides only whether a chunk's products are stored or added, whether tiles of dhidden are cut, and whether a size needs
64 bits.
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

# first and last version of Triton that specialises arguments by the rules of ``specialization``
OLDEST_TRITON, NEWEST_TRITON = (3, 5), (3, 9)
# Triton's option by which a product and a sum become one instruction; from Triton 3.10 on it is off by default
FUSED = {"enable_fp_fusion": True}
# Triton's settings that differ from the defaults, by name
RUNTIME_SETTINGS, COMPILATION_SETTINGS = vars(knobs.runtime), vars(knobs.compilation)
NONE_FIELDS = (None,)  # the fields of a descriptor that is None
LAUNCH_HOOKS = [  # two lists: functions that Triton calls before, and after, each launch
    getattr(hook, "calls", ()) for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
]


def specialization(parameter: Any) -> str:
    """A Python expression for the property of an argument for which Triton specialises a kernel. The generated launch
    function evaluates the expression, and its value is a part of the key of the compiled kernel.

    The property of a constant is its value; of a descriptor its dtype and block; of a pointer its dtype, and whether
    the address is a multiple of 16 bytes; of an integer three flags: whether it is 1, is a multiple of 16, fits into
    32 bits; of any other argument its type.
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


def c_argument(parameter: Any) -> str:
    """The Python source of the C function's argument for a kernel's argument: the address of a tensor, the fields of a
    descriptor. The source reads variables that the source of ``specialization`` sets before.
    """
    name = parameter.name
    if parameter.is_constexpr:
        return name
    if name.endswith("_desc"):
        return f"*(NONE_FIELDS if {name} is None else {name}.fields.get(of_{name}) or of_{name}({name}))"
    if name.endswith("_ptr"):
        address = f"{name}.data_ptr()" if parameter.do_not_specialize_on_alignment else f"{name}_address"
        return f"None if {name} is None else {address}"
    return name


# source of a kernel's launch function, without a loop over the arguments, which would take twice as long
LAUNCH_SOURCE = """
def launch(grid, {arguments}, *, {constants}num_warps, num_stages=None):
    device = current_device()
    key = device, {specializations}, num_warps, num_stages
    compiled = find(key)
    if compiled is None or RUNTIME_SETTINGS or COMPILATION_SETTINGS or hooks or ENTER_HOOKS or EXIT_HOOKS:
        if compiled is None or not launcher.direct():
            return launcher.launch_by_triton(grid, key, ({arguments},), dict({named}num_warps=num_warps), num_stages)
    x, y, z = grid
    [{descriptors}] = compiled.fields
    c_arguments = {c_arguments},
    if RECORDERS and (active_recorder := recorder()) is not None:
        active_recorder.record_launch(launcher, grid, ({arguments},), compiled, c_arguments)
    if compiled.is_unpacked:
        compiled.run(x, y, z, stream(device), *compiled.prefix, *c_arguments)
    else:
        compiled.run(x, y, z, stream(device), *compiled.prefix, c_arguments)
"""


class DescriptorFields:
    """A function that returns the fields which a kernel's C function takes in place of a descriptor. A compiled
    kernel has one such function for each argument that is a descriptor."""

    def __init__(self, expand_descriptors: Callable[..., Sequence[Any]] | None, num_leading: int, is_unpacked: bool):
        """``expand_descriptors``: Triton's function that returns its arguments with each descriptor replaced by its
        fields; None if the C function takes descriptors. ``num_leading``: number of the C function's arguments before
        the kernel's arguments. ``is_unpacked``: True if the C function takes these one by one, False if as a tuple."""
        self.expand, self.leading, self.is_unpacked = expand_descriptors, (None,) * num_leading, is_unpacked

    def __call__(self, descriptor: Any) -> tuple:
        if self.expand is None:
            fields: tuple = (descriptor,)
        elif self.is_unpacked:
            fields = tuple(self.expand(*self.leading, descriptor)[len(self.leading) :])
        else:
            fields = tuple(self.expand(*self.leading, (descriptor,))[-1])
        descriptor.fields[self] = fields
        return fields


class Compiled:
    """A compiled kernel. ``run(x, y, z, stream, *prefix, *arguments)`` launches the kernel with grid x, y, z. If not
    ``is_unpacked``, ``run`` takes the arguments as one tuple."""

    def __init__(self, kernel: Any, num_arguments: int, descriptor_indices: Sequence[int]):
        """``kernel``: Triton's compiled kernel. ``descriptor_indices``: indices of arguments that may be
        descriptors."""
        self.kernel, self.is_unpacked, self.run = kernel, True, kernel.run
        self.prefix: tuple = kernel.function, kernel.packed_metadata, None, None, None  # no hooks
        function, expand_by_index = c_function(kernel, num_arguments), dict[int, Callable[..., Any]]()
        if function is not None:
            self.run, self.prefix, self.is_unpacked = function
            types = [*kernel.src.signature.values()]
            indices = [i for i in descriptor_indices if types[i].startswith("tensordesc")]
            metadata = getattr(kernel.metadata, "tensordesc_meta", None) or [None] * len(indices)
            wrap = sys.modules[type(kernel.run).__module__].wrap_handle_tensordesc
            for i, description in zip(indices, metadata, strict=True):
                expand_by_index[i] = wrap(lambda *arguments: arguments, {0: types[i]}, [description])
        self.fields = [
            DescriptorFields(expand_by_index.get(i), 4 + len(self.prefix), self.is_unpacked) for i in descriptor_indices
        ]


def c_function(kernel: Any, num_arguments: int) -> tuple[Callable[..., None], tuple, bool] | None:
    """Returns the C function that launches a compiled kernel; the values that it takes between the stream and the
    kernel's arguments; and whether it takes the kernel's arguments one by one (True) or as a tuple (False). Returns
    None if Triton's launch does more than call the function."""
    run = kernel.run
    function = getattr(run, "launch", None)
    if inspect.isfunction(function):  # a Python function for descriptors, which calls the C function
        function = inspect.getclosurevars(function).nonlocals.get("launcher")
    scratch_sizes = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if not inspect.isbuiltin(function) or scratch_sizes != [0, 0]:
        return None
    observed_calls: list[tuple] = []
    observed_run = copy.copy(run)
    grid_and_stream, arguments = [tuple([object() for _ in range(count)]) for count in (4, num_arguments)]
    observed_run.launch = lambda *c_arguments: observed_calls.append(c_arguments)
    observed_run(*grid_and_stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments)
    (c_arguments,) = observed_calls
    is_unpacked = c_arguments[-num_arguments:] == arguments
    is_expected = c_arguments[:4] == grid_and_stream and (is_unpacked or c_arguments[-1] == arguments)
    return (function, c_arguments[4 : -num_arguments if is_unpacked else -1], is_unpacked) if is_expected else None


def is_known() -> bool:
    """True if kernels can be launched by their C function: on an NVIDIA GPU, not interpreted, with a version of Triton
    from OLDEST_TRITON to NEWEST_TRITON."""
    version = tuple(int(number) for number in triton.__version__.split(".")[:2])
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None and not INTERPRETED
    return is_nvidia and OLDEST_TRITON <= version <= NEWEST_TRITON


def is_plain(kernel: Any) -> bool:
    """True if ``kernel`` is a compiled kernel, not a future, and Triton's settings are the defaults."""
    has_changed_settings = (
        knobs.runtime.debug
        or getattr(knobs.runtime, "add_stages_inspection_hook", None)
        or getattr(knobs.compilation, "instrumentation_mode", "")
    )
    return isinstance(kernel, CompiledKernel) and not has_changed_settings


class Launcher:
    """A kernel that is called as in Triton, ``kernel[grid](*arguments, **constants)``; constants are passed by name.

    Where Triton might do more than launch a compiled kernel (under the interpreter, with a hook or a setting, in an
    unknown version), Triton launches the kernel.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        # if two threads launch with one new key at the same time, both compile, and one result stays
        self.compiled_by_key: Cache[tuple, Compiled] = Cache(4096)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self.launch, (*grid, 1, 1)[:3])

    @functools.cached_property
    def launch(self) -> Callable[..., None]:
        if not is_known():
            return self.launch_unsupported
        parameters = self.kernel.params
        arguments = [parameter.name for parameter in parameters if not parameter.is_constexpr]
        constants = [parameter.name for parameter in parameters if parameter.is_constexpr]
        source = LAUNCH_SOURCE.format(
            arguments=", ".join(arguments), constants=", ".join([*constants, ""]),
            named="".join(f"{name}={name}, " for name in constants),
            descriptors=", ".join(f"of_{arguments[i]}" for i in self.descriptor_indices),
            specializations=", ".join(map(specialization, parameters)),
            c_arguments=", ".join(map(c_argument, parameters)),
        )  # fmt: skip
        scope = globals() | {
            "launcher": self, "find": self.compiled_by_key.get, "hooks": self.kernel.pre_run_hooks,
            "ENTER_HOOKS": LAUNCH_HOOKS[0], "EXIT_HOOKS": LAUNCH_HOOKS[1], "current_device": torch.cuda.current_device,
            "stream": triton.runtime.driver.active.get_current_stream, "RECORDERS": RECORDERS,
        }  # fmt: skip
        exec(compile(source, f"<launch of {self.kernel.fn.__name__}>", "exec"), scope)
        return scope["launch"]

    @functools.cached_property
    def descriptor_indices(self) -> list[int]:
        """Indices of the arguments that may be descriptors."""
        return [i for i, name in enumerate(self.kernel.arg_names) if name.endswith("_desc")]

    def launch_unsupported(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        run = functools.partial(self.kernel[grid], **constants, **FUSED)
        run(*arguments)
        if (active_recorder := recorder()) is not None:
            active_recorder.record_call(run, *arguments)

    def direct(self) -> bool:
        """True if Triton would do no more than launch a compiled kernel."""
        has_settings = any(RUNTIME_SETTINGS.values()) or any(COMPILATION_SETTINGS.values())
        return not (has_settings or self.kernel.pre_run_hooks or any(LAUNCH_HOOKS))

    def launch_by_triton(
        self, grid: tuple[int, ...], key: tuple, arguments: Sequence[Any], constants: dict[str, Any], stages: int | None
    ) -> None:
        stage_option = {} if stages is None else {"num_stages": stages}
        compiled = self.kernel[grid](*arguments, **constants, **stage_option, **FUSED)
        if key not in self.compiled_by_key and self.direct() and is_plain(compiled):
            self.keep(key, compiled)
        if (active_recorder := recorder()) is not None:
            active_recorder.is_refused = True

    def keep(self, key: tuple, compiled: Any) -> None:
        self.compiled_by_key[key] = Compiled(compiled, len(self.kernel.params), self.descriptor_indices)


# names of arguments for which kernels are not specialised: sizes that depend on the number of tokens or on the call
PER_CALL = (
    "entries", "first_row", "ids_per_token", "line_length", "most_parts", "num_picked", "numel",
    "pieces", "programs", "rows", "second_numel", "step", "steps", "tokens", "units",
    *[f"vector_index{i}" for i in range(32)],
)  # fmt: skip
# names of pointers to one number, or to a few numbers per row. They may point to any row, and no thread reads several
# rows at once, so that kernels are not specialised for their alignment
PER_ROW = (
    "added_ptr", "alpha_ptr", "begin_ptr", "beta_ptr", "column_ptr", "count_ptr", "counted_ptr", "divisor_ptr",
    "end_ptr", "factor_ptr", "hidden_factor_ptr", "hidden_scale_ptr", "ids_ptr", "inverse_ptr", "level_ptr",
    "logit_ptr", "logprob_ptr", "lse_base_ptr", "lse_ptr", "mask_ptr", "neg_log_sum_ptr", "occurrences_ptr",
    "offset_ptr", "one_or_nan_ptr", "order_ptr", "paired_ptr", "place_ptr", "row_max_ptr", "row_offset_ptr",
    "row_ptr", "row_scale_ptr", "softmax_factor_ptr", "sorted_ptr", "source_ptr",
    "sparse_dlogit_ptr", "sparse_id_ptr", "target_factor_ptr", "target_logit_ptr", "target_ptr",
    "teacher_lse_base_ptr", "teacher_neg_log_sum_ptr", "teacher_row_scale_ptr", "term_ptr", "weight_scale_ptr",
    "zero_or_nan_ptr",
    *[f"{name}{i}_ptr" for name in ("number", "output", "coefficient", "lse_base", "neg_log_sum") for i in range(32)],
)  # fmt: skip


def kernel(function: Callable) -> Launcher:
    """Decorates a kernel: returns a ``Launcher`` of ``triton.jit(function)``. Functions that kernels call are decorated
    with ``triton.jit`` instead."""
    return Launcher(triton.jit(function, do_not_specialize=PER_CALL, do_not_specialize_on_alignment=PER_ROW))
