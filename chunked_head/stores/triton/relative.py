"""The store of fp16 logits that our matmul writes, relative to the maximum of each row in each strip of columns."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.gpus import RELATIVE_STRIP
from ...core.memory import empty
from ...core.records import ALL_ROWS, CountedRows, SoftmaxVectors, Stored
from ...core.stats import Coefficients, RowStats
from ...core.tiles import ELSEWHERE, STRIPS_AT_ONCE, cdiv
from ...kernels.common.operands import Strips, strip_rows
from ...kernels.gradients import launch as gradients
from ...kernels.products import launch as products
from ...kernels.statistics import launch as statistics
from ...plan.plans import Plan
from ...plan.sizes import LOOP, SWEEP, Buffer, Phase, Sizes, padded_columns, slices
from ..gradients import Gradients
from ..matmul import add_dhidden
from ..operands import CallRows, Head, Rows
from ..store import ratio_of, teacher_buffers, transform, vectors_of
from .store import FrequentRows, HalfStore, counted_of, sums_frequent


class RelativeStore(HalfStore):
    """The store of fp16 logits relative to the maximum of each strip of columns. One pass turns the logits into any
    gradient. The subclass ``FastStore`` keeps exponentials instead."""

    name = "relative"
    description = "logits relative to strips of columns"
    partial_sums: Tensor | None = None  # parts of the sums over the vocabulary that are made along with the gradient
    # [multiprocessors] int32: for each tile of dhidden whose sum is cut into parts, the number of finished parts
    finished_parts: Tensor | None = None
    level: Tensor | None = None  # [rows] the logit that stored exponentials are relative to; None: logits are stored
    frequent: FrequentRows | None = None  # rows of the weight's gradient that add up in float32

    @classmethod
    def chunk_buffers(cls, sizes: Sizes, rows: int, last: Phase, stores_logits: bool) -> Iterator[Buffer]:
        gpu, demand, pairing = sizes.gpu, sizes.demand, sizes.demand.pairing
        assert gpu is not None
        if stores_logits:
            yield Buffer("logits", (rows, padded_columns(sizes.vocab)), sizes.dtype, SWEEP, last)
            yield from teacher_buffers(sizes, rows, last)
        strip_count = gpu.strips_of(sizes.vocab, relative=stores_logits and cls.name == "relative")
        # per strip and row: an offset, and for each softmax a sum of exponentials and its statistics' numbers
        numbers_per_strip = 1 + sum(1 + sum(len(s.vectors) for s in statistics) for statistics in demand.statistics)
        yield Buffer("statistics of strips", (rows, strip_count, numbers_per_strip), torch.float32, SWEEP, last)
        if last < LOOP:
            return
        yield from FrequentRows.buffers(sizes, rows)
        part_elements = dhidden_part_elements(sizes, rows)
        if part_elements > (numbers_per_strip - 1) * strip_count * strip_rows(rows):  # else in the strips' memory
            yield Buffer("gradient of hidden, parts", (part_elements,), torch.float32, LOOP, LOOP)
        if sizes.teacher_last and pairing is not None:
            teacher_sums_shape = rows, len(demand.sums), cdiv(sizes.vocab, RELATIVE_STRIP * STRIPS_AT_ONCE)
            yield Buffer("teacher's sums of strips", teacher_sums_shape, torch.float32, LOOP, LOOP)

    def __init__(self, backend: Any, head: Head, plan: Plan, all_rows: CallRows, tiled: bool):
        super().__init__(backend, head, plan, all_rows, tiled)
        sizes, demand, rows, gpu, device = self.sizes, self.demand, self.rows, self.gpu, head.weight.device
        # a sweep without gradients stores logits only if a second pass reads them
        stores_logits = plan.schedule == "forward" or sizes.keeps_sweep
        self.buffer = relative_logits(rows, sizes.vocab, device) if stores_logits else None
        if sizes.hidden_grad and plan.schedule == "forward":
            self.finished_parts = empty(sizes.multiprocessors, dtype=torch.int32, device=device)  # ``fill`` writes 0
        self.tile = gpu.logits_tile(rows)
        # the targets' logits as the product makes them, which are in the strips' sums
        self.tile_logit = empty(rows, dtype=torch.float32, device=device)
        strip_count = gpu.strips_of(sizes.vocab, stores_logits and self.name == "relative")
        self.strips = Strips.empty(rows, strip_count, device, demand.statistics)
        if self.finished_parts is not None:
            part_elements, strip_sums = dhidden_part_elements(sizes, rows), self.strips.all_sums()
            # memory for parts of dhidden
            self.dhidden_parts = strip_sums[:part_elements]
            if part_elements > len(strip_sums):
                self.dhidden_parts = empty(part_elements, dtype=torch.float32, device=device)
        self.ratios_and_columns = [ratio_of(ratio) for ratio, _ in demand.views], [width for _, width in demand.views]
        self.teacher_rows = sizes.teacher_rows(rows) if plan.teacher_last else rows
        if sizes.teacher_made:
            self.teacher_buffer = relative_logits(self.teacher_rows, sizes.teacher_columns, device)
            self.teacher_tile = gpu.logits_tile(self.teacher_rows)
            strip_count = gpu.strips_of(sizes.teacher_columns, relative=True)
            assert demand.pairing is not None
            # memory for as many rows as the student's: kernels that read both take one stride from strip to strip
            self.teacher_strips = Strips.empty(rows, strip_count, device, (demand.pairing.statistics,))
        if plan.teacher_last:
            shape = len(demand.sums), gradients.row_programs(sizes.vocab), strip_rows(rows)
            self.partial_sums = empty(*shape, dtype=torch.float32, device=device)

    def fill(self, rows: Rows, out: RowStats) -> None:
        """Writes each strip's sums to ``self.strips`` and, if there is a buffer of logits, the logits relative to the
        strips' maxima. ``FastStore`` stores exponentials relative to the target's logit instead."""
        head, row_count, stored_logits = self.head, rows.target.shape[0], None
        logit_transform = transform(head, rows.scale)
        tile_logit = None if head.fp8 is not None else self.tile_logit[:row_count]
        assert rows.source is not None
        statistics.clean_rows(
            rows.hidden, rows.source, rows.target, rows.order, out.target_logit, head.weight, head.bias,
            logit_transform, self.finished_parts, tile_logit,
        )  # fmt: skip
        if self.has_target_logits and head.add_targets is not None:
            head.add_targets(out.target_logit)  # adds the logits of targets on other ranks
        self.stored_strips = strips = self.strips.of_rows(row_count)
        for statistic in self.demand.lists:
            assert rows.columns is not None
            logits = out.by_name[statistic.vectors[0]]
            statistics.dot_columns(logits, rows.hidden, head.weight, rows.columns, head.bias, logit_transform)
        if self.buffer is not None:
            stored_logits = self.buffer[:row_count, : self.vocab]
            if self.level is not None:
                stored_logits = stored_logits.view(self.sizes.dtype)
            self.stored = Stored(stored_logits, strips.offset)
        statistics.exp_logits(
            stored_logits, strips, *self.operands(rows, head, True), head.bias, head.class_weights,
            None if self.level is None else out.target_logit, logit_transform, self.tile, *self.ratios_and_columns,
            counted_of(rows), *((None, None) if head.fp8 is None else (rows.target, out.target_logit)),
        )  # fmt: skip

    def statistics(self, rows: Rows, out: RowStats) -> None:
        """Merges the statistics of strips into statistics of rows. With e4m3 operands, first replaces the logits of
        heavy ids by exact logits."""
        head = self.head
        if out.heavy_ids is not None and out.heavy_logits is not None:
            statistics.mend_heavy(
                out.heavy_ids, out.heavy_logits, self.stored.logits, self.stored_strips, rows.hidden, head.weight,
                head.bias, head.class_weights, rows.target, out.target_logit, transform(head, rows.scale),
                self.gpu.strip_width(relative=self.level is None), *self.ratios_and_columns, counted_of(rows),
            )  # fmt: skip
        target_vectors = out.target_logit, None if head.fp8 is not None else self.tile_logit, rows.target
        for i, (ratio, columns) in enumerate(self.demand.views):
            outputs, view = vectors_of(self.softmaxes[i], out.by_name), (columns or self.vocab, ratio_of(ratio), i)
            statistics.merge_strips(outputs, self.level, self.stored_strips, *target_vectors, *view)
        if self.demand.pairing is not None and not self.plan.teacher_last:
            outputs = vectors_of(self.softmaxes[-1], out.by_name)
            self.teacher_stored = self.teacher_logits(rows, slice(self.sizes.teacher_columns), outputs)

    def teacher_logits(self, rows: Rows, columns: slice, normalize: SoftmaxVectors[Tensor] | None) -> Stored:
        teacher, row_count = rows.teacher, rows.target.shape[0]
        if teacher is None or teacher.hidden is None or teacher.weight is None or normalize is None:
            return super().teacher_logits(rows, columns, normalize)
        buffer, logit_transform = self.teacher_buffer[:row_count, columns], transform(teacher, rows.scale)
        strips = self.teacher_strips.of_rows(row_count)
        statistics.exp_logits(
            buffer, strips, teacher.hidden, teacher.weight, teacher.bias, None, None, logit_transform,
            self.teacher_tile, counted=counted_of(rows),
        )  # fmt: skip
        statistics.merge_strips(normalize, None, strips, None, None, None, columns.stop)
        return Stored(buffer, strips.offset)

    def gradient(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        dlogits, stored, head = self.stored.logits.view(self.sizes.dtype), self.stored, self.head
        if not self.plan.teacher_last:
            teacher = None if self.demand.pairing is None else self.teacher_stored
            counted = self.gradient_rows(rows)
            return self.differentiate_(dlogits, stored, head, 0, rows, stats, coefficients, teacher, counted)
        # the teacher's logits and statistics, and the sums over the vocabulary, are made for some rows at a time
        for block in slices(len(dlogits), self.teacher_rows):
            block_rows, block_stats = rows.narrow(block), stats.narrow(block)
            assert self.demand.pairing is not None
            outputs = vectors_of(self.softmaxes[-1], block_stats.by_name)
            self.teacher_stored = self.teacher_logits(block_rows, slice(self.sizes.teacher_columns), outputs)
            assert self.partial_sums is not None
            self.differentiate_(
                dlogits[block], stored.narrow(block), head, 0, block_rows, block_stats, coefficients.narrow(block),
                self.teacher_stored, self.gradient_rows(block_rows), self.partial_sums[:, :, block].unbind(),
            )  # fmt: skip
        if self.partial_sums is not None:
            for i, partial_sum in enumerate(self.partial_sums.unbind()):
                torch.sum(partial_sum[:, : len(dlogits)], 0, out=stats.by_name[f"sum{i}"])
        return dlogits

    def add_dweight(
        self, dlogits: Tensor, rows: Rows, out: Tensor, is_first: bool, dlogits_divisor: Tensor | None = None
    ) -> None:
        super().add_dweight(dlogits, rows, out, is_first, dlogits_divisor)
        if sums_frequent(self.sizes, self.rows, out.dtype):
            if self.frequent is None:
                self.frequent = FrequentRows(self.sorted_call_targets.columns, self.sizes, self.rows)
            self.frequent.add_chunk(dlogits, rows, is_first)

    def finish(self, grads: Gradients) -> None:
        if self.frequent is not None and grads.weight is not None:
            self.frequent.replace(grads.weight)

    @functools.cached_property
    def sorted_call_targets(self) -> products.SortedColumns:
        """The sorted targets of all tokens of the call."""
        return self.sorted_targets(self.call_targets)

    def sorted_targets(self, target: Tensor) -> products.SortedColumns:
        """Sorts ``target`` [rows], columns of this rank's vocabulary or -1. A target of another rank becomes -1."""
        if self.head.add_targets is not None:
            target = target.masked_fill(target == ELSEWHERE, -1)
        # with occurrences, a token's exponentials depend on other tokens, which "deterministic" forbids
        return products.sort_columns(target, counts_occurrences=self.level is not None and not self.sizes.deterministic)

    def gradient_rows(self, rows: Rows) -> CountedRows:
        """Returns which rows of dlogits a kernel writes."""
        # a bias's gradient is a sum over all rows of dlogits, so no row may stay uninitialised
        return ALL_ROWS if self.sizes.bias_grad else counted_of(rows)

    def add_dhidden(
        self,
        dlogits: Tensor,
        rows: Rows,
        weight: Tensor,
        out: Tensor,
        is_first: bool,
        factors: products.RowFactors | None = None,
    ) -> None:
        """Adds ``softmax * (dlogits @ weight) + at_target * weight[target]`` to ``out``, of the three ``factors``, or
        overwrites ``out`` if ``is_first``. Without ``factors`` adds ``dlogits @ weight``."""
        if self.sizes.own_dhidden:
            most_units = self.dhidden_parts.numel() // self.gpu.product.elements
            split = self.sizes.dhidden_split(rows.target.shape[0], most_units)
            products.dhidden(
                out, dlogits, weight, self.gpu.product, factors, counted_of(rows), False, split, self.dhidden_parts,
                self.finished_parts,
            )  # fmt: skip
        elif factors is None:
            super().add_dhidden(dlogits, rows, weight, out, is_first)
        else:
            product = self.dhidden_parts[: out.numel()].view(out.shape)
            add_dhidden(dlogits, weight, product, is_first=True)
            products.finish_dhidden(out, product, weight, factors)


def dhidden_part_elements(sizes: Sizes, rows: int) -> int:
    """Returns the number of fp32 elements of dhidden's scratch memory: partial sums of tiles of dhidden; or, if BLAS
    multiplies exponentials, the product [rows, hidden]."""
    if sizes.gpu is None or not sizes.hidden_grad:
        return 0
    if sizes.store.name == "fast" and (sizes.e4m3_gradients or not sizes.own_dhidden):
        return rows * sizes.hidden
    _, part_count = sizes.dhidden_split(rows)
    return part_count * sizes.gpu.product.elements


def relative_logits(rows: int, columns: int, device: torch.device) -> Tensor:
    """Returns uninitialised memory of 16-bit logits [rows, padded columns], in which each row starts on 16 bytes."""
    return empty(rows, padded_columns(columns), dtype=torch.float16, device=device)
