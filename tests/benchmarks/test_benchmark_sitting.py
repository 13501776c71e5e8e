"""`benchmarks.sitting` at tiny shapes on the CPU: parts in processes of their own, and what is said of failures."""

import json

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("psutil")

from benchmarks import __main__ as commands
from benchmarks import sitting

TINY = "--device cpu --shape 48x16x320"
PARTS = {
    "refused": ("refused.json", 1.0, "head --rounds none"),
    "slow": ("slow.json", 1e-5, "head"),
    "partial": ("host.json", 1.0, f"head {TINY} --rounds 1 --no-memory --provider eager --provider liger"),
}


@pytest.mark.exhaustive
def test_parts_that_fail_leave_the_others(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sitting, "PARTS", PARTS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CHUNKED_HEAD_COMMIT", "abc123")
    (tmp_path / "refused.json").write_text("{}")  # an older one
    assert sitting.main(["--output-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().out.split("all parts:")[1]
    assert [path.name for path in tmp_path.iterdir()] == ["host.json"]
    assert json.loads((tmp_path / "host.json").read_text())["commit"] == "abc123"
    for words in ("exit status 2\n    no results", "cut after 0 seconds", "without liger: "):
        assert words in said


def test_the_list_runs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sitting, "run", None)
    assert commands.main(["sitting", "--list", "--only", "host", "memory"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["host", "memory"] and "2 parts, about 1.5 minutes" in lines[2]
    with pytest.raises(SystemExit):
        sitting.main(["--only", "nothing"])


@pytest.mark.parametrize("name", sitting.PARTS)
def test_words_are_those_of_a_benchmark(name, capsys):
    """Every part's words are read by the benchmark that it names, whose device is then not there."""
    file, minutes, words = sitting.PARTS[name]
    assert minutes > 0 and file.endswith(".json")
    with pytest.raises(SystemExit):
        commands.main([*words.split(), "--output", file, "--device", "nowhere"])
    assert "'nowhere' is no device" in capsys.readouterr().err
