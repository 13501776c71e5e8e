"""Whether the library works where it was installed: a minute of everything, with few packages beside torch.

`make smoke` runs it on what `pip install .` makes of the checkout. Other tests measure how right it all is.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import graph_calls
import pytest
import ranks
import tiny_models
import torch
import torch.nn.functional as F
from cases import PLACES, Place
from loss_cases import FEWER, LOSS_CASES, LossCase, inputs_of, run_reference, run_step
from torch import Tensor

import chunked_head
from chunked_head import (
    ChunkedHead,
    CrossEntropyLoss,
    TokenParallel,
    VocabParallel,
    gathered_topk_kl,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_loss,
    logits_logprobs,
    logits_loss,
    losses,
    metrics,
    plan,
    unpatch_model,
    weights,
)

Given = tuple[Tensor, Tensor, Tensor]  # hidden states, weight, targets
TEACHER = torch.randn(33, 50, generator=torch.Generator().manual_seed(2))
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def given() -> Given:
    made = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(33, 16, generator=made), torch.randn(50, 16, generator=made)
    target = torch.randint(0, 50, (33,), generator=made)
    target[:4] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), target


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, target)


def plain_logprobs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    every = (hidden @ weight.T).log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    return ((every.gather(-1, target.clamp(min=0)[:, None])[:, 0] + entropy) * (target >= 0)).sum()


def ours_logprobs(hidden: Tensor, weight: Tensor, target: Tensor, backend: str) -> Tensor:
    logprobs, entropy = linear_logprobs(hidden, weight, target, entropy=True, backend=backend)
    return (logprobs + entropy).sum()


def plain_divergence(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(
        (hidden @ weight.T).log_softmax(-1), TEACHER.to(hidden.device).log_softmax(-1), reduction="sum", log_target=True
    )


def plain_topk(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    top = TEACHER.to(hidden.device).log_softmax(-1).topk(3)
    batch = {"teacher_ids": top.indices, "teacher_logprobs": top.values}
    return linear_loss(hidden, weight, None, losses.topk_kl(normalize="topk"), batch=batch).loss


def ours_topk(hidden: Tensor, weight: Tensor, target: Tensor, backend: str) -> Tensor:
    top = TEACHER.to(hidden.device).log_softmax(-1).topk(3)
    return gathered_topk_kl((hidden @ weight.T).gather(-1, top.indices), top.values, normalize="topk")


# of each public function: ours, and the same in plain PyTorch
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "linear_cross_entropy": (linear_cross_entropy, plain),
    "linear_loss": (lambda h, w, y, backend: linear_loss(h, w, y, losses.cross_entropy(), backend=backend).loss, plain),
    "linear_logprobs": (ours_logprobs, plain_logprobs),
    "logits_logprobs": (
        lambda h, w, y, backend: sum(logits_logprobs(h @ w.T, y, entropy=True, backend=backend)).sum(), plain_logprobs
    ),
    "linear_divergence": (
        lambda h, w, y, backend: linear_divergence(h, w, teacher_logits=TEACHER.to(h.device), backend=backend).sum(),
        plain_divergence,
    ),
    "logits_loss": (
        lambda h, w, y, backend: logits_loss(h @ w.T, y, losses.cross_entropy(), backend=backend).loss, plain
    ),
    "gathered_topk_kl": (ours_topk, plain_topk),
    "ChunkedHead": (lambda h, w, y, backend: module(w, backend)(h, y), plain),
    "CrossEntropyLoss": (lambda h, w, y, backend: CrossEntropyLoss(backend=backend)(h @ w.T, y), plain),
}  # fmt: skip


def module(weight: Tensor, backend: str) -> ChunkedHead:
    head = ChunkedHead(weight.shape[1], weight.shape[0], backend=backend)
    del head.weight
    head.weight = weight
    return head


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions(name: str, place: Place) -> None:
    ours, plain = FUNCTIONS[name]
    made = []
    for function, options in ((ours, {"backend": place.backend}), (plain, {})):
        hidden, weight, target = (t.detach().to(place.device).requires_grad_(t.requires_grad) for t in given())
        value = function(hidden, weight, target, **options)
        made.append((value, *torch.autograd.grad(value, (hidden, weight))))
    for mine, true in zip(*made, strict=True):
        torch.testing.assert_close(mine, true, **CLOSE)


def test_all_that_is_public_is_here() -> None:
    elsewhere = {
        "Execution", "LossOutput", "Plan", "TokenParallel", "VocabParallel", "explain_model", "losses", "metrics",
        "patch_model", "plan", "unpatch_model", "weights",
    }  # fmt: skip
    assert set(FUNCTIONS) | elsewhere == set(chunked_head.__all__)


def test_what_makes_no_gradient() -> None:
    assert plan(tokens=8192, hidden=64, vocab=5000, dtype=torch.bfloat16, device="cpu").schedule
    hidden, weight, target = given()
    options = weights.sequence_mean(target.view(3, 11) >= 0)
    out = linear_loss(
        hidden.view(3, 11, 16), weight, target.view(3, 11), losses.cross_entropy(**options),
        metrics=[metrics.accuracy(), metrics.perplexity(), metrics.entropy(reduce="max")],
    )  # fmt: skip
    assert all(torch.isfinite(metric.value) for metric in out.metrics.values())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.name)
def test_losses(case: LossCase, place: Place) -> None:
    inputs = inputs_of(case, torch.float32, place.device, **({} if place.device == "cuda" else FEWER))
    loss, parts, grads = run_reference(case, inputs.to(torch.float64))
    _, ours = run_step(case, inputs, [metrics.entropy()], upstream=1.0, backend=place.backend)
    torch.testing.assert_close(ours["loss"].double(), loss, **CLOSE)
    for name, part in parts.items():
        torch.testing.assert_close(ours["parts"][name].double(), part, **CLOSE)
    for mine, true in zip(ours["grads"], grads, strict=True):
        assert (mine - true).norm() <= 1e-4 * true.norm() + 1e-7


@pytest.mark.compiled
@pytest.mark.parametrize("call", graph_calls.CALLS, ids=lambda call: call.__name__)
def test_compiled(call: Callable[..., Any]) -> None:
    graph_calls.assert_alike(call, graph_calls.make_data(), exact=call is not graph_calls.gspo, backend="aot_eager")


@pytest.mark.compiled
def test_compiled_by_inductor() -> None:
    graph_calls.assert_alike(graph_calls.grpo, graph_calls.make_data(), exact=False)


MODELS = [getattr(tiny_models, name) for name in ("llama", "gemma2", "gpt2", "bert", "t5")]


@pytest.mark.parametrize("make", MODELS)
def test_models(make: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    plain, ours = tiny_models.pair(make)
    theirs = tiny_models.step(plain)
    found = tiny_models.step(ours)
    assert ours.chunked_head.fused == 1
    again = tiny_models.step(unpatch_model(ours))
    for one in (found, again):
        torch.testing.assert_close((one.loss, one.grads), (theirs.loss, theirs.grads), **CLOSE)


def of_one_rank(rank: int, device: str) -> dict[str, Tensor]:
    """A batch over ranks, and a vocabulary."""
    hidden, weight, target = given()
    mine = slice(0, 10) if rank == 0 else slice(10, None)
    share = linear_cross_entropy(hidden[mine], weight, target[mine], parallel=TokenParallel())
    rows = weight.detach()[25 * rank : 25 * rank + 25]
    rows.requires_grad_()
    whole = linear_cross_entropy(hidden, rows, target, parallel=VocabParallel())
    grads = torch.autograd.grad(share + whole, (hidden, rows), retain_graph=True)
    return {"share": share.detach(), "whole": whole.detach(), "rows": grads[1]}


def test_two_ranks(tmp_path: Path) -> None:
    hidden, weight, target = given()
    loss = plain(hidden, weight, target)
    (grad,) = torch.autograd.grad(loss, weight)
    found = ranks.run(of_one_rank, 2, tmp_path)
    torch.testing.assert_close(found[0]["share"] + found[1]["share"], loss, **CLOSE)
    for one in found:
        torch.testing.assert_close(one["whole"], loss, **CLOSE)
    torch.testing.assert_close(torch.cat([one["rows"] for one in found]), grad, **CLOSE)
