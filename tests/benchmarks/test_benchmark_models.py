"""The benchmarks of whole models, at sizes that say nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

import chunked_head.integrations.huggingface.fused
from benchmarks import framework_steps, frameworks, model_curves, models


@pytest.mark.exhaustive
def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(models, "TINY", models.TINY | {"vocab_size": 300, "num_hidden_layers": 1})
    path = tmp_path / "models.json"
    assert models.main(["--rounds", "2", "--tokens", "40", "--device", "cpu", "--output", str(path)]) == 0
    found = json.loads(path.read_text())
    plain, ours = found["rows"]
    assert (plain["provider"], ours["provider"]) == ("plain", "ours") and plain["ms"] > 0 and ours["ms"] > 0
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["benchmark"] == "models"
    with pytest.raises(SystemExit):
        models.main(["--longest", "80", "--device", "cpu"])


@pytest.mark.exhaustive
def test_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_curves, "BPE_VOCAB", 300)
    monkeypatch.setattr(model_curves, "CONTEXT", 16)
    text = tmp_path / "text.txt"
    text.write_text("the sea is deep and never still; the wind would rather be somewhere else. " * 40)
    arguments = ["--steps", "4", "--device", "cpu", "--text", str(text), "--output", str(tmp_path / "curves.json")]
    assert model_curves.main(arguments) == 0
    found = json.loads((tmp_path / "curves.json").read_text())
    assert len(found["runs"]["patched"]["entropy"]) == 4
    # a loss that is wrong by a thousandth is seen
    right = chunked_head.integrations.huggingface.fused.linear_loss

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output = right(*args, **kwargs)
        return replace(output, loss=output.loss * 1.001)

    monkeypatch.setattr("chunked_head.integrations.huggingface.fused.linear_loss", wrong)
    assert model_curves.main(arguments) == 1


@pytest.mark.exhaustive
def test_trainers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every trainer and loop that is there: with our head the same loss and gradients."""
    pytest.importorskip("trl")
    accelerate, path = pytest.importorskip("accelerate"), tmp_path / "frameworks.json"
    try:
        assert frameworks.main(["--rounds", "1", "--tokens", "64", "--output", str(path)]) == 0
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # the trainers'
    rows = {row["trainer"]: row["ways"] for row in json.loads(path.read_text())["rows"]}
    left_out = {"Lightning"} if "Lightning is left out" in capsys.readouterr().out else set()
    assert rows.keys() == frameworks.trainers.TRAINERS.keys() - left_out
    for ways in rows.values():
        assert ways["ours"]["ms"] > 0 and ways["plain"]["ms"] > 0
        for key in ("loss", "grad_norm"):
            assert ways["ours"][key] == pytest.approx(ways["plain"][key], rel=1e-4) and ways["plain"][key]
    with pytest.raises(SystemExit):
        frameworks.main(["lm_eval", "--device", "cuda"])


def test_a_framework_that_is_missing_is_a_row(tmp_path: Path) -> None:
    """Its steps are tested in ``tests/frameworks/real``."""
    (tmp_path / "verl" / "verl").mkdir(parents=True)
    (tmp_path / "verl" / "verl" / "__init__.py").write_text("raise ImportError('this one is found first')")
    path = tmp_path / "steps.json"
    arguments = ["verl", "--device", "cpu", "--packages", str(tmp_path), "--output", str(path)]
    assert framework_steps.main(arguments) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert row["framework"] == "verl" and row["error"] == "ImportError: this one is found first"
    assert framework_steps.main([*arguments, "--limit", "0"]) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert row["error"] == "cut after 0 seconds"
    with pytest.raises(SystemExit):
        framework_steps.main(["nobody", "--device", "cpu"])
