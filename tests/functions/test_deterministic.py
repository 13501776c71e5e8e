"""``deterministic=True``: the same bits from run to run, and whatever the other tokens are."""

from typing import Any

import pytest
import torch
from budget import assert_outcome
from cases import GPU, PLACES, TRITON, Case, Place, run_ours, run_reference
from tiers import crossed
from torch import Tensor

from chunked_head import linear_cross_entropy, linear_logprobs, linear_loss, losses

OURS = [*TRITON, *GPU[:1]]
EVERYTHING = ("entropy", "lse", "argmax", "mean_logit", "log_sum_sq_probs")


def operands(place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Three chunks and tiles of them on a GPU; interpreted, where each takes seconds, two."""
    tokens, vocab = (150, 300) if place.device == "cuda" else (70, 140)
    made = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, 64, generator=made).to(place.device, dtype)
    weight = (torch.randn(vocab, 64, generator=made) * 0.3).to(place.device, dtype)
    return hidden, weight, torch.randint(0, vocab, (tokens,), generator=made).to(place.device)


@crossed(place=OURS, entropy=[False, True], schedule=["forward", "recompute"])
def test_alone_as_among_others(place: Place, entropy: bool, schedule: str) -> None:
    """Log-probabilities and rows of hidden's gradient of the first tokens, alone and before others."""
    hidden, weight, target = operands(place, torch.bfloat16)
    loss = losses.cross_entropy() + (0.1 * losses.entropy() if entropy else 1e-3 * losses.z_loss())
    found = []
    for count in (len(hidden), 37, 1):
        rows = hidden[:count].clone().requires_grad_()
        w = weight.clone().requires_grad_()
        options = {"backend": place.backend, "deterministic": True, "chunk_tokens": 64}
        if schedule == "forward":
            linear_loss(rows, w, target[:count], loss, reduction="sum", **options).loss.backward()
        else:
            values = linear_logprobs(rows, w, target[:count], entropy=True, **options)
            (values.logprobs + (0.1 * values.entropy if entropy else 0.0)).sum().backward()
        with torch.no_grad():
            logprobs = linear_logprobs(hidden[:count], weight, target[:count], **options)
        found.append((logprobs, rows.grad))
    for logprobs, gradient in found[1:]:
        assert torch.equal(logprobs, found[0][0][: len(logprobs)])
        assert torch.equal(gradient, found[0][1][: len(gradient)])


@pytest.mark.parametrize("place", OURS)
def test_e4m3_alone_as_among_others(place: Place) -> None:
    """Nothing of other tokens is in a token's logits."""
    made = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(n, 64, generator=made).to(place.device, torch.bfloat16) for n in (70, 1100))
    target = torch.randint(0, 1100, (70,), generator=made).to(place.device)
    options: dict[str, Any] = {"backend": place.backend, "deterministic": True, "precision": "fp8"}
    every, first = (linear_logprobs(hidden[:n], weight, target[:n], **options) for n in (70, 9))
    assert torch.equal(every[:9], first)


@pytest.mark.usefixtures("architecture")
@pytest.mark.parametrize("place", OURS)
@pytest.mark.parametrize("schedule", ["forward", "recompute"])
def test_on_other_gpus(place: Place, schedule: str) -> None:
    test_alone_as_among_others(place, True, schedule)


@pytest.mark.parametrize("place", OURS)
def test_run_to_run(place: Place) -> None:
    """The same bits twice, and within the budget."""
    inputs = Case("", (150 if place.device == "cuda" else 70,), 64, 300).inputs(torch.bfloat16, place.device)
    inputs.target[: len(inputs.target) * 3 // 5] = 7  # a token of many
    first, second = (run_ours(inputs, place, chunk_tokens=64, deterministic=True) for _ in range(2))
    assert all(torch.equal(*both) for both in zip(first[:3], second[:3], strict=True))
    truth, eager = (run_reference(inputs, dtype) for dtype in (torch.float64, torch.bfloat16))
    assert_outcome(first, eager, truth, torch.bfloat16)


@pytest.mark.parametrize("place", PLACES)
def test_where_it_cannot_be(place: Place) -> None:
    hidden, weight, target = operands(place, torch.float32)
    plain = (place.backend, place.device) == ("torch", "cpu")
    why = "runs on GPUs of docs/gpus.md alone" if plain else "needs our own matmuls.*; leave it False"
    with pytest.raises(ValueError, match=f"deterministic=True {why}"):
        linear_cross_entropy(hidden, weight, target, backend=place.backend, deterministic=True)
    if place.backend == "triton":
        hidden, weight, target = operands(place, torch.float16)
        with pytest.raises(ValueError, match="deterministic=True goes with bfloat16"):
            linear_cross_entropy(hidden, weight, target, backend=place.backend, deterministic=True)
    with pytest.raises(TypeError, match="deterministic must be True or False, got 1"):
        linear_cross_entropy(hidden, weight, target, deterministic=1)


@pytest.mark.gpu
def test_sums_of_segments() -> None:
    """A GPU adds them up in any order: an error, and no promise that is not kept."""
    place = Place("triton", "cuda")
    hidden, weight, target = operands(place, torch.bfloat16)
    batch = {name: torch.zeros(150, device=place.device) for name in ("old_logprobs", "advantages")}
    batch["segments"] = (torch.arange(150) % 3).to(place.device)
    with pytest.raises(ValueError, match="deterministic=True does not go with gspo on a GPU"):
        linear_loss(hidden, weight, target, losses.gspo(), batch=batch, num_segments=3, deterministic=True)


@pytest.mark.parametrize("place", OURS)
def test_whatever_else_is_asked_for(place: Place) -> None:
    """Log-probabilities of any tokens in any order, with a gradient and without: the same bits; of padding nothing."""
    hidden, weight, target = operands(place, torch.bfloat16)
    target[1], target[3], target[4] = -100, 0, len(weight) - 1
    weight = torch.cat([weight, torch.full_like(weight[:24], torch.nan)])
    options: dict[str, Any] = {"vocab_size": len(weight) - 24, "deterministic": True, "backend": place.backend}
    alone = linear_logprobs(hidden, weight, target, **options)
    # NumPy's products, which the interpreter takes, depend on where a row stands
    for tokens in (slice(7), slice(None), torch.arange(len(hidden)).flip(0))[: 2 if place.device == "cpu" else 3]:
        values = linear_logprobs(hidden[tokens], weight.clone().requires_grad_(), target[tokens], **options)
        assert values.requires_grad and torch.equal(values, alone[tokens])
    for asked in (("entropy",), ("argmax", "mean_logit"), EVERYTHING[:-1]):
        assert torch.equal(linear_logprobs(hidden, weight, target, **options, **dict.fromkeys(asked, True))[0], alone)
    each = torch.linspace(0.5, 1.5, len(hidden), device=place.device)
    options |= dict.fromkeys(EVERYTHING, True) | {"softcap": 20.0, "logit_scale": 0.8, "temperature": each}
    ours, exact = (
        linear_logprobs(hidden, weight, target, **(options | {"deterministic": flag})) for flag in (True, False)
    )
    for value, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(value, other, rtol=2e-5, atol=2e-5)
