"""What a patched model must not do in silence: other numbers, or other gradients, than the plain model's."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tiny_models import pair, tokens, transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from chunked_head import metrics, patch_model, unpatch_model

IDS = tokens()["input_ids"]


def times_two(x: Any) -> Any:
    return x.mul_(2)


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "to a copy": lambda x: times_two(x.to(torch.float32, copy=True)),
    "to rows of a mask": lambda x: times_two(x[torch.arange(22).view(2, 11) % 3 == 0]),
    "to rows by ids": lambda x: times_two(x[:, torch.tensor([2, 1])]),
    "to a cast to its own dtype": lambda x: times_two(x.to(torch.float32, False, False)),
}


@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.filterwarnings("ignore:chunked_head")
def test_what_is_written(how: str) -> None:
    """Reaches the logits where the tensor's would, and only there."""
    found = []
    for model in pair(when="training"):
        logits = model(input_ids=IDS).logits
        written = WRITTEN[how](logits)
        found.append([getattr(x, "materialise", lambda x=x: x)() for x in (logits, written)])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def added(model: Any, written: bool) -> torch.Tensor:
    """A loss of logits to which a vector was added that changes afterwards."""
    operand = torch.linspace(-1, 2, 97)
    logits = model(input_ids=IDS).logits + operand
    if written:
        operand.copy_(3 * operand.roll(1))
    return F.cross_entropy(logits.flatten(0, 1), IDS.flatten() % 80 + 8)


@pytest.mark.parametrize("compiled", [False, True])
def test_operands_are_of_the_time_of_the_operation(compiled: bool) -> None:
    """Whatever is written to them before the loss: the plain model's of which nothing is."""
    found = []
    for written, model in enumerate(pair(when="training")):
        step = torch.compile(added, backend="aot_eager") if compiled else added
        made = step(model, bool(written))
        made.backward()
        found.append((made.detach(), model.lm_head.weight.grad))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def scribble(model: Any, output: Any) -> None:
    with torch.no_grad():
        output.logits._virtual.hidden.mul_(2)


def optimise(model: Any, output: Any) -> None:
    output.loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()


READ: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "all": lambda x: x[:, 1:].materialise(),
    "a loss": lambda x: F.cross_entropy(x.flatten(0, 1), IDS.flatten()),
    "log-probabilities": lambda x: x.log_softmax(-1).gather(-1, IDS[..., None]),
    "a mean": lambda x: x.mean(-1),
}


def load(model: Any, output: Any) -> None:
    model.load_state_dict(tiny_models.llama().state_dict())


@pytest.mark.parametrize(
    ("change", "what"),
    [(optimise, "head's weight has been"), (load, "head's weight"), (scribble, "hidden states have been")],
)
@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_logits_of_another_time_are_refused(read: Any, change: Any, what: str) -> None:
    """The plain model's are those of its forward; lazy ones would be those of the step after."""
    _, model = pair()
    output = model(**tokens())
    before = output.logits.clone().materialise()
    change(model, output)
    with pytest.raises(RuntimeError, match=f"LlamaForCausalLM's logits are computed when they are read.*{what}"):
        read(output.logits)
    assert before.shape == (2, 11, 97)


class Scaled(nn.Linear):
    """A head that is more than a matrix."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


def scaled() -> Any:
    model = tiny_models.llama()
    model.lm_head.__class__ = Scaled
    return model


@pytest.mark.parametrize("what", ["hidden", "target", "weight", "parameter"])
def test_what_a_loss_in_chunks_was_made_of_is_written_to_before_its_backward(what: str) -> None:
    """An error, as of what autograd has saved: the chunks are computed again."""
    for model in pair(scaled, when="training"):
        hidden = []
        model.lm_head.register_forward_pre_hook(lambda head, inputs, hidden=hidden: hidden.append(inputs[0]))
        logits = model(input_ids=IDS).logits.flatten(0, 1)
        target, weight = IDS.flatten() % 80 + 8, torch.linspace(0.5, 2, 97)
        loss = F.cross_entropy(logits, target, weight)
        if model.__dict__.get("chunked_head"):
            assert model.chunked_head.fused == 1
            hidden = [logits._virtual.hidden]
        written = {"hidden": hidden[0], "target": target, "weight": weight, "parameter": model.lm_head.weight}[what]
        with torch.no_grad():
            written.copy_(written.roll(1, 0))
        with pytest.raises(RuntimeError, match=r"been modified.*inplace"):
            loss.backward()


@pytest.mark.parametrize("read", ["a loss", "log-probabilities", "a mean"])
def test_a_vector_of_another_dtype_than_the_heads(read: str) -> None:
    """Added to logits that were cast to its dtype: no bias of the head, so the logits are computed."""
    found = []
    for model in pair(lambda: tiny_models.llama().bfloat16(), when="training"):
        logits = model(input_ids=IDS).logits.float() + torch.linspace(-1, 2, 97)
        if model.__dict__.get("chunked_head"):
            with pytest.warns(UserWarning, match="are computed after all"):
                value = READ[read](logits)
        else:
            value = READ[read](logits)
        value.sum().backward()
        found.append((value.detach(), model.lm_head.weight.grad))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_logits_of_other_parameters_are_refused() -> None:
    plain, model = pair()
    parameters = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
    ours, theirs = (torch.func.functional_call(one, parameters, (), tokens()) for one in (model, plain))
    torch.testing.assert_close(ours.loss, theirs.loss)
    with pytest.raises(RuntimeError, match="the head's weight is another tensor"):
        ours.logits.materialise()


@pytest.mark.filterwarnings("ignore:chunked_head")
def test_logits_read_after_unpatching() -> None:
    plain, model = pair(when="training")
    inside, outside = model(**tokens()).logits, model(input_ids=IDS).logits
    unpatch_model(model)
    expected = plain(input_ids=IDS).logits
    torch.testing.assert_close(inside.softmax(-1), expected.softmax(-1))
    found, theirs = (F.cross_entropy(x.flatten(0, 1), IDS.flatten()) for x in (outside, expected))
    torch.testing.assert_close(found, theirs)
    torch.testing.assert_close(outside.log_softmax(-1).gather(-1, IDS[..., None]).sum(), -theirs * 22)


@pytest.mark.filterwarnings("ignore:chunked_head")
def test_inference_mode() -> None:
    plain, model = pair()
    with torch.inference_mode():
        inputs = tokens()
        ours, theirs = model(**inputs), plain(**inputs)
        index = inputs["input_ids"][..., None]
        found, expected = (x.logits.log_softmax(-1).gather(-1, index) for x in (ours, theirs))
        torch.testing.assert_close(found, expected)
        later = model(**tokens())
    assert torch.equal(later.logits.materialise(), theirs.logits)
    trained = model(**tokens())
    with torch.inference_mode():
        trained.logits.softmax(-1)
    trained.logits.sum().backward()  # what was computed there has a gradient here
    assert model.lm_head.weight.grad is not None


class Squares(torch.autograd.Function):
    """As kernels of losses on logits are."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0]


