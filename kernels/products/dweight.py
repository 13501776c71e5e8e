"""The product [vocab, hidden] of logits' gradients, or of exponentials that stand for them, with hidden states.

    dweight (+)= grad [rows, vocab] .T @ hidden [rows, hidden]

A persistent GEMM, as ``dhidden.py`` has one: rows behind those that count cost nothing.
"""

import triton
import triton.language as tl

from ..common.blocks import column_halves, counted_rows, dot, load_tile, store_tile, tile_place
from ..common.kernel import kernel


@triton.jit
def add_or_store(matrix, row, column, value, ADD: tl.constexpr, BY_MEMORY: tl.constexpr):
    """Adds or stores a tile. Each element is added to once per launch, so that atomic addition leaves the same bits."""
    if ADD and BY_MEMORY:
        matrix[0].atomic_add([row, column], value)
    else:
        if ADD:
            value += load_tile(matrix, row, column, value.shape[0], value.shape[1], False).to(tl.float32)
        store_tile(matrix, row, column, value)


@kernel
def dweight_kernel(
    # outputs
    dweight_desc,  # [vocab, hidden], block [BLOCK_M, BLOCK_N / 2]; added to, or stored; None where it is not described
    dweight_ptr,
    # inputs
    grad_desc,  # [rows, vocab] 16 bit, block [BLOCK_K, BLOCK_M]
    grad_ptr,
    hidden_desc,  # [rows, hidden], block [BLOCK_K, BLOCK_N], 0 behind the rows that count
    hidden_ptr,
    count_ptr,  # [] int64: how many rows of the call count, or None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    vocab,
    hidden,
    grad_stride,  # from row to row
    ADD: tl.constexpr,
    BY_MEMORY: tl.constexpr,  # where it is described
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """``dweight (+)= grad.T @ hidden``"""
    counted = counted_rows(count_ptr, first_row, rows)
    tiles_m = tl.cdiv(vocab, BLOCK_M)
    tiles_n = tl.cdiv(hidden, BLOCK_N)
    tiles = tiles_m * tiles_n
    if ADD:
        tiles = tl.where(counted > 0, tiles, 0)  # nothing to add
    dw_matrix = dweight_desc, dweight_ptr, hidden, vocab, hidden
    g_matrix = grad_desc, grad_ptr, grad_stride, rows, vocab
    h_matrix = hidden_desc, hidden_ptr, hidden, rows, hidden
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=grad_desc is not None):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row_start, column_start = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, counted, BLOCK_K):
            g = load_tile(g_matrix, k, row_start, BLOCK_K, BLOCK_M, False)
            h = load_tile(h_matrix, k, column_start, BLOCK_K, BLOCK_N, False)
            acc = dot(g.T, h, acc)
        left, right = column_halves(acc, BLOCK_M, BLOCK_N)
        add_or_store(dw_matrix, row_start, column_start, left, ADD, BY_MEMORY)
        add_or_store(dw_matrix, row_start, column_start + BLOCK_N // 2, right, ADD, BY_MEMORY)
