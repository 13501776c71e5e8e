"""A patched model's head with other people's hooks, parametrisations and weights."""

import copy
import functools
import warnings
from typing import Any

import pytest
import tiny_models
import torch
from test_patch_edges import inline
from tiny_models import assert_same, pair, step, tokens, transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from chunked_head import patch_model

IDS = tokens()["input_ids"]


def doubled(head: Any, inputs: Any, logits: Any) -> Any:
    return logits * 2


class Doubled:
    def __call__(self, head: Any, inputs: Any, logits: Any) -> Any:
        return doubled(head, inputs, logits)


HOOKS = {"function": doubled, "object": Doubled(), "partial": functools.partial(doubled)}


@pytest.mark.parametrize(("hook", "compiled"), [
    *((hook, False) for hook in HOOKS), ("partial", True),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:chunked_head")
def test_forward_hooks_of_the_head_see_logits(hook: str, compiled: bool) -> None:
    plain, model = pair()
    for one in (plain, model):
        one.lm_head.register_forward_hook(HOOKS[hook])
    ours = step(torch.compile(model, backend="eager", fullgraph=True) if compiled else model)
    theirs = step(plain)
    torch.testing.assert_close(ours.loss, theirs.loss)
    torch.testing.assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad)


def test_other_hooks_of_the_head() -> None:
    plain, model = pair()
    seen: list[list[Any]] = [[], []]
    for one, kept in zip((plain, model), seen, strict=True):
        one.lm_head.register_forward_pre_hook(lambda head, inputs: (inputs[0] * 3,))
        handle = one.lm_head.register_full_backward_hook(lambda head, inner, outer, kept=kept: kept.extend(outer))
        if one is model:
            with pytest.warns(UserWarning, match="are computed after all, for a backward hook, .*lambda> at"):
                ours = step(model)
        else:
            theirs = step(plain)
        handle.remove()
    assert_same(ours, theirs)
    torch.testing.assert_close(seen[1], seen[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(step(model), step(plain))  # what is done before the head is no matter
    assert (model.chunked_head.fused, model.chunked_head.materialised) == (1, 1)


@pytest.mark.filterwarnings("ignore:chunked_head")
def test_hooks_of_all_modules_see_logits() -> None:
    sizes: list[list[Any]] = [[], []]
    for one, kept in zip(pair(), sizes, strict=True):
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, inputs, output, kept=kept: kept.append(getattr(output, "shape", None))
        )
        one(**tokens())
        hook.remove()
    assert sizes[0] == sizes[1]


@pytest.mark.filterwarnings("ignore:chunked_head")
def test_models_without_numbers() -> None:
    config = transformers.LlamaConfig(**tiny_models.SIZES)
    for where in (torch.device("meta"), FakeTensorMode()):
        with where:
            model = patch_model(transformers.LlamaForCausalLM(config))
            loss = model(input_ids=torch.ones(2, 5).long(), labels=torch.ones(2, 5).long()).loss
            loss.backward()
        assert loss.shape == () and model.lm_head.weight.grad.shape == (97, 32)


def test_a_weight_that_is_computed_is_so_once() -> None:
    """Each reading of a spectrally normalised weight moves its estimate of the largest singular value."""
    made = []
    for one in (tiny_models.llama(), tiny_models.llama()):
        torch.manual_seed(1)
        nn.utils.parametrizations.spectral_norm(one.lm_head, n_power_iterations=1)
        made.append(one)
    patch_model(made[1])
    for _ in range(2):
        assert_same(step(made[1]), step(made[0]))
    for ours, theirs in zip(made[1].lm_head.buffers(), made[0].lm_head.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert made[1].chunked_head.fused == 2


class Own(nn.Linear):
    """Computes in float32, whatever it is given."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden.float(), self.weight.float())


def test_a_head_that_computes_in_another_dtype() -> None:
    plain = inline().bfloat16()
    plain.lm_head.__class__ = Own
    model = patch_model(copy.deepcopy(plain))
    assert_same(step(model), step(plain))
    assert model.chunked_head.fused == 1


class Eighths(torch.Tensor):
    """A weight as quantising libraries have it: whole numbers with a scale, in the place of a matrix."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(self, numbers: torch.Tensor):
        self.numbers = numbers

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Eighths(args[0].numbers)
        assert "mm" in str(function) or function in (torch.ops.aten.t.default,), function  # and nothing else
        args = [x.numbers.float() / 8 if isinstance(x, Eighths) else x for x in args]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["loss", "log-probabilities"])
@pytest.mark.filterwarnings("ignore:chunked_head")
def test_quantised_weights_go_through_their_own_product(how: str) -> None:
    plain = tiny_models.llama()
    numbers = (plain.lm_head.weight.detach() * 8 * 50).round().to(torch.int8)
    made = []
    for patched in (False, True):
        model = copy.deepcopy(plain)
        model.lm_head.weight = nn.Parameter(Eighths(numbers), requires_grad=False)
        if patched:
            patch_model(model, when="training")
        if how == "loss":
            made.append(step(model))
        else:
            logp = model(input_ids=IDS).logits.log_softmax(-1).gather(-1, IDS[..., None])
            torch.testing.assert_close(logp.mean(), made[0]) if made else made.append(logp.mean().detach())
    assert not model.lm_head.reads_weight  # whose memory a kernel would take for numbers
    if how == "loss":
        assert_same(made[1], made[0])
        assert model.chunked_head.fused == 1
