"""Where tests run: the CPU by torch and by Triton's interpreter, a GPU by both backends (``-m gpu``)."""

import gc
import importlib
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import quick_interpreter
import tiers
import torch
import uninitialised
from hypothesis import settings

HAS_GPU = torch.cuda.is_available()
# the tests' sizes are small, and several workers may share the cores; `make test-machine` asks for others
torch.set_num_threads(int(os.environ.get("CHUNKED_HEAD_THREADS", "1")))
with torch.device("meta"):
    torch.empty(0)  # a device's context lists torch's constructors when it is first met: not those of uninitialised.py
if not HAS_GPU:
    # before anything imports triton: kernels are interpreted or compiled as the variable says at import
    os.environ["TRITON_INTERPRET"] = "1"
    if os.environ.get("CHUNKED_HEAD_INTERPRETER") != "plain":  # as for tests/kernels/plain_interpreter.py
        quick_interpreter.install()
importlib.import_module("torch._decomp.decompositions_for_jvp")  # scripts functions, which call torch's own
importlib.import_module("torch._dynamo")  # lists torch's functions when it is imported: not those of uninitialised.py
# lists them again once torch.distributed has been imported; 2.9 to 2.15 have this name
LIST_FUNCTIONS = getattr(importlib.import_module("torch._dynamo.trace_rules"), "get_torch_obj_rule_map", bool)

# no examples remembered from earlier runs; test_properties.py pins its draw
settings.register_profile("repeatable", database=None)
settings.load_profile("repeatable")


def asked_for(config: pytest.Config) -> set[str]:
    """Names that ``-m`` asks for, and not those that it leaves out."""
    return set(re.findall(r"(?<!not )\b(?!not\b)\w+", config.option.markexpr))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--guards", action="store_true", help="guard memory on a GPU too, where tests measure it")
    parser.addoption("--all", action="store_true", help="run the exhaustive tests too, which the default -m leaves out")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.all:
        config.option.markexpr = config.option.markexpr.replace(" and not exhaustive", "")
    asked = asked_for(config)
    if config.option.all or "exhaustive" in asked:
        tiers.ALL, os.environ[tiers.ASKED] = True, "all"
    if "multigpu" in asked and torch.cuda.device_count() < 2:
        raise pytest.UsageError("tests marked multigpu were asked for and torch sees fewer than two GPUs")
    if "gpu" in asked and not HAS_GPU:
        raise pytest.UsageError("tests marked gpu were asked for and torch sees no GPU: they fail rather than skip")


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: Any) -> list[Any] | None:
    """No tests of a GPU where there is none: they would be left out one by one."""
    if HAS_GPU or not name.startswith("test"):
        return None
    marks = {mark.name for mark in (*collector.iter_markers(), *getattr(obj, "pytestmark", ()))}
    return [] if marks & {"gpu", "multigpu"} else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of several processes come first: workers take over each other's last ones, and would run a file's processes
    twice."""
    items.sort(key=lambda item: item.path.parent.name != "ranks")


def pytest_collection_finish() -> None:
    """Modules and tests stay, and no collection of garbage walks them again: benchmarks ask for many."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """The losses' arithmetic runs by kernels, as for users; as plain PyTorch in tests that are marked
    ``plain_arithmetic`` and say why: to write a kernel takes a tenth of a second."""
    mark = request.node.get_closest_marker("plain_arithmetic")
    if mark is None:
        yield
        return
    assert mark.args and mark.args[0], "plain_arithmetic says why"
    from chunked_head.arithmetic import evaluate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "arithmetic_of", lambda *call: (None, []))
        yield


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


@pytest.fixture(params=["sm_80", "sm_100"])
def architecture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Calls take another GPU's paths than Hopper's: operands through pointers, other tiles."""
    from chunked_head.call.spec import SPECS
    from chunked_head.core import gpus

    caches = gpus.gpu_of.cache_clear, gpus.multiprocessors_of.cache_clear, SPECS.clear
    monkeypatch.setattr(gpus, "ARCHITECTURE_OVERRIDE", request.param)
    for forget in caches:
        forget()
    yield request.param
    for forget in caches:
        forget()


@pytest.fixture(autouse=True)
def memory_shows(request: pytest.FixtureRequest) -> Iterator[None]:
    """Numbers that nobody has written, and writes beyond a tensor."""
    LIST_FUNCTIONS()
    with uninitialised.shown(gpu=request.config.option.guards):
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20)
    # the oracle and eager PyTorch are the measure of error: full precision wherever fp32 is said
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
