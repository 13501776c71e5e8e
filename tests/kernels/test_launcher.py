"""Launches of kernels that are compiled already: what is launched is what Triton would launch."""

import inspect
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="what is launched is Triton's")

from chunked_head.kernels.common import launcher as launch
from chunked_head.kernels.common import operands, recording
from chunked_head.kernels.common.operands import Strips
from chunked_head.kernels.common.sums import kernel_of
from chunked_head.kernels.gradients import launch as gradients
from chunked_head.kernels.statistics import launch as statistics
from chunked_head.kernels.statistics import lists as statistics_lists

from chunked_head.core.gpus import run_as
from chunked_head.core.records import Transform


def example_kernel(out_desc, in_ptr, row_ptr, columns, rows, scale, BLOCK: "tl.constexpr", FLOOR: "tl.constexpr"):  # noqa: F821
    pass


NOT_SPECIALIZED = {"do_not_specialize": ["rows"], "do_not_specialize_on_alignment": ["row_ptr"]}


def described(shape: tuple[int, int] = (64, 64), block: tuple[int, int] = (16, 32), dtype: torch.dtype = torch.float16):
    return operands.described(torch.zeros(shape, dtype=dtype), *block)


NUMBERS = torch.zeros(64)
HALVES = NUMBERS.half()
PLAIN: dict[str, Any] = {
    "out_desc": None, "in_ptr": NUMBERS, "row_ptr": NUMBERS, "columns": 48, "rows": 48, "scale": 0.5,
    "BLOCK": 128, "FLOOR": -1.0, "num_warps": 4, "num_stages": 3,
}  # fmt: skip
# arguments that a kernel is compiled anew for
OTHERS: list[dict[str, Any]] = [
    {"in_ptr": None}, {"in_ptr": HALVES}, {"in_ptr": NUMBERS[1:]}, {"in_ptr": HALVES[1:]},
    {"row_ptr": None}, {"row_ptr": HALVES}, {"columns": 1}, {"columns": 47}, {"columns": 2**31}, {"columns": 2**31 + 1},
    {"rows": 2**31}, {"scale": None}, {"scale": 1}, {"scale": 3}, {"scale": 16}, {"scale": 2**40}, {"scale": True},
    {"BLOCK": 64}, {"FLOOR": -2.0}, {"FLOOR": None}, {"num_warps": 8}, {"num_stages": 2},
    {"out_desc": {}}, {"out_desc": {"block": (16, 16)}}, {"out_desc": {"dtype": torch.bfloat16}},
]  # fmt: skip
# and those that it is not compiled anew for
SAME: list[dict[str, Any]] = [
    {"in_ptr": NUMBERS[4:]}, {"row_ptr": NUMBERS[1:]}, {"columns": 128}, {"rows": 1}, {"rows": 47}, {"rows": 0},
    {"scale": 1.0}, {"columns": 0},
]  # fmt: skip


def test_a_generated_kernel_is_found_by_its_body_and_its_code() -> None:
    def row_code(statistics: tuple) -> Any:
        return statistics_lists.code_of_lanes(statistics)

    bodies = statistics.body_of_rows, statistics.kernels.merge_strips
    kinds = [
        (bodies[0], statistics_lists.code_of_lanes),
        (bodies[1], statistics_lists.code_of_strips),
        (bodies[0], row_code),
    ]
    launchers = [kernel_of(body, "example_kernel", code, ()) for body, code in kinds]
    assert len({id(launcher) for launcher in launchers}) == 3
    assert launchers == [kernel_of(body, "example_kernel", code, ()) for body, code in kinds]


