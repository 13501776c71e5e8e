"""Patched models with PEFT's adapters: elsewhere, on the head, and heads trained whole."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from tiers import crossed
from tiny_models import assert_same, step, tokens

from chunked_head import losses, metrics, patch_model, unpatch_model

peft = pytest.importorskip("peft")
ADAPTERS: dict[str, dict[str, Any]] = {
    "elsewhere": {"target_modules": ["q_proj", "v_proj"]},
    "head trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "on the head": {"target_modules": ["q_proj", "lm_head"]},
    "dora on the head": {"target_modules": ["lm_head"], "use_dora": True},
    "head with dropout": {"target_modules": ["lm_head"], "lora_dropout": 0.5},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
}


def adapted(model: Any, adapter: str) -> Any:
    torch.manual_seed(6)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **ADAPTERS[adapter]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros to begin with, which would hide A's gradient
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@crossed(adapter=ADAPTERS, first=["patch", "peft"], make=[tiny_models.llama, tiny_models.gemma2])
@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")
def test_adapters(make: Callable[[], Any], adapter: str, first: str) -> None:
    plain = adapted(make(), adapter)
    patched = adapted(patch_model(make()) if first == "patch" else make(), adapter)
    if first == "peft":
        assert patch_model(patched) is patched
    torch.manual_seed(7)
    theirs = step(plain)
    torch.manual_seed(7)
    ours = step(patched)
    assert_same(ours, theirs)
    assert patched.chunked_head.materialised == 0 and patched.chunked_head.fused == 1
    assert patched.get_base_model().lm_head is not None
    unpatch_model(patched)
    assert type(patched(**tokens()).logits) is torch.Tensor


def test_metrics_through_an_adapted_head() -> None:
    """Chunks are computed again in backward, and measured once."""
    model = patch_model(adapted(tiny_models.llama(), "on the head"), metrics=[metrics.entropy()])
    inputs = tokens()
    plain = unpatch_model(copy.deepcopy(model))
    step(model, inputs)
    taken = model.chunked_head.take_metrics()["entropy"]
    logp = plain(**inputs).logits[:, :-1].log_softmax(-1)
    counts = inputs["labels"][:, 1:] != -100
    torch.testing.assert_close(taken.value, -(logp.exp() * logp).sum(-1)[counts].mean().detach())
    assert taken.count == counts.sum()


def test_a_normalizer_needs_a_plain_head() -> None:
    model = patch_model(adapted(tiny_models.llama(), "on the head"), losses.cross_entropy(normalizer=3.0))
    with pytest.raises(ValueError, match="normalizer or reduction of its own does not go with lm_head"):
        model(**tokens())


class Quantised(torch.nn.Module):
    """A head as quantising libraries have them: no weight of a floating dtype."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("quantised", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ (self.quantised.to(hidden.dtype) * self.scale).T


def test_a_quantised_head() -> None:
    plain = tiny_models.llama()
    plain.lm_head = Quantised(plain.lm_head)
    patched = patch_model(copy.deepcopy(plain))
    assert_same(step(patched), step(plain))
    assert patched.chunked_head.fused == 1 and patched.chunked_head.materialised == 0


def test_adapted_heads_in_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunked_head.integrations.huggingface.fused.CHUNK_BYTES", 97 * 4 * 4 * 3)  # of three rows
    for reduced in ({}, {"num_items_in_batch": torch.tensor(9)}):
        plain, patched = (adapted(tiny_models.llama(), "on the head") for _ in range(2))
        patch_model(patched)
        assert_same(step(patched, **reduced), step(plain, **reduced))
        with torch.no_grad():
            evaluated = [model.eval()(**tiny_models.tokens(), **reduced).loss for model in (patched, plain)]
        torch.testing.assert_close(*evaluated)
        agreed = patched.get_base_model().chunked_head
        assert agreed.fused == 2 and agreed.materialised == 0


def test_a_layer_norm_is_no_head() -> None:
    model = tiny_models.llama()
    model.lm_head = torch.nn.LayerNorm(32)
    with pytest.warns(UserWarning, match="LayerNorm, has no in_features and out_features"):
        patch_model(model)
    assert type(model).__name__ == "LlamaForCausalLM"
