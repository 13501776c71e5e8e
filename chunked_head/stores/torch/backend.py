"""The head in torch operations, for the CPU and any device that has no Triton.

Logits are kept in fp32 (fp64 for fp64 operands). Elementwise work goes tile by tile, about a mebibyte each: a tile
stays in the processor's cache through all operations on it, and temporaries are no larger.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...core.stats import shift_left
from ...parallel.merge import merge_ranks as merge_ranks
from ...plan.sizes import Store as StoreName
from ...plan.sizes import slices
from ..operands import Teacher
from ..protocol import Layout, Targets
from . import tiles as tiles
from .sets import TorchSets
from .sets import kept_sets as kept_sets
from .store import GivenView, TorchStore
from .tiles import clean_rows as clean_rows

name = "torch"
store_of, sets_store, view_store = TorchStore, TorchSets, GivenView


def check(device: torch.device, dtype: torch.dtype, what: str) -> None:
    """It computes with everything, everywhere."""


def store(layout: Layout) -> StoreName:
    return "logits"


def teacher_store(teacher: Teacher, store: StoreName) -> Literal["relative", "logits"] | None:
    return "logits"


def traits(device: torch.device) -> dict[str, Any]:
    return {"half_products": False, "scratch": 4 * tiles.TILE_ELEMENTS}


def read_targets(
    target: Tensor,
    mask: Tensor | None,
    shift: int,
    ignore_index: int,
    vocab: int,
    dtype: torch.dtype,
    rows: int | None = None,
) -> Targets:
    paired = shift_left(target, shift, ignore_index).reshape(-1)
    counts = paired != ignore_index
    if mask is not None:
        counts &= shift_left(mask, shift, 0).reshape(-1)
    inside = (paired >= 0) & (paired < vocab)
    one_or_nan = torch.ones((), dtype=dtype, device=target.device)
    one_or_nan.masked_fill_((counts & ~inside).any(), torch.nan)
    counts &= inside
    counted = counts.sum().to(dtype)
    paired = torch.where(counts, paired, -1)
    return Targets(followed(paired, rows, -1), counted, one_or_nan, one_or_nan / counted.clamp(min=1.0))


def read_fields(values: Sequence[Tensor], target: Tensor, shift: int, dtype: torch.dtype) -> list[Tensor]:
    ignored = target < 0
    shifted = [shift_left(value, shift, 0).reshape(-1) for value in values]
    return [followed(value, len(target), 0).to(dtype).masked_fill(ignored, 0.0) for value in shifted]


def followed(values: Tensor, rows: int | None, fill: int) -> Tensor:
    """Values [tokens], and behind them ``fill`` for rows that are no token's."""
    more = 0 if rows is None else rows - len(values)
    return torch.nn.functional.pad(values, (0, more), value=fill) if more else values


def bounds_rows(store: StoreName) -> bool:
    return False


def sum_rows(table: Tensor, parts: int, inverse: Tensor, one_or_nan: Tensor) -> tuple[Tensor, Tensor]:
    sums = torch.stack([row * (inverse if i < parts else one_or_nan) for i, row in enumerate(table.sum(1))])
    return sums[0].clone(), sums


def scale_(sources: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    factor = functools.reduce(torch.mul, factors)
    if factors[0].device.type == "cpu" and factor == 1:  # elsewhere to look would be to wait for the device
        return
    for source in sources:
        source.mul_(factor)


def scale(source: Tensor, factors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    factor = functools.reduce(torch.mul, factors)
    out = torch.empty_like(source, dtype=dtype)
    for part in slices(source.numel(), tiles.TILE_ELEMENTS):
        out.view(-1)[part] = source.view(-1)[part] * factor
    return out
