"""The benchmarks end to end at tiny shapes on the CPU, and what they say when something is missing or wrong."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("rich")
pytest.importorskip("psutil")

from benchmarks import accuracy, head, measure, memory, providers, shapes

CPU = torch.device("cpu")
SHAPE = shapes.Shape(48, 16, 320)


def last_line(text):
    return json.loads(text.strip().splitlines()[-1])


@pytest.fixture
def no_memory_process(monkeypatch):
    """Spawning a process a measurement takes seconds; one test does so, the others take a figure from here."""
    monkeypatch.setattr(measure, "cpu_peak", lambda request: ({"peak_bytes": 2**20}, None))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8192x4096x128256", shapes.Shape(8192, 4096, 128256)),
        ("llama3-8b", shapes.Shape(8192, 4096, 128256)),
        ("gpt-oss@1024", shapes.Shape(1024, 2880, 201088)),
        ("cpu", shapes.Shape(1024, 512, 128256)),
    ],
)
def test_shapes_are_read(text, expected):
    assert shapes.parse_shape(text) == expected


@pytest.mark.parametrize(
    "text", ["", "8192", "8x9", "0x4x4", "ax4x4", "-1x4x4", "llama3-8b@0", "llama3-8b@many", "gpt-9"]
)
def test_bad_shapes_are_refused(text):
    with pytest.raises(ValueError, match="shape"):
        shapes.parse_shape(text)


def test_sizes_in_bytes_are_read():
    assert [shapes.parse_bytes(text) for text in ("24GiB", "1.5 KB", "7")] == [24 * 2**30, 1500, 7]
    for text in ("", "GiB", "3 parsecs", "-1MiB", "0"):
        with pytest.raises(ValueError, match="size"):
            shapes.parse_bytes(text)


def test_provider_options_are_read():
    name, options = providers.parse_spec(
        "ours:chunk_tokens=4096,accumulate_dtype=float32,memory_budget=64MiB,backend=x"
    )
    assert name == "ours"
    assert options == {
        "chunk_tokens": 4096,
        "accumulate_dtype": torch.float32,
        "memory_budget": 2**26,
        "backend": "x",
    }


@pytest.mark.parametrize(
    "text", ["nobody", "eager:chunk_tokens=4", "ours:", "ours:chunk_tokens", "ours:=4", "ours:a=1,"]
)
def test_bad_providers_are_refused(text):
    with pytest.raises(ValueError, match="provider"):
        providers.parse_spec(text)


def chunked_linear_cross_entropy(
    x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean", tuned=True, use_scaled_exp=None
):
    """With quack's signature and its demand on tokens."""
    assert len(x) % 8 == 0, "tokens must be a multiple of 8"
    return F.cross_entropy(x @ weight.T, target)


def linear_cross_entropy(
    e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, filter_eps="high", impl=None
):
    """With Cut Cross-Entropy's signature; a sum where gradients are filtered, to tell the two providers apart."""
    assert impl == "cce"
    return F.cross_entropy(e @ c.T, targets, reduction="sum" if filter_eps else "mean")


def liger_fused_linear_cross_entropy(input, weight, target, *, accum_dtype=None):
    """A sum where gradients are not added in float32."""
    return F.cross_entropy(input @ weight.T, target, reduction="mean" if accum_dtype else "sum")


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins of the peers' packages, and a GPU that is only said to be there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    made = (chunked_linear_cross_entropy, linear_cross_entropy, liger_fused_linear_cross_entropy)
    stand_in = SimpleNamespace(**{function.__name__: function for function in made})
    for package in providers.PACKAGES.values():
        parts = package.module.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), stand_in)
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "scale"), [("quack", 1), ("cce", 48), ("cce-exact", 1), ("liger", 48), ("liger-fp32", 1)]
)
def test_peers_take_the_operands_and_their_own_options(packages, name, scale):
    drawn = shapes.make_operands(SHAPE, torch.float32, CPU)
    found = providers.build(name, packages).call(drawn.hidden, drawn.weight, drawn.target)
    torch.testing.assert_close(found, scale * F.cross_entropy(drawn.hidden @ drawn.weight.T, drawn.target))


