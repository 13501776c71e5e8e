"""Numbers of README and docs/ are those of benchmarks/results: `python -m benchmarks report` makes them."""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import figures, report, sitting, svg


def test_committed_is_what_the_command_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0, capsys.readouterr().out + "run `python -m benchmarks report`"


def test_a_changed_number_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report.read("head")
    next(row for row in found["rows"] if row["provider"] == "eager")["ms"] += 10
    (tmp_path / "head.json").write_text(json.dumps(found))
    monkeypatch.setitem(figures.FILES, "head", str(tmp_path / "head.json"))
    assert report.main(["--check"]) == 1
    assert "README.md" in capsys.readouterr().out


def test_a_tree_that_is_no_commit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = report.read("head")
    (tmp_path / "head.json").write_text(json.dumps(found | {"commit": found["commit"] + "-dirty"}))
    monkeypatch.setitem(figures.FILES, "head", str(tmp_path / "head.json"))
    with pytest.raises(ValueError, match="measure it again"):
        report.read("head")


def test_a_page_names_the_commits_of_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another commit than the one that a page prints, figures are refused."""
    for module in (report, figures):
        monkeypatch.setattr(module, "source", lambda *questions, **options: "commit 1234567")
    with pytest.raises(ValueError, match=r"README.md shows .*-cuda.json and does not name its commit, [0-9a-f]{7}"):
        report.make()


def test_old_figures_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a hundred commits on, and where the commit is none of this repository's."""
    commits = {"new": "1" * 40, "late": "2" * 40, "other": "3" * 40, "beside": "1" * 40}
    for name, commit in commits.items():
        record = {"commit": commit, "date": f"2026-11-0{4 - int(commit[0])}T03:00"}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "FILES", {name: f"{name}.json" for name in [*commits, "not measured yet"]})
    behind = {"1": "99\n", "2": "100\n"}

    def count(words: list[str], **options: object) -> SimpleNamespace:
        text = behind.get(words[-1][0], "")
        return SimpleNamespace(stdout=text, returncode=0 if text else 128)

    monkeypatch.setattr(figures.subprocess, "run", count)
    assert figures.ages() == [
        "1111111 of 2026-11-03, 99 commits ago: new.json, beside.json",
        "old: 2222222 of 2026-11-02, 100 commits ago: late.json",
        "old: 3333333 of 2026-11-01, an unknown number of commits ago: other.json",
    ]
    assert report.commits().splitlines()[0] == "- 2026-11-03, commit 1111111: `new`, `beside`"
    monkeypatch.setattr(report, "make", dict)
    assert report.main(["--check"]) == 0 and "benchmarks sitting` measures" in capsys.readouterr().out


ROWS = [
    {"shape": "8x2x9", "data": data, "status": "ok", "provider": name, "ms": ms, "ms_p25": ms - 0.1, "ms_p75": ms + 0.1}
    | ({"ratio": ms / 10, "peak_bytes": 2**30, "d_hidden_error": 1e-3, "d_weight_error": error} if error else {})
    for data, name, ms, error in (
        ("trained", "floor", 10.0, 0.0), ("trained", "ours", 10.2, 2e-3),
        ("flat", "floor", 10.0, 0.0), ("flat", "ours", 10.4, 5e-4),
    )
]  # fmt: skip


