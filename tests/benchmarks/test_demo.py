"""The demo end to end at toy sizes, what it says to bad input, and that it fails when the losses differ."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
TOY = f"--vocab 512 --bpe-vocab 300 --steps {STEPS} --batch 2 --context 16 --hidden 32 --layers 1 --device cpu".split()


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
    assert (output / "demo.svg").read_text(encoding="utf-8").startswith("<svg")
    numbers = json.loads((output / "demo.json").read_text(encoding="utf-8"))
    plain, ours = numbers["plain"], numbers["ours"]
    assert len(plain["losses"]) == STEPS and ours["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    assert plain["losses"][0] == pytest.approx(math.log(512), abs=0.2)  # an untrained model knows nothing
    assert plain["losses"][-1] < plain["losses"][0] and numbers["agree"]
    # a child's own error reaches the user
    config = demo.TrainingConfig(demo.ModelConfig(512, 32, 1, 16), STEPS, 2, 0, "no-such-device", None)
    tokens = demo.tokenize_text(demo.load_text(text_file), 300, 16)
    with pytest.raises(demo.RunError, match="plain run failed"):
        demo.train_both(demo.Console(), config, tokens)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--steps 0", "--steps"), ("--batch many", "--batch"), ("--text no/such/file.txt", "no such file"),
        ("--hidden 193", "--hidden 193"), ("--bpe-vocab 256", "--bpe-vocab 256"), ("--seed -1", "--seed"),
        ("--bpe-vocab 513", "more than the head's --vocab 512"), ("--device abacus", "'abacus' is no device"),
        ("--device cuda:99", "argument --device"), ("--memory-budget 1", "--memory-budget 1"),
        ("--context 100000", "too short"), ("--text {same} --context 30", "tokens, and one window takes 31"),
        ("--text {latin}", "as UTF-8 text"),
    ],
)  # fmt: skip
def test_bad_input(words: str, complaint: str, text_file: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "same").write_text("a" * 400, encoding="utf-8")  # few tokens
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xe9" * 500)
    words = words.format(same=tmp_path / "same", latin=tmp_path / "latin")
    with pytest.raises(SystemExit) as left:
        demo.main([*TOY, "--text", str(text_file), "--output", str(tmp_path / "output"), *words.split()])
    assert left.value.code == 2 and complaint in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [5.1, math.nan])
def test_differing_losses_fail(wrong: float, text_file: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def run(losses: list[float]) -> Any:
        return demo.RunResult(losses, [1.0] * STEPS, [0.5] * STEPS, validation_loss=5.0, peak_bytes=2, state_bytes=1)

    monkeypatch.setattr(demo, "train_both", lambda *_: (run([6.0, 5.0, 4.0]), run([6.0, wrong, 4.0])))
    assert demo.main([*TOY, "--text", str(text_file), "--output", str(tmp_path)]) == 1
    assert "do NOT agree" in capsys.readouterr().err
