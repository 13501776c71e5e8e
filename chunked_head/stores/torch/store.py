"""One call's logits in fp32 (fp64 for fp64 operands), their statistics and gradients in torch operations."""

import torch
from torch import Tensor

from ...core.stats import PAIR_STATS, Coefficients, Demand, RowStats, View
from ...kernels.common.tiles import LOG_FLOOR
from ...plan.plans import Plan, logits_shape
from ...plan.sizes import slices
from ..gradients import Gradients
from ..logits import LogitsView
from ..matmul import again_rows, project_biased
from ..operands import Head, Rows
from ..store import MatmulStore
from . import tiles as tiles


class TorchStore(MatmulStore):
    """Logits in fp32, in fp64 for fp64 operands."""

    def __init__(self, head: Head, plan: Plan, tiled: bool):
        self.head, self.plan, self.sizes, self.demand, self.tiled = head, plan, plan.sizes, plan.sizes.demand, tiled
        self.dtype = torch.promote_types(head.weight.dtype, torch.float32)
        device = head.weight.device
        self.swept_rows = plan.chunk_tokens
        rows, columns = logits_shape(plan, tiled)
        elements = rows * columns
        self.buffer = torch.empty(elements, dtype=self.dtype, device=device)
        self.scratch = torch.empty(min(tiles.TILE_ELEMENTS, elements), dtype=self.dtype, device=device)
        self.logits = self.buffer
        if self.demand.pairing is not None:
            elements = rows * min(columns, self.sizes.teacher_columns)
            self.teacher_buffer = torch.empty(elements, dtype=self.dtype, device=device)

    def clean_rows(self, rows: Rows, out: RowStats | None) -> None:
        assert rows.source is not None
        tiles.clean_rows(rows.hidden, rows.source, rows.target, rows.order)

    def fill(self, rows: Rows, out: RowStats) -> None:
        self.clean_rows(rows, out)
        self.read(rows)

    def read(self, rows: Rows) -> None:
        """Logits of the student and of a dense teacher into their buffers."""
        self.logits = self.compute_logits(rows, self.head)
        if self.demand.pairing is not None:
            self.teacher = self.teacher_logits(rows, slice(0, self.demand.pairing.columns))

    def statistics(self, rows: Rows, out: RowStats) -> None:
        for block in tiles.row_blocks(self.logits):
            self.block_stats(self.logits[block], rows.target[block], out.at(block))
            if self.demand.pairing is not None:
                self.normalize_teacher(self.teacher[block], out.at(block))
        if out.column_logits is not None:
            assert rows.columns is not None
            out.column_logits.copy_(self.logits.gather(1, rows.columns.clamp(min=0)))
        if out.top_k_ids is not None and out.top_k_logits is not None:
            torch.topk(self.logits, out.top_k_ids.shape[1], out=(out.top_k_logits, out.top_k_ids))
        if self.demand.pairing is not None and not self.over_ranks:
            self.pair_statistics(rows, out)

    def pair_statistics(self, rows: Rows, out: RowStats) -> None:
        for block in tiles.row_blocks(self.logits):
            self.block_pair_stats(self.logits[block], self.teacher[block], out.at(block))

    def compute_logits(self, rows: Rows, head: Head) -> Tensor:
        hidden = rows.hidden
        logits = self.buffer[: hidden.shape[0] * head.weight.shape[0]].view(hidden.shape[0], -1)
        at_once = again_rows(self.sizes, self.swept_rows, hidden, logits.shape[1])
        bias = project_biased(hidden, head.weight, head.bias, logits, at_once)
        tiles.transform_(logits, bias, head, rows.scale)
        return logits

    def teacher_logits(self, rows: Rows, columns: slice) -> Tensor:
        teacher = rows.teacher
        assert teacher is not None
        source = teacher.logits if teacher.logits is not None else teacher.hidden
        assert source is not None
        count = columns.stop - columns.start
        logits = self.teacher_buffer[: len(source) * count].view(len(source), count)
        bias = None if teacher.bias is None else teacher.bias[columns]
        if teacher.logits is not None:
            logits.copy_(teacher.logits[:, columns])
        else:
            assert teacher.hidden is not None and teacher.weight is not None
            at_once = again_rows(self.sizes, self.swept_rows, teacher.hidden, count)
            bias = project_biased(teacher.hidden, teacher.weight[columns], bias, logits, at_once)
        tiles.transform_(logits, bias, teacher, rows.scale)
        return logits

    def block_stats(self, x: Tensor, target: Tensor, out: RowStats) -> None:
        here = target < x.shape[1]  # all of them, but where the vocabulary's other columns are elsewhere
        picked = x.gather(1, torch.where(here, target, 0).clamp(min=0).unsqueeze(1)).squeeze(1)
        out.target_logit.copy_(torch.where(here, picked, 0.0))
        row_max = x.amax(1)
        if out.top is not None and out.argmax is not None:
            out.top.copy_(row_max)
            out.argmax.copy_(x.argmax(1))
        for suffix, view in zip(("", "2"), self.demand.views, strict=False):
            self.softmax_stats(x, target, row_max, view, suffix, out)
        if out.weighted_sum is None:
            return
        omega = self.head.class_weights
        if omega is None:
            out.weighted_sum.copy_(x.sum(1))
            return
        weighted = torch.zeros_like(row_max)
        for columns in slices(x.shape[1], tiles.TILE_COLUMNS):
            # selection, so that a logit of -inf with weight 0 does not become nan
            part = torch.mul(x[:, columns], omega[columns], out=self.tile_like(x[:, columns]))
            weighted += part.masked_fill_(omega[columns] == 0, 0.0).sum(1)
        out.weighted_sum.copy_(weighted)

    def softmax_stats(self, x: Tensor, target: Tensor, row_max: Tensor, view: View, suffix: str, out: RowStats) -> None:
        x = x[:, : view.columns]
        top = x.amax(1) if view.columns is not None else row_max
        top = torch.where(top == -torch.inf, 0.0, top)
        entropy = getattr(out, "entropy" + suffix)
        total, shifted = self.sums(x, top, view.ratio, entropy is not None)
        log_sum = total.log()
        getattr(out, "lse" + suffix).copy_(top * view.ratio + log_sum)
        getattr(out, "start" + suffix).copy_(top * view.ratio)
        getattr(out, "rest" + suffix).copy_(-log_sum)
        # not target_logit - lse, which has lost what lies below an ulp of the logits
        logprob = (out.target_logit - top) * view.ratio - log_sum
        getattr(out, "logprob" + suffix).copy_(torch.where(target >= 0, logprob, 0.0))
        if entropy is not None:
            entropy.copy_(log_sum - shifted / total)

    def normalize_teacher(self, y: Tensor, out: RowStats) -> None:
        assert out.teacher_start is not None and out.teacher_rest is not None
        top = y.amax(1)
        if out.teacher_top is not None and out.teacher_argmax is not None:
            out.teacher_top.copy_(top)
            out.teacher_argmax.copy_(y.argmax(1))
        out.teacher_start.copy_(torch.where(top == -torch.inf, 0.0, top))
        total, _ = self.sums(y, out.teacher_start, 1.0, False)
        out.teacher_rest.copy_(-total.log())

    def sums(self, x: Tensor, start: Tensor, ratio: float, wanted: bool) -> tuple[Tensor, Tensor]:
        """Sums of exponentials of each row's ``z = ratio * (x - start)``, and of ``z exp(z)`` where ``wanted``."""
        total, shifted = torch.zeros_like(start), torch.zeros_like(start)
        for columns in slices(x.shape[1], tiles.TILE_COLUMNS):
            z = torch.sub(x[:, columns], start[:, None], out=self.tile_like(x[:, columns]))
            if ratio != 1.0:
                z.mul_(ratio)
            if wanted:
                e = z.exp()
                shifted += torch.where(e > 0, e * z, 0.0).sum(1)
                total += e.sum(1)
            else:
                total += z.exp_().sum(1)
        return total, shifted

    def block_pair_stats(self, x: Tensor, y: Tensor, out: RowStats) -> None:
        pairing = self.demand.pairing
        assert pairing is not None
        view = self.demand.views[pairing.view]
        start, rest = (out.start2, out.rest2) if pairing.view else (out.start, out.rest)
        wanted = {name: getattr(out, name) for name in PAIR_STATS if getattr(out, name) is not None}
        sums = {name: torch.zeros_like(out.lse) for name in wanted}
        for columns in slices(pairing.columns, tiles.TILE_COLUMNS):
            log_p = tiles.logprobs_(x[:, columns] * view.ratio, start, rest)
            log_q = tiles.logprobs_(y[:, columns].clone(), out.teacher_start, out.teacher_rest)
            p, q = log_p.exp(), log_q.exp()
            # a probability of 0 has no part in a sum, whatever its logarithm
            if "forward_kl" in wanted:
                sums["forward_kl"] += torch.where(q > 0, q * (log_q - log_p), 0.0).sum(1)
            if "reverse_kl" in wanted:
                sums["reverse_kl"] += torch.where(p > 0, p * (log_p - log_q.clamp(min=LOG_FLOOR)), 0.0).sum(1)
            if "teacher_entropy" in wanted:
                sums["teacher_entropy"] -= torch.where(q > 0, q * log_q, 0.0).sum(1)
            if pairing.beta is not None:
                log_m = tiles.log_mixture(log_q, log_p, pairing.beta)
                kl = torch.where(p > 0, p * (log_p - log_m), 0.0).sum(1)
                sums["kl_mixture"] += kl
                q_to_mixture = torch.where(q > 0, q * (log_q - log_m), 0.0).sum(1)
                sums["jsd"] += pairing.beta * q_to_mixture + (1.0 - pairing.beta) * kl
            if "tvd" in wanted:
                sums["tvd"] += (p - q).abs().sum(1) / 2
            if "overlap" in wanted:
                sums["overlap"] += torch.minimum(p, q).sum(1)
            if "below" in wanted:
                sums["below"] += tiles.part_below(p, q).sum(1)
        for name, value in sums.items():
            wanted[name].copy_(value)

    def grad_(self, rows: Rows, stats: RowStats, coefficients: Coefficients) -> Tensor:
        teacher = None if self.demand.pairing is None else self.teacher
        return self.differentiate_(self.logits, self.head, 0, rows, stats, coefficients, teacher)

    def tile_grad(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        head = self.head.columns(tile)
        logits = self.compute_logits(rows, head)
        teacher = None
        if self.demand.pairing is not None and tile.start < self.demand.pairing.columns:
            columns = slice(tile.start, min(tile.stop, self.demand.pairing.columns))
            teacher = self.teacher_logits(rows, columns)
        return self.differentiate_(logits, head, tile.start, rows, stats, coefficients, teacher)

    def differentiate_(
        self,
        logits: Tensor,
        head: Head,
        first: int,
        rows: Rows,
        stats: RowStats,
        coefficients: Coefficients,
        teacher: Tensor | None,
    ) -> Tensor:
        """Logits to the gradient of raw logits in place; ``first`` is the vocabulary's column where they begin."""
        columns = logits.shape[1]
        # the target's column, and the columns of each row, from their exact logits: a tile rounds
        target = rows.target - first
        here = (target >= 0) & (target < columns) & (rows.target >= 0)
        if coefficients.beta is not None:
            index = target.clamp(0, columns - 1).unsqueeze(1)
            beta = torch.where(here, coefficients.beta * tiles.slope(stats.target_logit, head, rows.scale), 0.0)
        listed = None
        if coefficients.columns is not None:
            assert rows.columns is not None and stats.column_logits is not None
            inside = (rows.columns >= first) & (rows.columns < first + columns)
            listed = (rows.columns - first).clamp(0, columns - 1)
            added = coefficients.columns * tiles.slope(stats.column_logits, head, rows.scale)
            added = torch.where(inside & (rows.target >= 0)[:, None], added, 0.0)
        for block in tiles.row_blocks(logits):
            for part in slices(columns, tiles.TILE_COLUMNS):
                y = None
                if teacher is not None and part.start < teacher.shape[1]:
                    y = teacher[block, part]
                scale = None if rows.scale is None else rows.scale[block]
                self.tile_gradient_(
                    logits[block, part], y, head, scale, part, first, stats.at(block), coefficients.at(block)
                )  # fmt: skip
            if teacher is not None:
                # selection: where a row does not count its teacher may be nan
                logits[block].masked_fill_((rows.target[block] < 0)[:, None], 0.0)
        if coefficients.beta is not None:
            logits.scatter_add_(1, index, -beta.unsqueeze(1))
        if listed is not None:
            logits.scatter_add_(1, listed, added)
        return logits

    def tile_gradient_(
        self,
        x: Tensor,
        y: Tensor | None,
        head: Head,
        scale: Tensor | None,
        part: slice,
        first: int,
        stats: RowStats,
        c: Coefficients,
    ) -> None:
        """Turns a tile of logits, and of the teacher's, into the gradient but for terms of single columns."""
        bend = tiles.slope(x, head, scale)
        pairing = self.demand.pairing
        second = None
        if stats.lse2 is not None:
            second = tiles.logprobs_(x * self.demand.views[1].ratio, stats.start2, stats.rest2)
            limit = self.demand.views[1].columns
            if limit is not None:
                second[:, max(0, limit - first - part.start) :] = -torch.inf
        tiles.logprobs_(x, stats.start, stats.rest)
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
            x.sub_(kappa if head.class_weights is None else kappa * head.class_weights[part])
        if y is not None and pairing is not None:
            count = y.shape[1]
            log_q = tiles.logprobs_(y.clone(), stats.teacher_start, stats.teacher_rest)
            lp = (log_p if pairing.view == 0 else second)[:, :count]  # type: ignore[index]
            x[:, :count].add_(tiles.teacher_terms(lp, log_q, c, pairing.beta, stats.below))
        if isinstance(bend, Tensor) or bend != 1.0:
            x.mul_(bend)

    def tile_like(self, part: Tensor) -> Tensor:
        return self.scratch[: part.numel()].view(part.shape)


class GivenView(TorchStore):
    """A view of logits that exist already, a block of rows at a time, in the place of what a matmul makes."""

    def __init__(self, head: Head, demand: Demand, view: LogitsView):
        self.head, self.demand, self.gradient, logits = head, demand, view.gradient, view.rows.hidden
        self.dtype = torch.promote_types(logits.dtype, torch.float32)
        rows, columns = logits.shape
        block = min(rows, tiles.block_rows(columns))
        self.buffer = logits.new_empty(block * columns, dtype=self.dtype)
        self.scratch = logits.new_empty(block * min(columns, tiles.TILE_COLUMNS), dtype=self.dtype)
        if demand.pairing is not None:
            self.teacher_buffer = logits.new_empty(block * demand.pairing.columns, dtype=self.dtype)

    def compute_logits(self, rows: Rows, head: Head) -> Tensor:
        logits = self.buffer[: rows.hidden.numel()].view(rows.hidden.shape)
        logits.copy_(rows.hidden)
        tiles.transform_(logits, None, head, rows.scale)
        return logits

    def statistics(self, rows: Rows, out: RowStats) -> None:
        for block in tiles.row_blocks(rows.hidden):
            self.read(rows.at(block))
            super().statistics(rows.at(block), out.at(block))

    def pair_statistics(self, rows: Rows, out: RowStats) -> None:
        if not self.over_ranks:  # ``statistics`` has just read these rows
            super().pair_statistics(rows, out)
            return
        for block in tiles.row_blocks(rows.hidden):
            self.read(rows.at(block))
            super().pair_statistics(rows.at(block), out.at(block))

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        assert self.gradient is not None
        every = slice(0, rows.hidden.shape[1])
        for block in tiles.row_blocks(rows.hidden):
            grad = self.tile_grad(rows.at(block), every, stats.at(block), coefficients.at(block))
            # selection: where a row does not count its logits may be nan
            self.gradient[block] = grad.masked_fill_((rows.target[block] < 0)[:, None], 0.0)
