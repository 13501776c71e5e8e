"""A plugin of pytest: products on a CPU are rounded as another BLAS would, which sums in another order at every size.

    PYTHONPATH=tests/helpers pytest -p other_blas tests/functions/test_logprobs.py

The same product twice gives the same bits, one of another size gives others. A test that fails asks a BLAS for bits, or
has a budget that rounding alone breaks. Intel's AVX-512 kernels broke the same tests.
"""

import zlib
from typing import Any

import torch
from torch import Tensor


def rounded(product: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` with noise as large as the roundings of its sums are, one after the other: 0.3 ulp, the deviation of a
    rounding, of each partial sum, which are about as large as the root of their terms' squares."""
    if product.is_cuda or product.dtype not in (torch.float32, torch.float64):
        return product
    seed = zlib.crc32(repr((a.shape, b.shape, a.dtype)).encode())
    noise = torch.randn(product.shape, generator=torch.Generator().manual_seed(seed), dtype=product.dtype)
    size = (a.detach().to(product.dtype).square() @ b.detach().to(product.dtype).square()).sqrt()
    ulps = 0.3 * (a.shape[1] / 2) ** 0.5 * torch.finfo(product.dtype).eps
    return product.add_((noise * ulps * size).nan_to_num(0.0, 0.0, 0.0))


class OtherTorch:
    """torch, with products of that kind."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def mm(self, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        return rounded(torch.mm(a, b, **options), a, b)

    def addmm(self, added: Tensor, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        return rounded(torch.addmm(added, a, b, **options), a, b)


def pytest_configure() -> None:
    from chunked_head.stores import matmul

    original = matmul.dweight_tile
    matmul.torch = OtherTorch()  # type: ignore[attr-defined]
    matmul.dweight_tile = lambda dlogits, hidden: rounded(original(dlogits, hidden), dlogits.t(), hidden)
