"""Axolotl's runs with the plugin against those without: losses, logged metrics and weights after steps."""

import json
import os
from pathlib import Path
from typing import Any

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"

import pytest
import torch
import yaml
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.train import train
from tiny_texts import saved

FACTS = [("the sea", "salt water"), ("a stone", "old and hard"), ("the wind", "air that moves"), ("a map", "a promise")]
PLUGIN = {"plugins": ["chunked_head.integrations.axolotl.ChunkedHeadPlugin"], "chunked_head": {"memory_budget": "8MiB"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("axolotl")
    saved(made / "model")
    rows = [{"instruction": what, "input": "", "output": text} for what, text in FACTS * 4]
    (made / "sft.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return made


def configured(folder: Path, output: Path, **more: Any) -> Any:
    """A configuration as Axolotl reads and validates it from a file."""
    data = {"path": str(folder / "sft.jsonl"), "ds_type": "json", "split": "train", "type": "alpaca"}
    given = {
        "base_model": str(folder / "model"), "tokenizer_type": "PreTrainedTokenizerFast", "datasets": [data],
        "dataset_prepared_path": str(output / "prepared"), "output_dir": str(output), "sequence_len": 256,
        "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-2,
        "lr_scheduler": "constant", "optimizer": "adamw_torch", "logging_steps": 1, "save_strategy": "no",
        "val_set_size": 0, "bf16": False, "fp16": False, "tf32": False, "seed": 3, "sample_packing": False,
        "attn_implementation": "eager", "dataset_num_proc": 1, "save_safetensors": True, "warmup_steps": 0,
        "special_tokens": {"pad_token": "<|pad|>", "eos_token": "<|end|>"}, "use_wandb": False, **more,
    }  # fmt: skip
    output.mkdir(exist_ok=True)
    path = output / "run.yaml"
    path.write_text(yaml.safe_dump(given))
    return load_cfg(str(path))


def trained(cfg: Any) -> tuple[Any, list[dict[str, float]]]:
    model, _, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
    history = [
        {key: value for key, value in row.items() if isinstance(value, float) and not timed(key)}
        for row in trainer.state.log_history[:-1]
    ]
    return model, history


def timed(key: str) -> bool:
    return any(part in key for part in ("memory", "time", "per_second", "tokens/", "ppl"))


# Axolotl's Triton kernels for adapters replace a class's forward for good, and run on a GPU alone
KERNELS = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, **KERNELS}
RUNS: dict[str, dict[str, Any]] = {
    "sft": {},
    "sft lora": LORA,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run(name: str, folder: Path, tmp_path: Path) -> None:
    plain, theirs = trained(configured(folder, tmp_path / "theirs", **RUNS[name]))
    model, mine = trained(configured(folder, tmp_path / "ours", **RUNS[name], **PLUGIN))
    report = getattr(model, "get_base_model", lambda: model)().chunked_head
    assert report.fused > 0 and report.materialised == 0, report
    assert len(theirs) == 3 and any(row != theirs[0] for row in theirs)
    for row, expected in zip(mine, theirs, strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-4)
    for (key, weight), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(other, weight, rtol=1e-3, atol=1e-3, msg=key)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"chunked_head": {"memory_budget": "much"}}, "memory_budget"),
        ({"chunked_head": {"budget": "1GiB"}}, "unknown option 'budget'"),
        ({"cut_cross_entropy": True}, "cut_cross_entropy is another head"),
        ({"rl": "dpo"}, "rl: dpo has its loss made by TRL"),
    ],
)
def test_axolotl_validates_the_options(more: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        configured(folder, tmp_path, **(PLUGIN | more))
