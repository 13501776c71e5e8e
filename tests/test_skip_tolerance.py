"""Tiles that are left out of the gradients' products, against plain PyTorch's simulation of the same rule."""

from typing import Any, NamedTuple

import pytest
import torch
from cases import GPU, TRITON, Place
from chunked_head.kernels.tiles import RELATIVE_STRIP, SHORT_HIDDEN, SKIP_STEP, SKIP_TILE
from oracle.skipping import skipped_dlogits
from torch import Tensor

from chunked_head import LossOutput, linear_cross_entropy, linear_loss, losses

PLACES = [*TRITON, *(place for place in GPU if place.values[0].backend == "triton")]
ROWS, STRIP, HIDDEN = SKIP_TILE.block_m, RELATIVE_STRIP, 64
TOKENS, VOCAB = 3 * ROWS + 4, 6 * STRIP + STRIP // 2 + 3
CE = losses.cross_entropy()


class Operands(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor


def operands(place: Place, tokens: int = TOKENS, peak: float = 0.0, width: int = HIDDEN) -> Operands:
    """Each strip of the vocabulary has less of every row's softmax than the one before, as if ordered by frequency."""
    made = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, width, generator=made)
    weight = torch.randn(VOCAB, width, generator=made) * 2.0 / width**0.5
    hidden[:, 0], weight[:, 0] = 1.0, -1.5 * (torch.arange(VOCAB) // STRIP)
    target = torch.randint(0, STRIP, (tokens,), generator=made)
    target[::5] = torch.randint(0, VOCAB, (len(target[::5]),), generator=made)
    target[3::7] = -100
    if peak:  # logits far above the target's: their strips have offsets of their own
        hidden[1::4, 1] = peak
        weight[7::50, 1] = 1.0
    hidden[3::7] = torch.nan
    device = place.device
    return Operands(
        hidden.to(device, torch.bfloat16).requires_grad_(), weight.to(device, torch.bfloat16).requires_grad_(),
        target.to(device),
    )  # fmt: skip


def run(place: Place, given: Operands, tolerance: float | None, **options: Any) -> tuple[LossOutput, Tensor, Tensor]:
    """The output, dhidden, dweight."""
    loss = options.pop("loss", CE)
    out = linear_loss(*given, loss, backend=place.backend, skip_tolerance=tolerance, **options)
    return out, *torch.autograd.grad(out.loss, (given.hidden, given.weight))


def simulated(given: Operands, tolerance: float, chunk: int, weights: Tensor | None = None) -> dict[str, Tensor]:
    """dlogits of the mean loss and the gradients from them, chunk by chunk, in float64."""
    counts = given.target >= 0
    hidden = torch.where(counts[:, None], given.hidden.detach().double(), 0.0)
    weight = given.weight.detach().double()
    target = torch.where(counts, given.target, -1)
    alpha = (torch.ones_like(hidden[:, 0]) if weights is None else weights.double()) * counts / counts.sum()
    logits = hidden @ weight.t()
    pieces = [
        skipped_dlogits(*(t[at : at + chunk] for t in (logits,)), weight, target[at : at + chunk],
                        alpha[at : at + chunk], alpha[at : at + chunk], tolerance, (ROWS, STRIP), SKIP_STEP)
        for at in range(0, len(target), chunk)
    ]  # fmt: skip
    dlogits = torch.cat([piece[0] for piece in pieces])
    exact = alpha[:, None] * (logits.softmax(-1) - torch.nn.functional.one_hot(target.clamp(min=0), VOCAB))
    return {
        "dlogits": dlogits, "dhidden": dlogits @ weight, "dweight": dlogits.t() @ hidden,
        "kept": torch.cat([piece[1].flatten() for piece in pieces]).double().mean(),
        "moved": torch.cat([piece[2] for piece in pieces]).sum() / counts.sum(),
        "exact": exact, "exact_dweight": exact.t() @ hidden,
    }  # fmt: skip


def error(found: Tensor, truth: Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found.detach().double() - truth.detach()).norm() / truth.norm().detach())


