"""A head with LoRA behind TRL's seam: statistics, dropout, active and disabled adapters, memory, refusals."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="the seams are TRL's, which is not installed")
pytest.importorskip("peft", reason="the adapters are PEFT's, which is not installed")

import peft
import tiny_models
from tracking import Tracker
from trl.trainer import sft_trainer

from chunked_head import patch_model
from chunked_head.integrations import trl_functions
from chunked_head.integrations.trl import check_fused_head, patched_trl, unpatch_trl
from chunked_head.integrations.trl_adapters import adapted_head
from chunked_head.integrations.trl_functions import OUTPUTS


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    unpatch_trl()


def lora(**options: Any) -> Any:
    # B is no zeros, which would hide A's gradient
    options = {"r": 4, "lora_alpha": 12, "init_lora_weights": False, "task_type": "CAUSAL_LM"} | options
    return peft.LoraConfig(target_modules=["lm_head"], **options)


def fused(config: Any = None, patched: bool = False, **options: Any) -> Any:
    """A model as trainers make them."""
    model = tiny_models.llama()
    if config is not None:
        model = peft.get_peft_model(model, config)
    if patched:
        patch_model(model)
    sft_trainer.add_fused_lm_head(model.get_base_model() if config else model, **options)
    return model


def log_probs(model: Any, **options: Any) -> Tensor:
    return model(**tiny_models.tokens(), fused_lm_head=True, **options).log_probs


def test_statistics() -> None:
    """All that TRL asks for, at a temperature, and gradients of both that have one."""
    with patched_trl(memory_budget=97 * 4 * 4 * 3):
        model = fused(lora(), temperature=0.7, outputs=OUTPUTS)
        inputs = tiny_models.tokens() | {"labels": tiny_models.tokens()["input_ids"]}
        found = model(**inputs, fused_lm_head=True)
        x = model(input_ids=inputs["input_ids"]).logits[:, :-1] / 0.7
        log_p = x.log_softmax(-1)
        ids = inputs["labels"][:, 1:, None]
        expected = {
            "log_probs": log_p.gather(-1, ids)[..., 0], "entropy": -(log_p.exp() * log_p).sum(-1),
            "log_sum_sq_probs": (2 * log_p).logsumexp(-1), "mean_logits": x.mean(-1),
            "is_top1": x.argmax(-1) == ids[..., 0],
        }  # fmt: skip
        for name, value in expected.items():
            mine = getattr(found, name)
            torch.testing.assert_close(mine, value.detach() if not mine.requires_grad else value, rtol=1e-4, atol=1e-5)
        assert found.entropy.requires_grad and not found.mean_logits.requires_grad
        leaves = [p for p in model.parameters() if p.requires_grad]
        grads = [
            torch.autograd.grad((logp.sin() + entropy.cos()).sum(), leaves)
            for logp, entropy in ((found.log_probs, found.entropy), (expected["log_probs"], expected["entropy"]))
        ]
        for mine, true in zip(*grads, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


def test_dropout() -> None:
    """PEFT's, and the same in backward."""
    with patched_trl():
        model = fused(lora(lora_dropout=0.5)).train()
        head, kept = model.get_output_embeddings(), {}
        handle = head.register_forward_pre_hook(lambda _, args: kept.update(hidden=args[0]))
        torch.manual_seed(1)
        ours = log_probs(model)
        assert not torch.equal(ours, log_probs(model))
        handle.remove()
        leaves = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(ours.sin().sum(), leaves)
        torch.manual_seed(1)
        inputs = tiny_models.tokens()
        labels = inputs["labels"][:, 1:]
        logits = head(kept["hidden"]).view(*labels.shape, -1)
        plain = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels == -100, 0)
        torch.testing.assert_close(ours, plain)
        for mine, true in zip(grads, torch.autograd.grad(plain.sin().sum(), leaves), strict=True):
            torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patch_model"])
