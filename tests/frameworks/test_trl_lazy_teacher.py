"""``distil_from_hidden``: TRL's own ``compute_loss`` on logits and on hidden states, values and gradients."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chunked_head.integrations.trl.lazy_teacher import jsd_loss

pytest.importorskip("trl", reason="the trainers are TRL's, which is not installed")

import tiny
import tiny_models
from accelerate.state import AcceleratorState
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer, sdft_trainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer, sdpo_trainer

from chunked_head import patch_model
from chunked_head.integrations.trl import distil_from_hidden

Outcome = tuple[float, list[Tensor]]
TEXTS = [
    {"messages": [{"role": "user", "content": f"What is {what}?"}, {"role": "assistant", "content": text}]}
    for what, text in tiny.FACTS
]


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)  # the trainers'


def patched(model: Any, when: str) -> Any:
    return patch_model(model, when=when, memory_budget="1MiB")


def settings(folder: Path, bf16: bool = False) -> dict[str, Any]:
    return {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "bf16": bf16,
            "per_device_train_batch_size": 2, "gradient_checkpointing": False}  # fmt: skip


def outcome(trainer: Any, inputs: dict[str, Any], **more: Any) -> Outcome:
    """The loss and every gradient of the student."""
    trainer.model.train()
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model, dict(inputs), **more)
    loss.backward()
    return loss.item(), [parameter.grad for parameter in trainer.model.parameters()]


def assert_same(ours: Outcome, theirs: Outcome, rel: float) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=rel)
    for mine, true in zip(ours[1], theirs[1], strict=True):
        assert (mine - true).norm() <= rel * true.norm()


@pytest.mark.parametrize("items", [None, 37])
@pytest.mark.parametrize("kind, config, options", [
    (GKDTrainer, GKDConfig, {"beta": 0.5}), (GKDTrainer, GKDConfig, {"beta": 0.0}),
    (GKDTrainer, GKDConfig, {"beta": 1.0, "bf16": True}),
    (GOLDTrainer, GOLDConfig, {"beta": 0.3, "temperature": 0.7, "use_uld_loss": False, "max_completion_length": 16}),
], ids=["gkd", "gkd-forward", "gkd-reverse-bf16", "gold"])  # fmt: skip
def test_student_and_teacher(
    kind: Any, config: Any, options: dict[str, Any], items: int | None, tmp_path: Path
) -> None:
    tokenizer, found = tiny.tokenizer(), []
    for ours in (True, False):
        student, teacher = tiny.model(len(tokenizer)), tiny.model(len(tokenizer), seed=1, hidden=48)
        if ours:
            patched(student, "training"), patched(teacher, "always")
        arguments = config(**settings(tmp_path) | {"max_length": 64, "lmbda": 0.0} | options)
        trainer = kind(student, teacher, args=arguments, train_dataset=Dataset.from_list(TEXTS),
                       processing_class=tokenizer)  # fmt: skip
        if ours:
            assert distil_from_hidden(trainer) is trainer
            inputs = next(iter(trainer.get_train_dataloader()))
            inputs = inputs[0] if isinstance(inputs, list) else inputs
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="chunked_head")
            found.append(outcome(trainer, inputs, num_items_in_batch=items))
        if ours:
            assert student.chunked_head.fused == 1 and not student.chunked_head.materialised
            assert not teacher.chunked_head.materialised
    assert_same(*found, rel=2e-2 if options.get("bf16") else 1e-5)


@pytest.mark.parametrize("kind, config, module", [
    (SDFTTrainer, SDFTConfig, sdft_trainer), (SDPOTrainer, SDPOConfig, sdpo_trainer),
], ids=["sdft", "sdpo"])  # fmt: skip
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_ones_own_teacher(
    kind: Any, config: Any, module: Any, alpha: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``_compute_teacher_student_logits`` and the loss of it: what ``compute_loss`` does after it has generated."""
    name = "compute_full_logit_self_distillation_loss"
    monkeypatch.setattr(module, name, getattr(module, name))  # taken back afterwards
    tokenizer, found = tiny.tokenizer(), []
    made = torch.Generator().manual_seed(0)
    ids = {key: torch.randint(0, 256, (2, size), generator=made) for key, size in (("p", 5), ("c", 7), ("t", 9))}
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    inputs = {
        "prompt_ids": ids["p"], "prompt_mask": torch.ones_like(ids["p"]), "completion_ids": ids["c"],
        "completion_mask": mask, "teacher_input_ids": torch.cat([ids["t"], ids["c"]], 1),
        "teacher_attention_mask": torch.cat([torch.ones_like(ids["t"]), mask], 1),
        "self_distillation_mask": torch.ones(2),
    }  # fmt: skip
    for ours in (True, False):
        model = tiny.model(len(tokenizer))
        if ours:
            patched(model, "always")
        arguments = config(**settings(tmp_path), distillation_mode="full_logits", distillation_alpha=alpha,
                           teacher_model_kind="live", num_generations=2, temperature=0.8)  # fmt: skip
        rows = [{"prompt": text["messages"][:1], "privileged_context": "x"} for text in TEXTS]
        extra = {"reward_funcs": lambda completions, **more: [0.0] * len(completions)} if kind is SDPOTrainer else {}
        trainer = kind(model=model, args=arguments, train_dataset=Dataset.from_list(rows),
                       processing_class=tokenizer, **extra)  # fmt: skip
        if ours:
            distil_from_hidden(trainer)
        trainer.model.train()
        logits = trainer._compute_teacher_student_logits(trainer.model, trainer.teacher_model, inputs)
        loss = trainer._compute_self_distillation_loss(trainer.model, inputs, logits)
        loss.backward()
        found.append((loss.item(), [parameter.grad for parameter in trainer.model.parameters()]))
        if ours:
            assert model.chunked_head.fused == 1 and not model.chunked_head.materialised
    assert_same(*found, rel=1e-5)


