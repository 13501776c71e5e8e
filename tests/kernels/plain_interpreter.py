"""Kernels under Triton's own interpreter, in place of the quicker one of other tests: it knows types as Triton does.

``test_interpreter.py`` runs this file in a process of its own. The interpreter takes bfloat16 operands of a product for
integers, so numbers are held to the oracle in float16.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from budget import assert_within_budget
from chunked_head.kernels.common.gpus import dhidden_split, gpu_of
from chunked_head.kernels.common.launcher import Launcher
from chunked_head.kernels.products import launch as products
from loss_cases import LOSS_CASES, SOME_CASES, LossCase, inputs_of, run_reference, run_step
from tiers import tier
from torch.nn import functional

from chunked_head import kernels, linear_cross_entropy, linear_logprobs, metrics
from chunked_head.core.stats import Demand, RowStats, sent
from chunked_head.parallel.merge import GatheredStats
from chunked_head.stores.triton_store import merge_ranks

TOKENS, HIDDEN, VOCAB = 20, 64, 67
launched: set[str] = set()


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Names of the kernels that are launched."""
    launch = Launcher.__getitem__

    def record(self: Launcher, grid: tuple[int, ...]) -> Any:
        launched.add(self.kernel.fn.__name__)
        return launch(self, grid)

    monkeypatch.setattr(Launcher, "__getitem__", record)
    yield


def test_nothing_of_the_interpreter_is_replaced() -> None:
    from triton.runtime import interpreter

    assert interpreter.InterpreterBuilder.create_dot.__module__ == interpreter.__name__


def losses_in_turn() -> list:
    """Of each kind some; the others exhaustive."""
    return [
        one
        for case in LOSS_CASES
        for one in tier(pytest.param(case, id=case.name), case.name in (*SOME_CASES, "forward-kl"))
    ]


@pytest.mark.parametrize("case", losses_in_turn())
def test_every_loss(case: LossCase) -> None:
    dtype = torch.float16
    given, clean = (
        inputs_of(case, dtype, "cpu", garbage, tokens=TOKENS, vocab=VOCAB) for garbage in (True, False)
    )  # fmt: skip
    (truth, _, exact), (_, _, eager) = run_reference(case, clean.to(torch.float64)), run_reference(case, clean)
    _, found = run_step(case, given, [metrics.entropy()], backend="triton")
    torch.testing.assert_close(found["loss"].double(), truth, rtol=1e-3, atol=1e-4)
    for i, (ours, plain, true) in enumerate(zip(found["grads"], eager, exact, strict=True)):
        assert_within_budget(ours, 0.7 * plain, 0.7 * true, dtype, f"gradient {i}")


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN) / 4
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), torch.randint(VOCAB, (TOKENS,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gradients_that_wait(dtype: torch.dtype) -> None:
    hidden, weight, target = operands(dtype)
    linear_cross_entropy(hidden, weight, target, reduction="none", backend="triton").sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    functional.cross_entropy(functional.linear(*wide), target, reduction="sum").backward()
    for ours, true in zip((hidden, weight), wide, strict=True):
        torch.testing.assert_close(ours.grad.double(), true.grad, rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_statistics_beside_logits() -> None:
    hidden, weight, target = operands(torch.float32)
    found = linear_logprobs(hidden, weight, target, top_k=3, backend="triton")
    logprobs = functional.linear(hidden, weight).log_softmax(-1)
    torch.testing.assert_close(found.logprobs, logprobs.gather(1, target[:, None])[:, 0])
    torch.testing.assert_close(found.top_k_logprobs, logprobs.topk(3).values)
    # bfloat16, without its numbers: exponentials in place of logits
    linear_cross_entropy(*operands(torch.bfloat16), backend="triton").backward()


def test_logits_of_e4m3_operands() -> None:
    hidden, weight, target = operands(torch.float16)
    with torch.no_grad():
        losses = [
            linear_cross_entropy(hidden, weight, target, precision="fp8", backend=name) for name in ("triton", "torch")
        ]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)


def test_statistics_of_two_ranks() -> None:
    logits, target = torch.randn(5, 40), torch.randint(40, (5,))
    picked, names = logits.gather(1, target[:, None])[:, 0], sent(Demand())
    pieces = []
    for first in (0, 20):
        part, here = logits[:, first : first + 20], (target >= first) & (target < first + 20)
        top = part.amax(1)
        found = {"start": top, "rest": top - part.logsumexp(1), "target_logit": torch.where(here, picked, 0.0)}
        pieces.append(torch.stack([*(found[name] for name in names), target.float()]))
    out = RowStats.empty(5, Demand(), torch.float32, target.device)
    merge_ranks(GatheredStats(torch.stack(pieces), names, target, 1.0, False, torch.zeros(())), out)
    torch.testing.assert_close(out.logprob, logits.log_softmax(1).gather(1, target[:, None])[:, 0])
    torch.testing.assert_close(out.lse, logits.logsumexp(1))


def test_products() -> None:
    gpu, rows, vocab = gpu_of(torch.device("cpu")), 40, 600
    assert gpu is not None
    grad, weight = torch.randn(rows, vocab).half() / 20, torch.randn(vocab, HIDDEN).half()
    split = dhidden_split(gpu.product, rows, HIDDEN, vocab, gpu.multiprocessors)
    assert split.parts > 1
    out, exact = torch.empty(rows, HIDDEN), grad.double() @ weight.double()
    sums = torch.empty(split.units * gpu.product.elements), torch.zeros(gpu.multiprocessors, dtype=torch.int32)
    products.dhidden(out, grad, weight, gpu.product, products.NO_FACTORS, products.ALL_ROWS, False, split, *sums)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
    factors = products.Factors(torch.randint(vocab, (rows,)), torch.rand(rows), torch.rand(rows))
    products.finish_dhidden(out, exact.float(), weight, factors)
    at_target = factors.at_target[:, None] * weight[factors.target]
    torch.testing.assert_close(out.double(), factors.softmax[:, None] * exact + at_target, rtol=1e-4, atol=1e-4)
    # more entries of one column than a program adds up
    columns, entry = torch.cat([torch.full((300,), 3), torch.tensor([5, -1, 7])]).int(), torch.randn(303)
    dweight, sources = torch.empty(9, HIDDEN), torch.randint(vocab, (303,))
    products.add_rows(dweight.zero_(), weight, columns, entry, sources)
    terms = (entry[:, None] * weight[sources])[columns >= 0]
    expected = torch.zeros(9, HIDDEN).index_add(0, columns[columns >= 0], terms)
    torch.testing.assert_close(dweight, expected, rtol=1e-4, atol=1e-3)


def test_every_kernel_has_run() -> None:
    root = Path(next(iter(kernels.__path__)))
    names = (path.relative_to(root).with_suffix("").parts for path in root.glob("*/*.py"))
    modules = [importlib.import_module(".".join((kernels.__name__, *name))) for name in names]
    found = {v.kernel.fn.__name__ for module in modules for v in vars(module).values() if isinstance(v, Launcher)}
    assert len(found) > 20 and not (missing := found - launched), missing
