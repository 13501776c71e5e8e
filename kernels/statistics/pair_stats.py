"""Divergences of the softmaxes of two rows of stored logits whose normalisers are known, one program a row.

Each is summed from differences of log-probabilities, so that equal rows give exactly 0.
"""

import triton.language as tl

from ..common import tiles
from ..common.kernel import kernel
from ..common.stored import load_number, load_row
from ..common.transform import log2_e, log_mixture, part_below

LOG_FLOOR = tl.constexpr(tiles.LOG_FLOOR)


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
    beta,  # float or None, with its logarithm and that of 1 - beta
    log_beta,
    log_rest,
    tie,  # of part_below
    BLOCK: tl.constexpr,
):
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
        # a probability of 0 has no part in a sum, whatever its logarithm
        if forward_kl_ptr is not None:
            forward += tl.where(q > 0.0, q * (log_q - log_p), 0.0)
        if reverse_kl_ptr is not None:
            reverse += tl.where(p > 0.0, p * (log_p - tl.maximum(log_q, LOG_FLOOR)), 0.0)
        if teacher_entropy_ptr is not None:
            entropy -= tl.where(q > 0.0, q * log_q, 0.0)
        if jsd_ptr is not None:
            log_m = log_mixture(log_q, log_p, log_beta, log_rest)
            p_to_mixture += tl.where(p > 0.0, p * (log_p - log_m), 0.0)
            q_to_mixture += tl.where(q > 0.0, q * (log_q - log_m), 0.0)
        if tvd_ptr is not None:
            variation += 0.5 * tl.abs(p - q)
        if overlap_ptr is not None:
            overlap += tl.minimum(p, q)
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
