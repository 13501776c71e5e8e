"""Orders of the vocabulary in which tiles of 128 rows can be skipped more often (``skip_tolerance``)."""

import math

import torch
from torch import Tensor

from . import checks

STRIP = 128  # rows of the weight that are skipped or kept together
ITERATIONS = 12


def frequency_order(counts: Tensor) -> Tensor:
    """Token ids by descending ``counts`` [vocab], ties by id: [vocab] int64. For a head that is trained from scratch.

    Most of the softmax then lies in few tiles. A head stored in an order needs only its targets' rows at run time:

        order = frequency_order(torch.bincount(tokens.flatten(), minlength=vocab))
        rank = torch.empty_like(order)
        rank[order] = torch.arange(vocab, device=order.device)  # token id -> row
        weight = torch.nn.Parameter(weight[order])  # once
        linear_cross_entropy(hidden, weight, rank[target], skip_tolerance=4e-3)

    ValueError unless ``counts`` is a vector of finite numbers that are not negative.
    """
    checks.check_tensor("counts", counts, optional=False)
    if counts.dim() != 1 or not len(counts):
        raise ValueError(f"counts must be a vector with a number for each token id, got shape {tuple(counts.shape)}")
    if counts.dtype == torch.bool or counts.is_complex():
        raise ValueError(f"counts must be integers or floats, got {counts.dtype}")
    least, most = (float(value) for value in torch.aminmax(counts))
    if not (least >= 0.0 and most < math.inf):
        raise ValueError(f"counts must be finite and not negative, got values from {least:g} to {most:g}")
    return torch.sort(counts, descending=True, stable=True).indices


@torch.no_grad()
def similarity_order(weight: Tensor) -> Tensor:
    """Token ids in an order that puts rows of ``weight`` [vocab, hidden] beside rows like them: [vocab] int64. For a
    head that has been trained; used as ``frequency_order``'s.

    A mean row stands better for rows that are alike, so that the same error leaves out more tiles. Rows are halved
    along their first principal direction until 128 are left: seconds on a GPU.

    ValueError unless ``weight`` is a matrix of finite numbers.
    """
    checks.check_tensor("weight", weight, optional=False)
    if weight.dim() != 2 or not weight.numel() or not weight.is_floating_point():
        raise ValueError(
            f"weight must be a floating-point [vocab, hidden], got {weight.dtype} of shape {tuple(weight.shape)}"
        )
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight must be finite, got nan or inf in it")
    waiting = [torch.arange(len(weight), device=weight.device)]
    strips = []
    while waiting:
        ids = waiting.pop()
        if len(ids) <= STRIP:
            strips.append(ids)
            continue
        ordered = ids[torch.sort(along_principal(weight[ids].float()), stable=True).indices]
        half = max(1, round(len(ids) / (2 * STRIP))) * STRIP
        waiting += [ordered[half:], ordered[:half]]
    return torch.cat(strips)


def along_principal(rows: Tensor) -> Tensor:
    """Coordinates [rows] of rows [rows, hidden] along the direction in which they differ most."""
    rows = rows - rows.mean(0)
    direction = rows[rows.square().sum(1).argmax()]
    for _ in range(ITERATIONS):
        direction = rows.t() @ (rows @ direction)
        direction = direction / direction.norm().clamp(min=1e-30)
    return rows @ direction
