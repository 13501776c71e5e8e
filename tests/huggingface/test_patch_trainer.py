"""transformers' Trainer and accelerate with a patched model: the numbers of the plain one."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tiny_models import pair, transformers

from chunked_head import metrics, patch_model
from chunked_head.integrations.huggingface import log_metrics

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each test alone: with transformers 4.57 a trainer in bf16 says so to all that come after it."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


class Texts(torch.utils.data.Dataset):
    """Token ids with labels of different lengths that count."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(1, 97, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.where(torch.arange(9) >= index % 5, -100)}


def mean_of_right(prediction: Any) -> dict[str, float]:
    ids = prediction.predictions if prediction.predictions.ndim == 2 else prediction.predictions.argmax(-1)
    labels = prediction.label_ids[:, 1:]
    return {"right": float((ids[:, :-1] == labels)[labels != -100].mean())}


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1]
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), reduction="sum")
    return loss / num_items_in_batch


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # arguments, the trainer's own, fused in training
    "plain": ({}, {}, 6),
    "accumulation": ({"gradient_accumulation_steps": 2}, {}, 12),
    # small steps: Adam's first ones are of the sign of gradients, whose rounding differs
    "bf16": ({"bf16": True, "learning_rate": 1e-4}, {}, 6),
    "evaluation": ({"eval_strategy": "steps", "eval_steps": 3}, {}, 6),
    "metrics": ({"eval_strategy": "steps", "eval_steps": 3}, {"compute_metrics": mean_of_right}, 6),
    "argmax": (
        {"eval_strategy": "steps", "eval_steps": 3},
        {"compute_metrics": mean_of_right, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)},
        6,
    ),
    "checkpointing": ({"gradient_checkpointing": True}, {}, 6),
    "label smoothing": ({"label_smoothing_factor": 0.1}, {}, 0),
    "a loss outside": ({}, {"compute_loss_func": summed}, 0),
}


def trained(model: Any, tmp_path: Path, arguments: dict[str, Any], own: dict[str, Any]) -> tuple[Any, list[dict]]:
    torch.manual_seed(8)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=2, per_device_eval_batch_size=3,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        seed=8, **({"learning_rate": 1e-2} | arguments),
    )  # fmt: skip
    trainer = transformers.Trainer(model, args, train_dataset=Texts(), eval_dataset=Texts(), **own)
    if model.__dict__.get("chunked_head") is not None and model._chunked_head_patch.metrics:
        log_metrics(trainer)
        log_metrics(trainer)  # twice is once
    trainer.train()
    return trainer, trainer.state.log_history


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:chunked_head.*for __iter__|.*computed after all|.*is not fused:UserWarning")
def test_trainer(case: str, tmp_path: Path) -> None:
    arguments, own, fused = CASES[case]
    plain, model = pair()
    theirs = trained(plain, tmp_path, arguments, own)[1]
    ours = trained(model, tmp_path, arguments, own)[1]
    assert len(ours) == len(theirs) >= 7
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "eval_loss", "eval_right"):
            assert (name in mine) == (name in other)
            if name in mine:
                assert mine[name] == pytest.approx(other[name], rel=1e-2 if "bf16" in arguments else 3e-4)
    evaluations = 2 * 4 if "eval_strategy" in arguments else 0
    assert model.chunked_head.fused == fused + evaluations
    assert model.chunked_head.materialised == (evaluations if case == "metrics" else 0)


@pytest.mark.parametrize("case", ["a loss outside", "label smoothing"])
def test_losses_outside_are_fused_where_asked_for(case: str, tmp_path: Path) -> None:
    arguments, own, _ = CASES[case]
    plain, model = pair(tiny_models.gemma2, when="training", strict=True)
    theirs = trained(plain, tmp_path, arguments, own)[1]
    ours = trained(model, tmp_path, arguments, own)[1]
    assert model.chunked_head.fused == 6
    for mine, other in zip(ours, theirs, strict=True):
        assert "loss" not in other or mine["loss"] == pytest.approx(other["loss"], rel=3e-4)


def test_metrics_in_the_logs(tmp_path: Path) -> None:
    model = patch_model(tiny_models.llama(), metrics=[metrics.accuracy(), metrics.entropy(), metrics.perplexity()])
    evaluated = {"eval_strategy": "steps", "eval_steps": 3, "logging_steps": 2}
    own = {"compute_metrics": mean_of_right}
    torch.manual_seed(8)
    args = {**evaluated, "gradient_accumulation_steps": 2}
    args.pop("logging_steps")
    with pytest.warns(UserWarning, match="computed after all"):
        history = trained(model, tmp_path, args, own)[1]
    for logs in history:
        if "loss" in logs:
            assert 0 < logs["entropy"] <= 4.6 and 0 <= logs["accuracy"] <= 1
        if "eval_loss" in logs:
            assert logs["eval_accuracy"] == pytest.approx(logs["eval_right"], rel=1e-5)
            assert "entropy" not in logs and "eval_entropy" in logs
    # a mean over tokens, which the Trainer's eval_loss is not: batches have different numbers of them
    assert any("eval_perplexity" in logs for logs in history)


def test_a_loss_outside_is_said_or_refused(tmp_path: Path) -> None:
    """At the first step, before a weight has changed, where something was asked of the patch."""
    arguments, own, _ = CASES["a loss outside"]
    model = patch_model(tiny_models.llama(), metrics=[metrics.entropy()])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"metrics= of patch_model has no part in.*that trainer\.py:\d+ called"):
        trained(model, tmp_path, arguments, own)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.warns(UserWarning, match=r"outside of LlamaForCausalLM's forward .*trainer\.py") as said:
        trained(patch_model(tiny_models.llama()), tmp_path, arguments, own)
    assert len([one for one in said if "chunked_head" in str(one.message)]) == 1


def test_log_metrics_needs_metrics() -> None:
    class Bare:
        model = patch_model(tiny_models.llama())

    with pytest.raises(ValueError, match=r"patch_model\(model, metrics="):
        log_metrics(Bare())


@pytest.mark.parametrize("name", ["hf_trainer", "accelerate_loop"])
def test_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of docs/examples: their losses with a patched model and without."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # an earlier trainer's
    example = importlib.import_module(name)
    ours, theirs = example.main(["--cpu"]), example.main(["--cpu", "--plain"])
    assert len(ours) == len(theirs) == 3 and ours[-1]["loss"] < ours[0]["loss"]
    for mine, other in zip(ours, theirs, strict=True):
        assert 0 < mine["entropy"] < 6 and "entropy" not in other
        for key, value in other.items():
            assert mine[key] == pytest.approx(value, rel=1e-4)
    assert "losses fused, logits computed 0 times" in capsys.readouterr().out
