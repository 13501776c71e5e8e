"""The three matrix products into buffers that exist already, with fp32 sums of 16-bit operands and no large temporary.

cuBLAS sums 16-bit operands into fp32 by itself (``out_dtype``). Elsewhere torch cannot, or it has not been tried,
so 16-bit operands are cast to fp32 by tiles of the vocabulary.
"""

import torch
from torch import Tensor

from ..kernels.common.memory import RECORDERS, recorder
from ..plan.sizes import cast_rows, slices

# rows, and columns, of each thread from which on BLAS sums every product in one order
FEW_ROWS, FEW_COLUMNS = 8, 16
FEW_ELEMENTS = 1 << 18  # of a product of few rows that is made at a time
# rows from which on cuBLAS's products with a bias do so; and columns of fewer rows that are made at a time
GPU_ROWS, GPU_COLUMNS = 64, 1 << 14


def project(
    hidden: Tensor,  # [rows, hidden]
    weight: Tensor,  # [columns, hidden]
    out: Tensor,  # [rows, columns], of the operands' dtype or fp32
) -> None:
    """``out = hidden @ weight.T``"""
    # On the CPU BLAS sums products of few rows for each thread, or of one column, in another order: a row's logits
    # would depend on how many rows came with it.
    threads = 0 if hidden.is_cuda else torch.get_num_threads()
    rows, columns = len(hidden), len(weight)
    if threads and columns == 1:
        pair = out.new_empty(rows, 2)
        project(hidden, torch.nn.functional.pad(weight, (0, 0, 0, 1)), pair)
        out.copy_(pair[:, :1])
    elif 0 < rows < FEW_ROWS * threads:
        few = torch.nn.functional.pad(hidden, (0, 0, 0, FEW_ROWS * threads - rows)).to(out.dtype)
        width = min(cast_rows(weight.shape[1]), FEW_ELEMENTS // len(few))
        for tile in equal_tiles(columns, max(width, FEW_COLUMNS * threads)):
            out[:, tile] = (few @ weight[tile].to(out.dtype).t())[:rows]
    elif summed_by_blas(hidden, weight, out):
        multiply(hidden, weight.t(), out, first=True)
    else:
        wide = hidden.to(out.dtype)
        for tile in equal_tiles(columns, max(cast_rows(weight.shape[1]), FEW_COLUMNS * threads)):
            torch.mm(wide, weight[tile].to(out.dtype).t(), out=out[:, tile])


def equal_tiles(columns: int, width: int) -> list[slice]:
    """Slices as wide as each other: the last one reaches back where fewer columns are left."""
    return [slice(max(0, tile.stop - width), tile.stop) for tile in slices(columns, width)]


def project_biased(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, rows: int | None = None
) -> Tensor | None:
    """``out = hidden @ weight.T + bias``, or without the bias: what is left to be added. On a GPU so many ``rows`` at a
    time.

    ``F.linear`` adds its bias in cuBLAS's product, for which cuBLAS takes other algorithms than without one, up to two
    times as exact; so ours does too. These sum a row of fp32 logits in one order however many rows there are, but for
    few: a product without a bias adds zeros, and few rows have rows of zeros behind them.
    """
    if not hidden.is_cuda:
        project(hidden, weight, out)
        return bias
    alike = hidden.dtype == weight.dtype == out.dtype
    fused = bias if alike and bias is not None and bias.dtype == out.dtype else None
    added = fused
    if alike and fused is None and out.dtype == torch.float32:
        added = out.new_zeros(len(weight))
    for part in slices(len(hidden), rows or max(1, len(hidden))):
        some, into = hidden[part], out[part]
        missing = GPU_ROWS - len(some)
        if missing <= 0:
            biased_product(some, weight, added, into)
            continue
        some = torch.nn.functional.pad(some, (0, 0, 0, missing))
        for tile in equal_tiles(len(weight), GPU_COLUMNS):
            product = out.new_empty(GPU_ROWS, len(weight[tile]))
            biased_product(some, weight[tile], None if added is None else added[tile], product)
            into[:, tile] = product[: len(into)]
    return bias if fused is None else None


def biased_product(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = hidden @ weight.T``, and a bias of the same dtype in the product itself."""
    if bias is None:
        project(hidden, weight, out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


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
        put(out, total, first)


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
        put(out[tile], dweight_tile(dlogits[:, tile], wide), first, gain)


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


def put(out: Tensor, value: Tensor, first: bool, gain: Tensor | None = None) -> None:
    """``out (+)= gain * value``, stored rather than added to zeros the first time."""
    if gain is None:
        out.copy_(value) if first else out.add_(value)
    elif first:
        torch.mul(value, gain, out=out)
    else:
        out.addcmul_(value, gain)
