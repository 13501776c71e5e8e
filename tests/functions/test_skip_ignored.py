"""Tokens that do not count, left out of the matmuls: nothing but the time may change."""

import pytest
import torch
from cases import GPU, PLACES, TRITON, Case, Place
from tiers import crossed, first_of
from torch import Tensor

from chunked_head import linear_cross_entropy, linear_logprobs, linear_loss, losses

SIZES = Case("", (96,), 64, 160)
HALF = [torch.bfloat16, torch.float16]
SHARES = [0.0, 0.5, 0.97, 1.0]


def operands(place: Place, dtype: torch.dtype, ignored: float) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (nan where a token does not count), weight, target."""
    inputs = SIZES.inputs(dtype, place.device)
    generator = torch.Generator().manual_seed(3)
    skipped = (torch.rand(96, generator=generator) < ignored).to(place.device)
    hidden = torch.where(skipped[:, None], torch.nan, inputs.hidden.detach())
    target = torch.where(skipped, -100, inputs.target)
    return hidden.requires_grad_(), inputs.weight.detach().requires_grad_(), target


def skip_at(place: Place, skip: bool | str = True) -> bool | str:
    """On a GPU torch's own products cannot stop at a number that only the device knows."""
    return "wait" if place == Place("torch", "cuda") else skip


def same(ours: list[Tensor], usual: list[Tensor], dtype: torch.dtype) -> None:
    """To the rounding of sums in another order."""
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 1e-5}[dtype]
    for mine, theirs in zip(ours, usual, strict=True):
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()) / 4)


SKIPPED = [*((share, True) for share in SHARES), (0.5, "wait"), (1.0, "wait")]  # share of ignored tokens, and how


@crossed(place=PLACES, dtype=HALF, reduction=["mean", "none"], skipped=SKIPPED)
def test_cross_entropy(place: Place, dtype: torch.dtype, reduction: str, skipped: tuple[float, bool | str]) -> None:
    found, (ignored, skip) = [], skipped
    for how in (skip_at(place, skip), False):
        hidden, weight, target = operands(place, dtype, ignored)
        options = {"reduction": reduction, "chunk_tokens": 32, "skip_ignored": how, "backend": place.backend}
        options["accumulate_dtype"] = torch.float32  # 16-bit sums of other chunks are rounded otherwise
        value = linear_cross_entropy(hidden, weight, target, **options)
        found.append([value.detach(), *torch.autograd.grad(value, (hidden, weight), torch.full_like(value, 0.37))])
    same(*found, dtype)


@pytest.mark.usefixtures("architecture")
@pytest.mark.parametrize("place", [*TRITON, *GPU[:1]])
@pytest.mark.parametrize("ignored", first_of([0.5, 1.0, 0.0, 0.97], 2))
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_on_other_gpus(place: Place, ignored: float, reduction: str) -> None:
    test_cross_entropy(place, torch.bfloat16, reduction, (ignored, True))


@pytest.mark.parametrize("place", [place for place in PLACES if place.values[0].backend == "triton"])
def test_where_rows_cannot_be_bounded(place: Place) -> None:
    """fp32 runs cuBLAS's products over all rows: an error, and no silent other way."""
    hidden, weight, target = operands(place, torch.float32, 0.5)
    with pytest.raises(ValueError, match=r"skip_ignored=True needs our own matmuls.*use 'wait' or False"):
        linear_cross_entropy(hidden, weight, target, backend=place.backend, skip_ignored=True)