def assert_as_meant(
    ours: tuple[LossOutput, Tensor, Tensor],
    usual: tuple[LossOutput, Tensor, Tensor],
    given: Operands,
    tolerance: float,
    weights: Tensor | None = None,
    slack: float = 1e-3,
) -> dict[str, Tensor]:
    """Gradients are no further from what is meant than the usual ones are from exact ones; returns what is meant."""
    plan_of_call = ours[0].plan
    assert plan_of_call is not None and plan_of_call.schedule == "forward"
    meant = simulated(given, tolerance, plan_of_call.chunk_tokens, weights)
    assert 0.1 < meant["kept"] < 0.9, "the rule must have something to decide"
    exact = {"dhidden": meant["exact"] @ given.weight.double(), "dweight": meant["exact_dweight"]}
    for name, mine, theirs in zip(exact, ours[1:], usual[1:], strict=True):
        assert error(mine, meant[name]) < 1.1 * error(theirs, exact[name]) + slack, name
    return meant


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("chunk", [TOKENS, 2 * ROWS])
@pytest.mark.parametrize("tolerance", [0.02, 0.2])
def test_against_the_simulation(place: Place, chunk: int, tolerance: float) -> None:
    given = operands(place)
    ours, usual = (run(place, given, t, chunk_tokens=chunk) for t in (tolerance, None))
    meant = assert_as_meant(ours, usual, given, tolerance)
    found = ours[0].metrics
    torch.testing.assert_close(found["dropped_mass"].value.double(), meant["moved"], rtol=2e-3, atol=0.0)
    assert error(meant["dhidden"], meant["exact"] @ given.weight.double()) < tolerance
    # strips behind the vocabulary's end, of a tile of two, count as left out
    assert float(found["kept_tiles"].value) <= float(meant["kept"]) + 1e-6


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 2 * ROWS}, {"skip_ignored": True}], ids=str)
@pytest.mark.parametrize("peak", [0.0, 89.0])
def test_nothing_to_skip(place: Place, options: dict[str, Any], peak: float) -> None:
    """A tolerance so small that everything is computed: the usual gradients, to the rounding of sums in parts."""
    given = operands(place, peak=peak)
    usual, out = run(place, given, None, **options), run(place, given, 1e-12, **options)
    # a strip may hold no probability at all
    assert float(out[0].metrics["dropped_mass"].value) < 1e-9
    assert torch.equal(out[0].loss, usual[0].loss)
    for mine, theirs in zip(out[1:], usual[1:], strict=True):
        assert error(mine, theirs.double()) < 4e-3


@pytest.mark.parametrize("place", PLACES)
def test_rows_with_offsets_of_their_own(place: Place) -> None:
    given = operands(place, peak=89.0)
    assert_as_meant(run(place, given, 0.1), run(place, given, None), given, 0.1)


@pytest.mark.parametrize("place", PLACES)
def test_tiles_of_two_strips(place: Place) -> None:
    """Wide hidden states are multiplied in tiles of two strips, each with sums of its own."""
    given = operands(place, width=SHORT_HIDDEN + 64)
    assert_as_meant(run(place, given, 0.1), run(place, given, None), given, 0.1)


@pytest.mark.parametrize("place", PLACES)
def test_mass_is_kept(place: Place) -> None:
    """Every row of the gradient of the logits adds up to what it should, and every vocabulary row gets a gradient."""
    given = operands(place)
    expected = simulated(given, 0.3, TOKENS)
    torch.testing.assert_close(expected["dlogits"].sum(1), expected["exact"].sum(1), rtol=0.0, atol=1e-15)
    options = {"accumulate_dtype": torch.float32, "chunk_tokens": TOKENS}
    _, dhidden, dweight = run(place, given, 0.3, **options)
    assert (dweight != 0).any(1).all()
    # hidden states' first column is 1, so that of dweight holds each row's sum of dlogits, and all of them add up to 0,
    # but for the rounding of the operands
    ours, usual = (column[:, 0].double() for column in (dweight, run(place, given, None, **options)[2]))
    assert abs(float(ours.sum() - usual.sum())) < 1e-3 * float(usual.abs().sum())
    assert (dhidden[given.target < 0] == 0).all()


