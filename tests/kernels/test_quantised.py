"""Kernels of e4m3 operands: what is rounded, and that products of them are what those of 16 bits are."""

import math

import pytest
import torch
from cases import GPU, TILES, TRITON, Place
from chunked_head.kernels.common import operands
from chunked_head.kernels.e4m3 import launch as e4m3
from chunked_head.kernels.gradients import launch as gradients
from chunked_head.kernels.statistics import launch as statistics
from tiers import crossed

from chunked_head.core import records, tiles
from chunked_head.core.statistics import ENTROPY, TOP
from chunked_head.core.tiles import Quantised
from chunked_head.stores.quantised import empty_quantised, quantise_

PLACES = [*TRITON, *(place for place in GPU if place.values[0].backend == "triton")]
SIZES = [(70, 203, 80), (17, 40, 48), (33, 136, 112)]  # rows, vocab, hidden


def quantised(matrix: torch.Tensor, each_row: bool, in_torch: bool = False) -> Quantised:
    out = empty_quantised(*matrix.shape, matrix.device, each_row)._replace(common=None)
    (quantise_ if in_torch else e4m3.quantise)(out, matrix)
    return out


@crossed(place=PLACES, each_row=[True, False], columns=[16, 80, 5000])
def test_rounds_as_torch_does(place: Place, each_row: bool, columns: int) -> None:
    made = torch.Generator().manual_seed(1)
    matrix = torch.randn(40, columns, generator=made) * torch.logspace(-6, 6, 40)[:, None]
    matrix[3], matrix[4] = 0.0, matrix[4] * 1e-35
    matrix = matrix.to(place.device, torch.bfloat16)
    found = quantised(matrix, each_row)
    # on the CPU: a GPU's torch divides by a number as it multiplies by its inverse, which rounds another way
    expected = quantised(matrix.cpu(), each_row, in_torch=True)
    # sums of squares in other orders
    torch.testing.assert_close(found.scale.cpu(), expected.scale, rtol=1e-6, atol=0.0)
    assert torch.equal(found.values.float().cpu(), expected.values.float())
    # no number errs by more than half of its last bit, or of the smallest number's; lengths stay
    scale = found.scale.view(-1, 1) if each_row else found.scale
    wide, exact = found.values.double() * scale, matrix.double()
    assert ((wide - exact).abs() <= (2.0**-4 + 0.02) * exact.abs() + 1.02 * 2.0**-10 * scale).all()
    lengths = [(t.norm(dim=1) if each_row else t.norm()) for t in (wide, exact)]
    torch.testing.assert_close(*lengths, rtol=1e-5, atol=1e-30)


@crossed(place=PLACES, sampled=[0.0, 1e-3, 1.0], few=[1.0, 3e4])
def test_a_weight_of_unlike_rows(place: Place, sampled: float, few: float) -> None:
    """Has room for all numbers, whatever the rows are that tell its scale."""
    matrix = torch.randn(400, 32, generator=torch.Generator().manual_seed(1))
    matrix[::100] *= sampled
    matrix[17, 3] = few
    matrix = matrix.to(place.device, torch.bfloat16)
    found, expected = quantised(matrix, False), quantised(matrix.cpu(), False, in_torch=True)
    assert torch.equal(found.values.float().cpu(), expected.values.float())
    torch.testing.assert_close(found.scale.cpu(), expected.scale, rtol=1e-6, atol=0.0)
    wide, exact = found.values.double() * found.scale, matrix.double()
    assert ((wide - exact).abs() <= 2.0**-4 * exact.abs() + few * 1e-4 + 1e-2).all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("in_torch", [False, True])
def test_what_is_not_finite(place: Place, wrong: float, in_torch: bool) -> None:
    """Makes all products of its row nan, or of a weight all."""
    matrix = torch.randn(5, 64, device=place.device).bfloat16()
    matrix[3, 7] = wrong
    assert quantised(matrix, True, in_torch).scale.isnan().tolist() == [False] * 3 + [True, False]
    assert quantised(matrix, False, in_torch).scale.isnan()


