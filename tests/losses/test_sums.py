"""Sums over the vocabulary of a user's function: of the student and a dense teacher, or of the student alone."""

import gc
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from cases import GPU, PLACES, TRITON, Place
from compiled_for import record_launches
from oracle.functions import alpha_divergence, power
from torch import Tensor

from chunked_head import linear_loss, logits_loss, losses, metrics, plan
from chunked_head.losses import Losses, Teacher
from chunked_head.losses.sums import sum_of

SIZES = (13, 67)  # tokens and ids
Function = Callable[..., Tensor]


def forward(log_p: Tensor, log_q: Tensor) -> Tensor:
    return log_q.exp() * (log_q - log_p)


def reverse(log_p: Tensor, log_q: Tensor) -> Tensor:
    return log_p.exp() * (log_p - log_q)


def jensen_shannon(log_p: Tensor, log_q: Tensor, options: Mapping[str, Tensor]) -> Tensor:
    b = options["beta"]
    log_m = torch.logaddexp(log_q + b.log(), log_p + torch.log1p(-b))
    return b * log_q.exp() * (log_q - log_m) + (1 - b) * log_p.exp() * (log_p - log_m)


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.minimum(log_p.exp(), log_q.exp())


def root(log_p: Tensor, log_q: Tensor) -> Tensor:
    """With an infinite slope, and then nan, where p is 0."""
    return (log_p.exp().sqrt() - log_q.exp().sqrt()).square()


def mass(log_p: Tensor) -> Tensor:
    """Written in place at the end, as torch 2.11 and older write the slope of a minimum."""
    return torch.where(log_p > -3.0, log_p.exp(), 1.0).masked_fill_(log_p <= -3.0, 0.0)


