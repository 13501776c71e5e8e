"""Stores in Triton kernels: fp32 logits that cuBLAS makes, and gradients of blocks whose statistics are known."""

import itertools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ..core.stats import PAIR_STATS, Coefficients, Demand, RowStats
from ..kernels.common.records import (
    ALL_ROWS,
    NO_SOFTMAX,
    Counted,
    Outputs,
    Softmax,
    Stored,
    TeacherTerms,
    Terms,
    Transform,
)
from ..kernels.common.tiles import Matrix, Quantised
from ..kernels.gradients import launch as gradients
from ..kernels.products import launch as products
from ..kernels.statistics import launch as statistics
from ..parallel.merge import GatheredStats, merge_lists, unpack, widths
from ..plan.plans import Plan, own_dweight
from ..plan.sizes import LOOP, Buffer, Sizes, padded_columns
from .gradients import Gradients
from .matmul import project_biased
from .operands import Head, Rows, TeacherHead
from .quantised import empty_quantised
from .store import MatmulStore, Store
from .torch_store import transform_

TMA_BYTES = 16  # alignment that tensor descriptors ask of a row
FP16_LARGEST = 64.0
# relative difference up to which probabilities of 16-bit logits count as equal: where student and teacher agree, only
# roundings differ, and their signs in the sum over a row would be others than in the gradient of its columns
TIE = 2.0**-16
# of KL(q || p) and of q's entropy, what each program of a gradient's kernel has summed [programs, rows]
Parts = tuple[Tensor | None, Tensor | None]


def transform(head: Head | TeacherHead, scale: Tensor | None) -> Transform:
    """Scale and cap as kernels take them, None for 1 and no cap. ``scale`` [rows]: of the rows."""
    logit_scale = None if head.logit_scale == 1.0 else float(head.logit_scale)
    return Transform(logit_scale, head.softcap, scale if head.scaled else None)


OUTPUTS = {view: tuple(name + view for name in Outputs._fields) for view in ("", "2")}


def outputs_of(stats: Mapping[str, Tensor], view: str = "") -> Outputs:
    """Outputs of a softmax's statistics, by their names; ``view``: "2" for those of the second."""
    return Outputs(*map(stats.get, OUTPUTS[view]))


def teacher_outputs(out: RowStats) -> Outputs:
    """Outputs of a teacher's statistics: those that make log-probabilities of its logits, the largest and its id."""
    return Outputs(start=out.teacher_start, rest=out.teacher_rest, top=out.teacher_top, argmax=out.teacher_argmax)


def ratio_of(ratio: float) -> float | None:
    return None if ratio == 1.0 else float(ratio)


def terms_of(
    demand: Demand, target: Tensor, stats: RowStats, c: Coefficients, first: int, columns: int, vocab: int
) -> Terms:
    """Operands of the gradient of so many columns from ``first`` on."""
    second = NO_SOFTMAX
    if stats.start2 is not None:
        columns2 = min(max((demand.views[1].columns or vocab) - first, 0), columns)
        second = Softmax(stats.start2, stats.rest2, c.alpha2, c.eta2, ratio_of(demand.views[1].ratio), columns2)
    return Terms(target, stats.target_logit, c.beta, c.kappa, Softmax(stats.start, stats.rest, c.alpha, c.eta), second)


def counted_of(rows: Rows) -> Counted:
    return Counted(rows.counted, rows.first)


def zero_uncounted_(dlogits: Tensor, rows: Rows) -> Tensor:
    """Zeros the rows behind those that count, which our products leave unwritten, for sums over all rows."""
    return dlogits if rows.counted is None else dlogits.masked_fill_((rows.target < 0).unsqueeze(1), 0.0)


