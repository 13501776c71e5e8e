"""Kernels of GPUs that are not here, compiled for each architecture that Triton's code differs for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chunked_head.kernels.common.gpus import GPUS
from chunked_head.kernels.common.tiles import PRODUCT_ROWS
from compile_for import MATMULS

ROOT = Path(__file__).parents[2]
# whose calls launch the same
ALIKE = {"sm_100": [], "sm_80": ["sm_86", "sm_89", "sm_120"], "sm_90": [], "gfx942": []}
# bytes that a thread may spill: nobody has measured tiles of Blackwell there
SPILLED = {"sm_100": 768}
POINTERS = ["cp.async.cg", "mma.sync"]
HOLDS = {
    "sm_90": ["cp.async.bulk.tensor", "wgmma"], "sm_100": ["cp.async.bulk.tensor", "tcgen05.mma"],
    "gfx942": ["v_mfma", "buffer_load"],
}  # fmt: skip


def compiled(name: str) -> list[dict[str, Any]]:
    environment = os.environ | {"CHUNKED_HEAD_ARCH": name, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/helpers/compile_for.py"), *ALIKE[name]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", ALIKE)
def test_compiles(first: str) -> None:
    rows_of_all = compiled(first)
    for name in (first, *ALIKE[first]):
        rows = [row for row in rows_of_all if row["architecture"] == name]
        assert {row["kernel"] for row in rows} >= set(MATMULS)
        failed = [row for row in rows if "error" in row]
        assert not failed
        for row in rows:
            assert row["shared"] <= GPUS[name].shared, row
            assert 0 <= row["spilled"] <= SPILLED.get(name, 256), row
            if row["kernel"] in MATMULS:
                assert set(HOLDS.get(name, POINTERS)) <= set(row["holds"]), row
            if row["kernel"] in MATMULS[:2]:
                assert not {"ld.global.b16", "st.global.b16"} & set(row["holds"]), f"numbers one by one: {row}"


def test_those_alike_launch_the_same() -> None:
    for name, others in (*ALIKE.items(), ("sm_100", ["sm_103"]), ("gfx942", ["gfx950"])):
        own = {"name": None, "shared": None, "multiprocessors": None}
        assert all(GPUS[other]._replace(**own) == GPUS[name]._replace(**own) for other in others)


def test_products_read_no_rows_that_nobody_wrote() -> None:
    assert all(gpu.product.block_k <= PRODUCT_ROWS for gpu in GPUS.values())
