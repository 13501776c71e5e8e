"""Targets beside the rows that predict them: every backend reads them alike."""

import pytest
import torch
from cases import PLACES, Place
from torch import Tensor

from chunked_head.backends import resolve

VOCAB = 50
# more tokens than the kernel reads at a time; no dimension; none along the one that is shifted
LEADINGS = ((7,), (), (0,), (3, 5), (2, 3, 1700), (3, 0))


def expected(target: Tensor, mask: Tensor | None, shift: int, ignore_index: int) -> Tensor:
    """One row after the other."""
    length = target.shape[-1] if target.dim() else 1
    rows = target.reshape(target.numel() // max(length, 1), length)
    masks = torch.ones_like(rows, dtype=torch.bool) if mask is None else mask.reshape(rows.shape)
    found = torch.full_like(rows, -1)
    for at in range(max(0, length - shift)):
        counts = masks[:, at + shift] & (rows[:, at + shift] != ignore_index)
        found[:, at] = torch.where(counts, rows[:, at + shift], -1)
    return found.reshape(-1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("leading", LEADINGS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 3, 9])
def test_as_one_after_the_other(place: Place, leading: tuple[int, ...], masked: bool, shift: int) -> None:
    if shift and not leading:
        pytest.skip("nothing to shift along")
    generator = torch.Generator().manual_seed(3)
    for ignore_index in (-100, 7, -1, 1 << 40):
        target = torch.randint(0, VOCAB, leading, generator=generator)
        target = torch.where(torch.rand(leading, generator=generator) < 0.3, ignore_index, target).to(place.device)
        mask = (torch.rand(leading, generator=generator) < 0.7).to(place.device) if masked else None
        if mask is not None:
            target = torch.where(mask, target, -5)  # out of range where it does not count
        found = resolve(place.backend, target.device).read_targets(
            target, mask, shift, ignore_index, VOCAB, torch.float32
        )
        right = expected(target, mask, shift, ignore_index)
        assert torch.equal(found.target, right)
        assert found.counted.item() == (right >= 0).sum().item()
        assert found.one_or_nan.item() == 1.0
        assert found.counted.dtype == found.one_or_nan.dtype == torch.float32


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrong", [VOCAB, -1, 1 << 40, -(1 << 40)])
@pytest.mark.parametrize("at", [(0, 1), (1, 2499)])
def test_one_out_of_range_is_told(place: Place, wrong: int, at: tuple[int, int]) -> None:
    target = torch.zeros(2, 2500, dtype=torch.int64, device=place.device)
    target[at] = wrong
    read = resolve(place.backend, target.device).read_targets
    found = read(target, None, 0, -100, VOCAB, torch.float32)
    assert found.one_or_nan.isnan()
    assert found.target[at[0] * 2500 + at[1]] == -1  # nobody uses it as an index
    assert not read(target, None, 0, wrong, VOCAB, torch.float32).one_or_nan.isnan()
    mask = torch.ones_like(target, dtype=torch.bool)
    mask[at] = False
    assert not read(target, mask, 0, -100, VOCAB, torch.float32).one_or_nan.isnan()


@pytest.mark.parametrize("place", PLACES)
def test_rows_that_are_not_adjacent(place: Place) -> None:
    target = torch.arange(24, device=place.device).reshape(6, 4).t()
    mask = (torch.arange(48, device=place.device) % 3 > 0).reshape(4, 12)[:, ::2]
    found = resolve(place.backend, target.device).read_targets(target, mask, 1, 13, VOCAB, torch.float32)
    assert torch.equal(found.target, expected(target, mask, 1, 13))