def test_peers_that_cannot_run_say_why(packages, monkeypatch):
    names = list(providers.PACKAGES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert providers.resolve(names, packages)[1] == {
        "quack": "quack-kernels needs a GPU of compute capability 9.0 or newer"
    }
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)  # a ModuleNotFoundError of this name
    monkeypatch.delitem(sys.modules, "liger_kernel.transformers.functional")  # its parent is a stand-in
    skipped = providers.resolve(names, packages)[1]
    assert skipped["cce"] == skipped["cce-exact"] == "the package cut-cross-entropy is not installed"
    assert skipped["liger"].startswith("liger-kernel did not import: ")
    assert set(providers.resolve(names, CPU)[1].values()) == {
        f"{package.name} needs a GPU" for package in providers.PACKAGES.values()
    }


def test_a_shape_that_a_peer_refuses_is_a_row(packages, tmp_path, monkeypatch):
    resolve = providers.resolve
    monkeypatch.setattr(providers, "resolve", lambda names, device: resolve(names, packages))
    output = tmp_path / "head.json"
    arguments = ["--device", "cpu", "--shape", "44x16x320", "--rounds", "1", "--no-memory", "--output", str(output)]
    assert head.main([*arguments, "--provider", "quack", "--provider", "cce"]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert rows[1]["provider"] == "quack" and "tokens must be a multiple of 8" in rows[1]["error"]


def test_operands_repeat_and_peaked_targets_are_the_likeliest():
    first, second = (shapes.make_operands(SHAPE, torch.float32, CPU, data="peaked", seed=3) for _ in range(2))
    assert torch.equal(first.weight, second.weight) and torch.equal(first.target, second.target)
    many = shapes.make_operands(shapes.Shape(2000, 16, 64), torch.float32, CPU, data="peaked")
    likeliest = (many.hidden @ many.weight.T).argmax(1)
    assert 0.66 < (likeliest == many.target).float().mean() < 0.76
    logits = many.hidden.detach() @ many.weight.detach().T
    assert 5 < logits.std() < 7
    zipf = shapes.make_operands(SHAPE, torch.float32, CPU, targets="zipf").target
    assert zipf.float().mean() < SHAPE.vocab / 3
    assert shapes.make_operands(SHAPE, torch.float32, CPU, targets="equal").target.unique().numel() == 1


@pytest.mark.parametrize("rows", [48, 20])
def test_floor_computes_the_three_products(rows):
    operands = shapes.make_operands(SHAPE, torch.float64, CPU)
    floor = measure.Floor(operands, CPU)
    floor.rows = rows
    floor()
    hidden, weight = operands.hidden.detach(), operands.weight.detach()
    logits = hidden @ weight.T
    torch.testing.assert_close(floor.d_hidden, logits @ weight)
    torch.testing.assert_close(floor.d_weight, logits.T @ hidden)


def test_rounds_take_turns_and_a_failing_step_leaves():
    operands = shapes.make_operands(SHAPE, torch.float32, CPU)
    order = []

    def fails():
        order.append("c")
        raise MemoryError

    steps = {"a": lambda: order.append("a"), "b": lambda: order.append("b"), "c": fails}
    times, failures = measure.time_rounds(steps, operands, CPU, 3)
    assert order == ["c", "b", "a", "a", "b", "b", "a", "a", "b"]  # the first round is not counted
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    assert failures["c"].status == measure.OUT_OF_MEMORY


def test_short_steps_settle_as_long_as_long_ones():
    found = {ms: measure.turn_runs(ms) for ms in (0.0, 1.0, 11.0, 38.0, 800.0)}
    assert found == {0.0: (2, 1), 1.0: (500, 100), 11.0: (46, 10), 38.0: (14, 3), 800.0: (2, 1)}


def test_failures_are_told_apart():
    assert measure.Failure.of(RuntimeError("DefaultCPUAllocator: can't allocate memory")).status == "out of memory"
    assert measure.Failure.of(torch.OutOfMemoryError("CUDA out of memory")).status == "out of memory"
    assert measure.Failure.of(ValueError("no")).status == "failed"


def test_reference_agrees_with_autograd(monkeypatch):
    monkeypatch.setattr(accuracy, "_ROWS", 20)
    operands = shapes.make_operands(SHAPE, torch.float64, CPU)
    exact = accuracy.reference(operands, torch.float64)
    loss = F.cross_entropy(operands.hidden @ operands.weight.T, operands.target)
    loss.backward()
    assert exact.loss == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(exact.d_hidden, operands.hidden.grad)
    torch.testing.assert_close(exact.d_weight, operands.weight.grad)
    assert accuracy.relative_error(2 * exact.d_weight, exact.d_weight, 1.0) == pytest.approx(1.0)
    assert math.isnan(accuracy.relative_error(math.nan * exact.d_weight, exact.d_weight, 1.0))


@pytest.mark.exhaustive
def test_head_end_to_end(tmp_path, capsys, monkeypatch, no_memory_process):
    monkeypatch.setenv("CHUNKED_HEAD_COMMIT", "abc123")
    monkeypatch.setattr("triton.__version__", "3.77")  # another than the environment's own, before it on the path
    output = tmp_path / "new" / "head.json"
    asked = ["--provider", "eager", "--provider", "ours", "--provider", "ours:chunk_tokens=16", "--provider", "liger"]
    arguments = ["--device", "cpu", "--shape", str(SHAPE), "--rounds", "2", "--upstream", "1", "0.37"]
    assert head.main([*arguments, *asked, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "skipped liger: " in printed
    assert [row["provider"] for row in last_line(printed)["rows"]].count("ours:chunk_tokens=16") == 2
    record = json.loads(output.read_text())
    assert record["commit"] == "abc123" and record["versions"]["torch"] == torch.__version__
    assert record["versions"]["triton"] == "3.77"
    assert str(tmp_path) not in json.dumps(record), "a path of this machine is in the results"
    assert "liger" in record["skipped"]
    rows = {(row["provider"], row.get("upstream")): row for row in record["rows"]}
    assert set(rows) == {("floor", None)} | {
        (name, value) for name in ("eager", "ours", "ours:chunk_tokens=16") for value in (1.0, 0.37)
    }
    for row in rows.values():
        assert row["status"] == "ok", row
        assert row["ms"] > 0 and (row["provider"] == "floor" or row["ratio"] > 0) and len(row["ms_rounds"]) == 2
    ours = rows["ours:chunk_tokens=16", 0.37]
    assert ours["plan"]["chunks"] == 3 and ours["plan"]["peak_bytes"] > 0
    assert ours["loss"] == pytest.approx(rows["eager", 1.0]["loss"], rel=1e-4)
    assert ours["beside_gradients_bytes"] == 2**20 - 4 * (48 + 320) * 16


def test_head_reports_a_provider_that_fails_or_runs_out(tmp_path, capsys, monkeypatch):
    def runs_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    def breaks(*_):
        raise RuntimeError("broken inside")

    monkeypatch.setattr(providers, "eager", runs_out)
    monkeypatch.setattr(providers, "_torch_native", lambda name, device: breaks)
    output = tmp_path / "head.json"
    arguments = ["--device", "cpu", "--shape", str(SHAPE), "--rounds", "1", "--no-memory", "--output", str(output)]
    assert head.main([*arguments, "--provider", "eager", "--provider", "torch"]) == 0
    printed = capsys.readouterr().out
    assert "out of memory" in printed and "torch failed: RuntimeError: broken inside" in printed
    statuses = [row["status"] for row in json.loads(output.read_text())["rows"]]
    assert statuses == ["ok", "out of memory", "failed"]


def test_no_provider_at_all(tmp_path, capsys):
    for main in (head.main, accuracy.main, memory.main):
        assert main(["--device", "cpu", "--provider", "liger", "--output", str(tmp_path / "none.json")]) == 1
        printed = capsys.readouterr().out
        assert "skipped liger: " in printed and "no provider can run here" in printed


@pytest.mark.exhaustive
def test_accuracy_end_to_end(tmp_path, capsys):
    output = tmp_path / "accuracy.json"
    arguments = ["--device", "cpu", "--shape", str(SHAPE), "--dtype", "fp32", "--output", str(output)]
    assert accuracy.main([*arguments, "--provider", "ours", "--provider", "eager", "--provider", "liger"]) == 0
    assert len(last_line(capsys.readouterr().out)["rows"]) == 12
    rows = json.loads(output.read_text())["rows"]
    assert {(row["data"], row["upstream"]) for row in rows} == {
        (kind, value) for kind in ("random", "zipf", "peaked") for value in (1.0, 0.37)
    }
    for row in rows:
        assert row["status"] == "ok" and row["reference"] == "float64", row
        assert 0 < row["d_hidden_error"] < 1e-5 and 0 < row["d_weight_error"] < 1e-5
        assert row["d_weight_to_eager"] > 0


@pytest.mark.exhaustive
def test_memory_end_to_end(tmp_path, capsys):
    output = tmp_path / "memory.json"
    arguments = ["--device", "cpu", "--model", "32x20000", "--tokens", "128", "--limit", "16MiB"]
    assert memory.main([*arguments, "--provider", "eager", "--provider", "ours", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    told = last_line(printed)
    assert told["benchmark"] == "memory" and told["limit"] == 2**24 and told["largest_difference"]["percent"]
    record = json.loads(output.read_text())
    rows = {row["provider"]: row for row in record["rows"]}
    assert all(row["status"] == "ok" for row in rows.values()), rows
    # eager holds the logits and their gradient at least
    assert rows["eager"]["peak_bytes"] > 2 * 128 * 20000 * 4
    assert record["first_over_limit"]["32x20000"]["eager"] == 128
    assert rows["ours"]["plan"]["peak_bytes"] > 0 and "difference_percent" in rows["ours"]


@pytest.mark.exhaustive
def test_memory_stops_a_provider_that_ran_out(tmp_path, monkeypatch):
    tried = []

    def peak(provider, shape, dtype, device):
        tried.append((provider.label, shape.tokens))
        if provider.label == "eager" and shape.tokens >= 64:
            return None, measure.Failure(measure.OUT_OF_MEMORY, "no more")
        return {"peak_bytes": shape.tokens * 2**20}, None

    monkeypatch.setattr(memory, "peak_of", peak)
    output = tmp_path / "memory.json"
    arguments = ["--device", "cpu", "--model", "16x320", "--tokens", "32", "64", "128", "--limit", "100MiB"]
    assert memory.main([*arguments, "--provider", "eager", "--provider", "ours", "--output", str(output)]) == 0
    assert tried == [("eager", 32), ("ours", 32), ("eager", 64), ("ours", 64), ("ours", 128)]
    assert json.loads(output.read_text())["first_over_limit"] == {"16x320": {"eager": 64, "ours": 128}}


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (head.main, ["--shape", "8x9"], "--shape"),
        (head.main, ["--rounds", "0"], "--rounds"),
        (head.main, ["--upstream", "nan"], "--upstream"),
        (head.main, ["--dtype", "int8"], "--dtype"),
        (head.main, ["--provider", "nobody"], "--provider"),
        (head.main, ["--provider", "ours:no_such_option=1"], "no_such_option"),
        (head.main, ["--device", "tpu"], "--device"),
        (head.main, ["--device", "cuda:99"], "--device"),
        (head.main, ["--targets", "all"], "--targets"),
        (accuracy.main, ["--data", "all"], "--data"),
        (accuracy.main, ["--upstream", "0"], "--upstream"),
        (memory.main, ["--limit", "much"], "--limit"),
        (memory.main, ["--output", "memory.png"], "--output"),
        (memory.main, ["--model", "16"], "--model"),
        (memory.main, ["--tokens", "-1"], "--tokens"),
    ],
)
def test_bad_arguments_are_refused_before_work(main, arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
