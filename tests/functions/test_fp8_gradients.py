"""``precision="fp8"``: gradients by products of e4m3 operands, in which targets and heavy ids stand apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import PLACES, Place
from test_fp8_errors import flat, trained_like, zipf
from tiers import crossed
from torch import Tensor

from chunked_head import linear_cross_entropy, plan, quantise

IN_TRITON = [place for place in PLACES if place.values[0].backend == "triton"]
OPTIONS: list[dict[str, Any]] = [
    {}, {"chunk_tokens": 32}, {"skip_ignored": "wait"}, {"reduction": "sum"}, {"logit_scale": 0.4},
]  # fmt: skip
SIZES = 90, 509, 64
Heads = Callable[..., tuple[Tensor, ...]]


def head_of(place: Place, head: Heads, sizes: tuple[int, int, int]) -> tuple[Tensor, ...]:
    hidden, weight, target = (t.to(place.device) for t in head(*sizes))
    return hidden.bfloat16(), weight.bfloat16(), target


def gradients_of(place: Place, head: Heads, sizes: tuple[int, int, int], **options: Any) -> list[Tensor]:
    hidden, weight, target = head_of(place, head, sizes)
    target[::9] = -100
    operands = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(*operands, target, precision="fp8", backend=place.backend, **options)
    return [loss.detach(), *torch.autograd.grad(loss, operands)]


@crossed(place=IN_TRITON, head=[trained_like, zipf, flat], options=OPTIONS, vocab=[509, 1024])
def test_gradients(place: Place, head: Heads, options: dict[str, Any], vocab: int) -> None:
    """Those of the same logits by 16-bit products, within e4m3's rounding of what does not stand apart."""
    found = gradients_of(place, head, (90, vocab, 64), **options)
    expected = gradients_of(place, head, (90, vocab, 64), **options, deterministic=True)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    for ours, other in zip(found[1:], expected[1:], strict=True):
        assert 0.0 < (ours.double() - other.double()).norm() <= 6e-3 * other.double().norm()


@crossed(place=IN_TRITON, options=OPTIONS[:3])
def test_the_same_bits_again(place: Place, options: dict[str, Any]) -> None:
    once, again = (gradients_of(place, trained_like, SIZES, **options) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


@crossed(place=IN_TRITON, wanted=[(True, False), (False, True)])
def test_one_operand(place: Place, wanted: tuple[bool, bool]) -> None:
    """Its gradient is the one that comes with the other's."""
    both = []
    for requested in ((True, True), wanted):
        *operands, target = head_of(place, trained_like, SIZES)
        for operand, is_requested in zip(operands, requested, strict=True):
            operand.requires_grad_(is_requested)
        linear_cross_entropy(*operands, target, precision="fp8", backend=place.backend).backward()
        both.append(operands[wanted.index(True)].grad)
    assert torch.equal(*both)


@pytest.mark.parametrize("place", IN_TRITON)
def test_sums_in_a_buffer(place: Place) -> None:
    """And a copy of the weight that keeps its transpose."""
    hidden, weight, target = head_of(place, trained_like, SIZES)
    operands = hidden.requires_grad_(), weight.requires_grad_()
    copy, buffer = quantise(weight, backend=place.backend), torch.zeros(SIZES[1], SIZES[2], device=place.device)
    options: dict[str, Any] = {"precision": "fp8", "backend": place.backend, "fp8_weight": copy}
    _, dweight = torch.autograd.grad(linear_cross_entropy(*operands, target, **options), operands)
    transposed = copy.transposed
    assert transposed.values.shape == (64, 512) and transposed.scale == 1.0
    assert torch.equal(transposed.values.float()[:, :509], copy.matrix.values.float().t())
    for _ in range(2):
        linear_cross_entropy(*operands, target, accumulate_into=buffer, chunk_tokens=32, **options).backward()
    # each chunk's hidden states are rounded without their own mean
    assert (buffer - 2.0 * dweight).norm() <= 1e-2 * buffer.norm()


# of plain PyTorch's errors in bf16, of those of the same logits by 16-bit products, or relative: dhidden, dweight
BOUNDS: dict[Heads, tuple[str, float, float]] = {
    trained_like: ("plain", 1.0, 1.1), zipf: ("16-bit", 1.2, 1.2), flat: ("relative", 3.6e-3, 3.2e-3),
}  # fmt: skip


@crossed(place=[place for place in IN_TRITON if place.values[0].device == "cuda"], head=BOUNDS)
def test_errors(place: Place, head: Heads) -> None:
    """Against float64. A vocabulary that the interpreter has time for is too small for errors to average out. On the
    Zipf head the logits err by most, which ``test_fp8_errors.py`` bounds."""
    hidden, weight, target = head_of(place, head, (2048, 65536, 2048))

    def run(dtype: torch.dtype, **options: Any) -> list[Tensor]:
        operands = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        if options:
            loss = linear_cross_entropy(*operands, target, **options)
        else:
            x = F.linear(*operands)
            loss = F.cross_entropy(x.to(torch.promote_types(dtype, torch.float32)), target)
        return [grad.double() for grad in torch.autograd.grad(loss, operands)]

    kind, *bounds = BOUNDS[head]
    truth, found = run(torch.float64), run(torch.bfloat16, precision="fp8")
    options = {"precision": "fp8", "deterministic": True} if kind == "16-bit" else {}
    for true, other, ours, bound in zip(truth, run(torch.bfloat16, **options), found, bounds, strict=True):
        error, allowed = ((t - true).norm() / true.norm() for t in (ours, other))
        assert error <= bound * (1.0 if kind == "relative" else allowed), (head.__name__, float(error), float(allowed))


def test_plans_say_which_operands_they_have() -> None:
    sizes: dict[str, Any] = {"device": "sm_90", "backend": "triton", "precision": "fp8"}
    has = {
        name: plan(8192, 4096, 32000, torch.bfloat16, **(sizes | more)).e4m3_gradients
        for name, more in {
            "": {}, "deterministic": {"deterministic": True}, "late": {"reduction": "none"},
            "softcap": {"softcap": 30.0},
            "others": {"device": "sm_100"},
        }.items()
    }  # fmt: skip
    assert has == {"": True, "deterministic": False, "late": False, "softcap": False, "others": False}
