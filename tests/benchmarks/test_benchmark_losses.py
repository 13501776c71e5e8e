"""`benchmarks.losses` end to end at tiny shapes on the CPU."""

import functools
import json

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("psutil")

import chunked_head.call.run
from benchmarks import losses, measure, shapes

CPU = torch.device("cpu")
SHAPE = shapes.Shape(64, 32, 1000)
TINY = ["--device", "cpu", "--shape", str(SHAPE), "--rounds", "2"]


@pytest.fixture
def no_memory_process(monkeypatch):
    """Spawning a process a measurement takes seconds; one test does so, the others take a figure from here."""
    monkeypatch.setattr(measure, "cpu_peak", lambda request: ({"peak_bytes": 2**20}, None))


def last_line(text):
    return json.loads(text.strip().splitlines()[-1])


def operands(shape=SHAPE, dtype=torch.float32):
    return shapes.make_operands(shape, dtype, CPU)


@pytest.mark.exhaustive
def test_all_workloads_end_to_end(tmp_path, capsys, monkeypatch, no_memory_process):
    monkeypatch.setenv("CHUNKED_HEAD_COMMIT", "abc123")
    output = tmp_path / "new" / "losses.json"
    asked = ["--upstream", "1", "0.37", "--chunk-tokens", "32", "--output", str(output)]
    assert losses.main([*TINY, *asked]) == 0
    printed = capsys.readouterr().out
    record = json.loads(output.read_text())
    assert record["commit"] == "abc123" and record["versions"]["torch"] == torch.__version__
    assert record["command"].startswith("python -m benchmarks.losses --device cpu --shape 64x32x1000")
    rows = {(row["workload"], row["upstream"]): row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == len(last_line(printed)["rows"])
    assert {name for name, value in rows if value == 1.0} == set(losses.WORKLOADS)
    # without gradients there is nothing for an upstream gradient to change
    assert {name for name, value in rows if value == 0.37} == set(losses.WORKLOADS) - {"logprobs"}
    for (name, upstream), row in rows.items():
        assert row["status"] == "ok" and row["peak_bytes"] == 2**20, row
        assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"]) and len(row["ms_rounds"]) == 2
        # those that end with segments are as many as segments make them, and a stream is one
        chunks = 1 if losses.WORKLOADS[name].streams else 2 + losses.WORKLOADS[name].lengths
        assert row["plan"]["chunks"] == chunks and row["plan"]["peak_bytes"] > 0
        assert row["must"] is None, "a shape of no target has one"
        if upstream == 1.0:
            recomputes = name in ("gspo", "dpo", "logprobs+entropy-grad")
            assert row["plan"]["schedule"] == {"logprobs": "loss only"}.get(
                name, "recompute" if recomputes else "forward"
            )
    products = {name: rows[name, 1.0]["products"] for name in losses.WORKLOADS}
    assert products["logprobs"] == 1 and products["grpo"] == products["dpo"] == 3
    assert products["dense-kl"] == products["jsd"] == products["logprobs+entropy-grad"] == 4
    assert all(f"│ {name} " in printed for name in losses.WORKLOADS)


@pytest.mark.parametrize("name", losses.WORKLOADS)
def test_the_plan_is_that_of_the_call(name, monkeypatch):
    made = []
    real = chunked_head.call.run.make_plan

    def record(*args):
        made.append(real(*args))
        return made[-1]

    step = losses.make_step(name, operands(), {"memory_budget": 300 * 2**10})
    monkeypatch.setattr(chunked_head.call.run, "make_plan", record)
    chunked_head.call.spec.SPECS.clear()  # another workload's may serve
    step()
    found = losses.plan_of(step)
    assert (found.schedule, found.chunk_tokens) == (made[0].schedule, made[0].chunk_tokens)
    if step.loss.plan is None:  # log-probabilities: planned as a loss, whose values are a few numbers a token more
        assert abs(found.peak_bytes - made[0].peak_bytes) <= 32 * len(step.operands.hidden)
        assert abs(found.extra_bytes - made[0].extra_bytes) <= 32 * len(step.operands.hidden)
    else:
        assert (found.peak_bytes, found.extra_bytes) == (made[0].peak_bytes, made[0].extra_bytes)
        assert found.buffers == made[0].buffers
    assert found.budget == 300 * 2**10


def test_ours_fed_back_are_near_and_the_batch_fits_the_workload():
    mine = operands(shapes.Shape(4096, 8, 50))
    batches = {name: losses.make_step(name, mine, {}).loss.batch for name in losses.WORKLOADS}
    for name, workload in losses.WORKLOADS.items():
        fields = [field for field in workload.fields if field != "segments" or not workload.lengths]
        assert list(batches[name]) == fields + ["kept_ids", "kept_offsets"] * (workload.kept > 0)
    own = torch.log_softmax(mine.hidden.detach() @ mine.weight.detach().T, -1).gather(1, mine.target[:, None])[:, 0]
    for name, key in (("grpo", "old_logprobs"), ("dpo", "ref_logprobs")):
        assert 0.09 < (batches[name][key] - own).std() < 0.11 and abs((batches[name][key] - own).mean()) < 0.01
    assert 0.95 < batches["grpo"]["advantages"].std() < 1.05
    assert batches["gspo"]["segments"].unique().tolist() == list(range(8))  # of about 512 tokens
    assert batches["dpo"]["segments"].unique().tolist() == list(range(16))
    assert batches["dpo"]["pairs"].tolist() == [[2 * i, 2 * i + 1] for i in range(8)]
    ids, logprobs = batches["topk"]["teacher_ids"], batches["topk"]["teacher_logprobs"]
    assert ids.shape == logprobs.shape == (4096, 50) and torch.equal(ids[:, 0], mine.target)
    total = logprobs.exp().sum(1)
    assert total.max() < 1 and 0.97 < total.mean() < 0.99  # of 51 entries one is not there
    assert batches["jsd"]["teacher_weight"].shape == mine.weight.shape
    assert not torch.equal(batches["jsd"]["teacher_weight"], mine.weight.detach())
    teacher = batches["jsd"]["teacher_hidden"] @ batches["jsd"]["teacher_weight"].T
    assert 1.8 < teacher.std() < 2.2


@pytest.mark.parametrize(("tokens", "count"), [(64, 2), (64, 16), (8192, 16), (33, 16)])
def test_segments_follow_each_other_and_differ_in_length(tokens, count):
    ids = shapes.draw_segments(tokens, count, CPU, torch.Generator().manual_seed(0))
    lengths = torch.bincount(ids, minlength=count)
    assert torch.equal(ids, ids.sort().values) and len(lengths) == count
    assert lengths.min() >= 1 and (lengths.unique().numel() > 1 or count == 2)
    assert lengths.min() >= 0.5 * tokens / count - 1 and lengths.max() <= 1.5 * tokens / count + 1


@pytest.mark.parametrize("products", [1, 3, 4])
def test_the_floor_runs_as_many_products(products):
    floor = measure.Floor(operands(), CPU)
    names = [launch.name for launch in measure.traced(functools.partial(floor, products), CPU)]
    assert names.count("aten::mm") == products
    with torch.no_grad():
        torch.testing.assert_close(floor.logits, floor.hidden @ floor.weight.T)


def test_times_beside_the_products_of_each_step():
    def fails():
        raise MemoryError

    sleeps = iter(range(100))
    steps = {"one": lambda: next(sleeps), "four": lambda: next(sleeps), "none": fails}
    ticks = []
    found = measure.time_beside(
        {"one": 1, "four": 4, "none": 3}, steps, operands(), CPU, 3, functools.partial(ticks.append, None)
    )
    assert set(found) == set(steps) and len(ticks) == 3
    assert found["none"]["status"] == measure.OUT_OF_MEMORY and "ms" not in found["none"]
    for key in ("one", "four"):
        assert found[key]["ratio"] == pytest.approx(found[key]["ms"] / found[key]["floor_ms"])
    assert found["one"]["floor_ms"] != found["four"]["floor_ms"]


def test_targets_stand_beside_what_was_measured(tmp_path, capsys, monkeypatch, no_memory_process):
    elsewhere = shapes.Shape(8192, 4096, 128256)
    monkeypatch.setattr(losses, "SHAPES", (elsewhere, SHAPE))
    monkeypatch.setitem(losses.WORKLOADS, "grpo", losses.WORKLOADS["grpo"]._replace(must=(1.10, 0.01)))
    names = ["--workload", "grpo", "--workload", "gspo"]
    assert losses.main([*TINY, *names, "--output", str(tmp_path / "losses.json")]) == 0
    rows = {row["workload"]: row for row in json.loads((tmp_path / "losses.json").read_text())["rows"]}
    assert rows["grpo"]["must"] == 0.01 < rows["grpo"]["ratio"] and rows["gspo"]["must"] is None
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│ g")]
    ratios = {cells[1].strip(): (cells[4].strip(), cells[10].strip()) for cells in lines}
    assert ratios["grpo"][0].endswith(" *") and ratios["grpo"][1] == "0.01"
    assert not ratios["gspo"][0].endswith("*") and ratios["gspo"][1] == "-"


def test_what_cannot_run_is_a_row_and_the_rest_is_measured(tmp_path, capsys):
    # enough for a token's logits, but not for a token's own and its teacher's and their scratch
    asked = ["--workload", "jsd", "--workload", "logprobs", "--memory-budget", "12KiB", "--no-memory"]
    assert losses.main([*TINY, *asked, "--output", str(tmp_path / "losses.json")]) == 1
    assert "ours, jsd failed: ValueError: memory_budget" in capsys.readouterr().out
    rows = {row["workload"]: row for row in json.loads((tmp_path / "losses.json").read_text())["rows"]}
    assert rows["jsd"]["status"] == "failed" and "ms" not in rows["jsd"]
    assert rows["logprobs"]["status"] == "ok" and rows["logprobs"]["ratio"] > 0


@pytest.mark.exhaustive
def test_memory_is_measured_in_a_process_of_its_own():
    shape = shapes.Shape(1024, 16, 20000)
    step = losses.make_step("grpo", operands(shape), {"chunk_tokens": 256})
    step()
    request = losses.Request("grpo", shape, "float32", options={"chunk_tokens": 256})
    found, failure = measure.peak(step, request)
    assert failure is None
    # a chunk's logits and the gradients, and no other chunk's
    assert found["peak_bytes"] > 4 * (256 * 20000 + 20000 * 16)
    assert found["peak_bytes"] == pytest.approx(losses.plan_of(step).peak_bytes, abs=8 * 2**20)


def test_launches_of_operations_are_counted_once():
    """A softmax is one, not one and what it calls; those of the backward are among them, after the forward's."""
    x = torch.randn(4, 5, requires_grad=True)
    traced = measure.traced(lambda: torch.softmax(x, 1).cos().backward(torch.ones(4, 5)), CPU)
    names = [launch.name for launch in traced]
    assert names[:2] == ["aten::softmax", "aten::cos"] and names.count("aten::sin") == 1
    assert "aten::_softmax" not in names and names.index("aten::_softmax_backward_data") > names.index("aten::sin")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "8x9"], "--shape"),
        (["--workload", "nobody"], "--workload"),
        (["--rounds", "0"], "--rounds"),
        (["--upstream", "nan"], "--upstream"),
        (["--memory-budget", "much"], "--memory-budget"),
        (["--chunk-tokens", "0"], "--chunk-tokens"),
        (["--accumulate-dtype", "int8"], "--accumulate-dtype"),
        (["--device", "cuda:99"], "--device"),
        (["--provider", "eager"], "--provider"),
    ],
)
def test_bad_arguments_are_refused_before_work(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        losses.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
