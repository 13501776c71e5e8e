"""patch_model against the model as it was: losses, gradients, logits, and whatever else a forward is for."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tiers import crossed
from tiny_models import LazyLogits, assert_same, pair, step, tokens, transformers
from tracking import no_host_synchronisation

from chunked_head import losses, metrics, patch_model, unpatch_model

MODELS = [tiny_models.llama, tiny_models.gemma2, tiny_models.granite]


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="chunked_head")
        yield


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": torch.tensor(7)}, {"return_dict": False}], ids=str)
def test_a_step(make: Callable[[], Any], more: dict[str, Any]) -> None:
    plain, patched = pair(make)
    theirs, ours = step(plain, scale=0.37, **more), step(patched, scale=0.37, **more)
    assert_same(ours, theirs)
    assert patched.chunked_head.fused == 1 and patched.chunked_head.materialised == 0
    logits = ours.output[1]
    assert isinstance(logits, LazyLogits) and logits.shape == (2, 11, 97) and logits.dtype == torch.float32
    torch.testing.assert_close(logits.materialise(), theirs.output[1], rtol=0, atol=0)


def test_it_says_what_it_did() -> None:
    model = patch_model(tiny_models.gemma2())
    assert "no loss so far" in str(model.chunked_head)
    step(model)
    assert str(model.chunked_head) == (
        "Gemma2ForCausalLM: lm_head [97, 32], tied; lazy logits; scale 1, softcap 3; 1 losses fused, "
        "logits computed 0 times"
    )
    granite = patch_model(tiny_models.granite())
    step(granite)
    assert granite.chunked_head.tail.logit_scale == pytest.approx(1 / 3)


def test_unpatched_it_is_what_it_was() -> None:
    model = tiny_models.llama()
    kinds, names, before = type(model), list(model.state_dict()), step(model)
    assert unpatch_model(model) is model
    for _ in range(2):  # again changes nothing
        assert patch_model(model) is model
    assert type(model).__name__ == kinds.__name__ and list(model.state_dict()) == names
    assert isinstance(model, kinds) and isinstance(model.lm_head, torch.nn.Linear)
    unpatch_model(model)
    assert type(model) is kinds and type(model.lm_head) is torch.nn.Linear and not hasattr(model, "chunked_head")
    after = step(model)
    assert torch.equal(after.loss, before.loss) and not isinstance(after.output.logits, LazyLogits)


def test_without_labels_nothing_is_lazy() -> None:
    model = tiny_models.llama()
    ids = tokens()["input_ids"]
    plain = copy.deepcopy(model).eval()
    patch_model(model)
    step(model)  # a model that made a loss of its own says nothing of forwards without labels
    for training in (True, False):
        logits = model.train(training)(input_ids=ids).logits
        assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits, plain(input_ids=ids).logits, rtol=0, atol=0)
    kept = model(input_ids=ids, logits_to_keep=3).logits
    torch.testing.assert_close(kept, logits[:, -3:], rtol=1e-5, atol=1e-6)
    for how in ({"do_sample": False}, {"num_beams": 2}):
        ours, theirs = (m.generate(ids, max_new_tokens=4, **how) for m in (model, plain))
        assert torch.equal(ours, theirs)


def test_evaluation_with_labels_is_fused() -> None:
    plain = tiny_models.gemma2().eval()
    model = patch_model(copy.deepcopy(plain))
    with torch.no_grad():
        ours, theirs = model(**tokens()), plain(**tokens())
        torch.testing.assert_close(ours.loss, theirs.loss)
    # read outside of no_grad they are as they were made
    assert not ours.logits.materialise().requires_grad
    assert torch.equal(ours.logits.argmax(-1), theirs.logits.argmax(-1))
    assert torch.equal(ours.logits.argmax(dim=-1, keepdim=True), theirs.logits.argmax(-1, keepdim=True))
    assert model.chunked_head.fused == 1


def test_reading_logits_computes_them_and_says_so_once() -> None:
    plain, model = pair()
    logits = model(**tokens()).logits
    with pytest.warns(
        UserWarning, match=r"LlamaForCausalLM's logits are computed after all, for softmax at test_patch"
    ):
        ours = logits.softmax(-1)
    torch.testing.assert_close(ours, plain(**tokens()).logits.softmax(-1), rtol=0, atol=0)
    assert model(**tokens()).logits.softmax(-1).shape == ours.shape  # once
    assert model.chunked_head.materialised == 2 and model.chunked_head.reasons[0].startswith("softmax at test_patch")
    ours.sum().backward()  # with their gradients


def test_strict_raises_where_logits_would_be_computed() -> None:
    model = patch_model(tiny_models.llama(), strict=True)
    output = model(**tokens())
    with pytest.raises(RuntimeError, match=r"would be computed for softmax at test_patch_model\.py:.*materialise"):
        output.logits.softmax(-1)
    assert output.logits.materialise().softmax(-1).shape == (2, 11, 97)


def test_no_logits_where_none_are_wanted() -> None:
    model = patch_model(tiny_models.llama(), logits=None)
    output = model(**tokens())
    assert output.logits is None and output.loss.requires_grad
    assert not any(torch.is_tensor(part) for part in model(**tokens(), return_dict=False)[1:])
    assert model(input_ids=tokens()["input_ids"]).logits.shape == (2, 11, 97)
    assert isinstance(model.eval()(**tokens()).logits, LazyLogits)


@pytest.mark.parametrize("when", ["labels", "always"])
def test_arguments_given_by_position(when: str) -> None:
    """Labels are labels, and keys and values of tokens before are such."""
    plain, model = pair(when=when, strict=True)
    ids, labels = tokens().values()
    for number in (1, 2):
        ours, theirs = (one(ids, None, None, None, None, labels) for one in (model, plain))
        assert isinstance(ours.logits, LazyLogits) and model.chunked_head.fused == number
        torch.testing.assert_close(ours.loss, theirs.loss)
    cache = plain(ids, use_cache=True).past_key_values
    assert type(model(ids[:, :1], None, None, cache).logits) is torch.Tensor


def test_autocast() -> None:
    plain, model = pair()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, ours = plain(**tokens()), model(**tokens())
    assert ours.logits.dtype == theirs.logits.dtype
    torch.testing.assert_close(ours.logits.materialise(), theirs.logits, rtol=0, atol=0)  # outside of autocast now
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-3, atol=0)
    ours.loss.backward()
    assert model.lm_head.weight.grad.dtype == torch.float32


def test_another_loss_with_metrics() -> None:
    plain = tiny_models.llama()
    loss = losses.cross_entropy(label_smoothing=0.1) + 1e-2 * losses.z_loss()
    model = patch_model(
        copy.deepcopy(plain), loss, metrics=[metrics.entropy(), metrics.accuracy()], memory_budget="1MiB"
    )
    inputs = tokens()
    for _ in range(2):
        ours = step(model, inputs)
    logits = plain(**inputs).logits[:, :-1].flatten(0, 1)
    labels = inputs["labels"][:, 1:].flatten()
    counts = labels != -100
    z = (logits.logsumexp(-1) ** 2)[counts].mean()
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1) + 1e-2 * z
    torch.testing.assert_close(ours.loss, expected.detach(), rtol=1e-5, atol=0)
    logp = logits.log_softmax(-1)[counts]
    taken = model.chunked_head.take_metrics()
    assert taken["entropy"].count == 2 * counts.sum()  # of both steps
    torch.testing.assert_close(taken["entropy"].value, -(logp.exp() * logp).sum(-1).mean().detach(), rtol=1e-5, atol=0)
    right = (logits.argmax(-1) == labels)[counts].float().mean()
    torch.testing.assert_close(taken["accuracy"].value, right)
    assert not model.chunked_head.take_metrics()


@pytest.mark.parametrize("when", ["labels", "training"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_users_own_cross_entropy_is_plain(reduction: str, when: str) -> None:
    """Beside the model's own loss, which alone is another and is measured."""
    plain = tiny_models.llama()
    loss = losses.cross_entropy() + losses.z_loss()
    model = patch_model(copy.deepcopy(plain), loss, metrics=[metrics.entropy()], when=when, strict=True)
    inputs, found = tokens(), []
    for one in (plain, model):
        output = one(**inputs)
        logits, labels = output.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        values = F.cross_entropy(logits, labels, label_smoothing=0.1, reduction=reduction)
        own = output.loss
        if one is plain:
            own = own + (logits.logsumexp(-1) ** 2)[labels != -100].mean()
        (own + values.sum()).backward()
        found.append([own.detach(), values.detach(), one.lm_head.weight.grad])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert model.chunked_head.take_metrics()["entropy"].count == 17
    assert model.chunked_head.fused == 2


