"""Kernels of GPUs that are not here, compiled for each kind of architecture; ``compile_for.py`` compiles for any."""

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chunked_head.kernels.common.gpus import GPUS

ROOT = Path(__file__).parents[1]
# one of each kind of code; those that are alike differ in what the assembler is told, and in shared memory
ALIKE = {"sm_80": ["sm_86", "sm_89", "sm_120"], "sm_90": [], "sm_100": ["sm_103"], "gfx942": ["gfx950"]}
# bytes that a thread may spill: nobody has measured tiles of Blackwell there
SPILLED = {"sm_100": 768}
MATMULS = "exp_logits_kernel", "grad_logits_kernel", "dhidden_kernel", "dweight_kernel"
HOLDS = {
    "sm_80": ["cp.async.cg", "mma.sync"], "sm_90": ["cp.async.bulk.tensor", "wgmma"],
    "sm_100": ["cp.async.bulk.tensor", "tcgen05.mma"], "gfx942": ["v_mfma", "buffer_load"],
}  # fmt: skip


def compiled(name: str) -> list[dict[str, Any]]:
    environment = os.environ | {"CHUNKED_HEAD_ARCH": name, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/compile_for.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@functools.cache
def all_compiled() -> dict[str, Any]:
    """Two at a time."""
    pool = ThreadPoolExecutor(2)
    return {name: pool.submit(compiled, name) for name in ALIKE}


@pytest.mark.parametrize("name", ALIKE)
def test_compiles(name: str) -> None:
    rows = all_compiled()[name].result()
    assert {row["kernel"] for row in rows} >= set(MATMULS)
    failed = [row for row in rows if "error" in row]
    assert not failed
    may_share = min(GPUS[other].shared for other in (name, *ALIKE[name]))
    for row in rows:
        assert row["shared"] <= may_share, row
        assert 0 <= row["spilled"] <= SPILLED.get(name, 256), row
        if row["kernel"] in MATMULS:
            assert set(HOLDS[name]) <= set(row["holds"]), row
        if row["kernel"] in MATMULS[:2]:
            assert not {"ld.global.b16", "st.global.b16"} & set(row["holds"]), f"numbers one by one: {row}"
