"""Models of several heads, whose logits are stacked: indexed and reshaped they stay lazy, else they are computed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tiny_models import LazyLogits, assert_same, tokens, transformers
from torch import nn

from chunked_head import patch_model, unpatch_model
from chunked_head.integrations.huggingface.lazy.lazy_head import LazyHead
from chunked_head.integrations.huggingface.lazy.lazy_stack import LazyStack

HEADS = 3


class Codebooks(transformers.LlamaForCausalLM):
    """As Musicgen: a head for each codebook, the loss their mean."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(HEADS)
        )

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_heads

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids).last_hidden_state
        logits = torch.stack([head(hidden) for head in self.lm_heads], dim=1)
        loss = torch.zeros([])
        if labels is not None:
            kept = logits[:, :, -labels.shape[1] :]
            for i in range(HEADS):
                loss += F.cross_entropy(kept[:, i].contiguous().view(-1, logits.shape[-1]), labels.reshape(-1))
        return {"loss": loss / HEADS, "logits": logits.reshape(-1, *logits.shape[2:])}


@pytest.fixture
def both() -> tuple[Any, Any]:
    torch.manual_seed(3)
    plain = Codebooks(transformers.LlamaConfig(**tiny_models.SIZES)).train()
    return plain, patch_model(copy.deepcopy(plain), strict=True)


def one_step(model: Any) -> Any:
    model.zero_grad()
    output = model(**tokens())
    output["loss"].backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return tiny_models.Step(output["loss"].detach(), grads, output)


def test_a_step(both: tuple[Any, Any]) -> None:
    plain, patched = both
    ours, theirs = one_step(patched), one_step(plain)
    assert_same(ours, theirs)
    report = patched.chunked_head
    assert (report.fused, report.materialised) == (HEADS, 0) and "lm_heads.0 [97, 32] and 2 more" in str(report)
    logits = ours.output["logits"]
    assert isinstance(logits, LazyStack) and logits.shape == (2 * HEADS, 11, 97)
    torch.testing.assert_close(logits.materialise(), theirs.output["logits"], rtol=0, atol=0)
    unpatch_model(patched)
    assert not any(isinstance(module, LazyHead) for module in patched.modules())


def stacks(both: tuple[Any, Any], strict: bool) -> tuple[Any, torch.Tensor, Any]:
    """Lazy, real, and the report."""
    plain, patched = both
    patch_model(patched, strict=strict)
    ids, made = tokens()["input_ids"], []
    for model in (patched, plain):
        hidden = model.model(ids).last_hidden_state
        report = getattr(model, "chunked_head", None)
        if report is None:
            made.append(torch.stack([head(hidden) for head in model.lm_heads], dim=1))
        else:
            with report.being_lazy(list(model.lm_heads), labelled=False):
                made.append(torch.stack([head(hidden) for head in model.lm_heads], dim=1))
    return made[0], made[1], patched.chunked_head


LAZY: dict[str, tuple[Callable[[Any], Any], type]] = {
    "one head": (lambda x: x[:, 1], LazyLogits),
    "the last head, fewer rows": (lambda x: x[:, -1, 2:, :], LazyLogits),
    "fewer heads": (lambda x: x[:, 1:], LazyStack),
    "ellipsis": (lambda x: x[..., :-1, :], LazyStack),
    "one row of all": (lambda x: x[0], LazyStack),
    "one row, then a head": (lambda x: x[0][2], LazyLogits),
    "all but the vocabulary's end": (lambda x: x[:, 0, :, :50], LazyLogits),
    "reshaped": (lambda x: x.reshape(-1, 11, 97), LazyStack),
    "viewed and flattened": (lambda x: x.view(6, 11, 97).flatten(0, 1), LazyStack),
}
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "a head by ids": lambda x: x[:, torch.tensor([1, 0])],
    "a head of reshaped ones": lambda x: x.reshape(-1, 11, 97)[2],
    "argmax": lambda x: x.argmax(-1),
    "one column": lambda x: x[:, 1:, :, 4],
    "sum of heads": lambda x: x.sum(1),
    "concatenated": lambda x: torch.cat([x, x]),
}


@pytest.mark.parametrize("name", LAZY)
def test_lazy(name: str, both: tuple[Any, Any]) -> None:
    lazy, logits, report = stacks(both, strict=True)
    operation, kind = LAZY[name]
    found, expected = operation(lazy), operation(logits)
    assert type(found) is kind and found.shape == expected.shape and report.materialised == 0
    torch.testing.assert_close(found.materialise(), expected, rtol=1e-5, atol=1e-5)
    assert found.materialise().requires_grad


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.filterwarnings("ignore:chunked_head")
def test_computed(name: str, both: tuple[Any, Any]) -> None:
    lazy, logits, report = stacks(both, strict=False)
    found, expected = COMPUTED[name](lazy), COMPUTED[name](logits)
    assert type(found) is torch.Tensor and report.materialised >= 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_written_is_refused(both: tuple[Any, Any]) -> None:
    lazy, _, _ = stacks(both, strict=False)
    with pytest.raises(RuntimeError, match=r"several heads: use logits\.materialise"):
        lazy.mul_(2.0)
    assert repr(lazy) == "LazyStack(shape=(2, 3, 11, 97), dtype=torch.float32, device='cpu')"


def test_stacks_that_are_none(both: tuple[Any, Any]) -> None:
    """Of the vocabulary, or of what is no row of logits."""
    _, patched = both
    patch_model(patched, strict=True)
    hidden = patched.model(tokens()["input_ids"]).last_hidden_state
    with patched.chunked_head.being_lazy(list(patched.lm_heads), labelled=False):
        logits = [head(hidden) for head in patched.lm_heads]
    for stack in (lambda: torch.stack(logits, -1), lambda: torch.stack([logits[0], logits[1][:, 1:]])):
        with pytest.raises(RuntimeError, match="would be computed for stack"):
            stack()


def test_heads_of_different_sizes_stay_as_they_are() -> None:
    model = Codebooks(transformers.LlamaConfig(**tiny_models.SIZES))
    model.lm_heads[1] = nn.Linear(32, 90)
    with pytest.warns(UserWarning, match="its heads are 3 of different sizes"):
        patch_model(model)
    assert type(model) is Codebooks


def test_a_stack_in_a_graph() -> None:
    """There it is computed, as everything that a graph's lazy logits do not know."""
    torch._dynamo.reset()
    plain = Codebooks(transformers.LlamaConfig(**tiny_models.SIZES))
    patched = patch_model(copy.deepcopy(plain))
    compiled = torch.compile(patched, backend="aot_eager")
    ours = compiled(**tokens())["loss"]
    torch.testing.assert_close(ours, plain(**tokens())["loss"], rtol=1e-5, atol=0)
