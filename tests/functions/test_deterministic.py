"""``deterministic=True``: the same bits from run to run, and whatever the other tokens are."""

import pytest
import torch
from cases import GPU, PLACES, TRITON, Place
from tiers import crossed
from torch import Tensor

from chunked_head import linear_cross_entropy, linear_logprobs, linear_loss, losses

OURS = [*TRITON, *GPU[:1]]


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


@pytest.mark.usefixtures("architecture")
@pytest.mark.parametrize("place", OURS)
@pytest.mark.parametrize("schedule", ["forward", "recompute"])
def test_on_other_gpus(place: Place, schedule: str) -> None:
    test_alone_as_among_others(place, True, schedule)


@pytest.mark.parametrize("place", OURS)
def test_run_to_run(place: Place) -> None:
    hidden, weight, target = operands(place, torch.bfloat16)
    target[: len(target) * 3 // 5] = 7  # a token of many

    def run() -> list[Tensor]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = linear_cross_entropy(h, w, target, chunk_tokens=64, backend=place.backend, deterministic=True)
        loss.backward()
        return [loss.detach(), h.grad, w.grad]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("place", PLACES)
def test_where_it_cannot_be(place: Place) -> None:
    hidden, weight, target = operands(place, torch.float32)
    with pytest.raises(ValueError, match="deterministic=True needs our own matmuls"):
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
