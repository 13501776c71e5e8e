"""Logits in fp32 (fp64 for fp64 operands), their statistics and gradients in torch operations, for every device.

Elementwise work goes by blocks of rows, a mebibyte or so each, so that temporaries are small.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.stats import Coefficients, Demand, RowStats, View
from ..kernels.common.tiles import EXACT_BLOCK, LOG_FLOOR
from ..plan.plans import cast_buffers
from ..plan.sizes import BYTE, LOOP, SWEEP, Buffer, Phase, Sizes, slices
from .gradients import Gradients
from .matmul import project, project_biased
from .operands import Head, Rows, TeacherHead
from .quantised import RoundedHead, empty_quantised, quantise_
from .store import MatmulStore, Store

TILE_ELEMENTS = 1 << 18


class TorchStore(MatmulStore):
    """Logits in fp32, in fp64 for fp64 operands."""

    logits: Tensor  # [rows, columns]
    teacher: Tensor | None  # [rows, columns] a dense teacher's of the same rows

    @classmethod
    def buffers(cls, sizes: Sizes, rows: int, last: Phase, stored: bool) -> Iterator[Buffer]:
        yield from super().buffers(sizes, rows, last, stored)
        yield from scratch_buffers(sizes, rows, sizes.vocab, SWEEP, last)

    @classmethod
    def tile_buffers(cls, sizes: Sizes, rows: int, columns: int) -> Iterator[Buffer]:
        yield from super().tile_buffers(sizes, rows, columns)
        yield from scratch_buffers(sizes, rows, columns, LOOP, LOOP)

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
        self.multiply(rows, slice(0, self.vocab))

    def multiply(self, rows: Rows, tile: slice) -> None:
        """Makes the logits of a slice of the vocabulary, and a teacher's of the same rows."""
        self.logits, self.teacher = rows.hidden.new_empty(0), None  # the last ones are gone before these are made
        head = self.head if tile.stop - tile.start == self.vocab else self.head.columns(tile)
        pairing = self.demand.pairing
        if head.fp8 is None:
            self.logits = self.projected(rows, rows.hidden, head.weight, head.bias, head)
        else:
            self.logits = fp8_logits(rows, tile.start, head, head.fp8)
        if pairing is not None and tile.start < pairing.columns:
            self.teacher = self.teacher_logits(rows, slice(tile.start, min(tile.stop, pairing.columns)))

    def projected(
        self, rows: Rows, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head | TeacherHead
    ) -> Tensor:
        """Logits of a student or a teacher."""
        logits = hidden.new_empty(len(hidden), len(weight), dtype=wide_dtype(self.head.weight))
        at_once = self.plan.chunk_tokens if len(weight) == self.vocab else None  # as the forward pass has made them
        transform_(logits, project_biased(hidden, weight, bias, logits, at_once), head, rows.scale)
        return logits

    def teacher_logits(self, rows: Rows, columns: slice) -> Tensor:
        teacher = rows.teacher
        assert teacher is not None
        bias = None if teacher.bias is None else teacher.bias[columns]
        if teacher.logits is None:
            assert teacher.hidden is not None and teacher.weight is not None
            return self.projected(rows, teacher.hidden, teacher.weight[columns], bias, teacher)
        logits = teacher.logits[:, columns].to(wide_dtype(self.head.weight), copy=True)
        transform_(logits, bias, teacher, rows.scale)
        return logits

    def blocks(self, rows: Rows) -> Iterator[tuple[slice, Rows, Tensor, Tensor | None]]:
        """Some rows at a time, their logits and a teacher's."""
        found = row_blocks(self.logits)
        for at in found:
            some = rows if len(found) == 1 else rows.at(at)
            yield at, some, self.logits[at], None if self.teacher is None else self.teacher[at]

    def statistics(self, rows: Rows, out: RowStats) -> None:
        for at, some, x, y in self.blocks(rows):
            self.block_stats(x, y, some, out.at(at))

    def block_stats(self, x: Tensor, y: Tensor | None, rows: Rows, out: RowStats) -> None:
        here = rows.target < x.shape[1]  # all of them, but where the vocabulary's other columns are elsewhere
        picked = x.gather(1, torch.where(here, rows.target, 0).clamp(min=0).unsqueeze(1)).squeeze(1)
        out.target_logit.copy_(torch.where(here, picked, 0.0))
        for suffix, view in zip(("", "2"), self.demand.views, strict=False):
            softmax_stats(x[:, : view.columns], rows.target, view, suffix, out)
        omega = self.head.class_weights
        if out.weighted_sum is not None:
            # selection, so that a logit of -inf with weight 0 does not become nan
            weighted = x if omega is None else (x * omega).masked_fill_(omega == 0, 0.0)
            out.weighted_sum.copy_(weighted.sum(1))
        if out.top is not None and out.argmax is not None:
            out.top.copy_(x.amax(1))
            out.argmax.copy_(x.argmax(1))
        if out.column_logits is not None:
            assert rows.columns is not None
            out.column_logits.copy_(x.gather(1, rows.columns.clamp(min=0)))
        if out.top_k_ids is not None and out.top_k_logits is not None:
            torch.topk(x, out.top_k_ids.shape[1], out=(out.top_k_logits, out.top_k_ids))
        if y is not None:
            top = y.amax(1)
            start = torch.where(top == -torch.inf, 0.0, top)
            rest = -(y - start[:, None]).exp_().sum(1).log()
            found = {"start": start, "rest": rest, "top": top, "argmax": y.argmax(1)}
            put_stats(out, {"teacher_" + name: value for name, value in found.items()})

    def pair_statistics(self, rows: Rows, out: RowStats) -> None:
        for at, _, x, y in self.blocks(rows):
            assert y is not None
            self.block_pair_stats(x, y, out.at(at))

    def block_pair_stats(self, x: Tensor, y: Tensor, out: RowStats) -> None:
        pairing = self.demand.pairing
        assert pairing is not None
        start, rest = (out.start2, out.rest2) if pairing.view else (out.start, out.rest)
        log_p = logprobs(x[:, : pairing.columns] * self.demand.views[pairing.view].ratio, start, rest)
        log_q = logprobs(y, out.teacher_start, out.teacher_rest)
        p, q = log_p.exp(), log_q.exp()
        found = {
            "forward_kl": expected(q, log_q - log_p),
            "reverse_kl": expected(p, log_p - log_q.clamp(min=LOG_FLOOR)),
            "teacher_entropy": -expected(q, log_q),
            "tvd": (p - q).abs().sum(1) / 2,
            "below": part_below(p, q).sum(1),
            "overlap": torch.minimum(p, q).sum(1),
        }
        if pairing.beta is not None:
            log_m = log_mixture(log_q, log_p, pairing.beta)
            found["kl_mixture"] = expected(p, log_p - log_m)
            found["jsd"] = pairing.beta * expected(q, log_q - log_m) + (1.0 - pairing.beta) * found["kl_mixture"]
        put_stats(out, found)

    def gradient(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        """The gradient of the raw logits of a tile, in place of the logits: of the chunk filled last, or made here."""
        if self.tiled:
            self.multiply(rows, tile)
        for at, some, x, y in self.blocks(rows):
            self.differentiate_(x, y, tile.start, some, stats.at(at), coefficients.at(at))
        return self.logits

    def differentiate_(
        self, x: Tensor, y: Tensor | None, first: int, rows: Rows, stats: RowStats, c: Coefficients
    ) -> None:
        """Turns rows of logits, the columns from ``first`` on, into their gradient."""
        head, views, columns, counts = self.head, self.demand.views, x.shape[1], (rows.target >= 0).unsqueeze(1)
        log_p = [logprobs(x, stats.start, stats.rest)]
        if stats.start2 is not None:
            log_p.append(logprobs(x * views[1].ratio, stats.start2, stats.rest2))
            log_p[1][:, max(0, (views[1].columns or self.vocab) - first) :] = -torch.inf
        grad = torch.zeros_like(x)
        for logs, alpha, eta in zip(log_p, (c.alpha, c.alpha2), (c.eta, c.eta2), strict=False):
            if alpha is not None:
                grad += softmax_term(logs, alpha[:, None], None if eta is None else eta[:, None])
        if c.kappa is not None:
            omega = 1.0 if head.class_weights is None else head.class_weights[first : first + columns]
            grad -= c.kappa[:, None] * omega
        pairing = self.demand.pairing
        if y is not None and pairing is not None:
            count, log_q = y.shape[1], logprobs(y, stats.teacher_start, stats.teacher_rest)
            grad[:, :count] += teacher_terms(log_p[pairing.view][:, :count], log_q, c, pairing.beta, stats.below)
        x.copy_(grad.mul_(slope(x, head, rows.scale)))
        if y is not None:
            # selection: where a row does not count its teacher may be nan
            x.masked_fill_(~counts, 0.0)
        # the target's column, and the columns of each row, from their exact logits: a tile rounds
        single = [] if c.beta is None else [(rows.target, -c.beta, stats.target_logit)]
        if c.columns is not None:
            assert rows.columns is not None and stats.column_logits is not None
            single.append((rows.columns, c.columns, stats.column_logits))
        for ids, values, exact in single:
            ids, values, exact = (each.view(len(x), -1) for each in (ids - first, values, exact))
            here = (ids >= 0) & (ids < columns) & counts
            added = torch.where(here, values * slope(exact, head, rows.scale), 0.0)
            x.scatter_add_(1, ids.clamp(0, columns - 1), added)


class GivenLogits(TorchStore):
    """Logits that exist already."""

    fill = Store.fill  # they are there

    def __init__(self, head: Head, demand: Demand, rows: Rows, gradient: Tensor | None):
        self.head, self.demand, self.gradient_of, self.vocab = head, demand, gradient, rows.hidden.shape[1]

    def blocks(self, rows: Rows) -> Iterator[tuple[slice, Rows, Tensor, Tensor | None]]:
        pairing = self.demand.pairing
        for at in row_blocks(rows.hidden):
            some = rows.at(at)
            logits = some.hidden.to(wide_dtype(some.hidden), copy=True)
            transform_(logits, None, self.head, some.scale)
            yield at, some, logits, None if pairing is None else self.teacher_logits(some, slice(0, pairing.columns))

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        assert self.gradient_of is not None
        for at, some, x, y in self.blocks(rows):
            self.differentiate_(x, y, 0, some, stats.at(at), coefficients.at(at))
            # selection: where a row does not count its logits may be nan
            self.gradient_of[at] = x.masked_fill_((some.target < 0)[:, None], 0.0)


def scratch_buffers(sizes: Sizes, rows: int, columns: int, first: Phase, last: Phase) -> Iterator[Buffer]:
    """Blocks of the largest statistic and gradient, while no tile of the weight is cast."""
    pairs, wide = sizes.demand.pairing is not None, any(sizes.demand.entropy) or len(sizes.demand.views) > 1
    cast = sum(b.bytes for b in cast_buffers(sizes, columns, LOOP, LOOP))
    block = min(TILE_ELEMENTS, rows * columns) * sizes.wide.itemsize
    if first == SWEEP:
        count = 8 if pairs else 4 if wide else 2
        yield Buffer("blocks of statistics", (max(0, count * block - cast),), BYTE, SWEEP, SWEEP)
    if last == LOOP:
        count = 10 if pairs else 5 if wide else 3
        yield Buffer("blocks of gradients", (max(0, count * block - cast),), BYTE, LOOP, LOOP)


def put_stats(out: RowStats, found: dict[str, Tensor], suffix: str = "") -> None:
    """Writes those statistics that ``out`` has room for."""
    for name, value in found.items():
        into = getattr(out, name + suffix)
        if into is not None:
            into.copy_(value)


def fp8_logits(rows: Rows, first: int, head: Head, fp8: RoundedHead) -> Tensor:
    """Logits of e4m3 operands, multiplied in fp32, some blocks' and the targets' of their own dtype; of columns from
    ``first`` on."""
    hidden = empty_quantised(len(rows.hidden), rows.hidden.shape[1], rows.hidden.device, each_row=True)
    quantise_(hidden, rows.hidden, mean=fp8.mean)
    logits = hidden.scale.new_empty(len(rows.hidden), len(head.weight))
    project(hidden.values.float(), fp8.weight.values, logits)
    logits.mul_(hidden.scale[:, None] * fp8.weight.scale).add_(fp8.bias)
    bias = head.weight.new_zeros(len(head.weight)) if head.bias is None else head.bias
    for block in fp8.blocks.tolist():
        ids = slice(max(0, block * EXACT_BLOCK - first), max(0, (block + 1) * EXACT_BLOCK - first))
        project(rows.hidden, head.weight[ids], logits[:, ids])
        logits[:, ids] += bias[ids]
    column = rows.target - first
    (here,) = torch.where((rows.target >= 0) & (column >= 0) & (column < logits.shape[1]))
    column = column[here]
    logits[here, column] = (rows.hidden[here].float() * head.weight[column].float()).sum(1) + bias[column]
    transform_(logits, None, head, rows.scale)
    return logits


def softmax_stats(x: Tensor, target: Tensor, view: View, suffix: str, out: RowStats) -> None:
    """Statistics of one softmax over rows ``x``, into the fields of that suffix."""
    top = x.amax(1)
    top = torch.where(top == -torch.inf, 0.0, top)
    z = (x - top[:, None]).mul_(view.ratio)
    e = z.exp()
    total = e.sum(1)
    log_sum = total.log()
    # not target_logit - lse, which has lost what lies below an ulp of the logits
    logprob = torch.where(target >= 0, (out.target_logit - top) * view.ratio - log_sum, 0.0)
    start = top * view.ratio
    put_stats(out, {"lse": start + log_sum, "start": start, "rest": -log_sum, "logprob": logprob}, suffix)
    if getattr(out, "entropy" + suffix) is not None:
        put_stats(out, {"entropy": log_sum - expected(e, z) / total}, suffix)


def expected(p: Tensor, values: Tensor) -> Tensor:
    """``sum p * values`` of each row; a probability of 0 has no part in it, whatever its value."""
    return torch.where(p == 0, 0.0, p * values).sum(1)


def softmax_term(log_p: Tensor, alpha: Tensor, eta: Tensor | None) -> Tensor:
    """``p (alpha + eta log p)``, 0 where p is; nan where p is."""
    p = log_p.exp()
    return p.mul_(alpha) if eta is None else torch.where(p == 0, 0.0, p * (alpha + eta * log_p))


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
    return p * (1 - (p - q).sign()) + 0.0 * q  # the sign of nan is 0


def log_mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """``log(beta q + (1 - beta) p)``"""
    return torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))


