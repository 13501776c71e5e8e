"""Every benchmark from its command line to its file, tiny, on the CPU; ``test_benchmarks.py`` has their parts."""

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("psutil")

from benchmarks import (
    command,
    figures,
    fp8,
    fp8_report,
    frameworks,
    head,
    host,
    losses,
    measure,
    memory,
    model_curves,
    models,
    parallel,
    parallel_rows,
    providers,
    sitting,
    speed,
    speed_rows,
)

pytestmark = pytest.mark.exhaustive
CPU = ["--device", "cpu"]
TINY = [*CPU, "--rounds", "2", "--shape", "64x32x1000"]
BOTH = ["--upstream", "1", "0.37"]
Rows = list[dict[str, Any]]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One figure in place of what a GPU's allocator counts, and a commit."""
    monkeypatch.setattr(measure, "peak", lambda step: ({"peak_bytes": 2**20}, None))
    monkeypatch.setenv("CHUNKED_HEAD_COMMIT", "abc123")


def made(main: Any, folder: Path, *words: str) -> tuple[dict[str, Any], Rows]:
    output = folder / "new" / "found.json"
    assert main([*words, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert str(folder) not in json.dumps(record), "a path of this machine is in the results"
    assert all(row.get("status", "ok") == "ok" for row in record["rows"]), record["rows"]
    return record, record["rows"]


def asked(*names: str) -> list[str]:
    return [word for name in names for word in ("--provider", name)]


def test_head(tmp_path: Path, quick: None, capsys: Any) -> None:
    names = ["eager", "ours", "ours:chunk_tokens=16", "liger"]
    record, rows = made(head.main, tmp_path, *TINY, *BOTH, *asked(*names))
    assert record["commit"] == "abc123" and record["versions"]["torch"] == torch.__version__
    assert "skipped liger: " in capsys.readouterr().out and "liger" in record["skipped"]
    found = {(row["provider"], row.get("upstream")): row for row in rows}
    assert set(found) == {("floor", None)} | {(name, value) for name in names[:3] for value in (1.0, 0.37)}
    assert [row["data"] for row in rows] == sorted((row["data"] for row in rows), reverse=True)
    assert len(rows) == 2 * len(found)
    ours = found[names[2], 0.37]
    assert ours["plan"]["chunks"] == 4 and ours["loss"] == pytest.approx(found["eager", 1.0]["loss"], rel=1e-4)
    assert ours["beside_gradients_bytes"] == 2**20 - 4 * (64 + 1000) * 32


@pytest.mark.parametrize("late", [False, True])
def test_errors(tmp_path: Path, quick: None, late: bool) -> None:
    words = [*asked("late-ours", "late-eager"), "--late"] if late else [*asked("ours", "eager"), *BOTH]
    _, rows = made(head.main, tmp_path, *TINY, "--dtype", "fp32", "--errors", *words)
    rows = [row for row in rows if "below" in row and row["below"] != head.ONE]
    assert len(rows) == (4 if late else 8)
    for row in rows:
        assert all(row[f"{name}_error"] < 1e-5 for name in ("d_hidden", "d_weight", *["logprob"] * late)), row


def test_memory(monkeypatch: Any) -> None:
    tried = []

    def peak(provider: Any, shape: Any, dtype: Any, device: Any) -> Any:
        tried.append((provider.label, shape.tokens))
        if provider.label == "eager" and shape.tokens >= 64:
            return None, measure.Failure(measure.OUT_OF_MEMORY, "no more")
        return {"peak_bytes": shape.tokens * 2**20}, None

    monkeypatch.setattr(memory, "peak_of", peak)
    given = {"tokens": [32, 64, 128], "provider": ("eager", "ours"), "device": torch.device("cpu")}
    args = SimpleNamespace(**given, dtype=torch.float32)
    rows = memory.run_model(("16x320", 16, 320), args, command.Watch(6))
    assert tried == [("eager", 32), ("ours", 32), ("eager", 64), ("ours", 64), ("ours", 128)]
    ours = [row for row in rows if row["provider"] == "ours"]
    assert all(row["difference_bytes"] == row["peak_bytes"] - row["plan"]["peak_bytes"] for row in ours)
    assert memory.largest_difference(rows)["bytes"] == max(row["difference_bytes"] for row in ours)


def test_losses(tmp_path: Path, quick: None) -> None:
    _, rows = made(losses.main, tmp_path, *TINY, *BOTH, "--chunk-tokens", "32")
    found = {(row["workload"], row["upstream"]): row for row in rows}
    assert {name for name, value in found if value == 1.0} == set(losses.WORKLOADS)
    for row in found.values():
        assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])
    products = {name: found[name, 1.0]["products"] for name in losses.WORKLOADS}
    assert (products["logprobs"], products["grpo"], products["dense-kl"]) == (1, 3, 4)