ASKED: dict[str, dict[str, Any]] = {"loss=": {"loss": losses.focal()}, "metrics=": {"metrics": [metrics.entropy()]}}


def own_loss(model: Any, **given: Any) -> torch.Tensor:
    """Made by the user, of logits."""
    inputs = tokens()
    logits = model(input_ids=inputs["input_ids"], **given).logits[:, :-1].float()
    return F.cross_entropy(logits.reshape(-1, 97), inputs["labels"][:, 1:].reshape(-1))


@crossed(when=["labels", "training"], asked=ASKED)
def test_what_has_no_part_in_the_loss_is_refused(asked: str, when: str) -> None:
    """In every training forward without labels, until the model has made a loss of its own."""
    model = patch_model(tiny_models.llama(), when=when, **ASKED[asked])
    message = rf"{asked} of patch_model has no part.*test_patch_model\.py:\d+.*patch_model without {asked}.*patch_trl"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            own_loss(model)
    with torch.no_grad():
        own_loss(model)
    step(model)  # its own loss
    own_loss(model).backward()  # and a loss beside it


def test_a_forward_that_fuses_nothing_is_said_once() -> None:
    model = patch_model(tiny_models.llama())
    message = (
        r"outside of LlamaForCausalLM's forward \(the forward that test_patch_model\.py:\d+ called .* is not fused"
    )
    with pytest.warns(UserWarning, match=message) as said:
        own_loss(model).backward()
    assert "patch_trl() for TRL's SFT, DPO, KTO, GRPO, RLOO and distillation trainers" in str(said[0].message)
    own_loss(model).backward()
    step(model)
    fusing = patch_model(tiny_models.llama())
    step(fusing)
    own_loss(fusing).backward()
    outside = patch_model(tiny_models.llama(), when="training")
    own_loss(outside).backward()
    assert outside.chunked_head.fused == 1


def selective(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As some trainers spell log-probabilities, row by row."""
    chosen = torch.gather(logits, dim=-1, index=ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def negative(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logp = -F.log_softmax(logits / 0.7, dim=-1)
    return -(
        logp.gather(-1, ids[..., None])[..., 0] + 0.1 * logp.sum(dim=-1, keepdim=True, dtype=torch.float32)[..., 0]
    )


SPELLINGS: dict[str, Callable[..., torch.Tensor]] = {
    "selective": selective,
    "negative": negative,
    "method": lambda logits, ids: logits.log_softmax(-1).gather(index=ids[..., None], dim=-1).squeeze(-1) * 2,
    "nll": lambda logits, ids: F.nll_loss(
        F.log_softmax(logits.flatten(0, 1), dim=-1, dtype=torch.float32), ids.flatten(), reduction="none"
    ),
}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_log_probabilities_outside_of_the_forward(spelling: str, make: Callable[[], Any]) -> None:
    plain, model = pair(make, when="training", strict=True)
    ids, found = tokens()["input_ids"], []
    for one in (plain, model):
        value = SPELLINGS[spelling](one(input_ids=ids[:, :-1]).logits, ids[:, 1:])
        (value * torch.linspace(-1, 1, value.numel()).view(value.shape)).sum().backward()
        found.append((value.detach(), one.lm_head.weight.grad, one.model.layers[0].mlp.up_proj.weight.grad))
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * theirs.abs().max().item())
    assert model.chunked_head.fused >= 1 and model.chunked_head.materialised == 0


def test_log_probabilities_of_changed_ids() -> None:
    """Neither stale statistics nor ids that gather would refuse."""
    model = patch_model(tiny_models.llama(), when="training")
    ids = tokens()["input_ids"].clone()
    logp = model(input_ids=ids).logits.log_softmax(-1)
    first = logp.gather(-1, ids[..., None])
    index = ids[..., None].clone()
    torch.testing.assert_close(logp.gather(-1, index), first)
    index[0, 0] = 1
    again = logp.gather(-1, index)
    assert again[0, 0] != first[0, 0] and torch.equal(again[1], first[1])
    with torch.no_grad():
        assert not logp.gather(-1, index).requires_grad
    with pytest.raises(IndexError):
        logp.gather(-1, torch.full_like(index, 97))


def test_new_heads_are_found() -> None:
    plain = tiny_models.llama(tie_word_embeddings=False)
    model = patch_model(copy.deepcopy(plain))
    step(model)
    for one in (plain, model):
        torch.manual_seed(5)
        one.resize_token_embeddings(103, mean_resizing=False)
    assert_same(step(model), step(plain))
    assert model.chunked_head.fused == 2 and "[103, 32]" in str(model.chunked_head)


def test_checkpoints_are_those_of_the_model(tmp_path: Any) -> None:
    model = patch_model(tiny_models.llama())
    step(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM and loaded.config.architectures == ["LlamaForCausalLM"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_what_is_not_understood_stays_as_it_is() -> None:
    model = tiny_models.llama()
    kind = type(model)
    model.get_output_embeddings = lambda: model.model.embed_tokens
    with pytest.warns(UserWarning, match="leaves LlamaForCausalLM as it is: its output embeddings are its input"):
        patch_model(model)
    assert type(model) is kind and model.chunked_head.mechanism.startswith("none: its output embeddings")
    step(model)
    unpatch_model(model)
    with pytest.warns(UserWarning, match="Linear has no get_output_embeddings"):
        patch_model(torch.nn.Linear(3, 4))
    for asked, given in ASKED.items():
        with pytest.raises(ValueError, match=f"{asked} of patch_model has no effect on this Linear: Linear has no get"):
            patch_model(torch.nn.Linear(3, 4), **given)


def test_a_loss_that_bypasses_the_head_is_said() -> None:
    class Bypassing(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            logits = F.linear(self.model(input_ids).last_hidden_state, self.lm_head.weight)
            return (F.cross_entropy(logits.flatten(0, 1), labels.flatten()),)

    model = patch_model(Bypassing(transformers.LlamaConfig(**tiny_models.SIZES)))
    with pytest.warns(UserWarning, match="given labels and computed no cross-entropy of lm_head"):
        model(**tokens())
    model(**tokens())  # once
    for asked, given in ASKED.items():
        with pytest.raises(RuntimeError, match=f"{asked} of patch_model had no effect: Bypassing was given labels"):
            patch_model(model, **given)(**tokens())


@pytest.mark.parametrize("asked", ASKED)
def test_what_logits_computed_after_all_would_leave_out_is_refused(asked: str) -> None:
    """Here for a hook of the head's that has to see them."""
    model = patch_model(tiny_models.llama(), **ASKED[asked])
    model.lm_head.register_forward_hook(lambda head, inputs, logits: logits * 2)
    with (
        pytest.warns(UserWarning, match="are computed after all, for a forward hook"),
        pytest.raises(RuntimeError, match=rf"{asked} of patch_model had no effect.*computed for a forward hook"),
    ):
        model(**tokens())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"softcap": 3.0}, TypeError, "unknown option 'softcap'.*memory_budget.*the model's own"),
        ({"loss": "cross_entropy"}, TypeError, "made of chunked_head.losses, got str"),
        ({"loss": losses.grpo()}, ValueError, "needs advantages.*labels alone.*linear_loss"),
        ({"metrics": [metrics.kl_old()]}, ValueError, "needs old_logprobs"),
        ({"metrics": ["entropy"]}, TypeError, "call its factory"),
        ({"metrics": metrics.entropy()}, TypeError, "must be a list of chunked_head.metrics, got one, 'entropy'"),
        ({"memory_budget": "lots"}, ValueError, "memory_budget must be bytes or a size"),
        ({"when": "sometimes"}, ValueError, "'labels', 'training', 'always'"),
        ({"logits": "none"}, ValueError, "logits of patch_model must be one of 'lazy', None, got 'none'"),
        ({"metrics": [metrics.entropy()] * 2}, ValueError, "two of the metrics are called 'entropy'"),
        ({"strict": "yes"}, TypeError, "strict must be True or False, got 'yes'"),
    ],
)
def test_wrong_options(given: dict[str, Any], error: type[Exception], message: str) -> None:
    model = tiny_models.llama()
    with pytest.raises(error, match=message):
        patch_model(model, **given)
    assert type(model) is transformers.LlamaForCausalLM


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda model: "model", r"must be a torch\.nn\.Module, got str"),
        (torch.compile, r"the model itself, got the OptimizedModule that torch\.compile made.*model\._orig_mod"),
        (torch.nn.DataParallel, r"got the DataParallel that torch\.nn\.DataParallel made.*or pass model\.module"),
    ],
)
@pytest.mark.parametrize("function", [patch_model, unpatch_model], ids=lambda function: function.__name__)
def test_what_is_no_model(function: Any, wrap: Any, message: str) -> None:
    model = tiny_models.llama()
    with pytest.raises(TypeError, match=f"model of {function.__name__} .*{message}"):
        function(wrap(model))
    assert type(model) is transformers.LlamaForCausalLM