def logprobs(x: Tensor, start: Tensor | None, rest: Tensor | None) -> Tensor:
    assert start is not None and rest is not None
    return (x - start[:, None]).add_(rest[:, None])


def wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def row_blocks(logits: Tensor) -> list[slice]:
    """Slices of rows that make a block of some elements."""
    return slices(logits.shape[0], max(1, TILE_ELEMENTS // max(1, logits.shape[1])))


def transform_(x: Tensor, bias: Tensor | None, head: Head | TeacherHead, scale: Tensor | None) -> None:
    """Bias, scale and cap in place, and at last the rows' ``scale``."""
    if bias is not None:
        x.add_(bias)
    if head.softcap is not None:
        x.mul_(head.logit_scale / head.softcap).tanh_().mul_(head.softcap)
    elif head.logit_scale != 1.0:
        x.mul_(head.logit_scale)
    if scale is not None and head.scaled:
        x.mul_(scale[:, None])


def slope(x: Tensor, head: Head, scale: Tensor | None) -> Tensor | float:
    """d x / d raw logit, from the transformed logit; ``scale``: of the rows."""
    each: Tensor | float = 1.0 if scale is None else scale.view(-1, *[1] * (x.dim() - 1))
    if head.softcap is None:
        return head.logit_scale * each
    return (x / (head.softcap * each)).square_().neg_().add_(1.0).mul_(head.logit_scale * each)
