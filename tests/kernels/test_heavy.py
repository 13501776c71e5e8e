"""Exact logits of heavy ids: which ids these are, and what is mended of stored logits and of strips' statistics."""

import math

import pytest
import torch
from cases import GPU, TRITON, Place
from chunked_head.kernels.common.operands import Strips
from chunked_head.kernels.statistics import launch as statistics
from tiers import crossed

from chunked_head.core.gpus import run_as
from chunked_head.core.records import SoftmaxVectors, Stored, Transform
from chunked_head.core.statistics import ENTROPY, RUNNER_UP, TOP, WEIGHTED_SUM
from chunked_head.core.tiles import HEAVY, LEAST_HEAVY_LOG2, MARGIN_LOG2, Quantised
from chunked_head.stores import operands as stores
from chunked_head.stores import torch_functions

PLACES = [*TRITON, *(place for place in GPU if place.values[0].backend == "triton")]
ROWS, VOCAB, HIDDEN = 21, 515, 48


def operands(place: Place, spread: float) -> tuple[torch.Tensor, ...]:
    """Hidden states, a weight that e4m3 holds and one in bf16 beside it, a bias, targets of which some do not count."""
    made = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randint(-4, 5, (n, HIDDEN), generator=made).float() for n in (ROWS, VOCAB))
    beside = weight + torch.randint(-1, 2, weight.shape, generator=made) * 2.0**-3
    hidden *= spread
    hidden[3] = 0.0  # flat: nothing is heavy
    target = torch.randint(0, VOCAB, (ROWS,), generator=made)
    target[::5] = -1
    bias = torch.randn(VOCAB, generator=made).bfloat16()
    return (
        *(t.to(place.device, torch.bfloat16) for t in (hidden, weight, beside)),
        bias.to(place.device),
        target.to(place.device),
    )


def outputs(kinds: tuple, device: torch.device) -> SoftmaxVectors:
    vectors = tuple(
        (
            each,
            tuple(
                torch.zeros(ROWS, dtype=torch.int32 if name in each.ids else torch.float32, device=device)
                for name in each.vectors
            ),
        )
        for each in kinds
    )
    return SoftmaxVectors(*torch.zeros(4, ROWS, device=device).unbind(), None, vectors)


