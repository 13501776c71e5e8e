"""Numbers of README and docs/ are those of benchmarks/results: `python -m benchmarks report` makes them."""

import itertools
import json
import re
from pathlib import Path

import pytest

from benchmarks import report, sitting, svg


def test_committed_is_what_the_command_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0, capsys.readouterr().out + "run `python -m benchmarks report`"


def test_a_changed_number_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report.read("head")
    next(row for row in found["rows"] if row["provider"] == "eager")["ms"] += 10
    (tmp_path / "head.json").write_text(json.dumps(found))
    monkeypatch.setitem(report.FILES, "head", str(tmp_path / "head.json"))
    assert report.main(["--check"]) == 1
    assert "README.md" in capsys.readouterr().out


def test_a_tree_that_is_no_commit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = report.read("head")
    (tmp_path / "head.json").write_text(json.dumps(found | {"commit": found["commit"] + "-dirty"}))
    monkeypatch.setitem(report.FILES, "head", str(tmp_path / "head.json"))
    with pytest.raises(ValueError, match="measure it again"):
        report.read("head")


def test_labels_of_near_dots_are_apart() -> None:
    picture = svg.plot("", "", "", {"one": [(50.0, 1.0)], "two": [(51.0, 1.0)], "three": [(52.0, 0.9)]})
    found = [int(y) for y in re.findall(r'y="(\d+)" [^>]*font-weight="bold" text-anchor', picture)]
    assert len(found) == 3 and all(abs(a - b) >= 12 for a, b in itertools.combinations(found, 2))


def test_no_result_is_kept_that_nothing_shows() -> None:
    assert {path.name for path in report.RESULTS.iterdir()} == set(report.FILES.values())


def test_figures_of_gpus_are_of_those() -> None:
    name = next(name for name in ("H100", "H200") if name in report.read("head")["device"])
    for page in ("README.md", "docs/benchmarks.md"):
        assert re.search(rf"bfloat16,? on one {name}\b", (report.ROOT / page).read_text())
    expected = {"speed": "sm_90", "losses": "sm_90"}
    assert {question: report.read(question)["architecture"] for question in expected} == expected


def test_a_sitting_writes_what_is_shown() -> None:
    assert {file for file, _, _ in sitting.PARTS.values()} <= set(report.FILES.values())
    pytest.importorskip("rich")
    from benchmarks import losses

    assert set(losses.WORKLOADS) <= set(report.NAMES)


def test_every_table_is_shown() -> None:
    texts = "".join(path.read_text() for path in report.get_or_make() if path.suffix == ".md")
    assert [name for name in report.SECTIONS if f"<!-- report: {name} -->" not in texts] == []
