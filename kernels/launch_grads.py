"""Launching the matmul that leaves gradients of logits whose statistics are known, on torch tensors."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .grad_logits import grad_logits_kernel
from .launch import ALL_ROWS, Counted, programs_of
from .launch_rows import Softmax
from .tiles import FUSED, INTERPRETED, Tile, grad_tile


def grad_logits(
    dlogits: torch.Tensor,  # [rows, columns] 16 bit, row stride a multiple of 8
    hidden: torch.Tensor,  # [rows, hidden] contiguous
    weight: torch.Tensor,  # [columns, hidden] contiguous
    bias: torch.Tensor | None,  # [columns], as class_weights
    class_weights: torch.Tensor | None,
    target: torch.Tensor,  # [rows] int64, of the whole vocabulary
    target_logit: torch.Tensor,  # [rows] fp32, as all that follow
    first: Softmax,
    second: Softmax,
    beta: torch.Tensor | None,
    kappa: torch.Tensor | None,
    first_column: int,  # of these columns in the vocabulary
    logit_scale: float | None,
    softcap: float | None,
    counted: Counted = ALL_ROWS,
    tile: Tile | None = None,
) -> None:
    """``dlogits`` of ``hidden @ weight.T``, as ``launch_rows.row_grad`` makes them of stored logits."""
    rows, columns, width = *dlogits.shape, hidden.shape[1]
    tile = tile or grad_tile(width)
    programs = programs_of(tile, rows, columns, hidden.device)
    # a softmax that gets no gradient is not read
    if second.alpha is None:
        second = Softmax()
    grad_logits_kernel[(programs,)](
        TensorDescriptor.from_tensor(dlogits, [tile.block_m, tile.block_n // 2]),
        TensorDescriptor.from_tensor(hidden, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
        bias, class_weights, target, target_logit, beta, kappa, *first[:4], *second[:4],
        counted.count, counted.first_row, rows, columns, width, first_column, second.columns, logit_scale, softcap,
        second.ratio,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m, PROGRAMS=programs,
        UPCAST=INTERPRETED, num_warps=tile.warps, num_stages=tile.stages, **FUSED,
    )  # fmt: skip