def test_speed(tmp_path: Path, quick: None, monkeypatch: Any) -> None:
    _, rows = made(speed.main, tmp_path, *TINY, *BOTH)
    found = {(row["row"], row.get("upstream")): row for row in rows}
    floors = {name: found.pop((name, None)) for name in speed_rows.FLOORS}
    assert {name for name, value in found if value == 1.0} == set(speed_rows.ROWS)
    for (name, upstream), row in found.items():
        below = floors.get(speed_rows.ROWS[name].below) or found["default", upstream]
        assert row["ratio"] == pytest.approx(row["ms"] / below["ms"])
    monkeypatch.setattr(providers, "_compiled", lambda name, device: providers.eager)
    record, rows = made(speed.main, tmp_path, *TINY, "--peers", "--rows", "loss", "--upstream", "1")
    peers = {row["row"]: row for row in rows}
    assert set(record["skipped"]) == set(providers.PACKAGES)
    assert peers["compile"]["loss"] == pytest.approx(peers["loss"]["loss"], rel=1e-5)


def test_parallel(tmp_path: Path, quick: None) -> None:
    record, rows = made(parallel.main, tmp_path, "--gpus", "2", *TINY)
    found = {row["row"]: row for row in rows}
    assert record["ranks"] == 2 and set(found) == set(parallel_rows.ROWS)
    for row in found.values():
        assert len(row["ms_of_ranks"]) == row["ranks"]
        if "to_products" in row:  # shared by the ranks
            assert row["agrees"] and row["loss"] == pytest.approx(found[row["below"]]["loss"], rel=1e-5, abs=1e-6)
            assert 0 < row["d_hidden_error"] < 1e-5 and 0 < row["d_weight_error"] < 1e-5
    names = ("cross-entropy", "logits", "megatron", "loss-parallel")
    assert [found[name]["messages"] for name in names] == [3, 3, 4, 4]


def test_host(tmp_path: Path, quick: None) -> None:
    _, rows = made(host.main, tmp_path, *CPU, "--rounds", "2", "--calls", "3", "--lengths", "6")
    assert {"plain", "four chunks", "log-probabilities of 1", "5 new numbers of tokens"} <= {r["row"] for r in rows}


