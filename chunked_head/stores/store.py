"""Stores: ``Store``, the protocol; ``MatmulStore``, the base of stores whose logits a matmul makes; ``LogitsStore``,
for logits that BLAS makes; ``GivenLogits``, for the caller's logits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.records import (
    ALL_ROWS,
    PLAIN,
    CountedRows,
    Softmax,
    SoftmaxVectors,
    Stored,
    SumVectors,
    TeacherSoftmax,
    Terms,
    Transform,
    Vector,
)
from ..core.statistics import COLUMNS
from ..core.stats import SUFFIX, Coefficients, Demand, RowStats, VocabularySum, layout_of
from ..plan.plans import Plan
from ..plan.sizes import LOOP, SWEEP, Buffer, Phase, Sizes, padded_columns, slices
from .gradients import Gradients
from .matmul import accumulate, add_dhidden, add_dweight, project
from .operands import CallRows, Head, Rows, TeacherHead, fp8_logits, mend_heavy, put_columns
from .torch_functions import transform_, transformed

LARGEST_FP16_DLOGIT = 64.0  # the number to which the largest gradient of a chunk's logits is scaled in fp16
# relative difference up to which probabilities of student and teacher count as equal, for 16-bit logits: the sign of a
# rounding error could differ between the sum over a row and the gradient of a column
TIE_TOLERANCE = 2.0**-16
# for each view the names of the vectors in ``Softmax``: lse_base, neg_log_sum, alpha, eta
SOFTMAX_NAMES = [tuple(name + suffix for name in Softmax._fields[:4]) for suffix in SUFFIX]


def transform(head: Head | TeacherHead, row_scale: Tensor | None) -> Transform:
    """Returns the ``Transform`` of a head: its scale (None for 1), its cap, and ``row_scale`` [rows], the factor of
    each row's logits, if the head is ``scaled``."""
    logit_scale = None if head.logit_scale == 1.0 else float(head.logit_scale)
    return Transform(logit_scale, head.softcap, row_scale if head.scaled else None)


def vectors_of(names: SoftmaxVectors[str], by_name: Mapping[str, Vector]) -> SoftmaxVectors[Vector]:
    """Looks up the vectors of a softmax in ``by_name``; None for a vector without an element there."""
    statistics = [(statistic, tuple([by_name[name] for name in vectors])) for statistic, vectors in names.statistics]
    # mypy: ``lse_base`` and ``neg_log_sum``, which no call lacks, might be None
    return SoftmaxVectors._make([*map(by_name.get, names[:-1]), tuple(statistics)])  # type: ignore[arg-type]


def ratio_of(ratio: float) -> float | None:
    """Returns the argument ``ratio`` of kernels: None for 1, else ``ratio``."""
    return None if ratio == 1.0 else float(ratio)


def terms_of(
    demand: Demand,
    target: Tensor,
    stats: RowStats,
    coefficients: Coefficients,
    first_column: int = 0,
    columns: int | None = None,
) -> Terms:
    """Collects the vectors that make the gradient of a tile of logits: of ``columns`` columns from column
    ``first_column`` on. ``columns=None``: the columns are in any order, and each softmax is over all of them."""
    vectors, coefficients_by_name, softmaxes = stats.by_name, coefficients.by_name, []
    for (ratio, softmax_columns), (lse_base, neg_log_sum, alpha, eta) in zip(demand.views, SOFTMAX_NAMES, strict=False):
        if softmax_columns is not None:
            softmax_columns = None if columns is None else min(max(softmax_columns - first_column, 0), columns)
        factors = coefficients_by_name.get(alpha), coefficients_by_name.get(eta)
        softmaxes.append(Softmax(vectors[lse_base], vectors[neg_log_sum], *factors, ratio_of(ratio), softmax_columns))
    return Terms(target, stats.target_logit, coefficients.beta, coefficients.kappa, tuple(softmaxes))


