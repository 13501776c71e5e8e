"""Every loss through the chunk loop, on every backend and path, against the oracle on full logits in float64."""

from typing import Any

import pytest
import torch
from cases import PLACES, Place
from chunked_head.kernels.common.tiles import PRODUCT_ROWS
from loss_cases import LOSS_CASES, LossCase, LossInputs, hold, inputs_of, loss_combinations, run_ours, run_reference
from oracle import reference
from tiers import crossed, tier
from torch import Tensor

from chunked_head import LossOutput, linear_loss, logits_loss, losses, metrics
from chunked_head.metrics import Metric
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


@pytest.mark.parametrize("place", PLACES)
def test_a_users_function_of_a_divergence(place: Place) -> None:
    """Its slope depends on the value, which has to come first."""

    @losses.custom(scope="token", reads_target=False)
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


# ---- the smallest calls

SETTINGS: dict[str, dict[str, Any]] = {
    "no-tokens": {"tokens": 0}, "ignored": {"tokens": 5}, "ignored-skipped": {"tokens": 5}, "one-token": {"tokens": 1},
    "vocabulary-1": {"tokens": 14, "vocab": 1}, "vocabulary-2": {"tokens": 30, "vocab": 2},
}  # fmt: skip
PARTS = 7  # all metrics beside the first loss; beside each other one a part, so that each stands beside several
FIELDS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "segments", "documents")


def every_metric() -> list[Metric]:
    """All of them at every level, weighting and reduction, under names of their own."""
    found = [
        metrics.accuracy(), metrics.perplexity(), metrics.perplexity("segment"),
        metrics.kl_reference(bias_correction=True),
    ]  # fmt: skip
    for weighting in ("segment", "document"):
        for make in (metrics.entropy, metrics.accuracy, metrics.kl_old, metrics.advantage):
            found.append(make(weighting=weighting, name=f"{make.__name__} by {weighting}"))
    for make in (
        metrics.entropy, metrics.lse, metrics.mean_logit, metrics.logprob, metrics.top_probability, metrics.advantage,
        metrics.ratio, metrics.kl_old, metrics.kl_reference,
    ):  # fmt: skip
        found += [make(reduce=reduce) for reduce in ("mean", "max", "min")]
    for against in ("old", "reference", "rollout"):
        for level in ("token", "segment"):
            for normalized in (True, False):
                found.append(metrics.effective_sample_size(against, level=level, normalized=normalized))
            found += [metrics.ratio(against, level=level, reduce=reduce) for reduce in ("mean", "max", "min")]
    for estimator in ("k1", "abs", "k2", "k3"):
        found += [metrics.kl_old(estimator, level="segment", reduce=reduce) for reduce in ("mean", "max", "min")]
        found += [metrics.kl_old(estimator), metrics.kl_reference(estimator)]
    for side in ("unsigned", "signed", "low", "high"):
        found += [metrics.clip_fraction(side=side, level=level) for level in ("token", "segment")]
    return list({metric.label: metric for metric in found}.values())


def small_calls() -> list:
    """Each loss in one of the settings in turn, interpreted every other loss; in all of them, interpreted in two,
    exhaustive."""
    found = []
    for place in PLACES:
        for i, case in enumerate(LOSS_CASES):
            for j, name in enumerate(SETTINGS):
                interpreted = place.id == "triton-interpreted"
                if not interpreted or (i + j) % 3 == 0:
                    param = pytest.param(
                        case, name, place.values[0], marks=place.marks, id=f"{case.name}-{name}-{place.id}"
                    )
                    turn = (i + j) % 6 == (3 if interpreted else 1) and not (interpreted and i % 2)
                    found += tier(param, turn or (i == 0 and not interpreted))
    return found


