"""What the Triton backend's sessions share: teachers beside the student, second softmaxes, any gradient in one pass."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...core.stats import PAIR_STATS, Coefficients, Demand, Head, Rows, RowStats, Teacher
from ...kernels.common.operands import ALL_ROWS, Counted, Stored, Transform
from ...kernels.common.recording import refuse
from ...kernels.gradients import launch as gradients
from ...kernels.gradients.launch import NO_SOFTMAX, Beside, Softmax, Terms
from ...kernels.products import launch as products
from ...kernels.statistics import launch as statistics
from ...kernels.statistics.launch import Outputs
from ...plan.plans import Plan
from ..session import Session


def transform(head: Head | Teacher, scale: Tensor | None) -> Transform:
    """As the kernels take it: None for what there is none of, and then no code. ``scale``: of the rows."""
    logit_scale = None if head.logit_scale == 1.0 else float(head.logit_scale)
    return Transform(logit_scale, head.softcap, scale if head.scaled else None)


TMA_BYTES = 16  # alignment that tensor descriptors ask of a row
# of KL(q || p) and of q's entropy, what each program of a gradient's kernel has summed [programs, rows]
Parts = tuple[Tensor | None, Tensor | None]
NO_PARTS: Parts = (None, None)


def outputs_of(stats: Mapping[str, Tensor], view: str = "") -> Outputs:
    """Where a softmax's statistics go, by their names; ``view``: "2" for those of the second."""
    return Outputs(*(stats.get(name + view) for name in Outputs._fields))


def teacher_outputs(out: RowStats) -> Outputs:
    """What makes log-probabilities of a teacher's logits, and what is wanted beside."""
    return Outputs(start=out.teacher_start, rest=out.teacher_rest, top=out.teacher_top, argmax=out.teacher_argmax)


def ratio_of(ratio: float) -> float | None:
    return None if ratio == 1.0 else float(ratio)


def terms_of(demand: Demand, target: Tensor, stats: RowStats, c: Coefficients, columns2: int = 0) -> Terms:
    """What a gradient is made of; ``columns2``: of a second softmax."""
    second = NO_SOFTMAX
    if stats.start2 is not None:
        second = Softmax(stats.start2, stats.rest2, c.alpha2, c.eta2, ratio_of(demand.views[1].ratio), columns2)
    return Terms(target, stats.target_logit, c.beta, c.kappa, Softmax(stats.start, stats.rest, c.alpha, c.eta), second)


def counted_of(rows: Rows) -> Counted:
    return Counted(rows.counted, rows.first)


def zero_uncounted_(dlogits: Tensor, rows: Rows) -> Tensor:
    """For sums over all rows: behind those that count, where products of our own stop, nobody has written."""
    return dlogits if rows.counted is None else dlogits.masked_fill_((rows.target < 0).unsqueeze(1), 0.0)


FP16_LARGEST = 64.0


def gain_of(largest: Tensor) -> Tensor:
    """What to divide by so that the largest gradient of a logit is about 64: it keeps the probabilities of a 128K
    vocabulary among fp16's normal numbers, and leaves a factor of 1000 to logarithms of probabilities. Always a number
    with an inverse: a gradient that is nan or infinite stays one token's."""
    gain = (largest / FP16_LARGEST).clamp(min=torch.finfo(largest.dtype).tiny)
    return torch.where((largest > 0) & torch.isfinite(largest), gain, 1.0)


