"""Patched models that share a head or hold one another, in several threads and as replicas."""

import copy
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tiny_models import LazyLogits, assert_same, pair, step, tokens, transformers

from chunked_head import patch_model, unpatch_model

IDS = tokens()["input_ids"]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="chunked_head")
        yield


class Outer(transformers.PreTrainedModel):
    """A model around a language model, as those that see have it; the loss is its own or the inner one's. Its
    module has a name that a patched class had for itself."""

    config_class = transformers.LlamaConfig

    def __init__(self, config: Any):
        super().__init__(config)
        self.base = transformers.LlamaForCausalLM(config)

    def get_output_embeddings(self) -> Any:
        return self.base.lm_head

    def get_input_embeddings(self) -> Any:
        return self.base.model.embed_tokens

    def forward(self, input_ids: Any = None, labels: Any = None, own: bool = True) -> Any:
        if not own:
            return self.base(input_ids, labels=labels, return_dict=False)[:2]
        logits = self.base(input_ids).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("order", ["outer", "outer, inner", "inner, outer"])
def test_a_model_inside_of_a_model(order: str, own: bool) -> None:
    plain = Outer(transformers.LlamaConfig(**tiny_models.SIZES))
    model = copy.deepcopy(plain)
    for which in order.split(", "):
        patch_model(model if which == "outer" else model.base)
    for _ in range(2):
        assert_same(step(model, own=own), step(plain, own=own))
    reports = [one.chunked_head for one in (model, model.base) if hasattr(one, "chunked_head")]
    assert sum(report.fused for report in reports) == 2 and not any(report.materialised for report in reports)
    unpatch_model(model.base)
    assert_same(step(model, own=own), step(plain, own=own))
    assert model.chunked_head.fused >= 1


def test_models_that_share_a_head() -> None:
    plain, model = pair()
    other = tiny_models.llama()
    other.lm_head = model.lm_head
    patch_model(other)
    for one in (model, other, model):
        theirs = copy.deepcopy(unpatch_model(copy.deepcopy(one)))
        assert_same(step(one), step(theirs))
    assert (model.chunked_head.fused, other.chunked_head.fused) == (2, 1)
    unpatch_model(other)
    assert type(other(**tokens()).logits) is torch.Tensor
    assert_same(step(model), step(plain))
    assert model.chunked_head.fused == 3
    unpatch_model(model)
    assert type(model.lm_head) is torch.nn.Linear


def replica(model: Any) -> Any:
    """As nn.DataParallel makes them, of the parameters themselves."""
    modules = dict(model.named_modules())
    copies = {name: module._replicate_for_data_parallel() for name, module in modules.items()}
    for name, module in modules.items():
        for key in module._modules:
            setattr(copies[name], key, copies[f"{name}.{key}" if name else key])
        for key, parameter in module._parameters.items():
            setattr(copies[name], key, None if parameter is None else parameter.view_as(parameter))
    return copies[""]


@pytest.mark.parametrize("kind", ["replicas", "one model"])
def test_threads(kind: str) -> None:
    """Labelled and unlabelled forwards at once."""
    plain, model = pair()
    head, expected, wrong = model.lm_head, plain(**tokens()).loss, []
    model(**tokens())

    def run(one: Any, labelled: bool) -> None:
        try:
            for _ in range(15):
                output = one(**tokens()) if labelled else one(input_ids=IDS)
                if labelled:
                    torch.testing.assert_close(output.loss, expected)
                if isinstance(output.logits, LazyLogits) != labelled:
                    wrong.append(f"{type(output.logits)} while labels are given: {labelled}")
        except Exception as error:
            wrong.append(repr(error))

    models = [replica(model) if kind == "replicas" else model for _ in range(3)]
    threads = [threading.Thread(target=run, args=(one, one is not models[2] or kind == "replicas")) for one in models]
    if kind == "one model":
        threads[1] = threading.Thread(target=run, args=(model, False))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert model._chunked_head_patch.head is head and model.lm_head is head
    assert_same(step(model), step(plain))
    assert type(model(input_ids=IDS).logits) is torch.Tensor


def test_what_raises_leaves_nothing() -> None:
    plain, model = pair()
    model(**tokens())
    with pytest.raises(IndexError):
        model(input_ids=IDS, labels=torch.full_like(IDS, 97))
    assert type(model(input_ids=IDS).logits) is torch.Tensor
    assert_same(step(model), step(plain))
