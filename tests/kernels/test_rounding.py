"""Kernels that make e4m3 operands of exponentials and hidden states, and the products that read them."""

import pytest
import torch
from cases import GPU, TILES, TRITON, Place
from chunked_head.kernels.common.operands import Strips
from chunked_head.kernels.e4m3 import launch as e4m3
from chunked_head.kernels.products import launch as products
from tiers import crossed

from chunked_head.core import tiles
from chunked_head.core.records import ALL_ROWS, CountedRows
from chunked_head.core.tiles import Quantised, cdiv

PLACES = [*TRITON, *(place for place in GPU if place.values[0].backend == "triton")]
SIZES = [(70, 203, 80), (16, 48, 48), (33, 1000, 112)]  # rows, vocab, hidden
SLOTS, STRIP = 8, 64


def counted_of(rows: int, place: Place, some: bool) -> tuple[int, CountedRows]:
    count = rows - 5 if some else rows
    return count, (torch.tensor(count + 3, device=place.device), 3) if some else ALL_ROWS


def in_e4m3(x: torch.Tensor) -> torch.Tensor:
    """On the CPU, which saturates nothing."""
    return x.cpu().to(torch.float8_e4m3fn).float()


@crossed(place=PLACES, sizes=SIZES, some=[False, True])
def test_both_orders(place: Place, sizes: tuple[int, int, int], some: bool) -> None:
    (rows, vocab, _), generator = sizes, torch.Generator().manual_seed(1)
    count, counted = counted_of(rows, place, some)
    exp = (torch.randn(rows, cdiv(vocab, 8) * 8, generator=generator) * 20.0).exp2().clamp(max=2.0**30).bfloat16()
    power = (exp.float().amax(1) / 256.0).log2().ceil().exp2()
    share = torch.randn(rows, generator=generator)
    share[::7] = 0.0
    expected = in_e4m3(exp.float() / power[:, None])[:, :vocab]
    expected[count:], expected[::7] = 0.0, 0.0
    exp[::7] = torch.nan
    exact = (exp.float() * (share / power)[:, None])[:count, :vocab].nan_to_num(0.0).sum(0)
    exp[count:] = torch.nan
    columns, padded = cdiv(vocab, 16) * 16, cdiv(rows, 16) * 16
    found = [torch.full(shape, 0x7F, dtype=torch.uint8, device=place.device).view(torch.float8_e4m3fn)
             for shape in ((rows, columns), (columns, padded))]  # fmt: skip
    sums = torch.full((cdiv(padded, tiles.E4M3_ROWS), columns), torch.nan, device=place.device)
    given = exp.to(place.device)[:, :vocab], power.to(place.device), share.to(place.device), sums
    e4m3.both_orders(*found, *given, counted)
    torch.testing.assert_close(sums.sum(0).cpu()[:vocab], exact, rtol=1e-4, atol=1e-3)
    for result, order in zip(found, (expected, expected.t()), strict=True):
        whole = torch.zeros(result.shape)
        whole[: order.shape[0], : order.shape[1]] = order
        assert torch.equal(result.float().cpu(), whole)


@crossed(place=PLACES, rows=[70, 600], some=[0, 1, 9])
def test_mean_of_rows(place: Place, rows: int, some: int) -> None:
    """Of 256 rows at equal distances, those that count."""
    generator = torch.Generator().manual_seed(7)
    states, target = torch.randn(rows, 80, generator=generator).bfloat16(), torch.full((rows,), -1)
    target[some::3] = 5 if some else -1
    row = torch.arange(256) * rows // 256
    row = row[target[row] >= 0]
    expected = states[row].float().mean(0) if some else torch.zeros(80)
    mean = torch.full((80,), torch.nan, device=place.device)
    e4m3.mean_of_rows(mean, states.to(place.device), target.to(place.device))
    torch.testing.assert_close(mean.cpu(), expected, rtol=1e-5, atol=1e-6)


