"""Where a call's time goes: launches told apart by their place, at a size that says nothing."""

import json
from pathlib import Path

import pytest

pytest.importorskip("rich")

from benchmarks import inside, measure

CHUNK = ["copy_rows", "exp_logits_kernel", "merge_strips", "dhidden_kernel", "nvjet_hsh_256x128"]
PURPOSES = [inside.OTHERS, "logits", inside.OTHERS, "dhidden", "dweight"]


def test_launches_are_told_apart() -> None:
    assert inside.sorted_launches(CHUNK * 2, 2) == PURPOSES * 2
    with pytest.raises(ValueError, match="expected 3 products in each of 3 chunks"):
        inside.sorted_launches(CHUNK * 2, 3)
    launches = [measure.Launch(name, 10.0 * place, 8000.0 + place) for place, name in enumerate(CHUNK)]
    launches[-1] = measure.Launch(CHUNK[-1], 50_000.0, 4000.0)
    parts = inside.parts_of(launches, 1)
    assert parts["dweight"] == 4.0 and parts["logits"] == 8.001 and parts[inside.SPAN] == 54.0
    assert parts[inside.GAPS] == pytest.approx(54.0 - 4.0 - sum(launch.length for launch in launches[:-1]) / 1e3)
    assert inside.longest_others(launches, 1) == {"merge_strips": 8.002, "copy_rows": 8.0}


@pytest.mark.exhaustive
def test_runs(tmp_path: Path) -> None:
    path = tmp_path / "inside.json"
    assert inside.main(["--shape", "96x32x500", "--rounds", "2", "--device", "cpu", "--output", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["row"] for row in rows] == ["3 products", "default", "into"]
    for row in rows:
        assert row["status"] == "ok" and row["ms"]["span"] > row["ms"]["logits"] > 0