def exact_operands(place: Place, sizes: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    """Hidden states and a weight in bf16 of which nothing is lost in e4m3, targets, and targets' logits."""
    (rows, vocab, hidden), made = sizes, torch.Generator().manual_seed(5)
    states, weight = (torch.randint(-4, 5, (n, hidden), generator=made).float() for n in (rows, vocab))
    # the largest of each row, and of the weight, make scales that are powers of 2; they meet zeros
    states[:, 0], states[:, 1], weight[:, 0], weight[:, 1] = 448.0, 0.0, 0.0, 448.0
    states *= torch.logspace(-3, 3, rows, 2.0).log2().round().exp2()[:, None] * 2.0**-2
    weight *= 2.0**-3
    states, weight = (t.to(place.device, torch.bfloat16) for t in (states, weight))
    target = torch.randint(-1, vocab, (rows,), generator=made).to(place.device)
    return states, weight, target, (states.float() * weight[target.clamp(min=0)].float()).sum(1)


@crossed(place=PLACES, sizes=SIZES, tile=TILES, stored=["exponentials", "relative", "nothing"], top=[False, True])
def test_exp_logits(place: Place, sizes: tuple[int, int, int], tile: tiles.Tile, stored: str, top: bool) -> None:
    """Of operands that e4m3 holds, the bits are those of 16-bit operands."""
    states, weight, target, logit = exact_operands(place, sizes)
    (rows, vocab), count = (len(states), len(weight)), -(-len(weight) // tile.block_n)
    if stored == "relative" and not tile.block_n // 2 >= 32:
        pytest.skip("a strip is half a tile")
    found = []
    for h, w in ((states, weight), (quantised(states, True), quantised(weight, False))):
        halves = 2 if stored == "relative" else 1
        strips = operands.Strips.empty(rows, count * halves, states.device, ([ENTROPY, TOP][: 1 + top],)).of_rows(rows)
        strips.offset.fill_(0.0)
        dtype = torch.bfloat16 if stored == "exponentials" else torch.float16
        out = None if stored == "nothing" else torch.zeros(rows, -(-vocab // 8) * 8, device=states.device, dtype=dtype)
        statistics.exp_logits(
            None if out is None else out[:, :vocab], strips, h, w, None, None,
            logit if stored == "exponentials" else None, records.Transform(0.5), tile,
            target=target, target_logit=0.5 * logit,
        )  # fmt: skip
        kept = [
            out,
            strips.offset,
            *strips.sums,
            *[vector for _, vectors in strips.statistics[0] for vector in vectors],
        ]
        found.append([each for each in kept if each is not None])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@crossed(place=PLACES, tile=TILES)
def test_the_target_is_exact(place: Place, tile: tiles.Tile) -> None:
    """It is the largest logit, by its given number and not by the product."""
    states, weight, target, logit = exact_operands(place, SIZES[0])
    rows, count = len(states), -(-len(weight) // tile.block_n)
    strips = operands.Strips.empty(rows, count, states.device, ((TOP,),)).of_rows(rows)
    tops, ids = strips.statistics[0][0][1]
    statistics.exp_logits(
        None, strips, quantised(states, True), quantised(weight, False), None, None, None, records.PLAIN, tile,
        target=target, target_logit=torch.full_like(logit, 1e6),
    )  # fmt: skip
    best = tops.amax(0)
    assert torch.equal(best == 1e6, target >= 0)
    assert torch.equal(ids.t()[best == 1e6].gather(1, tops.argmax(0)[best == 1e6, None])[:, 0],
                       target[target >= 0].int())  # fmt: skip


@crossed(place=PLACES, sizes=SIZES, tile=TILES)
def test_grad_logits(place: Place, sizes: tuple[int, int, int], tile: tiles.Tile) -> None:
    states, weight, target, logit = exact_operands(place, sizes)
    rows, vocab = len(states), len(weight)
    logits = states.float() @ weight.float().t()
    alpha, beta = torch.rand(2, rows, device=states.device).unbind()
    softmax = records.Softmax(logits.amax(1), -(logits - logits.amax(1, True)).exp().sum(1).log(), alpha)
    terms = records.Terms(target, logit, beta, None, (softmax,))
    found = []
    for h, w in ((states, weight), (quantised(states, True), quantised(weight, False))):
        dlogits = torch.zeros(rows, -(-vocab // 8) * 8, device=states.device, dtype=torch.bfloat16)[:, :vocab]
        gradients.grad_logits(dlogits, h, w, None, None, terms, records.PLAIN, tile)
        found.append(dlogits)
    assert torch.equal(*found) and found[0].any()
