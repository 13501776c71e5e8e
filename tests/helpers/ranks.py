"""Several processes with a process group each, for tests of what ranks do together."""

import fcntl
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import quick_interpreter
import torch
import torch.distributed as dist
import uninitialised

Work = Callable[[int, str], dict[str, Any]]  # of (rank, device): outcomes by name


# what processes of ranks import, once for all of them
IMPORTS = ["chunked_head", "hypothesis", "pytest", "torch.distributed.fsdp", "torch.distributed.tensor", "triton"]


def spawn(work: Callable[..., None], args: tuple[Any, ...], ranks: int, device: str = "cpu") -> None:
    """Runs ``work`` in a process for each rank. On the CPU processes are forked from one that has imported ``IMPORTS``;
    a process that uses a GPU cannot be forked."""
    if device != "cpu":
        torch.multiprocessing.spawn(work, args, ranks)
        return
    path = os.pathsep.join(sys.path)
    with mock.patch.dict(os.environ, {"PYTHONPATH": path}):  # where the first process looks, when it starts
        multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTS)
        torch.multiprocessing.start_processes(work, args, ranks, start_method="forkserver")


def run(work: Work, ranks: int, folder: Path, device: str = "cpu") -> list[dict[str, Any]]:
    """Results of ``work``, a module-level function, on each rank, as CPU tensors. The backend is gloo, on GPUs NCCL."""
    spawn(enter, (work, ranks, str(folder), device), ranks, device)
    return [torch.load(folder / f"{rank}.pt", weights_only=False, map_location="cpu") for rank in range(ranks)]


def run_once(
    work: Work, ranks: int, factory: pytest.TempPathFactory, name: str, device: str = "cpu"
) -> list[dict[str, Any]]:
    """``run`` once for all workers of pytest-xdist: the first worker runs it and writes the results, or the error, to
    the folder ``name``. The other workers wait and read them."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with Path(folder, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path(folder, "outcome.pt").exists():
            torch.save(outcome(run, work, ranks, folder, device), folder / "outcome.pt")
    found = torch.load(folder / "outcome.pt", weights_only=False)
    assert isinstance(found, list), found
    return found


def enter(rank: int, work: Work, ranks: int, folder: str, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cpu":
        quick_interpreter.install()
    gpu = gpu_of(rank, torch.cuda.device_count()) if device == "cuda" else rank
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(gpu), "WORLD_SIZE": str(ranks)}
    place = device
    if device == "cuda":
        place = f"cuda:{gpu}"
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    with uninitialised.shown():
        found = work(rank, place)
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def gpu_of(rank: int, gpus: int) -> int:
    """The GPU of a rank. On two GPUs, ranks 2 and 3 are on GPUs 1 and 0: NCCL needs the ranks of a group on different
    GPUs, also those of each row and each column in a grid of two by two."""
    return rank if rank < gpus else gpus - 1 - rank % gpus


def need_gpus(device: str, ranks: int) -> None:
    """Skips a test on GPUs where there are fewer than the ranks of a group: NCCL wants one for each."""
    if device == "cuda" and (there := torch.cuda.device_count()) < ranks:
        pytest.skip(f"{ranks} ranks of one group need as many GPUs, and there are {there}")


def outcome(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a function returns, or the traceback, so that the failure of a case does not hide other cases."""
    try:
        return function(*args, **options)
    except Exception:
        return traceback.format_exc()


def said(function: Callable[[], Any]) -> str:
    """Text of what a function returns or raises."""
    try:
        return str(function())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def as_on_a_gpu(function: Callable[[], Any]) -> Any:
    """Runs a function as on a GPU, where the host does not wait to compare the calls of ranks."""
    with mock.patch("chunked_head.parallel.agreement.waits_for_comparison", lambda device: False):
        return function()
