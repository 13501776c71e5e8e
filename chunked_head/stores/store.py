"""The protocol of a store, what stores that multiply have in common, and the store of logits that exist already."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..core.stats import Coefficients, Demand, RowStats
from ..plan.plans import Plan
from ..plan.sizes import LOOP, SWEEP, Buffer, Phase, Sizes, padded_columns, slices
from .gradients import Gradients
from .matmul import add_dhidden, add_dweight, put
from .operands import Head, Rows


class Store:
    """A way of keeping one chunk's logits, from the matmul that makes them until they have become gradients.

    A sweep calls ``fill``, ``statistics`` and ``add_gradients`` for one chunk after the other, ``finish`` at its end.
    Where statistics are known it calls ``add_gradients`` only. Where there is a dense teacher, ``pair_statistics``
    follows ``statistics``, unless ``Plan.teacher_last``: then these and the teacher's come with the gradients.

    ``known_targets``: ``statistics`` writes the logit of every row's target, though another rank may have its column.
    """

    name = "logits"
    description = "logits"  # of what is kept
    bounds_rows = False  # its matmuls can stop at a number of rows that only the device knows
    multiplies = True  # False: its logits come from gathered rows of the weight, not from a matmul
    head: Head
    demand: Demand
    known_targets = False

    @classmethod
    def buffers(cls, sizes: Sizes, rows: int, last: Phase, stored: bool) -> Iterator[Buffer]:
        """Memory of a chunk of ``rows`` until the phase ``last``, LOOP where its gradients are made; ``stored``: its
        logits too. What all stores need, such as operands, ``plan/plans.py`` adds."""
        return iter(())

    @classmethod
    def tile_buffers(cls, sizes: Sizes, rows: int, columns: int) -> Iterator[Buffer]:
        """Memory of a tile of logits of known statistics, or of their gradients."""
        return iter(())

    def fill(self, rows: Rows, out: RowStats) -> None:
        """Clean rows [rows, hidden] and their logits [rows, vocab]; statistics that this makes on the way."""

    def statistics(self, rows: Rows, out: RowStats) -> None:
        """Statistics of the chunk filled last [rows], all that ``out`` has room for. Where ranks share the vocabulary
        they are those of this rank's columns."""

    def pair_statistics(self, rows: Rows, out: RowStats) -> None:
        """Statistics of a teacher together with the student, once ``out`` holds the softmaxes of both."""

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        """Gradients of the chunk filled last, added to ``grads``."""

    def finish(self, grads: Gradients) -> None:
        """Adds terms of gradients that need all chunks."""


class MatmulStore(Store):
    """Logits that a matmul makes of hidden states, and that become their gradient in one buffer.

    A ``tiled`` store is for blocks of tokens whose statistics are known: it makes logits, or their gradients, a tile of
    the vocabulary at a time.
    """

    # [rows, hidden] from rows [rows, hidden] as given, targets [rows] and an order of the rows: ``Backend.clean_rows``
    clean_rows: Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
    # [rows, columns] the gradient of the raw logits of a slice of the vocabulary
    gradient: Callable[[Rows, slice, RowStats, Coefficients], Tensor]

    @classmethod
    def buffers(cls, sizes: Sizes, rows: int, last: Phase, stored: bool) -> Iterator[Buffer]:
        if stored:
            yield Buffer("logits", (rows, sizes.vocab), sizes.wide, SWEEP, last)
            yield from teacher_buffers(sizes, rows, last)

    @classmethod
    def tile_buffers(cls, sizes: Sizes, rows: int, columns: int) -> Iterator[Buffer]:
        columns += min(columns, sizes.teacher_columns) * sizes.teacher_made
        yield Buffer("logits of a tile", (rows, columns), sizes.wide, LOOP, LOOP)

    def __init__(self, head: Head, plan: Plan, every: Rows, tiled: bool):
        """``every``: the call's rows as given."""
        self.head, self.plan, self.every, self.tiled = head, plan, every, tiled
        self.sizes, self.demand, self.vocab = plan.sizes, plan.sizes.demand, plan.sizes.vocab
        # logits in memory at a time
        self.rows, self.columns = plan.chunk_tokens, self.vocab
        if tiled:
            self.rows, self.columns = plan.block_tokens, plan.tile_columns

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        at, first = rows.tokens, rows.first == 0
        sums = dhidden = None if grads.hidden is None else grads.hidden_rows(at)
        if self.tiled:
            assert rows.source is not None
            self.clean_rows(rows.hidden, rows.source, rows.target, rows.order)
        coefficients, gain = self.fitted(rows, coefficients)
        if dhidden is not None and self.plan.hidden_accumulate != dhidden.dtype:
            sums = torch.zeros_like(dhidden, dtype=self.plan.hidden_accumulate)
        for tile in slices(self.vocab, self.plan.tile_columns if self.tiled else self.vocab):
            weight, dweight, dbias = self.head.weight, grads.weight, grads.bias
            if tile.stop - tile.start < self.vocab:
                weight = weight[tile]
                dweight, dbias = (None if one is None else one[tile] for one in (dweight, dbias))
            dlogits = self.gradient(rows, tile, stats, coefficients)
            if dhidden is not None and sums is not None:
                self.add_dhidden(dlogits, rows, weight, sums, tile.start == 0)
                if tile.stop == self.vocab:
                    if gain is not None:
                        sums.mul_(gain)
                    if sums is not dhidden:
                        dhidden.copy_(sums)
                    grads.hidden_done(at)
            if dweight is not None:
                self.add_dweight(dlogits, rows, dweight, first and grads.fresh, gain)
            if dbias is not None:
                put(dbias, dlogits.sum(0, dtype=dbias.dtype), first, gain)
            del dlogits  # gone before the next tile's are made

    def fitted(self, rows: Rows, coefficients: Coefficients) -> tuple[Coefficients, Tensor | None]:
        """Coefficients divided by a factor [] that brings gradients of logits into the range of their dtype, and this
        factor; None for 1."""
        return coefficients, None

    def add_dhidden(self, dlogits: Tensor, rows: Rows, weight: Tensor, out: Tensor, first: bool) -> None:
        """``out (+)= dlogits @ weight`` [rows, hidden], stored where ``first``."""
        add_dhidden(dlogits, weight, out, first)

    def add_dweight(self, dlogits: Tensor, rows: Rows, out: Tensor, first: bool, gain: Tensor | None = None) -> None:
        """``out (+)= gain * dlogits.T @ rows.hidden``, stored where ``first``."""
        add_dweight(dlogits, rows.hidden, out, first, gain)


def teacher_buffers(sizes: Sizes, rows: int, last: Phase) -> Iterator[Buffer]:
    """A dense teacher's logits of a chunk, where the store makes them."""
    if not sizes.teacher_made:
        return
    # where they come last, the buffer is for some rows of a chunk that makes gradients
    some, columns = sizes.teacher_rows(rows) if last == LOOP else rows, sizes.teacher_columns
    if not sizes.own_matmul:
        yield Buffer("teacher's logits", (some, columns), sizes.wide, SWEEP, last)
        return
    assert sizes.gpu is not None
    yield Buffer("teacher's logits", (some, padded_columns(columns)), sizes.dtype, SWEEP, last)
    # for all rows of a chunk: their strips lie as far apart as the student's
    strips = sizes.gpu.strips_of(columns, relative=True)
    yield Buffer("teacher's statistics of strips", (rows, strips, 2), torch.float32, SWEEP, last)
