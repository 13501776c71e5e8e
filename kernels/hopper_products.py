"""dweight's product on Hopper GPUs, in Gluon: warps with roles of their own, so that nothing waits for an epilogue.

One warp loads operands into a ring in shared memory, two warpgroups multiply half of a tile's rows each, and one warp
stores what they have made. The second warpgroup runs some steps behind the first: while one of them adds the old tile
and rounds, the other has the tensor cores. The old tile comes in pieces between the operands, not all at once: all
multiprocessors begin their tiles at nearly the same time, and operands would stand behind the old tiles of all of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

GROUPS = gl.constexpr(2)  # warpgroups that multiply
GROUP_ROWS = gl.constexpr(64)  # of a tile, for each of them: what one instruction multiplies


@gluon.jit
def tile_place(tile, tiles_m, tiles_n, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """The first row and column of a tile; tiles of GROUP_M rows of tiles follow each other and share operands."""
    group = tile // (GROUP_M * tiles_n)
    group_rows = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    row = (group * GROUP_M + within % group_rows) * (GROUPS * GROUP_ROWS)
    return row, within // group_rows * BLOCK_N


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def load_piece(piece_desc, pieces, tile_loaded, tile_stored, phase, row, column, piece, on, BLOCK_N: gl.constexpr):
    """One piece of the old tile, once the place that it goes to has been stored from."""
    WIDTH: gl.constexpr = piece_desc.block_shape[1]
    PIECES: gl.constexpr = BLOCK_N // WIDTH
    piece = gl.minimum(piece, GROUPS * PIECES - 1)
    group = piece // PIECES
    first = on & (piece % PIECES == 0)
    mbarrier.wait(tile_stored.index(group), phase, pred=first)
    loaded = tile_loaded.index(group)
    mbarrier.expect(loaded, GROUP_ROWS * BLOCK_N * piece_desc.dtype.primitive_bitwidth // 8, pred=first)
    at = [row + group * GROUP_ROWS, column + piece % PIECES * WIDTH]
    tma.async_copy_global_to_shared(piece_desc, at, loaded, pieces.index(piece), pred=on)


@gluon.jit
def load_role(
    descs,
    buffers,
    bars,
    sizes,
    ADD: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    piece_desc, grad_desc, hidden_desc = descs
    grads, hiddens, pieces = buffers
    loaded, consumed, tile_loaded, tile_stored = bars
    tiles, tiles_m, tiles_n, steps, first_k = sizes
    STAGES: gl.constexpr = hiddens.shape[0]
    PIECES: gl.constexpr = GROUPS * (BLOCK_N // piece_desc.block_shape[1])
    BYTES: gl.constexpr = BLOCK_K * (GROUPS * GROUP_ROWS + BLOCK_N) * grad_desc.dtype.primitive_bitwidth // 8
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile_phase = gl.to_tensor(1)
    # a whole ring of steps into a tile both warpgroups have left the tile before, and its place will soon be stored
    every = gl.maximum((steps - STAGES - 8) // PIECES, 1)
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        row, column = tile_place(tile, tiles_m, tiles_n, BLOCK_N, GROUP_M)
        piece = gl.to_tensor(0)
        due = gl.to_tensor(STAGES)
        for k in range(steps):
            mbarrier.wait(consumed.index(stage), phase ^ 1)
            bar = loaded.index(stage)
            mbarrier.expect(bar, BYTES)
            at = first_k + k * BLOCK_K
            for group in gl.static_range(GROUPS):
                grad = grads.index(stage * GROUPS + group)
                tma.async_copy_global_to_shared(grad_desc, [at, row + group * GROUP_ROWS], bar, grad)
            tma.async_copy_global_to_shared(hidden_desc, [at, column], bar, hiddens.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
            if ADD:
                on = (k >= due) & (piece < PIECES)
                load_piece(piece_desc, pieces, tile_loaded, tile_stored, tile_phase, row, column, piece, on, BLOCK_N)
                piece = gl.where(on, piece + 1, piece)
                due = gl.where(on, due + every, due)
        if ADD:
            for rest in range(piece, PIECES):
                load_piece(piece_desc, pieces, tile_loaded, tile_stored, tile_phase, row, column, rest, True, BLOCK_N)
        tile_phase ^= 1


@gluon.jit
def multiply_role(
    buffers,
    bars,
    tiles,
    steps,
    ADD: gl.constexpr,
    GROUP: gl.constexpr,
    LAG: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    grads, hiddens, outs = buffers
    loaded, consumed, tile_free, tile_made, turn = bars
    STAGES: gl.constexpr = hiddens.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    out = outs.index(GROUP)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile_phase = gl.to_tensor(0)
    before = stage
    # in tiles of few steps the ring lets the first warpgroup run tiles ahead, and a barrier tells two phases apart only
    takes_turns = steps > STAGES
    for _ in range(gl.program_id(0), tiles, PROGRAMS):
        if GROUP == 1:
            mbarrier.wait(turn, tile_phase, pred=takes_turns)
        acc = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, layout)
        for k in range(steps):
            mbarrier.wait(loaded.index(stage), phase)
            grad = grads.index(stage * GROUPS + GROUP).permute((1, 0))
            acc = warpgroup_mma(grad, hiddens.index(stage), acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # the step before is done, this one may be on its way
            mbarrier.arrive(consumed.index(before), count=1, pred=k > 0)
            if GROUP == 0:
                mbarrier.arrive(turn, count=1, pred=takes_turns & (k == LAG))
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        value = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(consumed.index(before), count=1)
        if ADD:
            mbarrier.wait(tile_free.index(GROUP), tile_phase)
            value += out.load(layout).to(gl.float32)
        else:
            mbarrier.wait(tile_free.index(GROUP), tile_phase ^ 1)
        out.store(value.to(out.dtype))
        fence_async_shared()
        mbarrier.arrive(tile_made.index(GROUP), count=1)
        tile_phase ^= 1


@gluon.jit
def store_role(
    out_desc, outs, tile_made, tile_stored, sizes, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr
):
    tiles, tiles_m, tiles_n = sizes
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        row, column = tile_place(tile, tiles_m, tiles_n, BLOCK_N, GROUP_M)
        for group in gl.static_range(GROUPS):
            mbarrier.wait(tile_made.index(group), phase)
            tma.async_copy_shared_to_global(out_desc, [row + group * GROUP_ROWS, column], outs.index(group))
            tma.store_wait(0)
            mbarrier.arrive(tile_stored.index(group), count=1)
        phase ^= 1


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def hopper_dweight_kernel(
    # outputs
    out_desc,  # [vocab, hidden], block [GROUP_ROWS, BLOCK_N]; added to, or stored
    piece_desc,  # the same, block [GROUP_ROWS, columns of 128 bytes]
    # inputs
    grad_desc,  # [rows, vocab] 16 bit, block [BLOCK_K, GROUP_ROWS]
    hidden_desc,  # [rows, hidden] of grad's dtype, block [BLOCK_K, BLOCK_N], 0 behind the rows that count
    count_ptr,  # [] int64: how many rows of the call count, or None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    vocab,
    hidden,
    ADD: gl.constexpr,
    STAGES: gl.constexpr,
    LAG: gl.constexpr,  # steps that the second warpgroup is behind the first
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    PROGRAMS: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a thread that multiplies
):
    """``dweight (+)= grad.T @ hidden``"""
    counted = rows
    if count_ptr is not None:
        counted = gl.minimum(gl.maximum(gl.load(count_ptr) - first_row, 0), rows).to(gl.int32)
    tiles_m, tiles_n = gl.cdiv(vocab, GROUPS * GROUP_ROWS), gl.cdiv(hidden, BLOCK_N)
    tiles = tiles_m * tiles_n
    if ADD:
        tiles = gl.where(counted > 0, tiles, 0)  # nothing to add
    # without rows one step behind the last: what is loaded there is 0
    steps = gl.maximum(gl.cdiv(counted, BLOCK_K), 1)
    first_k = gl.where(counted > 0, 0, rows)

    PIECE: gl.constexpr = piece_desc.block_shape[1]
    grads = gl.allocate_shared_memory(grad_desc.dtype, [STAGES * GROUPS, BLOCK_K, GROUP_ROWS], grad_desc.layout)
    hiddens = gl.allocate_shared_memory(hidden_desc.dtype, [STAGES, BLOCK_K, BLOCK_N], hidden_desc.layout)
    outs = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, GROUP_ROWS, BLOCK_N], out_desc.layout)
    # columns of 128 bytes lie behind each other in shared memory
    pieces = outs._reinterpret(out_desc.dtype, [GROUPS * (BLOCK_N // PIECE), GROUP_ROWS, PIECE], piece_desc.layout)
    loaded, consumed = barriers(STAGES, 1), barriers(STAGES, GROUPS)
    tile_loaded, tile_made, tile_stored = barriers(GROUPS, 1), barriers(GROUPS, 1), barriers(GROUPS, 1)
    turn = barriers(1, 1).index(0)
    fence_async_shared()
    sizes = (tiles, tiles_m, tiles_n)
    tile_free = tile_loaded if ADD else tile_stored
    multiply_bars = (loaded, consumed, tile_free, tile_made, turn)
    load_bars = (loaded, consumed, tile_loaded, tile_stored)
    load_descs = (piece_desc, grad_desc, hidden_desc)
    load_sizes = (tiles, tiles_m, tiles_n, steps, first_k)
    load_buffers = (grads, hiddens, pieces)
    gl.warp_specialize(
        [
            (multiply_role, ((grads, hiddens, outs), multiply_bars, tiles, steps, ADD, 0, LAG, BLOCK_N, PROGRAMS)),
            (multiply_role, ((grads, hiddens, outs), multiply_bars, tiles, steps, ADD, 1, LAG, BLOCK_N, PROGRAMS)),
            (load_role, (load_descs, load_buffers, load_bars, load_sizes, ADD, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS)),
            (store_role, (out_desc, outs, tile_made, tile_stored, sizes, BLOCK_N, GROUP_M, PROGRAMS)),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )
