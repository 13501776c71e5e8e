"""TRL's trainers with this library's head: the examples' losses and metrics, with it and without, and adapters."""

import contextlib
import copy
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="the trainers are TRL's, which is not installed")

import tiny
from datasets import Dataset, disable_progress_bars, enable_progress_bars
from peft import LoraConfig, PromptTuningConfig
from tiers import tier
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer import utils

from chunked_head import losses, metrics, patch_model
from chunked_head.call import run
from chunked_head.integrations import trl as integration
from chunked_head.integrations.trl import DivergenceSeam, LogProbSeam, patched_trl

FUSED = hasattr(utils, "add_fused_lm_head")
needs_fused = pytest.mark.skipif(not FUSED, reason="TRL 1.14 has no fused head")
# what must have been logged, where the statistic comes from, and whether the loss can be foreseen
EXAMPLES: list[tuple[str, list[str], set[str], type, bool]] = [
    ("trl_sft", [], {"loss", "mean_token_accuracy", "entropy", "grad_norm"}, LogProbSeam, True),
    ("trl_dpo", [], {"loss", "logits/chosen", "rewards/margins", "entropy", "grad_norm"}, LogProbSeam, False),
    ("trl_dpo", ["--wpo", "0"], {"loss", "logits/chosen"}, LogProbSeam, False),
    ("trl_grpo", [], {"loss", "reward", "kl", "entropy", "grad_norm"}, LogProbSeam, False),
    ("trl_grpo", ["--entropy-bonus", "0"], {"loss", "reward"}, LogProbSeam, False),
    ("trl_distillation", [], {"loss", "entropy", "grad_norm"}, DivergenceSeam, False),
    ("trl_distillation", ["--beta", "0.0"], {"loss"}, DivergenceSeam, False),
    ("trl_distillation", ["--beta", "1.0"], {"loss"}, DivergenceSeam, False),
]


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    disable_progress_bars()
    yield
    enable_progress_bars()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Which of our seams were called."""
    found: list[type] = []
    for seam in (LogProbSeam, DivergenceSeam):

        @functools.wraps(seam.apply)
        def counted(self: Any, *args: Any, real: Any = seam.apply) -> Any:
            found.append(type(self))
            return real(self, *args)

        monkeypatch.setattr(seam, "apply", counted)
    return found


@pytest.mark.skipif(FUSED, reason="of TRL 1.14, where a flag asks for the function that ours replaces")
def test_dpo_of_trl_1_14(tmp_path: Path, calls: list[type]) -> None:
    tokenizer, logged = tiny.tokenizer(), []
    pairs = [{"prompt": f"What is {what}? ", "chosen": text, "rejected": text[::-1]} for what, text in tiny.FACTS]
    settings = tiny.settings(tiny.arguments("", ["--cpu"]), str(tmp_path)) | {"use_liger_kernel": True}
    # of Liger nothing: its kernels need a GPU
    parts = ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy")
    settings["liger_kernel_config"] = dict.fromkeys(parts, False)
    for ours in (False, True):
        with patched_trl() if ours else contextlib.nullcontext():
            trainer = DPOTrainer(
                tiny.model(len(tokenizer)), tiny.model(len(tokenizer), seed=1),
                args=DPOConfig(**settings, max_length=96),
                train_dataset=Dataset.from_list(pairs), processing_class=tokenizer,
            )  # fmt: skip
            trainer.train()
        assert bool(calls) == ours
        logged.append(tiny.printed(trainer.state.log_history, ("loss", "rewards/margins", "entropy", "grad_norm")))
    assert_alike(logged[1], logged[0])


@pytest.mark.skipif(FUSED, reason="of TRL 1.14, where nll is the model's own loss")
def test_sft_of_trl_1_14(tmp_path: Path) -> None:
    names, found = ("loss", "mean_token_accuracy", "entropy"), []
    for patch in (None, {}):
        trainer = made(tmp_path, None, patch, loss_type="nll")
        trainer.train()
        found.append(tiny.printed(trainer.state.log_history, names))
    assert trainer.model.chunked_head.fused == 2
    assert_alike(found[1], found[0])


def assert_alike(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs)
    for mine, true in zip(ours, theirs, strict=True):
        assert mine.keys() == true.keys()
        for name, value in true.items():
            # TRL's entropies and divergences differ from exact ones in the fifth digit
            assert mine[name] == pytest.approx(value, rel=1e-3, abs=2e-5), name


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> Iterator[list[Any]]:
    """The losses that were foreseen; the trainers' gradients were theirs."""
    found: list[Any] = []

    def counted(*args: Any, real: Any = integration.loss_and_statistics, **options: Any) -> Any:
        found.append(args[3])
        return real(*args, **options)

    monkeypatch.setattr(integration, "loss_and_statistics", counted)
    yield found
    assert not [one for one in recwarn if "another gradient" in str(one.message)]


