"""``precision="fp8"``: logits of e4m3 operands, exact ones of targets and probable ids; against full logits in plain
PyTorch."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.nn.functional as F
from budget import assert_outcome, assert_within_budget
from cases import CASES, HALVES, PLACES, Case, Place, run, run_ours
from loss_cases import FEWER, LOSS_CASES, LossCase
from loss_cases import inputs_of as loss_inputs
from oracle import reference as oracle
from tiers import crossed, tier
from torch import Tensor
from tracking import NoProducts, peak_of

from chunked_head import (
    VocabParallel,
    linear_cross_entropy,
    linear_logprobs,
    linear_loss,
    losses,
    metrics,
    plan,
    quantise,
)
from chunked_head.call.spec import SPECS
from chunked_head.core import tiles
from chunked_head.core.tiles import ELSEWHERE, HEAVY, LEAST_HEAVY_LOG2, MARGIN_LOG2
from chunked_head.stores import quantised
from chunked_head.stores.quantised import empty_quantised, quantise_


def rounded(matrix: Tensor, each_row: bool, direction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The numbers of a matrix in e4m3, without its part along a direction, and their scale, in float64."""
    out = empty_quantised(*matrix.shape, matrix.device, each_row)
    quantise_(out, matrix, direction, out.common)
    return out.values.double(), (out.scale[:, None] if each_row else out.scale).double()


def hopper_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of e4m3 numbers as Hopper's tensor cores sum it: 32 products and the sum before them, each cut to 13
    bits behind the point of the one with the largest exponent, and their sum to 13 bits behind its own."""
    total, least = a.new_zeros(len(a), len(b)), torch.tensor(-(2.0**10), dtype=a.dtype, device=a.device)
    for k in range(0, a.shape[1], 32):
        left, right = a[:, None, k : k + 32], b[None, :, k : k + 32]
        terms = torch.cat([left * right, total[:, :, None]], 2)
        exponents = (left.frexp().exponent + right.frexp().exponent - 2, total.frexp().exponent[:, :, None] - 1)
        largest = torch.where(terms == 0.0, least, torch.cat(exponents, 2).to(a.dtype)).amax(2, keepdim=True)
        unit = torch.exp2(largest.clamp(min=-100.0) - 13.0)
        mantissa, exponent = ((terms / unit).trunc() * unit).sum(2).frexp()
        total = torch.ldexp((mantissa * 2.0**14).trunc(), exponent - 14)
    return total


def e4m3_logits(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    hopper: bool = False,
    transformed: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Logits of rows that count, in float64: of e4m3 operands, but for one direction, for targets and for heavy ids.
    ``transformed``: what the softmax sees of raw logits."""
    exact, direction = hidden.double() @ weight.double().t(), quantised.direction_of(weight)
    common = (hidden.float() @ direction).view(torch.int32).bitwise_and(-65536).view(torch.float32).double()
    (states, scale), (numbers, of_all) = rounded(hidden, True, direction), rounded(weight, False)
    if hopper:
        product = torch.cat([hopper_product(states, part) for part in numbers.split(256)], 1)
    else:
        product = states @ numbers.t()
    x = product * (scale * of_all) + torch.outer(common, weight.double() @ direction.double())
    at = torch.arange(len(weight), device=target.device)
    x = torch.where((target[:, None] == at) | (target[:, None] < 0), exact, x)
    lse = transformed(x).logsumexp(1, keepdim=True)
    coarse, fine = ((transformed(y) - lse) / math.log(2.0) - LEAST_HEAVY_LOG2 for y in (x, exact))
    coarse = torch.where(target[:, None] == at, -torch.inf, coarse + MARGIN_LOG2)
    steps = sum(((coarse > step).sum(1, keepdim=True) > HEAVY).double() for step in (0.0, 1.0))
    return torch.where((coarse > steps) & (fine > steps), exact, x)


