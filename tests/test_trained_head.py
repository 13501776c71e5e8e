"""The benchmark of skipped tiles on a head trained on the spot, at sizes that say nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from chunked_head.kernels.tiles import INTERPRETED

from benchmarks import trained_figure, trained_head
from benchmarks.trained_text import Tokens


@pytest.mark.skipif(not INTERPRETED, reason="on a CPU tiles are skipped under Triton's interpreter alone")
def test_trained_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = (np.arange(4000) ** 2 // 7 % 90).astype(np.uint16)
    Tokens(ids, ids[:400], 90, "made up").save(tmp_path / "tokens.npz")
    path = tmp_path / "found.json"
    sizes = {
        "steps": 2, "hidden": 64, "layers": 1, "context": 16, "batch": 2, "held-out": 64, "measured-tokens": 40,
        "curve": 0.9, "device": "cpu", "tokens": tmp_path / "tokens.npz", "output": path,
    }  # fmt: skip
    arguments = [word for option, value in sizes.items() for word in (f"--{option}", str(value))]
    assert trained_head.main([*arguments, "--tolerances", "1e-9", "0.9"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "benchmark": "trained_head", "device": "cpu", "curves": 2, "rows": 9
    }  # fmt: skip
    found = json.loads(path.read_text())
    plain, skipping = found["curves"]
    assert plain["tolerance"] is None and not plain["tiles"] and len(plain["losses"]) == 2
    assert skipping["tolerance"] == 0.9 and skipping["tiles"][0][1] < 1.0  # of the tiles are kept
    for row in found["rows"]:
        assert row["tokens"] == 40 and row["ms"] > 0.0
        if row["tolerance"] == 0.9:
            assert row["kept_tiles"] < 1.0 and row["dropped_mass"] > 0.0
        else:
            assert row.get("kept_tiles", 1.0) == 1.0 and max(row["dhidden"], row["dweight"]) < 1e-2
    trained_figure.draw(found["curves"], tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 10_000