class KernelStore(MatmulStore):
    """A store whose logits one kernel turns into any gradient: second softmaxes, teachers, columns of each row."""

    stored: Stored
    teacher_stored: Stored  # of the same rows
    made_teacher: Callable[[Rows, TeacherHead, slice], Stored]  # where the caller gives no logits
    clean_rows = staticmethod(statistics.clean_rows)

    @property
    def tie(self) -> float | None:
        """Relative difference of probabilities that count as equal."""
        return TIE if self.sizes.dtype.itemsize == 2 else None

    def fitted(self, rows: Rows, coefficients: Coefficients) -> tuple[Coefficients, Tensor | None]:
        """In fp16 the largest gradient of a logit becomes about 64: that keeps the probabilities of a 128K vocabulary
        among fp16's normal numbers, and leaves a factor of 1000 to logarithms of probabilities. The factor always has
        an inverse: a gradient that is nan or infinite stays one token's."""
        if self.sizes.dtype != torch.float16:
            return coefficients, None
        values = coefficients.named().values()
        sizes = torch.stack([value.abs().view(len(value), -1).amax(1) for value in values]).amax(0)
        sizes = sizes * abs(self.head.logit_scale)
        largest = (sizes if rows.scale is None else sizes * rows.scale).amax()
        gain = (largest / FP16_LARGEST).clamp(min=torch.finfo(largest.dtype).tiny)
        gain = torch.where((largest > 0) & torch.isfinite(largest), gain, 1.0)
        return coefficients.times(1.0 / gain), gain

    def pair_statistics(self, rows: Rows, out: RowStats) -> None:
        pairing = self.demand.pairing
        assert pairing is not None and out.teacher_start is not None and out.teacher_rest is not None
        start, rest = (out.start2, out.rest2) if pairing.view else (out.start, out.rest)
        assert start is not None and rest is not None
        statistics.pair_stats(
            [getattr(out, name) for name in PAIR_STATS],
            self.stored,
            (start, rest),
            ratio_of(self.demand.views[pairing.view].ratio),
            self.teacher_stored,
            (out.teacher_start, out.teacher_rest),
            pairing.columns,
            pairing.beta,
            self.tie,
        )

    def teacher_logits(self, rows: Rows, columns: slice, normalize: Outputs | None) -> Stored:
        """A teacher's logits, the caller's or made; ``normalize`` receives what makes log-probabilities of them."""
        teacher = rows.teacher
        assert teacher is not None
        if teacher.logits is None:
            stored = self.made_teacher(rows, teacher, columns)
        else:
            stored = Stored(teacher.logits[:, columns], None, None, transform(teacher, rows.scale))
        if normalize is not None:
            statistics.row_stats(normalize, stored, stored.logits.shape[1])
        return stored

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
        parts: Parts = (None, None),
    ) -> Tensor:
        """The gradient of raw logits, of the columns from ``first`` on of which ``head`` is the head."""
        pairing, columns, teacher_terms = self.demand.pairing, dlogits.shape[1], None
        if teacher is not None and pairing is not None:
            assert stats.teacher_start is not None and stats.teacher_rest is not None
            teacher_terms = TeacherTerms(
                teacher,
                stats.teacher_start,
                stats.teacher_rest,
                min(max(pairing.columns - first, 0), columns),
                pairing.view == 1,
                c.gamma,
                c.rho,
                c.tau,
                c.theta,
                stats.below,
                pairing.beta,
                self.tie,
                *parts,
            )
        common = terms_of(self.demand, rows.target, stats, c, first, columns, self.vocab)
        gradients.row_grad(
            dlogits, stored, head.class_weights, common, teacher_terms, first, transform(head, rows.scale), counted
        )
        self.replace_columns_(dlogits, head, first, rows, stats, c, common, teacher_terms)
        return dlogits

    def replace_columns_(
        self,
        dlogits: Tensor,
        head: Head,
        first: int,
        rows: Rows,
        stats: RowStats,
        c: Coefficients,
        common: Terms,
        teacher_terms: TeacherTerms | None = None,
    ) -> None:
        """Gradients at the columns of each row, from exact logits."""
        if c.columns is None:
            return
        assert stats.column_logits is not None and rows.columns is not None
        gradients.column_grad(
            dlogits,
            stats.column_logits,
            rows.columns,
            c.columns,
            head.class_weights,
            common,
            teacher_terms,
            first,
            transform(head, rows.scale),
        )