def sum_terms(
    sums: Sequence[VocabularySum],
    stats: RowStats,
    coefficients: Coefficients,
    has_teacher: bool,
    partial_sums: Sequence[Tensor],
) -> list[SumVectors[Tensor | None]]:
    """Collects the terms of sums over the vocabulary in a gradient. Without ``has_teacher`` it leaves out sums that
    read a teacher. ``partial_sums``: for each sum the memory of its parts; empty if the sums are made already."""
    vectors, coefficients_by_name, terms = stats.by_name, coefficients.by_name, []
    for i, (function, numbers, view, _) in enumerate(sums):
        coefficient, partial_sum = coefficients_by_name.get(f"sum{i}"), partial_sums[i] if partial_sums else None
        if (has_teacher or not function.is_paired) and not (coefficient is None and partial_sum is None):
            reads_total = function.total == "gradient" and coefficient is not None
            total = vectors[f"sum{i}_total"] if reads_total else None
            terms.append(SumVectors(function, numbers, view, partial_sum, total, coefficient))
    return terms


# columns of each row whose gradient is made from exact logits, [rows, K] each: ids, coefficients of a further term of
# their gradient (None for no term), exact logits
OwnColumns = tuple[Tensor, Tensor | None, Tensor]


def heavy_columns(stats: RowStats) -> OwnColumns | None:
    """Returns a tuple of each row's heavy ids, None (they have no coefficients) and their exact logits. None instead of
    the tuple for a call without fp8."""
    if stats.heavy_ids is None or stats.heavy_logits is None:
        return None
    return stats.heavy_ids, None, stats.heavy_logits


def own_columns(rows: Rows, stats: RowStats, coefficients: Coefficients) -> OwnColumns | None:
    """Returns each row's ``teacher_ids``, the coefficients of their logits, and the logits; None if the gradient has no
    term of these logits."""
    if coefficients.columns is None:
        return None
    assert rows.columns is not None
    return rows.columns, coefficients.columns, stats.by_name[COLUMNS.vectors[0]]


class Store:
    """A way of keeping the logits of one chunk, from the matmul that makes them until gradients overwrite them.

    A sweep calls ``fill``, ``statistics`` and ``add_gradients`` for one chunk after the other, and ``finish`` at its
    end. If statistics are known, it calls ``add_gradients`` only. With sums over the vocabulary, ``sum_statistics``
    follows ``statistics``; but with ``Plan.teacher_last``, ``add_gradients`` makes these sums and the teacher's
    statistics.
    """

    name = "logits"
    description = "logits"  # name of the buffer in a printed plan
    stops_at_device_count = False  # True: the store's matmuls can stop at a number of rows that only the device knows
    has_matmul = True  # False: logits come from gathered rows, not from a matmul
    head: Head
    demand: Demand
    softmaxes: tuple[SoftmaxVectors[str], ...]  # names of the vectors of each softmax, the teacher's last
    # True: every rank writes the logits of all targets; False: the rank that has their column
    has_target_logits = False

    @classmethod
    def chunk_buffers(cls, sizes: Sizes, rows: int, last: Phase, stores_logits: bool) -> Iterator[Buffer]:
        """Yields the store's own buffers for a chunk of ``rows`` rows, for the plan. They live until the phase
        ``last``, which is LOOP if the pass makes gradients. ``stores_logits``: the pass stores logits."""
        return iter(())

    @classmethod
    def tile_buffers(cls, sizes: Sizes, rows: int, columns: int) -> Iterator[Buffer]:
        """Yields the store's buffers for a tile [rows, columns] of the recompute schedule: its logits, or dlogits."""
        return iter(())

    def fill(self, rows: Rows, out: RowStats) -> None:
        """Copies ``rows.source`` to ``rows.hidden``, with 0 where a row does not count, and makes the chunk's logits
        [rows, vocab]. Writes to ``out`` the statistics that are made along with the logits."""

    def statistics(self, rows: Rows, out: RowStats) -> None:
        """Writes the statistics of the latest chunk to the vectors [rows] of ``out``. If ranks share the vocabulary,
        the statistics are over this rank's columns."""

    def sum_statistics(self, rows: Rows, out: RowStats) -> None:
        """Writes the sums over the vocabulary of the latest chunk to ``out``, which has the softmaxes' statistics."""

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        """Adds the gradients of the latest chunk to ``grads``."""

    def finish(self, grads: Gradients) -> None:
        """Adds terms that are made once for all chunks to ``grads``."""