def test_what_it_refuses(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    rows = {"train_dataset": Dataset.from_list(TEXTS), "processing_class": tokenizer}
    model = tiny.model(len(tokenizer))
    with pytest.raises(TypeError, match="SFTTrainer compares no logits"):
        distil_from_hidden(SFTTrainer(model, SFTConfig(**settings(tmp_path)), **rows))
    trainer = GKDTrainer(model, patched(tiny.model(len(tokenizer)), "labels"),
                         args=GKDConfig(**settings(tmp_path)), **rows)  # fmt: skip
    with pytest.raises(ValueError, match="GKDTrainer's teacher before the trainer is made"):
        distil_from_hidden(trainer)


def test_what_it_does_not_know_is_trls(tmp_path: Path) -> None:
    """Logits that are no lazy ones, and means over the vocabulary."""
    theirs = GKDTrainer.generalized_jsd_loss
    logits, others = (torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert torch.equal(jsd_loss(theirs, logits, others, beta=0.2), theirs(logits, others, beta=0.2))
    found = jsd_loss(theirs, logits, others, beta=0.2, reduction="mean")
    assert torch.equal(found, theirs(logits, others, beta=0.2, reduction="mean"))


def test_what_was_done_to_lazy_logits_is_not_lost(tmp_path: Path) -> None:
    """Log-probabilities and filled ids are no logits of a head: TRL's own computes them."""
    theirs = GKDTrainer.generalized_jsd_loss
    model, ids = patched(tiny_models.llama(), "always").eval(), tiny_models.tokens()["input_ids"]
    for done in (lambda logits: 0.5 * logits.log_softmax(-1), filled):
        found, true = [], []
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for way, outcomes in ((jsd_loss, found), (lambda theirs, *given, **more: theirs(*given, **more), true)):
                student, teacher = (model(ids).logits for _ in range(2))
                outcomes.append(way(theirs, done(student), teacher, beta=0.2))
        assert torch.equal(found[0], true[0]) and found[0] > 0


def filled(logits: Tensor) -> Tensor:
    logits[..., torch.tensor([2, 50])] = -1e5
    return logits
