"""Kernels by themselves, where the calls above them would hide what matters: order of sums, masks, strides."""

import pytest
import torch
from cases import GPU, TRITON, Place

PLACES = [*TRITON, *(place for place in GPU if place.values[0].backend == "triton")]

TARGETS = {
    "random": lambda made: torch.randint(0, 50, (301,), generator=made),
    "all equal": lambda made: torch.full((301,), 7),
    "two": lambda made: torch.randint(0, 2, (301,), generator=made),
    "each its own": lambda made: torch.randperm(301, generator=made),
    "ignored": lambda made: torch.full((301,), -1),
    "half ignored": lambda made: torch.where(torch.rand(301, generator=made) < 0.5, -1, 3),
    "one token": lambda made: torch.tensor([4]),
    "pieces": lambda made: torch.arange(301) // 32,
    "long run": lambda made: torch.cat([torch.zeros(3), torch.full((290,), 5), torch.full((8,), 9)]).long(),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_target_rows(place: Place, kind: str, dtype: torch.dtype) -> None:
    """Sorted pieces add what one addition after the other would, and the same bits every time."""
    from chunked_head.kernels import launch_targets

    made = torch.Generator().manual_seed(5)
    target = TARGETS[kind](made).to(place.device)
    tokens, vocab, hidden = len(target), 301, 72
    rows = torch.randn(tokens, hidden + 8, generator=made).to(place.device)[:, :hidden]  # rows further apart than long
    factor = torch.randn(tokens, generator=made).to(place.device)
    rows[target < 0] = torch.nan
    start = torch.randn(vocab, hidden, generator=made).to(place.device, dtype)

    def run() -> torch.Tensor:
        dweight = start.clone()
        launch_targets.add_target_rows(dweight, rows, target, factor)
        return dweight

    counts = target >= 0
    products = (factor[:, None] * rows)[counts].double()
    expected = start.double().index_add(0, target[counts], products)
    size = start.double().abs().index_add(0, target[counts], products.abs())
    first = run()
    rounding = 2 * torch.finfo(dtype).eps * expected.abs() + 1e-6 * size
    assert ((first.double() - expected).abs() <= rounding).all()
    assert torch.equal(first, run())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("kind", TARGETS)
def test_sort_targets(place: Place, kind: str, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting and sorting put equal targets in the same order: the first in place."""
    from chunked_head.kernels import launch_targets

    target = TARGETS[kind](torch.Generator().manual_seed(6)).to(place.device).repeat(4)
    if not counted:
        monkeypatch.setattr(launch_targets, "MOST_COUNTED", 0)
    found, order = launch_targets.sort_targets(target)
    expected = torch.sort(target, stable=True)
    assert found.dtype == torch.int32
    assert torch.equal(found.long(), expected.values)
    assert torch.equal(order, expected.indices)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scaled", [False, True])
def test_copy_rows(place: Place, scaled: bool) -> None:
    from chunked_head.kernels import launch

    source = torch.randn(9, 37, device=place.device).t()  # columns apart, rows adjacent
    target = torch.tensor([0, -1, 5] * 12 + [-1], device=place.device)
    source[target < 0] = torch.nan
    factor = torch.rand(37, device=place.device)
    factor[target < 0] = torch.nan
    out = torch.empty(37, 9, device=place.device)
    launch.copy_rows(out, source, target, factor if scaled else None)
    expected = source * factor[:, None] if scaled else source
    assert torch.equal(out, torch.where((target < 0)[:, None], 0.0, expected))


@pytest.mark.parametrize("place", PLACES)
def test_scale_leaves_alone_what_needs_nothing(place: Place) -> None:
    """In place, a factor of 1 writes nothing: nan's payload and signed zeros are as they were."""
    from chunked_head.kernels import launch

    values = torch.tensor([0.0, -0.0, 1.5, 3.0e38], device=place.device).repeat(700)
    before = values.clone()
    launch.scale(values, values, torch.ones((), device=place.device))
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))
    launch.scale(values, values, torch.tensor(0.5, device=place.device))
    assert torch.equal(values, before * 0.5)
    half = torch.empty_like(values, dtype=torch.float16)
    launch.scale(half, before, torch.tensor(2.0, device=place.device))
    assert torch.equal(half, (before * 2.0).half())
