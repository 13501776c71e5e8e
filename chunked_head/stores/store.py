"""The protocol of a store, the base of stores that multiply, and the stores of logits from BLAS or the caller."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.records import (
    ALL_ROWS,
    PLAIN,
    Counted,
    Outputs,
    Softmax,
    StatisticOutputs,
    Stored,
    SumOutputs,
    SumTerm,
    TeacherSoftmax,
    Terms,
    Transform,
)
from ..core.statistics import COLUMNS
from ..core.stats import SUFFIX, Coefficients, Demand, Names, RowStats, VocabularySum, layout_of
from ..plan.plans import Plan
from ..plan.sizes import LOOP, SWEEP, Buffer, Phase, Sizes, padded_columns, slices
from .gradients import Gradients
from .matmul import accumulate, add_dhidden, add_dweight, project
from .operands import Head, Rows, TeacherHead, fp8_logits, mend_heavy, put_columns
from .torch_functions import transform_, transformed

FP16_LARGEST = 64.0
# relative difference up to which probabilities of 16-bit logits count as equal: where student and teacher agree, signs
# of mere roundings would differ between the sum over a row and the gradient of its columns
TIE = 2.0**-16
SOFTMAX = [tuple(name + suffix for name in Softmax._fields[:4]) for suffix in SUFFIX]


def transform(head: Head | TeacherHead, scale: Tensor | None) -> Transform:
    """Scale and cap as kernels take them, None for 1 and no cap. ``scale`` [rows]: of the rows."""
    logit_scale = None if head.logit_scale == 1.0 else float(head.logit_scale)
    return Transform(logit_scale, head.softcap, scale if head.scaled else None)


def outputs_of(stats: Mapping[str, Tensor], names: Names) -> Outputs:
    """Outputs of a softmax's statistics, by their names."""
    statistics = [StatisticOutputs(s, tuple([stats[name] for name in vectors])) for s, vectors in names.statistics]
    return Outputs._make([*map(stats.get, names[:-1]), tuple(statistics)])


def ratio_of(ratio: float) -> float | None:
    return None if ratio == 1.0 else float(ratio)


def terms_of(
    demand: Demand, target: Tensor, stats: RowStats, c: Coefficients, first: int = 0, columns: int | None = None
) -> Terms:
    """Operands of the gradient of so many columns from ``first`` on; None: of columns in any order."""
    vectors, factors, softmaxes = stats.by_name, c.by_name, []
    for (ratio, width), names in zip(demand.views, SOFTMAX, strict=False):
        if width is not None:
            width = None if columns is None else min(max(width - first, 0), columns)
        start, neg_log_sum, alpha, eta = names
        softmaxes.append(
            Softmax(vectors[start], vectors[neg_log_sum], factors.get(alpha), factors.get(eta), ratio_of(ratio), width)
        )
    return Terms(target, stats.target_logit, c.beta, c.kappa, tuple(softmaxes))


def sum_terms(
    sums: Sequence[VocabularySum], stats: RowStats, c: Coefficients, has_teacher: bool, partial_sums: Sequence[Tensor]
) -> list[SumTerm]:
    """Terms of sums over the vocabulary; those with a teacher where it has columns."""
    vectors, coefficients, terms = stats.by_name, c.by_name, []
    for i, (function, numbers, view, _) in enumerate(sums):
        coefficient, partial = coefficients.get(f"sum{i}"), partial_sums[i] if partial_sums else None
        if (has_teacher or not function.is_paired) and not (coefficient is None and partial is None):
            is_read = function.total == "gradient" and coefficient is not None
            total = vectors[f"sum{i}_total"] if is_read else None
            terms.append(SumTerm(function, numbers, view, coefficient, total, partial))
    return terms


# ids [rows, K] of each row's own columns, what their logits' gradients get besides, and their exact logits
OwnColumns = tuple[Tensor, Tensor | None, Tensor]


def heavy_columns(stats: RowStats) -> OwnColumns | None:
    """Those whose e4m3 logits the exact ones replace."""
    if stats.heavy_ids is None or stats.heavy_logits is None:
        return None
    return stats.heavy_ids, None, stats.heavy_logits


def own_columns(rows: Rows, stats: RowStats, c: Coefficients) -> OwnColumns | None:
    if c.columns is None:
        return None
    assert rows.columns is not None
    return rows.columns, c.columns, stats.by_name[COLUMNS.vectors[0]]


