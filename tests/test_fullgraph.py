"""Calls inside of ``torch.compile(fullgraph=True)``: the same values, gradients, parts and metrics as outside of it."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import chunked_head.evaluate
import chunked_head.graph.operators
from chunked_head import (
    ChunkedHead,
    LossOutput,
    gathered_topk_kl,
    linear_cross_entropy,
    linear_logprobs,
    linear_loss,
    losses,
    metrics,
)
from chunked_head.graph.recipes import described, spelt

pytestmark = pytest.mark.compiled
VOCAB, HIDDEN, SEGMENTS = 301, 24, 4


class Data(NamedTuple):
    """Two sequences and what goes with them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    target: Tensor
    class_weights: Tensor
    token_weights: Tensor
    fields: dict[str, Tensor]
    scalar: Tensor


def make_data(dtype: torch.dtype = torch.float32, device: str = "cpu", tokens: int = 21, seed: int = 5) -> Data:
    made = torch.Generator().manual_seed(seed)
    shape = (2, tokens)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=made).to(device)

    target = torch.randint(0, VOCAB, shape, generator=made)
    target[0, :3] = -100
    fields = {
        "old_logprobs": normal(*shape) * 0.2 - 5.0, "advantages": normal(*shape), "mask": normal(*shape) > -1,
        "segments": torch.randint(-1, SEGMENTS, shape, generator=made).to(device),
        "teacher_ids": torch.randint(0, VOCAB, (*shape, 3), generator=made).to(device),
        "teacher_logprobs": normal(*shape, 3) * 0.1 - 3.0,
        "teacher_hidden": normal(*shape, 8), "teacher_weight": normal(VOCAB, 8),
    }  # fmt: skip
    operands = (normal(*shape, HIDDEN), normal(VOCAB, HIDDEN), normal(VOCAB))
    hidden, weight, bias = (t.to(dtype).requires_grad_() for t in operands)
    return Data(
        hidden, weight, bias, target.to(device), normal(VOCAB).abs(), normal(*shape).abs(), fields, normal().abs() + 1
    )


def chosen(data: Data, *names: str) -> dict[str, Tensor]:
    return {name: data.fields[name] for name in names}


def plain(d: Data) -> Tensor:
    return linear_cross_entropy(d.hidden, d.weight, d.target, bias=d.bias, label_smoothing=0.1, z_loss=1e-3, shift=1)


def weighted(d: Data) -> Tensor:
    return linear_cross_entropy(
        d.hidden * 2, d.weight, d.target, class_weights=d.class_weights, token_weights=d.token_weights,
        label_smoothing=0.2, normalizer=d.scalar, upstream=d.scalar,
    )  # fmt: skip


def unreduced(d: Data) -> Tensor:
    return linear_cross_entropy(d.hidden, d.weight, d.target, reduction="none", shift=1, softcap=9.0)


def grpo(d: Data) -> LossOutput:
    """Losses and metrics made in the compiled function."""
    return linear_loss(
        d.hidden, d.weight, d.target,
        losses.grpo(clip_low=0.2, clip_high=0.28) + losses.z_loss().times(d.scalar) - 0.01 * losses.entropy(),
        batch=chosen(d, "old_logprobs", "advantages", "mask"), normalizer=17.0,
        metrics=[metrics.clip_fraction(), metrics.effective_sample_size(), metrics.logprob(reduce="min")],
    )  # fmt: skip


OUTSIDE = 0.5 * losses.gspo() + losses.cross_entropy(token_scaling=True, name="imitation") * torch.tensor(0.25)
MEASURED = (metrics.kl_old(weighting="segment"), metrics.accuracy(), metrics.perplexity(weighting="segment"))


def gspo(d: Data) -> LossOutput:
    """Losses and metrics made before; gradients that wait for all statistics."""
    return linear_loss(
        d.hidden, d.weight, d.target, OUTSIDE, batch=chosen(d, "old_logprobs", "advantages", "segments"),
        num_segments=SEGMENTS, metrics=MEASURED, chunk_tokens=16, bias=d.bias,
    )  # fmt: skip


def distilled(d: Data) -> LossOutput:
    loss = losses.topk_kl(token_weights=d.token_weights) + 0.5 * losses.jsd(temperature=2.0)
    names = ("teacher_ids", "teacher_logprobs", "teacher_hidden", "teacher_weight")
    return linear_loss(d.hidden, d.weight, None, loss, batch=chosen(d, *names))


@losses.custom(scope="token")
def push(stats: Any, batch: Any) -> Tensor:
    return -batch["advantages"] * stats.logprob


def custom(d: Data) -> LossOutput:
    return linear_loss(d.hidden, d.weight, d.target, push, batch=chosen(d, "advantages"), reduction="sum")


def logprobs(d: Data) -> Any:
    return linear_logprobs(
        d.hidden, d.weight, d.target, entropy=True, lse=True, argmax=True, top_k=3, mask=d.fields["mask"], shift=1
    )


def logprobs_alone(d: Data) -> Tensor:
    return linear_logprobs(d.hidden, d.weight, d.target, temperature=0.7) * d.fields["advantages"]