class LogitsStore(KernelStore):
    """fp32 logits that cuBLAS makes; the gradient of 16-bit operands is written, 16-bit wide, over their bytes."""

    def __init__(self, head: Head, plan: Plan, every: Rows, tiled: bool):
        super().__init__(head, plan, every, tiled)
        device = head.weight.device
        self.buffer = torch.empty(self.rows * self.columns, dtype=torch.float32, device=device)
        if self.sizes.teacher_made:
            elements = self.rows * min(self.columns, self.sizes.teacher_columns)
            self.teacher_buffer = torch.empty(elements, dtype=torch.float32, device=device)

    def raw_logits(
        self, rows: Rows, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head | TeacherHead, buffer: Tensor
    ) -> Stored:
        """Raw logits of a student or a teacher, with the bias or the bias to be added, to be read with the head's scale
        and cap."""
        count, columns = hidden.shape[0], weight.shape[0]
        logits = buffer[: count * columns].view(count, columns)
        at_once = self.plan.chunk_tokens if columns == self.vocab else None  # as the forward pass has made them
        left = project_biased(hidden, weight, bias, logits, at_once)
        return Stored(logits, None, left, transform(head, rows.scale))

    def fill(self, rows: Rows, out: RowStats) -> None:
        assert rows.source is not None
        self.clean_rows(rows.hidden, rows.source, rows.target, rows.order)
        self.stored = self.raw_logits(rows, rows.hidden, self.head.weight, self.head.bias, self.head, self.buffer)

    def statistics(self, rows: Rows, out: RowStats) -> None:
        head, logits = self.head, self.stored.logits
        named = out.named()
        statistics.row_stats(outputs_of(named), self.stored, logits.shape[1], rows.target, head.class_weights)
        if len(self.demand.views) > 1:
            view = self.demand.views[1]
            columns, ratio = view.columns or self.vocab, ratio_of(view.ratio)
            statistics.row_stats(outputs_of(named, "2"), self.stored, columns, rows.target, ratio=ratio)
        if out.column_logits is not None:
            assert rows.columns is not None
            self.pick_columns(out.column_logits, rows, rows.columns, self.stored.bias)
        if out.top_k_ids is not None:
            assert out.top_k_logits is not None
            raw = logits if self.stored.bias is None else logits.add_(self.stored.bias)
            k = out.top_k_ids.shape[1]
            torch.topk(raw, k, largest=head.logit_scale > 0, out=(torch.empty_like(out.top_k_logits), out.top_k_ids))
            self.pick_columns(out.top_k_logits, rows, out.top_k_ids, None)  # a bias is in the logits by now
        if self.demand.pairing is not None:
            columns_of_both = slice(0, self.demand.pairing.columns)
            self.teacher_stored = self.teacher_logits(rows, columns_of_both, teacher_outputs(out))

    def pick_columns(self, out: Tensor, rows: Rows, ids: Tensor, bias: Tensor | None) -> None:
        """Logits of the columns ``ids`` [rows, count] of each row, 0 where one is -1."""
        at = ids.clamp(min=0)
        x = self.stored.logits.gather(1, at).to(out.dtype)
        if bias is not None:
            x += bias[at]
        transform_(x, None, self.head, rows.scale)
        out.copy_(x.masked_fill_(ids < 0, 0.0))

    def made_teacher(self, rows: Rows, teacher: TeacherHead, columns: slice) -> Stored:
        assert teacher.hidden is not None and teacher.weight is not None
        bias = None if teacher.bias is None else teacher.bias[columns]
        return self.raw_logits(rows, teacher.hidden, teacher.weight[columns], bias, teacher, self.teacher_buffer)

    def gradient(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        """The gradient of the raw logits of a tile: of the chunk filled last, or of logits made here."""
        head, pairing, teacher = self.head, self.demand.pairing, None
        if self.tiled:
            head = head.columns(tile)
            self.stored = self.raw_logits(rows, rows.hidden, head.weight, head.bias, head, self.buffer)
        if pairing is not None and tile.start < pairing.columns:
            columns = slice(tile.start, min(tile.stop, pairing.columns))
            teacher = self.teacher_logits(rows, columns, None) if self.tiled else self.teacher_stored
        logits = self.stored.logits
        # a 16-bit row lies in the first half of its fp32 row
        dlogits = logits.view(self.sizes.dtype)[:, : logits.shape[1]]
        return self.differentiate_(dlogits, self.stored, head, tile.start, rows, stats, coefficients, teacher)


class GivenLogits(LogitsStore):
    """Logits that exist already, in the place of what a matmul makes of hidden states."""

    tie = None
    fill = Store.fill  # they are there

    def __init__(self, head: Head, demand: Demand, rows: Rows, gradient: Tensor | None):
        self.head, self.demand, self.vocab, self.gradient_of = head, demand, rows.hidden.shape[1], gradient
        self.stored = Stored(rows.hidden, None, None, transform(head, rows.scale))

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        assert self.gradient_of is not None
        pairing, teacher = self.demand.pairing, None
        if pairing is not None:
            teacher = self.teacher_logits(rows, slice(0, pairing.columns), None)
        self.differentiate_(self.gradient_of, self.stored, self.head, 0, rows, stats, coefficients, teacher)


class HalfStore(KernelStore):
    """A store of 16-bit rows that start on 16 bytes, as our products ask."""

    bounds_rows = True

    @classmethod
    def tile_buffers(cls, sizes: Sizes, rows: int, columns: int) -> Iterator[Buffer]:
        if sizes.grads_in_matmul:
            yield Buffer("gradients of a tile's logits", (rows, padded_columns(columns)), sizes.dtype, LOOP, LOOP)
        else:
            yield from super().tile_buffers(sizes, rows, columns)

    def __init__(self, head: Head, plan: Plan, every: Rows, tiled: bool):
        super().__init__(head, plan, every, tiled)
        assert self.sizes.gpu is not None
        self.gpu = self.sizes.gpu
        if self.sizes.fp8:
            self.hidden8 = empty_quantised(self.rows, self.sizes.hidden, head.weight.device, each_row=True)

    def operands(
        self, rows: Rows, head: Head, anew: bool
    ) -> list[tuple[tuple[Matrix, Matrix, Tensor | None], Tensor | None]]:
        """Operands and bias of the products that make the logits, each but the first of some blocks of ids. ``anew``:
        where they are e4m3, the rows are others than those that were asked for last."""
        exact, fp8 = (rows.hidden, head.weight, head.bias), head.fp8
        if fp8 is None:
            return [(exact, None)]
        count = rows.target.shape[0]
        quantised = Quantised(self.hidden8.values[:count], self.hidden8.scale[:count])
        if anew:
            statistics.quantise(quantised, rows.hidden, mean=fp8.mean)
        low = (quantised, fp8.weight, fp8.bias), None
        return [low, (exact, fp8.blocks)] if len(fp8.blocks) else [low]

    def add_dweight(self, dlogits: Tensor, rows: Rows, out: Tensor, first: bool, gain: Tensor | None = None) -> None:
        # a buffer of the caller's may start anywhere
        aligned = out.data_ptr() % TMA_BYTES == 0 and out.stride(0) * out.element_size() % TMA_BYTES == 0
        if gain is None and aligned and own_dweight(self.plan, stored=first):
            products.dweight(out, dlogits, rows.hidden, first, self.gpu.product, counted_of(rows))
        else:
            super().add_dweight(zero_uncounted_(dlogits, rows), rows, out, first, gain)


class GradStore(HalfStore):
    """Gradients of logits whose statistics are known: the matmul stores them in place of the logits."""

    def __init__(self, head: Head, plan: Plan, every: Rows, tiled: bool):
        super().__init__(head, plan, every, tiled)
        elements = self.rows * padded_columns(self.columns)
        self.buffer = torch.empty(elements, dtype=self.sizes.dtype, device=head.weight.device)

    def gradient(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        head, count, columns = self.head.columns(tile), rows.target.shape[0], tile.stop - tile.start
        # a row starts on 16 bytes
        stride = padded_columns(columns)
        dlogits = self.buffer[: count * stride].view(count, stride)[:, :columns]
        common = terms_of(self.demand, rows.target, stats, coefficients, tile.start, columns, self.vocab)
        for operands, blocks in self.operands(rows, head, tile.start == 0):
            gradients.grad_logits(
                dlogits,
                *operands,
                head.class_weights,
                common,
                tile.start,
                transform(head, rows.scale),
                self.gpu.logits,
                counted_of(rows),
                blocks,
            )
        self.replace_columns_(dlogits, head, tile.start, rows, stats, coefficients, common)
        return zero_uncounted_(dlogits, rows) if self.sizes.bias_grad else dlogits

    def add_dhidden(self, dlogits: Tensor, rows: Rows, weight: Tensor, out: Tensor, first: bool) -> None:
        # BLAS chooses by the number of rows, and computes all of them
        if rows.counted is None and not self.sizes.deterministic:
            super().add_dhidden(dlogits, rows, weight, out, first)
        else:
            products.dhidden(out, dlogits, weight, self.gpu.product, counted=counted_of(rows), add=not first)


PLACES = "TARGET", "WEIGHTED", "START", "REST", "ENTROPY", "TOP", "ARGMAX"


def merge_ranks(gathered: GatheredStats, out: RowStats) -> None:
    """``Backend.merge_ranks`` in one kernel for each softmax."""
    at = dict(zip(gathered.names, itertools.accumulate(widths(out, gathered.names), initial=0), strict=False))
    named = out.named()
    softmaxes = [(outputs_of(named), 1.0, ("start", "rest", "entropy", "top", "argmax"))]
    if "start2" in named:
        softmaxes.append((outputs_of(named, "2"), gathered.ratio2, ("start2", "rest2", "entropy2", "top", "argmax")))
    if "teacher_start" in named:
        names = "teacher_start", "teacher_rest", "", "teacher_top", "teacher_argmax"
        softmaxes.append((teacher_outputs(out), 1.0, names))
    for outputs, ratio, names in softmaxes:
        places = [at.get(name, -1) for name in ("target_logit", "weighted_sum", *names)]
        statistics.merge_ranks(
            outputs,
            gathered.message,
            gathered.zero_or_nan,
            gathered.target,
            ratio,
            dict(zip(PLACES, places, strict=True)),
            gathered.known_targets,
        )
    if out.column_logits is not None or out.top_k_logits is not None:
        merge_lists(unpack(gathered.message.double(), out, gathered.names), out)
