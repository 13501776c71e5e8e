"""Statistics of a row of logits that lies in memory, and the gradient written over it."""

import triton
import triton.language as tl

from .transform import ln_2, log2_e, transform_derivative, transform_logits


@triton.jit
def load_logits(logits_ptr, offs, vocab, bias_ptr, logit_scale, softcap):
    x = tl.load(logits_ptr + offs, mask=offs < vocab, other=float("-inf")).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + offs, mask=offs < vocab, other=0.0).to(tl.float32)
    return transform_logits(x, logit_scale, softcap)


@triton.jit
def row_stats_kernel(
    # outputs
    lse_ptr,  # [rows] fp32
    target_logit_ptr,  # [rows] fp32
    weighted_sum_ptr,  # [rows] fp32: sum of omega * x, or None
    # inputs
    logits_ptr,  # [rows, vocab], before bias and transform
    target_ptr,  # [rows] int64, -1 where the row does not count
    bias_ptr,  # [vocab] or None
    class_weights_ptr,  # [vocab] or None for 1
    # sizes
    vocab,
    stride,  # elements from row to row of logits
    # scalars
    logit_scale,
    softcap,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    # every lane keeps a maximum and a sum of its own, so the loop has no reduction in it
    lane_max = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    lane_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    lane_weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = load_logits(logits_ptr, offs, vocab, bias_ptr, logit_scale, softcap)
        in_vocab = offs < vocab
        if weighted_sum_ptr is not None:
            omega = tl.where(in_vocab, 1.0, 0.0)
            if class_weights_ptr is not None:
                omega = tl.load(class_weights_ptr + offs, mask=in_vocab, other=0.0).to(tl.float32)
            # selection, so that a logit of -inf with weight 0 does not become nan
            lane_weighted += tl.where(omega != 0.0, x * omega, 0.0)
        x = tl.where(in_vocab, x, float("-inf"))  # the cap turns the padding's -inf into a number
        new_max = tl.maximum(lane_max, x)
        offset = tl.where(new_max == float("-inf"), 0.0, new_max)
        lane_sum = lane_sum * tl.exp2((lane_max - offset) * log2_e) + tl.exp2((x - offset) * log2_e)
        lane_max = new_max
    row_max = tl.max(lane_max, 0)
    offset = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(lane_sum * tl.exp2((lane_max - offset) * log2_e), 0)
    tl.store(lse_ptr + row, row_max + tl.log2(row_sum) * ln_2)
    if weighted_sum_ptr is not None:
        tl.store(weighted_sum_ptr + row, tl.sum(lane_weighted, 0))

    target = tl.load(target_ptr + row)
    counts = (target >= 0) & (target < vocab)
    x = tl.load(logits_ptr + target, mask=counts, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + target, mask=counts, other=0.0).to(tl.float32)
    tl.store(target_logit_ptr + row, transform_logits(x, logit_scale, softcap))


@triton.jit
def row_grad_kernel(
    # outputs
    dlogits_ptr,  # [rows, columns], may share the bytes of logits in a narrower type
    # inputs
    logits_ptr,  # [rows, columns], before bias and transform
    lse_ptr,  # [rows] fp32
    target_logit_ptr,  # [rows] fp32
    target_ptr,  # [rows] int64, -1 where the row does not count
    alpha_ptr,  # [rows] fp32, coefficient of the softmax
    beta_ptr,  # [rows] fp32, coefficient of the target
    kappa_ptr,  # [rows] fp32, coefficient of the class weights, or None
    bias_ptr,  # [columns] or None
    class_weights_ptr,  # [columns] or None for 1
    # sizes
    columns,
    first_column,  # of these columns in the vocabulary
    logits_stride,  # elements from row to row of logits
    dlogits_stride,  # elements from row to row of dlogits
    # scalars
    logit_scale,
    softcap,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    dlogits_ptr += row * dlogits_stride
    lse = tl.load(lse_ptr + row)
    alpha = tl.load(alpha_ptr + row)
    beta = tl.load(beta_ptr + row)
    target_logit = tl.load(target_logit_ptr + row)
    target = tl.load(target_ptr + row).to(tl.int32) - first_column
    # at the target, from fp32 statistics: see exp_grad_kernel
    target_grad = tl.exp2((target_logit - lse) * log2_e) * alpha - beta
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = load_logits(logits_ptr, offs, columns, bias_ptr, logit_scale, softcap)
        grad = tl.exp2((x - lse) * log2_e) * alpha
        grad = tl.where(offs == target, target_grad, grad)
        if kappa_ptr is not None:
            kappa = tl.load(kappa_ptr + row)
            if class_weights_ptr is not None:
                omega = tl.load(class_weights_ptr + offs, mask=offs < columns, other=0.0)
                grad -= kappa * omega.to(tl.float32)
            else:
                grad -= kappa
        grad *= transform_derivative(x, logit_scale, softcap)
        # a narrower dlogits[j] lands on the bytes of logits[j / 2]: all of the block must have been read
        tl.debug_barrier()
        tl.store(dlogits_ptr + offs, grad.to(dlogits_ptr.dtype.element_ty), mask=offs < columns)
