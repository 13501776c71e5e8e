"""The logits matmul whose epilogue leaves the gradient of the raw logits, where their statistics are known beforehand.

The same persistent GEMM as ``exp_logits.py``, and in its epilogue the identity of ``identity.py`` without a teacher, 0
for rows that do not count. No logit is ever stored.

What only some tiles need (the target's column, the end of the second softmax's vocabulary) stands in a branch of its
own: asked of every element it would cost 3 to 10 % of the matmul. The stores stand inside both sides of the branch,
since a compiler that saw only values there would compute both and select.
"""

import triton
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
    to_type_of,
)
from ..common.launcher import kernel
from ..common.transform import load_column, transform_logits
from .identity import logits_gradient


@triton.jit
def store_gradient(
    dlogits,
    acc,  # [BLOCK_M, BLOCK_N] fp32
    bias_ptr,
    class_weights_ptr,
    target,  # [BLOCK_M] of these columns, negative where the row does not count or its target lies before them
    counts,  # [BLOCK_M]
    terms,  # pointers to numbers per row
    # sizes
    row_start,
    column_start,
    columns2,
    # scalars
    logit_scale,
    softcap,
    ratio2,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPECIAL: tl.constexpr,  # some column is a target, or past the second softmax's last
):
    """Stores a tile's gradient but for its right half, which is returned."""
    target_logit_ptr, beta_ptr, kappa_ptr, start_ptr, rest_ptr, alpha_ptr, eta_ptr = terms[:7]
    start2_ptr, rest2_ptr, alpha2_ptr, eta2_ptr, row_scale_ptr = terms[7:]
    _, _, _, rows, columns = dlogits
    HALF: tl.constexpr = BLOCK_N // 2
    offs_row = row_start + tl.arange(0, BLOCK_M)
    in_rows = offs_row < rows
    row_scale = load_column(row_scale_ptr, offs_row, in_rows)
    start = load_column(start_ptr, offs_row, in_rows)
    rest = load_column(rest_ptr, offs_row, in_rows)
    # the target's two numbers are read where a tile holds targets
    target_logit = load_column(target_logit_ptr if SPECIAL else None, offs_row, in_rows)
    beta = load_column(beta_ptr if SPECIAL else None, offs_row, in_rows)
    kappa = load_column(kappa_ptr, offs_row, in_rows)
    alpha = load_column(alpha_ptr, offs_row, in_rows)
    eta = load_column(eta_ptr, offs_row, in_rows)
    start2 = load_column(start2_ptr, offs_row, in_rows)
    rest2 = load_column(rest2_ptr, offs_row, in_rows)
    alpha2 = load_column(alpha2_ptr, offs_row, in_rows)
    eta2 = load_column(eta2_ptr, offs_row, in_rows)
    halves = column_halves(acc, BLOCK_M, BLOCK_N)
    for half in tl.static_range(2):
        offs = column_start + half * HALF + tl.arange(0, HALF)
        x = halves[half]
        if bias_ptr is not None:
            x += tl.load(bias_ptr + offs, mask=offs < columns, other=0.0).to(tl.float32)[None, :]
        x = transform_logits(x, logit_scale, softcap, row_scale)
        is_target = None
        if SPECIAL:
            is_target = offs[None, :] == target[:, None]
        omega = None
        if kappa_ptr is not None and class_weights_ptr is not None:
            omega = tl.load(class_weights_ptr + offs, mask=offs < columns, other=0.0).to(tl.float32)[None, :]
        grad = logits_gradient(
            x, is_target, offs[None, :], omega, None, None, target_logit, beta, kappa, start, rest, alpha, eta,
            start2, rest2, alpha2, eta2, None, None, None, None, None, logit_scale, softcap, row_scale, ratio2,
            columns2 if SPECIAL else None, None, None, False, True,
        )  # fmt: skip
        # selection, whatever stands in a row that does not count
        grad = to_type_of(dlogits, tl.where(counts[:, None], grad, 0.0))
        if half == 0:
            store_tile(dlogits, row_start, column_start, grad)
    return grad


@kernel
def grad_logits_kernel(
    # outputs
    dlogits_desc,  # [rows, columns] 16 bit, store block [BLOCK_M, BLOCK_N / 2]; None where it is not described
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
    blocks_ptr,  # [made / EXACT_BLOCK] int32: which blocks of the vocabulary's ids, or None for all these columns
    target_ptr,  # [rows] int64, -1 where the row does not count
    target_logit_ptr,  # [rows] fp32, like all that follow
    beta_ptr,  # or None
    kappa_ptr,  # or None
    start_ptr,  # log p = (x - start) + rest
    rest_ptr,
    alpha_ptr,  # or None, with eta
    eta_ptr,  # or None
    start2_ptr,  # at the second temperature, or None with all that follow
    rest2_ptr,
    alpha2_ptr,
    eta2_ptr,  # or None
    count_ptr,  # [] int64: how many rows of the call count, or None for all
    # sizes
    first_row,  # of these within the call
    rows,
    columns,
    made,  # of them
    hidden,
    first_column,  # of these columns in the vocabulary
    columns2,  # of these that the second softmax is over
    dlogits_stride,  # from row to row
    # scalars
    logit_scale,  # float or None for 1
    softcap,  # float or None
    row_scale_ptr,  # [rows] fp32, or None for 1
    ratio2,  # of the second temperature, inverse, to the first; float or None for 1
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
    terms = (
        target_logit_ptr, beta_ptr, kappa_ptr, start_ptr, rest_ptr, alpha_ptr, eta_ptr, start2_ptr, rest2_ptr,
        alpha2_ptr, eta2_ptr, row_scale_ptr,
    )  # fmt: skip
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
        acc = scaled(acc, hidden_scale_ptr, weight_scale_ptr, offs_row, rows)
        target = tl.load(target_ptr + offs_row, mask=offs_row < rows, other=-1)
        counts = target >= 0
        target = (target - first_column).to(tl.int32)
        here = (target >= column_start) & (target < column_start + BLOCK_N)
        special = tl.max(here.to(tl.int32), 0) > 0
        if alpha2_ptr is not None:
            special = special | (column_start + BLOCK_N > columns2)
        if special:
            right = store_gradient(
                dlogits, acc, bias_ptr, class_weights_ptr, target, counts, terms, row_start, column_start,
                columns2, logit_scale, softcap, ratio2, BLOCK_M, BLOCK_N, True,
            )  # fmt: skip
        else:
            right = store_gradient(
                dlogits, acc, bias_ptr, class_weights_ptr, target, counts, terms, row_start, column_start,
                columns2, logit_scale, softcap, ratio2, BLOCK_M, BLOCK_N, False,
            )  # fmt: skip
        store_tile(dlogits, row_start, column_start + BLOCK_N // 2, right)
