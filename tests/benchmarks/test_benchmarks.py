"""The benchmarks' own parts: what is measured is what a row is called, and mistakes and failures are rows."""

import contextlib
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("rich")
pytest.importorskip("psutil")

from benchmarks import (
    __main__,
    accuracy,
    command,
    framework_steps,
    gauge,
    head,
    losses,
    measure,
    memory,
    parallel,
    parallel_ranks,
    providers,
    rounds,
    shapes,
    sitting,
    speed,
    speed_rows,
)
from benchmarks.speed_rows import ONE, ROWS, SUMMED, THREE, TWO, Bench

CPU = torch.device("cpu")
SHAPE = shapes.Shape(64, 32, 1000)
TINY = ["--device", "cpu", "--shape", str(SHAPE), "--rounds", "2", "--no-memory"]


@contextlib.contextmanager
def products() -> Iterator[Callable[[], int]]:
    """A function that counts matrix products so far."""
    with mock.patch.object(torch, "mm", side_effect=torch.mm) as multiplied:
        yield lambda: multiplied.call_count


def operands(shape: shapes.Shape = SHAPE, dtype: torch.dtype = torch.float32, **drawn: Any) -> Any:
    return shapes.make_operands(shape, dtype, CPU, **drawn)


def rows_of(main: Any, tmp_path: Any, *words: str, status: int = 0) -> list[dict[str, Any]]:
    output = tmp_path / "new" / "rows.json"
    assert main([*TINY, *words, "--output", str(output)]) == status
    return json.loads(output.read_text())["rows"]


# ---- words


BAD: list[tuple[Any, str, str]] = [
    (head, "--shape 8x9", "--shape"), (head, "--rounds 0", "--rounds"), (head, "--upstream nan", "--upstream"),
    (head, "--dtype int8", "--dtype"), (head, "--provider nobody", "--provider"), (head, "--data all", "--data"),
    (head, "--provider ours:no_such_option=1", "no_such_option"), (head, "--device cuda:99", "--device"),
    (head, "--errors --upstream 0", "--upstream"),
    (memory, "--limit much", "--limit"), (memory, "--output memory.png", "--output"), (memory, "--model 16", "--model"),
    (memory, "--tokens -1", "--tokens"), (memory, "--device cpu", "on a GPU"),
    (losses, "--workload nobody", "--workload"),
    (losses, "--memory-budget much", "--memory-budget"), (losses, "--chunk-tokens 0", "--chunk-tokens"),
    (losses, "--accumulate-dtype int8", "--accumulate-dtype"), (losses, "--provider eager", "--provider"),
    (speed, "--rows nothing", "--rows"), (speed, "--upstream 1 0", "--upstream"),
    (parallel, "--device cpu --gpus 2 --shape 64x32x1001", "equal parts"), (parallel, "--rows x", "--rows"),
    (sitting, "--only nothing", "--only"), (sitting, "--only parallel-4 --gpus 2", "more GPUs"),
    (framework_steps, "nobody --device cpu", "nobody"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "words", "says"), BAD)