class MatmulStore(Store):
    """A store whose logits a matmul makes. The gradient of the logits overwrites them.

    A ``tiled`` store is for blocks of tokens whose statistics are known. It makes a tile of the vocabulary at a time.
    """

    tie_tolerance: float | None = None  # relative difference up to which probabilities count as equal; None: 0
    stored: Stored  # the latest chunk's logits
    teacher_stored: Stored | None = None  # the teacher's logits of the same rows
    raw_logits: Callable[[Rows, Head | TeacherHead], Stored]  # makes the logits of a teacher that has hidden states
    # returns the gradient [rows, columns] of the raw logits of a slice of the vocabulary
    gradient: Callable[[Rows, slice, RowStats, Coefficients], Tensor]

    @classmethod
    def chunk_buffers(cls, sizes: Sizes, rows: int, last: Phase, stores_logits: bool) -> Iterator[Buffer]:
        if stores_logits:
            yield Buffer("logits", (rows, sizes.vocab), sizes.wide, SWEEP, last)
            yield from teacher_buffers(sizes, rows, last)

    @classmethod
    def tile_buffers(cls, sizes: Sizes, rows: int, columns: int) -> Iterator[Buffer]:
        columns += min(columns, sizes.teacher_columns) * sizes.teacher_made
        yield Buffer("logits of a tile", (rows, columns), sizes.wide, LOOP, LOOP)

    def __init__(self, backend: Any, head: Head, plan: Plan, all_rows: CallRows, tiled: bool):
        """``backend``: a ``Backend``. ``all_rows``: hidden states, targets and order of the call's rows. ``tiled``:
        logits are made in tiles [block_tokens, tile_columns] of the plan, not in chunks of rows."""
        self.backend, self.head, self.plan, self.tiled = backend, head, plan, tiled
        self.call_hidden, self.call_targets, self.call_order = all_rows
        self.sizes, self.demand, self.vocab = plan.sizes, plan.sizes.demand, plan.sizes.vocab
        self.tie_tolerance, self.softmaxes = TIE_TOLERANCE if self.sizes.half else None, self.sizes.layout.softmaxes
        # numbers of rows and columns of the logits that are in memory at a time
        self.rows, self.columns = (plan.block_tokens, plan.tile_columns) if tiled else (plan.chunk_tokens, self.vocab)
        self.tiles = slices(self.vocab, self.columns) if tiled else [slice(0, self.vocab)]

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        tokens, is_first = rows.tokens, rows.tokens.start == 0
        dhidden_sum = dhidden = None if grads.hidden is None else grads.hidden_rows(tokens)
        if self.tiled:
            assert rows.source is not None
            self.backend.clean_rows(rows.hidden, rows.source, rows.target, rows.order)
        dlogits_divisor = None
        if self.sizes.dtype == torch.float16 and not self.sizes.in_blocks:
            coefficients, dlogits_divisor = self.scaled_for_fp16(rows, coefficients)
        if dhidden is not None and self.plan.hidden_accumulate != dhidden.dtype:
            dhidden_sum = torch.zeros_like(dhidden, dtype=self.plan.hidden_accumulate)
        for tile in self.tiles:
            weight, dweight, dbias = self.head.weight, grads.weight, grads.bias
            if tile.stop - tile.start < self.vocab:
                weight = weight[tile]
                dweight, dbias = (None if buffer is None else buffer[tile] for buffer in (dweight, dbias))
            dlogits = self.gradient(rows, tile, stats, coefficients)
            if dhidden is not None and dhidden_sum is not None:
                self.add_dhidden(dlogits, rows, weight, dhidden_sum, tile.start == 0)
                if tile.stop == self.vocab:
                    if dlogits_divisor is not None:
                        dhidden_sum.mul_(dlogits_divisor)
                    if dhidden_sum is not dhidden:
                        dhidden.copy_(dhidden_sum)
                    if grads.over_ranks is not None:
                        grads.sum_over_ranks(tokens)
            if dweight is not None:
                self.add_dweight(dlogits, rows, dweight, is_first and grads.fresh, dlogits_divisor)
            if dbias is not None:
                accumulate(dbias, dlogits.sum(0, dtype=dbias.dtype), is_first, dlogits_divisor)
            del dlogits  # freed before the next tile's are made

    def scaled_for_fp16(self, rows: Rows, coefficients: Coefficients) -> tuple[Coefficients, Tensor]:
        """Returns the coefficients divided by a divisor [], and the divisor. The largest gradient of a logit becomes
        about 64, so that dlogits fit fp16.

        Probabilities of 1 / 128K are then normal numbers of fp16, and a coefficient's factor, such as log p, may be up
        to 1000 before a gradient overflows. The divisor is 1 if a gradient is nan or infinite: the rest stay finite.
        """
        largest_by_vector = [value.abs().view(len(value), -1).amax(1) for value in coefficients.by_name.values()]
        largest_by_row = torch.stack(largest_by_vector).amax(0) * abs(self.head.logit_scale)
        largest = (largest_by_row if rows.scale is None else largest_by_row * rows.scale).amax()
        dlogits_divisor = (largest / LARGEST_FP16_DLOGIT).clamp(min=torch.finfo(largest.dtype).tiny)
        dlogits_divisor = torch.where((largest > 0) & torch.isfinite(largest), dlogits_divisor, 1.0)
        return coefficients * (1.0 / dlogits_divisor), dlogits_divisor

    def sum_statistics(self, rows: Rows, out: RowStats) -> None:
        pairing, views, vectors = self.demand.pairing, self.demand.views, out.by_name
        # by view, and by whether the sum reads the teacher
        groups: dict[tuple[int, bool], list[SumVectors[Tensor | None]]] = {}
        for i, (function, numbers, view, _) in enumerate(self.demand.sums):
            outputs = SumVectors(function, numbers, 0, vectors[f"sum{i}"], vectors.get(f"sum{i}_total"), None)
            groups.setdefault((view, function.is_paired), []).append(outputs)
        for (view, is_paired), sums in groups.items():
            names, teacher, (ratio, width) = self.softmaxes[view], None, views[view]
            columns = width or self.vocab
            if is_paired:
                assert pairing is not None and self.teacher_stored is not None
                columns = pairing.columns
                teacher = self.teacher_softmax(self.teacher_stored, out, columns)
            softmax = vectors[names.lse_base], vectors[names.neg_log_sum]
            self.backend.sums(sums, self.stored, softmax, ratio_of(ratio), teacher, columns, self.tie_tolerance)

    def teacher_logits(self, rows: Rows, columns: slice, normalize: SoftmaxVectors[Tensor] | None) -> Stored:
        """Returns the teacher's logits of some columns: the caller's, or new ones from the teacher's hidden states.
        ``normalize``: memory that receives the statistics of the teacher's softmax; None: no statistics are made."""
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
        """Returns a teacher's logits ``stored``, with ``columns`` columns, beside the statistics of its softmax."""
        names, vectors = self.softmaxes[-1], stats.by_name
        return stored, Softmax(vectors[names.lse_base], vectors[names.neg_log_sum], columns=columns)

    def differentiate_(
        self,
        dlogits: Tensor,
        stored: Stored,
        head: Head,
        first_column: int,
        rows: Rows,
        stats: RowStats,
        coefficients: Coefficients,
        teacher: Stored | None,
        counted: CountedRows = ALL_ROWS,
        partial_sums: Sequence[Tensor] = (),  # parts of sums over the vocabulary
    ) -> Tensor:
        """Writes the gradient of raw logits to ``dlogits``, and returns ``dlogits``. ``head``: a slice that begins at
        column ``first_column`` of the vocabulary. ``partial_sums``: for each sum over the vocabulary the memory
        [programs, rows] of its parts, if the gradient's kernel makes the sums too."""
        pairing, columns, softmax = self.demand.pairing, dlogits.shape[1], None
        if teacher is not None and pairing is not None:
            softmax = self.teacher_softmax(teacher, stats, min(max(pairing.columns - first_column, 0), columns))
        sums = sum_terms(self.demand.sums, stats, coefficients, softmax is not None, partial_sums)
        terms = terms_of(self.demand, rows.target, stats, coefficients, first_column, columns)
        if not any(term.function.is_paired for term in sums):
            softmax = None
        sum_arguments = softmax, sums, self.tie_tolerance
        row_arguments = transform(head, rows.scale), counted, own_columns(rows, stats, coefficients)
        self.backend.row_grad(dlogits, stored, head.class_weights, terms, *sum_arguments, first_column, *row_arguments)
        return dlogits

    def add_dhidden(self, dlogits: Tensor, rows: Rows, weight: Tensor, out: Tensor, is_first: bool) -> None:
        """Adds ``dlogits @ weight`` to ``out`` [rows, hidden], or overwrites ``out`` if ``is_first``."""
        add_dhidden(dlogits, weight, out, is_first)

    def add_dweight(
        self, dlogits: Tensor, rows: Rows, out: Tensor, is_first: bool, dlogits_divisor: Tensor | None = None
    ) -> None:
        """Adds ``dlogits_divisor * dlogits.T @ rows.hidden`` to ``out``, or overwrites ``out`` if ``is_first``.
        ``dlogits_divisor`` []: the number by which ``dlogits`` were divided; None for 1."""
        add_dweight(dlogits, rows.hidden, out, is_first, dlogits_divisor)


