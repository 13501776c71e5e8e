"""dhidden's product by itself: tiles of the last turn cut over the vocabulary, rows that do not count, orders."""

import pytest
import torch
from cases import PLACES, PRODUCT_TILES, Place
from chunked_head.kernels.products import launch as products
from tiers import crossed

from chunked_head.core.gpus import UNCUT, DhiddenSplit, dhidden_split, multiprocessors_of, run_as
from chunked_head.core.tiles import INTERPRETED, Tile

OURS = [place for place in PLACES if place.values[0].backend == "triton"]
# on a GPU the last turn's tiles are few, or all there are; interpreted there are four multiprocessors
SHAPES = [(70, 72, 600), (130, 64, 511)] if INTERPRETED else [(2048, 2304, 5000), (1000, 520, 12000)]
SPLITS = ["chosen", "whole", "many"]


def split_of(name: str, tile: Tile, rows: int, vocab: int, hidden: int, device: torch.device) -> DhiddenSplit:
    if name == "whole":
        return UNCUT
    programs = multiprocessors_of(device)
    pieces, units = dhidden_split(tile, rows, hidden, vocab, programs)
    assert pieces > 1 and units <= 2 * programs
    return (pieces, units) if name == "chosen" else (13, 13 * (units // pieces))


def operands(rows: int, hidden: int, vocab: int, device: str) -> tuple[torch.Tensor, torch.Tensor, products.RowFactors]:
    made = torch.Generator().manual_seed(5)
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    grad = torch.randn(rows, vocab + 8 - vocab % 8, generator=made).to(device, dtype)[:, :vocab]
    weight = torch.randn(vocab, hidden, generator=made).to(device, dtype)
    target = torch.randint(-1, vocab, (rows,), generator=made)
    softmax, at_target = torch.rand(2, rows, generator=made).to(device)
    return grad, weight, (target.to(device), softmax, at_target)


def expected(grad: torch.Tensor, weight: torch.Tensor, factors: products.RowFactors | None) -> torch.Tensor:
    product = grad.double() @ weight.double()
    if factors is None:
        return product
    target, softmax, at_target = factors
    rows = weight.double()[target.clamp(min=0)]
    found = softmax.double()[:, None] * product + at_target.double()[:, None] * rows
    return torch.where((target >= 0)[:, None], found, 0.0)


def scratch_of(split: DhiddenSplit, tile: Tile, device: str) -> dict[str, torch.Tensor]:
    sums = torch.full((split[1] * tile.elements,), torch.nan, device=device)
    return {"scratch": sums, "finished": torch.zeros(multiprocessors_of(sums.device), dtype=torch.int32, device=device)}


@crossed(place=OURS, tile=PRODUCT_TILES, name=SPLITS, factored=[False, True], add=[False, True])
@pytest.mark.parametrize("rows, hidden, vocab", SHAPES)
def test_product(
    place: Place, tile: Tile, rows: int, hidden: int, vocab: int, name: str, factored: bool, add: bool
) -> None:
    grad, weight, row_factors = operands(rows, hidden, vocab, place.device)
    factors = row_factors if factored else None
    split = split_of(name, tile, rows, vocab, hidden, grad.device)
    old = torch.randn(rows, hidden, device=place.device)
    true = expected(grad, weight, factors) + (old.double() if add else 0.0)
    found = []
    for _ in range(2):
        out = old.clone() if add else torch.full_like(old, torch.nan)
        scratch = scratch_of(split, tile, place.device)
        products.dhidden(out, grad, weight, tile, factors, add=add, split=split, **scratch)
        found.append(out)
    size = grad.double().abs() @ weight.double().abs()
    assert ((found[0].double() - true).abs() <= 2.0**-22 * (size + true.abs() + 1.0) * vocab**0.5 / 16).all()
    assert torch.equal(*found)


@crossed(place=OURS, tile=PRODUCT_TILES, share=[0.0, 0.01, 0.3, 0.7, 1.0])
def test_rows_that_count(place: Place, tile: Tile, share: float) -> None:
    """Fewer rows leave other tiles for the last turn, in parts that have room; rows behind them stay as they are."""
    rows, hidden, vocab = SHAPES[0]
    grad, weight, factors = operands(rows, hidden, vocab, place.device)
    split = split_of("chosen", tile, rows, vocab, hidden, grad.device)
    count = int(share * rows)
    out = torch.full((rows, hidden), 7.0, device=place.device)
    counted = torch.tensor(900 + count, device=place.device), 900
    scratch = scratch_of(split, tile, place.device)
    products.dhidden(out, grad, weight, tile, factors, counted, split=split, **scratch)
    true = expected(grad, weight, factors)[:count]
    torch.testing.assert_close(out[:count].double(), true, rtol=1e-4, atol=1e-3)
    assert (out[count:] == 7.0).all()


@crossed(place=OURS, tile=PRODUCT_TILES, name=["chosen", "many"])
@pytest.mark.parametrize("rows, hidden, vocab", [*SHAPES, (512, 2048, 8200)] if not INTERPRETED else SHAPES[:1])
def test_parts_have_one_sum(place: Place, tile: Tile, name: str, rows: int, hidden: int, vocab: int) -> None:
    """The same bits whichever program is the last to come to a tile, and none reads a part before it is there: those
    of the run before are nan."""
    grad, weight, factors = operands(rows, hidden, vocab, place.device)
    split = split_of(name, tile, rows, vocab, hidden, grad.device)
    out, first = torch.empty(rows, hidden, device=place.device), None
    scratch = scratch_of(split, tile, place.device)
    wrong = torch.zeros((), dtype=torch.int64, device=place.device)
    for _ in range(2 if INTERPRETED else 200):
        scratch["scratch"].fill_(torch.nan)
        scratch["finished"].zero_()
        products.dhidden(out, grad, weight, tile, factors, split=split, **scratch)
        first = out.clone() if first is None else first
        wrong += (out.view(torch.int32) != first.view(torch.int32)).sum()
    torch.testing.assert_close(first.double(), expected(grad, weight, factors), rtol=1e-4, atol=2e-2)
    assert wrong == 0


def test_turns() -> None:
    """No more places than there are; whole where nothing is left over, or nothing gained."""
    tile = run_as("sm_90").product
    assert dhidden_split(tile, 2048, 4096, 128256, 132) == UNCUT or INTERPRETED
    for rows in (16, 200, 1664, 2048, 2736, 8192):
        for hidden in (64, 1024, 2304, 2880):
            for most in (0, 40, None):
                pieces, units = dhidden_split(tile, rows, hidden, 50000, 132, most)
                assert units <= (528 if most is None else most)
                assert (pieces == 1) == (units == 0)
    assert dhidden_split(tile, 2048, 2304, tile.block_k, 132) == UNCUT  # not in parts of no steps
