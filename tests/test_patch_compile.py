"""torch.compile of patched models: one graph where the plain model makes one, and the same numbers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import step, tokens

from chunked_head import losses, metrics, patch_model

pytestmark = pytest.mark.compiled


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> tuple[int, int]:
    """How many were made, and how often one was broken."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-logits": {"logits": None},
    "loss": {"loss": losses.cross_entropy() + 1e-2 * losses.z_loss()},
}


@pytest.mark.parametrize(
    ("make", "options"),
    [(tiny_models.gemma2, "plain"), (tiny_models.granite, "no-logits"), (tiny_models.llama, "loss")],
)
def test_one_graph(make: Callable[[], Any], options: str) -> None:
    plain = make()
    patched = patch_model(copy.deepcopy(plain), **OPTIONS[options])
    theirs = step(patch_model(plain, loss=OPTIONS[options]["loss"]) if options == "loss" else plain)
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        patched.zero_grad()
        output = compiled(**tokens())
        output.loss.backward()
        step(patched)  # one that is not compiled changes no graph
        torch.testing.assert_close(output.loss, theirs.loss, rtol=1e-5, atol=0)
    patched.zero_grad()
    compiled(**tokens()).loss.backward()
    for name, parameter in patched.named_parameters():
        assert (parameter.grad - theirs.grads[name]).norm() <= 2e-4 * theirs.grads[name].norm()
    assert graphs() == (1, 0)
    if options == "plain":
        torch.testing.assert_close(output.logits.materialise(), theirs.output.logits, rtol=1e-5, atol=1e-5)
        assert output.logits.softmax(-1).shape == (2, 11, 97)


def test_as_many_graphs_as_the_plain_model() -> None:
    """Of several lengths, in training and evaluation."""
    counts = []
    for patched in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = tiny_models.llama()
        compiled = torch.compile(patch_model(model) if patched else model, backend="aot_eager")
        for length in (11, 9, 7):
            compiled(**tokens(length=length)).loss.backward()
        with torch.no_grad():
            compiled(**tokens(length=6))
            compiled(input_ids=tokens(length=6)["input_ids"])
        counts.append(graphs())
    assert counts[1] == counts[0]


def test_steps_make_no_new_graphs() -> None:
    model = patch_model(tiny_models.llama())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for number in range(1, 5):
        compiled(**tokens(), num_items_in_batch=torch.tensor(number)).loss.backward()
    assert graphs() == (1, 0)


def test_metrics_in_a_graph() -> None:
    model = patch_model(tiny_models.llama(), metrics=[metrics.entropy()])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        compiled(**tokens())
    entropy = model.chunked_head.take_metrics()["entropy"]
    model(**tokens())
    once = model.chunked_head.take_metrics()["entropy"]
    torch.testing.assert_close(entropy.value, once.value)
    assert entropy.count == 3 * once.count


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inductor(dtype: torch.dtype) -> None:
    plain = tiny_models.gemma2().to("cuda", dtype)
    patched = patch_model(copy.deepcopy(plain))
    inputs = {name: value.cuda() for name, value in tokens().items()}
    torch.compile(patched, fullgraph=True)(**inputs).loss.backward()
    theirs = step(plain, inputs)
    for name, parameter in patched.named_parameters():
        tolerance = 1e-3 if dtype == torch.float32 else 3e-2
        assert (parameter.grad - theirs.grads[name]).norm() <= tolerance * theirs.grads[name].norm()


def test_logits_used_in_a_graph_are_computed() -> None:
    plain = tiny_models.llama()
    model = patch_model(copy.deepcopy(plain))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        output = model(**inputs)
        return output.loss, output.logits.softmax(-1).amax(-1)

    loss, top = both(tokens())
    torch.testing.assert_close(loss, plain(**tokens()).loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(top, plain(**tokens()).logits.softmax(-1).amax(-1))
