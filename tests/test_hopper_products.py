"""dweight's product by the kernel for Hopper GPUs, by itself: tiles cut by every edge, and rows that do not count."""

import pytest
import torch

gpu = pytest.mark.gpu
SHAPES = [  # rows, vocab, hidden
    (2048, 12040, 2304),
    (1920, 2880, 1000),  # a tile of hidden that is cut, one of vocab that is cut
    (17, 136, 72),  # one tile, one step
    (96, 40000, 64),  # fewer steps than stages, and several tiles for a program
    (32, 40000, 520),  # one step a tile
    (200, 40000, 520),  # a step more than stages
]


def product(rows: int, vocab: int, hidden: int, dtype: torch.dtype, out: torch.dtype) -> tuple[torch.Tensor, ...]:
    made = torch.Generator("cuda").manual_seed(5)
    grad = torch.randn(rows, vocab + 8, generator=made, device="cuda").to(dtype)[:, :vocab]  # rows further apart
    states = torch.randn(rows, hidden, generator=made, device="cuda").to(dtype)
    return grad, states, torch.randn(vocab, hidden, generator=made, device="cuda").to(out)


def assert_sum(ours: torch.Tensor, old: torch.Tensor | None, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """Rounded once to the output's dtype, of fp32 sums over as many products as there are rows."""
    wide = grad.double().t(), hidden.double()
    expected = wide[0] @ wide[1]
    size = wide[0].abs() @ wide[1].abs()
    if old is not None:
        expected, size = expected + old.double(), size + old.double().abs()
    sums = 2.0**-23 * max(len(grad), 16) ** 0.5 * size
    assert ((ours.double() - expected).abs() <= torch.finfo(ours.dtype).eps * expected.abs() + sums).all()


@gpu
@pytest.mark.parametrize("rows, vocab, hidden", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_product(rows: int, vocab: int, hidden: int, dtype: torch.dtype, wide: bool, first: bool) -> None:
    from chunked_head.kernels import launch

    grad, states, old = product(rows, vocab, hidden, dtype, torch.float32 if wide else dtype)
    results = []
    for _ in range(3):
        out = torch.full_like(old, torch.nan) if first else old.clone()
        launch.dweight(out, grad, states, first)
        results.append(out)
    assert_sum(results[0], None if first else old, grad, states)
    assert all(torch.equal(results[0], other) for other in results)


@gpu
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 200, 299, 300, 1000])
@pytest.mark.parametrize("first", [False, True])
def test_counted_rows(count: int, first: bool) -> None:
    """What lies behind the rows that count, in steps of its own, is not read; nothing to count stores zeros."""
    from chunked_head.kernels import launch

    grad, states, old = product(300, 3000, 520, torch.bfloat16, torch.bfloat16)
    counts = min(count, 300)
    states[counts:] = 0.0
    grad[-(-counts // 32) * 32 :] = torch.nan
    out = torch.full_like(old, torch.nan) if first else old.clone()
    launch.dweight(out, grad, states, first, launch.Counted(torch.tensor(700 + count, device="cuda"), 700))
    assert_sum(out, None if first else old, grad[:counts], states[:counts])


@gpu
def test_both_kernels() -> None:
    """A tile asks for the plain kernel, and none for Hopper's: they differ by the order of their sums alone."""
    from chunked_head.kernels import launch
    from chunked_head.kernels.launch_hopper import runs_hopper_products
    from chunked_head.kernels.tiles import PRODUCT_TILE

    grad, states, old = product(2048, 4096, 1024, torch.bfloat16, torch.float32)
    for tile in (None, PRODUCT_TILE):
        out = old.clone()
        launch.dweight(out, grad, states, False, tile=tile)
        assert_sum(out, old, grad, states)
    assert runs_hopper_products(grad.device), "the GPU or its Triton is not one that the kernel was made for"


def test_nothing_of_it_where_it_cannot_run() -> None:
    from chunked_head.kernels.launch_hopper import runs_hopper_products

    assert not runs_hopper_products(torch.device("cpu"))
