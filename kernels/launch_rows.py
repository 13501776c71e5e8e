"""Launching the kernels that walk stored logits, on torch tensors."""

import math
from typing import NamedTuple

import torch

from .columns import column_grad_kernel, dot_columns_kernel, pick_columns_kernel
from .merge_ranks import merge_ranks_kernel
from .pair_stats import pair_stats_kernel
from .row_grad import row_grad_kernel
from .row_stats import row_stats_kernel
from .tiles import FUSED, INTERPRETED, RELATIVE_STRIP, cdiv, power_of_2


class Stored(NamedTuple):
    """Logits in a buffer: raw, or relative to the offsets of their strips."""

    logits: torch.Tensor  # [rows, columns], columns contiguous
    offset: torch.Tensor | None  # [strips, rows] fp32; then what follows is in the logits already
    bias: torch.Tensor | None = None
    logit_scale: float | None = None
    softcap: float | None = None


def row_block(columns: int) -> tuple[int, int]:
    """Elements a step and warps of the kernels that walk a row."""
    block = min(power_of_2(columns), 1024 if INTERPRETED else 8192)
    return max(block, 128), 4 if block < 2048 else 16


def row_stats(
    lse: torch.Tensor | None,  # [rows] fp32, as all outputs
    start: torch.Tensor,
    rest: torch.Tensor,
    logprob: torch.Tensor | None,
    target_logit: torch.Tensor | None,
    entropy: torch.Tensor | None,
    weighted_sum: torch.Tensor | None,
    top: torch.Tensor | None,
    argmax: torch.Tensor | None,
    stored: Stored,  # raw
    columns: int,
    target: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    ratio: float | None,
) -> None:
    logits = stored.logits
    assert stored.offset is None
    block, warps = row_block(columns)
    row_stats_kernel[(logits.shape[0],)](
        lse, start, rest, logprob, target_logit, entropy, weighted_sum, top, argmax,
        logits, target, stored.bias, class_weights,
        columns, logits.stride(0), stored.logit_scale, stored.softcap, ratio, BLOCK=block, num_warps=warps, **FUSED,
    )  # fmt: skip


def pair_stats(
    forward_kl: torch.Tensor | None,  # [rows] fp32, as all outputs
    reverse_kl: torch.Tensor | None,
    teacher_entropy: torch.Tensor | None,
    kl_mixture: torch.Tensor | None,
    jsd: torch.Tensor | None,
    tvd: torch.Tensor | None,
    sign: torch.Tensor | None,
    student: Stored,
    start: torch.Tensor,
    rest: torch.Tensor,
    ratio: float | None,
    teacher: Stored,
    teacher_start: torch.Tensor,
    teacher_rest: torch.Tensor,
    columns: int,
    beta: float | None,
    floor: float,
) -> None:
    rows = student.logits.shape[0]
    block = min(row_block(columns)[0], 2048)
    pair_stats_kernel[(rows,)](
        forward_kl, reverse_kl, teacher_entropy, kl_mixture, jsd, tvd, sign,
        student.logits, student.offset, student.bias, start, rest,
        teacher.logits, teacher.offset, teacher.bias, teacher_start, teacher_rest,
        rows, columns, student.logits.stride(0), teacher.logits.stride(0),
        student.logit_scale, student.softcap, ratio, teacher.logit_scale, teacher.softcap,
        BETA=beta, **mixture(beta), FLOOR=floor, STRIP=RELATIVE_STRIP, BLOCK=block, num_warps=4, **FUSED,
    )  # fmt: skip


def mixture(beta: float | None) -> dict[str, float]:
    return {"LOG_BETA": 0.0, "LOG_REST": 0.0} if beta is None else {
        "LOG_BETA": math.log(beta), "LOG_REST": math.log1p(-beta)
    }  # fmt: skip


class Softmax(NamedTuple):
    """A softmax of a gradient: ``log p = (ratio x - start) + rest`` over so many columns, its term
    ``p (alpha + eta log p)``; the first is over all at ratio 1."""

    start: torch.Tensor | None = None
    rest: torch.Tensor | None = None
    alpha: torch.Tensor | None = None
    eta: torch.Tensor | None = None
    ratio: float | None = None
    columns: int = 0


NO_SOFTMAX = Softmax()


class Beside(NamedTuple):
    """The teacher's side of a gradient."""

    stored: Stored
    start: torch.Tensor
    rest: torch.Tensor
    columns: int
    second: bool  # the student's softmax beside it is the second one
    gamma: torch.Tensor | None
    rho: torch.Tensor | None
    tau: torch.Tensor | None
    theta: torch.Tensor | None
    beta: float | None
    floor: float


def beside_arguments(beside: Beside | None) -> tuple[tuple, tuple[int, int], tuple, dict]:
    """A teacher as the kernels take it: tensors, columns and stride, scale and cap, constants; None for none."""
    if beside is None:
        return (None,) * 9, (0, 0), (None, None), {"SECOND": False, **mixture(None), "FLOOR": 0.0}
    side = beside.stored
    tensors = (side.logits, side.offset, side.bias, *beside[1:3], *beside[5:9])
    constants = {"SECOND": beside.second, **mixture(beside.beta), "FLOOR": beside.floor}
    return tensors, (beside.columns, side.logits.stride(0)), (side.logit_scale, side.softcap), constants


