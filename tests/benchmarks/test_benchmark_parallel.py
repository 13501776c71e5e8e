"""`benchmarks.parallel` end to end with two processes on the CPU, and that it notices what is wrong."""

import json

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("psutil")

from benchmarks import measure, parallel, parallel_ranks, parallel_rows, traffic
from benchmarks.parallel_rows import ROWS
from benchmarks.shapes import Shape

SHAPE = "64x32x1000"
TINY = ["--device", "cpu", "--gpus", "2", "--shape", SHAPE, "--rounds", "2"]
SHARED = {
    "cross-entropy", "whole-budget", "small-budget", "grpo", "sequence-sharded", "logits", "megatron", "loss-parallel"
}  # fmt: skip
ALONE = {"one-gpu", "one-gpu-grpo"}
BARE = {"matmuls", "matmuls-part", "all-reduce"}


@pytest.mark.exhaustive
def test_all_rows_end_to_end(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("CHUNKED_HEAD_COMMIT", "abc123")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "2")
    output = tmp_path / "new" / "parallel.json"
    assert parallel.main([*TINY, "--output", str(output)]) == 0
    printed = capfd.readouterr().out
    record = json.loads(output.read_text())
    assert record["commit"] == "abc123" and record["versions"]["torch"] == torch.__version__ and record["ranks"] == 2
    assert record["command"].startswith("python -m benchmarks.parallel --device cpu --gpus 2")
    assert record["environment"] == {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "2"}
    assert str(tmp_path) not in json.dumps(record), "a path of this machine is in the results"
    rows = {row["row"]: row for row in record["rows"]}
    assert set(rows) == SHARED | ALONE | BARE
    for name, row in rows.items():
        assert row["status"] == "ok" and row["must"] is None and len(row["ms_rounds"]) == 2, row
        assert 0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"]
        assert len(row["ms_of_ranks"]) == row["ranks"] == (1 if ROWS[name].alone else 2)
        assert row.get("below") == ROWS[name].below
        if row.get("below"):
            assert row["ratio"] == pytest.approx(row["ms"] / rows[row["below"]]["ms"])
        assert ("to_products" in row) == (name in SHARED) and ("loss" in row) == (name not in BARE)
    for name in SHARED:
        row, below = rows[name], rows[ROWS[name].below]
        assert row["agrees"] and row["loss"] == pytest.approx(below["loss"], rel=1e-5, abs=1e-6)
        # two ways of computing: equal to the last bit, one would have been compared with itself
        assert 0 < row["d_hidden_error"] < 1e-5 and 0 < row["d_weight_error"] < 1e-5
        assert row["message_bytes"] == sum(map(sum, row["traffic"].values()))
        summed = "reduce-scatter" if name == "sequence-sharded" else "all-reduce"
        assert row["traffic"][summed][-1] == 64 * 32 * 4, "hidden's gradient is not the last sum"
    told = {name: rows[name]["messages"] for name in ("cross-entropy", "logits", "megatron", "loss-parallel")}
    # ours, on a CPU, with the ranks' agreement on the call
    assert told == {"cross-entropy": 3, "logits": 3, "megatron": 4, "loss-parallel": 4}
    assert rows["grpo"]["beside_ce"] == pytest.approx(rows["grpo"]["ms"] / rows["cross-entropy"]["ms"])
    assert rows["grpo"]["loss"] != rows["cross-entropy"]["loss"]
    assert printed.count(f"{SHAPE} float32 on 2") == 1, "more than one process has printed"
    assert all(f"│ {name} " in printed for name in rows)
    assert len(json.loads(printed.strip().splitlines()[-1])["rows"]) == len(rows)


def test_a_process_that_ends_early_is_a_failure_of_ours(tmp_path, capfd, monkeypatch):
    def spawn(*_):
        raise RuntimeError("process 1 terminated")

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    output = tmp_path / "parallel.json"
    assert parallel.main([*TINY, "--output", str(output)]) == 1
    assert "process 1 terminated" in json.loads(output.read_text())["rows"][0]["error"]
    assert "process 1 terminated" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--shape", "64x32x1001"], "equal parts"), (["--rows", "x"], "--rows")]
)
def test_refuses(arguments, said, capsys):
    with pytest.raises(SystemExit):
        parallel.main([*TINY, *arguments])
    assert said in capsys.readouterr().err


def test_rows_come_with_those_that_they_are_divided_by():
    assert parallel_rows.chosen(["grpo"]) == ["one-gpu-grpo", "grpo"]
    assert parallel_rows.chosen(["sequence-sharded"]) == ["one-gpu", "sequence-sharded"]
    assert set(parallel_rows.chosen(None)) == SHARED | ALONE | BARE


def test_what_does_not_agree_is_noticed():
    right, wrong = {"loss": 1.0, "agrees": True}, {"loss": 1.0, "agrees": False}
    assert parallel_ranks.agreement([right, {"loss": 1.0}]) == {"agrees": True}
    assert parallel_ranks.agreement([right, {"loss": 1.0000001}]) == {"agrees": False}
    assert parallel_ranks.agreement([wrong, {"loss": 1.0}]) == {"agrees": False}
    assert parallel_ranks.agreement([{"loss": 1.0}, {}]) == {}


def test_a_turn_meets_before_it_runs_and_before_it_is_timed():
    said = []

    class Nothing:
        def clear(self):
            pass

    steps = {"step": lambda: said.append("run")}
    measure.time_rounds(steps, Nothing(), torch.device("cpu"), 1, meet=lambda: said.append("meet"))
    assert said == ["meet", "meet", "run"] * 2


def test_the_model_knows_its_formulas():
    machine = traffic.Machine()
    assert traffic.message_ms("all-gather", 360e6, 8, machine) == pytest.approx(0.012 + 7 / 8)
    assert traffic.message_ms("all-reduce", 360e6, 64, machine) == pytest.approx(0.012 + 0.015 + 2 * 63 / 64)
    shape = Shape(100_000, 100, 6900)
    told = traffic.cost(shape, 10, 1, targets=0, numbers=3, pairs=0)
    assert told.products == pytest.approx(3 * 2 * 100_000 * 100 * 6900 / 690e12 / 10 * 1e3)
    assert told.statistics == pytest.approx(traffic.message_ms("all-gather", 12 * 100_000 * 10, 10, machine))
    assert told.exposed == pytest.approx(told.hidden - told.products / 3)
    assert told.total == pytest.approx(told.products + told.statistics + told.exposed)
