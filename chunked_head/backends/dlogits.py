"""Gradients of logits, multiplied into the gradients of hidden states, weight and bias."""

import torch
from torch import Tensor

from ..core.stats import Coefficients, Head, Rows, RowStats
from ..program.plans import Plan
from .gradients import Gradients
from .matmul import add_dbias, add_dhidden, add_dweight, put
from .protocol import Session


def add_tile(
    session: Session,
    dlogits: Tensor,  # [rows, columns]
    rows: Rows,
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
        session.tile_dhidden(dlogits, rows, weight, d_rows, first=tile.start == 0)
    if grads.bias is not None:
        add_dbias(dlogits, grads.bias[tile], first_block, gain)
    if grads.weight is None:
        return
    if not plan.sizes.through_fp32(plan.weight_accumulate):
        session.add_dweight(dlogits, rows, rows.hidden, grads.weight[tile], grads.stores(first_block))
        return
    product = torch.empty_like(grads.weight[tile], dtype=torch.float32)
    session.add_dweight(dlogits, rows, rows.hidden, product, first=True)
    if gain is not None:
        product.mul_(gain)
    put(grads.weight[tile], product, grads.stores(first_block))


class AddsDlogits:
    """A session whose buffer becomes the gradient of logits: three plain products with it."""

    head: Head
    known_targets = False
    pieces: Tensor | None = None

    def grad_(self, rows: Rows, stats: RowStats, coefficients: Coefficients) -> Tensor:
        """The chunk seen last, turned in place into the gradient of its raw logits [rows, vocab]."""
        raise NotImplementedError

    def exchange_target_logits(self, hidden: Tensor, target: Tensor, scale: Tensor | None, out: RowStats) -> None:
        """Targets' logits come with the statistics."""

    def add_gradients(
        self, at: slice, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients
    ) -> None:
        dlogits = self.grad_(rows, stats, coefficients)
        first = at.start == 0
        if grads.hidden is not None:
            self.put_dhidden(dlogits, rows, grads.hidden_rows(at, rows.order))
            grads.hidden_done(at, rows.order)
        if grads.weight is not None:
            self.add_dweight(dlogits, rows, rows.hidden, grads.weight, grads.stores(first), grads.gain)
        if grads.bias is not None:
            add_dbias(dlogits, grads.bias, first)

    def put_dhidden(self, dlogits: Tensor, rows: Rows, out: Tensor) -> None:
        """The product with the weight into ``out`` [rows, hidden], or where ``rows.order`` says of [tokens, hidden]."""
        add_dhidden(dlogits, self.head.weight, out, first=True)

    def tile_dhidden(self, dlogits: Tensor, rows: Rows, weight: Tensor, out: Tensor, first: bool) -> None:
        """The product of a tile's gradients with its rows of the weight, into ``out`` [rows, hidden]."""
        add_dhidden(dlogits, weight, out, first)

    def add_dweight(
        self, dlogits: Tensor, rows: Rows, operand: Tensor, out: Tensor, first: bool, gain: Tensor | None = None
    ) -> None:
        """The product with hidden states, or those times what ``dlogits`` lacks."""
        add_dweight(dlogits, operand, out, first, gain)

    def finish(self, at: slice, hidden: Tensor, target: Tensor, grads: Gradients, order: Tensor | None) -> None:
        """Nothing is left over."""

    def tile_grad(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        raise AssertionError("tiles of gradients with known statistics have sessions of their own")
