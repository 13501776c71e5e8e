"""Statistics [rows] fp32 of rows of logits that are stored, one program a row.

Of rows [rows, columns], ``row_stats_kernel``:

    log p = (x - start) + rest,  start = max x,  rest = -log sum exp(x - start),  entropy = -sum p log p

Divergences of the softmaxes of two rows whose normalisers are known, ``pair_stats_kernel``: each is summed from
differences of log-probabilities, so that equal rows give exactly 0.

Of a set of columns per row, from the logits [entries] fp32 of all sets, the same kernel:

    lse[i] = log sum_{begin[i] <= e < end[i]} exp(logit[e])
"""

import triton.language as tl

from ..common import tiles
from ..common.launcher import kernel
from ..common.transform import ln_2, load_number, load_row, log2_e, log_mixture, part_below, transform_logits

LOG_FLOOR = tl.constexpr(tiles.LOG_FLOOR)


@kernel
def row_stats_kernel(
    # outputs
    lse_ptr,  # [rows] fp32 or None
    start_ptr,  # [rows] fp32: log p = (x - start) + rest
    rest_ptr,  # [rows] fp32
    logprob_ptr,  # [rows] fp32, 0 where the row does not count; None without targets
    target_logit_ptr,  # [rows] fp32 or None
    entropy_ptr,  # [rows] fp32 or None
    weighted_sum_ptr,  # [rows] fp32: sum of omega * x, or None
    top_ptr,  # [rows] fp32 or None: the largest logit
    argmax_ptr,  # [rows] int32 or None: the first column that has it
    # inputs
    logits_ptr,  # [rows, columns], raw; of sets [entries] fp32, as the softmax sees them
    column_ptr,  # [entries] int32 of sets, -1 for none; None without sets, like both that follow
    begin_ptr,  # [rows] int64: where a row's entries begin
    end_ptr,  # [rows] int64: and end, equal to begin for a row without a set
    target_ptr,  # [rows] int64, -1 where the row does not count; None without targets
    bias_ptr,  # [columns] or None
    class_weights_ptr,  # [columns] or None for 1
    # sizes
    columns,
    stride,  # elements from row to row of logits
    # scalars
    logit_scale,  # float or None for 1
    softcap,  # float or None
    row_scale_ptr,  # [rows] fp32, or None for 1
    ratio,  # inverse temperature relative to the logits'; float or None for 1
    FILL: tl.constexpr,  # 0 for a row without a set, instead of what is there
    BLOCK: tl.constexpr,
):
    """``lse = log sum exp(x)`` of a row or of its set, and what else was asked for."""
    row = tl.program_id(0).to(tl.int64)
    SETS: tl.constexpr = begin_ptr is not None
    row_scale = load_number(row_scale_ptr, row)
    target = load_number(target_ptr, row)
    if SETS:
        begin, end = tl.load(begin_ptr + row), tl.load(end_ptr + row)
        counts = target >= 0
    else:
        begin, end = 0, columns
        logits_ptr += row * stride
        if target_ptr is not None:
            counts = (target >= 0) & (target < columns)
            raw = tl.load(logits_ptr + target, mask=counts, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                raw += tl.load(bias_ptr + target, mask=counts, other=0.0).to(tl.float32)
            target_logit = transform_logits(raw, logit_scale, softcap, row_scale)
    # every lane keeps a maximum, -inf where it has seen nothing, the sum of exp(x - max), and that of
    # exp(x - max) (x - max): the loop has no reduction in it
    lane_max = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    lane_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    lane_shifted = tl.zeros((BLOCK,), dtype=tl.float32)
    lane_weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    lane_target = tl.zeros((BLOCK,), dtype=tl.float32)
    lane_argmax = tl.full((BLOCK,), 2147483647, dtype=tl.int32)
    for start in range(begin, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        inside = offs < end
        if SETS:
            column = tl.load(column_ptr + offs, mask=inside, other=-1)
            inside = column >= 0
            x = tl.load(logits_ptr + offs, mask=inside, other=float("-inf"))
            lane_target += tl.where(inside & (column == target), x, 0.0)
        else:
            column = offs
            x = load_row(logits_ptr, None, bias_ptr, row, 0, offs, inside, logit_scale, softcap, row_scale)
        if weighted_sum_ptr is not None:
            omega = tl.where(inside, 1.0, 0.0)
            if class_weights_ptr is not None:
                omega = tl.load(class_weights_ptr + offs, mask=inside, other=0.0).to(tl.float32)
            # selection, so that a logit of -inf with weight 0 does not become nan
            lane_weighted += tl.where(omega != 0.0, x * omega, 0.0)
        x = tl.where(inside, x, float("-inf"))  # the cap turns the padding's -inf into a number
        if argmax_ptr is not None:
            same = inside & (x == lane_max)
            lane_argmax = tl.where(x > lane_max, column, tl.where(same, tl.minimum(lane_argmax, column), lane_argmax))
        if ratio is not None:
            x = x * ratio
        new_max = tl.maximum(lane_max, x)
        offset = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2((lane_max - offset) * log2_e)
        z = x - offset
        e = tl.exp2(z * log2_e)
        if entropy_ptr is not None:
            moved = tl.where(lane_max == float("-inf"), 0.0, lane_max - offset)
            lane_shifted = rescale * (lane_shifted + lane_sum * moved) + tl.where(e > 0.0, e * z, 0.0)
        lane_max, lane_sum = new_max, lane_sum * rescale + e
    row_max = tl.max(lane_max, 0)
    distance = lane_max - tl.where(row_max == float("-inf"), 0.0, row_max)
    weight = tl.exp2(distance * log2_e)
    row_sum = tl.sum(lane_sum * weight, 0)
    log_sum = tl.log2(row_sum) * ln_2
    shifted = tl.sum(tl.where(weight > 0.0, weight * (lane_shifted + lane_sum * distance), 0.0), 0)
    entropy = log_sum - shifted / row_sum
    at = row + tl.arange(0, 1)
    here = at >= row
    if SETS:
        target_logit = tl.sum(lane_target, 0)
        # a branch would be on what is loaded
        here = at < tl.where((end > begin) | FILL, row + 1, row)
        row_max = tl.where(end > begin, row_max, 0.0)
        log_sum = tl.where(end > begin, log_sum, 0.0)
        entropy = tl.where(end > begin, entropy, 0.0)
    if lse_ptr is not None:
        tl.store(lse_ptr + at, row_max + log_sum, mask=here)
    tl.store(start_ptr + at, row_max, mask=here)
    tl.store(rest_ptr + at, -log_sum, mask=here)
    if target_logit_ptr is not None:
        tl.store(target_logit_ptr + at, target_logit, mask=here)
    if logprob_ptr is not None:
        if ratio is not None:
            target_logit = target_logit * ratio
        # not target_logit - lse, which has lost what lies below an ulp of the logits
        tl.store(logprob_ptr + at, tl.where(counts, (target_logit - row_max) - log_sum, 0.0), mask=here)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + at, entropy, mask=here)
    if weighted_sum_ptr is not None:
        tl.store(weighted_sum_ptr + at, tl.sum(lane_weighted, 0), mask=here)
    if argmax_ptr is not None:
        argmax = tl.min(tl.where(lane_max == row_max, lane_argmax, 2147483647), 0)
        tl.store(top_ptr + at, row_max, mask=here)
        tl.store(argmax_ptr + at, tl.where(argmax == 2147483647, 0, argmax), mask=here)


@kernel
def pair_stats_kernel(
    # outputs, each [rows] fp32 or None
    forward_kl_ptr,  # KL(q || p)
    reverse_kl_ptr,  # KL(p || q)
    teacher_entropy_ptr,
    kl_mixture_ptr,  # KL(p || m), m = beta q + (1 - beta) p
    jsd_ptr,  # beta KL(q || m) + (1 - beta) KL(p || m)
    tvd_ptr,  # sum |p - q| / 2
    below_ptr,  # sum part_below(p, q)
    overlap_ptr,  # sum min(p, q)
    # inputs: p
    logits_ptr,  # [rows, columns or more]
    strip_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    bias_ptr,
    start_ptr,  # [rows] fp32: log p = (x - start) + rest
    rest_ptr,  # [rows] fp32
    # inputs: q
    teacher_ptr,  # [rows, columns or more]
    teacher_offset_ptr,
    teacher_bias_ptr,
    teacher_start_ptr,
    teacher_rest_ptr,
    # sizes
    strip_stride,  # from strip to strip of both offsets; 0 for raw logits
    columns,  # that both have
    stride,
    teacher_stride,
    # scalars
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32 or None
    ratio,
    teacher_scale,
    teacher_softcap,
    teacher_row_scale_ptr,
    beta,  # float or None
    tie,  # of part_below
    BLOCK: tl.constexpr,
):
    """Sums over columns of what two softmaxes p and q differ by, one program a row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    row_scale = load_number(row_scale_ptr, row)
    teacher_row_scale = load_number(teacher_row_scale_ptr, row)
    teacher_ptr += row * teacher_stride
    start_p, rest_p = tl.load(start_ptr + row), tl.load(rest_ptr + row)
    start_q, rest_q = tl.load(teacher_start_ptr + row), tl.load(teacher_rest_ptr + row)
    forward = tl.zeros((BLOCK,), dtype=tl.float32)
    reverse = tl.zeros((BLOCK,), dtype=tl.float32)
    entropy = tl.zeros((BLOCK,), dtype=tl.float32)
    p_to_mixture = tl.zeros((BLOCK,), dtype=tl.float32)
    q_to_mixture = tl.zeros((BLOCK,), dtype=tl.float32)
    variation = tl.zeros((BLOCK,), dtype=tl.float32)
    below = tl.zeros((BLOCK,), dtype=tl.float32)
    overlap = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        inside = offs < columns
        x = load_row(
            logits_ptr, strip_offset_ptr, bias_ptr, row, strip_stride, offs, inside, logit_scale, softcap, row_scale,
        )  # fmt: skip
        y = load_row(
            teacher_ptr, teacher_offset_ptr, teacher_bias_ptr, row, strip_stride, offs, inside, teacher_scale,
            teacher_softcap, teacher_row_scale,
        )  # fmt: skip
        if ratio is not None:
            x = x * ratio
        log_p = tl.where(inside, (x - start_p) + rest_p, float("-inf"))
        log_q = tl.where(inside, (y - start_q) + rest_q, float("-inf"))
        p = tl.exp2(log_p * log2_e)
        q = tl.exp2(log_q * log2_e)
        # a probability of 0 has no part in a sum, whatever its logarithm; one that is nan shows
        if forward_kl_ptr is not None:
            forward += tl.where(q != 0.0, q * (log_q - log_p), 0.0)
        if reverse_kl_ptr is not None:
            reverse += tl.where(p != 0.0, p * (log_p - tl.where(log_q < LOG_FLOOR, LOG_FLOOR, log_q)), 0.0)
        if teacher_entropy_ptr is not None:
            entropy -= tl.where(q != 0.0, q * log_q, 0.0)
        if jsd_ptr is not None:
            log_m = log_mixture(log_q, log_p, beta)
            p_to_mixture += tl.where(p != 0.0, p * (log_p - log_m), 0.0)
            q_to_mixture += tl.where(q != 0.0, q * (log_q - log_m), 0.0)
        if tvd_ptr is not None:
            variation += 0.5 * tl.abs(p - q)
        if overlap_ptr is not None:
            overlap += tl.where(p < q, p, q + 0.0 * p)
        if below_ptr is not None:
            below += part_below(p, q, tie)
    if forward_kl_ptr is not None:
        tl.store(forward_kl_ptr + row, tl.sum(forward, 0))
    if reverse_kl_ptr is not None:
        tl.store(reverse_kl_ptr + row, tl.sum(reverse, 0))
    if teacher_entropy_ptr is not None:
        tl.store(teacher_entropy_ptr + row, tl.sum(entropy, 0))
    if jsd_ptr is not None:
        kl_mixture = tl.sum(p_to_mixture, 0)
        tl.store(kl_mixture_ptr + row, kl_mixture)
        tl.store(jsd_ptr + row, beta * tl.sum(q_to_mixture, 0) + (1.0 - beta) * kl_mixture)
    if tvd_ptr is not None:
        tl.store(tvd_ptr + row, tl.sum(variation, 0))
    if overlap_ptr is not None:
        tl.store(overlap_ptr + row, tl.sum(overlap, 0))
    if below_ptr is not None:
        tl.store(below_ptr + row, tl.sum(below, 0))
