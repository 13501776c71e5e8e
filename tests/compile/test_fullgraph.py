"""Calls inside of ``torch.compile(fullgraph=True)``: the same values, gradients, parts and metrics as outside of it."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_calls import (
    CALLS,
    HIDDEN,
    VOCAB,
    Data,
    assert_alike,
    grpo,
    gspo,
    logprobs,
    make_data,
    named,
    outcome,
    plain,
    unreduced,
)
from tiers import tier
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from chunked_head import ChunkedHead, linear_cross_entropy, linear_loss, losses, metrics
from chunked_head.call.sweep import HeadWork
from chunked_head.compile.recipes import described, text_of


def ways() -> list:
    """Calls with torch's private names and without, in turn; each call both ways exhaustive."""
    found = []
    for i, call in enumerate(CALLS):
        for j, way in enumerate(("private", "documented")):
            found += tier(pytest.param(call, way, id=f"{call.__name__}-{way}"), i % 2 == j)
    return found


@pytest.mark.parametrize(("call", "both_ways"), ways(), indirect=["both_ways"])
def test_fullgraph(call: Callable[[Data], Any], both_ways: None) -> None:
    # gradients computed again are tiled otherwise where they are computed in the forward pass
    assert_alike(call, make_data(), exact=call is not gspo, backend="aot_eager")


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(CALLS)), ids=[call.__name__ for call in CALLS])
def test_on_a_gpu(number: int) -> None:
    """Each call in one dtype in turn."""
    call, dtype = CALLS[number], (torch.bfloat16, torch.float32, torch.float16)[number % 3]
    assert_alike(call, make_data(dtype, "cuda"), exact=False)