class KernelSession(Session):
    """What sessions with a pass over stored logits share: second views, teachers, columns, gradients."""

    stored: Stored
    teacher_stored: Stored  # beside these rows

    def __init__(self, head: Head, plan: Plan):
        self.head, self.sizes, self.demand = head, plan.sizes, plan.sizes.demand
        self.vocab = self.sizes.vocab

    def clean_rows(self, rows: Rows, source: Tensor, order: Tensor | None, stats: RowStats | None) -> None:
        statistics.clean_rows(rows.hidden, source, rows.target, order)

    def fitted(self, rows: Rows, coefficients: Coefficients) -> tuple[Coefficients, Tensor | None]:
        if self.sizes.dtype != torch.float16:
            return coefficients, None
        refuse("the range of fp16", never=True)
        values = coefficients.named().values()
        sizes = torch.stack([value.abs().view(len(value), -1).amax(1) for value in values]).amax(0)
        sizes = sizes * abs(self.head.logit_scale)
        gain = gain_of((sizes if rows.scale is None else sizes * rows.scale).amax())
        return coefficients.times(1.0 / gain), gain

    def teacher_stats(self, rows: Rows, out: RowStats) -> None:
        """A teacher's own."""
        if self.demand.pairing is not None:
            self.teacher_stored = self.store_teacher(rows, teacher_outputs(out))

    def pair_stats(self, rows: Rows, out: RowStats) -> None:
        demand = self.demand
        pairing = demand.pairing
        assert pairing is not None and out.teacher_start is not None and out.teacher_rest is not None
        start, rest = (out.start2, out.rest2) if pairing.view else (out.start, out.rest)
        assert start is not None and rest is not None
        statistics.pair_stats(
            [getattr(out, name) for name in PAIR_STATS],
            self.stored, (start, rest), ratio_of(demand.views[pairing.view].ratio),
            self.teacher_stored, (out.teacher_start, out.teacher_rest), pairing.columns, pairing.beta,
        )  # fmt: skip

    def store_teacher(self, rows: Rows, normalize: Outputs) -> Stored:
        """The teacher's logits of a chunk, and what makes log-probabilities of them."""
        raise NotImplementedError

    def given_teacher(self, rows: Rows, columns: slice, normalize: Outputs | None) -> Stored:
        """Logits that the caller holds."""
        teacher = rows.teacher
        assert teacher is not None and teacher.logits is not None
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
        coefficients: Coefficients,
        teacher: Stored | None,
        counted: Counted = ALL_ROWS,
        parts: Parts = NO_PARTS,
    ) -> Tensor:
        c, pairing, columns = coefficients, self.demand.pairing, dlogits.shape[1]
        beside = None
        if teacher is not None and pairing is not None:
            assert stats.teacher_start is not None and stats.teacher_rest is not None
            beside = Beside(
                teacher, stats.teacher_start, stats.teacher_rest,
                min(max(pairing.columns - first, 0), columns), pairing.view == 1,
                c.gamma, c.rho, c.tau, c.theta, pairing.beta, *parts,
            )  # fmt: skip
        common = self.terms(rows, stats, c, first, columns)
        gradients.row_grad(
            dlogits, stored, head.class_weights, common, beside, first, transform(head, rows.scale), counted
        )
        self.replace_columns_(dlogits, head, first, rows, stats, c, common, beside)
        return dlogits

    def terms(self, rows: Rows, stats: RowStats, c: Coefficients, first: int, columns: int) -> Terms:
        """What the gradient of a tile's columns is made of."""
        columns2 = 0
        if stats.start2 is not None:
            columns2 = min(max((self.demand.views[1].columns or self.vocab) - first, 0), columns)
        return terms_of(self.demand, rows.target, stats, c, columns2)

    def replace_columns_(
        self,
        dlogits: Tensor,
        head: Head,
        first: int,
        rows: Rows,
        stats: RowStats,
        coefficients: Coefficients,
        common: Terms,
        beside: Beside | None = None,
    ) -> None:
        """The rows' own columns, from exact logits."""
        if coefficients.columns is None:
            return
        assert stats.column_logits is not None and rows.columns is not None
        gradients.column_grad(
            dlogits, stats.column_logits, rows.columns, coefficients.columns, head.class_weights, common, beside,
            first, transform(head, rows.scale),
        )  # fmt: skip


class OwnProducts(KernelSession):
    """A session whose 16-bit rows start on 16 bytes, as our own products ask."""

    def __init__(self, head: Head, plan: Plan):
        super().__init__(head, plan)
        assert self.sizes.gpu is not None
        self.plan, self.gpu = plan, self.sizes.gpu

    def add_dweight(
        self, dlogits: Tensor, rows: Rows, operand: Tensor, out: Tensor, first: bool, gain: Tensor | None = None
    ) -> None:
        # a buffer of the caller's may start anywhere
        aligned = out.data_ptr() % TMA_BYTES == 0 and out.stride(0) * out.element_size() % TMA_BYTES == 0
        if gain is None and aligned and self.plan.own_dweight(stored=first):
            products.dweight(out, dlogits, operand, first, self.gpu.product, counted_of(rows))
        else:
            super().add_dweight(zero_uncounted_(dlogits, rows), rows, operand, out, first, gain)