def test_active_disabled_and_merged_adapters(patched: bool) -> None:
    with patched_trl():
        model = fused(lora(), patched)
        model.add_adapter("second", lora(r=2))
        found = {}
        for name, active in (("one", "default"), ("other", "second"), ("both", ["default", "second"])):
            model.base_model.set_adapter(active)
            assert check_fused_head(model) < 1e-4
            found[name] = log_probs(model)
        with model.disable_adapter():
            assert check_fused_head(model) < 1e-4
            found["none"] = log_probs(model)
        torch.testing.assert_close(found["none"], log_probs(fused()))
        values = list(found.values())
        assert all(not torch.allclose(a, b) for i, a in enumerate(values) for b in values[:i])
        model.merge_adapter()
        torch.testing.assert_close(log_probs(model), found["both"], rtol=1e-4, atol=1e-4)
        with model.disable_adapter():
            torch.testing.assert_close(log_probs(model), found["none"], rtol=1e-4, atol=1e-4)


def test_autocast() -> None:
    with patched_trl(), torch.autocast("cpu", torch.bfloat16):
        model = fused(lora())
        assert check_fused_head(model) < 0.1
        ours = log_probs(model)
        ours.sum().backward()
    assert ours.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in model.parameters() if p.requires_grad)


def test_nothing_of_the_weight_s_size_is_made() -> None:
    with patched_trl(chunk_tokens=4):
        model = fused(lora())
        weight = model.get_output_embeddings().weight
        with Tracker(*model.parameters(), large=weight.numel()) as tracked:
            log_probs(model).sum().backward()
        assert tracked.most_large == 0 and weight.grad is None


def test_disabled_adapters_use_the_weight_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with patched_trl():
        model = fused(lora())
        monkeypatch.setattr(type(model.get_output_embeddings()), "forward", None)
        with torch.no_grad(), model.disable_adapter():
            log_probs(model)
        with pytest.raises(TypeError):
            log_probs(model)


def test_check_fused_head_sees_an_adapter_that_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    with patched_trl():
        model = fused(lora())
        assert check_fused_head(model) < 1e-4
        monkeypatch.setattr(trl_functions, "adapted_head", lambda weight: None)
        with pytest.raises(RuntimeError, match="TRL's fused head does not compute"):
            check_fused_head(model)


def test_without_the_patch() -> None:
    """What was made before does not train on without its adapter."""
    with patched_trl():
        model = fused(lora())
        log_probs(model)
    with pytest.raises(RuntimeError, match="patch_trl was taken back"):
        log_probs(model)
    assert model(**tiny_models.tokens()).logits is not None
    assert adapted_head(model.get_output_embeddings().weight) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"deterministic": True}, "deterministic=True"),
        ({"accumulate_dtype": torch.float32}, "accumulate_dtype"),
        ({"memory_budget": 1000}, "memory_budget must hold 1 rows"),
        ({"memory_budget": 97 * 16 * 3, "chunk_tokens": 4}, "memory_budget must hold 4 rows"),
    ],
    ids=str,
)
def test_options_that_do_not_go_with_it(options: dict[str, Any], says: str) -> None:
    with patched_trl(**options):
        model = fused(lora())
        with pytest.raises(ValueError, match=says):
            log_probs(model)
        with torch.no_grad(), model.disable_adapter(), contextlib.suppress(ValueError):  # those of every call
            log_probs(model)


def test_heads_that_are_taken_apart_or_changed() -> None:
    with patched_trl():
        model = fused(lora())
        head = model.get_output_embeddings()
        found = log_probs(model)
        model.base_model.disable_adapter_layers()
        with pytest.raises(RuntimeError, match="in the forward pass and are"):
            found.sum().backward()
        model.base_model.enable_adapter_layers()
        head.base_layer.weight.ds_id = 1
        with pytest.raises(RuntimeError, match=r"ZeRO-3 takes apart, and the head's base_layer\.weight"):
            log_probs(model)
        del head.base_layer.weight.ds_id
        type(head).weight, real = property(lambda self: self.base_layer.weight.clone()), type(head).weight
        try:
            with pytest.raises(RuntimeError, match="another weight than that"):
                log_probs(model)
        finally:
            del type(head).weight
        assert type(head).weight is real
