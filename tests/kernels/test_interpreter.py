"""Kernels in Triton's interpreter with nothing of it replaced: it knows types as Triton does."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from loss_cases import loss_combinations

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("on a GPU kernels are compiled", allow_module_level=True)

# tests of other files that launch all kernels but those of plain_interpreter.py; of losses those in float16, without
# some that launch what others do: the interpreter takes bfloat16 operands of a product for integers
ALIKE = "dft|sum|poly1|grpo|sapo|rloo|vespo|cpo"
IN_FLOAT16 = re.compile(rf"(?!{ALIKE})(?!.*bfloat16).*-float16-triton-interpreted")
TESTS: dict[str, Sequence[str]] = {
    "functions/test_linear_loss.py::test_loss": [
        param.id for param in loss_combinations() if IN_FLOAT16.fullmatch(str(param.id))
    ],
    "functions/test_dhidden.py::test_parts_have_one_sum": ("70-72-600-triton-interpreted-tile0-chosen",),
    "functions/test_frozen_head.py::test_upstream_of_each_token": ("triton-interpreted-unreduced-float16-None-wait",),
    "kernels/test_grad_logits.py::test_recomputed_losses": ("cross-entropy-triton-interpreted",),
    "kernels/test_heavy.py::test_what_is_mended": ("triton-interpreted-True-0.0625-None-13",),
    "kernels/test_kernels.py::test_add_rows": ("triton-interpreted-pieces-float32",),
    "kernels/test_kernels.py::test_dweight": ("triton-interpreted-sizes2-float16-tile1-False-False",),
    "kernels/test_quantised.py::test_exp_logits": ("triton-interpreted-sizes2-tile1-exponentials-False",),
    "kernels/test_rounding.py::test_both_orders": ("triton-interpreted-sizes0-True",),
    "kernels/test_rounding.py::test_mean_of_rows": ("triton-interpreted-70-1",),
    "kernels/test_rounding.py::test_transposed_rows": ("triton-interpreted-sizes0-True",),
    "kernels/test_rounding.py::test_sparse_part": ("triton-interpreted-sizes0-True",),
    "kernels/test_rounding.py::test_dweight": ("None-triton-interpreted-sizes0-tile1-False-float32",),
    "kernels/test_rounding.py::test_finish_with_sparse": ("triton-interpreted-sizes0-True",),
    "kernels/test_rounding.py::test_rows_of_few_places": ("triton-interpreted-3",),
}


def test_tritons_own_interpreter() -> None:
    """In a process in which nothing of the interpreter is replaced."""
    tests = Path(__file__).parents[1]
    named = [f"{tests}/{name}[{each}]" for name, ids in TESTS.items() for each in ids]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *named]
    command.append(str(Path(__file__).with_name("plain_interpreter.py")))
    environment = os.environ | {"CHUNKED_HEAD_INTERPRETER": "plain"}
    done = subprocess.run(command, env=environment, cwd=tests.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
