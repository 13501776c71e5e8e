"""Buffers of gradients, and how gradients of logits are added to them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .matmul import add_dbias, add_dhidden, add_dweight, put
from .plans import Plan
from .stats import Coefficients, Head, Rows, RowStats

if TYPE_CHECKING:
    from .backends import Backend


@dataclass
class Gradients:
    """Gradients, or what waits to become them once the upstream gradient is known; None where nobody asks."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def empty(cls, plan: Plan, hidden: torch.dtype, weight: torch.dtype, device: torch.device) -> "Gradients":
        sizes = plan.sizes

        def buffer(wanted: bool, dtype: torch.dtype, *shape: int) -> Tensor | None:
            # without tokens no product fills them
            make = torch.empty if sizes.tokens else torch.zeros
            return make(shape, dtype=dtype, device=device) if wanted else None

        return cls(
            buffer(sizes.hidden_grad, hidden, sizes.tokens, sizes.hidden),
            buffer(sizes.weight_grad, weight, sizes.vocab, sizes.hidden),
            buffer(sizes.bias_grad, torch.promote_types(sizes.dtype, torch.float32), sizes.vocab),
        )

    def finish(
        self, backend: "Backend", factor: Tensor, plan: Plan
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Times the last factor, in the dtypes of the inputs; each buffer is let go before the next is handed over."""
        dtypes = plan.sizes.hidden_dtype, plan.sizes.weight_dtype, plan.sizes.bias_dtype or plan.sizes.weight_dtype
        finished = []
        for field, dtype in zip(("hidden", "weight", "bias"), dtypes, strict=True):
            buffer = getattr(self, field)
            setattr(self, field, None)
            finished.append(None if buffer is None else backend.scale(buffer, factor, dtype))
        return finished[0], finished[1], finished[2]


def add_tile(
    dlogits: Tensor,  # [rows, columns]
    rows: Tensor,  # [rows, hidden]
    weight: Tensor,  # [columns, hidden]
    d_rows: Tensor | None,  # [rows, hidden]
    grads: Gradients,
    tile: slice,
    first_block: bool,
    gain: Tensor | None,
    plan: Plan,
) -> None:
    """A tile's share of every gradient."""
    if d_rows is not None:
        add_dhidden(dlogits, weight, d_rows, first=tile.start == 0)
    if grads.bias is not None:
        add_dbias(dlogits, grads.bias[tile], first_block, gain)
    if grads.weight is None:
        return
    if not plan.sizes.through_fp32(plan.weight_accumulate):
        add_dweight(dlogits, rows, grads.weight[tile], first_block)
        return
    product = torch.empty_like(grads.weight[tile], dtype=torch.float32)
    add_dweight(dlogits, rows, product, first=True)
    if gain is not None:
        product.mul_(gain)
    put(grads.weight[tile], product, first_block)


class AddsDlogits:
    """A session whose buffer becomes the gradient of logits: three plain products with it."""

    head: Head

    def grad_(self, rows: Rows, stats: RowStats, coefficients: Coefficients) -> Tensor:
        """The chunk seen last, turned in place into the gradient of its raw logits [rows, vocab]."""
        raise NotImplementedError

    def add_gradients(
        self, at: slice, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients
    ) -> None:
        dlogits = self.grad_(rows, stats, coefficients)
        first = at.start == 0
        if grads.hidden is not None:
            add_dhidden(dlogits, self.head.weight, grads.hidden[at], first=True)
        if grads.weight is not None:
            add_dweight(dlogits, rows.hidden, grads.weight, first)
        if grads.bias is not None:
            add_dbias(dlogits, grads.bias, first)

    def finish(self, hidden: Tensor, target: Tensor, grads: Gradients) -> None:
        """Nothing is left over."""

    def tile_grad(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        raise AssertionError("tiles of gradients with known statistics have sessions of their own")
