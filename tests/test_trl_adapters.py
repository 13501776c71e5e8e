"""TRL's trainers with LoRA on the head itself: against training by logits, and what is refused."""

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("trl", reason="the trainers are TRL's, which is not installed")
pytest.importorskip("peft", reason="the adapters are PEFT's, which is not installed")

import peft
import tiny
from datasets import Dataset, disable_progress_bars, enable_progress_bars
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.trainer import sft_trainer, utils

from chunked_head.integrations import trl_seams
from chunked_head.integrations.trl import patch_trl, patched_trl, unpatch_trl

STEPS = 3
PLAIN = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": STEPS}


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    disable_progress_bars()
    yield
    enable_progress_bars()
    unpatch_trl()


def lora(*targets: str, **options: Any) -> Any:
    # B is no zeros, which would hide A's gradient
    options = {"r": 4, "lora_alpha": 12, "init_lora_weights": False, "task_type": "CAUSAL_LM"} | options
    return peft.LoraConfig(target_modules=[*targets, "lm_head"], **options)


def policy(config: Any, vocab: int) -> Any:
    model = tiny.model(vocab)
    torch.manual_seed(5)
    return peft.get_peft_model(model, config)


def factors(model: Any) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class Recorded:
    """A trainer that remembers its batches, losses and gradients."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.steps: list[tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        fields = inputs.items() if isinstance(inputs, dict) else ()  # trainers that sample get prompts
        batch = {name: value.clone() for name, value in fields if isinstance(value, Tensor)}
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        grads = {name: parameter.grad.clone() for name, parameter in factors(model).items()}
        self.steps.append((batch, loss.detach(), grads))
        return loss


class RecordedSFT(Recorded, SFTTrainer):
    pass


class RecordedDPO(Recorded, DPOTrainer):
    pass


def settings(folder: Path) -> dict[str, Any]:
    return tiny.settings(tiny.arguments("", ["--cpu"]), str(folder)) | PLAIN


def sft(folder: Path, model: Any = None, config: Any = None, **options: Any) -> Any:
    tokenizer = tiny.tokenizer()
    rows = Dataset.from_list([{"text": f"{what}: {text}"} for what, text in tiny.FACTS])
    return RecordedSFT(
        tiny.model(len(tokenizer)) if model is None else model,
        SFTConfig(**settings(folder), max_length=48, **options),
        train_dataset=rows, processing_class=tokenizer, peft_config=config,
    )  # fmt: skip


def assert_trained_as(trainer: Any, plain: Any, loss_of: Any) -> None:
    """Each step against one by logits, and where they end."""
    parameters = factors(plain)
    assert {name.split(".")[-3] for name in parameters if "lm_head" in name} >= {"lora_A", "lora_B"}
    for batch, loss, grads in trainer.steps:
        plain.zero_grad()
        expected = loss_of(plain, batch)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        for name, parameter in parameters.items():
            assert parameter.grad.any()
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter -= 1e-2 * parameter.grad
    for mine, true in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-5)


def by_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
def test_sft(options: dict[str, Any], tmp_path: Path) -> None:
    config, vocab = lora("q_proj", **options), len(tiny.tokenizer())
    rows: list[int] = []
    with patched_trl(chunk_tokens=16):
        trainer = sft(tmp_path, policy(config, vocab))
        trainer.model.get_output_embeddings().register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
        trainer.train()
    assert rows and max(rows) == 16 and len(trainer.steps) == STEPS
    base = tiny.model(vocab).lm_head.weight
    assert torch.equal(trainer.model.get_output_embeddings().base_layer.weight, base)
    assert_trained_as(trainer, policy(config, vocab), by_logits)


def test_adapter_made_by_the_trainer(tmp_path: Path) -> None:
    with patched_trl():
        trainer = sft(tmp_path, config=lora())
        trainer.train()
    assert all(grad.any() for _, _, grads in trainer.steps for name, grad in grads.items() if "lm_head" in name)


def dpo_by_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    def log_ratio() -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        ids, counts = batch["input_ids"][:, 1:, None], batch["completion_mask"][:, 1:]
        sums = (logits.log_softmax(-1).gather(-1, ids)[..., 0] * counts).sum(-1)
        chosen, rejected = sums.chunk(2)
        return chosen - rejected

    with torch.no_grad(), model.disable_adapter():
        reference = log_ratio()
    return -F.logsigmoid(0.1 * (log_ratio() - reference)).mean()


def test_dpo_with_disabled_adapters_for_reference(tmp_path: Path) -> None:
    config, tokenizer = lora("v_proj"), tiny.tokenizer()
    pairs = [
        {"prompt": f"What is {what}? ", "chosen": text, "rejected": tiny.FACTS[i - 3][1]}
        for i, (what, text) in enumerate(tiny.FACTS)
    ]
    with patched_trl():
        trainer = RecordedDPO(
            tiny.model(len(tokenizer)), args=DPOConfig(**settings(tmp_path), max_length=64),
            train_dataset=Dataset.from_list(pairs), processing_class=tokenizer, peft_config=config,
        )  # fmt: skip
        plain = policy(config, len(tokenizer))
        plain.load_state_dict(trainer.model.state_dict())
        trainer.train()
    assert_trained_as(trainer, plain, dpo_by_logits)


class RecordedGRPO(Recorded, GRPOTrainer):
    pass


class RecordedRLOO(Recorded, RLOOTrainer):
    pass


class RecordedKTO(Recorded, KTOTrainer):
    pass


def rewarded(kind: Any, config: Any, model: Any, folder: Path) -> Any:
    """Two groups of four completions, rewarded by their bytes."""
    args = config(
        **settings(folder) | {"max_steps": 1, "per_device_train_batch_size": 8}, num_generations=4,
        max_completion_length=9, beta=0.0, temperature=0.8,
    )  # fmt: skip
    return kind(
        model, reward_funcs=lambda completions, **_: [sum(map(ord, text)) % 7 / 7 for text in completions], args=args,
        train_dataset=Dataset.from_list([{"prompt": f"What is {what}? "} for what, _ in tiny.FACTS]),
        processing_class=tiny.tokenizer(),
    )  # fmt: skip


def judged(model: Any, folder: Path) -> Any:
    rows = [
        {"prompt": f"What is {what}? ", "completion": text, "label": i % 2 == 0}
        for i, (what, text) in enumerate(tiny.FACTS)
    ]
    # with an adapter TRL's reference is a copy of it
    reference = None if isinstance(model, peft.PeftModel) else copy.deepcopy(model)
    return RecordedKTO(
        model, reference, args=KTOConfig(**settings(folder) | {"max_steps": 1}, max_length=64),
        train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer(),
    )  # fmt: skip


TRAINERS = {
    "grpo": lambda model, folder: rewarded(RecordedGRPO, GRPOConfig, model, folder),
    "rloo": lambda model, folder: rewarded(RecordedRLOO, RLOOConfig, model, folder),
    "kto": judged,
}


@pytest.mark.parametrize("name", TRAINERS)
def test_factors_gradients_are_those_of_the_head_they_make(name: str, tmp_path: Path) -> None:
    """By the chain rule: of ``W + scale B A`` they are ``scale B.T dW`` and ``scale dW A.T``."""
    vocab = len(tiny.tokenizer())
    adapted = policy(lora(), vocab)
    layer = adapted.get_output_embeddings()
    a, b, scale = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"]
    whole = tiny.model(vocab)
    with torch.no_grad():
        whole.lm_head.weight += scale * b @ a
        first, second = a.clone(), b.clone()
    losses, grads = [], []
    for model in (adapted, whole):
        with patched_trl(chunk_tokens=16):
            trainer = TRAINERS[name](model, tmp_path)
            trainer.train()
        ((_, loss, found),) = trainer.steps
        losses.append(loss)
        grads.append(found)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    (of_head,) = (grad for key, grad in grads[1].items() if key.endswith("lm_head.weight"))
    (of_a,) = (grad for key, grad in grads[0].items() if "lora_A" in key)
    (of_b,) = (grad for key, grad in grads[0].items() if "lora_B" in key)
    assert of_head.any()
    torch.testing.assert_close(of_a, scale * second.T @ of_head, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(of_b, scale * of_head @ first.T, rtol=1e-4, atol=1e-6)


def test_unpatched_trl_refuses(tmp_path: Path) -> None:
    with patched_trl():
        sft(tmp_path, config=lora())
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        sft(tmp_path, config=lora())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (lambda: peft.LoHaConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"), r"is a peft\.tuners\.loha"),
        (lambda: lora(alora_invocation_tokens=[3]), r"LoRA's variant ALora"),
    ],
    ids=["loha", "alora"],
)
def test_kinds_that_are_not_understood(config: Any, says: str, tmp_path: Path) -> None:
    with patched_trl(), pytest.raises(ValueError, match=says):
        sft(tmp_path, config=config())


def test_distillation_is_refused_by_trl(tmp_path: Path) -> None:
    """Its loss is none of its model's forward."""
    tokenizer = tiny.tokenizer()
    rows = [{"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]}]
    with patched_trl(), pytest.raises(ValueError, match=r"adapter to `lm_head` is not supported\. The distillation"):
        DistillationTrainer(
            policy(lora(), len(tokenizer)), tiny.model(len(tokenizer)), args=DistillationConfig(**settings(tmp_path)),
            train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        )  # fmt: skip


def test_grpo_with_a_head_in_fp32(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    args = GRPOConfig(
        **settings(tmp_path) | {"per_device_train_batch_size": 2}, num_generations=2, cast_lm_head_to_fp32=True
    )
    with patched_trl(), pytest.raises(ValueError, match="cast_lm_head_to_fp32=True puts another forward"):
        GRPOTrainer(
            policy(lora(), len(tokenizer)), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
            train_dataset=Dataset.from_list([{"prompt": "What?"}]), processing_class=tokenizer,
        )  # fmt: skip


@pytest.mark.parametrize("broken", [{"times": 3}, {"uses": ("isinstance(model.lm_head,BaseTunerLayer)",)}], ids=str)
def test_refuses_trainers_it_does_not_know(broken: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = dataclasses.replace(trl_seams.TRAINERS[0], **broken)
    monkeypatch.setattr(trl_seams, "TRAINERS", (first, *trl_seams.TRAINERS[1:]))
    with pytest.raises(RuntimeError, match=r"trl\.trainer\.sft_trainer (names|does not contain).*nothing was patched"):
        patch_trl()
    assert utils._ChunkedLogProbFunction.__module__ == "trl.kernels.chunked_logprob"
    assert isinstance(sft_trainer.BaseTunerLayer, type)
