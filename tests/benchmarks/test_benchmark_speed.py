"""`benchmarks.speed` end to end at tiny shapes on the CPU, and that its rows and floors do what they are called."""

import functools
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("rich")
pytest.importorskip("psutil")

from benchmarks import command, measure, providers, shapes, speed, speed_rows
from benchmarks.speed_rows import ONE, ROWS, SUMMED, THREE, Bench

CPU = torch.device("cpu")
SHAPE = shapes.Shape(64, 32, 1000)
LARGE = shapes.Shape(2, 2, 200_000)
TINY = ["--device", "cpu", "--shape", str(SHAPE), "--rounds", "2"]
TRAINED = {name for name, row in ROWS.items() if row.backward}


@pytest.fixture
def no_memory_process(monkeypatch):
    """Spawning a process a measurement takes seconds; one test does so, the others take a figure from here."""
    monkeypatch.setattr(measure, "cpu_peak", lambda request: ({"peak_bytes": 2**20}, None))


@pytest.fixture
def short_text(monkeypatch):
    """Targets of a text are drawn from this one; the demo's own takes seconds to read and to make tokens of."""
    pytest.importorskip("tokenizers")
    from benchmarks import demo_data, text_targets

    words = "def one(two): return three + four[five] # six, seven or eight of nine"
    monkeypatch.setattr(demo_data, "load_text", lambda path: demo_data.Text([words, words[::-1]], [words], "short"))
    monkeypatch.setattr(text_targets, "_stream", functools.cache(text_targets._stream.__wrapped__))


def last_line(text):
    return json.loads(text.strip().splitlines()[-1])


def make_bench(shape=SHAPE):
    return Bench(shapes.make_operands(shape, torch.float32, CPU))


def run(tmp_path, *arguments, status=0):
    output = tmp_path / "new" / "speed.json"
    assert speed.main([*TINY, *arguments, "--output", str(output)]) == status
    return json.loads(output.read_text())


@pytest.mark.exhaustive
def test_all_rows_end_to_end(tmp_path, capsys, monkeypatch, no_memory_process):
    monkeypatch.setenv("CHUNKED_HEAD_COMMIT", "abc123")
    record = run(tmp_path, "--upstream", "1", "0.37")
    printed = capsys.readouterr().out
    assert record["benchmark"] == "speed" and record["commit"] == "abc123" and record["skipped"] == {}
    assert record["command"].startswith("python -m benchmarks.speed --device cpu --shape 64x32x1000")
    assert str(tmp_path) not in json.dumps(record), "a path of this machine is in the results"
    rows = {(row["row"], row.get("upstream")): row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == len(last_line(printed)["rows"])
    assert [row["row"] for row in record["rows"][:3]] == [ONE, THREE, SUMMED]
    floors = {name: rows.pop((name, None)) for name in speed_rows.FLOORS}
    # a small vocabulary has no other budget beside the default, and without gradients none comes from above
    assert {name for name, value in rows if value == 1.0} == set(ROWS) - {"640MiB"}
    assert {name for name, value in rows if value == 0.37} == TRAINED - {"640MiB"}
    for row in (*floors.values(), *rows.values()):
        assert row["status"] == "ok" and row["targets"] == "random" and len(row["ms_rounds"]) == 2, row
        assert 0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"]
    for (name, upstream), row in rows.items():
        below = floors.get(ROWS[name].below) or rows["default", upstream]
        assert row["below"] == ROWS[name].below and row["ratio"] == pytest.approx(row["ms"] / below["ms"])
        assert row["ratios"] == {key: pytest.approx(row["ms"] / floor["ms"]) for key, floor in floors.items()}
        assert row["must"] is None, "a shape of no target has one"
        assert 2**20 - row["beside_gradients_bytes"] == gradients_of(name)
        assert row["plan"]["schedule"] == ("forward" if name in TRAINED else "loss only")
    assert rows["into", 1.0]["plan"]["peak_bytes"] < rows["default", 1.0]["plan"]["peak_bytes"]
    assert rows["loss", 1.0]["loss"] == pytest.approx(rows["default", 0.37]["loss"])
    assert rows["logprobs", 1.0]["loss"] == pytest.approx(-rows["default", 1.0]["loss"])
    assert all(f"│ {name} " in printed for name in {*ROWS, *floors} - {"640MiB"})


def gradients_of(name):
    hidden, weight = 4 * 64 * 32, 4 * 1000 * 32
    return {"loss": 0, "logprobs": 0, "into": hidden}.get(name, hidden + weight)


def test_rows_of_a_shape():
    fitting = speed_rows.chosen(None, SHAPE)
    assert fitting == [name for name in ROWS if name != "640MiB"]
    assert speed_rows.chosen(None, LARGE) == list(ROWS)
    assert speed_rows.chosen(["loss", "half-skipped"], SHAPE) == ["default", "half-skipped", "loss"]
    assert speed_rows.chosen(["640MiB"], SHAPE) == ["640MiB"]
    assert speed_rows.options_of("default") == {}
    assert speed_rows.options_of("half-skipped") == {"skip_ignored": True}
    assert speed_rows.options_of("640MiB") == {"memory_budget": "640MiB"}


def test_what_is_accepted_stands_at_its_shape():
    found = {name: [speed_rows.must_of(name, shape) for shape in speed_rows.SHAPES] for name in ROWS}
    assert found["default"] == [1.02, 1.02, 1.05, 1.06, 1.05, 1.06]
    assert found["into"] == [1.06, 1.06, 1.07, 1.08, 1.07, 1.08]
    assert found["256MiB"] == [1.40, *[None] * 5] and found["loss"] == [1.03, *[None] * 5]
    assert found["half-skipped"] == [0.55] * 6
    assert found["half"] == found["640MiB"] == found["logprobs"] == [None] * 6


@pytest.mark.parametrize("name", ROWS)
def test_a_step_is_what_its_row_says(name):
    bench, row = make_bench(), ROWS[name]
    hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in vars_of(bench))
    counted = bench.half.target != speed_rows.IGNORED
    assert counted.sum() == 32 and torch.equal(bench.half.target[counted], bench.operands.target[counted])
    target = bench.half.target if row.half else bench.operands.target
    expected = F.cross_entropy(hidden @ weight.T, target)
    (0.37 * expected).backward()
    if row.into:
        bench.main_grad.fill_(1.0)
    value = bench.step(name, 0.37)()
    torch.testing.assert_close(-value.mean() if row.logprobs else value, expected.detach())
    assert value.shape == ((64,) if row.logprobs else ()) and value.grad_fn is None
    if not row.backward:
        assert bench.operands.hidden.grad is None and bench.operands.weight.grad is None
        return
    torch.testing.assert_close(bench.operands.hidden.grad, hidden.grad)
    assert (bench.operands.weight.grad is None) == row.into
    torch.testing.assert_close(bench.main_grad - 1 if row.into else bench.operands.weight.grad, weight.grad)


