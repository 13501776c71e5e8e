"""The protocol of a store, and what stores share: three matrix products with one buffer."""

import torch
from torch import Tensor

from ..core.stats import Coefficients, Demand, RowStats
from ..plan.plans import Plan
from .gradients import Gradients
from .matmul import add_dbias, add_dhidden, add_dweight, put
from .operands import Head, Rows


class Store:
    """A way of keeping one chunk's logits, from the matmul that makes them until they have become gradients.

    A sweep calls ``fill``, ``statistics`` and ``add_gradients`` for one chunk after the other, ``finish`` at its end.
    Where statistics are known it calls ``add_gradients`` only.

    ``known_targets``: ``statistics`` leaves the target's logit of all ranks, where ranks share the vocabulary.
    ``pieces``: statistics of blocks of the vocabulary, which the last ``statistics`` left instead of the rows',
    [blocks, numbers, rows] as in ``GatheredStats``, its first row of the target's logit unwritten; or None.
    """

    head: Head
    demand: Demand
    known_targets = False
    pieces: Tensor | None = None

    def begin(self, hidden: Tensor, target: Tensor, scale: Tensor | None, out: RowStats) -> None:
        """Called before the first ``fill``, with all rows of the call: ``hidden`` [tokens, hidden] as given, ``target``
        and ``scale`` [tokens]. Where ranks share the vocabulary, this may exchange the targets' logits of all tokens in
        one message."""

    def fill(self, rows: Rows, out: RowStats) -> None:
        """Clean rows [rows, hidden] and their logits [rows, vocab]; statistics that this makes on the way."""
        raise NotImplementedError

    def statistics(self, rows: Rows, out: RowStats) -> None:
        """Statistics of the chunk filled last [rows], all that ``out`` has room for. Where ranks share the vocabulary
        they are those of this rank's columns, and ``pair_statistics`` follows once they have been merged. A teacher's
        come with the gradients where ``Plan.teacher_last``."""
        raise NotImplementedError

    def pair_statistics(self, rows: Rows, out: RowStats) -> None:
        """Statistics of a teacher together with the student, once ``out`` holds the softmaxes of both."""
        raise NotImplementedError

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        """Gradients of the chunk filled last, added to ``grads``. Where ``Plan.teacher_last``, ``stats`` receives a
        teacher's statistics."""
        raise NotImplementedError

    def finish(self, grads: Gradients) -> None:
        """Adds what had to wait until all chunks had been seen."""

    @property
    def over_ranks(self) -> bool:
        """Ranks share the vocabulary."""
        return self.head.add_targets is not None


class MatmulStore(Store):
    """Logits that a matmul makes of hidden states, and that become their gradient in one buffer.

    A ``tiled`` store is for blocks of tokens whose statistics are known: it makes logits, or their gradients, a tile of
    the vocabulary at a time.
    """

    plan: Plan
    tiled = False

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        if self.tiled:
            self.add_tiles(rows, stats, coefficients, grads)
            return
        coefficients, gain = self.fitted(rows, coefficients)
        dlogits = self.grad_(rows, stats, coefficients)
        first = rows.first == 0
        if grads.hidden is not None:
            made = grads.hidden_rows(rows.tokens)
            self.put_dhidden(dlogits, rows, made)
            if gain is not None:
                made.mul_(gain)
            grads.hidden_done(rows.tokens)
        if grads.weight is not None:
            self.add_dweight(dlogits, rows, rows.hidden, grads.weight, grads.stores(first), gain)
        if grads.bias is not None:
            add_dbias(dlogits, grads.bias, first, gain)

    def clean_rows(self, rows: Rows, out: RowStats | None) -> None:
        """``Backend.clean_rows`` of the rows' source into ``rows.hidden``; ``out`` may receive targets' logits."""
        raise NotImplementedError

    def grad_(self, rows: Rows, stats: RowStats, coefficients: Coefficients) -> Tensor:
        """The chunk filled last, turned in place into the gradient of its raw logits [rows, vocab]."""
        raise NotImplementedError

    def tile_grad(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        """The gradient of the raw logits in a slice of the vocabulary, whose statistics are known [rows, tile]."""
        raise NotImplementedError

    def fitted(self, rows: Rows, coefficients: Coefficients) -> tuple[Coefficients, Tensor | None]:
        """Coefficients of rows whose gradients of logits are in the range of their dtype, and the factor [] that was
        taken out for it; None for 1."""
        return coefficients, None

    def put_dhidden(self, dlogits: Tensor, rows: Rows, out: Tensor) -> None:
        """``out = dlogits @ weight`` [rows, hidden]"""
        add_dhidden(dlogits, self.head.weight, out, first=True)

    def tile_dhidden(self, dlogits: Tensor, rows: Rows, weight: Tensor, out: Tensor, first: bool) -> None:
        """``out = dlogits @ weight`` where ``first``, else added: rows' share of a tile [rows, hidden]."""
        add_dhidden(dlogits, weight, out, first)

    def add_dweight(
        self, dlogits: Tensor, rows: Rows, operand: Tensor, out: Tensor, first: bool, gain: Tensor | None = None
    ) -> None:
        """``out = gain * dlogits.T @ operand`` where ``first``, else added."""
        add_dweight(dlogits, operand, out, first, gain)

    def add_tiles(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        """Gradients of a block of tokens, a tile of the vocabulary at a time: a tile of the weight's gradient is one
        product per block."""
        plan, at, d_rows = self.plan, rows.tokens, None
        self.clean_rows(rows, None)
        if grads.hidden is not None:
            d_rows = grads.hidden_rows(at)
            if plan.hidden_accumulate != d_rows.dtype:
                d_rows = torch.zeros_like(d_rows, dtype=plan.hidden_accumulate)
        coefficients, gain = self.fitted(rows, coefficients)
        for tile in plan.column_tiles():
            dlogits = self.tile_grad(rows, tile, stats, coefficients)
            if d_rows is not None:
                self.tile_dhidden(dlogits, rows, self.head.weight[tile], d_rows, first=tile.start == 0)
            self.add_tile(dlogits, rows, grads, tile, gain)
        if d_rows is not None and grads.hidden is not None:
            if gain is not None:
                d_rows.mul_(gain)
            if d_rows.dtype != grads.hidden.dtype:
                grads.hidden_rows(at).copy_(d_rows)
        if grads.hidden is not None:
            grads.hidden_done(at)

    def add_tile(self, dlogits: Tensor, rows: Rows, grads: Gradients, tile: slice, gain: Tensor | None) -> None:
        """A tile's gradients of weight and bias, from ``dlogits`` [rows, columns]."""
        plan, first = self.plan, rows.first == 0
        if grads.bias is not None:
            add_dbias(dlogits, grads.bias[tile], first, gain)
        if grads.weight is None:
            return
        if not plan.sizes.through_fp32(plan.weight_accumulate):
            self.add_dweight(dlogits, rows, rows.hidden, grads.weight[tile], grads.stores(first))
            return
        product = torch.empty_like(grads.weight[tile], dtype=torch.float32)
        self.add_dweight(dlogits, rows, rows.hidden, product, first=True)
        if gain is not None:
            product.mul_(gain)
        put(grads.weight[tile], product, grads.stores(first))
