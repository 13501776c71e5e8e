"""Statistics of pieces of the vocabulary, as all ranks have sent them, merged into those of the vocabulary.

    lse = log sum_r exp(lse[r]),  entropy = sum_r share[r] (entropy[r] - log share[r]),  share[r] = exp(lse[r] - lse)

Pieces are [ranks, numbers, rows] fp32, statistics [rows] fp32.
"""

import triton.language as tl

from ..common.kernel import kernel


@kernel
def merge_ranks_kernel(
    # outputs
    start_ptr,  # [rows] fp32: log p = (x - start) + rest
    rest_ptr,  # [rows] fp32
    lse_ptr,  # [rows] fp32; None for a teacher's softmax, like all that follow
    logprob_ptr,  # [rows] fp32, 0 where the row does not count
    target_logit_ptr,  # [rows] fp32, or None where another launch writes it
    entropy_ptr,  # [rows] fp32 or None
    weighted_sum_ptr,  # [rows] fp32 or None
    top_ptr,  # [rows] fp32 or None
    argmax_ptr,  # [rows] int32 or None
    # inputs
    gathered_ptr,  # [ranks, numbers, rows] fp32: statistics of each piece, and last what tells its tokens
    zero_or_nan_ptr,  # [] fp32: nan where pieces are of different tokens; None where what tells them has to be equal
    target_ptr,  # [rows] int64, -1 where the row does not count
    # sizes
    ranks,
    numbers,
    rows,
    # scalars
    ratio,  # of the temperature to that of the logits, inverse
    START: tl.constexpr,  # where a piece's numbers are, -1 for what it does not tell
    REST: tl.constexpr,
    TARGET: tl.constexpr,
    ENTROPY: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TOP: tl.constexpr,
    ARGMAX: tl.constexpr,
    KNOWN_TARGETS: tl.constexpr,  # every piece has the target's logit, not its part of it only
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):
    """In fp64: logarithms have been rounded once already. The same order of sums on every rank."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    piece = numbers.to(tl.int64) * rows
    if zero_or_nan_ptr is not None:
        poison = tl.load(zero_or_nan_ptr)
    else:
        differs = tl.zeros((SCAN,), dtype=tl.int32)
        last = gathered_ptr + (piece - rows)
        for other in range(1, ranks):
            for first in range(0, rows, SCAN):
                at = first + tl.arange(0, SCAN)
                mine = tl.load(last + at, mask=at < rows, other=0.0)
                differs |= (tl.load(last + other * piece + at, mask=at < rows, other=0.0) != mine).to(tl.int32)
        poison = tl.where(tl.max(differs, 0) > 0, float("nan"), 0.0)

    # shares are relative to the most probable piece
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float64)
    first_start = tl.full((BLOCK,), float("-inf"), dtype=tl.float64)
    first_rest = tl.zeros((BLOCK,), dtype=tl.float64)
    for rank in range(0, ranks):
        own = gathered_ptr + rank * piece + row
        start = tl.load(own + START * rows, mask=mask, other=0.0).to(tl.float64)
        rest = tl.load(own + REST * rows, mask=mask, other=0.0).to(tl.float64)
        better = (start - rest > best) | (rank == 0)
        best = tl.where(better, start - rest, best)
        first_start, first_rest = tl.where(better, start, first_start), tl.where(better, rest, first_rest)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    shifted = tl.zeros((BLOCK,), dtype=tl.float64)
    target_logit = tl.zeros((BLOCK,), dtype=tl.float64)
    weighted = tl.zeros((BLOCK,), dtype=tl.float64)
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    argmax = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in range(0, ranks):
        own = gathered_ptr + rank * piece + row
        start = tl.load(own + START * rows, mask=mask, other=0.0).to(tl.float64)
        rest = tl.load(own + REST * rows, mask=mask, other=0.0).to(tl.float64)
        log_share = (start - first_start) - (rest - first_rest)
        share = tl.exp(log_share)
        total += share
        if entropy_ptr is not None:
            entropy = tl.load(own + ENTROPY * rows, mask=mask, other=0.0).to(tl.float64)
            shifted += tl.where(share > 0.0, share * (entropy - log_share), 0.0)
        if logprob_ptr is not None:
            asked = tl.load(own + TARGET * rows, mask=mask, other=0.0).to(tl.float64)
            if KNOWN_TARGETS:
                target_logit = tl.where(rank == 0, asked, target_logit)
            else:
                target_logit += asked
        if weighted_sum_ptr is not None:
            weighted += tl.load(own + WEIGHTED * rows, mask=mask, other=0.0).to(tl.float64)
        if top_ptr is not None:
            x = tl.load(own + TOP * rows, mask=mask, other=0.0)
            # of equal logits the first column's, which the first piece has
            higher = (x > top) | (x != x) | (rank == 0)
            argmax = tl.where(higher, tl.load(own + ARGMAX * rows, mask=mask, other=0.0), argmax)
            top = tl.where(higher, x, top)
    log_sum = tl.log(total)
    merged_rest = first_rest - log_sum
    tl.store(start_ptr + row, first_start.to(tl.float32) + poison, mask=mask)
    tl.store(rest_ptr + row, merged_rest.to(tl.float32), mask=mask)
    if logprob_ptr is not None:
        rounded = target_logit.to(tl.float32)
        counts = tl.load(target_ptr + row, mask=mask, other=-1) >= 0
        logprob = (rounded.to(tl.float64) * ratio - first_start) + merged_rest
        tl.store(logprob_ptr + row, tl.where(counts, logprob, 0.0).to(tl.float32) + poison, mask=mask)
        tl.store(lse_ptr + row, (first_start - merged_rest).to(tl.float32) + poison, mask=mask)
        if target_logit_ptr is not None:
            tl.store(target_logit_ptr + row, rounded, mask=mask)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, (shifted / total + log_sum).to(tl.float32) + poison, mask=mask)
    if weighted_sum_ptr is not None:
        tl.store(weighted_sum_ptr + row, weighted.to(tl.float32) + poison, mask=mask)
    if top_ptr is not None:
        tl.store(top_ptr + row, top, mask=mask)
        tl.store(argmax_ptr + row, argmax.to(tl.int32), mask=mask)
