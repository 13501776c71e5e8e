"""Every loss through the chunk loop, on every backend and path, against the oracle on full logits in float64."""

from typing import Any

import pytest
import torch
from cases import PLACES, Place
from loss_cases import LOSS_CASES, LossCase, hold, inputs_of, loss_combinations, run_ours, run_reference
from oracle import reference
from tiers import crossed, tier
from torch import Tensor

from chunked_head import LossOutput, linear_loss, losses, metrics
from chunked_head.core.tiles import PRODUCT_ROWS
from chunked_head.plan import sizes as sizes_of_call


@pytest.mark.parametrize(("case", "dtype", "place", "schedule"), loss_combinations())
def test_loss(case: LossCase, dtype: torch.dtype, place: Place, schedule: dict[str, Any]) -> None:
    hold(case, dtype, place, schedule)


# ---- a teacher whose statistics come with the gradient

LAST: dict[str, tuple[Any, dict[str, Any]]] = {
    "kl": (losses.forward_kl(), {"skip_ignored": True}),
    "two-temperatures": (losses.forward_kl(temperature=2.0) + losses.cross_entropy(), {"chunk_tokens": 160}),
    "cross-entropy-form": (losses.forward_kl("cross_entropy") + 0.5 * losses.cross_entropy(), {}),
    "smaller": (losses.forward_kl() + 0.5 * losses.cross_entropy(), {"softcap": 5.0, "skip_ignored": True}),
}
KERNELS = [place for place in PLACES if place.values[0].backend == "triton"]
INTERPRETED = 1  # of these, the first


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place.values[0], marks=place.marks, id=f"{name}-{place.id}")
        for place in KERNELS
        for name in list(LAST)[: INTERPRETED if place.id == "triton-interpreted" else None]
    ],
)
def test_teacher_some_rows_at_a_time(name: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that makes the gradient makes the numbers that a pass of their own does beside another loss."""
    loss, options = LAST[name]
    batch = "teacher_hidden", "teacher_weight", "teacher_bias", "mask"
    case = LossCase(name, (), batch, teacher_vocab=256 if name == "smaller" else 384)
    dtype = torch.float16 if place.device == "cpu" else torch.bfloat16
    inputs = inputs_of(case, dtype, place.device, garbage=True, tokens=2 * PRODUCT_ROWS + 40)
    shared = {"batch": inputs.batch, "backend": place.backend, **options}
    monkeypatch.setattr(sizes_of_call, "TEACHER_ROWS", PRODUCT_ROWS)

    def run(loss: Any) -> tuple[LossOutput, list[torch.Tensor]]:
        leaves = [t.detach().clone().requires_grad_() for t in (inputs.hidden, inputs.weight)]
        out = linear_loss(*leaves, inputs.target, loss, metrics=[metrics.entropy()], **shared)
        return out, list(torch.autograd.grad(out.loss, leaves))

    ((_, summand), *_) = loss.terms
    assert summand.teacher is not None
    before, true = run(loss + 0.0 * losses.tvd(**teacher_options(summand)))
    out, found = run(loss)
    assert out.plan is not None and before.plan is not None and out.plan.teacher_last and not before.plan.teacher_last
    for label, value in out.parts.items():
        torch.testing.assert_close(value, before.parts[label], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.metrics["entropy"].value, before.metrics["entropy"].value)
    torch.testing.assert_close(found, true, rtol=1e-2, atol=1e-5)


def teacher_options(summand: Any) -> dict[str, Any]:
    return {"temperature": summand.temperature, "teacher_temperature": summand.teacher.temperature}


@crossed(
    place=KERNELS,
    columns=[128, 150, 40],
    temperature=[None, 0.5],
    above=[40.0, 70.0, 110.0, 150.0, 170.0, 300.0, -300.0],
)
def test_an_id_that_the_teacher_lacks_far_above_those_it_has(
    above: float, temperature: float | None, columns: int, place: Place
) -> None:
    """Behind the teacher's last id, in its strip or in the next, or far below; the divergence is over a softmax without
    it, the losses beside it are not."""
    own = {} if temperature is None else {"temperature": temperature}
    terms = reference.Term(1.0, "forward_kl", own), reference.Term(0.5, "cross_entropy"), reference.Term(0.3, "entropy")
    case = LossCase("far", terms, ("teacher_hidden", "teacher_weight"), teacher_vocab=columns)
    dtype = torch.float16 if place.device == "cpu" else torch.bfloat16
    inputs = inputs_of(case, dtype, place.device, tokens=40)
    inputs.hidden[:, 0], inputs.weight[:, 0], inputs.weight[columns, 0] = 1.0, 0.0, above
    inputs.target.clamp_(max=columns)
    inputs.target[::2] = columns
    truth, _, exact = run_reference(case, inputs.to(torch.float64))
    out, grads = run_ours(case, inputs, place)
    torch.testing.assert_close(out.loss.double(), truth, rtol=1e-3, atol=0.0, check_device=False)
    for name, ours, true in zip(("hidden", "weight"), grads, exact, strict=True):
        worst = (ours.double().cpu() - 0.37 * true.cpu()).abs().max() / (0.37 * true).abs().max().cpu()
        assert worst < 4 * torch.finfo(dtype).eps, f"gradient of {name}: {worst:.4f}"


@crossed(place=KERNELS, mask=[-1e9, -1e10, -1e30, -3.3e38, -torch.inf], kind=["fast", "relative", "second", "nothing"])
def test_ids_that_a_bias_makes_impossible(mask: float, kind: str, place: Place) -> None:
    """Whole strips of them, by any of the numbers that masks are made of; a row of nothing else is nan."""
    made = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 64, generator=made).to(place.device, torch.bfloat16) for n in (40, 1024))
    weight, target = 0.3 * weight, torch.randint(256, (40,), generator=made).to(place.device)
    bias = torch.zeros(1024, device=place.device, dtype=torch.bfloat16)
    bias[256:900] = mask
    loss = losses.cross_entropy() + 0.1 * losses.entropy()
    if kind == "fast":
        loss = 1.0 * losses.cross_entropy()
    elif kind == "second":
        loss = losses.cross_entropy() + 0.5 * losses.cross_entropy(temperature=2.0, name="second")
    x = (hidden.double() @ weight.double().t()).index_fill(1, torch.arange(256, 900, device=place.device), -torch.inf)
    log_p, log_p2 = x.log_softmax(1), (x / 2.0).log_softmax(1)
    each = -log_p.gather(1, target[:, None]).mean()
    if kind == "second":
        each -= 0.5 * log_p2.gather(1, target[:, None]).mean()
    elif kind != "fast":
        each -= 0.1 * (log_p.exp() * log_p.clamp(min=-1e4)).sum(1).mean()
    hidden.requires_grad_(kind != "nothing")
    found = linear_loss(hidden, weight, target, loss, bias=bias, backend=place.backend).loss
    torch.testing.assert_close(found.double(), each, rtol=1e-5, atol=1e-5)
    if kind != "nothing":
        assert torch.autograd.grad(found, hidden)[0].isfinite().all()
    if mask < -(2.0**30):
        found = linear_loss(hidden, weight, target, loss, bias=bias.fill_(mask), backend=place.backend).loss
        assert found.isnan()


@pytest.mark.parametrize("place", PLACES)
def test_a_users_function_of_a_divergence(place: Place) -> None:
    """Its slope depends on the value, which has to come first."""

    def squared(stats: Any, batch: Any) -> Tensor:
        return stats.forward_kl.square()

    inputs = inputs_of(LossCase("", (), ("teacher_hidden", "teacher_weight")), torch.float16, place.device, tokens=24)
    hidden = inputs.hidden.requires_grad_()
    ours = linear_loss(hidden, inputs.weight, None, squared, batch=inputs.batch, backend=place.backend).loss
    q = (inputs.batch["teacher_hidden"].double() @ inputs.batch["teacher_weight"].double().T).log_softmax(-1)
    p = (hidden.double() @ inputs.weight.double().T).log_softmax(-1)
    exact = (q.exp() * (q - p)).sum(-1).square().mean()
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)
    found, true = (torch.autograd.grad(loss, hidden)[0].double() for loss in (ours, exact))
    torch.testing.assert_close(found, true, rtol=1e-2, atol=2e-3 * float(true.abs().max()))


@pytest.mark.parametrize(
    ("case", "place"),
    [
        one for place in PLACES for i, case in enumerate(LOSS_CASES)
        for one in tier(pytest.param(case, *place.values, marks=place.marks, id=f"{case.name}-{place.id}"),
                        i % 4 == 0 or place.id != "triton-interpreted")
    ],
)  # fmt: skip
def test_nothing_counts(case: LossCase, place: Place) -> None:
    """0 and zero gradients: of no tokens, and of some of which none counts."""
    for tokens, options in ((0, {}), (5, {}), (5, {"skip_ignored": "wait", "chunk_tokens": 3})):
        inputs = inputs_of(case, torch.float32, place.device, tokens=tokens)
        inputs.batch["mask"] = torch.zeros(tokens, dtype=torch.bool, device=place.device)
        out, grads = run_ours(case, inputs, place, **options)
        assert not any(value.any() for value in (out.loss, *out.parts.values(), *grads))
