"""Paths of other GPUs than Hopper's against the same oracle: operands through pointers, gradients' products by BLAS."""

import cases
import loss_cases
import pytest
import torch
from cases import HALVES, Case, Place, combinations, resolve
from chunked_head.kernels.common import gpus
from loss_cases import LossCase, loss_combinations
from tiers import tier

from chunked_head import plan
from chunked_head.stores.matmul import sums_halves

# tiles of any others differ in size alone; sm_100 reads as Hopper does, multiplies as sm_80 does: each fourth case
ARCHITECTURES = {"sm_80": 1, "sm_100": 4}


def ours(params: list) -> list:
    """Those of 16-bit operands in kernels, each for an architecture; each third in every run."""
    halves = [param for param in params if param.values[1] in HALVES and param.values[2].backend == "triton"]
    found = []
    for name, every in ARCHITECTURES.items():
        for i, param in enumerate(halves[::every]):
            marked = pytest.param(name, *param.values, marks=param.marks, id=f"{name}-{param.id}")
            found += tier(marked, i % 3 == 0)
    return found


@pytest.mark.parametrize(("architecture", "case", "dtype", "place"), ours(combinations()), indirect=["architecture"])
def test_cross_entropy_of(architecture: str, case: Case, dtype: torch.dtype, place: Place) -> None:
    cases.hold(case, dtype, place)


@pytest.mark.parametrize(
    ("architecture", "case", "dtype", "place", "schedule"), ours(loss_combinations()),
    indirect=["architecture"],
)  # fmt: skip
def test_loss_of(architecture: str, case: LossCase, dtype: torch.dtype, place: Place, schedule: dict) -> None:
    loss_cases.hold(case, dtype, place, schedule)


@pytest.mark.parametrize("name", gpus.GPUS)
def test_plan_names_the_architecture(name: str) -> None:
    made = plan(4096, 4096, 32000, torch.bfloat16, device=name, backend="triton")
    assert made.sizes.gpu == gpus.GPUS[name] and made.sizes.store == "fast"
    assert made.sizes.multiprocessors == gpus.GPUS[name].multiprocessors
    assert ["GPU", name] in [line.split() for line in str(made).splitlines()]


def test_plan_says_why() -> None:
    def buffer(dtype: torch.dtype, **options: object) -> str:
        lines = str(plan(4096, 4096, 32000, dtype, device="sm_89", backend="triton", **options)).splitlines()
        return next(line for line in lines if line.strip().startswith("logits buffer"))

    assert buffer(torch.bfloat16).endswith("16-bit exponentials relative to the target")
    assert buffer(torch.float16).endswith("(float16)")
    assert buffer(torch.bfloat16, softcap=30.0).endswith("(the gradient takes a pass over them)")
    assert buffer(torch.float32).endswith("32-bit logits (float32)")
    with pytest.raises(ValueError, match="or a GPU's architecture"):
        plan(4096, 4096, 32000, torch.bfloat16, device="sm_12345")


def test_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls its GPUs cuda as well; what nobody has tried there is not done."""
    device = torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert resolve(None, device).__name__.endswith("triton.backend") and not sums_halves(device)
    monkeypatch.setattr(torch.version, "hip", None)
    assert sums_halves(device)


def test_steps_over_rows_are_within_a_tile() -> None:
    """Nobody has written behind the last tile of rows that count."""
    for gpu in gpus.GPUS.values():
        tiles = gpu.wide, gpu.narrow, *gpu.few
        assert all(tile.block_m % gpu.product.block_k == 0 for tile in tiles)


def test_newer_ones_are_taken_for_what_they_can_run() -> None:
    found = {name: gpus.newest(*name) for name in ((7, 5), (8, 0), (8, 7), (8, 9), (9, 0), (10, 3), (12, 1), (13, 0))}
    names = {name: None if gpu is None else next(key for key in gpus.GPUS if gpus.GPUS[key] is gpu)
             for name, gpu in found.items()}  # fmt: skip
    assert names == {
        (7, 5): None, (8, 0): "sm_80", (8, 7): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90", (10, 3): "sm_103",
        (12, 1): "sm_120", (13, 0): None,
    }  # fmt: skip
