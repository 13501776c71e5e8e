"""``deterministic=True``: the same bits from run to run, and whatever the other tokens are."""

from typing import Any

import pytest
import torch
from budget import assert_outcome
from cases import GPU, PLACES, TRITON, Case, Place, run_ours, run_reference
from chunked_head.kernels.common import tiles
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
def test_e4m3_alone_as_among_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what tokens have in common, and of the ids that are their targets, nothing is in a token's logits."""
    monkeypatch.setattr(tiles, "IDS_PER_BLOCK", 512)
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


class Operands:
    """Of a head whose padding is nan."""

    def __init__(self, place: Place):
        gpu = place.device != "cpu"
        self.tokens, self.vocab, width = (300, 8000 - 24, 4096) if gpu else (20, 600, 64)
        made = torch.Generator().manual_seed(5)
        hidden = torch.randn(self.tokens, width, generator=made)
        weight = torch.randn(self.vocab + 24, width, generator=made) * 2.4 / width**0.5
        weight[self.vocab :] = torch.nan
        self.hidden, self.weight = (each.to(place.device, torch.bfloat16) for each in (hidden, weight))
        self.bias = torch.randn(self.vocab + 24, generator=made).to(place.device, torch.bfloat16)
        target = torch.randint(0, self.vocab, (self.tokens,), generator=made)
        target[0], target[15] = 0, self.vocab - 1
        target[17] = -100
        self.target = target.to(place.device)
        self.temperature = torch.rand(self.tokens, generator=made).to(place.device) + 0.5
        self.common = {"vocab_size": self.vocab, "deterministic": True, "backend": place.backend}

    def options(self, kind: str) -> dict[str, Any]:
        if kind == "plain":
            return dict(self.common)
        scaled = {"softcap": 20.0, "logit_scale": 0.8, "temperature": self.temperature}
        return self.common | scaled | dict.fromkeys(EVERYTHING, True)

    def values(self, options: dict[str, Any], tokens: Any = slice(None)) -> list[Tensor]:
        """Log-probabilities, and what else is asked for, of some tokens."""
        given = dict(options)
        if "temperature" in options:
            given |= {"bias": self.bias, "temperature": options["temperature"][tokens]}
        found = linear_logprobs(self.hidden[tokens], self.weight, self.target[tokens], **given)
        return [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.parametrize("place", OURS)
def test_exact(place: Place) -> None:
    given = Operands(place)
    options = given.options("everything")
    logits = given.hidden.double() @ given.weight.double().T + given.bias.double()
    logits = 20.0 * torch.tanh(0.8 * logits[:, : given.vocab] / 20.0) / given.temperature.double()[:, None]
    log_p, counts = logits.log_softmax(1), given.target >= 0
    expected = [
        log_p.gather(1, given.target.clamp(min=0)[:, None])[:, 0], -(log_p.exp() * log_p).sum(1), logits.logsumexp(1),
        logits.mean(1), (2 * log_p).logsumexp(1), logits.argmax(1),
    ]  # fmt: skip
    with torch.no_grad():
        for ours, exact in zip(given.values(options), expected, strict=True):
            torch.testing.assert_close(ours.double(), exact.double().where(counts, 0.0), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("place", OURS)
def test_any_batch(place: Place) -> None:
    """Whatever the other tokens are, how many, in which order, in which chunks, with a gradient and without; and
    whatever else is asked for."""
    given = Operands(place)
    options = given.options("plain")
    with torch.no_grad():
        (alone,) = given.values(options)
    every = torch.arange(given.tokens, device=place.device)
    # NumPy's products, which the interpreter takes, depend on where a row stands
    batches = [every[:1], every[:7], every] if place.device == "cpu" else [every[7:8], every[3:10], every.flip(0)] * 3
    for tokens in batches:
        for chunk in (None, 16) if place.device == "cuda" else (None,):
            for gradient in (False, True):
                with torch.set_grad_enabled(gradient):
                    given.weight.requires_grad_(gradient)
                    (values,) = given.values(options | {"chunk_tokens": chunk}, tokens=tokens)
                    assert values.requires_grad == gradient and torch.equal(values, alone[tokens])
    with torch.no_grad():
        # a small number shows the last bits of the sum
        given.target.copy_(torch.where(given.target >= 0, given.values(options | {"argmax": True})[1], given.target))
        (alone,) = given.values(options)
        for asked in (("entropy",), ("argmax", "mean_logit"), EVERYTHING[:-1]):
            assert torch.equal(given.values(options | dict.fromkeys(asked, True))[0], alone), asked
