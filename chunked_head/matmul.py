"""The three matrix products into buffers that exist already, with fp32 sums of 16-bit operands and no large temporary.

On CUDA cuBLAS sums 16-bit operands into fp32 by itself (``out_dtype``). Elsewhere torch cannot, so 16-bit operands
are cast to fp32 by tiles of the vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .plan import MiB, slices

CAST_BYTES = 16 * MiB


def vocabulary_tiles(weight_like: Tensor) -> Iterator[slice]:
    """Rows of the weight whose fp32 copy is about 16 MiB: what is cast at a time."""
    vocab, hidden = weight_like.shape
    return slices(vocab, min(vocab, max(128, CAST_BYTES // (4 * max(hidden, 1)))))


def project(
    hidden: Tensor,  # [rows, hidden]
    weight: Tensor,  # [columns, hidden]
    out: Tensor,  # [rows, columns], of the operands' dtype or fp32
) -> None:
    """``out = hidden @ weight.T``"""
    if out.dtype == hidden.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:
        wide = hidden.to(out.dtype)
        for tile in vocabulary_tiles(weight):
            torch.mm(wide, weight[tile].to(out.dtype).t(), out=out[:, tile])


def add_dhidden(
    dlogits: Tensor,  # [rows, columns]
    weight: Tensor,  # [columns, hidden]
    out: Tensor,  # [rows, hidden]
    first: bool,
) -> None:
    """``out = dlogits @ weight`` where ``first``, else ``out += dlogits @ weight``"""
    if summed_by_blas(dlogits, weight, out):
        multiply(dlogits, weight, out, first)
        return
    total = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    store = first or total is not out
    for tile in vocabulary_tiles(weight):
        multiply(dlogits[:, tile].float(), weight[tile].float(), total, store)
        store = False
    if total is not out:
        out.copy_(total) if first else out.add_(total)


def add_dweight(
    dlogits: Tensor,  # [rows, columns]
    hidden: Tensor,  # [rows, hidden]
    out: Tensor,  # [columns, hidden]
    first: bool,
) -> None:
    """``out = dlogits.T @ hidden`` where ``first``, else ``out += dlogits.T @ hidden``"""
    if summed_by_blas(dlogits, hidden, out):
        multiply(dlogits.t(), hidden, out, first)
        return
    wide = hidden.float()
    for tile in vocabulary_tiles(out):
        product = dlogits[:, tile].float().t() @ wide
        out[tile].copy_(product) if first else out[tile].add_(product)


def summed_by_blas(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether one product sums these operands into ``out`` in fp32 or wider without a cast."""
    return a.dtype == b.dtype and (a.is_cuda or out.dtype == a.dtype)


def multiply(a: Tensor, b: Tensor, out: Tensor, first: bool) -> None:
    """``out (+)= a @ b``, stored rather than added to zeros the first time."""
    wide = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    torch.mm(a, b, out=out, **wide) if first else torch.addmm(out, a, b, out=out, **wide)


def add_dbias(
    dlogits: Tensor,  # [rows, columns]
    out: Tensor,  # [columns] fp32 or fp64
    first: bool,
) -> None:
    """``out (+)= dlogits.sum(0)``"""
    total = dlogits.sum(0, dtype=out.dtype)
    out.copy_(total) if first else out.add_(total)