@pytest.mark.gpu
def test_reduced_overhead_on_a_gpu() -> None:
    """Replayed as CUDA graphs, forward and backward, with other data at every step."""
    step = torch.compile(grpo, fullgraph=True, mode="reduce-overhead")
    for seed in range(6):
        data = make_data(torch.bfloat16, "cuda", tokens=256, seed=seed)
        expected, grads = outcome(grpo, data, 0.37)
        torch.compiler.cudagraph_mark_step_begin()
        found, ours = outcome(step, data, 0.37)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
        for mine, grad in zip(ours[:2], grads[:2], strict=True):
            assert mine is not None and grad is not None
            assert (mine - grad).norm() <= 4e-3 * grad.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"accumulate_dtype": torch.float32}, {"memory_budget": "300KiB"}, {"chunk_tokens": 8}], ids=str
)
def test_gradients_wait_as_outside(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """In fp32 in fp16 and where the caller names it, rounded once: the same bits with an upstream gradient of 0.37.
    Others are rounded once more where the plan would have them wait in fp32, as it would of several chunks."""

    def call(d: Data) -> Tensor:
        # half precision's gradients must survive a denominator and a loss scale
        loss = linear_cross_entropy(d.hidden, d.weight, d.target, normalizer=float(1 << 20), **options)
        return loss * float(1 << 16)

    twice = "memory_budget" in options or ("chunk_tokens" in options and dtype == torch.bfloat16)
    assert_alike(call, make_data(dtype, tokens=40), exact=not twice, backend="aot_eager")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_lengths_share_a_graph(dtype: torch.dtype) -> None:
    """Of other plans too: bf16 gradients of one chunk are summed as they are, of several in fp32."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    half = dtype == torch.bfloat16

    def call(d: Data) -> Tensor:
        if half:
            return linear_cross_entropy(d.hidden, d.weight, d.target, memory_budget="200KiB")
        return plain(d) + unreduced(d).sum()

    step = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 6, 33, 70, 150, 151, 154, 155) if half else (21, 22, 64, 3, 130):
        data = make_data(dtype, tokens=tokens)
        (expected, grads), (found, ours) = outcome(call, data, 0.37), outcome(step, data, 0.37)
        assert found == expected or half
        torch.testing.assert_close(found, expected)
        for mine, grad in zip(ours[:2], grads[:2], strict=True):
            assert mine is not None and grad is not None
            assert (mine.double() - grad.double()).norm() <= (6e-3 * grad.double().norm() if half else 0.0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_denominator_that_changes() -> None:
    """A number that is another at every step, as the tokens of all micro-batches are, makes no graph of its own."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    data = make_data()

    def call(normalizer: float) -> Tensor:
        return linear_cross_entropy(data.hidden, data.weight, data.target, normalizer=normalizer)

    step = torch.compile(call, fullgraph=True, backend="aot_eager")
    for normalizer in (3.5, 4.5, 7.0, 8.25, 9.0, 0.0):
        assert step(normalizer) == call(normalizer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_other_options_make_another_graph() -> None:
    """Whatever a graph was made for is guarded: options of a loss made elsewhere, its coefficient, its function."""
    data, holder = make_data(), {"loss": losses.focal(gamma=1.0)}

    def call() -> Tensor:
        return linear_loss(data.hidden, data.weight, data.target, holder["loss"]).loss

    step = torch.compile(call, fullgraph=True, backend="aot_eager")
    for loss in (
        losses.focal(gamma=1.0), losses.focal(gamma=2.0), 0.5 * losses.focal(gamma=2.0), losses.cross_entropy(),
        losses.cross_entropy(reduction="sum"), losses.cross_entropy(class_weights=data.class_weights),
    ):  # fmt: skip
        holder["loss"] = loss
        assert step() == call(), loss


def test_losses_made_anew_at_every_step() -> None:
    """Equal losses, made outside: one graph, whatever their tensors hold."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    data = make_data()

    def call(loss: Any, measured: Any) -> Tensor:
        return linear_loss(data.hidden, data.weight, data.target, loss, metrics=measured).loss

    step = torch.compile(call, fullgraph=True, backend="aot_eager")
    for seed in range(4):
        weights = make_data(seed=seed).class_weights
        loss = losses.cross_entropy(label_smoothing=0.1, class_weights=weights)
        loss = loss + losses.z_loss() * torch.tensor(0.1 * seed)
        measured = [metrics.entropy(), metrics.accuracy()]
        assert step(loss, measured) == call(loss, measured)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Model(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self.body = nn.Linear(HIDDEN, HIDDEN)
        self.head = ChunkedHead(HIDDEN, VOCAB, bias=True, z_loss=1e-3, **options)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(hidden)), target, shift=1)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_model_under_autocast(where: str) -> None:
    data, model = make_data(), Model()
    cast = torch.autocast("cpu", torch.bfloat16)
    function = cast(model.forward) if where == "inside" else model
    with cast if where == "outside" else torch.autocast("cpu", enabled=False):
        expected = function(data.hidden, data.target)
        found = torch.compile(function, fullgraph=True, backend="aot_eager")(data.hidden, data.target)
    parameters = list(model.parameters())
    assert found == expected
    for mine, grad in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(mine, grad, rtol=0, atol=0)


@pytest.mark.parametrize("saved", [False, True])
def test_activation_checkpointing(saved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler runs the operator again, unless it is told that its outputs are to be kept."""
    sweeps, sweep = [], HeadWork.sweep

    def watched(*args: Any) -> Any:
        sweeps.append(args)
        return sweep(*args)

    monkeypatch.setattr(HeadWork, "sweep", watched)
    kept = [torch.ops.chunked_head.forward.default]
    how = {"context_fn": functools.partial(create_selective_checkpoint_contexts, kept)} if saved else {}

    def call(d: Data) -> Tensor:
        def region(hidden: Tensor, weight: Tensor) -> Tensor:
            return linear_cross_entropy(torch.tanh(hidden), weight, d.target)

        return checkpoint(region, d.hidden, d.weight, use_reentrant=False, **how)

    data = make_data()
    torch._dynamo.reset()
    found, ours = outcome(torch.compile(call, fullgraph=True, backend="aot_eager"), data, 0.37)
    assert len(sweeps) == (1 if saved else 2)
    expected, grads = outcome(lambda d: linear_cross_entropy(torch.tanh(d.hidden), d.weight, d.target), data, 0.37)
    assert found == expected
    for mine, grad in zip(ours[:2], grads[:2], strict=True):
        torch.testing.assert_close(mine, grad, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_operands(frozen: str) -> None:
    data = make_data()
    getattr(data, frozen).requires_grad_(False)
    assert_alike(plain, data, backend="aot_eager")
    assert_alike(logprobs, data, backend="aot_eager")


def test_without_gradients() -> None:
    data = make_data()
    with torch.no_grad():
        found, expected = torch.compile(logprobs, fullgraph=True, backend="aot_eager")(data), logprobs(data)
    for name, value in named(expected).items():
        assert torch.equal(named(found)[name], value), name


def test_no_tokens() -> None:
    assert_alike(plain, make_data(tokens=3)._replace(
        hidden=torch.zeros(2, 0, HIDDEN, requires_grad=True), target=torch.zeros(2, 0, dtype=torch.int64)
    ), backend="aot_eager")  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("upstream", [1.0, 0.37])
def test_handed_over_without_a_copy(dtype: torch.dtype, upstream: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled backward scales gradients where they are: what arrives lies in the memory that forward filled."""
    filled, sweep = [], HeadWork.sweep

    def watched(*args: Any) -> Any:
        stats, grads = sweep(*args)
        filled.append((grads.hidden.data_ptr(), grads.weight.data_ptr()))
        return stats, grads

    monkeypatch.setattr(HeadWork, "sweep", watched)
    torch._dynamo.reset()
    hidden, weight = (torch.randn(n, 64, dtype=dtype, requires_grad=True) for n in (48, VOCAB))
    target = torch.randint(0, VOCAB, (48,))
    (torch.compile(linear_cross_entropy, fullgraph=True)(hidden, weight, target) * upstream).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert filled == [(hidden.grad.data_ptr(), weight.grad.data_ptr())]


ERRORS: dict[str, tuple[Callable[[Data], Any], str]] = {
    "shape": (lambda d: linear_cross_entropy(d.hidden, d.weight, d.target[:1]), r"target must have shape \(2, 21\)"),
    "gradient": (
        lambda d: linear_cross_entropy(d.hidden, d.weight, d.target, token_weights=d.hidden[..., 0]),
        "takes no gradient",
    ),
    "function": (
        lambda d: linear_loss(d.hidden, d.weight, d.target, losses.custom(lambda s, b: s.lse, scope="token")),
        "no graph holds this call",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_while_the_graph_is_made(name: str) -> None:
    call, message = ERRORS[name]
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(call, fullgraph=True, backend="aot_eager")(make_data())


def test_errors_of_values() -> None:
    data = make_data()
    data.target[0, 5] = VOCAB
    with pytest.raises(IndexError, match="target must be in"):
        torch.compile(plain, fullgraph=True, backend="aot_eager")(data)


def test_keys_tell_arguments_apart() -> None:
    values = [0, 0.0, -0.0, False, None, "0", (0,), frozenset({0}), torch.float32, losses.FIELDS["mask"]]
    texts = [text_of(value) for value in values]
    assert len(set(texts)) == len(texts)


SPELL = (
    "from chunked_head import losses, metrics; from chunked_head.compile.recipes import described, text_of; "
    "loss = losses.grpo() + losses.topk_kl(); print(text_of(described([loss, metrics.accuracy()], [])))"
)


def test_keys_are_those_of_other_processes() -> None:
    """Compiled graphs are kept on disk, keys and all."""
    environment = dict(os.environ) | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run([sys.executable, "-c", SPELL], env=environment, capture_output=True, text=True, check=True)
    here = text_of(described([losses.grpo() + losses.topk_kl(), metrics.accuracy()], []))
    assert there.stdout.strip() == here


def test_compiled_autograd_around_a_call() -> None:
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd", reason="torch has no compiled autograd")
    d = make_data()
    _, plain = outcome(grpo, d, 0.37)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        _, grads = outcome(grpo, d, 0.37)
    torch.testing.assert_close(grads, plain)