def vars_of(bench):
    return bench.operands.hidden, bench.operands.weight


def test_floors_are_what_they_are_called():
    bench = make_bench()
    floors = bench.floors([SUMMED, ONE, THREE], CPU)
    assert list(floors) == [ONE, THREE, SUMMED]
    names = {key: [launch.name for launch in measure.traced(floor, CPU)] for key, floor in floors.items()}
    assert {key: found.count("aten::mm") for key, found in names.items()} == {ONE: 1, THREE: 3, SUMMED: 3}
    assert {key: found.count("aten::add_") for key, found in names.items()} == {ONE: 0, THREE: 0, SUMMED: 1}
    hidden, weight = (tensor.detach() for tensor in vars_of(bench))
    torch.testing.assert_close(bench.main_grad, (hidden @ weight.T).T @ hidden)
    assert list(make_bench().floors([ONE], CPU)) == [ONE]


def test_sums_of_16_bit_gradients_are_float32():
    bench = Bench(shapes.make_operands(SHAPE, torch.bfloat16, CPU))
    assert bench.main_grad.dtype == torch.float32 and not bench.main_grad.requires_grad


def test_a_promise_that_is_not_kept_is_found():
    bench = make_bench()
    assert command.warm_up(lambda: bench.step("into", 0.37))[1]["loss"] > 0
    with pytest.raises(ArithmeticError, match="not finite"):
        command.warm_up(lambda: replace(bench.step("into", 0.37), upstream=0.5))


def test_targets_stand_beside_what_was_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speed_rows, "SHAPES", (speed_rows.SHAPES[0], SHAPE))
    monkeypatch.setitem(ROWS, "default", ROWS["default"]._replace(must=(1.02, 0.01)))
    found = run(tmp_path, "--rows", "default", "256MiB", "--no-memory")["rows"]
    rows = {row["row"]: row for row in found}
    assert rows["default"]["must"] == 0.01 < rows["default"]["ratio"] and rows["256MiB"]["must"] is None
    assert "peak_bytes" not in rows["default"]
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith(("│ def", "│ 256"))]
    cells = {line[1].strip(): (line[4].strip(), line[10].strip()) for line in lines}
    assert cells["default"][0].endswith(" *") and cells["default"][1] == "0.01"
    assert not cells["256MiB"][0].endswith("*") and cells["256MiB"][1] == "-"


def test_rows_that_were_named_and_their_floors(tmp_path):
    rows = [row["row"] for row in run(tmp_path, "--rows", "logprobs", "--no-memory")["rows"]]
    assert rows == [ONE, "logprobs"]
    rows = [row["row"] for row in run(tmp_path, "--rows", "into", "--no-memory")["rows"]]
    assert rows == [THREE, SUMMED, "into"]


@pytest.mark.parametrize("targets", shapes.TARGETS)
def test_the_loss_is_that_of_the_targets(tmp_path, targets, short_text):
    *_, row = run(tmp_path, "--rows", "loss", "--no-memory", "--targets", targets)["rows"]
    drawn = shapes.make_operands(SHAPE, torch.float32, CPU, targets=targets)
    assert row["targets"] == targets
    assert row["loss"] == pytest.approx(providers.eager(drawn.hidden, drawn.weight, drawn.target).item(), rel=1e-5)


