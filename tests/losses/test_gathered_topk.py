"""Divergences from a teacher's likeliest ids, on gathered logits: against the oracle in float64, and at their edges."""

import math
from typing import Any

import pytest
import torch
from oracle.distillation import DIVERGENCES, TOPK_OPTIONS
from tiers import crossed
from torch import Tensor

from chunked_head import gathered_topk_kl

TOKENS, VOCAB = 12, 17


def with_gradient(values: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Values, and their gradient under a different weight each."""
    weights = torch.linspace(0.5, 2.0, values.numel(), dtype=values.dtype).view(values.shape)
    return values.detach(), torch.autograd.grad((values * weights).sum(), x, retain_graph=True)[0]


class Known:
    """Teachers of K distinct ids; ``test_formulas.py`` has those that repeat or are padding."""

    def __init__(self, tokens: int = TOKENS, k: int = 6):
        self.x = torch.randn(tokens, VOCAB).double() * 2
        teacher = torch.log_softmax(torch.randn(tokens, VOCAB).double() * 2, -1)
        self.teacher_logprobs, self.teacher_ids = teacher.topk(k, -1)

    def ours(self, x: Tensor, **options: Any) -> Tensor:
        lse = (x / options.get("temperature", 1.0)).logsumexp(-1)
        return gathered_topk_kl(
            x.gather(-1, self.teacher_ids), self.teacher_logprobs, lse=lse, teacher_ids=self.teacher_ids,
            reduction="none", **options,
        )  # fmt: skip


@crossed(
    dtype=[torch.float32, torch.float64], k=[1, 5, VOCAB], divergence=[*DIVERGENCES, 0.0, 0.3, 1.0],
    normalize=["tail", "topk"],
)  # fmt: skip
def test_teacher_is_student(divergence: str | float, normalize: str, k: int, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"divergence": divergence, "normalize": normalize}
    if isinstance(divergence, float):
        options |= {"divergence": "jsd", "beta": divergence}
    for sure in (1.0, 30.0):
        x = (torch.randn(TOKENS, VOCAB) * sure).to(dtype).requires_grad_()
        data = Known(k=k)
        data.teacher_ids = x.detach().topk(k, -1).indices
        data.teacher_logprobs = (x.gather(-1, data.teacher_ids) - x.logsumexp(-1, keepdim=True)).detach()
        values, gradient = with_gradient(data.ours(x, **options), x)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(values, torch.zeros_like(values), atol=10 * eps, rtol=0.0)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=100 * eps, rtol=0.0)


@crossed(
    dtype=[torch.float32, torch.float64], options=TOPK_OPTIONS, student=[0.0, 40.0, 300.0], teacher=[0.0, 40.0, 300.0]
)
def test_guards(dtype: torch.dtype, options: dict[str, Any], student: float, teacher: float) -> None:
    """Students and teachers whose K ids hold all probability, or next to none of it."""
    ids = torch.arange(4).expand(2, 4)
    x = torch.randn(2, VOCAB)
    x[0, :4] += student
    x[1, :4] -= student
    y = torch.randn(2, VOCAB)
    y[0, :4] -= teacher
    y[1, :4] += teacher
    x = x.to(dtype).requires_grad_()
    data = Known(2)
    data.teacher_ids, data.teacher_logprobs = ids, torch.log_softmax(y.to(dtype), -1)[:, :4]
    values, gradient = with_gradient(data.ours(x, **options), x)
    assert values.isfinite().all() and gradient.isfinite().all()
    if options.get("normalize") != "vocab" and options.get("teacher_renormalize") is not False:
        assert (values > -1e-5).all()


def test_among_the_ids_alone_no_lse_is_needed() -> None:
    """Of 16 bits float32 is made."""
    data = Known()
    student = data.x.gather(-1, data.teacher_ids).bfloat16()
    mine, wide = (gathered_topk_kl(x, data.teacher_logprobs, normalize="topk") for x in (student, student.float()))
    assert mine.dtype == torch.float32 and torch.equal(mine, wide) and mine > 0


def test_tail_without_rest() -> None:
    """A teacher whose K probabilities sum to 1: the student's tail is pushed to 0, alpha = 1 and b = -t."""
    data = Known(k=4)
    data.teacher_logprobs = torch.log_softmax(data.teacher_logprobs, -1)
    x = data.x.requires_grad_()
    (gradient,) = torch.autograd.grad(data.ours(x).sum(), x)
    expected = torch.softmax(x.detach(), -1).scatter_add(-1, data.teacher_ids, -data.teacher_logprobs.exp())
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-10)
    reverse = data.ours(x, divergence="reverse")
    assert reverse.isfinite().all() and (reverse > 1).all()  # its tail counts as one epsilon


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_renormalised_leaves_no_rest(dtype: torch.dtype) -> None:
    """The teacher's rest is 0 then, its logarithm that of one epsilon, and not what a sum is rounded by."""
    data = Known(k=8)
    data.teacher_logprobs, x = data.teacher_logprobs.to(dtype), data.x.to(dtype)
    values = data.ours(x, divergence="reverse", teacher_renormalize=True).double()
    t, s = data.teacher_logprobs.double().log_softmax(-1), x.double().log_softmax(-1).gather(-1, data.teacher_ids)
    left = 1.0 - s.exp().sum(-1)
    expected = (s.exp() * (s - t)).sum(-1) + left * (left.log() - math.log(torch.finfo(dtype).eps))
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
