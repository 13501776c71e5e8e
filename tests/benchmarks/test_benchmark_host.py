"""The benchmark of host time, end to end at a tiny shape on the CPU."""

import json
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("psutil")

from benchmarks import host, numbers


@pytest.mark.exhaustive
def test_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CHUNKED_HEAD_COMMIT", "abc123")
    output = tmp_path / "host.json"
    argv = ["--device", "cpu", "--rounds", "2", "--calls", "3", "--lengths", "6", "--output", str(output)]
    assert host.main(argv) == 0
    record = json.loads(output.read_text())
    rows = {row["row"]: row for row in record["rows"]}
    assert record["commit"] == "abc123" and all(row["status"] == "ok" for row in rows.values())
    assert {"plain", "four chunks", "log-probabilities of 1", "5 new numbers of tokens"} <= set(rows)
    for name, row in rows.items():
        assert row["host_ms"] > 0
        expected = {"autograd alone": "host_ms"}.get(name, "above_ms" if name.endswith("tokens") else "ratio")
        assert row[expected] > 0 or expected == "above_ms"
    assert "host ms" in capfd.readouterr().out


@pytest.mark.exhaustive
def test_numbers_that_change(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    output = tmp_path / "numbers.json"
    assert numbers.main(["--device", "cpu", "--calls", "2", "--output", str(output)]) == 0
    rows = {row["row"]: row for row in json.loads(output.read_text())["rows"]}
    assert {"none", "clip_low", "gamma", "a summand's temperature", "beta of dpo", "normalizer"} <= set(rows)
    assert all(row["constant_ms"] > 0 and row["changing_ms"] > 0 and row["compiled"] == 0 for row in rows.values())
    assert "ms changing" in capfd.readouterr().out