def test_bad_words_are_refused_before_work(module: Any, words: str, says: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        module.main(words.split())
    assert stopped.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("name", sitting.PARTS)
def test_parts_of_a_sitting_name_a_benchmark(name: str, capsys: Any) -> None:
    """Each part's words are read by their benchmark, whose device is then not there."""
    part = sitting.PARTS[name]
    assert part.minutes > 0
    with pytest.raises(SystemExit):
        __main__.main([*part.words.split(), "--output", part.file, "--device", "nowhere"])
    assert "'nowhere' is no device" in capsys.readouterr().err


# ---- operands


def test_operands() -> None:
    small = shapes.Shape(48, 16, 320)
    first, second = (operands(small, data="trained", seed=3) for _ in range(2))
    assert torch.equal(first.weight, second.weight) and torch.equal(first.target, second.target)
    many = operands(shapes.Shape(2000, 256, 32768), data="trained")
    logprobs = (many.hidden.detach() @ many.weight.detach().T).log_softmax(1)
    loss, entropy = F.nll_loss(logprobs, many.target), -(logprobs.exp() * logprobs).sum(1).mean()
    assert 0.62 < (logprobs.argmax(1) == many.target).float().mean() < 0.75 and 1.5 < loss < 2.3 and 1.5 < entropy < 2.3
    assert 0.05 < (many.target == many.target.mode().values).float().mean() < 0.15  # of the commonest id
    assert operands(small, targets="zipf").target.float().mean() < small.vocab / 3
    assert operands(small, targets="equal").target.unique().numel() == 1
    for tokens, count in ((64, 2), (64, 16), (33, 16)):
        ids = shapes.draw_segments(tokens, count, CPU, torch.Generator().manual_seed(0))
        lengths = torch.bincount(ids, minlength=count)
        assert torch.equal(ids, ids.sort().values) and len(lengths) == count
        assert lengths.min() >= max(1, 0.5 * tokens / count - 1) and lengths.max() <= 1.5 * tokens / count + 1


def test_batches_fit_their_workloads() -> None:
    mine = operands(shapes.Shape(4096, 8, 50))
    batches = {name: losses.make_step(name, mine, {}).loss.batch for name in losses.WORKLOADS}
    for name, workload in losses.WORKLOADS.items():
        fields = [field for field in workload.fields if field != "segments" or not workload.lengths]
        assert list(batches[name]) == fields + ["kept_ids", "kept_offsets"] * (workload.kept > 0)
    own = torch.log_softmax(mine.hidden.detach() @ mine.weight.detach().T, -1).gather(1, mine.target[:, None])[:, 0]
    for name, key in (("grpo", "old_logprobs"), ("dpo", "ref_logprobs")):
        assert 0.09 < (batches[name][key] - own).std() < 0.11
    assert batches["gspo"]["segments"].unique().tolist() == list(range(8))
    assert batches["dpo"]["pairs"].tolist() == [[2 * i, 2 * i + 1] for i in range(8)]
    assert torch.equal(batches["topk"]["teacher_ids"][:, 0], mine.target)
    assert not torch.equal(batches["jsd"]["teacher_weight"], mine.weight.detach())


@pytest.mark.parametrize("name", ROWS)
def test_a_step_is_what_its_row_says(name: str) -> None:
    bench, row = Bench(operands()), ROWS[name]
    given = bench.operands
    hidden, weight = (t.detach().clone().requires_grad_() for t in (given.hidden, given.weight))
    assert (bench.half.target != speed_rows.IGNORED).sum() == 32
    expected = F.cross_entropy(hidden @ weight.T, bench.half.target if row.half else given.target)
    (0.37 * expected).backward()
    if row.into:
        bench.main_grad.fill_(1.0)
    value = bench.step(name, 0.37)()
    torch.testing.assert_close(-value.mean() if row.logprobs else value, expected.detach())
    if not row.backward:
        assert given.hidden.grad is None and given.weight.grad is None
        return
    torch.testing.assert_close(given.hidden.grad, -hidden.grad if row.logprobs else hidden.grad)
    if row.frozen:
        assert given.weight.grad is None
    else:
        torch.testing.assert_close(bench.main_grad - 1 if row.into else given.weight.grad, weight.grad)


# ---- floors and times


@pytest.mark.parametrize("rows", [64, 20])
def test_the_floor_is_the_products(rows: int) -> None:
    drawn = operands(dtype=torch.float64)
    floor = measure.Floor(drawn, CPU)
    floor.rows = rows
    floor()
    logits = drawn.hidden.detach() @ drawn.weight.detach().T
    torch.testing.assert_close(floor.d_hidden, logits @ drawn.weight)
    torch.testing.assert_close(floor.d_weight, logits.T @ drawn.hidden)
    bench, counts = Bench(operands()), {}
    for key, one in bench.floors([SUMMED, ONE, TWO, THREE], CPU).items():
        written = bench.main_grad._version
        with products() as count:
            one()
            counts[key] = count(), bench.main_grad._version - written
    assert counts == {ONE: (1, 0), TWO: (2, 0), THREE: (3, 0), SUMMED: (3, 1)}


def test_rounds_take_turns_and_a_failing_step_leaves() -> None:
    order: list[str] = []

    def fails() -> None:
        order.append("c")
        raise MemoryError

    steps = {"a": lambda: order.append("a"), "b": lambda: order.append("b"), "c": fails}
    times, failures = rounds.time_rounds(steps, rounds.Turns(operands(), CPU), 3)
    assert order == ["a", "b", "c", "a", "b", "b", "a", "a", "b"]  # the first run of each is not counted
    assert {name: len(found.rounds) for name, found in times.items()} == {"a": 3, "b": 3}
    assert failures["c"].status == measure.OUT_OF_MEMORY
    order.clear()
    turns = rounds.Turns(SimpleNamespace(clear=lambda: None), CPU, meet=lambda: order.append("m"))
    rounds.time_rounds({"a": steps["a"]}, turns, 1)
    assert order == ["m", "a", "m", "m", "a"]
    assert measure.Failure.of(RuntimeError("DefaultCPUAllocator: can't allocate memory")).status == "out of memory"
    assert measure.Failure.of(ValueError("no")).status == "failed"


class Clocks(rounds.Turns):
    """A GPU whose step takes 12 ms for its first seconds, then 11, 10.5, and 10 from there on."""

    def run(self, step: Any, count: int) -> list[float]:
        step()
        return [self.slowness.pop(0) if len(self.slowness) > 1 else self.slowness[0] for _ in range(count)]


def test_a_step_settles_before_it_is_timed() -> None:
    """The median of a second no longer moves by half a percent; turns lead in for as long as the clocks had moved."""
    turns = Clocks(operands(), torch.device("cuda"))
    for slow, medians, lead in (
        ([12.0] * 3 + [10.0], [10.0, 10.0], 0.25),
        ([12.0] * 40 + [10.0], [10.0, 10.0], 0.3),
        ([12.0] * 300 + [10.0], [12.0, 12.0], 0.25),
        ([11.0] * 120 + [10.0], [11.0, 10.0, 10.0], 1.4),
        ([12.0 - 0.01 * number for number in range(700)], None, 1.5),
    ):
        turns.slowness = list(slow)
        found = turns.settle(lambda: None)
        if medians is None:
            assert len(found.seconds) == rounds.MOST_SECONDS and found.seconds == sorted(found.seconds, reverse=True)
        else:
            assert found.seconds == pytest.approx(medians, rel=0.002), slow
        assert found.lead == pytest.approx(lead, abs=0.1), slow
    times = rounds.Times([38.0], 0.5)
    assert times.runs == (14, 8)
    times.rounds, times.state = [4.0, 1.0, 2.0, 3.0, 5.0], {"watts": 700.0}
    row = times.row()
    assert [row[name] for name in ("ms", "ms_p25", "ms_p75", "watts", "lead_seconds")] == [3.0, 2.0, 4.0, 700.0, 0.5]


def test_more_steps_than_can_settle_take_turns_until_steady() -> None:
    """A turn's last piece takes as long as the one before; rounds end when none moves a median by half a percent."""
    order: list[str] = []
    steps = {name: functools.partial(order.append, name) for name in "ab"}
    times, _ = rounds.time_rounds(steps, rounds.Turns(operands(), CPU), 3, settling=["a"])
    assert order == [*"ba", *"abbaab"]  # who settles does so last
    turns = Clocks(operands(), torch.device("cuda"))
    for slow, steady in (([10.0], 10.0), ([12.0] * 20 + [11.0] * 20 + [10.0], 10.0), ([12.0] * 21 + [10.0], 10.0)):
        turns.slowness = list(slow)
        times = {"a": rounds.Times([10.0])}
        turns.steady_turn(lambda: None, times["a"])
        assert times["a"].rounds == [steady], slow
    turns.slowness = [20.0 - 0.03 * number for number in range(160)]  # never two pieces alike
    turns.steady_turn(lambda: None, times["a"])
    assert times["a"].rounds[-1] == pytest.approx(20.0 - 0.03 * 149.5) and len(turns.slowness) == 1
    for means, few in (([10.0] * 9, 3), ([10.0, 9.0, 10.1, 11.0, 10.02, 10.03, 10.0], 5), ([10.0, 9.0], 2)):
        turns = SimpleTurns(operands(), CPU, means=list(means))
        times, _ = rounds.time_rounds({"a": lambda: None}, turns, len(means), settling=["a"])
        assert len(times["a"].rounds) == few, means


@dataclass
class SimpleTurns(rounds.Turns):
    """Turns that take given times."""

    means: list[float] = field(default_factory=list)

    def settle(self, step: Any) -> rounds.Times:
        return rounds.Times([10.0])

    def steady_turn(self, step: Any, times: rounds.Times) -> tuple[float, float]:
        times.rounds.append(self.means.pop(0))
        return 0.0, 0.0


def test_clocks_and_power_are_those_of_the_timed_runs(monkeypatch: Any) -> None:
    """Lines of nvidia-smi within the spans count; words in place of numbers do not."""
    lines = "for w in ('1305, 2619, 700, 60', 'no numbers', '1300, 2619, 690, 61', '[N/A], 1, 1, 1'): print(w)"
    monkeypatch.setattr(gauge, "query", lambda device, *names: [sys.executable, "-c", lines])
    begin = time.monotonic()
    with gauge.Gauge(torch.device("cuda")) as found:
        while len(found.samples) < 2 and time.monotonic() < begin + 20:
            time.sleep(0.01)
    assert found.medians([(begin, time.monotonic())]) == {
        "sm_mhz": 1302.5, "memory_mhz": 2619.0, "watts": 695.0, "celsius": 60.5
    }  # fmt: skip
    assert found.medians([(0.0, 1.0)]) == {}
    with gauge.Gauge(CPU) as nothing:
        assert nothing.process is None


# ---- what is wrong or cannot run


def test_a_promise_that_is_not_kept_and_ranks_that_differ_are_found() -> None:
    bench = Bench(operands())
    assert command.warm_up(lambda: bench.step("into", 0.37))[1]["loss"] > 0
    with pytest.raises(ArithmeticError, match="not finite"):
        command.warm_up(lambda: replace(bench.step("into", 0.37), upstream=0.5))
    right, wrong = {"loss": 1.0, "agrees": True}, {"loss": 1.0, "agrees": False}
    told = [parallel_ranks.agreement([a, b]) for a, b in (
        (right, {"loss": 1.0}), (right, {"loss": 1.0000001}), (wrong, {"loss": 1.0}), ({"loss": 1.0}, {}))]  # fmt: skip
    assert told == [{"agrees": True}, {"agrees": False}, {"agrees": False}, {}]


def test_the_exact_reference_agrees_with_autograd(monkeypatch: Any) -> None:
    monkeypatch.setattr(accuracy, "_ROWS", 20)
    drawn = operands(dtype=torch.float64)
    exact = accuracy.reference(drawn, torch.float64)
    loss = F.cross_entropy(drawn.hidden @ drawn.weight.T, drawn.target)
    loss.backward()
    assert exact.loss == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close([exact.d_hidden, exact.d_weight], [drawn.hidden.grad, drawn.weight.grad])
    assert accuracy.relative_error(2 * exact.d_weight, exact.d_weight, 1.0) == pytest.approx(1.0)


def test_targets_stand_beside_what_was_measured(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    found = {name: [speed_rows.must_of(name, shape) for shape in speed_rows.SHAPES] for name in ROWS}
    assert found["default"] == [1.02, 1.02, 1.05, 1.06, 1.05, 1.06] and found["half-skipped"] == [0.55] * 6
    monkeypatch.setattr(speed_rows, "SHAPES", (speed_rows.SHAPES[0], SHAPE))
    monkeypatch.setitem(ROWS, "default", ROWS["default"]._replace(must=(1.02, 0.01)))
    rows = {row["row"]: row for row in rows_of(speed.main, tmp_path, "--rows", "default", "256MiB")}
    assert rows["default"]["must"] == 0.01 < rows["default"]["ratio"] and rows["256MiB"]["must"] is None
    line = next(line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│ def"))
    assert line[4].strip().endswith(" *") and line[10].strip() == "0.01"


def test_what_cannot_run_is_a_row_and_the_rest_is_measured(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    words = ["--workload", "jsd", "--workload", "logprobs", "--memory-budget", "16KiB"]
    rows = {row["workload"]: row for row in rows_of(losses.main, tmp_path, *words, status=1)}
    assert "ours, jsd failed: ValueError: memory_budget" in capsys.readouterr().out
    assert (rows["jsd"]["status"], rows["logprobs"]["status"]) == ("failed", "ok")

    def fails(*_: Any) -> None:
        raise MemoryError

    def breaks(*_: Any) -> None:
        raise RuntimeError("broken inside")

    monkeypatch.setattr(providers, "eager", fails)
    monkeypatch.setattr(providers, "_torch_native", lambda name, device: breaks)
    found = rows_of(head.main, tmp_path, "--provider", "eager", "--provider", "torch")
    assert [row["status"] for row in found] == 2 * ["ok", "out of memory", "failed"]
    breaks_later = mock.Mock(side_effect=[providers.eager, ImportError("not twice")])
    monkeypatch.setattr(providers, "_torch_native", breaks_later)
    found = rows_of(head.main, tmp_path, "--provider", "ours", "--provider", "torch", "--data", "flat")
    assert [row["status"] for row in found] == ["ok", "ok", "failed"] and "not twice" in found[-1]["error"]
    monkeypatch.setattr(measure, "Floor", fails)
    rows = {row["row"]: row for row in rows_of(speed.main, tmp_path, "--rows", "half")}
    assert rows[THREE]["status"] == measure.OUT_OF_MEMORY and "ratio" not in rows["default"]
    assert rows["half"]["ratio"] == pytest.approx(rows["half"]["ms"] / rows["default"]["ms"])
    assert head.main(["--device", "cpu", "--provider", "liger", "--output", str(tmp_path / "none.json")]) == 1
    assert "no provider can run here" in capsys.readouterr().out
    monkeypatch.setattr(torch.multiprocessing, "spawn", breaks)
    output = tmp_path / "parallel.json"
    assert parallel.main(["--device", "cpu", "--gpus", "2", "--shape", str(SHAPE), "--output", str(output)]) == 1
    assert "broken inside" in json.loads(output.read_text())["rows"][0]["error"]


def test_the_chunks_of_a_newer_torch_run_on_an_older_one(monkeypatch: Any) -> None:
    """Its Python files give what F.linear_cross_entropy gives there; without them the row says what is missing."""
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("this torch has no chunked linear_cross_entropy")
    drawn = operands(data="trained")
    expected = providers.build("torch", CPU).call(drawn.hidden, drawn.weight, drawn.target)
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions")
    with pytest.raises(providers.Unavailable, match=r"2\.13 and later"):
        providers.build("torch", CPU)
    for name in [name for name in sys.modules if name.startswith("torch.nn.modules.linear_cross_entropy")]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])  # put back afterwards
    monkeypatch.setenv(providers.NEWER_TORCH, str(Path(torch.__file__).parent))
    assert torch.equal(providers.build("torch", CPU).call(drawn.hidden, drawn.weight, drawn.target), expected)
    assert torch.__version__.startswith(providers.newer_torch()["F.linear_cross_entropy's Python of torch"])


def test_a_head_is_imported_without_what_its_package_runs(monkeypatch: Any, tmp_path: Path) -> None:
    """As Unsloth's, whose ``__init__`` raises outside of Unsloth; a package that is not there has its own words."""
    deepest = tmp_path / "whole" / "part"
    deepest.mkdir(parents=True)
    for folder in (deepest.parent, deepest):
        (folder / "__init__.py").write_text("raise ImportError('install all of it')")
    (deepest / "head.py").write_text("VALUE = 3")
    monkeypatch.syspath_prepend(tmp_path)
    names = "whole", "whole.part"
    for name in (*names, "whole.part.head"):  # taken away afterwards
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    for _ in range(2):  # once to see what runs, and again for each shape
        providers._import_empty(names)
        assert importlib.import_module("whole.part.head").VALUE == 3
    with pytest.raises(ModuleNotFoundError):
        providers._import_empty(["absent_package"])


def test_a_framework_that_is_missing_is_a_row(tmp_path: Any) -> None:
    (tmp_path / "verl" / "verl").mkdir(parents=True)
    (tmp_path / "verl" / "verl" / "__init__.py").write_text("raise ImportError('this one is found first')")
    path = tmp_path / "steps.json"
    words = ["verl", "--device", "cpu", "--packages", str(tmp_path), "--output", str(path)]
    for more, says in (([], "ImportError: this one is found first"), (["--limit", "0"], "cut after 0 seconds")):
        assert framework_steps.main([*words, *more]) == 1
        assert json.loads(path.read_text())["rows"][0]["error"] == says
