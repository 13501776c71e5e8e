"""The three matrix products of a head by BLAS, into existing buffers. They sum products of 16-bit operands in fp32.
cuBLAS can do so (``out_dtype``); on other devices operands are cast to fp32, a tile of the vocabulary at a time."""

import torch
from torch import Tensor

from ..core.memory import RECORDERS, recorder
from ..core.private import private
from ..plan.sizes import cast_rows, slices

# on a CPU: least rows per thread, and least columns per thread, with which BLAS sums in the same order as for more;
# number of elements that a smaller product computes at a time
LEAST_ROWS, LEAST_COLUMNS, ELEMENTS_AT_ONCE = 8, 16, 1 << 18
# on a GPU: least rows with which BLAS sums in the same order as for more; number of columns that a smaller product
# computes at a time
LEAST_GPU_ROWS, GPU_COLUMNS = 64, 1 << 14


def project(
    hidden: Tensor,  # [rows, hidden]
    weight: Tensor,  # [columns, hidden]
    out: Tensor,  # [rows, columns], of the operands' dtype or fp32
    bias: Tensor | None = None,  # [columns]
    rows: int | None = None,  # number of rows that a GPU multiplies at a time; None: all
) -> Tensor | None:
    """Writes ``hidden @ weight.T + bias`` to ``out`` and returns None, if one cuBLAS call can add the bias. Else it
    writes ``hidden @ weight.T`` and returns ``bias``, which the caller has to add.

    BLAS sums few rows in another order, so a row's logits would depend on the number of rows. Few rows are therefore
    padded with rows of zeros. cuBLAS has algorithms for products with a bias that are up to twice as exact. Without a
    bias, fp32 products of fp32 operands get a bias of zeros, so that cuBLAS uses these algorithms.
    """
    fused_bias = product_bias = None
    least_rows = LEAST_ROWS * torch.get_num_threads()
    if hidden.is_cuda:
        least_rows, has_one_dtype = LEAST_GPU_ROWS, hidden.dtype == weight.dtype == out.dtype
        if has_one_dtype and bias is not None and bias.dtype == out.dtype:
            fused_bias = product_bias = bias
        elif has_one_dtype and out.dtype == torch.float32:
            product_bias = out.new_zeros(len(weight))
    block_rows = rows if hidden.is_cuda and rows else max(1, len(hidden))
    for first_row in range(0, len(hidden), block_rows):
        block, out_block = hidden[first_row : first_row + block_rows], out[first_row : first_row + block_rows]
        missing_rows = least_rows - len(block)
        if missing_rows <= 0:
            product_of(block, weight, product_bias, out_block)
            continue
        block = torch.nn.functional.pad(block, (0, 0, 0, missing_rows))
        tile_columns = max(
            min(cast_rows(weight.shape[1]), ELEMENTS_AT_ONCE // least_rows), LEAST_COLUMNS * torch.get_num_threads()
        )
        for tile in equal_tiles(len(weight), GPU_COLUMNS if hidden.is_cuda else tile_columns):
            product = out.new_empty(least_rows, tile.stop - tile.start)
            product_of(block, weight[tile], None if product_bias is None else product_bias[tile], product)
            out_block[:, tile] = product[: len(out_block)]
    return bias if fused_bias is None else None


def product_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Writes ``hidden @ weight.T + bias`` to ``out``. ``bias``: of the dtype of ``out``, or None."""
    if bias is not None:
        torch.addmm(bias, hidden, weight.t(), out=out)
    elif len(weight) == 1 and not hidden.is_cuda:  # BLAS sums a product with one column in another order
        padded_out = out.new_empty(len(hidden), 2)
        product_of(hidden, torch.nn.functional.pad(weight, (0, 0, 0, 1)), None, padded_out)
        out.copy_(padded_out[:, :1])
    elif summed_by_blas(hidden, weight, out):
        multiply(hidden, weight.t(), out, is_first=True)
    else:
        wide_hidden = hidden.to(out.dtype)
        for tile in equal_tiles(len(weight), max(cast_rows(weight.shape[1]), LEAST_COLUMNS * torch.get_num_threads())):
            torch.mm(wide_hidden, weight[tile].to(out.dtype).t(), out=out[:, tile])


def equal_tiles(columns: int, width: int) -> list[slice]:
    """Returns slices of ``width`` columns that cover ``columns`` columns. The last slice overlaps the slice before it
    if ``columns`` is no multiple of ``width``."""
    return [slice(max(0, tile.stop - width), tile.stop) for tile in slices(columns, width)]


def add_dhidden(
    dlogits: Tensor,  # [rows, columns]
    weight: Tensor,  # [columns, hidden]
    out: Tensor,  # [rows, hidden]
    is_first: bool,
) -> None:
    """Adds ``dlogits @ weight`` to ``out``, or overwrites ``out`` if ``is_first``."""
    if summed_by_blas(dlogits, weight, out):
        multiply(dlogits, weight, out, is_first)
        return
    wide_out = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    is_stored = is_first or wide_out is not out
    for tile in slices(len(weight), cast_rows(weight.shape[1])):
        multiply(dlogits[:, tile].float(), weight[tile].float(), wide_out, is_first=is_stored)
        is_stored = False
    if wide_out is not out:
        accumulate(out, wide_out, is_first)


def add_dweight(
    dlogits: Tensor,  # [rows, columns]
    hidden: Tensor,  # [rows, hidden]
    out: Tensor,  # [columns, hidden]
    is_first: bool,
    dlogits_divisor: Tensor | None = None,  # [] the number by which ``dlogits`` were divided; None for 1
) -> None:
    """Adds ``dlogits_divisor * dlogits.T @ hidden`` to ``out``, or overwrites ``out`` if ``is_first``."""
    if dlogits_divisor is None and summed_by_blas(dlogits, hidden, out):
        multiply(dlogits.t(), hidden, out, is_first)
        return
    product_hidden = hidden if sums_halves(hidden.device) and hidden.dtype == dlogits.dtype else hidden.float()
    for tile in slices(len(out), cast_rows(out.shape[1])):
        # a name for the tile's product would keep its memory while the next product is made
        accumulate(out[tile], dweight_tile(dlogits[:, tile], product_hidden), is_first, dlogits_divisor)


def dweight_tile(dlogits: Tensor, hidden: Tensor) -> Tensor:
    """Returns ``dlogits.T @ hidden`` in fp32."""
    if hidden.dtype != dlogits.dtype or hidden.dtype == torch.float32:
        return dlogits.float().t() @ hidden
    product = torch.empty(dlogits.shape[1], hidden.shape[1], dtype=torch.float32, device=hidden.device)
    multiply(dlogits.t(), hidden, product, is_first=True)
    return product


def summed_by_blas(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """True where one BLAS call can sum ``a @ b`` in fp32 or wider without a cast.

    On the CPU 16-bit operands are always cast. With an odd inner size and padded rows, torch 2.13's bf16 product reads
    the padding, and a nan in the padding makes the result nan.
    """
    if a.dtype != b.dtype:
        return False
    if a.dtype.itemsize < 4:
        return sums_halves(a.device) and out.dtype in (a.dtype, torch.float32)
    return out.dtype == a.dtype


def sums_halves(device: torch.device) -> bool:
    """True on devices where a product of 16-bit operands can be summed in fp32 without a cast."""
    return device.type == "cuda" and torch.version.hip is None


def blas_multiply(a: Tensor, b: Tensor, out: Tensor, is_first: bool) -> None:
    """Adds ``a @ b`` to ``out``, or overwrites ``out`` if ``is_first``."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if is_first else torch.addmm(out, a, b, out=out)
    elif is_first:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def multiply(a: Tensor, b: Tensor, out: Tensor, is_first: bool) -> None:
    """Adds ``a @ b`` to ``out``, or overwrites ``out`` if ``is_first``; a sweep's recorder notes the call."""
    blas_multiply(a, b, out, is_first)
    if RECORDERS and (active_recorder := recorder()) is not None:
        active_recorder.record_call(multiply, a, b, out, is_first, written_tensors=(out,))


def multiply_e4m3(a: Tensor, b: Tensor, out: Tensor, unit: Tensor) -> None:
    """Writes ``a @ b.T`` to ``out`` [m, n] fp32. ``a`` [m, k], ``b`` [n, k]: e4m3, n and k multiples of 16. ``unit`` []
    fp32: the number 1."""
    scaled_mm = private("_scaled_mm") if a.is_cuda else None
    if scaled_mm is not None:
        scaled_mm[0](a, b.t(), unit, unit, out_dtype=out.dtype, use_fast_accum=False, out=out)
        write_count = 1
    else:
        cast_dtype = torch.bfloat16 if sums_halves(a.device) else torch.float32
        tiles = slices(a.shape[1], cast_rows(len(a) + len(b)))
        for k_tile in tiles:
            blas_multiply(a[:, k_tile].to(cast_dtype), b[:, k_tile].to(cast_dtype).t(), out, k_tile.start == 0)
        write_count = len(tiles)
    if RECORDERS and (active_recorder := recorder()) is not None:
        active_recorder.record_call(multiply_e4m3, a, b, out, unit, written_tensors=(out,) * write_count)


def sum_rows(rows: Tensor, out: Tensor) -> None:
    """Writes ``rows.sum(0)`` to ``out``; a sweep's recorder notes the call."""
    torch.sum(rows, 0, out=out)
    if RECORDERS and (active_recorder := recorder()) is not None:
        active_recorder.record_call(sum_rows, rows, out, written_tensors=(out,))


def accumulate(out: Tensor, value: Tensor, is_first: bool, factor: Tensor | None = None) -> None:
    """Adds ``factor * value`` to ``out``, or overwrites ``out`` if ``is_first``. ``factor`` []: None for 1."""
    if factor is None:
        out.copy_(value) if is_first else out.add_(value)
    elif is_first:
        torch.mul(value, factor, out=out)
    else:
        out.addcmul_(value, factor)