def test_sitting(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Parts that fail leave the others."""
    few = "head --device cpu --shape 48x16x320 --rounds 1 --no-memory --provider eager --provider liger"
    parts = ("refused.json", 1.0, "head --rounds none"), ("slow.json", 1e-5, "head"), ("host.json", 1.0, few)
    monkeypatch.setattr(sitting, "PARTS", {part[0]: sitting.Part(*part) for part in parts})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (tmp_path / "refused.json").write_text("{}")  # an older one
    assert sitting.main(["--output-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().out.split("all parts:")[1]
    assert [path.name for path in tmp_path.iterdir()] == ["host.json"]
    for words in ("exit status 2\n    no results", "cut after 0 seconds", "without liger: "):
        assert words in said


def test_a_sitting_on_several_gpus(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Parts of one GPU have one each, no two at a time the same one; then come parts of several."""
    busy, seen = set[str](), list[tuple[str, tuple[str, ...]]]()

    def run(name: str, folder: Path, devices: Any) -> str:
        assert busy.isdisjoint(devices)
        busy.update(devices)
        time.sleep(0.01)
        busy.difference_update(devices)
        seen.append((name, tuple(devices)))
        return name

    monkeypatch.setattr(sitting, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    assert sitting.main(["--gpus", "3"]) == 0
    assert seen[-2:] == [("long-2", ("5", "6")), ("parallel-2", ("5", "6"))]
    assert {name for name, _ in seen} == sitting.PARTS.keys() - {"parallel-4"}
    assert {devices for _, devices in seen[:-2]} == {("5",), ("6",), ("7",)}
    assert "all parts:" in capsys.readouterr().out


def test_models_and_curves(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(models, "TINY", models.TINY | {"vocab_size": 300, "num_hidden_layers": 1})
    _, (plain, ours) = made(models.main, tmp_path, *CPU, "--rounds", "2", "--tokens", "40")
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    monkeypatch.setattr(model_curves, "BPE_VOCAB", 300)
    monkeypatch.setattr(model_curves, "CONTEXT", 16)
    text = tmp_path / "text.txt"
    text.write_text("the sea is deep and never still; the wind would rather be somewhere else. " * 40)
    words = ["--steps", "4", *CPU, "--text", str(text), "--output", str(tmp_path / "curves.json")]
    assert model_curves.main(words) == 0
    where = "chunked_head.integrations.huggingface.fused.linear_loss"
    from chunked_head import linear_loss as right

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output = right(*args, **kwargs)
        return replace(output, loss=output.loss * 1.001)

    monkeypatch.setattr(where, wrong)
    assert model_curves.main(words) == 1


def test_fp8(tmp_path: Path, quick: None, monkeypatch: Any) -> None:
    """Times, memory, errors and training, and the tables and plots that the report makes of them."""
    pytest.importorskip("tokenizers")
    shapes = [*CPU, "--rounds", "2", "--shape", "64x32x1000", "--shape", "48x16x320"]
    monkeypatch.setenv("CHUNKED_HEAD_COMMIT", "abc1234")
    _, rows = made(fp8.main, tmp_path, *shapes)
    calls = [row for row in rows if "call" in row]
    flat = [row for row in calls if row["data"] == "flat"]
    assert len(flat) == 2 * sum(len(ways) for _, ways in fp8.CALLS.values())
    assert len(calls) - len(flat) == len(flat) - 2 * len(fp8.FLAT_ALONE)
    floors = {(row["shape"], row["data"], row["way"]): row["ms"] for row in rows if "call" not in row and "ms" in row}
    for row in calls:
        below = measure.products_name(row["products"])
        assert (
            row["floor_ms"] == floors[row["shape"], row["data"], below] and row["ratio"] == row["ms"] / row["floor_ms"]
        )
        assert ("peak_bytes" in row) == (row["data"] == "flat")
    assert {row["plan"]["peak_bytes"] > 0 for row in calls if "kept" not in row["way"]} == {True}
    trained = json.loads((tmp_path / "new" / "found-training.json").read_text())
    runs = [row for row in trained["rows"] if "seed" in row]
    assert len(runs) == 9 and all(row["curve"][-1][0] == trained["task"]["steps"] for row in runs)
    for run in runs[::3]:  # of one seed all ways begin alike
        first = [row["first_losses"][0] for row in runs if row["seed"] == run["seed"]]
        assert max(first) - min(first) < 1e-3 * first[0]
    assert {row["head"] for row in trained["rows"] if "head" in row} == {"trained on text"}
    compared = trained["compared"]
    assert compared["bf16"]["less_mean"] == 0.0 and compared["bf16"]["is_inside"]
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "new")
    monkeypatch.setattr(figures, "FILES", {"fp8": "found.json", "fp8-training": "found-training.json"})
    texts = {name: section() for name, section in fp8_report.SECTIONS.items()}
    assert texts["fp8-times"].count("| 64 x 32 x 1000 |") == 2 and texts["fp8-errors"].count("plain PyTorch") == 6
    assert "three seeds" in texts["fp8-training"] and sum("commit abc1234" in text for text in texts.values()) == 3
    assert 'fill-opacity="0.25"' in fp8_report.plots()["fp8_differences"]


def test_trainers(tmp_path: Path, capsys: Any) -> None:
    """Every trainer and loop that is there: with our head the same loss and gradients."""
    pytest.importorskip("trl")
    accelerate = pytest.importorskip("accelerate")
    try:
        _, found = made(frameworks.main, tmp_path, *CPU, "--rounds", "1", "--tokens", "64")
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # the trainers'
    rows = {row["trainer"]: row["ways"] for row in found}
    left_out = {"Lightning"} if "Lightning is left out" in capsys.readouterr().out else set()
    assert rows.keys() == frameworks.TRAINERS.keys() - left_out
    for ways in rows.values():
        for key in ("loss", "grad_norm"):
            assert ways["ours"][key] == pytest.approx(ways["plain"][key], rel=1e-4) and ways["plain"][key]
