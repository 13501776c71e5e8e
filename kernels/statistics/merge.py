"""Statistics [rows] fp32, merged from the statistics of parts of a row; and sums over tokens.

``merge_strips`` merges statistics of strips [strips, rows], which ``exp_logits`` has written. It replaces the target's
term of a sum by a term of the exact logit:

    lse = log sum_s sum[s] exp(offset[s]),  lse_base = max_s offset[s],  neg_log_sum = lse_base - lse

``merge_ranks`` merges statistics [ranks, numbers, rows] that the ranks have sent, each of a piece of the vocabulary:

    lse = log sum_r exp(lse[r]),  share[r] = exp(lse[r] - lse)

The two are bodies of kernels that are generated for the statistics beside the softmax (``lists.py``).

``sum_rows_kernel`` sums a table [rows, tokens] of losses' and metrics' values over tokens, and adds up the losses:

    out[r] = factor[r] * sum_i table[r, i],  total = sum_r coefficient[r] out[r] over losses r
"""

import triton
import triton.language as tl

from ..common.launcher import kernel
from ..common.transform import ln_2, log2_e, times
from .exp_logits import MIN_OFFSET


@triton.jit
def merge_strips(
    # outputs
    lse_ptr,  # [rows] fp32 or None
    lse_base_ptr,  # [rows] fp32: log p = (x - lse_base) + neg_log_sum
    neg_log_sum_ptr,  # [rows] fp32
    logprob_ptr,  # [rows] fp32, 0 where the row does not count; or None
    level_ptr,  # [rows] fp32: the offset that all strips of a row's exponentials shall get; None for relative logits
    output_ptrs,  # a tuple of [rows]: the statistics' vectors
    # inputs
    strip_offset_ptr,  # [strips, rows] fp32; of exponentials only read where the sum is negative
    strip_sum_ptr,  # [strips, rows] fp32; of exponentials with a minus sign where the offset is not the target's logit
    strip_ptrs,  # a tuple of [strips, rows]: numbers that the vectors are made of
    target_logit_ptr,  # [rows] fp32: the target's exact logit; None without targets
    tile_logit_ptr,  # [rows] fp32: the target's logit in the strips' sums; None: the exact logit is in them
    target_ptr,  # [rows] int64, -1 where the row does not count; None without targets
    # sizes
    rows,
    strip_stride,  # elements from strip to strip, a multiple of BLOCK_ROWS: blocks may read past the last row
    strip_count,
    columns,  # number of columns that the softmax is over
    # scalars
    ratio,  # inverse temperature relative to the logits'; float or None for 1
    IS_FIRST_SOFTMAX: tl.constexpr,  # False: the sums are of another softmax, which may be over fewer columns
    ZERO: tl.constexpr,  # generated function of ``lists.py``
    ADD_EXPONENTIALS: tl.constexpr,  # generated function of ``lists.py``
    ADD_STRIPS: tl.constexpr,  # generated function of ``lists.py``
    EXCHANGE_TARGET: tl.constexpr,  # generated function of ``lists.py``
    MERGE_STRIPS: tl.constexpr,  # generated function of ``lists.py``
    NUM_VECTORS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_STRIPS: tl.constexpr,
):
    """Writes ``lse = log sum_s sum[s] exp(offset[s])`` of each row, and the statistics beside the softmax."""
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < rows
    run_max = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    run_sum = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    if NUM_VECTORS > 0:
        states = ZERO(BLOCK_ROWS, tl.float32)
    largest_offset = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    if target_ptr is not None:
        exact_logit = tl.load(target_logit_ptr + offs_row, mask=in_rows, other=0.0)
        target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1)
        is_counted = (target >= 0) & (target < columns)
        if ratio is not None:
            # ``where`` keeps the compiler from a fused multiply-add: the product is rounded like products of offsets
            exact_logit = tl.where(is_counted, exact_logit * ratio, 0.0)
        run_max = tl.where(is_counted, exact_logit, run_max)
    for start in range(0, strip_count, BLOCK_STRIPS):
        offs_strip = start + tl.arange(0, BLOCK_STRIPS)
        offsets = offs_strip[:, None].to(tl.int64) * strip_stride + offs_row[None, :]
        mask = tl.broadcast_to(offs_strip[:, None] < strip_count, (BLOCK_STRIPS, BLOCK_ROWS))
        strip_sum = tl.load(strip_sum_ptr + offsets, mask=mask, other=0.0)
        if level_ptr is not None:
            has_offset = strip_sum < 0.0
            strip_offset = tl.load(strip_offset_ptr + offsets, mask=mask & has_offset, other=float("-inf"))
            strip_offset = tl.where(has_offset, strip_offset, exact_logit[None, :])
            strip_sum = tl.abs(strip_sum)
        else:
            strip_offset = tl.load(strip_offset_ptr + offsets, mask=mask, other=float("-inf"))
        strip_offset = times(strip_offset, ratio)
        if not IS_FIRST_SOFTMAX:
            strip_offset = tl.where(strip_sum > 0.0, strip_offset, float("-inf"))
        block_max = tl.max(strip_offset, 0)
        largest_offset = tl.maximum(largest_offset, block_max)
        new_max = tl.maximum(run_max, block_max)
        offset = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2((run_max - offset) * log2_e)
        distance = strip_offset - offset[None, :]
        weight = tl.exp2(distance * log2_e)
        if NUM_VECTORS > 0:
            states = ADD_EXPONENTIALS(
                states, strip_ptrs, offsets, mask, run_max, run_sum, offset, rescale, strip_sum, distance, weight
            )
        run_sum = run_sum * rescale + tl.sum(strip_sum * weight, 0)
        run_max = new_max
        if NUM_VECTORS > 0:
            states = ADD_STRIPS(states, strip_ptrs, offsets, mask)
    if tile_logit_ptr is not None:
        tile_logit = tl.load(tile_logit_ptr + offs_row, mask=in_rows, other=0.0)
        if ratio is not None:
            tile_logit = tl.where(is_counted, tile_logit * ratio, 0.0)
        offset = tl.where(run_max == float("-inf"), 0.0, run_max)
        removed_exp = tl.where(is_counted, tl.exp2((tile_logit - offset) * log2_e), 0.0)
        added_exp = tl.where(is_counted, tl.exp2((exact_logit - offset) * log2_e), 0.0)
        without_target = run_sum - removed_exp
        run_sum = tl.where(without_target < 0.0, 0.0, without_target) + added_exp
        if NUM_VECTORS > 0:
            states = EXCHANGE_TARGET(states, removed_exp, tile_logit - offset, added_exp, exact_logit - offset)
    if target_ptr is not None:
        least_max = times(MIN_OFFSET + 0.0, ratio)
        # strips have no sums of such small logits: a row whose maximum is so small becomes nan
        run_sum = tl.where(is_counted & (run_max < least_max) & (run_max > float("-inf")), float("nan"), run_sum)
    log_sum = tl.log2(run_sum) * ln_2
    lse = run_max + log_sum
    if lse_ptr is not None:
        tl.store(lse_ptr + offs_row, lse, mask=in_rows)
    tl.store(lse_base_ptr + offs_row, run_max, mask=in_rows)
    tl.store(neg_log_sum_ptr + offs_row, -log_sum, mask=in_rows)
    # exact_logit - lse would have the rounding error of lse, which grows with the logits
    if logprob_ptr is not None:
        logprob = (exact_logit - run_max) - log_sum
        logprob = tl.where(is_counted, tl.where(logprob > 0.0, 0.0, logprob), 0.0)
        tl.store(logprob_ptr + offs_row, logprob, mask=in_rows)
    if level_ptr is not None:
        tl.store(level_ptr + offs_row, tl.where(largest_offset > exact_logit, lse, exact_logit), mask=in_rows)
    if NUM_VECTORS > 0:
        merged_values = MERGE_STRIPS(states, run_sum, log_sum)
        for i in tl.static_range(NUM_VECTORS):
            tl.store(output_ptrs[i] + offs_row, merged_values[i], mask=in_rows)


