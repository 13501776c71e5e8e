"""ms-swift's runs through this library's head against its own: losses, logged metrics and weights after steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import swift
import swift.rlhf_trainers
import swift.sequence_parallel  # scripts functions of torch's, which the suite replaces while a test runs
import torch
from safetensors.torch import load_file
from tiny_texts import saved

from chunked_head.integrations import ms_swift

FACTS = [("the sea", "salt water"), ("a stone", "old and hard"), ("the wind", "air that moves"), ("a map", "a promise")]
PLUGIN = """
from chunked_head.integrations.ms_swift import register

register(memory_budget="8MiB")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("swift")
    saved(made / "model")
    (made / "plugin.py").write_text(PLUGIN)
    rows: dict[str, list[dict[str, Any]]] = {"sft": [], "dpo": []}
    for what, text in FACTS:
        messages = [{"role": "user", "content": what}, {"role": "assistant", "content": text}]
        rows["sft"].append({"messages": messages})
        rows["dpo"].append({"messages": messages, "rejected_response": text[::-1] + "!"})
    for name, lines in rows.items():
        (made / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return made


def trained(folder: Path, output: Path, kind: str, **more: Any) -> tuple[list[dict[str, float]], dict[str, Any]]:
    given = {
        "model": str(folder / "model"), "model_type": "llama", "template": "chatml", "output_dir": str(output),
        "dataset": [str(folder / f"{kind}.jsonl")], "add_version": False, "max_steps": 3, "logging_steps": 1,
        "torch_dtype": "float32", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "report_to": "none", "tuner_type": "full", "check_model": False,
        "dataset_num_proc": 1, "dataloader_num_workers": 0, "split_dataset_ratio": 0.0, "max_length": 128,
        "use_hf": True, "bf16": False, "fp16": False, "save_strategy": "steps", "save_steps": 3, "attn_impl": "sdpa",
        **more,
    }  # fmt: skip
    if kind == "dpo":
        swift.rlhf_main(swift.RLHFArguments(rlhf_type="dpo", **given))
    else:
        swift.sft_main(swift.SftArguments(**given))
    state = json.loads((output / "checkpoint-3" / "trainer_state.json").read_text())
    history = [
        {key: value for key, value in row.items() if isinstance(value, float) and not speeds(key)}
        for row in state["log_history"]
    ]
    return history, load_file(next((output / "checkpoint-3").glob("*model.safetensors")))


def speeds(key: str) -> bool:
    return "speed" in key or "memory" in key or "time" in key or "runtime" in key


RUNS: dict[str, dict[str, Any]] = {
    "sft": {"kind": "sft"},
    "sft lora": {"kind": "sft", "tuner_type": "lora", "lora_rank": 4},
    "dft": {"kind": "sft", "enable_dft_loss": True},
    "dpo": {"kind": "dpo"},
    "dpo lora": {"kind": "dpo", "tuner_type": "lora", "lora_rank": 4, "rpo_alpha": 0.5},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run(name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, their_weights = trained(folder, tmp_path / "theirs", **RUNS[name])
    patched, real = [], ms_swift.patch_model
    monkeypatch.setattr(ms_swift, "patch_model", lambda model, **o: patched.append(real(model, **o)) or model)
    plugin = {"external_plugins": [str(folder / "plugin.py")], "callbacks": ["chunked_head"]}
    mine, my_weights = trained(folder, tmp_path / "ours", **RUNS[name], **plugin)
    assert len(patched) == (2 if name == "dpo" else 1)
    for model in patched:
        report = getattr(model, "get_base_model", lambda model=model: model)().chunked_head
        assert report.fused > 0 and report.materialised == 0, report
    assert len(theirs) >= 3 and any(row != theirs[0] for row in theirs)
    for row, expected in zip(mine, theirs, strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-4)
    for key, weight in their_weights.items():
        torch.testing.assert_close(my_weights[key], weight, rtol=1e-3, atol=1e-3)


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        ms_swift.register(memory_budget="much")
    with pytest.raises(TypeError, match="unknown option 'budget'"):
        ms_swift.register(budget="1GiB")