class Store:
    """A way of keeping one chunk's logits, from the matmul that makes them until they have become gradients.

    A sweep calls ``fill``, ``statistics`` and ``add_gradients`` for one chunk after the other, ``finish`` at its end.
    Where statistics are known it calls ``add_gradients`` only. Where there are sums over the vocabulary,
    ``sum_statistics`` follows ``statistics``, unless ``Plan.teacher_last``: then they and the teacher's come with the
    gradients.

    ``known_targets``: ``statistics`` writes the logit of every row's target, though another rank may have its column.
    """

    name = "logits"
    description = "logits"  # of what is kept
    bounds_rows = False  # its matmuls can stop at a number of rows on the device
    multiplies = True  # False: logits come from gathered rows, not from a matmul
    head: Head
    demand: Demand
    softmaxes: tuple[Names, ...]  # names of the vectors of each softmax, the teacher's last
    known_targets = False

    @classmethod
    def chunk_buffers(cls, sizes: Sizes, rows: int, last: Phase, stored: bool) -> Iterator[Buffer]:
        """Memory of a chunk of ``rows`` until the phase ``last`` (LOOP if its gradients are made); ``stored``: with
        its logits. ``plan/plans.py`` adds what all stores need, such as operands."""
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

    def sum_statistics(self, rows: Rows, out: RowStats) -> None:
        """Sums over the vocabulary, once ``out`` holds all softmaxes."""

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        """Gradients of the chunk filled last, added to ``grads``."""

    def finish(self, grads: Gradients) -> None:
        """Adds terms of gradients that need all chunks."""


