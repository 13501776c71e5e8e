"""Kernels in Triton's interpreter with nothing of it replaced: it knows types as Triton does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("on a GPU kernels are compiled", allow_module_level=True)

# tests of other files that launch all kernels but those of plain_interpreter.py; of float16: the interpreter takes
# bfloat16 operands of a product for integers
TESTS = {
    "functions/test_linear_loss.py::test_loss": ("cross-entropy", "everything", "kept"),
    "functions/test_dhidden.py::test_parts_have_one_sum": ("70-72-600-triton-interpreted-tile0-chosen",),
    "kernels/test_grad_logits.py::test_recomputed_losses": ("cross-entropy-triton-interpreted",),
    "kernels/test_kernels.py::test_add_rows": ("triton-interpreted-pieces-float32",),
    "kernels/test_kernels.py::test_dweight": ("triton-interpreted-sizes2-float16-tile1-False-False",),
    "kernels/test_quantised.py::test_exp_logits": ("triton-interpreted-sizes2-tile1-exponentials-False",),
}


def test_tritons_own_interpreter() -> None:
    """In a process in which nothing of the interpreter is replaced."""
    tests = Path(__file__).parents[1]
    named = [f"{tests}/{name}[{each}" for name, ids in TESTS.items() for each in ids]
    named = [f"{one}-float16-triton-interpreted]" if "test_loss" in one else f"{one}]" for one in named]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--all", *named]
    command.append(str(Path(__file__).with_name("plain_interpreter.py")))
    environment = os.environ | {"CHUNKED_HEAD_INTERPRETER": "plain"}
    done = subprocess.run(command, env=environment, cwd=tests.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
