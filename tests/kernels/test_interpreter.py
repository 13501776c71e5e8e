"""Kernels in Triton's interpreter with nothing of it replaced."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import first_of

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("on a GPU kernels are compiled", allow_module_level=True)


@pytest.mark.parametrize("words", first_of([[], ["--all"]]))
def test_tritons_own_interpreter(words: list[str]) -> None:
    """The tests of ``plain_interpreter.py``, in a process in which nothing of the interpreter is replaced."""
    file = Path(__file__).with_name("plain_interpreter.py")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *words, str(file)]
    environment = os.environ | {"CHUNKED_HEAD_INTERPRETER": "plain"}
    done = subprocess.run(command, env=environment, cwd=file.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