def fp8_logits(
    dtype: torch.dtype, target: Tensor, hopper: bool, temperature: float | Tensor = 1.0
) -> Callable[..., Tensor]:
    """``oracle.logits`` by ``e4m3_logits``, whose gradient goes to the operands as they are; those of no target are
    exact. ``hopper``: sums are those of its tensor cores in any dtype, the truth's too: on the mean they lie nearer to
    0 than exact ones, by more than all else that a loss errs by."""

    def logits(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float, softcap: float | None
    ) -> Tensor:
        def transformed(x: Tensor) -> Tensor:
            x = (x if bias is None else x + bias.detach().to(dtype).to(x.dtype)) * logit_scale
            return (x if softcap is None else softcap * torch.tanh(x / softcap)) / temperature

        h, w = hidden.detach().to(dtype), weight.detach().to(dtype)
        found = e4m3_logits(h, w, target.to(h.device), hopper, transformed)
        shift = found - h.double() @ w.double().t()
        x = F.linear(hidden, weight, bias)
        wide = torch.promote_types(x.dtype, torch.float32)
        x = (x.to(wide) + shift.to(wide)) * logit_scale
        return x if softcap is None else softcap * torch.tanh(x / softcap)

    return logits


def is_hopper(place: Place) -> bool:
    return place == Place("triton", "cuda") and torch.cuda.get_device_capability()[0] == 9


def halves(params: list, every: int) -> list:
    return [each for i, param in enumerate(params) for each in tier(param, i % every == 0)]


# gradients by tiles of the vocabulary
TILED = Case("tiled", (200,), 64, 507, {"reduction": "none"}, {"memory_budget": 300_000})


def combinations() -> list:
    """Calls of 16-bit operands whose rows are of 16 e4m3 numbers."""
    found = []
    for place in PLACES:
        for i, case in enumerate(case for case in (TILED, *CASES) if case.hidden % 16 == 0 and case.vocab < 50000):
            dtype = HALVES[i % 2]
            if case.name == "small-budget":  # lists of heavy ids take 512 bytes a token more
                case = replace(case, schedule={"memory_budget": 300_000})
            name = f"{case.name}-{str(dtype)[6:]}-{place.id}"
            found.append(pytest.param(case, dtype, place.values[0], marks=place.marks, id=name))
    return halves(found, 3)


