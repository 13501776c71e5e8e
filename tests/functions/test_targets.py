"""Targets beside the rows that predict them: every backend reads them alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import PLACES, Place, backend_of
from tiers import crossed
from torch import Tensor

from chunked_head import (
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_loss,
    logits_logprobs,
    logits_loss,
    losses,
    metrics,
)

VOCAB = 50
# more tokens than the kernel reads at a time; no dimension; none along the one that is shifted
LEADINGS = ((7,), (), (0,), (3, 5), (2, 3, 1700), (3, 0))


def expected(target: Tensor, mask: Tensor | None, shift: int, ignore_index: int) -> Tensor:
    """One row after the other."""
    length = target.shape[-1] if target.dim() else 1
    rows = target.reshape(target.numel() // max(length, 1), length)
    masks = torch.ones_like(rows, dtype=torch.bool) if mask is None else mask.reshape(rows.shape)
    found = torch.full_like(rows, -1)
    for at in range(max(0, length - shift)):
        counts = masks[:, at + shift] & (rows[:, at + shift] != ignore_index)
        found[:, at] = torch.where(counts, rows[:, at + shift], -1)
    return found.reshape(-1)


@crossed(place=PLACES, leading=LEADINGS, masked=[False, True], shift=[0, 1, 3, 9])
def test_as_one_after_the_other(place: Place, leading: tuple[int, ...], masked: bool, shift: int) -> None:
    if shift and not leading:
        pytest.skip("nothing to shift along")
    generator = torch.Generator().manual_seed(3)
    for ignore_index in (-100, 7, -1, 1 << 40):
        target = torch.randint(0, VOCAB, leading, generator=generator)
        target = torch.where(torch.rand(leading, generator=generator) < 0.3, ignore_index, target).to(place.device)
        mask = (torch.rand(leading, generator=generator) < 0.7).to(place.device) if masked else None
        if mask is not None:
            target = torch.where(mask, target, -5)  # out of range where it does not count
        paired, counted, one_or_nan, inverse = backend_of(place.backend, target.device).read_targets(
            target, mask, shift, ignore_index, VOCAB, torch.float32
        )
        right = expected(target, mask, shift, ignore_index)
        assert torch.equal(paired, right)
        assert counted.item() == (right >= 0).sum().item()
        assert one_or_nan.item() == 1.0 and inverse.item() == pytest.approx(1.0 / max(counted.item(), 1.0))
        assert counted.dtype == one_or_nan.dtype == inverse.dtype == torch.float32


@crossed(place=PLACES, wrong=[VOCAB, -1, 1 << 40, -(1 << 40)], at=[(0, 1), (1, 2499)])
def test_one_out_of_range_is_told(place: Place, wrong: int, at: tuple[int, int]) -> None:
    target = torch.zeros(2, 2500, dtype=torch.int64, device=place.device)
    target[at] = wrong
    read = backend_of(place.backend, target.device).read_targets
    paired, _, one_or_nan, inverse = read(target, None, 0, -100, VOCAB, torch.float32)
    assert one_or_nan.isnan() and inverse.isnan()
    assert paired[at[0] * 2500 + at[1]] == -1  # nobody uses it as an index
    assert not read(target, None, 0, wrong, VOCAB, torch.float32)[2].isnan()
    mask = torch.ones_like(target, dtype=torch.bool)
    mask[at] = False
    assert not read(target, mask, 0, -100, VOCAB, torch.float32)[2].isnan()


# ---- sequences that a shift leaves nothing of

FIELDS = {
    "old_logprobs": -torch.ones(2, 3), "ref_logprobs": -torch.ones(2, 3), "advantages": torch.ones(2, 3),
    "teacher_logits": torch.ones(2, 3, 11), "teacher_ids": torch.ones(2, 3, 2, dtype=torch.int64),
    "teacher_logprobs": -torch.ones(2, 3, 2), "kept_ids": torch.ones(2, 3, 4, dtype=torch.int64),
    "pairs": torch.tensor([[0, 1]]),
}  # fmt: skip
PAIRS = losses.dpo() + losses.cross_entropy()
POLICY = losses.grpo() + 0.1 * losses.entropy() + losses.forward_kl() + losses.topk_kl(normalize="topk")
OF_POLICY = ("old_logprobs", "advantages", "teacher_logits", "teacher_ids", "teacher_logprobs")
MEASURED = [metrics.entropy(), metrics.accuracy(), metrics.ratio(), metrics.lse(reduce="max"), metrics.perplexity()]
SHORT: dict[str, Callable[..., Any]] = {
    "cross-entropy": lambda h, w, y, b, **o: linear_cross_entropy(h, w, y, label_smoothing=0.1, z_loss=1e-3, **o),
    "none": lambda h, w, y, b, **o: linear_cross_entropy(h, w, y, reduction="none", **o),
    "logprobs": lambda h, w, y, b, **o: linear_logprobs(h, w, y, entropy=True, lse=True, argmax=True, top_k=2, **o),
    "kept": lambda h, w, y, b, **o: linear_logprobs(h, w, y, kept_ids=b["kept_ids"], **o),
    "divergence": lambda h, w, y, b, **o: linear_divergence(
        h, w, y, teacher_logits=b["teacher_logits"], entropy=True, **o
    ),
    "logits-logprobs": lambda h, w, y, b, **o: logits_logprobs(h @ w.t(), y, entropy=True, argmax=True, **o),
    "policy": lambda h, w, y, b, **o: linear_loss(
        h, w, y, POLICY, batch={name: b[name] for name in OF_POLICY}, metrics=MEASURED, **o
    ),
    "logits": lambda h, w, y, b, **o: logits_loss(
        h @ w.t(), y, POLICY, batch={name: b[name] for name in OF_POLICY}, metrics=MEASURED, **o
    ),
    "streams": lambda h, w, y, b, shift, **o: linear_loss(
        [h, h * 2], w, y, losses.cross_entropy(), shift=[shift, shift + 1], **o
    ),
    "segments": lambda h, w, y, b, **o: linear_loss(
        h, w, y, PAIRS, batch={name: b[name] for name in ("ref_logprobs", "pairs")}, segment_lengths=[2, 4], **o
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shift", [3, 7])
@pytest.mark.parametrize("name", SHORT)
def test_sequences_no_longer_than_the_shift(name: str, shift: int, place: Place) -> None:
    """They predict nothing, as a batch of which no token counts: 0 with a graph, zero gradients, metrics of nothing."""
    made = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(*size, generator=made).to(place.device) for size in ((2, 3, 8), (11, 8)))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    target = torch.ones(2, 3, dtype=torch.int64, device=place.device)
    # pairs are read by the host, where chunks end with segments
    fields = {name: field if name == "pairs" else field.to(place.device) for name, field in FIELDS.items()}
    out = SHORT[name](hidden, weight, target, fields, shift=shift, backend=place.backend)
    values = (
        [out.loss, *out.parts.values()] if hasattr(out, "parts") else [out] if isinstance(out, Tensor) else list(out)
    )
    assert all(not value.any() for value in values) and values[0].requires_grad
    for grad in torch.autograd.grad(values[0].sum(), (hidden, weight)):
        assert not grad.any()
    for label, metric in getattr(out, "metrics", {}).items():
        if metric.extremum is None:
            assert metric.sum.eq(0).all() and metric.count == 0, label
        else:
            assert metric.extremum == -torch.inf, label


def test_class_probabilities_are_a_teacher() -> None:
    """As the error says that refuses them as targets."""
    hidden, weight = torch.randn(5, 8).double().requires_grad_(), torch.randn(11, 8).double()
    p = torch.randn(5, 11).double().softmax(-1) * (torch.arange(11) != 4)
    p = p / p.sum(-1, keepdim=True)
    with pytest.raises(TypeError) as refused:
        linear_cross_entropy(hidden, weight, p)
    for advice in ("target=None", 'losses.forward_kl("cross_entropy")', 'batch={"teacher_logits": p.log()}'):
        assert advice in str(refused.value)
    loss = losses.forward_kl("cross_entropy")
    ours = linear_loss(hidden, weight, target=None, loss=loss, batch={"teacher_logits": p.log()}).loss
    theirs = F.cross_entropy(hidden @ weight.t(), p)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, hidden), torch.autograd.grad(theirs, hidden))
