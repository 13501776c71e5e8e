"""Elementwise pieces of the head in torch operations, tiles of about a mebibyte at a time: they stay in the cache."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.stats import Coefficients
from ...kernels.common.tiles import LOG_FLOOR
from ...plan.sizes import slices
from ..operands import Head, Teacher

TILE_COLUMNS = 1 << 15
TILE_ELEMENTS = 1 << 18


def clean_rows(out: Tensor, source: Tensor, target: Tensor, order: Tensor | None) -> None:
    out.copy_(source if order is None else source[order]).masked_fill_((target < 0).unsqueeze(1), 0.0)


def logprobs_(x: Tensor, start: Tensor | None, rest: Tensor | None) -> Tensor:
    """Logits to log-probabilities, in place."""
    assert start is not None and rest is not None
    return x.sub_(start[:, None]).add_(rest[:, None])


def teacher_terms(log_p: Tensor, log_q: Tensor, c: Coefficients, beta: float | None, below: Tensor | None) -> Tensor:
    """The terms of the gradient identity that have a teacher in them; ``below`` [rows]: the sum of ``part_below``."""
    p, q = log_p.exp(), log_q.exp()
    grad = torch.zeros_like(p)
    if c.gamma is not None:
        grad -= c.gamma[:, None] * q
    if c.rho is not None:
        grad -= torch.where(p > 0, c.rho[:, None] * p * log_q.clamp(min=LOG_FLOOR), 0.0)
    if c.tau is not None:
        assert beta is not None
        grad += torch.where(p > 0, c.tau[:, None] * p * (log_p - log_mixture(log_q, log_p, beta)), 0.0)
    if c.theta is not None:
        assert below is not None
        below = below[:, None]
        # as in the kernels' identity: the sign of a column above 2/3 follows from the sum
        found = torch.where(below < 1 - p / 2, 0.0, torch.where(below > 1 + p / 2, 2 * p, p))
        grad += c.theta[:, None] * (p * below - torch.where(p > 0.75, found, part_below(p, q)))
    return grad


def part_below(p: Tensor, q: Tensor) -> Tensor:
    return p * (1 - (p - q).sign())


def log_mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """``log(beta q + (1 - beta) p)``"""
    return torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Rows that make a tile of the cache's size."""
    rows, columns = logits.shape
    return slices(rows, block_rows(columns))


def block_rows(columns: int) -> int:
    return max(1, TILE_ELEMENTS // max(1, min(columns, TILE_COLUMNS)))


def transform_(x: Tensor, bias: Tensor | None, head: Head | Teacher, scale: Tensor | None) -> None:
    """Bias, scale and cap in place, and at last the rows' ``scale``, tile by tile."""
    scale = scale if head.scaled else None
    if bias is None and head.softcap is None and head.logit_scale == 1.0 and scale is None:
        return
    for rows in row_blocks(x):
        for columns in slices(x.shape[1], TILE_COLUMNS):
            part = x[rows, columns]
            if bias is not None:
                part.add_(bias[columns])
            if head.softcap is not None:
                part.mul_(head.logit_scale / head.softcap).tanh_().mul_(head.softcap)
            elif head.logit_scale != 1.0:
                part.mul_(head.logit_scale)
            if scale is not None:
                part.mul_(scale[rows, None])


def slope(x: Tensor, head: Head, scale: Tensor | None) -> Tensor | float:
    """d x / d raw logit, from the transformed logit; ``scale``: of the rows."""
    if scale is not None:
        scale = scale.view(-1, *[1] * (x.dim() - 1))
    if head.softcap is None:
        return head.logit_scale if scale is None else head.logit_scale * scale
    capped = x / head.softcap if scale is None else x / (head.softcap * scale)
    bend = capped.square_().neg_().add_(1.0).mul_(head.logit_scale)
    return bend if scale is None else bend.mul_(scale)
