"""Per-token divergences for a loss of the caller's own: values and gradients against whole logits."""

from typing import Any

import pytest
import torch
from budget import assert_within_budget
from cases import PLACES, Place
from tiers import crossed
from torch import Tensor

from chunked_head import linear_divergence, linear_loss, losses

TOKENS, HIDDEN, VOCAB, WIDTH = 57, 64, 213, 48


def operands(dtype: torch.dtype, device: str, teacher_vocab: int = VOCAB) -> tuple[list[Tensor], dict[str, Tensor]]:
    """hidden, weight and bias; target, mask and a teacher."""
    made = torch.Generator().manual_seed(3)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=made).to(device)

    student = [normal(TOKENS, HIDDEN), normal(VOCAB, HIDDEN) * 2 / HIDDEN**0.5, normal(VOCAB)]
    teacher = {
        "teacher_hidden": normal(TOKENS, WIDTH), "teacher_weight": normal(teacher_vocab, WIDTH) * 2 / WIDTH**0.5,
        "teacher_bias": normal(teacher_vocab),
    }  # fmt: skip
    return [t.to(dtype) for t in student], {name: t.to(dtype) for name, t in teacher.items()}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"divergence": "kl"}, "divergence of linear_divergence must be one of 'forward_kl'"),
        ({"beta": 0.3}, 'beta goes with divergence="jsd" only'),
        ({"teacher_hidden": None}, "teacher"),
        ({"teacher_weight": torch.zeros(5, 3)}, "teacher_weight"),
        ({"teacher_weight": torch.zeros(0, WIDTH), "teacher_bias": None}, r"must have shape \[vocabulary"),
        ({"teacher_weight": torch.zeros(5, WIDTH).to_sparse()}, r"teacher_weight'\] must be a dense tensor"),
    ],
    ids=str,
)
def test_wrong_arguments(options: dict[str, Any], says: str) -> None:
    (hidden, weight, _), teacher = operands(torch.float32, "cpu")
    with pytest.raises((ValueError, TypeError), match=says):
        linear_divergence(hidden, weight, **{**teacher, **options})


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "wide", [("teacher_weight", "teacher_bias"), ("teacher_hidden", "teacher_weight", "teacher_bias")], ids=len
)
def test_a_teacher_under_autocast(place: Place, wide: tuple[str, ...]) -> None:
    """Its operands are cast as the student's are, whatever their dtypes; the cast head is the plan's to name."""
    student, teacher = operands(torch.bfloat16, place.device)  # numbers that a cast leaves as they are
    hidden, weight, _ = (t.float().requires_grad_() for t in student)
    given = {name: t.float() if name in wide else t for name, t in teacher.items()}
    target = torch.zeros(TOKENS, dtype=torch.int64, device=place.device)

    def run(batch: dict[str, Tensor], chunk: int) -> list[Any]:
        hidden.grad = weight.grad = None
        with torch.autocast(place.device, torch.bfloat16):
            out = linear_loss(
                hidden, weight, target, losses.forward_kl(), batch=batch, backend=place.backend, chunk_tokens=chunk
            )
            value = linear_divergence(hidden, weight, backend=place.backend, **batch)
        for retain in (True, False):  # the second computes logits again
            out.loss.backward(retain_graph=retain)
        value.sum().backward()
        return [out.loss, value, hidden.grad, weight.grad, out.plan]

    (*mine, plan), (*right, narrow) = run(given, 24), run(teacher, 24)
    for a, b in zip(mine, right, strict=True):
        assert torch.equal(a, b)
    cast = [sum(buffer.bytes for buffer in each.buffers if buffer.kind == "cast") for each in (plan, narrow)]
    assert cast[0] - cast[1] == teacher["teacher_weight"].numel() * 2
    with pytest.raises(TypeError, match=r"'\] must have the dtype of teacher_hidden, .* run under torch\.autocast"):
        linear_divergence(hidden, weight, **{**teacher, "teacher_bias": teacher["teacher_bias"].double()})


