"""The logits' product on Hopper GPUs, in Gluon, where exponentials relative to a row's given offset leave it, or sums
alone.

Warps have the roles that they have in `hopper_products`: one loads, two warpgroups multiply half of a tile's rows each
and make exponentials and sums of them, one stores. The second warpgroup runs some steps behind the first, so that the
tensor cores work for one while the other is in its epilogue, which by itself is as long as two to five steps.
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

from .hopper_products import GROUP_ROWS, GROUPS, barriers, next_stage

log2_e = gl.constexpr(1.4426950408889634)


@gluon.jit
def tile_place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Row and column of a tile, as in ``blocks.tile_place``."""
    group = tile // (GROUP_M * tiles_n)
    group_rows = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + within % group_rows, within // group_rows


@gluon.jit
def load_role(
    descs, buffers, bars, sizes, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    hidden_desc, weight_desc = descs
    hiddens, weights = buffers
    loaded, consumed = bars
    tiles, tiles_m, tiles_n, steps = sizes
    STAGES: gl.constexpr = weights.shape[0]
    BYTES: gl.constexpr = BLOCK_K * (GROUPS * GROUP_ROWS + BLOCK_N) * hidden_desc.dtype.primitive_bitwidth // 8
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * (GROUPS * GROUP_ROWS), tile_n * BLOCK_N
        for k in range(steps):
            mbarrier.wait(consumed.index(stage), phase ^ 1)
            bar = loaded.index(stage)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(hidden_desc, [row, k * BLOCK_K], bar, hiddens.index(stage))
            tma.async_copy_global_to_shared(weight_desc, [column, k * BLOCK_K], bar, weights.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def multiply_role(
    pointers, row_offset_ptr, out, buffers, bars, sizes, logit_scale,
    STORE: gl.constexpr, GROUP: gl.constexpr, LAG: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    PROGRAMS: gl.constexpr, REACH: gl.constexpr, EVEN_VOCAB: gl.constexpr,
):  # fmt: skip
    strip_offset_ptr, strip_sum_ptr, target_ptr = pointers
    hiddens, weights = buffers
    loaded, consumed, made, stored, turn = bars
    tiles, tiles_m, tiles_n, steps, rows, vocab = sizes
    STAGES: gl.constexpr = weights.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile_phase = gl.to_tensor(0)
    before = stage
    # in tiles of few steps the ring lets the first warpgroup run tiles ahead, and a barrier tells two phases apart only
    takes_turns = steps > STAGES
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        first_row = (tile_m * GROUPS + GROUP) * GROUP_ROWS
        offs_row = first_row + gl.arange(0, GROUP_ROWS, by_row)
        in_rows = offs_row < rows
        # long before they are needed
        row_offset = gl.zeros([GROUP_ROWS], gl.float32, by_row)
        if row_offset_ptr is not None:
            row_offset = gl.load(row_offset_ptr + offs_row, mask=in_rows, other=0.0)
        target = gl.load(target_ptr + offs_row, mask=in_rows, other=-1).to(gl.int32)
        special = gl.max((target // BLOCK_N == tile_n).to(gl.int32), 0) > 0
        if not EVEN_VOCAB:
            special = special | (tile_n == tiles_n - 1)
        if GROUP == 1:
            mbarrier.wait(turn, tile_phase, pred=takes_turns)
        acc = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, layout)
        own_steps = steps
        if GROUP == 1:
            # where the last rows are the other's alone, the tensor cores are
            own_steps = gl.where(first_row < rows, steps, 0)
        for k in range(own_steps):
            mbarrier.wait(loaded.index(stage), phase)
            hidden = hiddens.index(stage).slice(GROUP * GROUP_ROWS, GROUP_ROWS)
            weight = weights.index(stage).permute((1, 0))
            acc = warpgroup_mma(hidden, weight, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # the step before is done, this one may be on its way
            mbarrier.arrive(consumed.index(before), count=1, pred=k > 0)
            if GROUP == 0:
                mbarrier.arrive(turn, count=1, pred=takes_turns & (k == LAG))
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        x = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(consumed.index(before), count=1, pred=own_steps > 0)
        if GROUP == 1:
            for _ in range(own_steps, steps):
                mbarrier.wait(loaded.index(stage), phase)
                mbarrier.arrive(consumed.index(stage), count=1)
                before = stage
                stage, phase = next_stage(stage, phase, STAGES)

        if logit_scale is not None:
            x = x * logit_scale
        if special:
            offs_col = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, by_column)
            left_out = (offs_col[None, :] == target[:, None]) | (offs_col >= vocab)[None, :]
            x = gl.where(left_out, float("-inf"), x)
        top = gl.max(x, 1)
        offset = top
        if row_offset_ptr is not None:
            offset = gl.where(top - row_offset > REACH, top - REACH, row_offset)
        shift = gl.where(offset == float("-inf"), 0.0, offset)
        # one fused multiply-add; the rounding of its constant is the whole row's alike, and taken out of the sum
        factor = gl.full([GROUP_ROWS, BLOCK_N], log2_e, gl.float32, layout)
        less = shift * -log2_e
        e = gl.exp2(gl.fma(x, factor, gl.expand_dims(less, 1).broadcast_to([GROUP_ROWS, BLOCK_N])))
        sums = gl.sum(e, 1)
        if STORE:
            # the other warpgroup's tile before has left the place that both store from
            mbarrier.wait(stored.index(1 - GROUP), tile_phase ^ (1 - GROUP))
            out.store(e.to(out.dtype))
            fence_async_shared()
            mbarrier.arrive(made.index(GROUP), count=1)
        constant = gl.full([GROUP_ROWS], log2_e, gl.float32, by_row)
        sums = sums * gl.exp2(-gl.fma(shift, constant, less))
        at = tile_n.to(gl.int64) * rows + offs_row
        taken = in_rows
        if row_offset_ptr is not None:
            own = offset != row_offset
            sums = gl.where(own, -sums, sums)
            taken = in_rows & own
        gl.store(strip_offset_ptr + at, offset, mask=taken)
        gl.store(strip_sum_ptr + at, sums, mask=in_rows)
        tile_phase ^= 1


@gluon.jit
def store_role(
    out_desc,
    out,
    made,
    stored,
    sizes,
    STORE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GROUP_M: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    tiles, tiles_m, tiles_n = sizes
    if not STORE:
        tiles = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP_M)
        for group in gl.static_range(GROUPS):
            mbarrier.wait(made.index(group), phase)
            at = [(tile_m * GROUPS + group) * GROUP_ROWS, tile_n * BLOCK_N]
            if STORE:
                tma.async_copy_shared_to_global(out_desc, at, out)
                tma.store_wait(0)
            mbarrier.arrive(stored.index(group), count=1)
        phase ^= 1


@gluon.jit
def hopper_exp_logits_kernel(
    # outputs
    out_desc,  # [rows, vocab] 16 bit, block [GROUP_ROWS, BLOCK_N]; or None
    strip_offset_ptr,  # as `exp_logits_kernel` has them, a strip being a tile's columns
    strip_sum_ptr,
    # inputs
    hidden_desc,  # [rows, hidden] 16 bit, block [GROUPS * GROUP_ROWS, BLOCK_K]
    weight_desc,  # [vocab, hidden], block [BLOCK_N, BLOCK_K]
    row_offset_ptr,  # [rows] fp32, or None for each strip's own maximum
    target_ptr,  # [rows] int64, -1 where the row does not count
    count_ptr,  # [] int64: how many rows of the call count, or None for all
    # sizes
    first_row,  # of the chunk within the call
    rows,
    vocab,
    hidden,
    # scalars
    logit_scale,  # float or None for 1
    STAGES: gl.constexpr,
    LAG: gl.constexpr,  # steps that the second warpgroup is behind the first
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    PROGRAMS: gl.constexpr,
    REACH: gl.constexpr,
    EVEN_VOCAB: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a thread that multiplies
):
    """``exp(logit_scale * hidden @ weight.T - offset)`` without the target's column, and its sums over strips."""
    counted = rows
    if count_ptr is not None:
        counted = gl.minimum(gl.maximum(gl.load(count_ptr) - first_row, 0), rows).to(gl.int32)
    tiles_m, tiles_n = gl.cdiv(counted, GROUPS * GROUP_ROWS), gl.cdiv(vocab, BLOCK_N)
    tiles = tiles_m * tiles_n
    steps = gl.cdiv(hidden, BLOCK_K)
    hiddens = gl.allocate_shared_memory(
        hidden_desc.dtype, [STAGES, GROUPS * GROUP_ROWS, BLOCK_K], hidden_desc.layout
    )  # fmt: skip
    weights = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    STORE: gl.constexpr = out_desc is not None
    if STORE:
        out = gl.allocate_shared_memory(out_desc.dtype, [GROUP_ROWS, BLOCK_N], out_desc.layout)
    else:
        out = weights.index(0)  # of no use
    loaded, consumed = barriers(STAGES, 1), barriers(STAGES, GROUPS)
    made, stored = barriers(GROUPS, 1), barriers(GROUPS, 1)
    turn = barriers(1, 1).index(0)
    fence_async_shared()
    pointers = (strip_offset_ptr, strip_sum_ptr, target_ptr)
    buffers, bars = (hiddens, weights), (loaded, consumed, made, stored, turn)
    sizes = (tiles, tiles_m, tiles_n, steps, rows, vocab)
    load_sizes, store_sizes = (tiles, tiles_m, tiles_n, steps), (tiles, tiles_m, tiles_n)
    descs, ring_bars = (hidden_desc, weight_desc), (loaded, consumed)
    gl.warp_specialize(
        [
            (multiply_role, (
                pointers, row_offset_ptr, out, buffers, bars, sizes, logit_scale,
                STORE, 0, LAG, BLOCK_N, GROUP_M, PROGRAMS, REACH, EVEN_VOCAB,
            )),
            (multiply_role, (
                pointers, row_offset_ptr, out, buffers, bars, sizes, logit_scale,
                STORE, 1, LAG, BLOCK_N, GROUP_M, PROGRAMS, REACH, EVEN_VOCAB,
            )),
            (load_role, (descs, buffers, ring_bars, load_sizes, BLOCK_N, BLOCK_K, GROUP_M, PROGRAMS)),
            (store_role, (out_desc, out, made, stored, store_sizes, STORE, BLOCK_N, GROUP_M, PROGRAMS)),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )  # fmt: skip
