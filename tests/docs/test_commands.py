"""``python -m chunked_head``: its numbers are the library's own, its errors a line, its exit codes what they say."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import chunked_head
from chunked_head import __main__ as commands
from chunked_head import explain_model, losses, plan
from chunked_head.__main__ import main
from chunked_head.core.gpus import CARDS, GPUS, gpu_named
from chunked_head.stores.store import LogitsStore

ROOT = Path(__file__).parents[2]
SIZES = ["plan", "--tokens", "8192", "--hidden", "4096", "--vocab", "128256"]
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97, "hidden_size": 32,
         "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}  # fmt: skip


@pytest.mark.parametrize("words, options", [
    ([], {}),
    (["--device", "sm_90", "--memory-budget", "1GiB"], {"device": "sm_90", "memory_budget": "1GiB"}),
    (["--loss", "grpo", "entropy", "--device", "sm_90", "--ranks", "4"],
     {"loss": losses.grpo() + losses.entropy(), "device": "sm_90", "ranks": 4}),
    (["--loss", "forward_kl", "--teacher-hidden", "64"], {"loss": losses.forward_kl(), "teacher_hidden": 64}),
    (["--loss", "topk_kl", "--teacher-k", "8", "--softcap", "30", "--chunk-tokens", "512"],
     {"loss": losses.topk_kl(), "teacher_k": 8, "softcap": 30.0, "chunk_tokens": 512}),
], ids=str)  # fmt: skip
def test_plan(words: list[str], options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    true = plan(8192, 4096, 128256, torch.bfloat16, **options)
    assert main([*SIZES, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for key in ("peak_bytes", "extra_bytes", "gradient_bytes", "chunks", "chunk_tokens", "schedule", "weight_error"):
        assert found[key] == getattr(true, key)
    assert (found["budget_bytes"], found["store"]) == (true.budget, true.sizes.store.name)
    assert sum(buffer["bytes"] for buffer in found["buffers"] if buffer["kind"] == "gradient") == true.gradient_bytes
    assert main([*SIZES, *words]) == 0
    out = capsys.readouterr().out
    assert f"{true.peak_bytes / 2**20:,.1f} MiB" in out and true.schedule in out
    assert ("torch sees no GPU here" in out) == (not torch.cuda.is_available() and "--device" not in words)
    buffers = [buffer.name for buffer in true.buffers]
    assert main([*SIZES, *words, "--verbose"]) == 0
    verbose = capsys.readouterr().out
    assert all(name in verbose for name in buffers) and "Buffers" not in out


@pytest.mark.parametrize("card", ["H100", "h200", "sm_90"])
def test_a_card_by_its_name(card: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--tokens", "8k", "--hidden", "4096", "--vocab", "128256", "--device", card, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["facts"]["GPU"] == "sm_90" and found["facts"]["tokens x hidden x vocab"].startswith("8192 x ")
    assert plan(64, 16, 300, torch.bfloat16, device=card) == plan(64, 16, 300, torch.bfloat16, device="sm_90")


def test_names_of_cards() -> None:
    assert CARDS.keys() == GPUS.keys()
    for text, name in (("RTX 4090", "sm_89"), ("rtx4090", "sm_89"), ("rtx-pro-6000", "sm_120"), ("mi300x", "gfx942")):
        assert gpu_named(text) is GPUS[name]
    assert gpu_named("H1000") is None and gpu_named("") is None


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert not left.value.code
    assert capsys.readouterr().out == f"chunked_head {chunked_head.__version__}, torch {torch.__version__}\n"


@pytest.mark.parametrize("as_file", [False, True])
def test_explain(tmp_path: Path, as_file: bool, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    where = str(path if as_file else tmp_path)
    words = ["explain", where, "--tokens", "640", "--dtype", "bf16", "--device", "sm_90"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).to(torch.bfloat16)
    true = explain_model(model, 640, device="sm_90")
    assert true.plan is not None and found["plan"]["extra_bytes"] == true.plan.extra_bytes == found["extra_bytes"]
    for key in ("model", "patched", "head", "full_bytes", "tokens"):
        assert found[key] == getattr(true, key)
    assert found["losses"] == list(true.losses) and found["tail"] == str(true.tail)
    assert main(words) == 0
    assert str(true.tail) in capsys.readouterr().out
    assert main([*words[:-4], *words[-2:]]) == 0
    assert "the configuration names none" in capsys.readouterr().out
    assert main([*words[:-4], *words[-2:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["extra_bytes"] == found["extra_bytes"]  # of bfloat16


GEMMA = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304,
         "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 256}  # fmt: skip


def test_printed_commands(tmp_path: Path) -> None:
    """Consoles in docs/ show what their commands print, where "..." stands for the rest of a line. In a process of
    their own: tiles of interpreted kernels are smaller."""
    pytest.importorskip("transformers")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    (tmp_path / "gemma-2-2b").mkdir()
    (tmp_path / "gemma-2-2b" / "config.json").write_text(json.dumps(GEMMA))
    consoles = []
    for page in (ROOT / "docs").rglob("*.md"):
        consoles += re.findall(r"^```\n\$ chunked-head (.+)\n((?:.*\n)*?)```$", page.read_text(), re.M)
    assert consoles
    for words, shown in consoles:
        command = [sys.executable, "-m", "chunked_head", *shlex.split(words)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        printed = [line.split() for line in done.stdout.splitlines()]
        lines = [line.split() for line in shown.splitlines()]
        short = [line[:-1] if line[-1] == "..." else line for line in lines]
        assert short == [found[: len(line)] for found, line in zip(printed, short, strict=True)], words


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    test = found["self_test"]
    assert found["passed"] and found["versions"]["torch"] == torch.__version__ and found["result"] == "pass"
    assert 0 < test["hidden_error"] <= test["gradient_bound"] and 0 < test["weight_error"] <= test["gradient_bound"]
    assert any("TRITON_INTERPRET" in one for one in found["odd"]) != torch.cuda.is_available()
    assert found["call"]["backend"] == ("triton" if torch.cuda.is_available() else "torch")


def test_doctor_of_a_broken_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A gradient a thousandth too large, one of nan, a call that raises."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the kernel is the CPU's
    right = LogitsStore.gradient
    for factor in (1.001, float("nan")):
        monkeypatch.setattr(LogitsStore, "gradient", lambda *args, by=factor: right(*args).mul_(by))
        assert main(["doctor", "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert not found["passed"] and not found["self_test"]["weight_error"] <= found["self_test"]["gradient_bound"]
    monkeypatch.setattr(commands, "linear_cross_entropy", lambda *args, **kwargs: 1 / 0)
    assert main(["doctor"]) == 1
    assert "FAIL, ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize("words, says", [
    ([], "COMMAND"),
    (["plam"], "plam"),
    (["plan"], "--tokens"),
    ([*SIZES, "--tokens", "many"], "argument --tokens: must be a whole number such as 8192, 8k or 1m, got 'many'"),
    ([*SIZES, "--tokens", "k"], "argument --tokens: must be a whole number such as 8192, 8k or 1m, got 'k' (--help"),
    ([*SIZES, "--device", "H1000"], "a card's name, such as 'H100'"),
    ([*SIZES, "--tokens", "-1"], "tokens must be at least 0"),
    ([*SIZES, "--loss", "l2"], "l2"),
    ([*SIZES, "--memory-budget", "1KiB"], "memory_budget of 1024 bytes is too small"),
    ([*SIZES, "--loss", "topk_kl"], "topk_kl reads K ids of a teacher for each token; pass teacher_k, the K, got 0"),
    ([*SIZES, "--device", "sm_1"], "sm_1"),
    (["explain", "/nowhere/at/all"], "/nowhere/at/all is neither a folder with config.json or such a file, "
     "nor a model in the local cache, and nothing is downloaded; name one that is there, or fetch it first (hf "
     "download /nowhere/at/all)\n"),
    (["explain", str(ROOT / "docs")], "docs is not a folder with config.json"),
    (["explain", str(ROOT / "README.md")], "not a valid JSON"),
], ids=str)  # fmt: skip
def test_bad_input_is_a_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    if words[:1] == ["explain"]:
        pytest.importorskip("transformers")
    try:
        code = main(words)
    except SystemExit as left:  # argparse's
        code = int(left.code or 0)
    out, err = capsys.readouterr()
    assert code == 2 and not out and says in err and err.count("\n") == 1 and "Traceback" not in err


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["explain", "x"]) == 2
    assert "pip install transformers" in capsys.readouterr().err


def test_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["chunked_head", "plan", "--help"])
    monkeypatch.delitem(sys.modules, "chunked_head.__main__")
    with pytest.raises(SystemExit) as left:
        runpy.run_module("chunked_head", run_name="__main__")
    out = capsys.readouterr().out
    assert not left.value.code and "python -m chunked_head plan" in out and "--memory-budget" in out