def test_two_heads_on_two_kinds_of_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time and error of the same data side by side; two decimals; what did not run stands last."""
    found = report.read("head") | {"rows": ROWS, "skipped": {"torch": "too old"}, "commit": "be47ae3"}
    found["command"] += " --provider ours"
    failed = {"shape": "8x4x9", "data": "trained", "status": "failed", "provider": "quack", "error": "no such size"}
    small = [row | {"shape": "8x4x9"} for row in ROWS if row["data"] == "trained"]
    of_file = {"head": ROWS[:2], "head-flat": ROWS[2:], "small": [*small, failed], "small-flat": []}
    of_file["small-flat"] = [row | {"shape": "8x4x9"} for row in ROWS if row["data"] == "flat"]
    for name, rows in of_file.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found | {"rows": rows}))
        monkeypatch.setitem(figures.FILES, name, str(tmp_path / f"{name}.json"))
    lines = report.two_heads().splitlines()
    assert lines[0] == "|  | 8 x 2 x 9: ms | GiB | error, % | 8 x 4 x 9: ms | GiB | error, % |"
    words = "Pairs of numbers: on trained-like data and on flat data. -: not measured, or it did not run ([why]"
    assert any(line.startswith(words) for line in lines)
    assert lines[5].startswith("| quack, scaled exponentials | did not run: no such size |")
    assert lines[3] == "| **chunked_head**" + 2 * " | 10.20, 10.40 | 1.0 | 0.20, 0.10" + " |"
    assert lines[4].startswith("| `F.linear_cross_entropy` | did not run: too old |") and "commit be47ae3." in lines[-1]
    (tmp_path / "head.json").write_text(json.dumps(found))
    text = report.heads("head")
    assert "**8 x 2 x 9, trained-like data**" in text and "**8 x 2 x 9, flat data**" in text
    assert "| **chunked_head** | 10.20 ms (10.10 to 10.30) | 1.02 | 1.0 GiB | 1.0e-03 | 2.0e-03 | - |" in text
    slower = [row | {"ms": 1.01 * row["ms"]} for row in ROWS]
    (tmp_path / "other").mkdir()
    monkeypatch.setitem(figures.FILES, "head", "head.json")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "HEADS", ("head",))
    (tmp_path / "other" / "head.json").write_text(json.dumps(found | {"rows": slower}))
    assert report.main(["--beside", str(tmp_path / "other")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| +1.0 % |") == len(ROWS) and "The other sitting: NVIDIA H" in printed
    assert report.main(["--beside", str(tmp_path)]) == 0 and "| +0.0 % |" in capsys.readouterr().out


def test_trainers_that_failed_stand_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results, way = report.read("trainers"), {"ms": 2.0, "peak_bytes": 2**30}
    results["rows"] = [
        {"trainer": "absent", "status": "failed", "error": "ImportError: none"},
        {"trainer": "half", "ways": {"plain": way, "ours": {"status": "out of memory"}}},
    ]
    (tmp_path / "trainers.json").write_text(json.dumps(results))
    monkeypatch.setitem(figures.FILES, "trainers", str(tmp_path / "trainers.json"))
    assert report.trainers().splitlines()[2:4] == [
        "| half | 2.0 ms | out of memory | 1.0 GiB | - |", "| absent | did not run: ImportError: none | - | - | - |",
    ]  # fmt: skip


def test_numbers_of_near_dots_are_apart() -> None:
    """Each beside its dot and before its name in the legend."""
    dots = {"one, a name that is rather long": [(50.0, 1.0)], "two": [(51.0, 1.0)], "three": [(52.0, 0.98)]}
    picture = svg.plot("", "", "", dots)
    found = re.findall(r'<text x="(\d+)" y="(\d+)" [^>]*font-weight="bold" text-anchor="start">(\d)<', picture)
    places = [(int(x), int(y)) for x, y, _ in found]
    assert [number for *_, number in found] == ["1", "2", "3"]
    assert all(abs(a[0] - b[0]) > 19 or abs(a[1] - b[1]) > 13 for a, b in itertools.combinations(places, 2))
    assert all(f">{name}<" in picture for name in dots)


def test_no_result_is_kept_that_nothing_shows() -> None:
    found = {path.name for path in figures.RESULTS.iterdir() if path.name != "beside"}
    assert found <= set(figures.FILES.values())
    assert {path.name for path in figures.RESULTS.glob("beside/*")} <= {figures.FILES[name] for name in figures.HEADS}


def test_figures_of_gpus_are_of_those() -> None:
    for page, question in (("README.md", "head"), ("README.md", "models"), ("docs/benchmarks.md", "late")):
        assert f"{report.read(question)['device']}, torch " in (report.ROOT / page).read_text()
    expected = {"speed": "sm_90", "losses": "sm_90"}
    assert {question: report.read(question)["architecture"] for question in expected} == expected


def test_a_sitting_writes_what_is_shown() -> None:
    renewed = {part.file for part in sitting.PARTS.values()}
    others = {figures.FILES[name] for name in ("framework-steps", "framework-axolotl")}
    assert renewed | others == set(figures.FILES.values()) and not renewed & others
    pytest.importorskip("rich")
    from benchmarks import losses

    assert set(losses.WORKLOADS) <= set(figures.NAMES)


def test_every_table_is_shown() -> None:
    texts = "".join(path.read_text() for path in report.make() if path.suffix == ".md")
    assert [name for name in report.SECTIONS if f"<!-- report: {name} -->" not in texts] == []