class MatmulStore(Store):
    """Logits that a matmul makes of hidden states, and that become their gradient in one buffer.

    A ``tiled`` store is for blocks of tokens whose statistics are known: it makes logits, or their gradients, a tile of
    the vocabulary at a time.
    """

    tie: float | None = None  # relative difference of probabilities that count as equal
    stored: Stored
    teacher_stored: Stored | None = None  # of the same rows
    raw_logits: Callable[[Rows, Head | TeacherHead], Stored]  # of a teacher where the caller gives none
    # [rows, columns] the gradient of the raw logits of a slice of the vocabulary
    gradient: Callable[[Rows, slice, RowStats, Coefficients], Tensor]

    @classmethod
    def chunk_buffers(cls, sizes: Sizes, rows: int, last: Phase, stored: bool) -> Iterator[Buffer]:
        if stored:
            yield Buffer("logits", (rows, sizes.vocab), sizes.wide, SWEEP, last)
            yield from teacher_buffers(sizes, rows, last)

    @classmethod
    def tile_buffers(cls, sizes: Sizes, rows: int, columns: int) -> Iterator[Buffer]:
        columns += min(columns, sizes.teacher_columns) * sizes.teacher_made
        yield Buffer("logits of a tile", (rows, columns), sizes.wide, LOOP, LOOP)

    def __init__(self, backend: Any, head: Head, plan: Plan, all_rows: Rows, tiled: bool):
        """``backend``: the functions that compute. ``all_rows``: the call's rows as given."""
        self.backend, self.head, self.plan, self.all_rows, self.tiled = backend, head, plan, all_rows, tiled
        self.sizes, self.demand, self.vocab = plan.sizes, plan.sizes.demand, plan.sizes.vocab
        self.tie, self.softmaxes = TIE if self.sizes.half else None, self.sizes.softmaxes
        self.tiles = slices(self.vocab, plan.tile_columns) if tiled else [slice(0, self.vocab)]
        # logits in memory at a time
        self.rows, self.columns = plan.chunk_tokens, self.vocab
        if tiled:
            self.rows, self.columns = plan.block_tokens, plan.tile_columns

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        tokens, first = rows.tokens, rows.first == 0
        sums = dhidden = None if grads.hidden is None else grads.hidden_rows(tokens)
        if self.tiled:
            assert rows.source is not None
            self.backend.clean_rows(rows.hidden, rows.source, rows.target, rows.order)
        gain = None
        if self.sizes.dtype == torch.float16 and not self.sizes.in_blocks:
            coefficients, gain = self.fitted(rows, coefficients)
        if dhidden is not None and self.plan.hidden_accumulate != dhidden.dtype:
            sums = torch.zeros_like(dhidden, dtype=self.plan.hidden_accumulate)
        for tile in self.tiles:
            weight, dweight, dbias = self.head.weight, grads.weight, grads.bias
            if tile.stop - tile.start < self.vocab:
                weight = weight[tile]
                dweight, dbias = (None if buffer is None else buffer[tile] for buffer in (dweight, dbias))
            dlogits = self.gradient(rows, tile, stats, coefficients)
            if dhidden is not None and sums is not None:
                self.add_dhidden(dlogits, rows, weight, sums, tile.start == 0)
                if tile.stop == self.vocab:
                    if gain is not None:
                        sums.mul_(gain)
                    if sums is not dhidden:
                        dhidden.copy_(sums)
                    grads.hidden_done(tokens)
            if dweight is not None:
                self.add_dweight(dlogits, rows, dweight, first and grads.fresh, gain)
            if dbias is not None:
                accumulate(dbias, dlogits.sum(0, dtype=dbias.dtype), first, gain)
            del dlogits  # gone before the next tile's are made

    def fitted(self, rows: Rows, coefficients: Coefficients) -> tuple[Coefficients, Tensor]:
        """Coefficients for fp16, divided by a gain that makes the largest gradient of a logit about 64; and the gain.

        That keeps the probabilities of a 128K vocabulary among fp16's normal numbers, and leaves a factor of 1000 to
        their logarithms. The gain is 1 where a gradient is nan or infinite, which stays one token's."""
        values = coefficients.by_name.values()
        sizes = torch.stack([value.abs().view(len(value), -1).amax(1) for value in values]).amax(0)
        sizes = sizes * abs(self.head.logit_scale)
        largest = (sizes if rows.scale is None else sizes * rows.scale).amax()
        gain = (largest / FP16_LARGEST).clamp(min=torch.finfo(largest.dtype).tiny)
        gain = torch.where((largest > 0) & torch.isfinite(largest), gain, 1.0)
        return coefficients * (1.0 / gain), gain

    def sum_statistics(self, rows: Rows, out: RowStats) -> None:
        pairing, views, vectors = self.demand.pairing, self.demand.views, out.by_name
        groups: dict[tuple[int, bool], list[SumOutputs]] = {}  # by softmax, and whether the teacher is read
        for i, (function, numbers, view, _) in enumerate(self.demand.sums):
            outputs = SumOutputs(function, numbers, vectors[f"sum{i}"], vectors.get(f"sum{i}_total"))
            groups.setdefault((view, function.is_paired), []).append(outputs)
        for (view, is_paired), sums in groups.items():
            names, teacher, columns = self.softmaxes[view], None, views[view].columns or self.vocab
            if is_paired:
                assert pairing is not None and self.teacher_stored is not None
                columns = pairing.columns
                teacher = self.teacher_softmax(self.teacher_stored, out, columns)
            softmax = vectors[names.start], vectors[names.rest]
            self.backend.sums(sums, self.stored, softmax, ratio_of(views[view].ratio), teacher, columns, self.tie)

    def teacher_logits(self, rows: Rows, columns: slice, normalize: Outputs | None) -> Stored:
        """A teacher's logits, given or made; ``normalize`` receives what makes log-probabilities of them."""
        teacher = rows.teacher
        assert teacher is not None
        if teacher.logits is None:
            stored = self.raw_logits(rows, teacher.columns(columns))
        else:
            stored = Stored(teacher.logits[:, columns], None, None, transform(teacher, rows.scale))
        if normalize is not None:
            self.backend.row_stats(normalize, stored, stored.logits.shape[1])
        return stored

    def teacher_softmax(self, stored: Stored, stats: RowStats, columns: int) -> TeacherSoftmax:
        """A teacher's softmax over the vocabulary, of so many columns of logits."""
        names, vectors = self.softmaxes[-1], stats.by_name
        return TeacherSoftmax(stored, vectors[names.start], vectors[names.rest], columns)

    def differentiate_(
        self,
        dlogits: Tensor,
        stored: Stored,
        head: Head,
        first: int,
        rows: Rows,
        stats: RowStats,
        c: Coefficients,
        teacher: Stored | None,
        counted: Counted = ALL_ROWS,
        partial_sums: Sequence[Tensor] = (),
    ) -> Tensor:
        """The gradient of raw logits, of ``head``'s columns, which begin at ``first``. ``partial_sums``: of each sum
        over the vocabulary [programs, rows], where these are made on the way."""
        pairing, columns, softmax = self.demand.pairing, dlogits.shape[1], None
        if teacher is not None and pairing is not None:
            softmax = self.teacher_softmax(teacher, stats, min(max(pairing.columns - first, 0), columns))
        sums = sum_terms(self.demand.sums, stats, c, softmax is not None, partial_sums) if self.demand.sums else []
        common = terms_of(self.demand, rows.target, stats, c, first, columns)
        logit_transform = transform(head, rows.scale)
        column_terms = None if c.columns is None else own_columns(rows, stats, c)
        if not any(term.function.is_paired for term in sums):
            softmax = None
        of_sums = softmax, sums, self.tie
        of_rows = logit_transform, counted, column_terms
        self.backend.row_grad(dlogits, stored, head.class_weights, common, *of_sums, first, *of_rows)
        return dlogits

    def add_dhidden(self, dlogits: Tensor, rows: Rows, weight: Tensor, out: Tensor, first: bool) -> None:
        """``out (+)= dlogits @ weight`` [rows, hidden], stored where ``first``."""
        add_dhidden(dlogits, weight, out, first)

    def add_dweight(self, dlogits: Tensor, rows: Rows, out: Tensor, first: bool, gain: Tensor | None = None) -> None:
        """``out (+)= gain * dlogits.T @ rows.hidden``, stored where ``first``."""
        add_dweight(dlogits, rows.hidden, out, first, gain)


