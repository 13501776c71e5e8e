"""The benchmark of frameworks' steps, for those that are installed: a step's ways have one loss and one gradient."""

import contextlib
import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import framework_steps, frameworks

NAMES = [name for name in framework_steps.FRAMEWORKS if find_spec(name)]
if "swift" in NAMES:
    importlib.import_module("swift.sequence_parallel")  # scripts functions of torch's, which the suite replaces


def without_a_gpu(name: str) -> Any:
    if name != "megatron":
        return contextlib.nullcontext()
    return importlib.import_module("test_megatron").without_a_gpu()


@pytest.mark.parametrize("name", NAMES)
def test_all_ways_agree(name: str, tmp_path: Path) -> None:
    for case in framework_steps.FRAMEWORKS[name].cases:
        with without_a_gpu(name):
            batch = frameworks.Batch(torch.device("cpu"), 64, str(tmp_path))
            row = framework_steps.compared(name, case, batch, 1)
        assert "status" not in row, row
        ways = row["ways"]
        assert next(iter(ways)) == framework_steps.OWN and next(reversed(ways)) == framework_steps.OURS
        for way in ways.values():
            assert "status" not in way, way
            assert way["ms"] > 0 and way["loss"] == pytest.approx(ways[framework_steps.OWN]["loss"], rel=1e-5)
            norms = [each.get("grad_norm", 0.0) for each in (way, ways[framework_steps.OWN])]
            assert norms[0] == pytest.approx(norms[1], rel=1e-4)
            assert ("grad_norm" in way) == (name != "lm_eval")