@pytest.mark.parametrize("place", [*TRITON, *GPU[:1]])
def test_a_teacher_whose_rows_start_anywhere(place: Place) -> None:
    """Recomputed beside a dense teacher, gradients lie in fp32 logits: rows our own products do not take."""
    made = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 64, generator=made).to(place.device, torch.bfloat16) for n in (96, 161))
    target = torch.randint(0, 161, (96,), generator=made).to(place.device)
    target[::2] = -100
    batch = {"old_logprobs": torch.full((96,), -6.0), "advantages": torch.linspace(-1, 1, 96)}
    batch |= {"segments": torch.arange(96) // 30, "teacher_hidden": torch.randn(96, 64, generator=made).bfloat16()}
    batch |= {"teacher_weight": torch.randn(161, 64, generator=made).bfloat16() * 0.2}
    batch = {name: value.to(place.device) for name, value in batch.items()}
    found = []
    for skip in (False, True):
        h, w = hidden.clone().requires_grad_(), (weight * 0.2).requires_grad_()
        out = linear_loss(
            h, w, target, losses.gspo(clip_low=0.9, clip_high=9.0) + losses.forward_kl(), batch=batch, num_segments=4,
            chunk_tokens=32, backend=place.backend, skip_ignored=skip,
        )  # fmt: skip
        out.loss.backward()
        found.append([out.loss.detach(), h.grad, w.grad])
    same(found[1], found[0], torch.bfloat16)


@crossed(place=PLACES, dtype=HALF, call=["none", "mean", "logprobs", "gspo", "retained"])
def test_a_trained_bias(place: Place, dtype: torch.dtype, call: str) -> None:
    """Its gradient is a sum over the rows that count, of more tiles than those have, also where it is made in
    backward."""
    made, tokens, vocab = torch.Generator().manual_seed(6), 300, 48
    hidden, weight, bias = (torch.randn(size, generator=made) for size in ((tokens, 64), (vocab, 64), (vocab,)))
    hidden, weight, bias = (t.to(place.device, dtype) for t in (hidden, weight / 8, bias))
    target = torch.randint(0, vocab, (tokens,), generator=made).masked_fill_(torch.arange(tokens) % 7 != 3, -100)
    target = target.to(place.device)
    batch = {"advantages": torch.linspace(-1, 1, tokens), "segments": torch.arange(tokens) // 80}
    batch = {name: value.to(place.device) for name, value in batch.items()}
    found = []
    for skip in (False, skip_at(place)):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        options = {"bias": leaves[2], "skip_ignored": skip, "backend": place.backend}
        if call == "logprobs":
            value = linear_logprobs(*leaves[:2], target, entropy=True, **options)
            value = (value.logprobs * value.entropy.detach() + value.entropy).sum()
        elif call == "gspo":
            options |= {"batch": batch, "num_segments": 4, "chunk_tokens": 256}
            value = linear_loss(*leaves[:2], target, losses.gspo(), **options).loss
        else:
            reduction = "none" if call == "none" else "mean"
            value = linear_cross_entropy(*leaves[:2], target, reduction=reduction, **options).sum()
        if call == "retained":
            torch.autograd.grad(value, leaves, retain_graph=True)
        found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    same(found[1], found[0], dtype)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_few_of_many_tokens(place: Place, dtype: torch.dtype) -> None:
    """No statistics are made of tiles without a row that counts, and what stands there has no part in any gradient:
    not in the gain that fp16 gradients of all rows share either."""
    made = torch.Generator().manual_seed(6)
    # rows of several tiles
    length, width, vocab = (171, 128, 1003) if place.device == "cuda" else (40, 32, 67)
    sizes = (3, length, width), (vocab, width), (vocab,)
    hidden, weight, bias = (torch.randn(size, generator=made) for size in sizes)
    hidden, weight, bias = (t.to(place.device, dtype).requires_grad_() for t in (hidden, weight / 11, bias))
    target = torch.randint(0, vocab, (3, length), generator=made).to(place.device)
    mask = torch.zeros(3, length, dtype=torch.bool, device=place.device)
    mask[1, 30] = True
    options = {"bias": bias, "entropy": True, "log_sum_sq_probs": True, "temperature": 0.5, "logit_scale": -0.5}
    found = []
    for extra in ({"skip_ignored": skip_at(place), "mask": mask}, {}):
        at = (hidden, target) if extra else (hidden[mask], target[mask])
        values = linear_logprobs(at[0], weight, at[1], backend=place.backend, **options, **extra)
        grads = torch.autograd.grad(sum(value.sum() for value in values), (hidden, weight, bias))
        assert not grads[0][~mask].any()
        found.append([*(value.detach().sum() for value in values), *grads])
    same(found[0], found[1], dtype)