@crossed(place=PLACES, sizes=SIZES, some=[False, True])
def test_transposed_rows(place: Place, sizes: tuple[int, int, int], some: bool) -> None:
    (rows, _, hidden), generator = sizes, torch.Generator().manual_seed(2)
    count, counted = counted_of(rows, place, some)
    states = torch.randn(rows, hidden, generator=generator).bfloat16()
    power = torch.randint(-9, 9, (rows,), generator=generator).float().exp2()
    mean = torch.randn(hidden, generator=generator)
    most = (states.float() - mean).abs().amax(1) * power
    scale = (most[:count].amax() / 448.0).log2().ceil().exp2()
    expected = torch.zeros(hidden, cdiv(rows, 16) * 16)
    expected[:, :count] = in_e4m3(((states.float() - mean) * (power / scale)[:, None])[:count]).t()
    states[count:], most[count:] = torch.nan, torch.inf
    values = torch.empty(expected.shape, dtype=torch.float8_e4m3fn, device=place.device)
    out = Quantised(values, torch.empty((), device=place.device))
    e4m3.transposed_rows(out, *(t.to(place.device) for t in (states, mean, power, most)), counted)
    assert torch.equal(out.values.float().cpu(), expected) and out.scale.cpu() == scale


@crossed(place=PLACES, sizes=SIZES, some=[False, True])
def test_sparse_part(place: Place, sizes: tuple[int, int, int], some: bool) -> None:
    """Is taken out of the exponentials, and the power of 2 suits what is left."""
    (rows, vocab, hidden), generator = sizes, torch.Generator().manual_seed(3)
    count, counted = counted_of(rows, place, some)
    logits = torch.randn(rows, vocab, generator=generator) * 2.0
    target = torch.randint(vocab, (rows,), generator=generator)
    logits[::2, 7] += 12.0  # a heavy id
    target[0], target[1] = 7, -1
    target_logit = logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
    level = target_logit + (torch.arange(rows) % 3 == 0) * 3.0
    heavy = logits.topk(4, 1).indices.sort(1).values
    heavy_ids = torch.full((rows, SLOTS), -1, dtype=torch.int32)
    heavy_logits = torch.zeros(rows, SLOTS)
    for row in range(rows):
        ids = [i for i in heavy[row].tolist() if i != target[row]][: row % 5]
        heavy_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        heavy_logits[row, : len(ids)] = logits[row, ids]
    strips = Strips.empty(rows, cdiv(vocab, STRIP), place.device).of_rows(rows)
    for i, part in enumerate(logits.split(STRIP, 1)):
        own = torch.arange(rows) % 3 == 0
        offset = torch.where(own, target_logit + 1.0, target_logit)
        total = (part - offset[:, None]).exp().sum(1)
        strips.offset[i], strips.sums[0][i] = offset.to(place.device), torch.where(own, -total, total).to(place.device)
    exp = (logits - level[:, None]).exp().bfloat16()
    at = torch.arange(rows)
    exp[at, target] = torch.where(target >= 0, 0.0, exp[at, target].float()).bfloat16()
    states = torch.randn(rows, hidden, generator=generator).bfloat16()
    factor, scale = torch.rand(rows, generator=generator) + 0.5, torch.tensor(0.25)
    left = exp.float()
    for row, ids in enumerate(heavy_ids):
        left[row, ids[ids >= 0].long()] = 0.0
    terms, power, share, most = (torch.empty(rows, *n, device=place.device) for n in ((1 + SLOTS,), (), (), ()))
    mean = torch.randn(hidden, generator=generator)
    places = torch.empty(rows, 1 + SLOTS, dtype=torch.int32, device=place.device)
    found, factors = exp.clone().to(place.device), torch.stack([factor, -factor]).to(place.device)
    e4m3.split_sparse(
        found, places, terms, power, share, most,
        *(t.to(place.device) for t in (states, mean, heavy_ids, heavy_logits)), strips,
        STRIP, *(t.to(place.device) for t in (level, target, target_logit)), factors, scale.to(place.device),
        counted,
    )  # fmt: skip
    expected = factor[:, None] * (heavy_logits - level[:, None]).exp() * (heavy_ids >= 0)
    expected = torch.cat([-factor[:, None], expected], 1)
    ids = torch.cat([target[:, None].int(), heavy_ids], 1)
    ids[count:] = -1
    assert torch.equal(places.cpu(), ids)
    torch.testing.assert_close(terms.cpu()[:count], expected[:count], rtol=1e-5, atol=1e-6)
    power = power.cpu()
    assert torch.equal(power, power.log2().round().exp2())
    largest = (left.amax(1) / power)[:count]
    sums = torch.stack([part.sum(1) for part in left.split(STRIP, 1)]).amax(0) / power
    assert (largest <= 449.0).all() and (sums[:count] > 223.0).all()
    expected = factor * power * (target >= 0)
    torch.testing.assert_close(share.cpu()[:count], expected[:count])
    torch.testing.assert_close(most.cpu()[:count], ((states.float() - mean).abs().amax(1) * expected)[:count])
    torch.testing.assert_close(factors[0].cpu()[:count], (expected * 0.25)[:count])
    assert torch.equal(found.cpu()[:count].float(), left[:count])


