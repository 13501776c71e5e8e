"""What is interpreted by traces is what is interpreted from the start, to the bit; and Triton's own interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import traced_interpreter
from tiers import first_of
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("on a GPU kernels are compiled", allow_module_level=True)

import triton
import triton.language as tl


@triton.jit
def walk_kernel(out_ptr, total_ptr, x_ptr, limit_ptr, n, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows by turns; the total is read and written, so that a program that ran twice would show."""
    for row in range(tl.program_id(0), ROWS, tl.num_programs(0)):
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, n, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * n + offs, mask=offs < n, other=float("-inf"))
            if tl.max(x, 0) > tl.load(limit_ptr):
                total += tl.where(offs < n, x, 0.0)
            else:
                top, at = tl.max(x, 0, return_indices=True)
                total += top * scale + at
        tl.store(out_ptr + row, tl.sum(total, 0))
        tl.store(total_ptr, tl.load(total_ptr) + tl.sum(total, 0))


def walked(x: Tensor, limit: float, programs: int, scale: float) -> tuple[Tensor, Tensor]:
    rows, n = x.shape
    out, total = torch.full((rows,), torch.nan), torch.zeros(())
    walk_kernel[(programs,)](out, total, x, torch.tensor(limit), n, scale, ROWS=rows, BLOCK=16)
    return out, total


def test_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator().manual_seed(0)
    cases = [
        (torch.randn(rows, n, generator=made), limit, programs, scale)
        for rows, n in ((5, 40), (7, 16), (3, 33))
        for limit in (-9.0, 1.5, 9.0)
        for programs in (1, 2, 5)
        for scale in (1.0, 0.5)
    ]
    traced = [walked(*case) for case in 2 * cases]
    monkeypatch.setattr(traced_interpreter.Launch, "trace_of", lambda self, args: None)
    for ours, case in zip(traced, 2 * cases, strict=True):
        torch.testing.assert_close(ours, walked(*case), rtol=0, atol=0)


@pytest.mark.parametrize("words", first_of([[], ["--all"]]))
def test_tritons_own_interpreter(words: list[str]) -> None:
    """The tests of ``plain_interpreter.py``, in a process in which nothing of the interpreter is replaced."""
    file = Path(__file__).with_name("plain_interpreter.py")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *words, str(file)]
    environment = os.environ | {"CHUNKED_HEAD_INTERPRETER": "plain"}
    done = subprocess.run(command, env=environment, cwd=file.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
