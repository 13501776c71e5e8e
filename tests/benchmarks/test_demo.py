"""The demo end to end at toy sizes, what it says to bad input, and that it fails when the losses differ."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
TOY = f"--vocab 512 --bpe-vocab 300 --steps {STEPS} --batch 2 --context 16 --hidden 32 --layers 1 --device cpu".split()


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.demo")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"Line {i}: {i * i} is the square of {i}.\n" for i in range(300)), encoding="utf-8")
    return path


@pytest.mark.exhaustive
def test_end_to_end(text_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = [sys.executable, "-m", "benchmarks.demo", *TOY, "--text", str(text_file), "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last_lines = done.stdout.splitlines()[-2:]
    assert last_lines == [f"wrote {output / 'demo.json'}", f"wrote {output / 'demo.png'}"]
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((output / "demo.json").read_text(encoding="utf-8"))
    plain, ours = numbers["plain"], numbers["ours"]
    assert len(plain["losses"]) == len(ours["losses"]) == STEPS
    assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    assert ours["validation_loss"] == pytest.approx(plain["validation_loss"], abs=1e-5)
    assert plain["losses"][0] == pytest.approx(math.log(512), abs=0.2)  # an untrained model knows nothing
    assert plain["losses"][-1] < plain["losses"][0]
    assert numbers["agree"] and numbers["bpe_size"] <= 300
    assert plain["state_bytes"] == ours["state_bytes"] == 3 * 4 * plain["parameters"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "--steps"),
        (["--batch", "many"], "--batch"),
        (["--text", "no/such/file.txt"], "no such file"),
        (["--hidden", "33"], "--hidden 33"),
        (["--bpe-vocab", "256"], "--bpe-vocab 256"),
        (["--bpe-vocab", "513"], "more than the head's --vocab 512"),
        (["--seed", "-1"], "--seed"),
        (["--device", "abacus"], "--device abacus"),
        (["--device", "meta"], "cpu and cuda"),
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--memory-budget", "plenty"], "--memory-budget plenty"),
        (["--memory-budget", "1"], "--memory-budget 1"),
        (["--context", "100000"], "too short"),
    ],
)
def test_bad_input(
    demo: ModuleType,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        demo.main([*TOY, "--text", str(text_file), "--output", str(tmp_path / "output"), *arguments])
    assert exit_info.value.code == 2
    assert complaint in capsys.readouterr().err


def test_text_of_too_few_tokens(demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Enough bytes, but the BPE makes few tokens of them: seen only once it is trained."""
    path = tmp_path / "same.txt"
    path.write_text("a" * 400, encoding="utf-8")
    with pytest.raises(SystemExit):
        demo.main([*TOY, "--context", "30", "--text", str(path), "--output", str(tmp_path)])
    assert "tokens, and one window takes 31" in capsys.readouterr().err


def test_text_that_is_not_utf8(demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"\xff\xfe\xe9" * 500)
    with pytest.raises(SystemExit):
        demo.main([*TOY, "--text", str(path), "--output", str(tmp_path)])
    assert "as UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [5.1, math.nan])
def test_differing_losses_fail(
    demo: ModuleType,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: float,
) -> None:
    def run(losses: list[float]) -> Any:
        return demo.RunResult(losses, [1.0] * STEPS, [0.5] * STEPS, validation_loss=5.0, peak_bytes=2, state_bytes=1)

    results = (run([6.0, 5.0, 4.0]), run([6.0, wrong, 4.0]))
    monkeypatch.setattr(demo, "train_both", lambda *_: results)
    assert demo.main([*TOY, "--text", str(text_file), "--output", str(tmp_path)]) == 1
    assert "do NOT agree" in capsys.readouterr().err
    assert not json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))["agree"]


@pytest.mark.exhaustive
def test_a_failing_run_is_reported(
    demo: ModuleType, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The child's own error reaches the user."""
    config = demo.TrainingConfig(demo.ModelConfig(512, 32, 1, 16), STEPS, 2, 0, "no-such-device", None)
    tokens = demo.tokenize_text(demo.load_text(text_file), 300, 16)
    with pytest.raises(demo.RunError, match="plain run failed"):
        demo.train_both(demo.Console(), config, tokens)


def test_standard_library_is_split_by_file(demo: ModuleType) -> None:
    text = demo.load_text(None)
    assert len(text.training) > len(text.held_out) > 0
    assert text == demo.load_text(None)  # the same files in the same order, every time
