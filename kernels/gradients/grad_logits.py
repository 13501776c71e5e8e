"""The logits matmul whose epilogue writes the gradient of the raw logits, from statistics of an earlier sweep.

``grad_logits`` is the body of generated kernels: the persistent GEMM of ``exp_logits.py`` with the terms of
``identity.py`` in the epilogue, for losses without a teacher. No logit is stored. Rows that do not count get 0. The
epilogue leaves out beta's term: comparing each column with the target would cost 3 to 10 % of the matmul. ``row_grad``
overwrites the targets' columns, from exact logits.
"""

import triton
import triton.language as tl

from ..common.blocks import (
    column_halves,
    counted_rows,
    descaled,
    dot,
    load_rows,
    store_tile,
    tile_place,
)
from ..common.transform import load_column, load_columns, transform_derivative, transform_logits
from .identity import log_probabilities


@triton.jit
def grad_logits(
    # outputs
    dlogits_desc,  # [rows, columns] 16 bit, block [BLOCK_M, BLOCK_N / 2]; or None
    dlogits_ptr,  # [rows, columns] if there is no descriptor; else None
    # inputs
    hidden_desc,  # [rows, hidden] 16 bit or e4m3, as the weight, block [BLOCK_M, BLOCK_K]
    hidden_ptr,  # [rows, hidden] if there is no descriptor; else None
    weight_desc,  # [columns, hidden], block [BLOCK_N, BLOCK_K]
    weight_ptr,  # [columns, hidden] if there is no descriptor; else None
    bias_ptr,  # [columns] or None
    class_weights_ptr,  # [columns] or None for 1
    hidden_scale_ptr,  # [rows] fp32, of e4m3 operands (``descaled``), like the next three; else None
    weight_scale_ptr,  # [] fp32
    hidden_common_ptr,  # [rows] fp32
    weight_common_ptr,  # [columns] fp32
    target_ptr,  # [rows] int64, -1 where a row does not count
    lse_base_ptrs,  # a tuple, for each softmax [rows] fp32: log p = (ratio x - lse_base) + neg_log_sum
    neg_log_sum_ptrs,  # a tuple, for each softmax [rows] fp32
    coefficient_ptrs,  # a tuple of [rows] fp32: the coefficients that ADD_TERMS reads
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,  # number of the chunk's rows
    columns,  # number of columns
    hidden,  # hidden size
    widths,  # a tuple, for each softmax the number of columns that it is over; None for all
    dlogits_stride,  # from row to row
    # scalars
    logit_scale,  # float or None for 1
    softcap,  # float or None
    row_scale_ptr,  # [rows] fp32, or None for 1
    ratios,  # a tuple, for each softmax its inverse temperature relative to the first's; float or None for 1
    ADD_TERMS: tl.constexpr,  # generated function
    NUM_COEFFICIENTS: tl.constexpr,
    NUM_SOFTMAXES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_HIDDEN: tl.constexpr,  # no tile extends past the hidden size
):
    """Writes ``dlogits = g(hidden @ weight.T)``, g the gradient of ``identity.py`` without the target's term."""
    tiles_m = tl.cdiv(counted_rows(count_ptr, first_row, rows), BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    dlogits_matrix = dlogits_desc, dlogits_ptr, dlogits_stride, rows, columns
    hidden_matrix = hidden_desc, hidden_ptr, hidden, rows, hidden
    weight_matrix = weight_desc, weight_ptr, hidden, columns, hidden
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=hidden_desc is not None):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row_start, column_start = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, hidden, BLOCK_K):
            hidden_tile = load_rows(hidden_matrix, row_start, k, BLOCK_M, BLOCK_K, EVEN_HIDDEN)
            weight_tile = load_rows(weight_matrix, column_start, k, BLOCK_N, BLOCK_K, EVEN_HIDDEN)
            acc = dot(hidden_tile, weight_tile.T, acc)

        offs_row = row_start + tl.arange(0, BLOCK_M)
        in_rows = offs_row < rows
        offs_col = column_start + tl.arange(0, BLOCK_N)
        acc = descaled(
            acc, hidden_scale_ptr, weight_scale_ptr, hidden_common_ptr, weight_common_ptr, offs_row, rows, offs_col,
            columns,
        )  # fmt: skip
        is_counted = tl.load(target_ptr + offs_row, mask=in_rows, other=-1) >= 0
        row_scale = load_column(row_scale_ptr, offs_row, in_rows)
        lse_bases = load_columns(lse_base_ptrs, offs_row, in_rows, NUM_SOFTMAXES)
        softmaxes = lse_bases, load_columns(neg_log_sum_ptrs, offs_row, in_rows, NUM_SOFTMAXES), ratios, widths
        coefficients = load_columns(coefficient_ptrs, offs_row, in_rows, NUM_COEFFICIENTS)
        halves = column_halves(acc, BLOCK_M, BLOCK_N)
        for half in tl.static_range(2):
            half_start = column_start + half * (BLOCK_N // 2)
            offs = half_start + tl.arange(0, BLOCK_N // 2)
            x = halves[half]
            if bias_ptr is not None:
                x += tl.load(bias_ptr + offs, mask=offs < columns, other=0.0).to(tl.float32)[None, :]
            x = transform_logits(x, logit_scale, softcap, row_scale)
            omega = 1.0  # class weights
            if class_weights_ptr is not None:
                omega = tl.load(class_weights_ptr + offs, mask=offs < columns, other=0.0).to(tl.float32)[None, :]
            logs = log_probabilities(x, offs[None, :], softmaxes, NUM_SOFTMAXES)
            initial_grad = tl.zeros(x.shape, dtype=tl.float32)
            grad = ADD_TERMS(
                initial_grad, x, logs, None, offs[None, :], None, omega, None, softmaxes, coefficients, None, None
            )  # fmt: skip
            grad *= transform_derivative(x, logit_scale, softcap, row_scale)
            # by selection, since the gradient of a row that does not count may be nan
            store_tile(dlogits_matrix, row_start, half_start, tl.where(is_counted[:, None], grad, 0.0))
