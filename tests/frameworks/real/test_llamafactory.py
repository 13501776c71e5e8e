"""LLaMA-Factory's runs through this library's head against its own: losses, logged metrics and weights after steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llamafactory.train import tuner
from safetensors.torch import load_file
from tiny_texts import saved

from chunked_head.integrations import llamafactory as ours

FACTS = [("the sea", "salt water"), ("a stone", "old and hard"), ("the wind", "air that moves"), ("a map", "a promise")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llamafactory")
    saved(made / "model")
    sft = [{"instruction": what, "input": "", "output": text} for what, text in FACTS]
    dpo = [{"instruction": what, "input": "", "chosen": text, "rejected": text[::-1] + "!"} for what, text in FACTS]
    ranking = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    info = {
        "sft": {"file_name": "sft.json"},
        "dpo": {"file_name": "dpo.json", "ranking": True, "columns": ranking},
    }
    for name, rows in {"sft": sft, "dpo": dpo, "dataset_info": info}.items():
        (made / f"{name}.json").write_text(json.dumps(rows))
    return made


def arguments(folder: Path, output: Path, stage: str, **more: Any) -> dict[str, Any]:
    return {
        "model_name_or_path": str(folder / "model"), "stage": stage, "do_train": True, "finetuning_type": "full",
        "dataset": stage, "dataset_dir": str(folder), "template": "default", "cutoff_len": 128,
        "output_dir": str(output), "max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "report_to": "none",
        "use_cpu": True, "bf16": False, "overwrite_cache": True, "preprocessing_num_workers": 1, "seed": 3,
        "save_strategy": "no", **more,
    }  # fmt: skip


def trained(output: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"][:-1]
    return history, load_file(next(output.glob("*model.safetensors")))


RUNS: dict[str, dict[str, Any]] = {
    "sft": {"stage": "sft"},
    "sft lora": {"stage": "sft", "finetuning_type": "lora", "lora_rank": 4},
    "dft": {"stage": "sft", "use_dft_loss": True},
    "dpo": {"stage": "dpo", "ref_model": "model"},
    "simpo": {"stage": "dpo", "pref_loss": "simpo"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run(name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(RUNS[name])
    if "ref_model" in given:
        given["ref_model"] = str(folder / "model")
    tuner.run_exp(arguments(folder, tmp_path / "theirs", **given))
    patched, real = [], ours.patch_model
    monkeypatch.setattr(ours, "patch_model", lambda model, **o: patched.append(real(model, **o)) or model)
    ours.run_exp(arguments(folder, tmp_path / "ours", **given, chunked_head={"memory_budget": "8MiB"}))
    assert len(patched) == (2 if "ref_model" in given else 1)
    for model in patched:
        report = getattr(model, "get_base_model", lambda model=model: model)().chunked_head
        assert report.fused > 0 and report.materialised == 0, report
    (theirs, their_weights), (mine, my_weights) = trained(tmp_path / "theirs"), trained(tmp_path / "ours")
    assert len(theirs) == 3 and any(row["loss"] != theirs[0]["loss"] for row in theirs)
    for row, expected in zip(mine, theirs, strict=True):
        assert row == pytest.approx(expected, rel=2e-3, abs=2e-4)  # logged with four digits
    for key, weight in their_weights.items():
        torch.testing.assert_close(my_weights[key], weight, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stage": "ppo"}, "stage must be one of pt, sft, dpo, kto"),
        ({"stage": "sft", "enable_liger_kernel": True}, "Liger's head"),
        ({"stage": "sft", "use_unsloth": True}, "use_unsloth has its loss"),
        ({"stage": "sft", "chunked_head": {"memory_budget": "much"}}, "memory_budget"),
    ],
)
def test_what_is_refused(more: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ours.run_exp(arguments(folder, tmp_path, **more))
