"""The gradients' products over the tiles that were kept, by lists that only the device knows.

Persistent GEMMs like those of ``products``. A tile's work is as long as its list, and lists differ by ten times: tiles
are taken longest first, the next by whoever is done. Each is stored by itself, so that it does not matter by whom.
"""

import triton
import triton.language as tl

from .blocks import column_halves
from .products import add_or_store, store_dhidden


@triton.jit
def skip_dhidden_kernel(
    # outputs
    partial_ptr,  # [parts, rows, hidden] fp32
    # inputs
    exp_desc,  # [rows, vocab] 16 bit, block [BLOCK_M, BLOCK_K]
    weight_desc,  # [vocab, hidden], block [BLOCK_K, BLOCK_N]
    list_ptr,  # [row blocks, strips] int32: kept strips of a row block
    length_ptr,  # [row blocks] int32
    order_ptr,  # [row blocks] int32: longest first
    # in and out
    next_ptr,  # [] int32: tiles that have been taken, 0 at first
    # sizes
    rows,
    hidden,
    strips,
    PARTS: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``sum(partial) = exp @ weight`` over kept tiles; a part takes its share of each row block's list."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(hidden, BLOCK_N)
    STEPS: tl.constexpr = STRIP // BLOCK_K
    tile = tl.atomic_add(next_ptr, 1, sem="relaxed")
    while tile < tiles_m * tiles_n * PARTS:
        part = tile // tiles_n % PARTS
        row_block = tl.load(order_ptr + tile // (tiles_n * PARTS))
        length = tl.load(length_ptr + row_block)
        row_start = row_block * BLOCK_M
        column_start = (tile % tiles_n) * BLOCK_N
        first, last = length * part // PARTS, length * (part + 1) // PARTS
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        kept = list_ptr + row_block * strips
        strip = tl.load(kept + first, mask=first < last, other=0)
        for step in range(first * STEPS, last * STEPS):
            k = strip * STRIP + step % STEPS * BLOCK_K
            # known a step before it is needed: a load whose result were waited for would cost a stage of the pipeline
            strip = tl.load(kept + min((step + 1) // STEPS, last - 1))
            e = exp_desc.load([row_start, k])
            w = weight_desc.load([k, column_start])
            if UPCAST:
                e, w = e.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(e, w, acc)
        left, right = column_halves(acc, BLOCK_M, BLOCK_N)
        store_dhidden(
            partial_ptr, None, left, None, None, None, None, None,
            part, row_start, column_start, rows, rows, hidden, False, BLOCK_M, BLOCK_N // 2,
        )  # fmt: skip
        store_dhidden(
            partial_ptr, None, right, None, None, None, None, None,
            part, row_start, column_start + BLOCK_N // 2, rows, rows, hidden, False, BLOCK_M, BLOCK_N // 2,
        )  # fmt: skip
        tile = tl.atomic_add(next_ptr, 1, sem="relaxed")


@triton.jit
def skip_dweight_kernel(
    # outputs
    dweight_desc,  # [vocab, hidden], block [BLOCK_M, BLOCK_N / 2]; added to, or stored
    # inputs
    exp_desc,  # [rows, vocab] 16 bit, block [BLOCK_K, BLOCK_M]
    hidden_desc,  # [rows, hidden], block [BLOCK_K, BLOCK_N], 0 behind the rows that count
    share_ptr,  # [vocab] fp32
    moved_ptr,  # [strips, hidden] fp32: moved mass times hidden states
    list_ptr,  # [strips, row blocks] int32: kept row blocks of a strip
    length_ptr,  # [strips] int32
    order_ptr,  # [strips] int32: longest first
    # in and out
    next_ptr,  # [] int32: tiles that have been taken, 0 at first
    # sizes
    row_blocks,
    vocab,
    hidden,
    strips,
    TILE_ROWS: tl.constexpr,
    ADD: tl.constexpr,
    BY_MEMORY: tl.constexpr,
    BLOCK_M: tl.constexpr,  # a strip
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``dweight (+)= exp.T @ hidden`` over kept tiles, ``+ share * moved`` for the others."""
    tiles_n = tl.cdiv(hidden, BLOCK_N)
    STEPS: tl.constexpr = TILE_ROWS // BLOCK_K
    tile = tl.atomic_add(next_ptr, 1, sem="relaxed")
    while tile < strips * tiles_n:
        strip = tl.load(order_ptr + tile // tiles_n)
        length = tl.load(length_ptr + strip)
        row_start = strip * BLOCK_M
        column_start = (tile % tiles_n) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        kept = list_ptr + strip * row_blocks
        row_block = tl.load(kept, mask=length > 0, other=0)
        for step in range(0, length * STEPS):
            k = row_block * TILE_ROWS + step % STEPS * BLOCK_K
            row_block = tl.load(kept + min((step + 1) // STEPS, length - 1))
            e = exp_desc.load([k, row_start])
            h = hidden_desc.load([k, column_start])
            if UPCAST:
                e, h = e.to(tl.float32), h.to(tl.float32)
            acc = tl.dot(e.T, h, acc)
        offs_vocab = row_start + tl.arange(0, BLOCK_M)
        share = tl.load(share_ptr + offs_vocab, mask=offs_vocab < vocab, other=0.0)
        left, right = column_halves(acc, BLOCK_M, BLOCK_N)
        offs_left = column_start + tl.arange(0, BLOCK_N // 2)
        offs_right = offs_left + BLOCK_N // 2
        moved = moved_ptr + strip.to(tl.int64) * hidden
        left += share[:, None] * tl.load(moved + offs_left, mask=offs_left < hidden, other=0.0)[None, :]
        add_or_store(dweight_desc, row_start, column_start, left, ADD, BY_MEMORY)
        right += share[:, None] * tl.load(moved + offs_right, mask=offs_right < hidden, other=0.0)[None, :]
        add_or_store(dweight_desc, row_start, column_start + BLOCK_N // 2, right, ADD, BY_MEMORY)
        tile = tl.atomic_add(next_ptr, 1, sem="relaxed")