@pytest.mark.filterwarnings("ignore:chunked_head")
def test_functions_that_would_give_no_gradient() -> None:
    plain, model = pair()
    output = model(**tokens())
    with pytest.raises(RuntimeError, match=r"Squares\.apply was given lazy logits.*materialise"):
        Squares.apply(output.logits)
    with pytest.raises(RuntimeError, match=r"CheckpointFunction\.apply was given lazy logits"):
        checkpoint(lambda logits: logits.softmax(-1), output.logits, use_reentrant=True)
    output.logits.materialise()
    with pytest.raises(RuntimeError, match=r"Squares\.apply"):
        Squares.apply(output.logits)  # computed, they are still not what has the gradient
    for one in (plain, model):
        logits = one(**tokens()).logits
        Squares.apply(logits if one is plain else logits.materialise()).backward()
    torch.testing.assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad)
    for way in (lambda x: x.clone(), lambda x: x.view_as(x), lambda x: x.detach(), lambda x: x * 1):
        kind = type("Reversed", (torch.autograd.Function,), {"forward": staticmethod(lambda ctx, x, way=way: way(x))})
        with pytest.raises(RuntimeError, match=r"Reversed\.apply was given lazy logits"):
            kind.apply(model(**tokens()).logits)
    passing = types.FunctionType((lambda ctx, x: x.detach()).__code__, {"__name__": "deepspeed.runtime"})
    kind = type("Passing", (torch.autograd.Function,), {"forward": staticmethod(passing)})
    assert kind.apply(model(**tokens()).logits).materialise().requires_grad
    with torch.no_grad():
        torch.testing.assert_close(Squares.apply(model(**tokens()).logits), Squares.apply(plain(**tokens()).logits))


@pytest.mark.parametrize("reentrant", [True, False])
def test_metrics_of_a_forward_in_a_checkpoint_count_once(reentrant: bool) -> None:
    model = patch_model(tiny_models.llama(), metrics=[metrics.entropy()])
    embedded = model.model.embed_tokens(IDS)

    def loss(embedded: Any) -> Any:
        return model(inputs_embeds=embedded, labels=IDS).loss

    for _ in range(2):
        checkpoint(loss, embedded.detach().requires_grad_(), use_reentrant=reentrant).backward()
    assert model.chunked_head.take_metrics()["entropy"].count == 2 * 20


@pytest.mark.parametrize("watch", [lambda x: x.retain_grad(), lambda x: x.register_hook(print)], ids=["keep", "hook"])
def test_gradients_of_lazy_logits_are_not_to_be_had(watch: Callable[[Any], Any]) -> None:
    _, model = pair()
    with pytest.raises(RuntimeError, match=r"on lazy logits is not supported.*logits\.materialise\(\) before"):
        watch(model(**tokens()).logits)


class Inline(transformers.LlamaForCausalLM):
    """Its loss has the logits' dtype, but for autocast; nothing is shifted."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def inline() -> Any:
    torch.manual_seed(3)
    return Inline(transformers.LlamaConfig(**tiny_models.SIZES)).train()


@pytest.mark.gpu
def test_log_probabilities_under_autocast() -> None:
    """Autocast of a GPU computes a log-softmax in fp32."""
    found = []
    for model in pair(when="training"):
        model, ids = model.cuda(), IDS.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logp = model(input_ids=ids).logits.log_softmax(-1)
            found.append(logp.gather(-1, ids[..., None]))
        assert logp.dtype == found[-1].dtype == torch.float32
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-2)
