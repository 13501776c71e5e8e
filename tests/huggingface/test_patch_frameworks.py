"""Patched models under what hangs forwards on modules, and outputs that are no tensors' or the Trainer's."""

import copy
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tiers import crossed
from tiny_models import LazyLogits, assert_same, pair, step, tokens, transformers

from chunked_head import metrics, patch_model, unpatch_model

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


@crossed(first=["patch", "accelerate"], how=HANGING, make=[tiny_models.llama, tiny_models.gemma2])
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


def test_accelerate_takes_no_patch_off() -> None:
    """As it unwraps a model, it follows ``__wrapped__`` from the forward inwards."""
    model = tiny_models.llama()
    signature = inspect.signature(model.forward)
    patch_model(model, metrics=[metrics.entropy()])
    assert inspect.signature(model.forward) == signature
    prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    step(prepared)
    plain = accelerate.Accelerator(cpu=True).unwrap_model(prepared, keep_fp32_wrapper=False)
    for fused in (2, 3):
        step(plain)
        assert plain.chunked_head.fused == fused
    assert plain.chunked_head.take_metrics()["entropy"].count == 3 * 17


@pytest.mark.parametrize("asked", [True, False])
def test_a_forward_that_hides_ours_after_a_step(asked: bool) -> None:
    """Every step looks, for a forward that calls ours stays."""
    model = patch_model(tiny_models.llama(), metrics=[metrics.entropy()] if asked else [])
    ours = model.forward
    model.forward = lambda **given: ours(**given)
    for _ in range(2):
        step(model)

    def hiding(self: Any, **given: Any) -> Any:
        return type(self).class_before.forward(self, **given)

    model.forward = types.MethodType(hiding, model)
    message = (
        r"outside of LlamaForCausalLM's forward \(by hiding at test_patch_frameworks\.py:\d+, which runs instead of "
        r"the model's forward\).* let it call the forward that it finds on the model"
    )
    with pytest.raises(RuntimeError, match=message) if asked else pytest.warns(UserWarning, match=message):
        step(model)


OUTPUTS = {"tuple": lambda loss, logits: (loss, logits), "dict": lambda loss, logits: {"loss": loss, "logits": logits}}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_without_logits(kind: str) -> None:
    class Model(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            return OUTPUTS[kind](F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)

    plain = Model(transformers.LlamaConfig(**tiny_models.SIZES))
    theirs, ours = plain(**tokens()), patch_model(copy.deepcopy(plain), logits=None)(**tokens())
    assert type(ours) is type(theirs)
    parts = ours.values() if kind == "dict" else ours
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


def compiled_head(backend: str, first: str = "patch") -> Callable[[Any], Any]:
    def changed(model: Any) -> Any:
        if first == "compile":
            unpatch_model(model)
        model.lm_head = torch.compile(model.lm_head, backend=backend)
        return strictly(model) if first == "compile" else model

    return changed


def strictly(model: Any) -> Any:
    return patch_model(model, strict=True)


def compiled_in_place(model: Any) -> Any:
    model.lm_head.compile(backend="eager")
    return model


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "compiled": compiled_head("eager"),
    "compiled, then patched": compiled_head("eager", first="compile"),
    "compiled in place": compiled_in_place,
    "regions": lambda model: accelerate.utils.compile_regions(model, backend="eager"),
    "copy of a compiled head": lambda model: copy.deepcopy(compiled_head("eager")(model)),
    "pickle of a compiled head": lambda model: pickle.loads(pickle.dumps(compiled_head("eager")(model))),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_ways_into_a_heads_call(entry: str) -> None:
    """Of a head whose class was changed, whoever calls it by what: the plain model's numbers, fused while patched."""
    torch._dynamo.reset()
    plain, model = pair(strict=True)
    model = ENTRIES[entry](model)
    theirs = step(plain)
    for number in range(1, 3):
        ours = step(model)
        named = {name.replace("_orig_mod.", ""): grad for name, grad in ours.grads.items()}
        assert_same(ours._replace(grads=named), theirs)
        report = model.__dict__.get("chunked_head")
        assert report.fused == number and model._chunked_head_patch.head.reads_weight
    assert torch.equal(ours.output.logits.argmax(-1), theirs.output.logits.argmax(-1))
    unpatch_model(model)
    logits = model(input_ids=IDS).logits
    torch.testing.assert_close(logits, plain(input_ids=IDS).logits)


# the one that Triton's interpreter runs, and on a GPU all of them
LIGER = [("cpu", ("rope",)), pytest.param("cuda", ("rope", "rms_norm", "swiglu"), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("first", ["liger", "patch"])
@pytest.mark.parametrize(("device", "kernels"), LIGER)
def test_beside_ligers_kernels(device: str, kernels: Any, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    liger = pytest.importorskip("liger_kernel.transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", llama.apply_rotary_pos_emb)  # given back
    plain = tiny_models.llama().to(device)
    inputs = {name: value.to(device) for name, value in tokens().items()}
    theirs, model = step(plain, inputs), copy.deepcopy(plain)
    if first == "patch":
        patch_model(model)
    chosen = {name: name in kernels for name in ("rope", "rms_norm", "swiglu")}
    liger.apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, cross_entropy=False, model=model, **chosen)
    if first == "liger":
        patch_model(model)
    assert "liger" in llama.apply_rotary_pos_emb.__name__
    assert_same(step(model, inputs), theirs, tolerance=1e-4)
    assert model.chunked_head.fused == 1 and model.chunked_head.materialised == 0
