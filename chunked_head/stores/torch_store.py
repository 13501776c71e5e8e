"""Logits in fp32 (fp64 for fp64 operands), their statistics and gradients in torch operations, for every device.

Elementwise work goes by tiles of rows, about a mebibyte each: a tile stays in the processor's cache through all
operations on it, and temporaries are no larger.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.stats import PAIR_STATS, Coefficients, Demand, RowStats, View
from ..kernels.common.tiles import LOG_FLOOR
from ..plan.plans import Plan, cast_buffers
from ..plan.sizes import BYTE, HIDDEN, LOOP, SWEEP, Buffer, Phase, Sizes, slices
from .gradients import Gradients
from .matmul import project, project_biased
from .operands import Head, Rows, TeacherHead
from .quantised import Quantised, empty_quantised, quantise_
from .store import MatmulStore

TILE_ELEMENTS = 1 << 18
BYTES_PER_ROW = 24  # temporaries of the gradient of a row of logits


class TorchStore(MatmulStore):
    """Logits in fp32, in fp64 for fp64 operands."""

    teacher: Tensor  # [rows, columns] a dense teacher's logits of the same rows

    @classmethod
    def buffers(cls, sizes: Sizes, rows: int, last: Phase, stored: bool) -> Iterator[Buffer]:
        yield from super().buffers(sizes, rows, last, stored)
        yield from scratch_buffers(sizes, rows, sizes.vocab, SWEEP, last)

    @classmethod
    def tile_buffers(cls, sizes: Sizes, rows: int, columns: int) -> Iterator[Buffer]:
        yield from super().tile_buffers(sizes, rows, columns)
        yield from scratch_buffers(sizes, rows, columns, LOOP, LOOP)

    def __init__(self, head: Head, plan: Plan, tiled: bool):
        super().__init__(head, plan, tiled)
        self.buffer = self.new_buffer(self.columns)
        if self.demand.pairing is not None:
            self.teacher_buffer = self.new_buffer(min(self.columns, self.demand.pairing.columns))

    def new_buffer(self, columns: int) -> Tensor:
        weight = self.head.weight
        return torch.empty(self.rows * columns, dtype=wide_dtype(weight), device=weight.device)

    @staticmethod
    def clean_rows(out: Tensor, source: Tensor, target: Tensor, order: Tensor | None) -> None:
        """Rows as the matmuls take them: contiguous, in the dtype of ``out``, 0 where a row's target is -1; the rows
        ``order`` of the source where one is given.

        The zeros keep whatever stands in a masked row (nan, inf) out of the weight's gradient, where multiplying by a
        gradient of 0 would not.
        """
        out.copy_(source if order is None else source[order]).masked_fill_((target < 0).unsqueeze(1), 0.0)

    def fill(self, rows: Rows, out: RowStats) -> None:
        assert rows.source is not None
        self.clean_rows(rows.hidden, rows.source, rows.target, rows.order)
        self.logits = self.logits_of(rows, slice(0, self.vocab))
        if self.demand.pairing is not None:
            self.teacher = self.teacher_logits(rows, slice(0, self.demand.pairing.columns))

    def logits_of(self, rows: Rows, tile: slice) -> Tensor:
        head = self.head if tile.stop - tile.start == self.vocab else self.head.columns(tile)
        if head.fp8 is not None:
            return self.fp8_logits(rows, tile.start, head, head.fp8)
        return self.projected(rows, rows.hidden, head.weight, head.bias, head, self.buffer)

    def fp8_logits(self, rows: Rows, first: int, head: Head, weight: Quantised) -> Tensor:
        """Logits of e4m3 operands, multiplied in fp32, the targets' of their own dtype."""
        logits = self.buffer[: len(rows.hidden) * len(head.weight)].view(len(rows.hidden), len(head.weight))
        hidden = empty_quantised(len(logits), rows.hidden.shape[1], logits.device, each_row=True)
        quantise_(hidden, rows.hidden)
        project(hidden.values.float(), weight.values, logits)
        logits.mul_(hidden.scale[:, None] * weight.scale)
        transform_(logits, head.bias, head, rows.scale)
        column = rows.target - first
        (here,) = torch.where((rows.target >= 0) & (column >= 0) & (column < logits.shape[1]))
        column, scale = column[here], None if rows.scale is None else rows.scale[here]
        exact = (rows.hidden[here].float() * head.weight[column].float()).sum(1, keepdim=True)
        exact = exact if head.bias is None else exact + head.bias[column, None]
        transform_(exact, None, head, scale)
        logits[here, column] = exact[:, 0]
        return logits

    def teacher_logits(self, rows: Rows, tile: slice) -> Tensor:
        teacher = rows.teacher
        assert teacher is not None
        bias = None if teacher.bias is None else teacher.bias[tile]
        if teacher.logits is None:
            assert teacher.hidden is not None and teacher.weight is not None
            return self.projected(rows, teacher.hidden, teacher.weight[tile], bias, teacher, self.teacher_buffer)
        given = teacher.logits[:, tile]
        logits = self.teacher_buffer[: given.numel()].view(given.shape).copy_(given)
        transform_(logits, bias, teacher, rows.scale)
        return logits

    def projected(
        self, rows: Rows, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head | TeacherHead, buffer: Tensor
    ) -> Tensor:
        """Logits of a student or a teacher, in the first elements of the buffer."""
        count, columns = len(hidden), len(weight)
        logits = buffer[: count * columns].view(count, columns)
        at_once = self.plan.chunk_tokens if columns == self.vocab else None  # as the forward pass has made them
        transform_(logits, project_biased(hidden, weight, bias, logits, at_once), head, rows.scale)
        return logits

    def statistics(self, rows: Rows, out: RowStats) -> None:
        for block in row_blocks(self.logits):
            self.block_stats(self.logits[block], rows.target[block], out.at(block))
            if self.demand.pairing is not None:
                normalize_teacher(self.teacher[block], out.at(block))
        if out.column_logits is not None:
            assert rows.columns is not None
            out.column_logits.copy_(self.logits.gather(1, rows.columns.clamp(min=0)))
        if out.top_k_ids is not None and out.top_k_logits is not None:
            torch.topk(self.logits, out.top_k_ids.shape[1], out=(out.top_k_logits, out.top_k_ids))

    def block_stats(self, x: Tensor, target: Tensor, out: RowStats) -> None:
        here = target < x.shape[1]  # all of them, but where the vocabulary's other columns are elsewhere
        picked = x.gather(1, torch.where(here, target, 0).clamp(min=0).unsqueeze(1)).squeeze(1)
        out.target_logit.copy_(torch.where(here, picked, 0.0))
        row_max = x.amax(1)
        if out.top is not None and out.argmax is not None:
            out.top.copy_(row_max)
            out.argmax.copy_(x.argmax(1))
        for suffix, view in zip(("", "2"), self.demand.views, strict=False):
            softmax_stats(x, target, row_max, view, suffix, out)
        omega = self.head.class_weights
        if out.weighted_sum is not None:
            # selection, so that a logit of -inf with weight 0 does not become nan
            weighted = x if omega is None else (x * omega).masked_fill_(omega == 0, 0.0)
            out.weighted_sum.copy_(weighted.sum(1))

    def pair_statistics(self, rows: Rows, out: RowStats) -> None:
        for block in row_blocks(self.logits):
            self.block_pair_stats(self.logits[block], self.teacher[block], out.at(block))

    def block_pair_stats(self, x: Tensor, y: Tensor, out: RowStats) -> None:
        pairing = self.demand.pairing
        assert pairing is not None
        wanted = {name: into for name in PAIR_STATS if (into := getattr(out, name)) is not None}
        start, rest = (out.start2, out.rest2) if pairing.view else (out.start, out.rest)
        log_p = logprobs_(x[:, : pairing.columns] * self.demand.views[pairing.view].ratio, start, rest)
        log_q = logprobs_(y.clone(), out.teacher_start, out.teacher_rest)
        p, q = log_p.exp(), log_q.exp()
        # a probability of 0 has no part in a sum, whatever its logarithm
        if "forward_kl" in wanted:
            wanted["forward_kl"].copy_(torch.where(q > 0, q * (log_q - log_p), 0.0).sum(1))
        if "reverse_kl" in wanted:
            terms = torch.where(p > 0, p * (log_p - log_q.clamp(min=LOG_FLOOR)), 0.0)
            wanted["reverse_kl"].copy_(terms.sum(1))
        if "teacher_entropy" in wanted:
            wanted["teacher_entropy"].copy_(-torch.where(q > 0, q * log_q, 0.0).sum(1))
        if pairing.beta is not None:
            log_m = log_mixture(log_q, log_p, pairing.beta)
            kl = torch.where(p > 0, p * (log_p - log_m), 0.0).sum(1)
            q_to_mixture = torch.where(q > 0, q * (log_q - log_m), 0.0).sum(1)
            wanted["kl_mixture"].copy_(kl)
            wanted["jsd"].copy_(pairing.beta * q_to_mixture + (1.0 - pairing.beta) * kl)
        if "tvd" in wanted:
            wanted["tvd"].copy_((p - q).abs().sum(1) / 2)
        if "overlap" in wanted:
            wanted["overlap"].copy_(torch.minimum(p, q).sum(1))
        if "below" in wanted:
            wanted["below"].copy_(part_below(p, q).sum(1))

    def gradient(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        """The gradient of the raw logits of a tile, in place of the logits: of the chunk filled last, or made here."""
        pairing, teacher = self.demand.pairing, None
        logits = self.logits_of(rows, tile) if self.tiled else self.logits
        if pairing is not None and tile.start < pairing.columns:
            columns = slice(tile.start, min(tile.stop, pairing.columns))
            teacher = self.teacher_logits(rows, columns) if self.tiled else self.teacher
        return self.differentiate_(logits, tile, rows, stats, coefficients, teacher)

    def differentiate_(
        self, logits: Tensor, tile: slice, rows: Rows, stats: RowStats, c: Coefficients, teacher: Tensor | None
    ) -> Tensor:
        head = self.head if tile.stop - tile.start == self.vocab else self.head.columns(tile)
        single = []
        # the target's column, and the columns of each row, from their exact logits: a tile rounds
        if c.beta is not None:
            single.append((rows.target.unsqueeze(1), -c.beta.unsqueeze(1), stats.target_logit.unsqueeze(1)))
        if c.columns is not None:
            assert rows.columns is not None and stats.column_logits is not None
            single.append((rows.columns, c.columns, stats.column_logits))
        added = [
            ((ids - tile.start).clamp(0, tile.stop - tile.start - 1), values.mul(slope(exact, head, rows.scale)),
             (ids >= tile.start) & (ids < tile.stop) & (rows.target >= 0).unsqueeze(1))
            for ids, values, exact in single
        ]  # fmt: skip
        for block in row_blocks(logits):
            scale = None if rows.scale is None else rows.scale[block]
            y = None if teacher is None else teacher[block]
            self.block_gradient_(logits[block], y, head, scale, tile.start, stats.at(block), c.at(block))
            if y is not None:
                # selection: where a row does not count its teacher may be nan
                logits[block].masked_fill_((rows.target[block] < 0)[:, None], 0.0)
        for index, values, here in added:
            logits.scatter_add_(1, index, torch.where(here, values, 0.0))
        return logits

    def block_gradient_(
        self, x: Tensor, y: Tensor | None, head: Head, scale: Tensor | None, first: int, stats: RowStats,
        c: Coefficients,
    ) -> None:  # fmt: skip
        """Turns rows of logits, and of the teacher's, into the gradient but for terms of single columns."""
        bend = slope(x, head, scale)
        pairing = self.demand.pairing
        second = None
        if stats.lse2 is not None:
            second = logprobs_(x * self.demand.views[1].ratio, stats.start2, stats.rest2)
            limit = self.demand.views[1].columns
            if limit is not None:
                second[:, max(0, limit - first) :] = -torch.inf
        logprobs_(x, stats.start, stats.rest)
        with_teacher = y is not None and pairing is not None and pairing.view == 0
        log_p = x.clone() if c.eta is not None or with_teacher else x
        if c.alpha is None:
            x.zero_()
        elif c.eta is None:
            x.exp_().mul_(c.alpha[:, None])
        else:
            p = x.exp_()
            factor = c.alpha[:, None] + c.eta[:, None] * log_p
            x.mul_(torch.where(p > 0, factor, 0.0))
        if second is not None and c.alpha2 is not None:
            p2 = second.exp()
            if c.eta2 is None:
                x.add_(p2.mul_(c.alpha2[:, None]))
            else:
                x.add_(torch.where(p2 > 0, p2 * (c.alpha2[:, None] + c.eta2[:, None] * second), 0.0))
        if c.kappa is not None:
            kappa = c.kappa[:, None]
            x.sub_(kappa if head.class_weights is None else kappa * head.class_weights)
        if y is not None and pairing is not None:
            count = y.shape[1]
            log_q = logprobs_(y.clone(), stats.teacher_start, stats.teacher_rest)
            lp = (log_p if pairing.view == 0 else second)[:, :count]  # type: ignore[index]
            x[:, :count].add_(teacher_terms(lp, log_q, c, pairing.beta, stats.below))
        if isinstance(bend, Tensor) or bend != 1.0:
            x.mul_(bend)


class GivenView(TorchStore):
    """A view of logits that exist already, a tile of rows at a time, in the place of what a matmul makes."""

    tiled = True

    def __init__(self, head: Head, demand: Demand, rows: Rows, gradient: Tensor | None):
        self.head, self.demand, self.gradient_of, logits = head, demand, gradient, rows.hidden
        self.vocab = logits.shape[1]
        block, dtype = min(len(logits), block_rows(self.vocab)), wide_dtype(logits)
        self.buffer = logits.new_empty(block * self.vocab, dtype=dtype)
        if demand.pairing is not None:
            self.teacher_buffer = logits.new_empty(block * demand.pairing.columns, dtype=dtype)

    def logits_of(self, rows: Rows, tile: slice) -> Tensor:
        logits = self.buffer[: rows.hidden.numel()].view(rows.hidden.shape).copy_(rows.hidden)
        transform_(logits, None, self.head, rows.scale)
        return logits

    def read(self, rows: Rows) -> None:
        self.logits = self.logits_of(rows, slice(0, self.vocab))
        if self.demand.pairing is not None:
            self.teacher = self.teacher_logits(rows, slice(0, self.demand.pairing.columns))

    def statistics(self, rows: Rows, out: RowStats) -> None:
        for block in row_blocks(rows.hidden):
            self.read(rows.at(block))
            super().statistics(rows.at(block), out.at(block))

    def pair_statistics(self, rows: Rows, out: RowStats) -> None:
        for block in row_blocks(rows.hidden):
            self.read(rows.at(block))
            super().pair_statistics(rows.at(block), out.at(block))

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        assert self.gradient_of is not None
        for block in row_blocks(rows.hidden):
            grad = self.gradient(rows.at(block), slice(0, self.vocab), stats.at(block), coefficients.at(block))
            # selection: where a row does not count its logits may be nan
            self.gradient_of[block] = grad.masked_fill_((rows.target[block] < 0)[:, None], 0.0)


def scratch_buffers(sizes: Sizes, rows: int, columns: int, first: Phase, last: Phase) -> Iterator[Buffer]:
    """Elementwise tiles of the largest statistic and gradient, while no tile of the weight is cast; and the
    values of several chunks, which are copied to be summed."""
    demand, pairing, cast = (
        sizes.demand,
        sizes.demand.pairing,
        sum(b.bytes for b in cast_buffers(sizes, columns, LOOP, LOOP)),
    )
    tile = min(TILE_ELEMENTS, rows * columns) * sizes.wide.itemsize
    if first == SWEEP:
        tiles = 7.25 if pairing else 4.25 if any(demand.entropy) else 1
        yield Buffer("tiles of statistics", (max(0, int(tiles * tile) - cast),), BYTE, SWEEP, SWEEP)
        if rows < sizes.tokens and not sizes.late_upstream:
            yield Buffer("values of all chunks", (sizes.tokens, demand.values), sizes.wide, HIDDEN, HIDDEN)
    if last == LOOP:
        tiles = 3.25 * any(demand.entropy) + 2 * (len(demand.views) > 1)
        if pairing:
            tiles += 6 if pairing.beta is None else 9.25
        yield Buffer("tiles of gradients", (max(0, int(tiles * tile) - cast),), BYTE, LOOP, LOOP)
        yield Buffer("numbers of rows", (rows, BYTES_PER_ROW), BYTE, LOOP, LOOP)


def softmax_stats(x: Tensor, target: Tensor, row_max: Tensor, view: View, suffix: str, out: RowStats) -> None:
    """Statistics of one softmax of rows ``x``, into the fields of that suffix."""
    if view.columns is not None:
        x = x[:, : view.columns]
        row_max = x.amax(1)
    top = torch.where(row_max == -torch.inf, 0.0, row_max)
    entropy = getattr(out, "entropy" + suffix)
    z = x - top[:, None]
    if view.ratio != 1.0:
        z.mul_(view.ratio)
    e = z.exp() if entropy is not None else z.exp_()
    total = e.sum(1)
    log_sum = total.log()
    getattr(out, "lse" + suffix).copy_(top * view.ratio + log_sum)
    getattr(out, "start" + suffix).copy_(top * view.ratio)
    getattr(out, "rest" + suffix).copy_(-log_sum)
    # not target_logit - lse, which has lost what lies below an ulp of the logits
    logprob = (out.target_logit - top) * view.ratio - log_sum
    getattr(out, "logprob" + suffix).copy_(torch.where(target >= 0, logprob, 0.0))
    if entropy is not None:
        entropy.copy_(log_sum - torch.where(e > 0, e * z, 0.0).sum(1) / total)


def normalize_teacher(y: Tensor, out: RowStats) -> None:
    """Statistics of a teacher's logits by themselves."""
    assert out.teacher_start is not None and out.teacher_rest is not None
    top = y.amax(1)
    if out.teacher_top is not None and out.teacher_argmax is not None:
        out.teacher_top.copy_(top)
        out.teacher_argmax.copy_(y.argmax(1))
    out.teacher_start.copy_(torch.where(top == -torch.inf, 0.0, top))
    out.teacher_rest.copy_(-(y - out.teacher_start[:, None]).exp_().sum(1).log())


def teacher_terms(log_p: Tensor, log_q: Tensor, c: Coefficients, beta: float | None, below: Tensor | None) -> Tensor:
    """The terms of the gradient identity that have a teacher in them; ``below`` [rows]: the sum of ``part_below``."""
    p, q = log_p.exp(), log_q.exp()
    grad = torch.zeros_like(p)
    if c.gamma is not None:
        grad -= c.gamma[:, None] * q
    if c.rho is not None:
        grad -= torch.where(p > 0, c.rho[:, None] * p * log_q.clamp(min=LOG_FLOOR), 0.0)
    if c.tau is not None:
        assert beta is not None
        grad += torch.where(p > 0, c.tau[:, None] * p * (log_p - log_mixture(log_q, log_p, beta)), 0.0)
    if c.theta is not None:
        assert below is not None
        below = below[:, None]
        # as in the kernels' identity: the sign of a column above 2/3 follows from the sum
        found = torch.where(below < 1 - p / 2, 0.0, torch.where(below > 1 + p / 2, 2 * p, p))
        grad += c.theta[:, None] * (p * below - torch.where(p > 0.75, found, part_below(p, q)))
    return grad


def part_below(p: Tensor, q: Tensor) -> Tensor:
    return p * (1 - (p - q).sign())


def log_mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """``log(beta q + (1 - beta) p)``"""
    return torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))


