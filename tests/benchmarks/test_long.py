"""Long sequences over ranks: small ones on a CPU, equal to one rank's, and refused where their plan does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiers import tier

pytest.importorskip("rich")
pytest.importorskip("psutil")

from benchmarks import long
from chunked_head import plan

CPU = ["--device", "cpu", "--rounds", "1"]


@pytest.fixture(autouse=True)
def commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKED_HEAD_COMMIT", "abc123")


def rows_of(folder: Path, *words: str, status: int = 0) -> list[dict[str, Any]]:
    output = folder / "long.json"
    assert long.main([*CPU, *words, "--output", str(output)]) == status
    rows: list[dict[str, Any]] = json.loads(output.read_text())["rows"]
    return rows


@pytest.mark.parametrize("ranks", [parameter for n in (2, 4) for parameter in tier(pytest.param(n), n == 2)])
def test_ranks_have_one_ranks_loss_and_gradients(ranks: int, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--gpus", str(ranks), "--shape", "512x32x301")
    assert [row["row"] for row in rows] == [*long.LABELS] and {row["status"] for row in rows} == {"ok"}
    alone, *others = rows
    assert alone["last_rows_error"] < 1e-5 and alone["ms"] > 0
    for row in others:
        assert row["agrees"] and row["ranks"] == ranks and row["ratio"] > 0
        assert max(row["loss_error"], row["d_hidden_error"], row["d_weight_error"]) < 1e-5
        assert row["plan_peak_bytes"] < alone["plan_peak_bytes"]


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their plans: no process is begun, and no tensor made."""
    monkeypatch.setattr(long, "run", lambda task: pytest.fail("a process would have begun"))
    large = ["--shape", "1048576x4096x128256", "--dtype", "bf16", "--memory", "20GiB"]
    (row,) = rows_of(tmp_path, *large, status=2)
    assert row["status"] == "refused" and row["error"].startswith("needs ") and "there are 20.0" in row["error"]
    # a budget that no plan meets, and a length that makes no equal slices
    (row,) = rows_of(tmp_path, "--shape", "1048576x4096x128256", "--dtype", "bf16", "--budget", "64MiB", status=2)
    assert "memory_budget of 67108864 bytes" in row["error"] and "too small" in row["error"]
    (row,) = rows_of(tmp_path, "--gpus", "2", "--shape", "510x32x301", status=2)
    assert row["error"] == "510 tokens do not make 4 equal slices"


def test_those_that_fit_run_beside_refused_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[long.Task] = []
    monkeypatch.setattr(long, "run", lambda task: begun.append(task) or [])
    rows = rows_of(tmp_path, "--shape", "512x32x301", "--shape", "131072x32x301", "--memory", "8MiB")
    assert [row["shape"] for row in rows] == ["131072x32x301"] and [str(s) for s in begun[0].shapes] == ["512x32x301"]


def test_what_a_row_needs() -> None:
    """The inputs, a plan, and beside ranks' rows one rank's gradients."""
    shape = long.Shape(1024, 32, 300)
    task = long.Task(1, (shape,), ("one",), 1, "cpu", "float32", None)
    hidden, weight = 4 * 1024 * 32, 4 * 300 * 32
    made = plan(1024, 32, 300, long.shapes.parse_dtype("fp32"), device="cpu").peak_bytes
    assert long.needed(shape, task) == hidden + 2 * weight + 8 * 1024 + made
    of_ranks = long.Task(2, (shape,), ("one", "zigzag"), 1, "cpu", "float32", None)
    assert long.needed(shape, of_ranks) >= long.needed(shape, task) + hidden + weight