class LogitsStore(MatmulStore):
    """A store of fp32 logits (fp64 for fp64 operands) that BLAS makes. With kernels and 16-bit operands, the gradient
    that overwrites the logits has 16 bits."""

    def __init__(self, backend: Any, head: Head, plan: Plan, all_rows: CallRows, tiled: bool):
        super().__init__(backend, head, plan, all_rows, tiled)
        self.buffer = head.weight.new_empty(self.rows * self.columns, dtype=self.sizes.wide)
        if self.sizes.teacher_made:
            elements = self.rows * min(self.columns, self.sizes.teacher_columns)
            self.teacher_buffer = head.weight.new_empty(elements, dtype=self.sizes.wide)

    def raw_logits(self, rows: Rows, head: Head | TeacherHead, first_column: int = 0) -> Stored:
        """Makes the logits of a student or a teacher. ``head``: a tile of the weight, which begins at column
        ``first_column`` of the vocabulary.

        For kernels, the logits are raw: ``Stored`` also has the bias, scale and cap that readers apply. For torch
        operations, this function applies these once for all readers.
        """
        hidden, buffer = rows.hidden, self.buffer
        if isinstance(head, TeacherHead):
            assert head.hidden is not None
            hidden, buffer = head.hidden, self.teacher_buffer
        assert head.weight is not None
        row_count, columns = hidden.shape[0], head.weight.shape[0]
        logits, late_bias = buffer[: row_count * columns].view(row_count, columns), None
        if isinstance(head, Head) and head.fp8 is not None:
            fp8_logits(logits, rows, first_column, head, head.fp8)
        else:
            # as many rows at a time as in the forward pass, for the same bits
            product_rows = self.plan.chunk_tokens if columns == self.vocab else None
            late_bias = project(hidden, head.weight, logits, head.bias, product_rows)
        stored = Stored(logits, None, late_bias, transform(head, rows.scale))
        is_plain = late_bias is None and stored.transform == PLAIN
        return stored if is_plain or not self.sizes.in_blocks else transform_(stored)

    def fill(self, rows: Rows, out: RowStats) -> None:
        assert rows.source is not None
        self.backend.clean_rows(rows.hidden, rows.source, rows.target, rows.order)
        self.stored = self.raw_logits(rows, self.head)

    def statistics(self, rows: Rows, out: RowStats) -> None:
        head, logits, row_stats = self.head, self.stored.logits, self.backend.row_stats
        vectors = out.by_name
        if out.heavy_ids is not None and out.heavy_logits is not None:
            head_operands = rows.hidden, head.weight, head.bias, rows.target, transform(head, rows.scale)
            mend_heavy(out.heavy_ids, out.heavy_logits, logits, *head_operands)
        for i, (ratio, columns) in enumerate(self.demand.views):
            softmax_arguments = columns or logits.shape[1], rows.target, head.class_weights, ratio_of(ratio)
            row_stats(vectors_of(self.softmaxes[i], vectors), self.stored, *softmax_arguments)
        for statistic in self.demand.lists:
            list_logits, *ids = [vectors[name] for name in statistic.vectors]
            if ids:
                self.search_largest(*ids)
            self.pick_columns(list_logits, ids[0] if ids else rows.columns)
        if self.demand.pairing is not None:
            columns_of_both, outputs = slice(0, self.demand.pairing.columns), vectors_of(self.softmaxes[-1], vectors)
            self.teacher_stored = self.teacher_logits(rows, columns_of_both, outputs)

    def search_largest(self, ids: Tensor) -> None:
        """Writes the columns of the largest logits of each row to ``ids`` [rows, count] int64. Adds the bias to the
        stored logits in place."""
        if self.stored.bias is not None:
            self.stored = self.stored._replace(logits=self.stored.logits.add_(self.stored.bias), bias=None)
        logits, logit_scale = self.stored.logits, self.stored.transform.logit_scale
        raw_values = torch.empty_like(ids, dtype=logits.dtype)
        torch.topk(logits, ids.shape[1], largest=logit_scale is None or logit_scale > 0, out=(raw_values, ids))

    def pick_columns(self, out: Tensor, ids: Tensor | None) -> None:
        """Writes the logits of the columns ``ids`` [rows, count] to ``out`` [rows, count]; 0 for an id of -1."""
        assert ids is not None
        columns, bias = ids.clamp(min=0), self.stored.bias
        x = self.stored.logits.gather(1, columns).to(out.dtype)
        x = transformed(x, None if bias is None else bias[columns], self.stored.transform)
        out.copy_(x.masked_fill(ids < 0, 0.0))

    def gradient(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        """Returns the gradient [rows, columns] of the raw logits of a tile, which overwrites the logits. A ``tiled``
        store makes the logits first; else ``fill`` has made them."""
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
        # a row of 16-bit gradients is in the first half of its fp32 row's bytes
        dlogits = logits.view(logits.dtype if self.sizes.in_blocks else self.sizes.dtype)[:, : logits.shape[1]]
        return self.differentiate_(dlogits, self.stored, head, tile.start, rows, stats, coefficients, teacher)


class GivenLogits(LogitsStore):
    """A store of the caller's logits [rows, vocab], whose columns are contiguous. The head has only scale, cap and
    class weights. ``gradient`` [rows, vocab]: memory for the gradient, which may be the memory of the logits."""

    fill = Store.fill  # the logits exist already

    def __init__(self, backend: Any, head: Head, demand: Demand, rows: Rows, logits: Tensor, gradient: Tensor | None):
        self.backend, self.head, self.demand, self.vocab = backend, head, demand, logits.shape[1]
        self.softmaxes = layout_of(demand).softmaxes
        self.stored, self.gradient_memory = Stored(logits, None, None, transform(head, rows.scale)), gradient

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        assert self.gradient_memory is not None
        pairing, teacher = self.demand.pairing, None
        if pairing is not None:
            teacher = self.teacher_logits(rows, slice(0, pairing.columns), None)
        self.differentiate_(self.gradient_memory, self.stored, self.head, 0, rows, stats, coefficients, teacher)


def teacher_buffers(sizes: Sizes, rows: int, last: Phase) -> Iterator[Buffer]:
    """Yields the buffers of the logits of a dense teacher for a chunk, if the call makes these logits."""
    if not sizes.teacher_made:
        return
    # with ``teacher_last``, a pass that makes gradients has the teacher's logits of some rows at a time
    buffer_rows, columns = sizes.teacher_rows(rows) if last == LOOP else rows, sizes.teacher_columns
    if not sizes.own_matmul:
        yield Buffer("teacher's logits", (buffer_rows, columns), sizes.wide, SWEEP, last)
        return
    assert sizes.gpu is not None
    yield Buffer("teacher's logits", (buffer_rows, padded_columns(columns)), sizes.dtype, SWEEP, last)
    # offsets have memory for all rows of a chunk, since one stride from strip to strip serves student and teacher
    strips = sizes.gpu.strips_of(columns, relative=True)
    yield Buffer("teacher's statistics of strips", (rows, strips, 2), torch.float32, SWEEP, last)