@pytest.mark.parametrize(("case", "dtype", "place"), combinations())
def test_cross_entropy(case: Case, dtype: torch.dtype, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case.inputs(dtype, place.device)
    target, shift = inputs.target, inputs.options.get("shift", 0)
    target = target[..., shift:] if shift else target
    target = target[target != inputs.options.get("ignore_index", -100)]
    monkeypatch.setattr(oracle, "logits", fp8_logits(dtype, target, is_hopper(place)))
    truth, eager = (run(oracle.linear_cross_entropy, inputs.to(other)) for other in (torch.float64, dtype))
    ours = run_ours(inputs, place, precision="fp8")
    assert_outcome(ours, eager, truth, dtype)
    plain = run_ours(inputs, place)
    assert case.vocab == 1 or case.exact or not torch.equal(ours.hidden, plain.hidden)


@crossed(
    place=PLACES,
    options=[{}, {"label_smoothing": 0.1, "softcap": 20.0}, {"reduction": "none"}],
    budget=[None, 520_000],
    dtype=HALVES,
)
def test_heavy_ids(
    place: Place, options: dict[str, Any], budget: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have exact logits, where gradients are made at once and by tiles of the vocabulary."""
    inputs = Case("heavy", (40,), 64, 1100, options, {} if budget is None else {"memory_budget": budget}).inputs(
        dtype, place.device
    )
    with torch.no_grad():
        inputs.hidden.mul_(3.0)  # some 5 ids a token
    monkeypatch.setattr(oracle, "logits", fp8_logits(dtype, inputs.target[inputs.target != -100], is_hopper(place)))
    truth, eager = (run(oracle.linear_cross_entropy, inputs.to(other)) for other in (torch.float64, dtype))
    assert_outcome(run_ours(inputs, place, precision="fp8"), eager, truth, dtype)


OF_SUMS = {"vocabulary_sum"}  # which fp8 refuses, as it does a dense teacher
FITTING = [
    case for case in LOSS_CASES
    if not any(name.startswith("teacher_") for name in case.batch) and not OF_SUMS & {term.kind for term in case.terms}
]  # fmt: skip


def loss_combinations() -> list:
    found = []
    for place in PLACES:
        for i, case in enumerate(FITTING):
            params = pytest.param(case, HALVES[i % 2], place.values[0], marks=place.marks, id=f"{case.name}-{place.id}")
            found.append(params)
    return halves(found, 4)


@pytest.mark.parametrize(("case", "dtype", "place"), loss_combinations())
def test_loss(case: LossCase, dtype: torch.dtype, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients made at once, and in backward from logits that are computed again."""
    inputs = loss_inputs(case, dtype, place.device, **(FEWER if place.backend == "triton" else {}))
    target = inputs.target
    if target is None:  # tokens are counted by those of id 0
        target = inputs.hidden.new_zeros(len(inputs.hidden), dtype=torch.int64)
    counts = target != -100
    counts = counts & inputs.batch["mask"] if "mask" in inputs.batch else counts
    target, kept = target[counts], inputs.batch.get("kept_ids")
    if kept is not None:
        target = target.masked_fill((kept[counts] >= 0).any(1), -1)
    # that of the first softmax
    temperature = case.terms[0].options.get("temperature", inputs.head.get("temperature", 1.0))
    if isinstance(temperature, Tensor):
        temperature = temperature[counts].cpu()[:, None]
    monkeypatch.setattr(oracle, "logits", fp8_logits(dtype, target.cpu(), is_hopper(place), temperature))

    def run_oracle(dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = inputs.on("cpu").to(dtype)
        hidden, weight = given.hidden.requires_grad_(), given.weight.requires_grad_()
        loss, _ = oracle.linear_loss(
            hidden, weight, given.target, case.terms, batch=given.batch, num_segments=given.num_segments, **given.head
        )
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    truth, eager = run_oracle(torch.float64), run_oracle(dtype)
    for schedule in ({"chunk_tokens": 32}, {"memory_budget": 600_000}):
        hidden, weight = inputs.hidden.detach().requires_grad_(), inputs.weight.detach().requires_grad_()
        out = linear_loss(
            hidden, weight, inputs.target, case.losses, batch=inputs.batch, num_segments=inputs.num_segments,
            precision="fp8", backend=place.backend, **inputs.head, **schedule,
        )  # fmt: skip
        found = out.loss.detach(), *torch.autograd.grad(out.loss, (hidden, weight))
        for name, ours, plain, true in zip(("loss", "hidden", "weight"), found, eager, truth, strict=True):
            assert_within_budget(ours, plain, true, torch.float32 if name == "loss" else dtype, name)


# ---- how exact it is


def head_like(kind: str, dtype: torch.dtype, tokens: int = 64, vocab: int = 16384, width: int = 256) -> tuple[Any, ...]:
    """Hidden states, weight and targets of a head: flat, or half of the tokens sure of their targets."""
    made = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, width, generator=made) for n in (tokens, vocab))
    weight *= 1.5 / width**0.5
    target = torch.randint(0, vocab, (tokens,), generator=made)
    if kind == "peaked":
        own = weight[target]
        hidden[::2] += (14.0 * own / own.norm(dim=1, keepdim=True))[::2]
    return hidden.to(dtype), weight.to(dtype), target


@crossed(place=PLACES, kind=["flat", "peaked"])
def test_logprobs_are_as_exact_as_bf16_logits_make_them(place: Place, kind: str) -> None:
    """Root mean squares of errors against float64: those of log-softmax of bf16 logits, 2.5 of them where heads are
    peaked. With a target's logit of e4m3 operands it is ten times as much."""
    hidden, weight, target = (t.to(place.device) for t in head_like(kind, torch.bfloat16, 32, width=128))

    def error(found: Tensor) -> float:
        return float((found.double() - truth).square().mean().sqrt())

    def logprobs(x: Tensor) -> Tensor:
        return x.double().log_softmax(1).gather(1, target[:, None])[:, 0]

    exact = hidden.double() @ weight.double().t()
    truth = logprobs(exact)
    found = linear_logprobs(hidden, weight, target, precision="fp8", backend=place.backend)
    allowed = error(logprobs(exact.bfloat16()))
    assert error(found) <= (2.5 if kind == "peaked" else 1.0) * allowed
    (states, scale), (numbers, of_all) = rounded(hidden, True), rounded(weight, False)
    assert error(logprobs((states * scale) @ (numbers * of_all).t())) > 5.0 * error(found)


@pytest.mark.parametrize("place", PLACES)
def test_tiles_see_the_exact_target(place: Place) -> None:
    """Tokens that are sure of their targets have hardly a gradient: not p - 1 of a rounded p. By tiles as at once."""
    hidden, weight, target = (t.to(place.device) for t in head_like("peaked", torch.bfloat16, 80, 507, 64))
    found = []
    # of deterministic calls gradients are products of 16-bit operands
    once: dict[str, Any] = {"reduction": "sum", "deterministic": place.backend == "triton"}
    for options in (once, {"reduction": "none", "memory_budget": 225_000}):
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = linear_cross_entropy(h, w, target, precision="fp8", backend=place.backend, **options)  # type: ignore[arg-type]
        found.append(torch.autograd.grad(loss.sum(), (h, w)))
    (at_once, dweight), (tiled, by_tiles) = found
    sure = at_once.float().norm(dim=1) < 1e-2
    assert sure.sum() > 20
    torch.testing.assert_close(tiled[sure], at_once[sure], rtol=2e-2, atol=1e-5)
    assert (by_tiles - dweight).norm() <= 5e-3 * dweight.norm()  # each is rounded to bf16


# ---- options and operands


@crossed(place=PLACES, asked=[(True, False), (False, True)], bias=[True, False])
def test_frozen_operands(place: Place, asked: tuple[bool, bool], bias: bool) -> None:
    hidden, weight, target = (t.to(place.device) for t in head_like("flat", torch.bfloat16, 40, 131, 64))
    own = torch.randn(131, device=place.device).bfloat16() if bias else None
    both: list[Tensor] = []
    for wanted in ((True, True), asked):
        given = [t.clone().requires_grad_(w) for t, w in zip((hidden, weight), wanted, strict=True)]
        linear_cross_entropy(*given, target, bias=own, precision="fp8", backend=place.backend).backward()
        both.append([t.grad for t, w in zip(given, asked, strict=True) if w])
    # a target's term is in dweight's product or apart, as other tokens have the same target, and in dhidden's likewise
    largest = float(both[0][0].abs().max())
    torch.testing.assert_close(both[0][0], both[1][0], rtol=2**-7, atol=2**-9 * largest)


@crossed(place=PLACES, wrong=[torch.nan, torch.inf])
def test_what_does_not_count_changes_nothing(place: Place, wrong: float) -> None:
    """Whatever stands there; and what is not finite in a row that counts makes the loss nan."""
    hidden, weight, target = (t.to(place.device) for t in head_like("flat", torch.bfloat16, 40, 131, 64))
    target[::3] = -100
    options: dict[str, Any] = {"precision": "fp8", "backend": place.backend}
    clean = linear_cross_entropy(hidden, weight, target, **options)
    hidden[::3] = wrong
    assert torch.equal(linear_cross_entropy(hidden, weight, target, **options), clean)
    skipped = linear_cross_entropy(hidden, weight, target, skip_ignored="wait", **options)
    torch.testing.assert_close(skipped, clean)
    hidden[1, 1] = wrong
    assert linear_cross_entropy(hidden, weight, target, **options).isnan()


@pytest.mark.parametrize("place", PLACES)
def test_accuracy_sees_the_exact_target(place: Place) -> None:
    """Of two equal ids one is the target: it is not below the other by a rounding alone."""
    hidden, weight, target = (t.to(place.device) for t in head_like("peaked", torch.bfloat16, 40, 131, 64))
    out = linear_loss(
        hidden, weight, target, losses.cross_entropy(), metrics=[metrics.accuracy(), metrics.entropy()],
        precision="fp8", backend=place.backend,
    )  # fmt: skip
    x = e4m3_logits(hidden, weight, target, is_hopper(place))
    assert out.metrics["accuracy"].sum == (x.argmax(1) == target).sum()
    entropy = torch.distributions.Categorical(logits=x).entropy().mean()
    torch.testing.assert_close(out.metrics["entropy"].value.double(), entropy, rtol=1e-4, atol=1e-4)


@crossed(place=PLACES, options=[{}, {"chunk_tokens": 32}, {"reduction": "none"}, {"deterministic": True}])
def test_a_kept_weight(place: Place, options: dict[str, Any]) -> None:
    """Gives the same bits as one that a call makes, in several calls; the plan has no room for it."""
    hidden, weight, target = (t.to(place.device) for t in head_like("flat", torch.bfloat16, 80, 203, 64))
    if options.get("deterministic") and place.backend == "torch":
        pytest.skip("needs our own matmuls")
    kept, found = quantise(weight, backend=place.backend), []
    for more in ({}, {"fp8_weight": kept}, {"fp8_weight": kept}):
        h, w = (t.detach().requires_grad_() for t in (hidden, weight))
        loss = linear_cross_entropy(h, w, target, precision="fp8", backend=place.backend, **options, **more)
        found.append([loss.detach(), *torch.autograd.grad(loss.sum(), (h, w))])
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


@crossed(place=PLACES, keeps=[False, True])
def test_calls_one_after_another(place: Place, keeps: bool) -> None:
    """Nothing of an earlier call of the same kind is in a later one, whatever is kept of calls."""
    found: list[list[Tensor]] = []
    for again in (False, True):
        for scale in (1.0, 0.5, 3.0, 0.25):
            hidden, weight, target = (t.to(place.device) for t in head_like("flat", torch.bfloat16, 24, 131, 64))
            h, w = (hidden * scale).requires_grad_(), (weight / scale + 0.25).requires_grad_()
            if again:
                SPECS.clear()
            kept = quantise(w, backend=place.backend) if keeps else None
            loss = linear_cross_entropy(h, w, target, precision="fp8", fp8_weight=kept, backend=place.backend)
            found.append([loss.detach(), *torch.autograd.grad(loss, (h, w))])
    for one, other in zip(found[:4], found[4:], strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@crossed(place=PLACES, dtype=[torch.float32, torch.bfloat16])
def test_quantise_leaves_the_weight_as_it_is(place: Place, dtype: torch.dtype) -> None:
    weight = torch.randn(40, 64, device=place.device).to(dtype)
    given = weight.clone()
    quantise(weight, backend=place.backend)
    assert torch.equal(weight, given)


def test_a_weight_that_has_changed() -> None:
    hidden, weight, target = head_like("flat", torch.bfloat16, 8, 40, 64)
    kept = quantise(weight)
    call = functools.partial(linear_cross_entropy, hidden, target=target, precision="fp8", fp8_weight=kept)
    call(weight=weight)
    call(weight=weight.view(40, 64))
    with pytest.raises(ValueError, match="of another weight"):
        call(weight=weight.clone())
    with pytest.raises(ValueError, match="of another weight"):
        call(weight=weight[:30])
    weight.add_(0.0)
    with pytest.raises(ValueError, match="has changed since"):
        call(weight=weight)
    with pytest.raises(TypeError, match=r"chunked_head\.quantise made"):
        linear_cross_entropy(hidden, weight, target, precision="fp8", fp8_weight=weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='goes with precision="fp8"'):
        linear_cross_entropy(hidden, weight, target, fp8_weight=quantise(weight))


@pytest.mark.parametrize("given", ["parameter", "detached", "cast", "compiled"])
def test_an_optimizers_step_outdates_a_kept_weight(given: str) -> None:
    """A fused one writes to the weight, and autograd counts no change. ``cast``: it steps a copy in another dtype."""
    hidden, weight, target = head_like("flat", torch.bfloat16, 8, 40, 64)
    weight = torch.nn.Parameter(weight)
    stepped = torch.nn.Parameter(weight.detach().float()) if given == "cast" else weight
    stepped.grad = torch.ones_like(stepped)
    kept = quantise(weight.detach() if given == "detached" else weight)
    call = functools.partial(linear_cross_entropy, hidden, weight, target, precision="fp8", fp8_weight=kept)
    call()
    step = torch.optim.AdamW([stepped], lr=0.1, fused=True).step
    (torch.compile(step, backend="eager") if given == "compiled" else step)()
    with pytest.raises(ValueError, match="an optimizer has stepped"):
        call()


# ---- ranks, graphs


def of_rank(rank: int, place: str) -> dict[str, tuple[Tensor, ...]]:
    """Loss and gradients of a rank that holds some of 61 ids, and those of the same call on all ids."""
    hidden, weight, target = head_like("peaked", torch.bfloat16, 24, 61, 64)
    found = {}
    for backend in ("torch", "triton"):
        own = [t.detach().clone().requires_grad_() for t in (hidden, weight[PARTS[rank]])]
        options: dict[str, Any] = {
            "precision": "fp8",
            "backend": backend,
            "parallel": VocabParallel(),
            "vocab_size": 61,
        }
        for kept in (None, quantise(own[1], backend=backend)):
            loss = linear_cross_entropy(*own, target, fp8_weight=kept, chunk_tokens=10, **options)
            found[f"{backend} {kept is None}"] = loss.detach(), *torch.autograd.grad(loss, own)
        # the gradients come later, from the exact logits of heavy ids that this rank has kept
        loss = linear_cross_entropy(*own, target, chunk_tokens=10, reduction="none", **options).mean()
        found[f"{backend} late"] = loss.detach(), *torch.autograd.grad(loss, own)
    return found


PARTS = slice(31), slice(31, None)


def own_targets(target: Tensor) -> list[Tensor]:
    """Columns of each part; one that neither has is behind them."""
    return [torch.where(target < 31, target, ELSEWHERE), torch.where(target < 31, ELSEWHERE, target - 31)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="processes on a CPU")
def test_ranks_that_share_the_vocabulary(tmp_path: Path) -> None:
    """Each has its own scale of its rows."""
    hidden, weight, target = head_like("peaked", torch.bfloat16, 24, 61, 64)
    answers = ranks.run(of_rank, 2, tmp_path)
    both = {}
    for dtype in (torch.float64, torch.bfloat16):
        h, w = (t.to(dtype).clone().requires_grad_() for t in (hidden, weight))
        x = F.linear(h, w)
        exact = hidden.double() @ weight.double().t()
        own = zip(PARTS, own_targets(target), strict=True)
        shift = torch.cat([e4m3_logits(hidden, weight[part], ids) for part, ids in own], 1) - exact
        loss = F.cross_entropy((x + shift.to(dtype)).to(torch.promote_types(dtype, torch.float32)), target)
        both[dtype] = [loss.detach(), *torch.autograd.grad(loss, (h, w))]
    for way in answers[0]:
        for part, answer in zip(PARTS, answers, strict=True):
            for i, found in enumerate(answer[way]):
                eager, truth = (both[dtype][i] for dtype in (torch.bfloat16, torch.float64))
                both_of = (eager[part], truth[part]) if i == 2 else (eager, truth)
                assert_within_budget(found, *both_of, torch.float32 if i == 0 else torch.bfloat16, f"{way} {i}")


@pytest.mark.parametrize("kept", [False, True])
def test_compiled(kept: bool) -> None:
    """As it is in eager mode; with a kept weight between two graphs."""
    hidden, weight, target = head_like("flat", torch.bfloat16, 24, 60, 64)
    weight8 = quantise(weight, backend="torch") if kept else None

    def call(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h * 1.0, w, target, precision="fp8", fp8_weight=weight8, backend="torch") * 2.0

    found = []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=not kept)):
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = function(h, w)
        found.append([loss.detach(), *torch.autograd.grad(loss, (h, w))])
    for ours, eager in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-2, atol=1e-5)


