"""One call's buffer of logits and what is done in it, as far as backends share it."""

import torch
from torch import Tensor

from ..core.stats import Coefficients, Head, Rows, RowStats
from ..plan.plans import Plan
from .gradients import Gradients
from .matmul import add_dbias, add_dhidden, add_dweight, put


class Session:
    """Logits of a chunk of rows in a reused buffer, which becomes the gradient of these logits: three plain products
    with it, unless a session says otherwise. One whose statistics are known beforehand makes tiles of gradients.

    ``known_targets``: its ``stats`` leave the target's logit whole where ranks share the vocabulary, not each rank's
    part.
    ``pieces``: statistics that its last ``stats`` left of blocks of the vocabulary instead, [blocks, numbers, rows] as
    in ``GatheredStats``, its first row of the target's logit unwritten; or None.
    """

    head: Head
    known_targets = False
    pieces: Tensor | None = None

    def clean_rows(self, rows: Rows, source: Tensor, order: Tensor | None, stats: RowStats | None) -> None:
        """``Backend.clean_rows`` of the source into ``rows.hidden``, before ``stats`` of these rows, which may have
        their targets' logits by it."""
        raise NotImplementedError

    def exchange_target_logits(self, hidden: Tensor, target: Tensor, scale: Tensor | None, out: RowStats) -> None:
        """Where ranks share the vocabulary, every token's target logit in one message if ``stats`` would send each
        chunk's; ``hidden`` [tokens, hidden] as given, ``target`` and ``scale`` [tokens] beside it."""

    def stats(self, rows: Rows, out: RowStats) -> None:
        """Logits of a chunk of rows into the buffer, and every statistic that ``out`` has room for, a teacher's beside
        the student apart, and a teacher's where ``Plan.teacher_last``."""
        raise NotImplementedError

    def pair_stats(self, rows: Rows, out: RowStats) -> None:
        """Those, once ``out`` holds the softmaxes of both."""
        raise NotImplementedError

    def grad_(self, rows: Rows, stats: RowStats, coefficients: Coefficients) -> Tensor:
        """The chunk seen last, turned in place into the gradient of its raw logits [rows, vocab]."""
        raise NotImplementedError

    def add_gradients(
        self, at: slice, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients
    ) -> None:
        """Gradients of the chunk that ``stats`` saw last, rows ``at`` of the call, added to ``grads``. Where
        ``Plan.teacher_last``, ``stats`` receives a teacher's statistics, alone and beside the student."""
        coefficients, gain = self.fitted(rows, coefficients)
        dlogits = self.grad_(rows, stats, coefficients)
        first = at.start == 0
        if grads.hidden is not None:
            made = grads.hidden_rows(at)
            self.put_dhidden(dlogits, rows, made)
            if gain is not None:
                made.mul_(gain)
            grads.hidden_done(at)
        if grads.weight is not None:
            self.add_dweight(dlogits, rows, rows.hidden, grads.weight, grads.stores(first), gain)
        if grads.bias is not None:
            add_dbias(dlogits, grads.bias, first, gain)

    def fitted(self, rows: Rows, coefficients: Coefficients) -> tuple[Coefficients, Tensor | None]:
        """Coefficients of rows whose gradients of logits are in the range of their dtype, and the factor [] that was
        taken out for it; None for 1."""
        return coefficients, None

    def put_dhidden(self, dlogits: Tensor, rows: Rows, out: Tensor) -> None:
        """The product with the weight into ``out`` [rows, hidden]."""
        add_dhidden(dlogits, self.head.weight, out, first=True)

    def finish(self, at: slice, hidden: Tensor, target: Tensor, grads: Gradients, order: Tensor | None) -> None:
        """What was left over until rows ``at``, all of the call's where there are all, had been seen.

        ``hidden`` [rows, hidden] as given, ``order`` where in it each row stands, ``target`` -1 where its column is
        none of these.
        """

    def tile_grad(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        """The gradient of the raw logits in a slice of the vocabulary, whose statistics are known [rows, tile]."""
        raise NotImplementedError

    def tile_dhidden(self, dlogits: Tensor, rows: Rows, weight: Tensor, out: Tensor, first: bool) -> None:
        """``out = dlogits @ weight`` where ``first``, else added: rows' share of a tile [rows, hidden]."""
        add_dhidden(dlogits, weight, out, first)

    def add_dweight(
        self, dlogits: Tensor, rows: Rows, operand: Tensor, out: Tensor, first: bool, gain: Tensor | None = None
    ) -> None:
        """``out = gain * dlogits.T @ operand`` where ``first``, else added."""
        add_dweight(dlogits, operand, out, first, gain)

    def add_tile(
        self,
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
            self.tile_dhidden(dlogits, rows, weight, d_rows, first=tile.start == 0)
        if grads.bias is not None:
            add_dbias(dlogits, grads.bias[tile], first_block, gain)
        if grads.weight is None:
            return
        if not plan.sizes.through_fp32(plan.weight_accumulate):
            self.add_dweight(dlogits, rows, rows.hidden, grads.weight[tile], grads.stores(first_block))
            return
        product = torch.empty_like(grads.weight[tile], dtype=torch.float32)
        self.add_dweight(dlogits, rows, rows.hidden, product, first=True)
        if gain is not None:
            product.mul_(gain)
        put(grads.weight[tile], product, grads.stores(first_block))