def logprobs_(x: Tensor, start: Tensor | None, rest: Tensor | None) -> Tensor:
    """Logits to log-probabilities, in place."""
    assert start is not None and rest is not None
    return x.sub_(start[:, None]).add_(rest[:, None])


def wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def row_blocks(logits: Tensor) -> list[slice]:
    """Slices of rows that make a tile of the cache's size."""
    return slices(logits.shape[0], block_rows(logits.shape[1]))


def block_rows(columns: int) -> int:
    return max(1, TILE_ELEMENTS // max(1, columns))


def transform_(x: Tensor, bias: Tensor | None, head: Head | TeacherHead, scale: Tensor | None) -> None:
    """Bias, scale and cap in place, and at last the rows' ``scale``, tile by tile."""
    scale = scale if head.scaled else None
    if bias is None and head.softcap is None and head.logit_scale == 1.0 and scale is None:
        return
    for rows in row_blocks(x):
        part = x[rows]
        if bias is not None:
            part.add_(bias)
        if head.softcap is not None:
            part.mul_(head.logit_scale / head.softcap).tanh_().mul_(head.softcap)
        elif head.logit_scale != 1.0:
            part.mul_(head.logit_scale)
        if scale is not None:
            part.mul_(scale[rows, None])


def slope(x: Tensor, head: Head, scale: Tensor | None) -> Tensor | float:
    """d x / d raw logit, from the transformed logit; ``scale``: of the rows."""
    if scale is not None:
        scale = scale.view(-1, *[1] * (x.dim() - 1))
    if head.softcap is None:
        return head.logit_scale if scale is None else head.logit_scale * scale
    capped = x / head.softcap if scale is None else x / (head.softcap * scale)
    bend = capped.square_().neg_().add_(1.0).mul_(head.logit_scale)
    return bend if scale is None else bend.mul_(scale)