CALLS: list[Callable[[Data], Any]] = [
    plain, weighted, unreduced, grpo, gspo, distilled, custom, logprobs, logprobs_alone,
]  # fmt: skip


def named(out: Any) -> dict[str, Tensor]:
    """Everything that a call has returned."""
    if isinstance(out, Tensor):
        return {"value": out}
    if isinstance(out, LossOutput):
        found = {"loss": out.loss, **{f"part {name}": part for name, part in out.parts.items()}}
        for name, metric in out.metrics.items():
            given = {"sum": metric.sum, "count": metric.count, "extremum": metric.extremum, "value": metric.value}
            found |= {f"metric {name} {key}": value for key, value in given.items() if value is not None}
        return found
    return out._asdict()


def outcome(call: Callable[[Data], Any], data: Data, upstream: float) -> tuple[Any, list[Tensor | None]]:
    out = call(data)
    leaves = [t for t in (data.hidden, data.weight, data.bias) if t.requires_grad]
    total = sum(value.sum() for value in named(out).values() if value.requires_grad)
    return out, list(torch.autograd.grad(total * upstream, leaves, allow_unused=True))


def assert_alike(
    call: Callable[[Data], Any], data: Data, upstream: float = 0.37, exact: bool = True, **how: Any
) -> None:
    """What the compiled call gives beside what the call gives; to the bit on one backend of one device."""
    torch._dynamo.reset()
    expected, grads = outcome(call, data, upstream)
    found, ours = outcome(torch.compile(call, fullgraph=True, **how), data, upstream)
    assert type(found) is type(expected)
    assert list(named(found)) == list(named(expected))
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    for name, value in named(expected).items():
        torch.testing.assert_close(
            named(found)[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )
        assert named(found)[name].requires_grad == value.requires_grad, name
    for mine, grad in zip(ours, grads, strict=True):
        assert (mine is None) == (grad is None)
        if grad is not None:
            assert mine.dtype == grad.dtype
            limit = 1e-6 if grad.dtype == torch.float32 else 4e-3
            assert (mine.double() - grad.double()).norm() <= (0.0 if exact else limit) * grad.double().norm()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_fullgraph(call: Callable[[Data], Any]) -> None:
    # gradients computed again are tiled otherwise where they are computed in the forward pass
    assert_alike(call, make_data(), exact=call is not gspo, backend="aot_eager")


@pytest.mark.parametrize("call", [plain, grpo, logprobs], ids=lambda call: call.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inductor(call: Callable[[Data], Any], dtype: torch.dtype) -> None:
    assert_alike(call, make_data(dtype), exact=False)


def test_compiled_arithmetic_in_a_compiled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the operator compiles the losses' arithmetic when it first runs, in the middle of the outer graph."""
    real, run = torch.compile, chunked_head.evaluate.run
    monkeypatch.setattr(torch, "compile", lambda function, **how: real(function, **({"backend": "aot_eager"} | how)))
    monkeypatch.setattr("chunked_head.objective.run", lambda s, leaves, i, fused: run(s, leaves, i, True))
    chunked_head.evaluate.COMPILED.clear()
    data = make_data()
    for call in (grpo, plain):
        found, ours = outcome(torch.compile(call, fullgraph=True), data, 0.37)
        assert chunked_head.evaluate.COMPILED and not chunked_head.evaluate.SLOW
        with torch.compiler.set_stance("force_eager"):
            expected, grads = outcome(call, data, 0.37)
        for name, value in named(expected).items():
            torch.testing.assert_close(named(found)[name], value)
        for mine, grad in zip(ours[:2], grads[:2], strict=True):
            torch.testing.assert_close(mine, grad)


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu(call: Callable[[Data], Any], dtype: torch.dtype) -> None:
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
    "options",
    [{}, {"accumulate_dtype": torch.float32}, {"memory_budget": "300KiB"}, {"chunk_tokens": 8}],
    ids=str,
)
def test_gradients_wait_as_outside(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """In fp32 where the plan says so, and rounded once: the same bits with an upstream gradient of 0.37."""

    def call(d: Data) -> Tensor:
        # half precision's gradients must survive a denominator and a loss scale
        loss = linear_cross_entropy(d.hidden, d.weight, d.target, normalizer=float(1 << 20), **options)
        return loss * float(1 << 16)

    assert_alike(call, make_data(dtype, tokens=40), exact="memory_budget" not in options, backend="aot_eager")


def test_other_lengths_share_a_graph() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def call(d: Data) -> Tensor:
        return plain(d) + unreduced(d).sum()

    step = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (21, 22, 64, 3, 130):
        data = make_data(tokens=tokens)
        (expected, grads), (found, ours) = outcome(call, data, 0.37), outcome(step, data, 0.37)
        assert found == expected
        for mine, grad in zip(ours, grads, strict=True):
            torch.testing.assert_close(mine, grad, rtol=0, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_lengths_at_which_gradients_wait_in_another_dtype() -> None:
    """bf16 gradients of one chunk wait as they are, of several in fp32: a graph each, and no length goes wrong."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def call(d: Data) -> Tensor:
        return linear_cross_entropy(d.hidden, d.weight, d.target, memory_budget="200KiB")

    step = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 6, 17, 33, 70, 71, 150, 151, 152, 153, 154, 155):
        data = make_data(torch.bfloat16, tokens=tokens)
        (expected, grads), (found, ours) = outcome(call, data, 0.37), outcome(step, data, 0.37)
        torch.testing.assert_close(found, expected)
        for mine, grad in zip(ours[:2], grads[:2], strict=True):
            assert mine is not None and grad is not None
            assert (mine.double() - grad.double()).norm() <= 6e-3 * grad.double().norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


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
        losses.custom(lambda stats, batch: stats.lse, scope="token"),
        losses.custom(lambda stats, batch: stats.lse * 2, scope="token"),
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


def test_activation_checkpointing() -> None:
    def call(d: Data) -> Tensor:
        def region(hidden: Tensor, weight: Tensor) -> Tensor:
            return linear_cross_entropy(torch.tanh(hidden), weight, d.target)

        return checkpoint(region, d.hidden, d.weight, use_reentrant=False)

    assert_alike(call, make_data(), backend="aot_eager")


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


def test_gathered_logits() -> None:
    student, teacher = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3).log_softmax(-1)
    call = torch.compile(lambda x: gathered_topk_kl(x, teacher, normalize="topk"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(student), gathered_topk_kl(student, teacher, normalize="topk"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("upstream", [1.0, 0.37])
def test_handed_over_without_a_copy(dtype: torch.dtype, upstream: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled backward scales gradients where they are: what arrives lies in the memory that forward filled."""
    filled, sweep = [], chunked_head.graph.operators.sweep

    def watched(*args: Any) -> Any:
        stats, grads = sweep(*args)
        filled.append((grads.hidden.data_ptr(), grads.weight.data_ptr()))
        return stats, grads

    monkeypatch.setattr(chunked_head.graph.operators, "sweep", watched)
    torch._dynamo.reset()
    hidden, weight = (torch.randn(n, 64, dtype=dtype, requires_grad=True) for n in (48, VOCAB))
    target = torch.randint(0, VOCAB, (48,))
    (torch.compile(linear_cross_entropy, fullgraph=True)(hidden, weight, target) * upstream).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert filled == [(hidden.grad.data_ptr(), weight.grad.data_ptr())]


ERRORS: dict[str, tuple[Callable[[Data], Any], str]] = {
    "shape": (lambda d: linear_cross_entropy(d.hidden, d.weight, d.target[:1]), r"target must have shape \(2, 21\)"),
    "reduction": (lambda d: linear_cross_entropy(d.hidden, d.weight, d.target, reduction="avg"), "must be one of"),
    "normalizer": (lambda d: linear_cross_entropy(d.hidden, d.weight, d.target, normalizer=-1.0), "must be finite"),
    "field": (lambda d: linear_loss(d.hidden, d.weight, d.target, losses.grpo()), "needs batch"),
    "top_k": (lambda d: linear_logprobs(d.hidden, d.weight, d.target, top_k=0), "top_k must be in"),
    "gradient": (
        lambda d: linear_cross_entropy(d.hidden, d.weight, d.target, token_weights=d.hidden[..., 0]),
        "takes no gradient",
    ),
    "function": (
        lambda d: linear_loss(d.hidden, d.weight, d.target, losses.custom(lambda s, b: s.lse, scope="token")),
        "make the loss before the compiled function",
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


def test_a_loss_of_a_function_breaks_the_graph() -> None:
    """Without ``fullgraph`` it may be made in the compiled function."""

    def call(d: Data) -> Tensor:
        loss = losses.custom(lambda stats, batch: stats.lse, scope="token")
        return linear_loss(d.hidden, d.weight, d.target, loss).loss

    data = make_data()
    assert torch.compile(call, backend="aot_eager")(data) == call(data)


def test_keys_tell_arguments_apart() -> None:
    values = [0, 0.0, -0.0, False, None, "0", (0,), frozenset({0}), torch.float32, losses.FIELDS["mask"]]
    functions = [lambda: 1, lambda: 2, torch.sin, plain, grpo]
    texts = [spelt(value) for value in [*values, *functions]]
    assert len(set(texts)) == len(texts)
    assert spelt(plain) == spelt(plain)


SPELL = (
    "from chunked_head import losses, metrics; from chunked_head.graph.recipes import described, spelt; "
    "loss = losses.grpo() + losses.topk_kl(); print(spelt(described([loss, metrics.accuracy()], [])))"
)


def test_keys_are_those_of_other_processes() -> None:
    """Compiled graphs are kept on disk, keys and all."""
    environment = dict(os.environ) | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run([sys.executable, "-c", SPELL], env=environment, capture_output=True, text=True, check=True)
    here = spelt(described([losses.grpo() + losses.topk_kl(), metrics.accuracy()], []))
    assert there.stdout.strip() == here
