"""Patched models under what hangs forwards on modules, and outputs that are no tensors' or the Trainer's."""

import copy
import dataclasses
import inspect
import pickle
from collections import namedtuple
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tiny_models import assert_same, pair, step, tokens, transformers

from chunked_head import patch_model, unpatch_model
from chunked_head.integrations.huggingface.lazy.lazy_logits import LazyLogits

accelerate = pytest.importorskip("accelerate")
IDS = tokens()["input_ids"]


def offloaded(model: Any) -> Any:
    return accelerate.cpu_offload(model, execution_device="cpu")


def dispatched(model: Any) -> Any:
    return accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)


def dispatched_and_back(model: Any) -> Any:
    accelerate.hooks.remove_hook_from_module(dispatched(model), recurse=True)
    return model


HANGING = {"offloaded": offloaded, "dispatched": dispatched, "and back": dispatched_and_back}


@pytest.mark.parametrize("first", ["patch", "accelerate"])
@pytest.mark.parametrize("how", HANGING)
@pytest.mark.parametrize("make", [tiny_models.llama, tiny_models.gemma2], ids=lambda make: make.__name__)
def test_forwards_that_accelerate_hangs_on_modules(make: Any, how: str, first: str) -> None:
    plain, model = make(), make()
    names = list(inspect.signature(model.forward).parameters)
    if first == "patch":
        patch_model(model)
    HANGING[how](model)
    if first == "accelerate":
        patch_model(model)

    def same() -> Any:
        if how != "offloaded":
            assert_same(step(model), step(plain))
        with torch.no_grad():
            ours, theirs = model(**tokens()), plain(**tokens())
        torch.testing.assert_close(ours.loss, theirs.loss)
        assert torch.equal(ours.logits.argmax(-1), theirs.logits.argmax(-1))
        return ours.logits

    assert isinstance(same(), LazyLogits) and model.chunked_head.materialised == 0
    assert model.lm_head.reads_weight and list(inspect.signature(model.forward).parameters) == names
    unpatch_model(model)
    assert type(same()) is torch.Tensor
    patch_model(model)
    assert isinstance(same(), LazyLogits)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    if how != "offloaded":
        assert isinstance(same(), LazyLogits)
        unpatch_model(model)
        assert type(same()) is torch.Tensor


def test_a_forward_of_another_is_not_replaced() -> None:
    prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(tiny_models.llama())
    with pytest.warns(UserWarning, match="leaves LlamaForCausalLM as it is: its forward is hung on the instance"):
        patch_model(prepared)
    model = patch_model(tiny_models.llama())
    prepared_after = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    torch.testing.assert_close(prepared_after(**tokens()).loss, prepared(**tokens()).loss, rtol=1e-3, atol=0)
    assert model.chunked_head.fused == 1


@dataclasses.dataclass
class Structure:
    loss: Any
    logits: Any


OUTPUTS = {
    "tuple": lambda loss, logits: (loss, logits),
    "list": lambda loss, logits: [loss, logits],
    "named tuple": namedtuple("Named", ["loss", "logits"]),
    "dataclass": Structure,
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_without_logits(kind: str) -> None:
    class Model(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            return OUTPUTS[kind](F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)

    plain = Model(transformers.LlamaConfig(**tiny_models.SIZES))
    theirs, ours = plain(**tokens()), patch_model(copy.deepcopy(plain), logits=None)(**tokens())
    assert type(ours) is type(theirs)
    parts = ours.values() if kind == "dict" else vars(ours).values() if kind == "dataclass" else ours
    assert [part for part in parts if part is not None] and not any(isinstance(part, LazyLogits) for part in parts)


def test_traces_and_exports_are_the_plain_model() -> None:
    plain, model = (one.eval() for one in pair())
    inputs = tokens() | {"use_cache": False}
    for strict in (True, False):
        program = torch.export.export(model, (), inputs, strict=strict).module()
        found = program(**inputs)
        torch.testing.assert_close(found["loss"], plain(**inputs).loss)
        assert type(found["logits"]) is torch.Tensor

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return self.model(input_ids=input_ids, labels=labels, return_dict=False)[:2]

    traced = torch.jit.trace(Both(), tuple(tokens().values()), strict=False)
    other = tokens()["labels"].roll(1)
    torch.testing.assert_close(traced(IDS, other)[0], plain(IDS, labels=other).loss)


def test_a_patched_head_is_pickled_as_such() -> None:
    plain, model = pair()
    found = pickle.loads(pickle.dumps(model.lm_head))
    hidden = torch.randn(3, 32)
    assert torch.equal(found(hidden), plain.lm_head(hidden)) and type(found) is type(model.lm_head)
