"""The three matrix products into buffers that exist already, with fp32 sums of 16-bit operands and no large temporary.

cuBLAS sums 16-bit operands into fp32 by itself (``out_dtype``). Elsewhere torch cannot, or it has not been tried,
so 16-bit operands are cast to fp32 by tiles of the vocabulary.
"""

import torch
from torch import Tensor

from ..core.memory import RECORDERS, recorder
from ..core.private import private
from ..plan.sizes import cast_rows, slices

# rows and columns of each thread from which on BLAS sums in one order; elements of a smaller product at a time
FEW_ROWS, FEW_COLUMNS, FEW_ELEMENTS = 8, 16, 1 << 18
# rows from which on cuBLAS does so with a bias; columns of a smaller product at a time
GPU_ROWS, GPU_COLUMNS = 64, 1 << 14


def project(
    hidden: Tensor,  # [rows, hidden]
    weight: Tensor,  # [columns, hidden]
    out: Tensor,  # [rows, columns], of the operands' dtype or fp32
    bias: Tensor | None = None,  # [columns]
    rows: int | None = None,
) -> Tensor | None:
    """``out = hidden @ weight.T + bias``, or without the bias, which is then returned. On a GPU ``rows`` at a time.

    BLAS sums products of few rows in another order, and a row's logits would depend on the number of rows: few rows get
    rows of zeros behind them. With a bias, as in ``F.linear``, cuBLAS takes other algorithms, up to two times as exact:
    so does ours, and a product without a bias adds zeros.
    """
    fused = added = None
    least = FEW_ROWS * torch.get_num_threads()
    if hidden.is_cuda:
        least, alike = GPU_ROWS, hidden.dtype == weight.dtype == out.dtype
        if alike and bias is not None and bias.dtype == out.dtype:
            fused = added = bias
        elif alike and out.dtype == torch.float32:
            added = out.new_zeros(len(weight))
    step = rows if hidden.is_cuda and rows else max(1, len(hidden))
    for first in range(0, len(hidden), step):
        block, into = hidden[first : first + step], out[first : first + step]
        missing = least - len(block)
        if missing <= 0:
            product_of(block, weight, added, into)
            continue
        block = torch.nn.functional.pad(block, (0, 0, 0, missing))
        columns = max(min(cast_rows(weight.shape[1]), FEW_ELEMENTS // least), FEW_COLUMNS * torch.get_num_threads())
        for tile in equal_tiles(len(weight), GPU_COLUMNS if hidden.is_cuda else columns):
            product = out.new_empty(least, tile.stop - tile.start)
            product_of(block, weight[tile], None if added is None else added[tile], product)
            into[:, tile] = product[: len(into)]
    return bias if fused is None else None


def product_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = hidden @ weight.T``, and a bias of the same dtype in the product itself."""
    if bias is not None:
        torch.addmm(bias, hidden, weight.t(), out=out)
    elif len(weight) == 1 and not hidden.is_cuda:  # summed in another order, as few rows are
        pair = out.new_empty(len(hidden), 2)
        product_of(hidden, torch.nn.functional.pad(weight, (0, 0, 0, 1)), None, pair)
        out.copy_(pair[:, :1])
    elif summed_by_blas(hidden, weight, out):
        multiply(hidden, weight.t(), out, first=True)
    else:
        wide = hidden.to(out.dtype)
        for tile in equal_tiles(len(weight), max(cast_rows(weight.shape[1]), FEW_COLUMNS * torch.get_num_threads())):
            torch.mm(wide, weight[tile].to(out.dtype).t(), out=out[:, tile])


def equal_tiles(columns: int, width: int) -> list[slice]:
    """Slices as wide as each other: the last one reaches back where fewer columns are left."""
    return [slice(max(0, tile.stop - width), tile.stop) for tile in slices(columns, width)]


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
    for tile in slices(len(weight), cast_rows(weight.shape[1])):
        multiply(dlogits[:, tile].float(), weight[tile].float(), total, store)
        store = False
    if total is not out:
        accumulate(out, total, first)


def add_dweight(
    dlogits: Tensor,  # [rows, columns]
    hidden: Tensor,  # [rows, hidden]
    out: Tensor,  # [columns, hidden]
    first: bool,
    gain: Tensor | None = None,  # []
) -> None:
    """``out = gain * dlogits.T @ hidden`` where ``first``, else ``out += gain * dlogits.T @ hidden``"""
    if gain is None and summed_by_blas(dlogits, hidden, out):
        multiply(dlogits.t(), hidden, out, first)
        return
    wide = hidden if sums_halves(hidden.device) and hidden.dtype == dlogits.dtype else hidden.float()
    for tile in slices(len(out), cast_rows(out.shape[1])):
        # no name for a tile's product: it would still be there when the next is made
        accumulate(out[tile], dweight_tile(dlogits[:, tile], wide), first, gain)


def dweight_tile(dlogits: Tensor, hidden: Tensor) -> Tensor:
    """``dlogits.T @ hidden`` in fp32"""
    if hidden.dtype != dlogits.dtype or hidden.dtype == torch.float32:
        return dlogits.float().t() @ hidden
    product = torch.empty(dlogits.shape[1], hidden.shape[1], dtype=torch.float32, device=hidden.device)
    multiply(dlogits.t(), hidden, product, first=True)
    return product


def summed_by_blas(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """True where one product sums these operands into ``out`` in fp32 or wider without a cast.

    On the CPU 16-bit products are cast whatever ``out`` is: with an odd inner size and padded rows torch 2.13's bf16
    product reads the padding, and what is nan there becomes nan in the result.
    """
    if a.dtype != b.dtype:
        return False
    if a.dtype.itemsize < 4:
        return sums_halves(a.device) and out.dtype in (a.dtype, torch.float32)
    return out.dtype == a.dtype


def sums_halves(device: torch.device) -> bool:
    """True where products of 16-bit operands can be summed in fp32 as they are."""
    return device.type == "cuda" and torch.version.hip is None


def multiply(a: Tensor, b: Tensor, out: Tensor, first: bool) -> None:
    """``out (+)= a @ b``, stored rather than added to zeros the first time."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if first else torch.addmm(out, a, b, out=out)
    elif first:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    if RECORDERS and (listening := recorder()) is not None:
        listening.called(multiply, a, b, out, first, written=out)


def multiply_e4m3(a: Tensor, b: Tensor, out: Tensor, unit: Tensor) -> None:
    """``out = a @ b.T`` in fp32 of e4m3 operands [m, k] and [n, k], n and k multiples of 16. ``unit``: [] fp32, 1."""
    found = private("_scaled_mm") if a.is_cuda else None
    if found is not None:
        found[0](a, b.t(), unit, unit, out_dtype=out.dtype, use_fast_accum=False, out=out)
        return
    dtype = torch.bfloat16 if sums_halves(a.device) else torch.float32
    for k in slices(a.shape[1], cast_rows(len(a) + len(b))):
        multiply(a[:, k].to(dtype), b[:, k].to(dtype).t(), out, k.start == 0)


def accumulate(out: Tensor, value: Tensor, first: bool, gain: Tensor | None = None) -> None:
    """``out (+)= gain * value``, stored rather than added to zeros the first time."""
    if gain is None:
        out.copy_(value) if first else out.add_(value)
    elif first:
        torch.mul(value, gain, out=out)
    else:
        out.addcmul_(value, gain)