def oracle(
    function: Function, options: dict[str, float], x: Tensor, teacher: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Values [n] and their gradients [n, ids] of whole float64 logits, by the formula."""
    both = [x.double()] if teacher is None else [x.double(), teacher.double()]
    width = min(each.shape[-1] for each in both)
    logs = [each[:, :width].log_softmax(-1).clamp(min=-1e4) for each in both]
    numbers = [{name: torch.tensor(value).double() for name, value in options.items()}] if options else []
    log_p = logs[0].requires_grad_()
    terms = function(log_p, *logs[1:], *numbers)
    (slopes,) = torch.autograd.grad(terms.sum(), log_p)
    p = log_p.detach().exp()
    slopes = torch.where((p == 0) & slopes.isnan(), 0.0, slopes)
    grad = torch.zeros_like(x, dtype=torch.float64)
    grad[:, :width] = slopes - p * slopes.sum(-1, keepdim=True)
    return terms.detach().sum(-1), grad


def logits(place: Place, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Of a student and a teacher, some of them -inf in either and in both."""
    made = torch.Generator().manual_seed(seed)
    x, teacher = (2.0 * torch.randn(*SIZES, generator=made) for _ in range(2))
    x[1, 3:9], teacher[2, 5:30], x[4, 7], teacher[4, 7] = (-math.inf,) * 4
    return x.to(place.device), teacher.to(place.device)


PAIRED: list[tuple[Function, dict[str, float]]] = [
    (alpha_divergence, {"alpha": 0.3}), (jensen_shannon, {"beta": 0.2}), (forward, {}), (reverse, {}), (overlap, {}),
    (root, {}),
]  # fmt: skip
ALONE: list[tuple[Function, dict[str, float]]] = [(power, {"power": 2.0}), (power, {"power": 0.7}), (mass, {})]


def compare(loss: Losses, x: Tensor, teacher: Tensor | None, truth: tuple[Tensor, Tensor], place: Place) -> None:
    leaf, (values, true) = x.clone().requires_grad_(), truth
    batch = {} if teacher is None else {"teacher_logits": teacher}
    found = logits_loss(leaf, None, loss, batch=batch, backend=place.backend).loss
    torch.testing.assert_close(found.double(), values.mean(), rtol=2e-6, atol=2e-6)
    (grad,) = torch.autograd.grad(found, leaf)
    torch.testing.assert_close(grad.double(), true / len(x), rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fewer", [0, 5], ids=["ids", "fewer ids"])
@pytest.mark.parametrize(("function", "options"), PAIRED)
def test_divergence(function: Function, options: dict[str, float], fewer: int, place: Place) -> None:
    x, teacher = logits(place)
    teacher = teacher[:, : SIZES[1] - fewer]
    loss = losses.divergence(function, options)
    compare(loss, x, teacher, oracle(function, options, x, teacher), place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("function", "options"), ALONE)
def test_vocabulary_sum(function: Function, options: dict[str, float], place: Place) -> None:
    x, _ = logits(place)
    loss = losses.vocabulary_sum(function, options, temperature=0.8)
    values, grad = oracle(function, options, x.double() / 0.8)
    compare(loss, x, None, (values, grad / 0.8), place)
    metric = metrics.vocabulary_sum(function, options, name="of all")
    target = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    found = logits_loss(x, target, losses.z_loss(), metrics=[metric], backend=place.backend).metrics["of all"]
    torch.testing.assert_close(found.value.double(), oracle(function, options, x)[0].mean(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("function", "options"), PAIRED)
def test_of_equal_distributions(function: Function, options: dict[str, float], place: Place) -> None:
    """The gradient is that of no difference, up to rounding."""
    x, _ = logits(place)
    leaf = x.clone().requires_grad_()
    loss = losses.divergence(function, options, reduction="sum")
    logits_loss(leaf, None, loss, batch={"teacher_logits": x}, backend=place.backend).loss.backward()
    assert leaf.grad is not None and leaf.grad.abs().max() < 1e-6


@pytest.mark.parametrize("place", PLACES)
def test_nan_stays_in_its_row(place: Place) -> None:
    x, teacher = logits(place)
    x[6, 2] = math.nan
    leaf = x.clone().requires_grad_()
    loss = losses.divergence(alpha_divergence, {"alpha": 0.5}) + losses.vocabulary_sum(power, {"power": 2.0})
    out = logits_loss(leaf, None, loss, batch={"teacher_logits": teacher}, backend=place.backend)
    out.loss.backward()
    assert leaf.grad is not None and out.loss.isnan()
    assert leaf.grad[6].isnan().any() and leaf.grad[torch.arange(len(x)) != 6].isfinite().all()


@pytest.mark.parametrize("place", PLACES)
def test_several_betas_share_a_call(place: Place) -> None:
    """Each is what it is in a call of its own; equal ones are made once."""
    x, teacher = logits(place)
    mixes = {"a": losses.jsd(0.3, name="a"), "b": losses.jsd(0.7, name="b"), "c": 0.5 * losses.jsd(0.3, name="c")}
    mixes |= {"d": losses.reverse_kl(name="d"), "e": losses.forward_kl("cross_entropy", name="e")}

    def run(loss: Losses) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        out = logits_loss(leaf, None, loss, batch={"teacher_logits": teacher.clamp(min=-50)}, backend=place.backend)
        (grad,) = torch.autograd.grad(out.loss, leaf)
        return out.loss.detach(), grad

    each = [run(loss) for loss in mixes.values()]
    found, grad = run(sum(mixes.values()))
    torch.testing.assert_close(found, sum(value for value, _ in each), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, sum(one for _, one in each), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("place", PLACES)
def test_statistics_of_a_loss_of_ones_own(place: Place) -> None:
    x, teacher = logits(place)

    def renyi(stats: Any, batch: Any, a: float) -> Tensor:
        return stats.powers.log() / (1 - a) + 0.1 * stats.apart

    sums = {"powers": (power, {"power": 1.5}), "apart": overlap}
    loss = losses.custom(renyi, scope="token", sums=sums, options={"a": 1.5}, teacher=Teacher())

    (powers, first), (apart, second) = oracle(power, {"power": 1.5}, x), oracle(overlap, {}, x, teacher)
    grad = first / (powers * (1 - 1.5))[:, None] + 0.1 * second
    compare(loss, x, teacher, (powers.log() / (1 - 1.5) + 0.1 * apart, grad), place)


@pytest.mark.parametrize("place", [*TRITON, *GPU[:1]])
def test_a_schedule_compiles_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    x, teacher = logits(place)
    launched, counts, values = record_launches(monkeypatch), [], []
    for alpha in (0.3, 0.5, 0.7):
        loss = losses.divergence(alpha_divergence, {"alpha": alpha})
        loss += losses.vocabulary_sum(power, {"power": 1 + alpha}) + losses.jsd(alpha)
        leaf = x.clone().requires_grad_()
        out = logits_loss(leaf, None, loss, batch={"teacher_logits": teacher}, backend=place.backend)
        out.loss.backward()
        counts.append(len(launched))
        values.append(float(out.loss.detach()))
    assert counts[0] == counts[-1] and len({*values}) == 3


def test_what_a_function_reads_is_part_of_it() -> None:
    def of(factor: float) -> Function:
        return lambda log_p: factor * log_p.exp()

    def again(function: Function) -> Any:
        return sum_of("test", function, None, False).function

    assert again(of(2.0)) is again(of(2.0)) and again(of(2.0)) != again(of(3.0))
    assert again(of(0.0)).source != again(of(-0.0)).source or again(of(0.0)) == again(of(-0.0))
    globals()["FACTOR"] = 2.0
    first = again(scaled)
    globals()["FACTOR"] = 3.0
    assert again(scaled) != first

    class Scale:
        factor = 2.0

    scale = Scale()
    first = again(lambda log_p: scale.factor * log_p.exp())
    scale.factor = 3.0
    assert again(lambda log_p: scale.factor * log_p.exp()) != first


FACTOR = 1.0


def scaled(log_p: Tensor) -> Tensor:
    return FACTOR * log_p.exp()


def test_nothing_that_it_closes_over_is_kept() -> None:
    class Held:
        factor = 2.0

    def made() -> tuple[Losses, weakref.ref]:
        held = Held()
        return losses.vocabulary_sum(lambda log_p: held.factor * log_p.exp()), weakref.ref(held)

    loss, gone = made()
    gc.collect()
    assert gone() is None
    x = torch.zeros(3, 5)
    torch.testing.assert_close(logits_loss(x, None, loss).loss, torch.tensor(2.0))


TABLE = torch.linspace(0.0, 1.0, 7)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda p, q: (p - q).sum(), r"a floating-point number for each id, got torch.float32 \[\]"),
        (lambda p, q: (p - q).cumsum(0), "no kernel of cumsum"),
        (lambda p, q: p.softmax(-1), "no kernel of _softmax"),
        (lambda p, q: p / len(p), "depends on the number of ids"),
        (lambda p, q: p * TABLE, "column by column"),
        (lambda p, q: p if p[0] > 0 else q, "column by column"),
        (lambda p, q: p * torch.rand_like(q), "no kernel of rand_like"),
        (lambda p, q: 1.0, "a floating-point number for each id, got 1.0"),
        (lambda p, q: p > q, "a floating-point number for each id, got torch.bool"),
        (lambda p: p, "takes 1 positional argument but 2 were given"),
        (3.0, "takes a function"),
    ],
)
def test_what_cannot_be_traced_is_refused(function: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"losses.divergence.*{words}"):
        losses.divergence(function)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: losses.divergence(forward, {"a": "b"}), "option 'a'.*number"),
        (lambda: losses.divergence(forward, [0.3]), "options of losses.divergence must be a mapping"),
        (lambda: losses.divergence(forward, beta=0.3), "beta"),
        (lambda: losses.vocabulary_sum(mass, teacher_temperature=2.0), "teacher_temperature"),
        (lambda: losses.custom(lambda s, b: s.lse, scope="token", sums={"lse": mass}), "must be a new name"),
        (lambda: losses.custom(lambda s, b: s.lse, scope="token", sums=[mass]), "must be a mapping of names"),
        (lambda: losses.custom(lambda s, b: s.other, scope="token", sums={"mine": mass}), "'other' was not asked for"),
    ],
)
def test_refusals(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make()


def test_refusals_of_calls() -> None:
    loss, ids = losses.vocabulary_sum(mass), torch.zeros(4, 2, dtype=torch.int64)
    head = {"hidden": torch.zeros(4, 16), "weight": torch.zeros(7, 16), "target": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(ValueError, match="a sum over the vocabulary, which is of the whole vocabulary"):
        linear_loss(**head, loss=loss, batch={"kept_ids": ids})
    with pytest.raises(ValueError, match=r"fp8.* does not go with a sum over the vocabulary"):
        half = {name: value.bfloat16() if value.is_floating_point() else value for name, value in head.items()}
        linear_loss(**half, loss=loss, precision="fp8")
    with pytest.raises(ValueError, match="two of the losses are called 'divergence'"):
        loss = losses.divergence(forward) + losses.divergence(reverse)
        linear_loss(**head, loss=loss, batch={"teacher_logits": torch.zeros(4, 7)})
    with pytest.raises(ValueError, match="different temperatures or scales"):
        loss = losses.divergence(forward) + losses.divergence(reverse, teacher_temperature=2.0, name="other")
        linear_loss(**head, loss=loss, batch={"teacher_logits": torch.zeros(4, 7)})


def test_a_metric_sees_the_mixture_of_a_loss() -> None:
    x, teacher = logits(Place("torch", "cpu"))
    target, batch = torch.zeros(len(x), dtype=torch.int64), {"teacher_logits": teacher}
    metric = metrics.Metric("mine", lambda s, b: s.jsd, needs=frozenset({"jsd"}), check=False)
    mix = losses.tvd() + losses.jsd(0.3) + losses.jsd(0.6, name="far")
    out = logits_loss(x, target, mix, batch=batch, metrics=[metric])
    torch.testing.assert_close(out.metrics["mine"].value, out.parts["jsd"])
    with pytest.raises(ValueError, match="no loss of the call has a beta"):
        logits_loss(x, target, losses.tvd(), batch=batch, metrics=[metric])


def test_a_plan_needs_no_tensors() -> None:
    assert "logits buffer" in str(
        plan(4096, 1024, 32000, torch.bfloat16, loss=losses.vocabulary_sum(mass), device="cpu")
    )
