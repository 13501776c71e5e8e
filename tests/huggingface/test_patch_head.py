"""What a head gives, dtype, columns, rows and gradients, is asked of the head itself: the plain model's numbers."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tiny_models import LazyLogits, assert_same, pair, step, tokens
from torch import Tensor, nn

from chunked_head import explain_model, patch_model

IDS = tokens()["input_ids"]


def to_float(head: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.float() for value in inputs)


def in_float() -> Any:
    """A bf16 model with a head of float32, as TRL's ``cast_lm_head_to_fp32`` makes one."""
    model = tiny_models.llama().bfloat16()
    model.lm_head.float().register_forward_pre_hook(to_float)
    return model


class Own(nn.Linear):
    """Computes in float32, whatever it is given."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float())


def own_float() -> Any:
    model = tiny_models.llama().bfloat16()
    model.lm_head.__class__ = Own
    return model


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [in_float, own_float])
@pytest.mark.filterwarnings("ignore:chunked_head.*for log_softmax:UserWarning")
def test_a_head_of_float32_in_a_model_of_bfloat16(make: Any, compiled: bool) -> None:
    """Log-probabilities are those of float32 logits: rounded to bf16 they would be 0.03 off."""
    found = []
    for model in pair(make, when="training", strict=not compiled and make is in_float):
        run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        logits = run(input_ids=IDS).logits
        logp = logits.log_softmax(-1).gather(-1, IDS[..., None])
        loss = run(**tokens()).loss
        (logp.sum() + loss).backward()
        found.append([logits.dtype, logp.detach(), loss.detach(), model.lm_head.weight.grad])
    assert found[0][0] == found[1][0] == torch.float32
    for theirs, ours in zip(found[0][1:], found[1][1:], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_hidden_states_of_another_dtype_than_the_weight_raise_as_ever() -> None:
    model = tiny_models.llama().bfloat16()
    model.lm_head.float()
    message = "for hidden states of torch.bfloat16 beside a weight of torch.float32"
    with pytest.warns(UserWarning, match=message), pytest.raises(RuntimeError, match="dtype"):
        patch_model(model)(**tokens())


def larger() -> Any:
    """A weight of more rows than its module was made for."""
    model = tiny_models.llama()
    torch.manual_seed(5)
    model.lm_head.weight = nn.Parameter(torch.randn(103, 32) / 5)
    model.config.vocab_size = model.vocab_size = 103
    return model


def tied_by_peft() -> Any:
    peft = pytest.importorskip("peft")
    trained = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    torch.manual_seed(6)
    return peft.get_peft_model(
        tiny_models.gemma2(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **trained)
    )


@pytest.mark.parametrize(("make", "columns"), [(larger, 103), (tied_by_peft, 97)])
def test_columns_are_the_weights_rows(make: Any, columns: int) -> None:
    plain, model = pair(make, strict=True)
    ours = step(model)
    assert_same(ours, step(plain))
    assert ours.output.logits.shape == (2, 11, columns)
    assert ours.output.logits.materialise().shape == ours.output.logits.shape
    report = (model if make is larger else model.get_base_model()).chunked_head
    assert f"[{columns}, 32]" in str(report) and report.fused == 1


def without_mean(head: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0] - inputs[0].mean(1, keepdim=True),)


def by_position(head: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    return inputs[0] * torch.linspace(0.5, 2, 11)[None, :, None]


def by_name(head: Any, args: Any, kwargs: Any) -> Any:
    return (args[0] * 3,), kwargs


class Twice(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


def twice() -> Any:
    model = tiny_models.llama()
    model.lm_head.__class__ = Twice
    return model


HOOKS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "mean": (without_mean, {}), "position": (by_position, {}), "keywords": (by_name, {"with_kwargs": True}),
}  # fmt: skip


@pytest.mark.parametrize("own", [False, True], ids=["matrix", "forward of its own"])
@pytest.mark.parametrize("kind", HOOKS)
def test_pre_hooks_get_the_rows_that_the_model_gives(kind: str, own: bool) -> None:
    """Once for each forward; the loss is of what they give."""
    found, calls = [], []
    for model in pair(twice if own else tiny_models.llama, when="training", strict=True):
        hook, options = HOOKS[kind]
        model.lm_head.register_forward_pre_hook(hook, **options)
        seen: list[Any] = []
        model.lm_head.register_forward_pre_hook(lambda head, inputs, seen=seen: seen.append(tuple(inputs[0].shape)))
        trained = step(model)
        logits = model(input_ids=IDS).logits
        top = logits.argmax(-1)
        logp = logits[:, :-1].reshape(-1, 97).log_softmax(-1).gather(-1, IDS[:, 1:].reshape(-1, 1)) if not own else top
        found.append((trained, top, logp.detach(), getattr(logits, "materialise", lambda x=logits: x)()))
        calls.append(seen)
    assert_same(found[1][0], found[0][0])
    for theirs, ours in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert calls[1] == calls[0] == [(2, 11, 32)] * 2


@pytest.mark.parametrize("kind", ["mean", "position"])
def test_pre_hooks_in_a_graph(kind: str) -> None:
    losses = []
    for model in pair(strict=True):
        model.lm_head.register_forward_pre_hook(HOOKS[kind][0])
        loss = torch.compile(model, backend="aot_eager", fullgraph=True)(**tokens()).loss
        loss.backward()
        losses.append((loss.detach(), model.lm_head.weight.grad))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)


def test_a_pre_hook_that_gives_more_than_hidden_states() -> None:
    class Scaled(nn.Linear):
        def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
            return scale * super().forward(hidden)

    made = []
    for patched in (False, True):
        model = tiny_models.llama()
        model.lm_head.__class__ = Scaled
        model.lm_head.register_forward_pre_hook(lambda head, args, kwargs: (args, {"scale": 3.0}), with_kwargs=True)
        if patched:
            with pytest.warns(
                UserWarning, match=r"a forward pre-hook, .*, that gives the head more than hidden states"
            ):
                made.append(step(patch_model(model)))
        else:
            made.append(step(model))
    assert_same(made[1], made[0])


class Centred(nn.Linear):
    """Its rows know each other."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden - hidden.mean(-2, keepdim=True))


