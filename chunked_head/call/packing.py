"""Tokens in another order: those that count before those that do not, which then cost no matmul, or segments that
belong together side by side."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """An order of a call's tokens: those that count first, in the order in which they stand, or one the host names.

    Hidden states are copied into this order where a pass over them begins, and their gradient is put back at its end.
    Either nobody but the device knows how many count: ``order`` holds all tokens, and the matmuls stop at ``count``.
    Or ``count`` is None, and the matmuls are over all that ``order`` holds: those that count, where the host has waited
    for their number, or all tokens.
    """

    order: Tensor  # [kept] int64: where each token stands in the call's tensors
    count: Tensor | None  # [] int64
    tokens: int  # of the call

    @classmethod
    def of(cls, target: Tensor, wait: bool, kept: Tensor | None = None) -> "Packing":
        """From each row's target, -1 where it does not count; rows ``kept`` [tokens], which no matmul makes the logits
        of, come after the others that count."""
        counts = target >= 0
        last = (~counts).to(torch.uint8) * 2
        first = counts if kept is None else counts & ~kept
        order = torch.sort(last if kept is None else last | kept, stable=True).indices
        if wait:
            return cls(order[: int(counts.sum())], None, len(target))
        return cls(order, first.sum(), len(target))

    def pack(self, values: Tensor) -> Tensor:
        """Values [tokens, ...] in this order [kept, ...]."""
        return values.index_select(0, self.order)

    def places(self, rows: Tensor) -> Tensor:
        """Where rows of the call stand in this order, -1 for those that are none."""
        place = torch.full((self.tokens + 1,), -1, dtype=torch.int64, device=rows.device)
        place[self.order] = torch.arange(len(self.order), device=rows.device)
        return place[rows]  # -1 is the last

    def unpack(self, values: Tensor) -> Tensor:
        """Values [kept, ...] at their tokens' places [tokens, ...], 0 elsewhere; differentiable."""
        everywhere = values.new_zeros(self.tokens, *values.shape[1:])
        return everywhere.index_copy(0, self.order, values)