@crossed(place=PLACES, sizes=SIZES, tile=TILES, first=[True, False], dtype=[torch.bfloat16, torch.float32])
@pytest.mark.parametrize("promoted", [None, 64])
def test_dweight(place: Place, sizes: tuple[int, int, int], tile: tiles.Tile, first: bool, dtype: torch.dtype,
                 promoted: int | None) -> None:  # fmt: skip
    (rows, vocab, hidden), generator = sizes, torch.Generator().manual_seed(4)
    padded = cdiv(rows, 16) * 16
    grad, states = torch.zeros(cdiv(vocab, 16) * 16, padded), torch.zeros(hidden, padded)
    grad[:, :rows] = torch.randint(-4, 5, (len(grad), rows), generator=generator).float()
    states[:, :rows] = torch.randint(-4, 5, (hidden, rows), generator=generator).float()
    out = torch.randint(-9, 9, (vocab, hidden), generator=generator).to(dtype)
    sums, mean = (torch.randint(-4, 5, (n,), generator=generator).float() for n in (vocab, hidden))
    expected = (grad @ states.t())[:vocab] * 0.5 + torch.outer(sums, mean) + (0.0 if first else out.float())
    one = torch.ones((), device=place.device)
    operands = [Quantised(t.to(place.device, torch.float8_e4m3fn), one * s) for t, s in ((grad, 1.0), (states, 0.5))]
    out, tile = out.to(place.device), tile._replace(e4m3_stages=None)
    products.dweight(out, operands[0]._replace(values=operands[0].values[:vocab]), operands[1], first, tile,
                     grad_sums_and_hidden_mean=(sums.to(place.device), mean.to(place.device)),
                     promoted=promoted)  # fmt: skip
    torch.testing.assert_close(out.cpu(), expected.to(dtype), rtol=0.0, atol=0.0)


@crossed(place=PLACES, sizes=SIZES, some=[False, True])
def test_finish_with_sparse(place: Place, sizes: tuple[int, int, int], some: bool) -> None:
    (rows, vocab, hidden), generator = sizes, torch.Generator().manual_seed(5)
    count, counted = counted_of(rows, place, some)
    product, weight = torch.randn(rows, hidden, generator=generator), torch.randn(vocab, hidden, generator=generator)
    target = torch.randint(-1, vocab, (rows,), generator=generator)
    factor = torch.randn(rows, generator=generator)
    places = torch.randint(vocab, (rows, 1 + SLOTS), generator=generator, dtype=torch.int32)
    places[torch.arange(1 + SLOTS)[None, :] >= (torch.arange(rows) % 5)[:, None]] = -1
    places[::3, 0] = -1  # another rank's target
    terms = torch.randn(rows, 1 + SLOTS, generator=generator)
    expected = factor[:, None] * product
    expected += ((terms * (places >= 0))[:, :, None] * weight[places.clamp(min=0).long()]).sum(1)
    expected[target < 0] = 0.0
    out = torch.full((rows, hidden), 7.0, device=place.device)
    given = [t.to(place.device) for t in (product, weight, target, factor, places, terms)]
    products.finish_with_sparse(out, *given, counted)
    torch.testing.assert_close(out.cpu()[:count], expected[:count], rtol=1e-5, atol=1e-5)
    assert (out[count:] == 7.0).all()


@crossed(place=PLACES, some=[0, 3, 90])
def test_rows_of_few_places(place: Place, some: int) -> None:
    """Are added as those of as many, by fewer programs."""
    generator = torch.Generator().manual_seed(6)
    places = torch.full((3000,), -1, dtype=torch.int32)
    places[torch.randperm(3000, generator=generator)[:some]] = torch.randint(7, (some,), generator=generator).int()
    rows, factors = torch.randn(40, 48, generator=generator), torch.randn(3000, generator=generator)
    row = torch.randint(40, (60,), generator=generator)
    found = []
    for of_entry, entries_per_row in ((row.repeat_interleave(50), 1), (row, 50)):
        out = torch.zeros(7, 48, device=place.device)
        given = [t.to(place.device) for t in (rows, places, factors, of_entry)]
        products.add_rows(out, *given, entries_per_row=entries_per_row)
        found.append(out)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert bool(found[1].any()) == (some > 0)
