"""The losses' arithmetic as kernels written from traces, beside the arithmetic itself."""

import itertools
from typing import Any

import pytest
import torch
from cases import GPU, TRITON, Place
from loss_cases import LOSS_CASES, LossCase, inputs_of, run_step
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from chunked_head import linear_cross_entropy, linear_loss, losses, metrics
from chunked_head.arithmetic import evaluate, vectors

# several columns per token are no function of one number each
WITHOUT = {"topk-tail", "topk-vocab", "topk-topk", "topk-reverse", "topk-and-dense", "temperatures-teacher"}
TOKENWISE = [case for case in LOSS_CASES if all(s.scope == "token" for _, s in case.losses.terms)]
PLACES = [*TRITON, *GPU[:1]]


def measured(case: LossCase) -> tuple[metrics.Metric, ...]:
    found = (metrics.entropy(),)
    found += (metrics.accuracy(), metrics.perplexity()) if case.target else ()
    if {"old_logprobs", "advantages"} <= set(case.batch):
        found += (metrics.ratio(), metrics.kl_old(), metrics.clip_fraction(side="low"), metrics.advantage())
        found += (metrics.effective_sample_size(),)
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", TOKENWISE, ids=lambda case: case.name)
def test_kernels_compute_what_the_losses_do(case: LossCase, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call with kernels of its arithmetic and in plain PyTorch: values, metrics and gradients."""
    inputs, found = inputs_of(case, torch.float32, place.device, tokens=24, vocab=67), []
    evaluate.KERNELS.clear()
    for way in ("kernels", "plain"):
        if way == "plain":
            assert {kernel is None for kernel in evaluate.KERNELS.values()} == {case.name in WITHOUT}
            monkeypatch.setattr(evaluate, "arithmetic_of", lambda *call: (None, []))
        _, numbers = run_step(case, inputs, measured(case), chunk_tokens=16, backend="triton")
        found.append(numbers)
    for name, value in found[0].items():
        # two units in the last place of 1: exponentials less 1, as in estimates of a KL, are no more exact
        torch.testing.assert_close(value, found[1][name], rtol=2e-6, atol=2.4e-7, equal_nan=True, msg=name)


@pytest.mark.parametrize("place", PLACES)
def test_metrics_of_one_function_have_kernels_of_their_own(place: Place) -> None:
    """A mean of ratios has one row, their effective sample size two, of the same function and options."""
    made, device = torch.Generator().manual_seed(0), place.device
    hidden, weight = (torch.randn(size, 16, generator=made).to(device).requires_grad_() for size in (24, 67))
    target, logprobs = torch.randint(67, (24,), generator=made).to(device), 4 * torch.rand(24, generator=made)
    batch = {"old_logprobs": -logprobs.to(device), "advantages": torch.randn(24, generator=made).to(device)}
    kinds = [metrics.effective_sample_size(), metrics.ratio(), metrics.effective_sample_size(normalized=True)]

    def run(kind: metrics.Metric) -> list[Tensor]:
        measured = [kind, metrics.entropy()]
        out = linear_loss(hidden, weight, target, losses.grpo(), batch=batch, metrics=measured, backend=place.backend)
        values = [value.detach() for value in (out.loss, *[metric.value for metric in out.metrics.values()])]
        return [*values, *torch.autograd.grad(out.loss, (hidden, weight))]

    alone = []
    for kind in kinds:
        evaluate.KERNELS.clear()
        alone.append(run(kind))
        assert evaluate.KERNELS and None not in evaluate.KERNELS.values()
    for order in itertools.permutations(range(len(kinds))):
        evaluate.KERNELS.clear()
        for i in order:
            for ours, expected in zip(run(kinds[i]), alone[i], strict=True):
                torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("place", PLACES)
def test_a_kernel_refuses_memory_that_it_was_not_made_for(place: Place) -> None:
    """A key that leaves something out raises; it does not write past a table."""
    x = torch.arange(8.0, device=place.device)
    kernel = vectors.vector_kernel(lambda given: ([given[0] + 1], [given[0] + 2, given[0] + 3]), [x], [0])
    assert kernel is not None

    def run(
        inputs: int = 1,
        tokens: int = 5,
        length: int = 8,
        rows: tuple[int, int] = (1, 2),
        dtype: torch.dtype = x.dtype,
    ) -> Tensor:
        chunk, table = x.new_zeros(rows[0], tokens), x.new_zeros(rows[1], length, dtype=dtype)
        kernel([x] * inputs, slice(2, 7), chunk, table)
        return table

    assert run()[1, 2:7].tolist() == [5.0, 6.0, 7.0, 8.0, 9.0]
    for wrong in (
        {"inputs": 2},
        {"tokens": 4},
        {"length": 6},
        {"rows": (1, 1)},
        {"rows": (2, 2)},
        {"dtype": torch.float64},
    ):
        with pytest.raises(RuntimeError, match="share a key"):
            run(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", PLACES)
def test_what_has_a_kernel(place: Place) -> None:
    device = place.device
    made = vectors.vector_kernel
    x = torch.linspace(-2.0, 2.0, 40, device=device)
    x[3], x[7] = torch.nan, torch.inf

    def run(function: Any, *inputs: Tensor) -> None:
        kernel = made(lambda given: ([function(*given)], []), inputs, [0 if t.dim() else None for t in inputs])
        assert kernel is not None
        chunk, table = torch.full((1, 40), 7.0, device=device), torch.empty(0, 40, device=device)
        kernel(inputs, slice(5, 33), chunk, table)
        torch.testing.assert_close(
            chunk[0, :28], function(*(t[5:33] if t.dim() else t for t in inputs)), equal_nan=True
        )
        assert chunk[0, 28:].eq(7.0).all()

    ids = torch.arange(40, device=device) - 3
    run(lambda x: x.clamp(-1.0, 0.5).exp() - torch.expm1(x) + x.abs().log1p(), x)
    run(lambda x: x.sign() + x.sigmoid(), x)
    run(lambda x, n: torch.where((n > 3) & ~(n == 9) | x.isnan(), x * n, 1.0 / (n.abs() + 1)), x, ids)
    factor = torch.tensor(3.0, device=device)
    run(lambda x, s: (x * s - s) + (x.abs() + 1) ** 0.7 + x**2, x, factor)
    run(lambda n: (n.clamp(min=0) - 2 * n).float(), ids)

    def refused(function: Any, *inputs: Tensor) -> None:
        assert made(lambda given: ([function(*given)], []), inputs, [0] * len(inputs)) is None

    refused(lambda x: x - x.mean(), x)
    refused(lambda x: x / len(x), x)
    refused(lambda x: x.cumsum(0), x)
    refused(lambda x: x.flip(0), x)
    refused(lambda x: torch.div(x, 2.0, rounding_mode="floor"), x)
    refused(lambda x: torch.rsub(x, 1.0, alpha=3.0), x)

    def broken(given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        raise ValueError("a mistake in a loss")

    with pytest.raises(ValueError, match="a mistake in a loss"):  # which no slower way may hide
        made(broken, [x], [0])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("around", ["graph", "checkpoint"])
def test_kernels_are_made_within_graphs_and_checkpoints(place: Place, around: str) -> None:
    hidden = torch.randn(40, 16, device=place.device, requires_grad=True)
    weight, target = torch.randn(24, 16, device=place.device), torch.randint(24, (40,), device=place.device)

    def call(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, z_loss=1e-3, backend=place.backend)

    (expected,) = torch.autograd.grad(call(hidden), hidden)
    evaluate.KERNELS.clear()
    if around == "graph":
        loss = torch.compile(call, fullgraph=True, backend="aot_eager")(hidden)
    else:
        loss = checkpoint(call, hidden, use_reentrant=False)
    assert evaluate.KERNELS and None not in evaluate.KERNELS.values()
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], expected)