def test_targets_of_a_text(short_text):
    """Its tokens in their order, again from the start, and below the vocabulary whatever its size."""
    whole = shapes.make_operands(shapes.Shape(90, 4, 1000), torch.float32, CPU, targets="text").target
    assert whole.dtype == torch.int64 and whole.max() < 1000
    first = whole[:20].tolist()
    again = next(at for at in range(1, 70) if whole[at : at + 20].tolist() == first)
    assert torch.equal(whole[again:], whole[:-again]) and len(set(whole[:again].tolist())) > 10
    few = shapes.make_operands(shapes.Shape(500, 4, 60), torch.float32, CPU, targets="text").target
    assert few.min() >= 0 and few.max() < 60


def test_the_plan_of_skipped_tokens_is_one_that_skips():
    large = shapes.Shape(8192, 2880, 201088)  # where cuBLAS's product is taken unless it has to skip
    gpu = torch.device("cuda")
    told = {name: speed_rows.predict(name, large, torch.bfloat16, gpu) for name in ("half", "half-skipped")}
    products = {name: next(line for line in plan["text"] if "matmuls " in line) for name, plan in told.items()}
    assert products["half"].endswith("dweight BLAS's") and products["half-skipped"].endswith("dweight ours")


def test_what_cannot_run_is_a_row_and_the_rest_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(ROWS, "256MiB", ROWS["256MiB"]._replace(options={"memory_budget": "1KiB"}))
    rows = {row["row"]: row for row in run(tmp_path, "--rows", "256MiB", "default", "--no-memory", status=1)["rows"]}
    assert "ours, 256MiB failed: ValueError: memory_budget" in capsys.readouterr().out
    assert rows["256MiB"]["status"] == "failed" and "ms" not in rows["256MiB"]
    assert rows["default"]["status"] == "ok" and rows["default"]["ratio"] > 0


def test_floors_that_do_not_fit_leave_the_times(tmp_path, monkeypatch):
    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(measure, "Floor", fails)
    rows = {row["row"]: row for row in run(tmp_path, "--rows", "half", "--no-memory")["rows"]}
    assert rows[THREE]["status"] == measure.OUT_OF_MEMORY
    assert rows["default"]["ms"] > 0 and "ratio" not in rows["default"]
    assert rows["half"]["ratio"] == pytest.approx(rows["half"]["ms"] / rows["default"]["ms"])


@pytest.mark.exhaustive
def test_peers_take_their_turns(tmp_path, capsys, monkeypatch, no_memory_process):
    monkeypatch.setattr(providers, "_compiled", lambda name, device: providers.eager)
    record = run(tmp_path, "--peers", "--rows", "loss", "--upstream", "1", "0.37")
    assert (
        set(record["skipped"]) == {"liger", "liger-fp32", "quack", "cce", "cce-exact"}
        and "skipped liger: " in capsys.readouterr().out
    )
    rows = {(row["row"], row.get("upstream")): row for row in record["rows"]}
    assert set(rows) == {(ONE, None), (THREE, None), ("loss", 1.0), ("compile", 1.0), ("compile", 0.37)}
    peer = rows["compile", 0.37]
    assert peer["ratio"] == pytest.approx(peer["ms"] / rows[THREE, None]["ms"]) and peer["must"] is None
    assert peer["loss"] == pytest.approx(rows["loss", 1.0]["loss"], rel=1e-5)
    assert peer["beside_gradients_bytes"] == 2**20 - 4 * (64 + 1000) * 32


@pytest.mark.exhaustive
def test_memory_is_measured_in_a_process_of_its_own():
    shape = shapes.Shape(1024, 64, 20000)
    found = {}
    for name in ("default", "into"):
        request = speed_rows.Request("ours", shape, "float32", 0.37, row=name)
        found[name], failure = measure.cpu_peak(request)
        assert failure is None
        plan = speed_rows.predict(name, shape, torch.float32, CPU)
        assert found[name]["peak_bytes"] == pytest.approx(plan["peak_bytes"], abs=8 * 2**20)
    saved = found["default"]["peak_bytes"] - found["into"]["peak_bytes"]
    assert saved == pytest.approx(4 * 20000 * 64, abs=2**21), "the buffer is counted, or the gradient is made"


def test_a_peer_can_be_asked_for_in_that_process():
    step = speed_rows.Request("eager", SHAPE, "float32", 0.37).step()
    assert step.upstream == 0.37 and step.loss is providers.eager


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "8x9"], "--shape"),
        (["--rows", "nothing"], "--rows"),
        (["--rounds", "0"], "--rounds"),
        (["--upstream", "nan"], "--upstream"),
        (["--upstream", "1", "0"], "--upstream"),
        (["--targets", "all"], "--targets"),
        (["--device", "cuda:99"], "--device"),
        (["--provider", "eager"], "--provider"),
    ],
)
def test_bad_arguments_are_refused_before_work(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        speed.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
