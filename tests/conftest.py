"""Where tests run: the CPU by torch and by Triton's interpreter, a GPU by both backends (``-m gpu``)."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import quick_interpreter
import torch
import uninitialised
from hypothesis import settings

HAS_GPU = torch.cuda.is_available()
torch.set_num_threads(1)  # the tests' sizes are small, and several workers may share the cores
with torch.device("meta"):
    torch.empty(0)  # a device's context lists torch's constructors when it is first met: not those of uninitialised.py
if not HAS_GPU:
    # before anything imports triton: kernels are interpreted or compiled as the variable says at import
    os.environ["TRITON_INTERPRET"] = "1"
    quick_interpreter.install()

# no examples remembered from earlier runs; test_properties.py pins its draw
settings.register_profile("repeatable", database=None)
settings.load_profile("repeatable")


# begun first, so that no worker is left with one of them at the end
LONGEST = ("compile_for", "linear_loss", "packaging", "patch_compile", "fullgraph", "vocab_parallel_logits", "demo",
           "vocab_parallel", "token_parallel", "compiled", "benchmark_parallel", "architectures")  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
    asked = config.getoption("-m").replace("not gpu", "").replace("not multigpu", "")
    if "multigpu" in asked and torch.cuda.device_count() < 2:
        raise pytest.UsageError("tests marked multigpu were asked for and torch sees fewer than two GPUs")
    if HAS_GPU or "gpu" not in asked:
        return
    if any(item.get_closest_marker("gpu") for item in items):
        raise pytest.UsageError("tests marked gpu were asked for and torch sees no GPU: they fail rather than skip")


def pytest_collection_finish() -> None:
    """Modules and tests stay, and no collection of garbage walks them again: benchmarks ask for many."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def uncompiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """The losses' arithmetic runs as plain PyTorch: to compile each of hundreds of sums of losses would take an hour.
    Tests marked ``compiled`` hold the compiled ones, and the kernels, to these."""
    if request.node.get_closest_marker("compiled"):
        yield
        return
    from chunked_head.engine.arithmetic import kernels  # not at the top: it imports triton

    with torch.compiler.set_stance("force_eager"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "arithmetic_of", lambda *call: (None, []))
        yield


@pytest.fixture(autouse=True)
def nothing_known_before() -> None:
    """What one test's function taught about compiling it says nothing of the next one's, and each records its own."""
    from chunked_head.engine.arithmetic.compiled import SLOW  # not at the top: it imports triton
    from chunked_head.engine.replay.replay import REPLAYS, SEEN

    SLOW.clear()
    REPLAYS.clear()
    SEEN.clear()


class PublicTorch:
    """A torch without a name that begins with an underscore."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(torch, name)


@pytest.fixture(params=["private", "documented"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test runs with torch's private names, where the library asks for them, and without."""
    from chunked_head.core import private

    if request.param == "documented":
        monkeypatch.setattr(private, "torch", PublicTorch())
    private.private.cache_clear()
    yield
    private.private.cache_clear()


@pytest.fixture(autouse=True)
def unwritten_memory_shows() -> Iterator[None]:
    with uninitialised.shown():
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20)
    # the oracle and eager PyTorch are the measure of error: full precision wherever fp32 is said
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