class LogitsStore(MatmulStore):
    """fp32 logits (fp64 for fp64 operands) that BLAS makes; the gradient overwrites them, by kernels 16-bit wide for
    16-bit operands."""

    def __init__(self, backend: Any, head: Head, plan: Plan, all_rows: Rows, tiled: bool):
        super().__init__(backend, head, plan, all_rows, tiled)
        self.buffer = head.weight.new_empty(self.rows * self.columns, dtype=self.sizes.wide)
        if self.sizes.teacher_made:
            elements = self.rows * min(self.columns, self.sizes.teacher_columns)
            self.teacher_buffer = head.weight.new_empty(elements, dtype=self.sizes.wide)

    def raw_logits(self, rows: Rows, head: Head | TeacherHead, first: int = 0) -> Stored:
        """Raw logits of a student or a teacher, of columns from ``first`` on, to be read with bias, scale and cap;
        torch operations add these here, once for all that reads them."""
        hidden, buffer = rows.hidden, self.buffer
        if isinstance(head, TeacherHead):
            assert head.hidden is not None
            hidden, buffer = head.hidden, self.teacher_buffer
        assert head.weight is not None
        count, columns = hidden.shape[0], head.weight.shape[0]
        logits, late_bias = buffer[: count * columns].view(count, columns), None
        if isinstance(head, Head) and head.fp8 is not None:
            fp8_logits(logits, rows, first, head, head.fp8)
        else:
            at_once = self.plan.chunk_tokens if columns == self.vocab else None  # as the forward pass has made them
            late_bias = project(hidden, head.weight, logits, head.bias, at_once)
        stored = Stored(logits, None, late_bias, transform(head, rows.scale))
        plain = late_bias is None and stored.transform == PLAIN
        return stored if plain or not self.sizes.in_blocks else transform_(stored)

    def fill(self, rows: Rows, out: RowStats) -> None:
        assert rows.source is not None
        self.backend.clean_rows(rows.hidden, rows.source, rows.target, rows.order)
        self.stored = self.raw_logits(rows, self.head)

    def statistics(self, rows: Rows, out: RowStats) -> None:
        head, logits, row_stats = self.head, self.stored.logits, self.backend.row_stats
        vectors = out.by_name
        if out.heavy_ids is not None and out.heavy_logits is not None:
            operands = rows.hidden, head.weight, head.bias, rows.target, transform(head, rows.scale)
            mend_heavy(out.heavy_ids, out.heavy_logits, logits, *operands)
        for i, (ratio, columns) in enumerate(self.demand.views):
            softmax = columns or logits.shape[1], rows.target, head.class_weights, ratio_of(ratio)
            row_stats(outputs_of(vectors, self.softmaxes[i]), self.stored, *softmax)
        for statistic in self.demand.lists:
            of_list, *ids = [vectors[name] for name in statistic.vectors]
            if ids:
                self.search_largest(*ids)
            self.pick_columns(of_list, ids[0] if ids else rows.columns)
        if self.demand.pairing is not None:
            columns_of_both, outputs = slice(0, self.demand.pairing.columns), outputs_of(vectors, self.softmaxes[-1])
            self.teacher_stored = self.teacher_logits(rows, columns_of_both, outputs)

    def search_largest(self, ids: Tensor) -> None:
        """Columns [rows, count] of the largest logits, which have no bias to be added later then."""
        if self.stored.bias is not None:
            self.stored = self.stored._replace(logits=self.stored.logits.add_(self.stored.bias), bias=None)
        logits, factor = self.stored.logits, self.stored.transform.logit_scale
        raw = torch.empty_like(ids, dtype=logits.dtype)
        torch.topk(logits, ids.shape[1], largest=factor is None or factor > 0, out=(raw, ids))

    def pick_columns(self, out: Tensor, ids: Tensor | None) -> None:
        """Logits of the columns ``ids`` [rows, count] of each row, 0 where one is -1."""
        assert ids is not None
        columns, bias = ids.clamp(min=0), self.stored.bias
        x = self.stored.logits.gather(1, columns).to(out.dtype)
        x = transformed(x, None if bias is None else bias[columns], self.stored.transform)
        out.copy_(x.masked_fill(ids < 0, 0.0))

    def gradient(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        """The gradient of the raw logits of a tile: of the chunk filled last, or of logits made here."""
        head, pairing, teacher = self.head, self.demand.pairing, None
        if self.tiled:
            head = head.columns(tile)
            self.stored = self.raw_logits(rows, head, tile.start)
            if heavy := heavy_columns(stats):
                put_columns(self.stored.logits, heavy[0].long() - tile.start, heavy[2])
        if pairing is not None and tile.start < pairing.columns:
            columns = slice(tile.start, min(tile.stop, pairing.columns))
            teacher = self.teacher_logits(rows, columns, None) if self.tiled else self.teacher_stored
        logits = self.stored.logits
        # a 16-bit row lies in the first half of its fp32 row
        dlogits = logits.view(logits.dtype if self.sizes.in_blocks else self.sizes.dtype)[:, : logits.shape[1]]
        return self.differentiate_(dlogits, self.stored, head, tile.start, rows, stats, coefficients, teacher)


class GivenLogits(LogitsStore):
    """Logits that exist already [rows, vocab], columns contiguous; of the head only scale, cap and class weights are
    read. ``gradient``: where theirs goes, which may be the logits."""

    fill = Store.fill  # they are there

    def __init__(self, backend: Any, head: Head, demand: Demand, rows: Rows, gradient: Tensor | None):
        self.backend, self.head, self.demand, self.vocab = backend, head, demand, rows.hidden.shape[1]
        self.softmaxes = layout_of(demand).softmaxes
        self.stored, self.gradient_of = Stored(rows.hidden, None, None, transform(head, rows.scale)), gradient

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        assert self.gradient_of is not None
        pairing, teacher = self.demand.pairing, None
        if pairing is not None:
            teacher = self.teacher_logits(rows, slice(0, pairing.columns), None)
        self.differentiate_(self.gradient_of, self.stored, self.head, 0, rows, stats, coefficients, teacher)


def teacher_buffers(sizes: Sizes, rows: int, last: Phase) -> Iterator[Buffer]:
    """A dense teacher's logits of a chunk, where the store makes them."""
    if not sizes.teacher_made:
        return
    # where they come last, the buffer is for some rows of a chunk that makes gradients
    buffer_rows, columns = sizes.teacher_rows(rows) if last == LOOP else rows, sizes.teacher_columns
    if not sizes.own_matmul:
        yield Buffer("teacher's logits", (buffer_rows, columns), sizes.wide, SWEEP, last)
        return
    assert sizes.gpu is not None
    yield Buffer("teacher's logits", (buffer_rows, padded_columns(columns)), sizes.dtype, SWEEP, last)
    # for all rows of a chunk: their strips lie as far apart as the student's
    strips = sizes.gpu.strips_of(columns, relative=True)
    yield Buffer("teacher's statistics of strips", (rows, strips, 2), torch.float32, SWEEP, last)
