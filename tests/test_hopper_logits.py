"""The logits' product by the kernel for Hopper GPUs, by itself: exponentials and sums as the plain one makes them."""

import pytest
import torch
from budget import assert_outcome, assert_within_budget
from cases import PLACES, Case, Place, bias, per_class, run_ours, run_reference
from chunked_head.kernels import launch
from chunked_head.kernels.tiles import NARROW_TILE, WIDE_TILE
from torch import Tensor

from chunked_head import linear_cross_entropy, linear_logprobs
from chunked_head.backends import triton_backend

gpu = pytest.mark.gpu
SHAPES = [  # rows, vocab, hidden
    (2048, 12032, 2304),
    (333, 5000, 1160),  # tiles that every edge cuts
    (17, 136, 72),  # one tile, two steps
    (96, 200000, 64),  # fewer steps than stages, and several tiles for a program
    (128, 100000, 264),  # a step more than stages
    (320, 140000, 1024),  # the second warpgroup has rows of some tiles only
    (40, 100000, 264),  # and of none
]


def made(rows: int, vocab: int, hidden: int, dtype: torch.dtype, spread: float = 2.0) -> tuple[Tensor, ...]:
    """Hidden states, weight, targets (some rows without one), and the targets' logits."""
    generator = torch.Generator("cuda").manual_seed(5)
    states = torch.randn(rows, hidden, generator=generator, device="cuda").to(dtype)
    weight = (torch.randn(vocab, hidden, generator=generator, device="cuda") * spread / hidden**0.5).to(dtype)
    target = torch.randint(-1, vocab, (rows,), generator=generator, device="cuda")
    offset = (states.double() * weight.double()[target.clamp(min=0)]).sum(1).float()
    return states, weight, target, offset