# ---- what is refused

TOKENS = torch.zeros(8, dtype=torch.int64)
REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "precision must be one of None, 'fp8', got 'fp4'": lambda h, w: linear_cross_entropy(h, w, TOKENS, precision="fp4"),
    "bfloat16 or float16": lambda h, w: linear_cross_entropy(h.float(), w.float(), TOKENS, precision="fp8"),
    "top_k": lambda h, w: linear_logprobs(h, w, TOKENS, precision="fp8", top_k=2),
    "dense teacher": lambda h, w: linear_loss(
        h, w, TOKENS, losses.forward_kl(), batch={"teacher_logits": torch.zeros(8, 40)}, precision="fp8"
    ),
    "multiple of 16": lambda h, w: linear_cross_entropy(
        h[:, :40].contiguous(), w[:, :40].contiguous(), TOKENS, precision="fp8", backend="triton"
    ),
    "begins on 16 bytes": lambda h, w: linear_cross_entropy(
        h, F.pad(w, (0, 64)).view(-1)[1 : 40 * 64 + 1].view(40, 64), TOKENS, precision="fp8", backend="triton"
    ),
    "weight that is contiguous": lambda h, w: linear_cross_entropy(
        h, w.t().contiguous().t(), TOKENS, precision="fp8", backend="triton"
    ),
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
@pytest.mark.parametrize("message", REFUSED)
def test_refused_before_any_work(message: str) -> None:
    hidden, weight, _ = head_like("flat", torch.bfloat16, 8, 40, 64)
    with NoProducts(), pytest.raises(ValueError, match=message):
        REFUSED[message](hidden, weight)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
@pytest.mark.parametrize("architecture", ["sm_80", "gfx942"], indirect=True)
def test_gpus_without_e4m3(architecture: str) -> None:
    hidden, weight, target = head_like("flat", torch.bfloat16, 8, 40, 64)
    for call in (lambda: linear_cross_entropy(hidden, weight, target, precision="fp8", backend="triton"),
                 lambda: quantise(weight, backend="triton")):  # fmt: skip
        with pytest.raises(ValueError, match=f"needs a GPU that multiplies e4m3 .* is {architecture}"):
            call()
    with pytest.raises(ValueError, match="multiplies e4m3"):
        plan(4096, 4096, 32000, torch.bfloat16, precision="fp8", device="sm_80", backend="triton")


# ---- memory


def test_plans_count_the_copies() -> None:
    """The default budget grows by the weight's copy: chunks stay as they are."""
    sizes: dict[str, Any] = {"tokens": 8192, "hidden": 4096, "vocab": 128256, "dtype": torch.bfloat16}
    sizes |= {"device": "sm_90", "backend": "triton"}
    for more in ({}, {"tokens": 1024, "vocab": 32000}):
        plain, made = (plan(**(sizes | more), precision=precision) for precision in (None, "fp8"))
        assert (made.chunk_tokens, made.schedule) == (plain.chunk_tokens, plain.schedule)
        tokens, rows, vocab = made.sizes.tokens, made.chunk_tokens, made.sizes.vocab
        copies = vocab * (2 * 4096 + 4) + rows * (4096 + 8) + tokens * HEAVY * 8
        copies += 2 * rows * vocab + rows * 4096 * (1 + 4) + tokens * (HEAVY + 1) * 28  # gradients' operands and terms
        copies += (rows // tiles.E4M3_ROWS + 1) * vocab * 4
        assert 0.97 * copies < made.extra_bytes - plain.extra_bytes <= copies
        assert made.e4m3_gradients and "e4m3" in str(made) and "e4m3" not in str(plain)
        # gradients of 16-bit operands
        plain, made = (plan(**(sizes | more), precision=precision, deterministic=True) for precision in (None, "fp8"))
        copies = vocab * (4096 + 4) + made.chunk_tokens * (4096 + 8) + tokens * HEAVY * 8
        assert made.extra_bytes - plain.extra_bytes == copies
    with pytest.raises(ValueError, match="memory_budget"):
        plan(**sizes, precision="fp8", memory_budget="500MiB", accumulate_dtype=torch.bfloat16)


@crossed(place=PLACES, given=[False, True], reduction=["mean", "none"])
def test_memory_is_as_planned(place: Place, given: bool, reduction: str) -> None:
    if place.device == "cpu" and place.backend == "triton":
        pytest.skip("the interpreter copies")
    tokens, width, vocab = 1024, 256, 8192
    hidden, weight = (torch.randn(n, width).bfloat16().to(place.device).requires_grad_() for n in (tokens, vocab))
    target = torch.randint(0, vocab, (tokens,), device=place.device)
    kept = quantise(weight, backend=place.backend) if given else None
    options: dict[str, Any] = {"precision": "fp8", "fp8_weight": kept, "backend": place.backend}
    out = linear_loss(hidden, weight, target, losses.cross_entropy(), **options)
    assert out.plan is not None and out.plan.sizes.fp8_copy == ("given" if given else "made")

    def step() -> None:
        linear_cross_entropy(hidden, weight, target, reduction=reduction, **options).sum().backward()
        hidden.grad = weight.grad = None

    expected = plan(
        tokens, width, vocab, torch.bfloat16, reduction=reduction, precision="fp8", device=place.device,
        backend=place.backend,
    )  # fmt: skip
    held = [kept.matrix.values] if kept is not None else []
    assert peak_of(step, hidden, weight, target, *held) <= 1.05 * expected.peak_bytes + 64_000