class Positional(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden * torch.linspace(0.5, 2, 11)[:, None])


class Moving(nn.Linear):
    """Normalises as a batch norm does, and keeps the statistics."""

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.norm(hidden.flatten(0, -2)).view(hidden.shape))


class Dropping(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(F.dropout(hidden, 0.5, self.training))


@pytest.mark.parametrize("kind", [Centred, Positional, Moving, Dropping])
def test_a_forward_whose_rows_are_not_by_themselves_is_left_alone(kind: Any) -> None:
    """With a reason; and that it was asked changes neither numbers that are drawn nor what it keeps."""
    plain = tiny_models.llama()
    head = kind(32, 97, bias=False)
    head.load_state_dict(plain.lm_head.state_dict(), strict=False)
    plain.lm_head = head
    model = patch_model(copy.deepcopy(plain))
    reason = rf"logits are computed after all, for a forward of its own, {kind.__name__}, which (gives other|raises)"
    for number in range(2):
        found = []
        for one in (plain, model):
            torch.manual_seed(7)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found.append(step(one))
        assert_same(found[1], found[0])
        assert [str(one.message) for one in said if "chunked_head" in str(one.message)] == [] or number == 0
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert model.chunked_head.fused == 0 and re.search(reason, str(model.chunked_head.warnings_by_occasion))
    assert re.search(reason, str(explain_model(plain).warnings))


def test_a_forward_that_changes_is_asked_again() -> None:
    """And what no state tells is an error rather than other numbers."""
    kind: Any = type("Kind", (nn.Linear,), {"forward": lambda self, x: F.linear(x, self.weight)})
    model = tiny_models.llama()
    model.lm_head.__class__ = kind
    patch_model(model, when="training")
    assert model(input_ids=IDS).logits.dtype == torch.float32
    kind.forward = lambda self, x: F.linear(x.double(), self.weight.double())
    assert model(input_ids=IDS).logits.dtype == torch.float64
    wide = [False]
    kind.forward = lambda self, x: F.linear(x, self.weight).to(torch.float64 if wide[0] else torch.float32)
    logits = model(input_ids=IDS).logits
    wide[0] = True
    with pytest.raises(RuntimeError, match=r"the head gives 97 columns of torch\.float64 where it gave 97 of"):
        logits.materialise()


@pytest.mark.parametrize("child", ["lora_A", "base_layer"])
@pytest.mark.filterwarnings("ignore:chunked_head")
def test_hooks_inside_of_a_head_see_what_they_would(child: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(6)
    plain = peft.get_peft_model(tiny_models.llama(), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    model = patch_model(copy.deepcopy(plain))
    shapes: list[list[Any]] = [[], []]
    for one, seen in zip((plain, model), shapes, strict=True):
        module = getattr(one.base_model.model.lm_head, child)
        module = module["default"] if child == "lora_A" else module
        module.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(tuple(inputs[0].shape)))
        step(one)
    assert shapes[1] == shapes[0] == [(2, 11, 32)]


def test_lazy_logits_say_whether_they_have_a_gradient() -> None:
    plain, model = pair(when="always", strict=True)
    for one in (plain, model):
        logits = one(input_ids=IDS).logits
        assert logits.requires_grad and not logits.is_leaf and logits[:, 1:].requires_grad
        assert not logits.detach().requires_grad and logits.detach().is_leaf
        with torch.no_grad():
            assert not one(input_ids=IDS).logits.requires_grad
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    frozen = model(input_ids=IDS).logits
    assert isinstance(frozen, LazyLogits) and not frozen.requires_grad and frozen.is_leaf
    model.lm_head.weight.requires_grad_()
    assert model(input_ids=IDS).logits.requires_grad