@pytest.mark.parametrize(("case", "setting", "place"), small_calls())
def test_smallest_calls(case: LossCase, setting: str, place: Place) -> None:
    """Every loss and every metric of no token, one, none that counts, and of one or two ids."""
    inputs = inputs_of(case, torch.float32, place.device, more=FIELDS, **SETTINGS[setting])
    counts = torch.full(inputs.hidden.shape[:1], setting == "one-token", device=place.device)
    nothing = "ignored" in setting or setting == "no-tokens"
    if len(counts) < 6:
        inputs.batch["mask"] = counts
        if inputs.target is not None:
            inputs.target.masked_fill_(~counts, -100).clamp_(min=0 if counts.any() else -100)
    wanted = [metric for metric in every_metric() if case.target or not metric.reads_target]
    if "kept_ids" in case.batch:
        wanted = [metric for metric in wanted if "mean_logit" not in metric.needs]
    if number := LOSS_CASES.index(case):
        wanted = wanted[number % PARTS :: PARTS]
    options: dict[str, Any] = {"metrics": wanted} | ({"chunk_tokens": 3} if len(counts) > 3 else {})
    if setting == "ignored-skipped":
        options["skip_ignored"] = "wait"
    out, grads = run_ours(case, inputs, place, **options)
    numbers = {"loss": out.loss, **out.parts}
    if nothing:
        assert not any(value.any() for value in (*numbers.values(), *grads))
    else:
        truth = run_reference(case, inputs.to(torch.float64))
        exact = {"loss": truth[0], **truth[1]}
        certain = setting == "vocabulary-1" and case.name in ("unlikelihood", "orpo")
        if certain or not exact["loss"].isfinite():
            # the odds of a certain token, and the rest of all ids, are infinite; here they are held within bounds
            assert all(value.isfinite().all() for value in (*numbers.values(), *grads))
        else:
            torch.testing.assert_close({k: v.cpu().double() for k, v in numbers.items()}, exact, rtol=1e-5, atol=1e-6)
            for ours, theirs in zip(grads, truth[2], strict=True):
                torch.testing.assert_close(ours.cpu().double(), 0.37 * theirs, rtol=1e-4, atol=1e-6)
    assert_metrics(out, wanted, case, inputs)
    if "teacher_hidden" in case.batch or case.head:
        return
    logits = (inputs.hidden @ inputs.weight.t()).requires_grad_()
    again = logits_loss(
        logits, inputs.target, case.losses, batch=inputs.batch, num_segments=inputs.num_segments, metrics=wanted,
        backend=place.backend,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(again.loss, logits)
    assert grad.isfinite().all() and not (nothing and grad.any())
    torch.testing.assert_close(again.loss, out.loss, rtol=1e-5, atol=1e-6)
    assert_metrics(again, wanted, case, inputs)


def assert_metrics(out: LossOutput, wanted: list[Metric], case: LossCase, inputs: LossInputs) -> None:
    """Against PyTorch's operations in float64, which ``tests/losses/test_metrics.py`` holds to formulas."""
    exact = inputs.to(torch.float64).on("cpu")
    truth = linear_loss(
        exact.hidden, exact.weight, exact.target, case.losses, batch=exact.batch, num_segments=exact.num_segments,
        metrics=wanted, **exact.head,
    )  # fmt: skip
    assert out.metrics.keys() == {metric.label for metric in wanted}
    found, true = ({name: one.value.cpu().double() for name, one in of.metrics.items()} for of in (out, truth))
    torch.testing.assert_close(found, true, rtol=1e-5, atol=3e-5)


def test_unreduced_logits() -> None:
    case = next(case for case in LOSS_CASES if case.name == "grpo-sum")
    inputs = inputs_of(case, torch.float32, "cpu")
    logits = (inputs.hidden @ inputs.weight.T).requires_grad_()
    alone = logits_loss(logits, inputs.target, case.losses, batch=inputs.batch, reduction="none").loss
    of_head = linear_loss(
        inputs.hidden, inputs.weight, inputs.target, case.losses, batch=inputs.batch, reduction="none"
    ).loss
    torch.testing.assert_close(alone, of_head)
    (found,) = torch.autograd.grad(alone.square().sum(), logits)
    assert found.isfinite().all() and found.any()
