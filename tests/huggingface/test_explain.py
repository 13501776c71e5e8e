"""``explain_model``: what ``patch_model`` then does, said before, and nothing of the model changed."""

import copy
import warnings
from typing import Any

import pytest
import torch
from tiny_models import SIZES, bert, gemma2, gpt2, granite, llama, roberta, step, t5, tokens, transformers

from chunked_head import explain_model, losses, metrics, patch_model, plan


def mixtral() -> Any:
    """Its layers look at numbers: which tokens go to which expert."""
    torch.manual_seed(3)
    more = {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **more)).train()


@pytest.mark.parametrize("make", [llama, gemma2, granite, gpt2, bert, roberta, t5, mixtral])
def test_it_says_what_patch_model_does(make: Any) -> None:
    model = make()
    before, kinds = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    said = explain_model(model, tokens=500, device="cpu")
    assert [type(module) for module in model.modules()] == kinds and not hasattr(model, "chunked_head")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    patched = patch_model(model)
    step(patched)
    does: Any = patched.chunked_head
    assert said.patched and not said.reason and said.model == type(model).__name__
    assert said.tail is not None and str(said.tail) == str(does.tail)
    assert len(said.losses) == does.fused and not does.materialised and not said.warnings and said.reads_weight
    head: Any = patched._chunked_head_patch.head
    (rows, columns), trained = head.weight.shape, getattr(head, "bias", None) is not None
    is_tied = head.weight is patched.get_input_embeddings().weight
    assert said.head == f"{does.head_name} [{rows}, {columns}]" + (", tied" if is_tied else "")
    assert said.plan == plan(500, columns, rows, torch.float32, softcap=said.tail.softcap, bias=trained, device="cpu")
    assert said.full_bytes == 2 * 500 * rows * 4  # logits and their gradient: a float32 model copies nothing
    assert said.extra_bytes == said.plan.extra_bytes
    assert said.head in str(said) and str(does.tail) in str(said)


def test_a_large_model_without_memory() -> None:
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=2, num_attention_heads=64
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.lm_head.weight.requires_grad_(False)
    said = explain_model(model, device="sm_90", memory_budget="1GiB")
    assert said.full_bytes == 8192 * 128256 * (2 + 4 + 4)  # logits, their copy in float32, its gradient
    sizes = (8192, 8192, 128256, torch.bfloat16)
    assert said.plan == plan(*sizes, weight_grad=False, memory_budget="1GiB", device="sm_90")
    cast = explain_model(model.float(), autocast=torch.bfloat16, device="sm_90").plan
    wide = {"hidden_dtype": torch.float32, "weight_dtype": torch.float32}
    assert cast == plan(*sizes, weight_grad=False, device="sm_90", **wide)


def test_why_a_model_stays_as_it_is() -> None:
    model = llama().model  # without a head
    with pytest.warns(UserWarning, match="get_output_embeddings"):
        mechanism = patch_model(copy.deepcopy(model)).chunked_head.mechanism
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = explain_model(model)
    assert not said.patched and mechanism == f"none: {said.reason}"
    assert said.plan is None and "leaves it as it is" in str(said)


@pytest.mark.parametrize("options", [
    {"loss": losses.grpo()}, {"loss": losses.z_loss(), "metrics": [metrics.clip_fraction()]}, {"wehn": "labels"},
    {"memory_budget": "much"}, {"logits": "none"},
], ids=lambda options: " ".join(options))  # fmt: skip
def test_what_patch_model_raises_is_text(options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        patch_model(llama(), **options)
    said = explain_model(llama(), **options)
    assert not said.patched and said.reason == f"it raises {raised.type.__name__}: {raised.value}"


def test_hooks_on_the_head_are_named_and_not_run() -> None:
    ran, model = [], llama()

    def spy(*args: Any) -> None:
        ran.append(args)

    for module in (model, model.model, model.lm_head):
        module.register_forward_hook(spy)
    said = explain_model(model)
    assert not ran and not said.losses
    with pytest.warns(UserWarning, match="computed after all") as warned:
        step(patch_model(model))
    real = str(warned[0].message).removeprefix("chunked_head: ")
    assert ran and said.warnings[0].split(" at ")[0] == real.split(" at ")[0] and "spy" in real


def test_a_head_whose_own_forward_runs() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], r=2)
    model = peft.get_peft_model(llama(), config)
    said = explain_model(model, tokens=500)
    assert said.patched and said.losses and not said.reads_weight and said.plan is None
    assert said.extra_bytes == 500 * 97 * 16 and "own forward" in str(said)


def test_inputs_of_ones_own_and_what_is_not_known() -> None:
    from zoo import models

    model = models.build(transformers.BlipForConditionalGeneration)
    said = explain_model(model)
    assert said.patched and not said.losses and "pixel_values" in said.reason
    given = models.inputs(model)
    said, patched = explain_model(model, inputs=given), patch_model(model)
    patched(**given)
    does: Any = patched.chunked_head
    assert (said.head, str(said.tail), len(said.losses)) == (does.head_in_words, str(does.tail), does.fused)


def test_a_patched_model_stays_patched() -> None:
    model = patch_model(llama())
    agreed: Any = model.chunked_head
    assert explain_model(model, tokens=64).losses
    assert model.chunked_head is agreed and model._chunked_head_patch.rehearsed is None
    step(model, tokens())
    assert agreed.fused == 1


@pytest.mark.parametrize("arguments, error", [
    ((3,), TypeError), ((None, 0), ValueError), ((None, 8, "gpu9"), ValueError),
    ((None, 8, None, torch.int8), TypeError),
])  # fmt: skip
def test_bad_arguments(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    model, count, device, autocast = (*arguments, *(None, 8, None, None)[len(arguments) :])
    with pytest.raises(error):
        explain_model(llama() if model is None else model, count, device=device, autocast=autocast)
