"""Logits [rows, columns] to the gradient of raw logits, in place, by the identity of ``identity.py``.

On the way sums over columns that no gradient waits for: KL(q || p) and the entropy of q [rows] fp32, in parts that
``add_parts_kernel`` adds up.
"""

import triton
import triton.language as tl

from ..common import tiles
from ..common.blocks import counted_rows
from ..common.kernel import kernel
from ..common.stored import load_block, load_column
from ..common.transform import log2_e
from .identity import log_probability, logits_gradient

PRODUCT_ROWS = tl.constexpr(tiles.PRODUCT_ROWS)


@kernel
def row_grad_kernel(
    # outputs
    dlogits_ptr,  # [rows, columns], may share the bytes of logits, in a type no wider
    forward_kl_ptr,  # [COLUMN_PROGRAMS, rows] fp32: each program's part of KL(q || p), or None
    teacher_entropy_ptr,  # [COLUMN_PROGRAMS, rows] fp32: its part of q's entropy, or None
    # inputs
    logits_ptr,  # [rows, columns]: raw, or fp16 relative to the strips' offsets
    strip_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    bias_ptr,  # [columns] or None
    class_weights_ptr,  # [columns] or None for 1
    target_ptr,  # [rows] int64, -1 where the row does not count
    target_logit_ptr,  # [rows] fp32, like all that follow
    beta_ptr,  # or None
    kappa_ptr,  # or None
    start_ptr,  # log p = (x - start) + rest
    rest_ptr,
    alpha_ptr,  # or None, with eta
    eta_ptr,  # or None
    start2_ptr,  # at the second temperature, or None
    rest2_ptr,
    alpha2_ptr,
    eta2_ptr,  # or None
    teacher_ptr,  # [rows, teacher_columns], or None
    teacher_offset_ptr,  # [strips, rows] fp32, or None for raw logits
    teacher_bias_ptr,
    teacher_start_ptr,
    teacher_rest_ptr,
    gamma_ptr,  # or None
    rho_ptr,  # or None
    tau_ptr,  # or None
    theta_ptr,  # or None, with below
    below_ptr,
    # sizes
    rows,
    columns,
    first_column,  # of these columns in the vocabulary
    columns2,  # of these that the second softmax is over
    teacher_columns,  # of these that the teacher has
    logits_stride,  # elements from row to row
    dlogits_stride,
    teacher_stride,
    strip_stride,  # from strip to strip of both offsets; 0 for raw logits
    strip_behind,  # where logits are relative, the strip of those behind columns2 in its strip; None for none
    parts_stride,  # from program to program of the parts; None without them
    count_ptr,  # [] int64: how many rows of the call count, or None for all
    first_row,  # of these rows in the call
    # scalars
    logit_scale,
    softcap,
    row_scale_ptr,  # [rows] fp32 or None
    ratio2,  # of the second temperature, inverse, to the first; float or None for 1
    teacher_scale,
    teacher_softcap,
    teacher_row_scale_ptr,
    log_beta,  # of a mixture's shares, the teacher's first; float or None without one
    log_rest,
    tie,  # relative difference of probabilities that count as equal, or None
    SECOND: tl.constexpr,  # p inside the teacher is of the second temperature
    COLUMN_PROGRAMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # a strip where logits are relative
):
    column_program = tl.program_id(0) % COLUMN_PROGRAMS
    offs_row = (tl.program_id(0) // COLUMN_PROGRAMS) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < rows
    last = columns
    if count_ptr is not None:
        # products read as many rows as a tile has
        behind = tl.cdiv(counted_rows(count_ptr, first_row, rows), PRODUCT_ROWS) * PRODUCT_ROWS
        last = tl.where((tl.program_id(0) // COLUMN_PROGRAMS) * BLOCK_ROWS < behind, columns, 0)
    wide_row, written = offs_row.to(tl.int64)[:, None], in_rows
    target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1)
    counts = target >= 0
    target = (target - first_column).to(tl.int32)[:, None]
    # Relative logits are read as log-probabilities, where neither a second softmax nor the slope of a cap needs them:
    # what a row and a strip add is one number then. Of rows that do not count nothing is read, and no part is written.
    LOGARITHMS: tl.constexpr = strip_offset_ptr is not None and start2_ptr is None and softcap is None
    if LOGARITHMS:
        in_rows = in_rows & counts
    # per row, and so before the loop over columns
    target_logit = load_column(target_logit_ptr, offs_row, in_rows)
    row_start = load_column(start_ptr, offs_row, in_rows)
    row_rest = load_column(rest_ptr, offs_row, in_rows)
    row_scale = load_column(row_scale_ptr, offs_row, in_rows)
    teacher_row_scale = load_column(teacher_row_scale_ptr, offs_row, in_rows)
    beta = load_column(beta_ptr, offs_row, in_rows)
    kappa = load_column(kappa_ptr, offs_row, in_rows)
    alpha = load_column(alpha_ptr, offs_row, in_rows)
    eta = load_column(eta_ptr, offs_row, in_rows)
    start2 = load_column(start2_ptr, offs_row, in_rows)
    rest2 = load_column(rest2_ptr, offs_row, in_rows)
    alpha2 = load_column(alpha2_ptr, offs_row, in_rows)
    eta2 = load_column(eta2_ptr, offs_row, in_rows)
    teacher_start = load_column(teacher_start_ptr, offs_row, in_rows)
    teacher_rest = load_column(teacher_rest_ptr, offs_row, in_rows)
    gamma = load_column(gamma_ptr, offs_row, in_rows)
    rho = load_column(rho_ptr, offs_row, in_rows)
    tau = load_column(tau_ptr, offs_row, in_rows)
    theta = load_column(theta_ptr, offs_row, in_rows)
    below = load_column(below_ptr, offs_row, in_rows)
    offset_behind = None
    if strip_behind is not None:
        behind_at = strip_offset_ptr + tl.cast(strip_behind, tl.int64) * strip_stride
        offset_behind = load_column(behind_at, offs_row, in_rows)
    read_start, read_rest = None, None
    if LOGARITHMS:
        target_logit = (target_logit - row_start) + row_rest
        read_start, read_rest, row_start, row_rest = row_start, row_rest, None, None
    if forward_kl_ptr is not None:
        forward = tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32)
    if teacher_entropy_ptr is not None:
        entropy = tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32)
    for start in range(column_program * BLOCK, last, COLUMN_PROGRAMS * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        in_columns = offs < columns
        x = load_block(
            logits_ptr, strip_offset_ptr, bias_ptr, offs_row, in_rows, strip_stride, logits_stride, start, offs,
            in_columns, logit_scale, softcap, row_scale, read_start, read_rest, columns2, offset_behind,
        )  # fmt: skip
        omega = None
        if kappa_ptr is not None and class_weights_ptr is not None:
            omega = tl.load(class_weights_ptr + offs, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        log_q = None
        if teacher_ptr is not None:
            in_teacher = offs < teacher_columns
            # a block: the interpreter makes no mask of a block and a scalar
            within = tl.full((BLOCK_ROWS,), start, tl.int32) < teacher_columns
            with_teacher = in_rows & within  # a strip behind the teacher's last has no offset
            log_q = load_block(
                teacher_ptr, teacher_offset_ptr, teacher_bias_ptr, offs_row, with_teacher, strip_stride, teacher_stride,
                start, offs, in_teacher, teacher_scale, teacher_softcap, teacher_row_scale, teacher_start, teacher_rest,
            )  # fmt: skip
            if teacher_offset_ptr is None:
                log_q = (log_q - teacher_start) + teacher_rest
                log_q = tl.where(in_rows[:, None] & in_teacher[None, :], log_q, float("-inf"))
        # as pair_stats sums them: a probability of 0 has no part in a sum, whatever its logarithm
        if forward_kl_ptr is not None:
            q = tl.exp2(log_q * log2_e)
            log_p = log_probability(x, row_start, row_rest, start2, rest2, ratio2, SECOND)
            forward += q * tl.where(q > 0.0, log_q - log_p, 0.0)
        if teacher_entropy_ptr is not None:
            q = tl.exp2(log_q * log2_e)
            entropy -= q * tl.where(q > 0.0, log_q, 0.0)
        # summed from zero on: ptxas takes 32 registers so for plain rows, and 49 where the first term begins the sum
        zero = tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32)
        grad = logits_gradient(
            x, offs[None, :] == target, offs[None, :], omega, log_q, zero, target_logit, beta, kappa,
            row_start, row_rest, alpha, eta, start2, rest2, alpha2, eta2, gamma, rho, tau, theta, below,
            logit_scale, softcap, row_scale, ratio2, columns2, log_beta, log_rest, tie, SECOND, False,
        )  # fmt: skip
        if not LOGARITHMS:
            # selection: where a row does not count a teacher's logits, or a bias, may be nan
            grad = tl.where(counts[:, None], grad, 0.0)
        # a narrower dlogits[j] lands on the bytes of logits[j / 2]: all of the block must have been read
        tl.debug_barrier()
        at = dlogits_ptr + wide_row * dlogits_stride + offs[None, :]
        tl.store(at, grad.to(dlogits_ptr.dtype.element_ty), mask=written[:, None] & in_columns[None, :])
    if forward_kl_ptr is not None:
        tl.store(forward_kl_ptr + column_program * parts_stride + offs_row, tl.sum(forward, 1), mask=in_rows)
    if teacher_entropy_ptr is not None:
        tl.store(teacher_entropy_ptr + column_program * parts_stride + offs_row, tl.sum(entropy, 1), mask=in_rows)


@triton.jit
def sum_of_parts(part_ptr, offs_row, in_rows, count, stride, BLOCK_ROWS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for start in range(0, count, BLOCK_PARTS):
        offs = start + tl.arange(0, BLOCK_PARTS)
        at = part_ptr + offs[:, None].to(tl.int64) * stride + offs_row[None, :]
        total += tl.sum(tl.load(at, mask=(offs < count)[:, None] & in_rows[None, :], other=0.0), 0)
    return total


@kernel
def add_parts_kernel(
    # outputs
    forward_kl_ptr,  # [rows] fp32 or None
    teacher_entropy_ptr,  # [rows] fp32 or None
    # inputs
    forward_kl_part_ptr,  # [count, rows] fp32 or None
    teacher_entropy_part_ptr,
    # sizes
    count,
    rows,
    parts_stride,  # from part to part
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    offs_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = offs_row < rows
    if forward_kl_ptr is not None:
        total = sum_of_parts(forward_kl_part_ptr, offs_row, in_rows, count, parts_stride, BLOCK_ROWS, BLOCK_PARTS)
        tl.store(forward_kl_ptr + offs_row, total, mask=in_rows)
    if teacher_entropy_ptr is not None:
        total = sum_of_parts(teacher_entropy_part_ptr, offs_row, in_rows, count, parts_stride, BLOCK_ROWS, BLOCK_PARTS)
        tl.store(teacher_entropy_ptr + offs_row, total, mask=in_rows)
