"""Kernels by themselves, where the calls above them would hide what matters: order of sums, masks, strides."""

import pytest
import torch
from cases import GPU, TRITON, Place

from chunked_head.parallel.merge import Told, merge_ranks, pack, sent
from chunked_head.stats import Demand, RowStats

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
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("room", [0, 1, 300, 700])
def test_target_rows_in_sections(place: Place, kind: str, room: int) -> None:
    """In a scratch of nan that holds the sums of some tokens only: the same but for the order of a target's sums."""
    from chunked_head.kernels import launch_targets

    made = torch.Generator().manual_seed(5)
    target = TARGETS[kind](made).repeat(3).to(place.device)
    rows, factor = (torch.randn(len(target), *size, generator=made).to(place.device) for size in ((40,), ()))
    order = torch.randperm(len(target), generator=made).to(place.device)
    expected = torch.randn(301, 40, generator=made).to(place.device)
    found = expected.clone()
    scratch = torch.full((room, 10), torch.nan, dtype=torch.bfloat16, device=place.device)  # 20 bytes a token
    launch_targets.add_target_rows(found, rows, target, factor, order, scratch)
    launch_targets.add_target_rows(expected, rows, target, factor, order)
    assert scratch.nbytes < launch_targets.piece_bytes(len(target), 40) or len(target) < 700
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


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


def told_by(ranks: int, rows: int, made: torch.Generator, device: str) -> tuple[torch.Tensor, RowStats]:
    """Statistics of pieces of a vocabulary as ranks send them, with equal logits and a piece of nothing."""
    vocab, demand = 5 * ranks, Demand(entropy=(True,), weighted_sum=True, top=True)
    x = torch.randn(rows, vocab, generator=made).mul(30).round()
    x[:, :5] = torch.where(torch.arange(rows)[:, None] % 3 == 0, -torch.inf, x[:, :5])
    out = RowStats.empty(rows, demand, torch.float32, torch.device(device))
    pieces = []
    for rank, piece in enumerate(x.to(device).split(5, 1)):
        top, argmax = piece.max(1)
        lse = piece.logsumexp(1)
        log_p = piece - lse[:, None]
        entropy = -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(1)
        for name, value in {
            "start": top, "rest": top - lse, "target_logit": piece[:, 1], "entropy": entropy, "top": top,
            "argmax": 5 * rank + argmax, "weighted_sum": torch.where(piece > -torch.inf, piece, 0.0).sum(1),
        }.items():  # fmt: skip
            getattr(out, name).copy_(value.nan_to_num(0.0) if name in ("rest", "entropy") else value)
        pieces.append(pack(out, sent(demand), torch.arange(float(rows), device=device)))
    return torch.stack(pieces), out


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("off", [None, 0, 1])
def test_merge_ranks(place: Place, known: bool, off: int | None) -> None:
    """The kernel's numbers are those of torch's operations; where one rank's tokens are others, nan."""
    from chunked_head.backends import resolve

    ranks, rows = 3, 130
    gathered, out = told_by(ranks, rows, torch.Generator().manual_seed(7), place.device)
    other = RowStats(**{name: value.clone() for name, value in out.named().items()})
    if off is not None:
        gathered[off, -1, 77] += 1.0
    target = torch.arange(rows, device=place.device) % 4 - 1
    names = sent(Demand(entropy=(True,), weighted_sum=True, top=True))
    told = Told(gathered, names, target, 1.0, known, None)
    resolve("triton", torch.device(place.device)).merge_ranks(told, out)
    merge_ranks(told, other)
    for name, value in out.named().items():
        torch.testing.assert_close(value, getattr(other, name), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert out.lse.isnan().all() == (off is not None) == out.start.isnan().any()
    assert not out.target_logit.isnan().any()