@needs_fused
@pytest.mark.parametrize(
    ("name", "options", "logged", "seam", "foreseen"),
    [one for row in EXAMPLES for one in tier(pytest.param(*row, id=" ".join([row[0], *row[1]])), not row[1])],
)
def test_examples(
    name: str, options: list[str], logged: set[str], seam: type, foreseen: bool, calls: list[type], passes: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    example = importlib.import_module(name)
    ours = example.main(["--cpu", *options])
    used = len(calls)
    assert used >= 3 and set(calls) == {seam}
    theirs = example.main(["--cpu", *options, "--plain"])
    assert len(calls) == used and not passes
    assert len(theirs) == 3 and logged <= set().union(*theirs)
    assert ours[-1] != ours[0] and all(any(step.get(name) for step in theirs) for name in logged)
    assert_alike(ours, theirs)
    if foreseen:
        monkeypatch.setattr(example, "patched_trl", functools.partial(patched_trl, losses=("SFT",)))
        assert_alike(example.main(["--cpu", *options]), theirs)
        assert len(passes) == 3


@needs_fused
def test_a_loss_that_was_not_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is TRL's all the same."""
    _, theirs = trained(tmp_path, None)
    real = integration.sft_loss
    monkeypatch.setattr(integration, "sft_loss", lambda tokens: (losses.focal(), real(tokens)[1]))
    with patched_trl(losses=("SFT",)), pytest.warns(UserWarning, match="TRL's loss has another gradient"):
        _, ours = trained(tmp_path, None)
    assert_alike(ours, theirs)


def made(tmp_path: Path, adapter: LoraConfig | None, patch: dict[str, Any] | None = None, **options: Any) -> SFTTrainer:
    tokenizer = tiny.tokenizer()
    rows = Dataset.from_list([{"text": f"{what}: {text}"} for what, text in tiny.FACTS])
    args = tiny.arguments("", ["--cpu", "--steps", "2"])
    model = tiny.model(len(tokenizer))
    return SFTTrainer(
        model if patch is None else patch_model(model, **patch),
        SFTConfig(**tiny.settings(args, str(tmp_path)), max_length=64, **options),
        train_dataset=rows, processing_class=tokenizer, peft_config=adapter,
    )  # fmt: skip


def trained(tmp_path: Path, adapter: LoraConfig | None, **options: Any) -> tuple[Any, list[dict[str, float]]]:
    trainer = made(tmp_path, adapter, **options)
    trainer.train()
    return trainer.model, tiny.printed(trainer.state.log_history, ("loss", "mean_token_accuracy", "entropy"))


@needs_fused
@pytest.mark.parametrize(
    "adapter",
    [
        LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),  # whose tokens the labels lack
    ],
    ids=["attention", "whole-head", "prompt"],
)
def test_adapters(adapter: LoraConfig, tmp_path: Path, calls: list[type], passes: list[Any]) -> None:
    model, theirs = trained(tmp_path, adapter)
    assert not calls
    for foreseen in ((), ("SFT",)):
        with patched_trl(losses=foreseen):
            ours, found = trained(tmp_path, adapter)
        assert calls and bool(passes) == bool(foreseen)
        assert_alike(found, theirs)
        for (name, mine), true in zip(ours.named_parameters(), model.parameters(), strict=True):
            assert mine.requires_grad == true.requires_grad
            torch.testing.assert_close(mine, true, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


@needs_fused
def test_an_adapter_on_the_head_is_refused(tmp_path: Path) -> None:
    """By TRL."""
    on_head = LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    with patched_trl(), pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        made(tmp_path, on_head)


@needs_fused
def test_a_patched_model_says_that_it_is_passed_by(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Where something was asked of it, before a weight has changed."""
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    for adapter, asked in ((None, {"metrics": [metrics.entropy()]}), (lora, {"loss": losses.focal()})):
        trainer = made(tmp_path, adapter, asked)
        before = copy.deepcopy(trainer.model.state_dict())
        message = rf"{next(iter(asked))}= of patch_model has no part in.*_fused_forward at utils\.py:\d+.*patch_trl\(\)"
        with pytest.raises(RuntimeError, match=message):
            trainer.train()
        for name, tensor in trainer.model.state_dict().items():
            assert torch.equal(tensor, before[name])
    recwarn.clear()
    made(tmp_path, None, {}).train()
    said = [str(one.message) for one in recwarn if "chunked_head" in str(one.message)]
    assert len(said) == 1 and "'s forward (by _fused_forward at utils.py:" in said[0]
    recwarn.clear()
    with patched_trl():
        made(tmp_path, None, {}).train()
    assert not [one for one in recwarn if "chunked_head" in str(one.message)]


@needs_fused
def test_dft_and_accumulation(tmp_path: Path, calls: list[type], passes: list[Any]) -> None:
    options = {"loss_type": "dft", "gradient_accumulation_steps": 2}
    _, theirs = trained(tmp_path, None, **options)
    for foreseen in ((), ("SFT",)):
        calls.clear()
        with patched_trl(chunk_tokens=16, losses=foreseen):
            _, ours = trained(tmp_path, None, **options)
        assert len(calls) == 4 and len(passes) == 4 * len(foreseen)
        assert_alike(ours, theirs)


def schedules_of(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[str], list[dict[str, float]]]:
    """Schedules of the calls that make gradients while a trainer trains a LoRA adapter, and what it logs."""
    schedules: list[str] = []

    def noted(*args: Any, real: Any = run.prepared, **more: Any) -> Any:
        prepared = real(*args, **more)
        if prepared[1].plan.sizes.any_grad:
            schedules.append("by rows" if prepared[1].plan.has_unit_rows else prepared[1].plan.schedule)
        return prepared

    monkeypatch.setattr(run, "prepared", noted)
    adapter = LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tokenizer = tiny.tokenizer()
    settings = tiny.settings(tiny.arguments("", ["--cpu", "--steps", "2"]), str(tmp_path))
    prompts = [{"prompt": f"What is {what}? ", "chosen": text, "rejected": text[::-1]} for what, text in tiny.FACTS]
    common = {"processing_class": tokenizer, "peft_config": adapter, "train_dataset": Dataset.from_list(prompts)}
    torch.manual_seed(0)
    if trainer == "dpo":
        made = DPOTrainer(tiny.model(len(tokenizer)), args=DPOConfig(**settings, max_length=96), **common)
    else:
        config = GRPOConfig(**settings, num_generations=4, max_completion_length=8, num_iterations=2, **options)
        common["train_dataset"] = common["train_dataset"].remove_columns(["chosen", "rejected"])
        made = GRPOTrainer(
            tiny.model(len(tokenizer)), lambda completions, **_: list(map(len, completions)), config, **common
        )
    made.train()
    monkeypatch.undo()
    return schedules, tiny.printed(made.state.log_history, ("loss", "entropy", "grad_norm"))


@needs_fused
@pytest.mark.parametrize(
    ("trainer", "options", "expected"),
    [
        ("dpo", {}, ["by rows"] * 2), ("grpo", {}, ["by rows"] * 2),
        ("grpo", {"entropy_coef": 0.01}, ["by rows", "recompute"]),
    ],
    ids=["dpo", "grpo", "grpo-entropy"],
)  # fmt: skip
def test_lora_takes_two_products(
    trainer: str, options: dict[str, Any], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head without adapter is frozen: entropies that are logged cost no second pass, those of a loss do, from the
    second step on by the plan."""
    none, theirs = schedules_of(trainer, tmp_path, monkeypatch, **options)
    with patched_trl():
        found, ours = schedules_of(trainer, tmp_path, monkeypatch, **options)
    assert (none, found) == ([], expected)
    assert_alike(ours, theirs)