@crossed(place=PLACES, kind=["lk", "tvd"], half=[False, True])
def test_hardly_any_overlap(half: bool, kind: str, place: Place) -> None:
    """A drafter that is sure of other ids than its verifier: the slope of the overlap's logarithm is a difference of
    numbers near 1 by so little."""
    dtype = torch.float16 if half else torch.float32
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(400, HIDDEN, generator=made) / HIDDEN**0.5
    hidden = torch.stack([5 * weight[5 * i : 5 * i + 5].sum(0) for i in range(16)])
    hidden = hidden + 0.5 * torch.randn(16, HIDDEN, generator=made)
    hidden, teacher, weight = (t.to(place.device, dtype) for t in (hidden, 3.5 * hidden.flip(0), weight))
    batch = {"teacher_hidden": teacher, "teacher_weight": weight}

    def grads(wide: torch.dtype | None) -> list[Tensor]:
        leaves = [t.to(wide or dtype).clone().requires_grad_() for t in (hidden, weight)]
        if wide is None:
            value = linear_loss(*leaves, None, getattr(losses, kind)(), batch=batch, backend=place.backend).loss
        else:
            x, y = leaves[0] @ leaves[1].t(), teacher.to(wide) @ weight.to(wide).t()
            p, q = (z.to(torch.promote_types(wide, torch.float32)).softmax(-1) for z in (x, y))
            overlap = torch.minimum(p, q).sum(-1)
            assert overlap.amin() < 1e-3 and overlap.amax() < 0.1
            value = (-overlap.log() if kind == "lk" else (p - q).abs().sum(-1) / 2).mean()
        return list(torch.autograd.grad(value, leaves))

    for ours, eager, truth in zip(grads(None), grads(dtype), grads(torch.float64), strict=True):
        assert_within_budget(ours, eager, truth, dtype, kind)


@crossed(
    place=PLACES,
    alike=["both sure", "the same head", "one id"],
    kind=["lk", "tvd"],
    half=[False, True],
    upstream=["none", "mean"],
)
def test_signs_that_rounding_decides(half: bool, upstream: str, kind: str, alike: str, place: Place) -> None:
    """The sign of ``p - q`` is asked for by the sum over the row and by the gradient of a column, of logits that were
    rounded differently. Where student and teacher agree the gradient is 0, and not a column's probability."""
    dtype = torch.float16 if half else torch.float32
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(1 if alike == "one id" else 300, HIDDEN, generator=made) / HIDDEN**0.5
    target = torch.randint(0, len(weight), (64,), generator=made)
    hidden = torch.randn(64, HIDDEN, generator=made)
    if alike == "both sure":
        hidden += 60 * weight[target]
    hidden, weight = hidden.to(place.device, dtype).requires_grad_(), weight.to(place.device, dtype).requires_grad_()
    teacher = hidden.detach() if alike == "the same head" else (hidden + 0.05 * hidden.flip(0)).detach()
    if alike == "both sure":
        p, q = ((h.double() @ weight.double().t()).softmax(-1).amax(-1) for h in (hidden, teacher))
        assert min(p.amin(), q.amin()) > 1 - 1e-5
    batch = {"teacher_hidden": teacher, "teacher_weight": weight.detach()}
    found = linear_loss(
        hidden, weight, target.to(place.device), getattr(losses, kind)(), batch=batch, reduction=upstream,
        backend=place.backend,
    )  # fmt: skip
    (found.loss.sum() * (1.0 if upstream == "none" else 64.0)).backward()
    assert hidden.grad is not None and hidden.grad.abs().amax() < 5e-3


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["entropy", "forward_kl", "reverse_kl", "jsd", "tvd", "lk"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nan_at_a_token_that_counts_shows(place: Place, kind: str, reduction: str) -> None:
    """In the loss and in that token's gradient, as in PyTorch: of nan hidden states, or of a nan teacher."""
    hidden, weight, teacher = (torch.randn(*shape, device=place.device) for shape in ((6, 16), (40, 16), (6, 40)))
    target = torch.tensor([1, 2, -100, 3, 4, 5], device=place.device)
    for broken in (hidden,) if kind == "entropy" else (hidden, teacher):
        rows, y = hidden.clone(), teacher.clone()
        (rows if broken is hidden else y)[1, 3] = torch.nan
        rows.requires_grad_()
        batch = {} if kind == "entropy" else {"teacher_logits": y}
        given = {"batch": batch, "reduction": reduction, "backend": place.backend}
        loss = linear_loss(rows, weight, target, getattr(losses, kind)(), **given).loss
        (grad,) = torch.autograd.grad(loss.sum(), rows)
        assert loss.reshape(-1)[1 if reduction == "none" else 0].isnan()
        assert grad[1].isnan().any() and grad[[0, *range(2, 6)]].isfinite().all()