@pytest.mark.parametrize("place", PLACES)
def test_rows_weigh_by_their_coefficients(place: Place) -> None:
    """Policy losses: coefficients of either sign, many of them 0."""
    given = operands(place)
    advantages = torch.linspace(-2.0, 2.0, TOKENS, device=place.device)
    advantages[: TOKENS // 3] = 0.0
    batch = {"advantages": advantages}
    ours, usual = (run(place, given, t, loss=losses.reinforce(), batch=batch) for t in (0.1, None))
    assert_as_meant(ours, usual, given, 0.1, advantages)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_over_chunks(place: Place, dtype: torch.dtype) -> None:
    """Into accumulators of both dtypes, the same bits every time."""
    given = operands(place)
    options = {"chunk_tokens": ROWS, "accumulate_dtype": dtype}
    first, again, usual = (run(place, given, t, **options) for t in (0.1, 0.1, None))
    assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
    assert first[0].plan is not None and first[0].plan.chunks > 3
    # the interpreter cuts bf16 sums off where PyTorch's product rounds them
    assert_as_meant(first, usual, given, 0.1, slack=1e-3 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("place", PLACES)
def test_into_a_buffer(place: Place) -> None:
    given = operands(place)
    given.weight.main_grad = torch.ones(VOCAB, HIDDEN, device=place.device)  # type: ignore[attr-defined]
    usual = run(place, given, 0.1)
    linear_cross_entropy(
        *given, accumulate_into="main_grad", backend=place.backend, skip_tolerance=0.1, chunk_tokens=TOKENS
    ).backward()
    assert error(given.weight.main_grad - 1.0, usual[2].double()) < 4e-3  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", PLACES)
def test_one_operand_frozen(place: Place) -> None:
    given = operands(place)
    both = run(place, given, 0.1)
    for i, name in enumerate(("hidden", "weight")):
        frozen = given._replace(**{name: getattr(given, name).detach()})
        out = linear_loss(*frozen, CE, backend=place.backend, skip_tolerance=0.1, chunk_tokens=TOKENS)
        (grad,) = torch.autograd.grad(out.loss, frozen[1 - i])
        assert error(grad, both[2 - i].double()) < 4e-3


@pytest.mark.parametrize("place", PLACES)
def test_computed_again_is_exact(place: Place) -> None:
    given = operands(place)
    loss = linear_cross_entropy(*given, backend=place.backend, skip_tolerance=0.3)
    usual = linear_cross_entropy(*given, backend=place.backend)
    torch.autograd.grad(loss, given[:2], retain_graph=True)
    again = torch.autograd.grad(loss, given[:2])
    for mine, theirs in zip(again, torch.autograd.grad(usual, given[:2]), strict=True):
        assert error(mine, theirs.double()) < 6e-3


@pytest.mark.parametrize("place", PLACES)
def test_without_gradients(place: Place) -> None:
    """Nothing to skip: the same keys, and the loss as ever."""
    given = operands(place)
    with torch.no_grad():
        out = linear_loss(*given, CE, backend=place.backend, skip_tolerance=0.1)
        assert torch.equal(out.loss, linear_loss(*given, CE, backend=place.backend).loss)
    assert float(out.metrics["dropped_mass"].value) == 0.0 and float(out.metrics["kept_tiles"].value) == 1.0


@pytest.mark.gpu
def test_captured() -> None:
    """Nothing waits for the host: a graph replayed on other inputs, other tiles kept, gives what the call gives."""
    place = Place("triton", "cuda")
    given = operands(place)
    first = run(place, given, 0.1)[1:]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(place, given, 0.1)
    with torch.no_grad():
        given.hidden.mul_(0.7)
    graph.replay()
    torch.cuda.synchronize()
    again = run(place, given, 0.1)
    assert not torch.equal(again[1], first[0])
    assert torch.equal(found[1], again[1]) and torch.equal(found[2], again[2])
    assert torch.equal(found[0].metrics["kept_tiles"].value, again[0].metrics["kept_tiles"].value)