def arguments(change: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    named = PLAIN | {name: described(**value) if isinstance(value, dict) else value for name, value in change.items()}
    constants = ("BLOCK", "FLOOR", "num_warps", "num_stages")
    return [value for name, value in named.items() if name not in constants], {name: named[name] for name in constants}


def jit_function() -> Any:
    """Triton's own, compiled or not: what it knows of its arguments."""
    from triton import JITFunction

    return JITFunction(example_kernel, **NOT_SPECIALIZED)


class Compiled:
    """Stands for what Triton compiled."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: "Kernel"):
        self.kernel = kernel

    def run(self, *args: Any) -> None:
        assert args[3:9] == ("stream 0", "function", "metadata", None, None, None)
        self.kernel.direct.append((args[:3], self, args[9:]))


class Kernel:
    """Stands for Triton's kernel: it records who compiles, and who launches what was compiled."""

    def __init__(self):
        jit = jit_function()
        self.fn, self.params, self.arg_names, self.pre_run_hooks = jit.fn, jit.params, jit.arg_names, []
        self.compiled: list[Compiled] = []
        self.direct: list[tuple] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> Compiled:
            # left to Triton it would depend on the version: 3.9 warns that 3.10 will not fuse
            assert constants["enable_fp_fusion"] is True
            self.compiled.append(Compiled(self))
            return self.compiled[-1]

        return run


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A GPU that is not there."""
    there = SimpleNamespace(index=0)
    monkeypatch.setattr(launch, "is_known", lambda: True)
    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    driver = SimpleNamespace(get_current_stream=lambda device: "stream 0")
    monkeypatch.setattr(launch.triton.runtime, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: there.index)
    yield there


def made() -> tuple[Kernel, Any]:
    kernel = Kernel()
    return kernel, launch.Launcher(kernel)


@pytest.mark.parametrize("change", [{}, *SAME], ids=str)
def test_the_same_is_launched_directly(device: SimpleNamespace, change: dict[str, Any]) -> None:
    kernel, launcher = made()
    first, constants = arguments({})
    launcher[(3,)](*first, **constants)
    assert (len(kernel.compiled), kernel.direct) == (1, [])
    again, constants = arguments(change)
    launcher[5, 2](*again, **constants)
    ((grid, compiled, given),) = kernel.direct
    assert (grid, compiled, len(kernel.compiled)) == ((5, 2, 1), kernel.compiled[0], 1)
    expected = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in again]
    assert list(given) == [*expected, 128, -1.0]


@pytest.mark.parametrize("what", ["hook", "one of several hooks", "pre-run hook", "another version", "compiled later"])
def test_leaves_it_to_triton(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, what: str
) -> None:
    """Whatever Triton might do beside the launch, it does."""
    from triton import knobs

    kernel, launcher = made()
    positional, constants = arguments({})
    if "hook" in what:
        launcher[(3,)](*positional, **constants)
    if what == "hook":
        monkeypatch.setitem(vars(knobs.runtime), "launch_enter_hook", print)
    elif what == "one of several hooks":
        launch.LAUNCH_HOOKS[0].append(print)
        request.addfinalizer(lambda: launch.LAUNCH_HOOKS[0].remove(print))
    elif what == "pre-run hook":
        kernel.pre_run_hooks.append(print)
    elif what == "compiled later":
        monkeypatch.setattr(launch, "CompiledKernel", int)
    else:
        monkeypatch.setattr(launch, "is_known", lambda: False)
    before = len(kernel.compiled)
    for _ in range(2):
        launcher[(3,)](*positional, **constants)
    assert (len(kernel.compiled), kernel.direct) == (before + 2, [])


def wrap_handle_tensordesc(launcher: Any, signature: dict[int, str], meta: list[str]) -> Any:
    """As that of Triton's module: one map in place of a descriptor, and its shape."""
    (where,), (map_,) = [i for i, kind in signature.items() if kind.startswith("tensordesc")], meta

    def inner(*given: Any) -> Any:
        arguments = [*given[-1]] if isinstance(given[-1], tuple) else [*given[FIRST:]]
        arguments[where : where + 1] = [f"{map_} of {arguments[where].base.data_ptr()}", *arguments[where].shape]
        return (
            launcher(*given[:-1], arguments) if isinstance(given[-1], tuple) else launcher(*given[:FIRST], *arguments)
        )

    return inner


FIRST = 7  # what the function in C takes before the arguments


class Runs:
    """Stands for what runs a compiled kernel, which hands the arguments on in a row (Triton 3.6) or as one."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, kind: str, function: Any):
        self.kind, self.launch = kind, wrap_handle_tensordesc(function, {0: "tensordesc", 1: "*fp32"}, ["map"])

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, metadata: str, *more: Any) -> None:
        first, arguments = (x, y, z, stream, function, "cooperative", metadata), more[3:]
        if self.kind == "another order":
            first = first[::-1]
        self.launch(*first, arguments) if self.kind == "as one" else self.launch(*first, *arguments)


@pytest.mark.parametrize("kind", ["in a row", "as one", "another order", "scratch"])
def test_calls_the_function_in_c(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What it takes is what Triton's launch hands on; where that does more, it is Triton's launch."""
    calls: list[tuple] = []

    def in_c(*given: Any) -> None:
        calls.append(given)

    real = inspect.isfunction, inspect.getclosurevars
    stand_in = SimpleNamespace(isfunction=real[0], getclosurevars=real[1], isbuiltin=lambda one: one is in_c)
    monkeypatch.setattr(launch, "inspect", stand_in)
    _, launcher = made()
    run = Runs(kind, in_c)
    if kind == "scratch":
        run.global_scratch_size = 4
    monkeypatch.setattr(Compiled, "run", run)
    monkeypatch.setattr(Compiled, "src", SimpleNamespace(signature={0: "tensordesc"}), raising=False)
    monkeypatch.setattr(Compiled, "metadata", SimpleNamespace(tensordesc_meta=["map"]), raising=False)
    matrix, numbers = described(), torch.zeros(64)
    positional, constants = arguments({"in_ptr": numbers})
    for _ in range(3):
        launcher[5, 2](matrix, *positional[1:], **constants)
    (compiled,) = launcher.compiled_by_key.values()
    assert (compiled.run is in_c) == (kind in ("in a row", "as one")) and len(calls) == 2
    given = ["map of " + str(matrix.base.data_ptr()), 64, 64, numbers.data_ptr(), NUMBERS.data_ptr(), *positional[3:]]
    given += [constants["BLOCK"], constants["FLOOR"]]
    first = 5, 2, 1, "stream 0", "function", "cooperative", "metadata"
    if kind != "another order":
        assert calls == [(*first, tuple(given)) if kind == "as one" else (*first, *given)] * 2
    # as recorded, with parts of tensors that lie elsewhere
    inputs = [matrix.base, torch.zeros(80), NUMBERS]
    with recording.recording(inputs) as listening:
        launcher[5, 2](matrix, inputs[1][16:], *positional[2:], **constants)
    made_of_it = listening.end([])
    assert made_of_it is not None
    others, recorded = [torch.ones(64, 64, dtype=torch.float16), torch.zeros(80), torch.zeros(64)], calls[-1]
    given[0], given[3:5] = "map of " + str(others[0].data_ptr()), [others[1].data_ptr() + 64, others[2].data_ptr()]
    for _ in range(2):
        del calls[:]
        made_of_it.replay(others)
        before = recorded[:7]
        assert calls == [(*before, tuple(given)) if isinstance(recorded[-1], tuple) else (*before, *given)]


def triton_key(kernel: Any, positional: list[Any], constants: dict[str, Any]) -> Any:
    """What Triton itself tells launches apart by, for Hopper."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    _, specialized, options = bind(*positional, **constants)
    return specialized, options


def test_tells_apart_what_triton_tells_apart(device: SimpleNamespace) -> None:
    """No more and no less."""
    _, launcher = made()
    jit, both = jit_function(), []
    for change in (*OTHERS, *SAME, {}):
        positional, constants = arguments(change)
        launcher.compiled_by_key.clear()
        launcher[(1,)](*positional, **constants)
        both.append(([*launcher.compiled_by_key], triton_key(jit, positional, constants)))
    for one, other in itertools.combinations(both, 2):
        assert (one[0] == other[0]) == (one[1] == other[1]), (one, other)


@pytest.mark.gpu
def test_launches_what_triton_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits both ways, first and again, of pointers that are aligned and that are not."""
    tile = run_as("sm_90").logits

    def scaled(start: int, numbers: int) -> torch.Tensor:
        source = torch.arange(4096.0, device="cuda")[start : start + numbers]
        out = torch.zeros(4096, device="cuda", dtype=torch.bfloat16)
        gradients.scale(out[start : start + numbers], source, torch.tensor(0.37, device="cuda"))
        return out

    def summed(rows: int, start: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(3)
        hidden = torch.randn(rows, 256, generator=made).cuda().bfloat16()
        weight = torch.randn(1000, 256, generator=made).cuda().bfloat16()
        offset = torch.zeros(rows + 4, device="cuda")[start : start + rows]
        strips = Strips.empty(rows, 8, hidden.device).of_rows(rows)
        out = torch.zeros(rows, 1000, device="cuda", dtype=torch.bfloat16)
        statistics.exp_logits(out, strips, hidden, weight, None, None, offset, Transform(), tile)
        return torch.cat([out.float().flatten(), strips.sums[0].flatten()])

    def all_of_them() -> list[torch.Tensor]:
        found = [scaled(start, numbers) for start in (0, 1, 8, 3) for numbers in (1024, 1000, 1, 77)]
        return found + [summed(rows, start) for rows in (1, 16, 300, 301) for start in (0, 1)]

    first, again = all_of_them(), all_of_them()
    exp_logits = kernel_of(statistics.body_of_tiles, "exp_logits_kernel", statistics.code_of_tile, ((),))
    launchers = gradients.scale_kernel, exp_logits
    assert all(launcher.compiled_by_key for launcher in launchers)
    compiled_by_key = [[*launcher.compiled_by_key] for launcher in launchers]
    for launcher in launchers:
        monkeypatch.setitem(launcher.__dict__, "launch", launcher.launch_unsupported)
    plain = all_of_them()
    assert [[*launcher.compiled_by_key] for launcher in launchers] == compiled_by_key
    for one, two, three in zip(first, again, plain, strict=True):
        assert torch.equal(one, two) and torch.equal(two, three)
    # what is launched directly asks Triton's own way for nothing
    for launcher in launchers:
        monkeypatch.delitem(launcher.__dict__, "launch")
        monkeypatch.setattr(launcher, "launch_by_triton", None)
    for one, two in zip(all_of_them(), plain, strict=True):
        assert torch.equal(one, two)