def steps_of(near: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: by how much in base 2 a row's threshold lies above the least, of candidates above 0."""
    return sum(((near > step).sum(1, keepdim=True) > HEAVY).float() for step in (0.0, 1.0))


@crossed(place=PLACES, relative=[False, True], spread=[2.0**-6, 2.0**-4, 1.0], softcap=[None, 20.0], count=[None, 13])
def test_what_is_mended(place: Place, relative: bool, spread: float, softcap: float | None, count: int | None) -> None:
    """All that is stored of a row is what it is of logits among which those of heavy ids are exact."""
    hidden, coarse, weight, bias, target = operands(place, spread)
    device, tile = hidden.device, run_as("sm_90").logits
    width = tile.block_n // 2 if relative else tile.block_n
    transform = Transform(0.7, softcap, torch.linspace(0.5, 1.5, ROWS, device=device))
    kinds = ((ENTROPY, WEIGHTED_SUM, TOP, RUNNER_UP), (ENTROPY,)) if relative else ((ENTROPY, TOP),)
    ratios, widths = ((None, 0.5), (None, 2 * width)) if relative else ((None,), (None,))
    columns = torch.arange(VOCAB, device=device)
    counts = (target >= 0) & (torch.arange(ROWS, device=device) < (ROWS if count is None else count))

    def logits(weight: torch.Tensor) -> torch.Tensor:
        raw = hidden.float() @ weight.float().t() + bias.float()
        return torch_functions.transformed(raw, None, transform)

    exact = logits(weight)
    target_logit = torch.where(target >= 0, exact.gather(1, target.clamp(min=0)[:, None])[:, 0], 0.0)
    expected = torch.where(columns == target[:, None], exact, logits(coarse))
    lse = expected.logsumexp(1, keepdim=True)
    near, above = ((x - lse) / math.log(2) - LEAST_HEAVY_LOG2 for x in (expected, exact))
    near = torch.where(counts[:, None] & (columns != target[:, None]), near + MARGIN_LOG2, -torch.inf)
    steps, *others = (steps_of(near + error) for error in (0.0, -0.01, 0.01))
    # in 16 bits, rows with some HEAVY candidates may have one more or less
    unclear = (others[0] != others[1])[:, 0] | (((near - steps).abs() < 0.01) & (above > steps)).any(1)
    target, counts = target.masked_fill(unclear, -1), counts & ~unclear
    is_heavy = (near > steps) & (above > steps) & counts[:, None]
    assert unclear.sum() < 12 and (spread == 1.0 or softcap or steps[counts].unique().numel() > 1)
    expected = torch.where(is_heavy | (columns == target[:, None]), exact, logits(coarse))

    # by kernels
    scale = torch.ones((), device=device)
    h8, w8 = (
        Quantised(t.to(torch.float8_e4m3fn), s) for t, s in ((hidden, scale.expand(ROWS).clone()), (coarse, scale))
    )
    strips = Strips.empty(ROWS, -(-VOCAB // tile.block_n) * (tile.block_n // width), device, kinds).of_rows(ROWS)
    stored = torch.zeros(ROWS, -(-VOCAB // 8) * 8, dtype=torch.float16 if relative else torch.bfloat16, device=device)
    stored, counted = stored[:, :VOCAB], (None if count is None else torch.tensor(count, device=device), 0)
    level = None if relative else target_logit
    statistics.exp_logits(
        stored, strips, h8, w8, bias, None, level, transform, tile, ratios, widths, counted, target, target_logit
    )
    ids = torch.full((ROWS, HEAVY), 7, dtype=torch.int32, device=device)
    found = torch.full((ROWS, HEAVY), torch.nan, device=device)
    before = stored.clone()
    statistics.mend_heavy(
        ids, found, stored, strips, hidden, weight, bias, None, target, target_logit, transform, width, ratios, widths,
        counted,
    )  # fmt: skip

    # the list, and by torch operations the same
    numbers = is_heavy.sum(1)
    assert spread < 2.0**-5 or numbers.max() > 0
    for row in range(ROWS):
        heavy = columns[is_heavy[row]]
        assert ids[row].tolist() == heavy.tolist() + [-1] * (HEAVY - len(heavy))
        torch.testing.assert_close(found[row, : len(heavy)], exact[row, heavy], rtol=1e-5, atol=1e-5)
        assert not found[row, len(heavy) :].any()
    others, theirs = torch.empty_like(ids), torch.empty_like(found)
    mended = torch.where(columns == target[:, None], exact, logits(coarse))
    stores.mend_heavy(others, theirs, mended, hidden, weight, bias, target.masked_fill(~counts, -1), transform)
    assert torch.equal(others, ids)
    torch.testing.assert_close(theirs, found, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mended, expected, rtol=1e-5, atol=1e-5)

    # what is stored
    assert torch.equal(stored[~is_heavy], before[~is_heavy])
    offset = strips.offset.repeat_interleave(width, 0)[:VOCAB].t()
    if relative:
        values = stored.float() * math.log(2) + offset
        torch.testing.assert_close(values[is_heavy], exact[is_heavy], rtol=2**-10, atol=2**-9)
    else:
        offset = torch.where(strips.sums[0].repeat_interleave(width, 0)[:VOCAB].t() < 0, offset, target_logit[:, None])
        torch.testing.assert_close(stored[is_heavy].float(), (exact - offset)[is_heavy].exp(), rtol=2**-7, atol=0.0)

    # statistics
    for view, of_view in enumerate(kinds):
        out, true = (outputs(of_view, device) for _ in range(2))
        levels = None if relative else torch.empty(ROWS, device=device)
        end = widths[view] or VOCAB
        statistics.merge_strips(out, levels, strips, target_logit, None, target, end, ratios[view], view)
        torch_functions.row_stats(true, Stored(expected, None), end, target, None, ratios[view])
        assert out.lse is not None and true.lse is not None and out.logprob is not None and true.logprob is not None
        torch.testing.assert_close(out.lse[counts], true.lse[counts], rtol=1e-5, atol=3e-4)
        own = counts & (target < end)
        torch.testing.assert_close(out.logprob[own], true.logprob[own], rtol=1e-5, atol=3e-4)
        for (statistic, ours), (_, theirs) in zip(out.statistics, true.statistics, strict=True):
            # a sum of logits as they are stored: each is off by 2^-12 of its distance from the largest
            atol = 2e-3 if statistic is not WEIGHTED_SUM else 2.0**-12 * float(expected.abs().sum(1).max())
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one[counts], other[counts], rtol=1e-4, atol=atol, msg=statistic.name)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("relative", [False, True])
def test_what_is_not_finite(place: Place, relative: bool) -> None:
    """No id of a row with nan, or with logits of -inf alone, is heavy, and the row's statistics show it."""
    hidden, coarse, weight, bias, target = operands(place, 2.0**-4)
    device, tile = hidden.device, run_as("sm_90").logits
    width = tile.block_n // 2 if relative else tile.block_n
    target[:] = 1
    scale = torch.ones(ROWS, device=device)
    scale[1] = torch.nan
    target_logit = torch.full((ROWS,), 5.0, device=device)
    h8, w8 = Quantised(hidden.to(torch.float8_e4m3fn), scale), Quantised(coarse.to(torch.float8_e4m3fn), scale[0])
    strips = Strips.empty(ROWS, -(-VOCAB // tile.block_n) * (tile.block_n // width), device).of_rows(ROWS)
    stored = torch.zeros(ROWS, 520, dtype=torch.float16 if relative else torch.bfloat16, device=device)[:, :VOCAB]
    bias[2:] = -torch.inf
    level = None if relative else target_logit
    statistics.exp_logits(
        stored, strips, h8, w8, bias, None, level, Transform(), tile, target=target, target_logit=target_logit
    )
    ids = torch.zeros(ROWS, HEAVY, dtype=torch.int32, device=device)
    found = torch.zeros(ROWS, HEAVY, device=device)
    statistics.mend_heavy(
        ids, found, stored, strips, hidden, weight, bias, None, target, target_logit, Transform(), width
    )
    assert (ids[1] == -1).all() and (ids <= 0).all()
    out = outputs((), device)
    levels = None if relative else torch.empty(ROWS, device=device)
    statistics.merge_strips(out, levels, strips, target_logit, None, target, VOCAB)
    assert out.lse is not None and out.lse[1].isnan() and out.lse[2:].isfinite().all()