def test_a_model_whose_forward_is_hung_on_it_names_who_did() -> None:
    model = tiny_models.llama()
    before = model.forward

    def hung(*args: Any, **kwargs: Any) -> Any:
        return before(*args, **kwargs)

    model.forward = hung
    with pytest.warns(
        UserWarning, match=r"its forward is hung on the instance by hung at test_patch_model\.py:\d+ and"
    ):
        patch_model(model)
    with pytest.raises(
        ValueError, match=r"metrics= of patch_model has no effect on this LlamaForCausalLM: .* by hung at"
    ):
        patch_model(model, metrics=[metrics.entropy()])


# ---- on a GPU: bf16 and fp32 beside the plain model in fp32


def on_a_gpu() -> dict[str, Any]:
    return {name: value.cuda() for name, value in tokens(4, 33).items()}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.gpu
def test_a_step_on_a_gpu(make: Callable[[], Any], dtype: torch.dtype) -> None:
    plain = make().cuda()
    exact = step(plain, on_a_gpu())
    theirs = step(copy.deepcopy(plain).to(dtype), on_a_gpu())
    patched = patch_model(copy.deepcopy(plain).to(dtype), strict=True, metrics=[metrics.entropy()])
    ours = step(patched, on_a_gpu())
    assert patched.chunked_head.fused == 1
    assert ours.grads.keys() == exact.grads.keys()
    for name, grad in exact.grads.items():
        allowed = 2 * (theirs.grads[name] - grad).norm() + 1e-5 * grad.norm()
        assert (ours.grads[name] - grad).norm() <= allowed, name
    assert (ours.loss - exact.loss).abs() <= 2 * (theirs.loss - exact.loss).abs() + 1e-3


@pytest.mark.gpu
def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's layers wait as they do without the patch; its head and its loss do not."""
    patched = patch_model(tiny_models.llama().cuda(), strict=True, metrics=[metrics.accuracy()])
    given = on_a_gpu()
    output = patched.model(given["input_ids"])
    hidden = output.last_hidden_state = output.last_hidden_state.detach().requires_grad_()
    monkeypatch.setattr(patched.model, "forward", lambda **_: output)

    def run() -> None:
        patched(**given).loss.backward()

    run()
    with no_host_synchronisation():
        run()
    assert hidden.grad.abs().sum() > 0 and patched.chunked_head.fused == 2