def row_grad(
    dlogits: torch.Tensor,  # [rows, columns], may share the bytes of the stored logits
    stored: Stored,
    class_weights: torch.Tensor | None,
    target: torch.Tensor,
    target_logit: torch.Tensor,
    first: Softmax,
    second: Softmax,
    beta: torch.Tensor | None,
    kappa: torch.Tensor | None,
    beside: Beside | None,
    first_column: int,
    logit_scale: float | None,
    softcap: float | None,
    relative: tuple[int, int, int] = (8, 8, 4),  # rows, strips and warps of a program over relative logits
) -> None:
    rows, columns = dlogits.shape
    if stored.offset is not None:
        block_rows, strips, warps = relative
        # several strips a program: what is per row is loaded once for them
        block = RELATIVE_STRIP
        column_programs = cdiv(cdiv(columns, block), strips)
    else:
        # one program walks a row, because a narrower gradient overwrites logits that lie before it
        block_rows, column_programs = 1, 1
        block, warps = row_block(columns)
        block = min(block, 4096) if beside else block
    teacher, sizes, scalars, constants = beside_arguments(beside)
    row_grad_kernel[(column_programs * cdiv(rows, block_rows),)](
        dlogits, stored.logits, stored.offset, stored.bias, class_weights, target, target_logit, beta, kappa,
        *first[:4], *second[:4], *teacher,
        rows, columns, first_column, second.columns, sizes[0],
        stored.logits.stride(0), dlogits.stride(0), sizes[1],
        logit_scale, softcap, second.ratio, *scalars,
        **constants,
        COLUMN_PROGRAMS=column_programs, STRIP=RELATIVE_STRIP, BLOCK_ROWS=block_rows, BLOCK=block, num_warps=warps,
        **FUSED,
    )  # fmt: skip


def dot_columns(
    logit: torch.Tensor,  # [rows, count] fp32
    hidden: torch.Tensor,  # [rows, hidden], columns contiguous
    weight: torch.Tensor,  # [vocab, hidden] contiguous
    ids: torch.Tensor,  # [rows, count] int64 contiguous, -1 for none
    bias: torch.Tensor | None,
    logit_scale: float | None,
    softcap: float | None,
) -> None:
    rows, count = ids.shape
    # a target has a program of its own, whatever else is asked for: the same sum in the same order in every call
    at_once, block = (1, 2048) if count == 1 else (8, 512)
    dot_columns_kernel[(rows, cdiv(count, at_once))](
        logit, hidden, weight, ids, bias, hidden.shape[1], hidden.stride(0), count, logit_scale, softcap,
        AT_ONCE=at_once, BLOCK=min(power_of_2(hidden.shape[1]), block), num_warps=4, **FUSED,
    )  # fmt: skip


def pick_columns(logit: torch.Tensor, stored: Stored, ids: torch.Tensor) -> None:
    rows, count = ids.shape
    pick_columns_kernel[(rows,)](
        logit, stored.logits, ids, stored.bias, count, stored.logits.stride(0), stored.logit_scale, stored.softcap,
        BLOCK=power_of_2(count), num_warps=1, **FUSED,
    )  # fmt: skip


def column_grad(
    dlogits: torch.Tensor,
    logit: torch.Tensor,  # [rows, count] fp32
    ids: torch.Tensor,  # [rows, count] int64
    sparse: torch.Tensor,  # [rows, count] fp32
    class_weights: torch.Tensor | None,
    target: torch.Tensor,
    target_logit: torch.Tensor,
    first: Softmax,
    second: Softmax,
    beta: torch.Tensor | None,
    kappa: torch.Tensor | None,
    beside: Beside | None,
    first_column: int,
    logit_scale: float | None,
    softcap: float | None,
) -> None:
    rows, count = ids.shape
    columns = dlogits.shape[1]
    teacher, sizes, scalars, constants = beside_arguments(beside)
    column_grad_kernel[(rows,)](
        dlogits, logit, ids, sparse, class_weights, target, target_logit, beta, kappa,
        *first[:4], *second[:4], *teacher,
        rows, columns, first_column, second.columns, sizes[0], count, dlogits.stride(0), sizes[1],
        logit_scale, softcap, second.ratio, *scalars, **constants,
        STRIP=RELATIVE_STRIP, BLOCK=power_of_2(count), num_warps=1, **FUSED,
    )  # fmt: skip


def merge_ranks(
    start: torch.Tensor,  # [rows] fp32, as all outputs but argmax
    rest: torch.Tensor,
    lse: torch.Tensor | None,
    logprob: torch.Tensor | None,
    target_logit: torch.Tensor | None,
    entropy: torch.Tensor | None,
    weighted_sum: torch.Tensor | None,
    top: torch.Tensor | None,
    argmax: torch.Tensor | None,  # int32
    gathered: torch.Tensor,  # [ranks, numbers, rows] fp32
    zero_or_nan: torch.Tensor | None,  # [] fp32
    target: torch.Tensor,  # [rows] int64
    ratio: float,
    places: dict[str, int],  # of the numbers START, REST, TARGET, ENTROPY, WEIGHTED, TOP and ARGMAX, -1 for none
    known_targets: bool,
) -> None:
    """One softmax over the vocabulary from those over its pieces, and what goes with it."""
    ranks, numbers, rows = gathered.shape
    block = 64
    merge_ranks_kernel[(cdiv(rows, block),)](
        start, rest, lse, logprob, target_logit, entropy, weighted_sum, top, argmax, gathered, zero_or_nan, target,
        ranks, numbers, rows, ratio, **places, KNOWN_TARGETS=known_targets, BLOCK=block, SCAN=1024,
        num_warps=4, **FUSED,
    )  # fmt: skip
