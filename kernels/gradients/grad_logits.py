"""The logits matmul whose epilogue leaves the gradient of the raw logits, where their statistics are known beforehand.

The persistent GEMM of ``exp_logits.py`` with the identity of ``identity.py`` (without a teacher) in its epilogue, 0 for
rows that do not count. No logit is stored. Targets' columns get the general term here, since a test of every element
would cost 3 to 10 % of the matmul: ``row_grad_kernel`` overwrites them, from the exact logits.
"""

import triton.language as tl

from ..common.blocks import (
    column_halves,
    counted_rows,
    dot,
    load_rows,
    scaled,
    store_tile,
    tile_of_block,
    tile_place,
)
from ..common.launcher import kernel
from ..common.transform import load_column, transform_logits
from .identity import logits_gradient


@kernel
def grad_logits_kernel(
    # outputs
    dlogits_desc,  # [rows, columns] 16 bit, block [BLOCK_M, BLOCK_N / 2]; None where not described
    dlogits_ptr,
    # inputs
    hidden_desc,  # [rows, hidden] 16 bit or e4m3, as the weight, block [BLOCK_M, BLOCK_K]
    hidden_ptr,
    weight_desc,  # [columns, hidden], block [BLOCK_N, BLOCK_K]
    weight_ptr,
    bias_ptr,  # [columns] or None
    class_weights_ptr,  # [columns] or None for 1
    hidden_scale_ptr,  # [rows] fp32 of e4m3 operands, or None
    weight_scale_ptr,  # [] fp32, likewise
    blocks_ptr,  # [made / EXACT_BLOCK] int32: blocks of ids, or None for all columns
    target_ptr,  # [rows] int64, -1 where a row does not count
    kappa_ptr,  # [rows] fp32, like all that follow, or None
    start_ptr,  # log p = (x - start) + rest
    rest_ptr,
    alpha_ptr,  # or None, with eta
    eta_ptr,  # or None
    start2_ptr,  # at the second temperature, or None with all that follow
    rest2_ptr,
    alpha2_ptr,
    eta2_ptr,  # or None
    count_ptr,  # [] int64: rows of the call that count; None for all
    # sizes
    first_row,  # of these within the call
    rows,
    columns,
    made,  # of them
    hidden,
    first_column,  # of these columns in the vocabulary
    columns2,  # of these in the second softmax; None for all
    dlogits_stride,  # from row to row
    # scalars
    logit_scale,  # float or None for 1
    softcap,  # float or None
    row_scale_ptr,  # [rows] fp32, or None for 1
    ratio2,  # second inverse temperature over the first; float or None for 1
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_HIDDEN: tl.constexpr,
):
    """``dlogits = g(hidden @ weight.T)``, g the gradient of ``identity.py``."""
    tiles_m = tl.cdiv(counted_rows(count_ptr, first_row, rows), BLOCK_M)
    tiles_n = tl.cdiv(made, BLOCK_N)
    dlogits = dlogits_desc, dlogits_ptr, dlogits_stride, rows, columns
    h_matrix = hidden_desc, hidden_ptr, hidden, rows, hidden
    w_matrix = weight_desc, weight_ptr, hidden, columns, hidden
    FLATTEN: tl.constexpr = hidden_desc is not None and blocks_ptr is None
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row_start, column_start, width = tile_m * BLOCK_M, tile_n * BLOCK_N, hidden
        if blocks_ptr is not None:
            column_start = tile_of_block(blocks_ptr, tile_n, BLOCK_N) * BLOCK_N - first_column
            # others than these columns are not made, and stored behind the end: nowhere
            outside = (column_start < 0) | (column_start >= columns)
            column_start, width = tl.where(outside, 1 << 30, column_start), tl.where(outside, 0, hidden)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, width, BLOCK_K):
            h = load_rows(h_matrix, row_start, k, BLOCK_M, BLOCK_K, EVEN_HIDDEN)
            w = load_rows(w_matrix, column_start, k, BLOCK_N, BLOCK_K, EVEN_HIDDEN)
            acc = dot(h, w.T, acc)

        offs_row = row_start + tl.arange(0, BLOCK_M)
        in_rows = offs_row < rows
        acc = scaled(acc, hidden_scale_ptr, weight_scale_ptr, offs_row, rows)
        counts = tl.load(target_ptr + offs_row, mask=in_rows, other=-1) >= 0
        row_scale = load_column(row_scale_ptr, offs_row, in_rows)
        kappa = load_column(kappa_ptr, offs_row, in_rows)
        start = load_column(start_ptr, offs_row, in_rows)
        rest = load_column(rest_ptr, offs_row, in_rows)
        alpha = load_column(alpha_ptr, offs_row, in_rows)
        eta = load_column(eta_ptr, offs_row, in_rows)
        start2 = load_column(start2_ptr, offs_row, in_rows)
        rest2 = load_column(rest2_ptr, offs_row, in_rows)
        alpha2 = load_column(alpha2_ptr, offs_row, in_rows)
        eta2 = load_column(eta2_ptr, offs_row, in_rows)
        halves = column_halves(acc, BLOCK_M, BLOCK_N)
        for half in tl.static_range(2):
            first = column_start + half * (BLOCK_N // 2)
            offs = first + tl.arange(0, BLOCK_N // 2)
            x = halves[half]
            if bias_ptr is not None:
                x += tl.load(bias_ptr + offs, mask=offs < columns, other=0.0).to(tl.float32)[None, :]
            x = transform_logits(x, logit_scale, softcap, row_scale)
            omega = None
            if kappa_ptr is not None and class_weights_ptr is not None:
                omega = tl.load(class_weights_ptr + offs, mask=offs < columns, other=0.0).to(tl.float32)[None, :]
            grad = logits_gradient(
                x, None, offs[None, :], omega, None, None, None, None, None, kappa, start, rest, alpha, eta,
                start2, rest2, alpha2, eta2, None, logit_scale, softcap, row_scale, ratio2, columns2, None, None,
                None, True,
            )  # fmt: skip
            # selection, whatever stands in a row that does not count
            store_tile(dlogits, row_start, first, tl.where(counts[:, None], grad, 0.0))
