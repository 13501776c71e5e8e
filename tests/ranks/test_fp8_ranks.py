"""``precision="fp8"`` on ranks that share the vocabulary: errors of values and gradients, of heavy ids among them."""

from typing import Any

import pytest
import ranks
import torch
import torch.nn.functional as F
from torch import Tensor

from chunked_head import VocabParallel, linear_cross_entropy, linear_logprobs, quantise

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)]
SIZES = {"cpu": (40, 515, 64), "cuda": (1024, 16384, 512)}  # tokens, vocabulary, hidden


def head_of(device: str) -> tuple[Tensor, ...]:
    """Tokens that are sure of some ids each, more or less."""
    (tokens, vocab, width), generator = SIZES[device], torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, width, generator=generator) for n in (tokens, vocab))
    weight *= 1.5 / width**0.5
    likely = torch.randint(0, vocab, (tokens, 6), generator=generator)
    strength = 10.0 * torch.rand(tokens, 1, generator=generator) * torch.rand(tokens, 6, generator=generator)
    hidden += (strength[:, :, None] * F.normalize(weight[likely], dim=2)).sum(1)
    target = torch.multinomial((hidden @ weight.t()).softmax(1), 1, generator=generator)[:, 0]
    target[::9] = -100
    return hidden.bfloat16(), weight.bfloat16(), target


def columns_of(rank: int, device: str) -> slice:
    first = -(-SIZES[device][1] // 2)
    return slice(first) if rank == 0 else slice(first, None)


def work(rank: int, place: str) -> dict[str, Any]:
    """Loss and gradients of a rank, by the way in which they are made: by e4m3 products at once, by 16-bit ones at once
    and later, by a kept copy; and the log-probabilities of half of the tokens."""
    device = place.split(":")[0]
    hidden, weight, target = (t.to(place) for t in head_of(device))
    own = [t.clone().requires_grad_() for t in (hidden, weight[columns_of(rank, device)])]
    given: dict[str, Any] = {
        "precision": "fp8", "backend": "triton", "parallel": VocabParallel(), "vocab_size": len(weight)
    }  # fmt: skip
    options: dict[str, dict[str, Any]] = {
        "at once": {}, "16 bits": {"deterministic": True}, "late": {"reduction": "none"},
        "kept": {"fp8_weight": quantise(own[1], backend="triton")},
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, option in options.items():
        for again in ("", ", again"):
            loss = linear_cross_entropy(*own, target, **given, **option)
            loss = loss[target >= 0].mean() if loss.dim() else loss
            found[name + again] = [t.detach().cpu() for t in (loss, *torch.autograd.grad(loss, own))]
    with torch.no_grad():
        found["logprobs"] = linear_logprobs(hidden, own[1], target, **given, deterministic=True).cpu()
        found["half"] = linear_logprobs(hidden[::2], own[1], target[::2], **given, deterministic=True).cpu()
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_errors(device: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those of log-probabilities and of gradients are within plain PyTorch's in bf16, and the same bits come again."""
    ranks.need_gpus(device, 2)
    found = ranks.run_once(work, 2, tmp_path_factory, f"fp8-{device}", device)
    hidden, weight, target = head_of(device)
    exact: dict[torch.dtype, list[Tensor]] = {}
    for dtype in (torch.float64, torch.bfloat16):
        h, w = (t.to(dtype).requires_grad_() for t in (hidden, weight))
        x = F.linear(h, w)
        each = F.cross_entropy(x.to(torch.promote_types(dtype, torch.float32)), target, reduction="none")
        exact[dtype] = [-each.detach(), *torch.autograd.grad(each[target >= 0].mean(), (h, w))]
    truth, plain = ([t.double() for t in exact[dtype]] for dtype in (torch.float64, torch.bfloat16))
    counts = target >= 0
    for rank in found:
        assert torch.equal(rank["logprobs"][::2], rank["half"])
        error, allowed = ((t - truth[0])[counts].square().mean() for t in (rank["logprobs"].double(), plain[0]))
        assert error <= allowed
    for name in ("at once", "16 bits", "late", "kept"):
        for rank in found:
            for once, again in zip(rank[name], rank[f"{name}, again"], strict=True):
                assert torch.equal(once, again), name
            assert torch.equal(rank[name][0], found[0][name][0]) and torch.equal(rank[name][1], found[0][name][1])
        gradients = found[0][name][1], torch.cat([rank[name][2] for rank in found])
        for one, other, true in zip(gradients, plain[1:], truth[1:], strict=True):
            error, allowed = ((t.double() - true).norm() / true.norm() for t in (one, other))
            assert error <= 1.2 * allowed, (name, float(error), float(allowed))
