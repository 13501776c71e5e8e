"""Numbers of README and docs/ are those of benchmarks/results: `python -m benchmarks report` makes them."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

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


def test_what_did_not_run_is_shown_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def row(provider: str, below: str, **more: Any) -> dict[str, Any]:
        errors = {f"{name}_error": 0.00123 for name in ("d_hidden", "d_weight", "logprob")}
        timed = {"status": "ok", "ms": 39.31, "ratio": 1.0271, "peak_bytes": 2**30}
        return {"shape": "1x2x3", "provider": provider, "below": below} | timed | errors | more

    rows = [
        row("floor, 4 products", ""), row("late-eager", "floor, 4 products", status="out of memory", error="40 GiB"),
        row("late-ours", "floor, 4 products"), row("late-ours", "floor, 1 product", ratio=1.0111),
    ]  # fmt: skip
    found = {"commit": "0123abc", "rows": rows, "skipped": {"late-trl": "trl is not installed"}}
    (tmp_path / "late.json").write_text(json.dumps(found))
    monkeypatch.setitem(report.FILES, "late", str(tmp_path / "late.json"))
    assert report.heads(question="late", shape="1x2x3").splitlines()[2:] == [
        "| **chunked_head** | 39.3 ms | 1.027 | 1.0 GiB | 1.011 | 1.2e-03 | 1.2e-03 | 1.2e-03 |",
        "| TRL's `ChunkedLogProbFunction` | did not run: trl is not installed | - | - | - | - | - | - |",
        "| plain PyTorch | did not run: out of memory, 40 GiB | - | - | - | - | - | - |",
    ]


def test_labels_of_near_dots_are_apart() -> None:
    picture = svg.plot("", "", "", {"one": [(50.0, 1.0)], "two": [(51.0, 1.0)], "three": [(52.0, 0.9)]})
    found = [int(y) for y in re.findall(r'y="(\d+)" [^>]*font-weight="bold" text-anchor', picture)]
    assert len(found) == 3 and all(abs(a - b) >= 12 for a, b in itertools.combinations(found, 2))


def test_no_result_is_kept_that_nothing_shows() -> None:
    assert {path.name for path in report.RESULTS.iterdir()} == set(report.FILES.values())


def test_figures_of_gpus_are_of_those() -> None:
    assert "H100" in report.read("head")["device"]
    expected = {"speed": "sm_90", "losses": "sm_90"}
    assert {question: report.read(question)["architecture"] for question in expected} == expected


def test_a_sitting_writes_what_is_shown() -> None:
    assert {file for file, _, _ in sitting.PARTS.values()} <= set(report.FILES.values())
    pytest.importorskip("rich")
    from benchmarks import losses

    assert set(losses.WORKLOADS) <= set(report.NAMES)


def test_every_table_is_shown() -> None:
    texts = "".join(path.read_text() for path in report.made() if path.suffix == ".md")
    assert [name for name in report.SECTIONS if f"<!-- report: {name} -->" not in texts] == []


def test_steps_of_frameworks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ways = {
        "its own": {"ms": 71.84, "peak_bytes": 18 * 2**30}, "fused": {"status": "out of memory"},
        "ours": {"ms": 53.8, "peak_bytes": 5.4 * 2**30},
    }  # fmt: skip
    rows = [
        {"framework": "verl", "version": "0.9.1", "case": "PPO", "lines": 2, "ways": ways},
        {"framework": "Axolotl", "status": "failed", "error": "its package is missing"},
    ]
    made = {"rows": rows, "device": "a GPU", "versions": {"torch": "2"}, "date": "2026-01-02T", "commit": "1234567890"}
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(made | {"command": "python -m benchmarks.framework_steps --output x/y.json"}))
    for name in ("framework-steps", "framework-axolotl"):
        monkeypatch.setitem(report.FILES, name, str(path))
    lines = report.framework_steps().splitlines()
    assert lines[2:5] == [
        "| verl 0.9.1, PPO: its own | 71.8 ms | 18.0 GiB | 53.8 ms | 5.4 GiB | 2 |",
        "| verl 0.9.1, PPO: fused | out of memory | - | 53.8 ms | 5.4 GiB | 2 |",
        "",
    ]