@triton.jit
def merge_ranks(
    # outputs
    lse_base_ptr,  # [rows] fp32: log p = (x - lse_base) + neg_log_sum
    neg_log_sum_ptr,  # [rows] fp32
    lse_ptr,  # [rows] fp32; None for a teacher's softmax
    logprob_ptr,  # [rows] fp32, 0 where the row does not count; None for a teacher's softmax
    target_logit_ptr,  # [rows] fp32; None for a teacher's softmax, or if another launch writes it
    output_ptrs,  # a tuple of [rows]: the statistics' vectors
    # inputs
    gathered_ptr,  # [ranks, num_numbers, rows] fp32: each piece's statistics, and last a fingerprint of its tokens
    zero_or_nan_ptr,  # [] fp32: nan if ranks have different tokens
    target_ptr,  # [rows] int64, -1 where a row does not count
    # sizes
    ranks,
    num_numbers,  # number of a piece's numbers per row
    rows,
    vector_indices,  # a tuple, for each of ``output_ptrs`` its index among a piece's numbers
    # scalars
    ratio,  # the softmax's inverse temperature relative to the logits'
    LSE_BASE: tl.constexpr,  # index of lse_base among a piece's numbers
    NEG_LOG_SUM: tl.constexpr,  # index of neg_log_sum
    TARGET_LOGIT: tl.constexpr,  # index of the target's logit
    ZERO: tl.constexpr,  # a stage of ``lists.py``, like the next two
    ADD_PIECE: tl.constexpr,  # generated function of ``lists.py``
    MERGE_PIECES: tl.constexpr,  # generated function of ``lists.py``
    NUM_VECTORS: tl.constexpr,
    HAS_TARGET_LOGITS: tl.constexpr,  # True: all pieces have the target's logit; False: one piece, the others have 0
    BLOCK: tl.constexpr,
):
    """Merges the statistics of all pieces, in the same order on every rank. It computes in fp64, since the pieces'
    statistics have been rounded once already."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    number_stride = tl.cast(rows, tl.int64)
    piece_stride = num_numbers * number_stride
    zero_or_nan = tl.load(zero_or_nan_ptr)
    # of the most probable piece, to which shares are relative
    top_lse = tl.full((BLOCK,), float("-inf"), dtype=tl.float64)
    top_lse_base = tl.full((BLOCK,), float("-inf"), dtype=tl.float64)
    top_neg_log_sum = tl.zeros((BLOCK,), dtype=tl.float64)
    for rank in range(0, ranks):
        piece_pointers = gathered_ptr + rank * piece_stride + row
        lse_base = tl.load(piece_pointers + LSE_BASE * number_stride, mask=mask, other=0.0).to(tl.float64)
        neg_log_sum = tl.load(piece_pointers + NEG_LOG_SUM * number_stride, mask=mask, other=0.0).to(tl.float64)
        is_larger = (lse_base - neg_log_sum > top_lse) | (rank == 0)
        top_lse = tl.where(is_larger, lse_base - neg_log_sum, top_lse)
        top_lse_base = tl.where(is_larger, lse_base, top_lse_base)
        top_neg_log_sum = tl.where(is_larger, neg_log_sum, top_neg_log_sum)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    target_logit = tl.zeros((BLOCK,), dtype=tl.float64)
    if NUM_VECTORS > 0:
        states = ZERO(BLOCK, tl.float64)
    for rank in range(0, ranks):
        piece_pointers = gathered_ptr + rank * piece_stride + row
        lse_base = tl.load(piece_pointers + LSE_BASE * number_stride, mask=mask, other=0.0).to(tl.float64)
        neg_log_sum = tl.load(piece_pointers + NEG_LOG_SUM * number_stride, mask=mask, other=0.0).to(tl.float64)
        log_share = (lse_base - top_lse_base) - (neg_log_sum - top_neg_log_sum)
        share = tl.exp(log_share)
        total += share
        if logprob_ptr is not None:
            piece_logit = tl.load(piece_pointers + TARGET_LOGIT * number_stride, mask=mask, other=0.0).to(tl.float64)
            if HAS_TARGET_LOGITS:
                target_logit = tl.where(rank == 0, piece_logit, target_logit)
            else:
                target_logit += piece_logit
        if NUM_VECTORS > 0:
            pointers = piece_pointers + vector_indices[0] * number_stride
            values = (tl.load(pointers, mask=mask, other=0.0).to(tl.float64),)
            for i in tl.static_range(1, NUM_VECTORS):
                pointers = piece_pointers + vector_indices[i] * number_stride
                values = values + (tl.load(pointers, mask=mask, other=0.0).to(tl.float64),)
            states = ADD_PIECE(states, values, share, log_share, rank == 0)
    log_sum = tl.log(total)
    merged_neg_log_sum = top_neg_log_sum - log_sum
    tl.store(lse_base_ptr + row, top_lse_base.to(tl.float32) + zero_or_nan, mask=mask)
    tl.store(neg_log_sum_ptr + row, merged_neg_log_sum.to(tl.float32), mask=mask)
    if logprob_ptr is not None:
        logit_fp32 = target_logit.to(tl.float32)
        is_counted = tl.load(target_ptr + row, mask=mask, other=-1) >= 0
        logprob = (logit_fp32.to(tl.float64) * ratio - top_lse_base) + merged_neg_log_sum
        tl.store(logprob_ptr + row, tl.where(is_counted, logprob, 0.0).to(tl.float32) + zero_or_nan, mask=mask)
        tl.store(lse_ptr + row, (top_lse_base - merged_neg_log_sum).to(tl.float32) + zero_or_nan, mask=mask)
        if target_logit_ptr is not None:
            tl.store(target_logit_ptr + row, logit_fp32, mask=mask)
    if NUM_VECTORS > 0:
        merged_values = MERGE_PIECES(states, total, log_sum)
        for i in tl.static_range(NUM_VECTORS):
            value = merged_values[i]
            if value.dtype.is_floating():
                value = value.to(tl.float32) + zero_or_nan
            tl.store(output_ptrs[i] + row, value, mask=mask)


@kernel
def sum_rows_kernel(
    # outputs
    total_ptr,  # [] sum of the losses times their coefficients
    out_ptr,  # [rows] sums of rows
    # inputs
    table_ptr,  # [rows, tokens] contiguous; the first rows are the losses'
    inverse_ptr,  # [] factor of the losses' rows
    one_or_nan_ptr,  # [] factor of other rows
    # sizes
    tokens,
    loss_rows,  # number of losses, at most 4
    # scalars
    coefficient0,  # coefficient of the first loss
    coefficient1,
    coefficient2,
    coefficient3,
    BLOCK: tl.constexpr,
):
    """Writes ``out[r] = factor[r] * sum_i table[r, i]`` for row r, and adds up the total of the losses."""
    row = tl.program_id(0)
    factor = tl.load(inverse_ptr) if row < loss_rows else tl.load(one_or_nan_ptr)
    value = row_sum(table_ptr, row, tokens, BLOCK) * factor
    tl.store(out_ptr + row, value)
    if row == 0:
        total = value * coefficient0
        for loss_row in range(1, loss_rows):
            coefficient = tl.where(loss_row == 1, coefficient1, tl.where(loss_row == 2, coefficient2, coefficient3))
            total += row_sum(table_ptr, loss_row, tokens, BLOCK) * factor * coefficient
        tl.store(total_ptr, total)


@triton.jit
def row_sum(table_ptr, row, tokens, BLOCK: tl.constexpr):
    """Returns the sum of a row of a table [rows, tokens], fp32."""
    lane_sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        lane_sums += tl.load(table_ptr + tl.cast(row, tl.int64) * tokens + token, mask=token < tokens, other=0.0)
    return tl.sum(lane_sums, 0)