def run(states: Tensor, weight: Tensor, target: Tensor, offset: Tensor | None, plain: bool = False, **options):
    """Exponentials, and strips' offsets and sums; by the plain kernel or by the one for Hopper. Sums alone without an
    offset."""
    rows, vocab = len(states), len(weight)
    strips = launch.Strips.empty(rows, -(-vocab // 256), states.device).of_rows(rows, -(-vocab // 256))
    out = torch.full((rows, vocab + 8), torch.nan, dtype=states.dtype, device="cuda")[:, :vocab]
    out = None if offset is None else out
    strips.offset.fill_(torch.nan)
    tile = {"tile": WIDE_TILE} if plain else {}
    options = {"logit_scale": None, "softcap": None} | options
    launch.exp_logits(out, strips, states, weight, None, None, offset, target, **options, **tile)
    return out, strips.offset, strips.sum


def assert_runs_here() -> None:
    from chunked_head.kernels.launch_hopper import runs_hopper_products

    assert runs_hopper_products(torch.device("cuda:0")), "the GPU or its Triton is not one that the kernel was made for"


@gpu
@pytest.mark.parametrize("rows, vocab, hidden", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [None, 0.6])
def test_exponentials(rows: int, vocab: int, hidden: int, dtype: torch.dtype, scale: float | None) -> None:
    assert_runs_here()
    states, weight, target, offset = made(rows, vocab, hidden, dtype, spread=1.0)
    offset = offset * (scale or 1.0)
    found = [run(states, weight, target, offset, logit_scale=scale) for _ in range(3)]
    out, _, sums = found[0]
    exact = (states.double() @ weight.double().t()) * (scale or 1.0) - offset.double()[:, None]
    exact = exact.exp()
    exact[torch.arange(rows), target.clamp(min=0)] *= (target < 0).double()
    assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps * exact + 1e-5).all()
    strips = torch.nn.functional.pad(exact, (0, -vocab % 256)).view(rows, -1, 256).sum(-1)
    torch.testing.assert_close(sums.double().t(), strips, rtol=1e-5, atol=1e-6)
    for other in found[1:]:
        assert torch.equal(out, other[0]) and torch.equal(sums, other[2])


@gpu
@pytest.mark.parametrize("rows, vocab, hidden", SHAPES)
def test_sums_alone(rows: int, vocab: int, hidden: int) -> None:
    assert_runs_here()
    states, weight, target, _ = made(rows, vocab, hidden, torch.bfloat16)
    _, offset, sums = run(states, weight, target, None)
    _, plain_offset, plain_sums = run(states, weight, target, None, plain=True)
    torch.testing.assert_close(offset + sums.log(), plain_offset + plain_sums.log(), rtol=1e-5, atol=1e-5)
    exact = states.double() @ weight.double().t()
    exact[torch.arange(rows), target.clamp(min=0)] = torch.where(
        target < 0, exact[torch.arange(rows), target.clamp(min=0)], -torch.inf
    )
    found = (offset.double() + sums.double().log()).logsumexp(0)
    torch.testing.assert_close(found, exact.logsumexp(1), rtol=1e-6, atol=1e-5)


@gpu
def test_far_above_the_offset() -> None:
    """Strips whose maximum lies more than REACH above take an offset of their own, which the sum's sign says."""
    assert_runs_here()
    states, weight, target, offset = made(300, 3000, 1024, torch.bfloat16, spread=25.0)
    found = run(states, weight, target, offset)
    plain = run(states, weight, target, offset, plain=True)
    own = plain[2] < 0
    assert own.any() and not own.all() and torch.equal(own, found[2] < 0)
    torch.testing.assert_close(found[1][own], plain[1][own], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[2], plain[2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[0].float(), plain[0].float(), rtol=2e-2, atol=1e-6)


@gpu
@pytest.mark.parametrize("count", [0, 1, 63, 64, 129, 300, 1000])
def test_counted_rows(count: int) -> None:
    """Row tiles behind those that count are not computed."""
    assert_runs_here()
    states, weight, target, offset = made(300, 3000, 520, torch.bfloat16)
    counts = min(count, 300)
    counted = launch.Counted(torch.tensor(700 + count, device="cuda"), 700)
    out, _, sums = run(states, weight, target, offset, counted=counted)
    whole, _, whole_sums = run(states, weight, target, offset)
    assert torch.equal(out[:counts], whole[:counts]) and torch.equal(sums[:, :counts], whole_sums[:, :counts])
    assert out[-(-counts // 128) * 128 :].isnan().all()


@gpu
@pytest.mark.parametrize("asked", ["bias", "softcap", "relative", "no targets", "nothing stored", "narrow", "more"])
def test_what_it_does_not_do(asked: str) -> None:
    """Anything beside exponentials and their sums is the plain kernel's."""
    states, weight, target, offset = made(64, 512, 4096, torch.bfloat16)
    ones = torch.ones(512, device="cuda")
    count = 4 if asked == "narrow" else 2
    strips = launch.Strips.empty(64, count, states.device, shifted=asked == "more").of_rows(64, count)
    arguments = {
        "out": None if asked == "nothing stored" else torch.empty(64, 512, dtype=torch.bfloat16, device="cuda"),
        "strips": strips, "hidden": states, "weight": weight, "bias": ones if asked == "bias" else None,
        "row_offset": None if asked == "relative" else offset, "target": None if asked == "no targets" else target,
        "softcap": 5.0 if asked == "softcap" else None,
    }  # fmt: skip
    assert not launch.by_hopper(**arguments)
    if asked == "bias":
        assert launch.by_hopper(**arguments | {"bias": None})
        assert launch.by_hopper(**arguments | {"bias": None, "out": None, "row_offset": None})


CALLS = [
    Case("plain", (300,), 2304, 5003, schedule={"chunk_tokens": 128}),
    Case("options", (300,), 2304, 5000, {"z_loss": 1e-2, "logit_scale": 0.7}, {"chunk_tokens": 128}),
    Case("skipped", (300,), 2560, 1003, {}, {"chunk_tokens": 160, "skip_ignored": True}, ignored=0.6),
    Case("far above", (300,), 2304, 1003, schedule={"chunk_tokens": 128}, spread=40.0),
    Case("late", (300,), 2304, 1003, {"reduction": "none"}, {"chunk_tokens": 128}),
    Case("plain kernel", (300,), 2304, 1003, {"bias": bias}, {"chunk_tokens": 128}),
]


@gpu
@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_whole_calls(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls wide enough for the kernel, against full logits; and that it was the kernel."""
    ran, real = [0], launch.hopper_exp_logits

    def counted(*args) -> None:
        ran[0] += 1
        real(*args)

    monkeypatch.setattr(launch, "hopper_exp_logits", counted)
    inputs, place = case.inputs(torch.bfloat16, "cuda"), Place("triton", "cuda")
    truth, eager = run_reference(inputs, torch.float64), run_reference(inputs, torch.bfloat16)
    assert_outcome(run_ours(inputs, place), eager, truth, torch.bfloat16)
    assert (ran[0] > 0) == ("bias" not in case.options)


@gpu
def test_loss_alone() -> None:
    inputs, place = CALLS[0].inputs(torch.bfloat16, "cuda"), Place("triton", "cuda")
    truth, eager = run_reference(inputs, torch.float64), run_reference(inputs, torch.bfloat16)
    with torch.no_grad():
        loss = linear_cross_entropy(
            inputs.hidden, inputs.weight, inputs.target, backend=place.backend, **inputs.options
        )  # fmt: skip
    assert_within_budget(loss, eager.loss, truth.loss, torch.float32, "loss")


# interpreted the plain kernel makes the strips that the one for Hopper would
@pytest.mark.parametrize("place", [place for place in PLACES if place.values[0].backend == "triton"])
@pytest.mark.parametrize(
    "options",
    [{}, {"class_weights": per_class}, {"z_loss": 1e-2, "shift": 1}],
    ids=["plain", "class-weights", "z-loss"],
)
def test_strips_are_as_wide_as_its_tiles(place: Place, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hidden size, and only where nothing more than sums is asked of them."""
    monkeypatch.setattr(triton_backend, "runs_hopper_products", lambda device: True)
    case = Case("wide", (50,), 520, 300, options, {"chunk_tokens": 32}, spread=40.0)
    inputs = case.inputs(torch.bfloat16, place.device)
    truth, eager = run_reference(inputs, torch.float64), run_reference(inputs, torch.bfloat16)
    found, real = [], launch.exp_logits

    def noted(out, strips, *args) -> None:
        found.append(len(strips.offset))
        real(out, strips, *args)

    monkeypatch.setattr(launch, "exp_logits", noted)
    assert_outcome(run_ours(inputs, place), eager, truth, torch.bfloat16)
    narrow, wide = (-(-300 // tile.block_n) for tile in (NARROW_TILE, WIDE_TILE))
    assert set(found) == {wide} and narrow > wide
    linear_logprobs(inputs.hidden, inputs.weight, inputs.target, entropy=True, backend=place.backend)
    assert found[-1] == narrow
