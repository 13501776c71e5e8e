"""The losses' arithmetic compiled, as it runs on a GPU, beside plain autograd; and how many kernels it takes there."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Place
from loss_cases import LOSS_CASES, LossCase, inputs_of
from torch import Tensor

from chunked_head import LossOutput, linear_loss, losses, metrics
from chunked_head.engine.arithmetic import compiled, evaluate, kernels
from chunked_head.losses import Losses

pytestmark = pytest.mark.compiled
CASES = {case.name: case for case in LOSS_CASES}
CUDA = Place("triton", "cuda")
SIX = (
    metrics.ratio(), metrics.kl_old(), metrics.clip_fraction(side="low"), metrics.clip_fraction(side="high"),
    metrics.advantage(), metrics.effective_sample_size(),
)  # fmt: skip


def outcome(case: LossCase, inputs: Any, measured: tuple = (), **more: Any) -> tuple[LossOutput, list[Tensor]]:
    hidden, weight = (t.detach().clone().requires_grad_() for t in (inputs.hidden, inputs.weight))
    out = linear_loss(
        hidden, weight, inputs.target, case.losses, batch=inputs.batch, num_segments=inputs.num_segments,
        metrics=measured, chunk_tokens=32, **inputs.head, **more,
    )  # fmt: skip
    return out, list(torch.autograd.grad(out.loss, [hidden, weight]))


def assert_alike(case: LossCase, device: str, dtype: torch.dtype, measured: tuple = ()) -> None:
    inputs = inputs_of(case, dtype, device)
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(kernels, "arithmetic_of", lambda *call: (None, []))
        plain, grads = outcome(case, inputs, measured)
    before = len(compiled.SLOW)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*do not compile")
        fused, ours = outcome(case, inputs, measured)
    assert len(compiled.SLOW) == before
    torch.testing.assert_close(fused.loss, plain.loss, rtol=1e-5, atol=1e-6)
    for name, value in plain.metrics.items():
        torch.testing.assert_close(fused.metrics[name].value, value.value, rtol=1e-5, atol=1e-6)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for a, b in zip(ours, grads, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sum", "grpo-sum", "cispo", "topk-tail", "forward-kl-logits", "two-temperatures"])
def test_compiled_on_a_gpu(name: str) -> None:
    measured = SIX if "old_logprobs" in CASES[name].batch else (metrics.accuracy(), metrics.entropy())
    assert_alike(CASES[name], "cuda", torch.bfloat16, measured)


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU nothing is compiled by itself; here by a compiler backend that needs no C++."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: real(function, backend="aot_eager", **how))
    run = compiled.run
    compiled.COMPILED.clear()
    monkeypatch.setattr(kernels, "run", lambda s, leaves, i, fused: run(s, leaves, i, True))
    assert_alike(CASES["grpo-sum"], "cpu", torch.float32, SIX)
    assert_alike(CASES["topk-vocab"], "cpu", torch.float32, (metrics.accuracy(), metrics.perplexity()))
    assert len(compiled.COMPILED) == 2
    # more structures, one after the other, than torch compiles one function for: none shares another's code
    for beta in range(torch._dynamo.config.recompile_limit + 1):
        case = CASES["focal"]
        one = losses.focal(gamma=1.0 + beta / 7)
        inputs = inputs_of(case, torch.float32, "cpu")
        hidden = inputs.hidden.requires_grad_()
        linear_loss(hidden, inputs.weight, inputs.target, one).loss.backward()
    assert len(compiled.COMPILED) == beta + 3 and not compiled.SLOW


@pytest.mark.usefixtures("both_ways")
def test_what_does_not_compile_runs_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: real(function, backend="aot_eager", **how))
    run = compiled.run
    monkeypatch.setattr(kernels, "run", lambda s, leaves, i, fused: run(s, leaves, i, True))

    def unruly(stats: Any, batch: Any) -> Tensor:
        torch._dynamo.graph_break()
        return -stats.logprob

    inputs = inputs_of(CASES["cross-entropy"], torch.float32, "cpu")
    hidden = inputs.hidden.requires_grad_()
    with pytest.warns(UserWarning, match="unruly do not compile"):
        out = linear_loss(hidden, inputs.weight, inputs.target, losses.custom(unruly, scope="token"))
    expected = linear_loss(hidden, inputs.weight, inputs.target, losses.cross_entropy())
    torch.testing.assert_close(out.loss, expected.loss)
    assert "plain autograd" in str(out.plan)


def kernels_between_products(loss: Losses, inputs: Any, measured: tuple) -> list[str]:
    """Names of the kernels of one chunk from the logits product to the first gradient product."""
    from torch.profiler import ProfilerActivity, profile

    def call() -> None:
        hidden, weight = (t.detach().clone().requires_grad_() for t in (inputs.hidden, inputs.weight))
        linear_loss(
            hidden, weight, inputs.target, loss, batch=inputs.batch, num_segments=inputs.num_segments, metrics=measured
        )  # fmt: skip

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = sorted((e for e in profiler.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
    names = [e.name for e in events if not e.name.startswith(("Memcpy", "Memset"))]
    first = max(i for i, name in enumerate(names) if "exp_logits" in name)
    after = names[first + 1 :]
    products = ("dhidden_kernel", "gemm", "nvjet", "cutlass", "xmma")
    last = next(i for i, name in enumerate(after) if any(p in name.lower() for p in products))
    return after[:last]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cross-entropy", "grpo-sum", "sum", "topk-tail", "forward-kl", "topk-reverse"])
def test_few_kernels(name: str) -> None:
    """Between the logits product and the gradient products at most six launches a chunk, whatever the losses."""
    case = CASES[name]
    inputs = inputs_of(case, torch.bfloat16, "cuda")
    measured = SIX if "old_logprobs" in case.batch else ()
    if case.target:
        measured = (*measured, metrics.accuracy(), metrics.entropy())
    kernels = kernels_between_products(case.losses, inputs, measured)
    print(name, kernels)
    assert 1 <= len(kernels) <= 6, kernels


@pytest.mark.parametrize("known", [True, False])
def test_compiled_autograd_around_a_call(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses' own gradient is kept from it; by a torch that does not say whether it is on, it is as right."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd", reason="torch has no compiled autograd")
    taken = []
    for name in ("by_transform", "by_autograd"):
        function = getattr(evaluate, name)
        monkeypatch.setattr(evaluate, name, lambda *given, f=function, n=name: (taken.append(n), f(*given))[1])
    inputs = inputs_of(CASES["grpo"], torch.float32, "cpu")
    _, plain = outcome(CASES["grpo"], inputs)
    if not known:
        monkeypatch.setattr(evaluate, "sys", SimpleNamespace(modules={}))
    before = len(taken)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        _, grads = outcome(CASES["grpo"], inputs)
    assert set(taken[:before]) == {"by_autograd"}
    assert set(taken[before:]) == {"by_transform" if known else "by_autograd"}
    torch.testing.assert_close(grads, plain)
