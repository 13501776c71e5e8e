"""torch.compile of patched models: one graph where the plain model makes one, and the same numbers."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_models
import torch
from tiers import first_of
from tiny_models import pair, step, tokens

from chunked_head import losses, metrics, patch_model, unpatch_model


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="chunked_head")
        yield


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
    [
        (tiny_models.gemma2, "plain"),
        pytest.param(tiny_models.llama, "loss", marks=pytest.mark.exhaustive),
        pytest.param(tiny_models.granite, "no-logits", marks=pytest.mark.exhaustive),
    ],
)
def test_one_graph(make: Callable[[], Any], options: str) -> None:
    plain, patched = pair(make, **OPTIONS[options])
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
        with pytest.warns(UserWarning, match="are computed after all, for softmax"):
            assert output.logits.softmax(-1).shape == (2, 11, 97)


FAMILIES = [tiny_models.gpt2, tiny_models.bert, tiny_models.t5, tiny_models.llama, tiny_models.roberta]


@pytest.mark.parametrize("make", first_of(FAMILIES))
def test_graphs_of_families(make: Callable[[], Any]) -> None:
    """The plain model's one graph, which a ``CrossEntropyLoss()`` in the forward breaks."""
    whole = make in (tiny_models.llama, tiny_models.gpt2)
    theirs, model = step(make()), patch_model(make(), strict=True)
    ours = step(torch.compile(model, fullgraph=whole, backend="aot_eager"))
    assert graphs() == (1, 0) or not whole
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=2e-5, atol=0)
    for name, grad in theirs.grads.items():  # a bias of keys has none but by rounding
        assert (ours.grads[f"_orig_mod.{name}"] - grad).norm() <= 2e-4 * grad.norm() + 1e-9, name
    assert "no loss so far; 0 losses fused, logits computed 0 times; in graphs of" in str(model.chunked_head)
    assert str(model.chunked_head).endswith("whose runs do not count: losses fused")


def test_metrics_of_a_loss_made_in_forward() -> None:
    model = patch_model(tiny_models.bert(), losses.cross_entropy(), metrics=[metrics.entropy()])
    torch.compile(model, backend="aot_eager")(**tokens())
    found = model.chunked_head.take_metrics(training=False)["entropy"]
    model(**tokens())
    expected = model.chunked_head.take_metrics(training=False)["entropy"]
    torch.testing.assert_close(found.value, expected.value)
    assert found.count == expected.count == 18


@pytest.mark.parametrize("given", [{"loss": losses.focal()}, {"metrics": [metrics.entropy()]}], ids=["loss", "metrics"])
def test_what_has_no_part_in_a_loss_outside_is_refused_in_a_graph(given: dict[str, Any]) -> None:
    compiled = torch.compile(patch_model(tiny_models.llama(), **given), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="has no part in a loss made outside of LlamaForCausalLM"):
        compiled(input_ids=tokens()["input_ids"])


def test_strict_in_a_graph() -> None:
    model = patch_model(tiny_models.llama(), strict=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def top(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**inputs).logits.softmax(-1)

    with pytest.raises(Exception, match="would be computed for softmax at a place in a graph"):
        top(tokens())


@pytest.mark.parametrize("later", [True, False], ids=["compiled later", "compiled before"])
def test_a_compiled_model_that_is_unpatched(later: bool) -> None:
    plain, model = pair()
    compiled = torch.compile(model, backend="eager")
    if not later:
        compiled(**tokens())
    unpatch_model(model)
    torch.testing.assert_close(compiled(**tokens()).loss, plain(**tokens()).loss)
    assert type(compiled(**tokens()).logits) is torch.Tensor


@pytest.mark.gpu
def test_inductor() -> None:
    plain = tiny_models.gemma2().to("cuda", torch.bfloat16)
    patched = patch_model(copy.deepcopy(plain))
    inputs = {name: value.cuda() for name, value in tokens().items()}
    torch.compile(patched, fullgraph=True)(**inputs).loss.backward()
    theirs = step(plain, inputs)
    for name, parameter in patched.named_parameters():
        assert (parameter.grad - theirs.grads[name]).norm() <= 3e-2 * theirs.grads[name].norm()


def fill(logits: Any) -> None:
    logits[..., torch.tensor([2, 5])] = -1e9


def augment(logits: Any) -> None:
    logits /= 2.0


@pytest.mark.parametrize(("write", "name"), [
    (fill, "__setitem__"), (augment, "__itruediv__"), (lambda logits: logits.mul_(2.0), "mul_"),
    (lambda logits: logits.masked_fill_(torch.arange(97) > 9, -1e9), "masked_fill_"), (torch.relu_, "relu_"),
])  # fmt: skip
def test_logits_that_are_written_to_in_a_graph_are_refused(write: Any, name: str) -> None:
    """What is written would reach a copy."""

    def loss(model: Any) -> torch.Tensor:
        logits = model(input_ids=tokens()["input_ids"]).logits
        write(logits)
        return logits.logsumexp(-1).mean()

    model = patch_model(tiny_models.llama(), when="training")
    with pytest.raises(RuntimeError, match=rf"{name} on lazy logits inside of torch\.compile is not supported"):
        torch.compile(loss, backend="eager")(model)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "columns": lambda x: x[..., 5],
    "select": lambda x: x.select(-1, 3),
    "rows, then columns": lambda x: x[:, 1:][..., 7:],
    "detached": lambda x: x.detach()[..., 7:],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.filterwarnings("ignore:chunked_head")
def test_what_is_written_through_a_view_in_a_graph(view: str) -> None:
    """Reaches relatives, made before and after, as in the plain model's graph."""

    ids = tokens()["input_ids"]

    def loss(model: Any) -> Any:
        logits = model(input_ids=ids).logits
        part = logits[:, :-1]
        VIEWS[view](logits).fill_(-3.0)
        after = logits.logsumexp(-1)
        return torch.nn.functional.cross_entropy(part.flatten(0, 1), ids[:, 1:].flatten()), after

    found = []
    for model in pair(when="training"):
        value, after = torch.compile(loss, backend="eager", fullgraph=True)(model)
        value.backward()
        found.append((value.detach(), after.detach(), model.lm_head.weight.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_logits_used_in_a_graph_are_computed() -> None:
    plain, model = pair()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        output = model(**inputs)
        return output.loss, output.logits.softmax(-1).amax(-1)

    loss, top = both(tokens())
    assert "losses fused, logits computed for softmax" in str(model.chunked_head)
    torch.testing.assert_close(loss, plain(**tokens()).loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(top, plain(**tokens()).logits.softmax(-1).amax(-1))
