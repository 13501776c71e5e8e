"""The loop over token chunks, and its counterpart over blocks and tiles where gradients come after all statistics."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arithmetic.objective import Objective, ScalarObjective
from ..core.stats import Coefficients, Head, Rows, RowStats
from ..kernels.common.recording import refuse
from ..parallel.merge import merge_blocks
from ..parallel.shard import Shard
from ..plan.planner import DEFAULT_REQUEST, NoPlan, Request, find_plan
from ..plan.plans import Plan
from ..plan.segments import Spans
from ..stores import Backend, KeptColumns, KeptRows, Session
from ..stores.gradient_buffer import GradientBuffer
from ..stores.gradients import Gradients
from .own_columns import OwnColumns, of_others
from .tokens import Packing


@dataclass(frozen=True, eq=False)
class Call(OwnColumns):
    """Everything of a call that takes no gradient."""

    plan: Plan
    backend: Backend
    objective: Objective
    logit_scale: float
    softcap: float | None
    request: Request = DEFAULT_REQUEST
    gradient_buffer: GradientBuffer | None = None  # where the weight's gradient goes, instead of back
    packing: Packing | None = None  # the order in which rows run
    spans: Spans | None = None  # of rows whose gradients wait for each other alone; None: as the plan says
    shard: Shard | None = None  # this rank's part of the vocabulary, where ranks share it
    padded: bool = False  # whether rows that do not count follow the call's: targets have them, hidden states have not

    @property
    def counted(self) -> Tensor | None:
        """[] how many rows count, those first, where products stop at them."""
        return None if self.packing is None else self.packing.count

    def head(self, weight: Tensor, bias: Tensor | None) -> Head:
        """The head in the dtype of the matmuls: under autocast the weight is cast here, once."""
        sizes = self.plan.sizes
        bias = None if bias is None else bias[: sizes.vocab].to(sizes.dtype).contiguous()
        weight = weight.to(sizes.dtype)
        if sizes.padding:
            weight = weight[: sizes.vocab]
        if len(weight) == 1:
            weight = weight.view(-1).view(weight.shape)  # kernels are told its stride, which may be any
        add_targets = None if self.shard is None else self.shard.add_targets
        return Head(weight, bias, self.class_weights, self.logit_scale, self.softcap, add_targets)

    def recomputing(self) -> "Call":
        """The call with a plan that makes gradients in backward: for the second one over a retained graph too."""
        if self.plan.schedule == "recompute":
            return self
        plan = find_plan(
            replace(self.plan.sizes, late_upstream=True), Request(memory_budget=self.request.memory_budget)
        )
        if isinstance(plan, NoPlan):
            raise ValueError(f"a second backward over a retained graph computes the logits again: {plan}")
        return replace(self, plan=plan)

    def late_gradients(
        self, operands: Sequence[Tensor], stats: RowStats, upstream: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias once the upstream gradients are known."""
        hidden, weight, bias = operands[:3]
        if self.padded:
            more = self.plan.sizes.tokens - len(hidden)
            upstream = tuple([each if each is None or not each.dim() else F.pad(each, (0, more)) for each in upstream])
        if self.shard is not None and not isinstance(self.objective, ScalarObjective):
            upstream = self.shard.whole_upstream(upstream)
        coefficients = self.objective.late(stats, upstream)
        call = self.recomputing()
        return recompute(call, hidden, call.head(weight, bias), stats, coefficients)


class Operands:
    """Rows as the matmuls take them, in reused buffers."""

    def __init__(self, call: Call, hidden: Tensor, rows: int):
        self.call, self.hidden, self.tokens = call, hidden, call.target.shape[0]
        self.gathered = None if call.shard is None else call.shard.gathered(hidden, rows)
        self.buffer = torch.empty(rows, hidden.shape[1], dtype=call.plan.sizes.dtype, device=hidden.device)
        teacher = call.objective.teacher
        self.teacher = None if teacher is None else teacher.cast()  # once, as the weight
        if self.teacher is not None and self.teacher.hidden is not None and self.teacher.weight is not None:
            self.teacher_buffer = self.teacher.weight.new_empty(rows, self.teacher.hidden.shape[1])

    def rows(self, rows: slice, session: Session, stats: RowStats | None = None) -> Rows:
        """Of the call, clean; ``stats``: theirs, where they are about to be made."""
        count = rows.stop - rows.start
        # where one chunk is all there is, nothing is sliced
        target = self.call.target if count == self.tokens else self.call.target[rows]
        out = self.buffer if count == self.buffer.shape[0] else self.buffer[:count]
        scale = self.call.objective.scale
        scale = scale if scale is None else scale[rows]
        teacher = self.teacher
        if teacher is not None and teacher.hidden is not None:
            clean = self.teacher_buffer[:count]
            self.call.backend.clean_rows(clean, teacher.hidden[rows], target, None)
            teacher = replace(teacher, hidden=clean)
        elif teacher is not None:
            teacher = teacher.rows(rows)
        columns = None if self.call.columns is None else self.call.columns[rows]
        made = Rows(out, target, columns, scale, teacher, self.call.counted, rows.start)
        if self.gathered is not None:
            # rows that are clean stand in the call's order
            self.raw, self.raw_order = self.gathered.chunk(rows)
            session.clean_rows(made, self.raw, self.raw_order, stats)
        else:
            if rows.start >= len(self.hidden):  # where another call's tokens of this chunk lie, this one cannot say
                refuse("a chunk without a token")
            # of rows that follow the call's own there is nothing to read
            source = (
                self.hidden if count == self.tokens else self.hidden[min(rows.start, len(self.hidden) - 1) : rows.stop]
            )
            session.clean_rows(made, source, None, stats)
        return made


def sweep(call: Call, hidden: Tensor, head: Head) -> tuple[RowStats, Gradients | None]:
    """One pass over token chunks: statistics, and in the ``forward`` schedule what becomes the gradients."""
    if call.packing is None:
        return sweep_rows(call, hidden, head)
    stats, grads = sweep_rows(call, call.packing.pack(hidden), head)
    if grads is not None and grads.hidden is not None:
        grads.hidden = call.packing.unpack(grads.hidden)
    return stats, grads


def sweep_rows(call: Call, hidden: Tensor, head: Head) -> tuple[RowStats, Gradients | None]:
    """The same of rows in the order in which they run."""
    plan, objective = call.plan, call.objective
    stats = RowStats.empty(plan.sizes.tokens, objective.demand, objective.dtype, hidden.device)
    grads = None
    if plan.schedule == "forward":
        dtypes = plan.hidden_accumulate, plan.weight_accumulate
        grads = Gradients.empty(plan, *dtypes, hidden.device, call.gradient_buffer)
        grads.over_ranks = None if call.shard is None else call.shard.hidden_gradient()
        if call.counted is not None and grads.hidden is not None:
            grads.hidden.zero_()  # where a token does not count nothing is computed
    if plan.sizes.tokens == 0:
        return stats, grads
    kept = kept_columns(call, hidden, head)
    if not call.multiplies:
        assert kept is not None
        return stats, sweep_kept(call, kept, stats, grads)
    operands = Operands(call, hidden, plan.chunk_tokens)
    session = call.backend.session(head, plan, tiled=False)
    if call.shard is not None and operands.gathered is None and call.counted is None:
        session.exchange_target_logits(hidden, call.target, objective.scale, stats)

    def swept(at: slice) -> tuple[Rows, RowStats]:
        chunk_stats = stats.at(at)
        rows = operands.rows(at, session, chunk_stats)
        whole_stats(call, session, rows, chunk_stats, kept, pairs=not plan.teacher_last)
        return rows, chunk_stats

    for span in call.spans or [(at,) for at in plan.token_chunks()]:
        first, last = span[0].start, span[-1].stop
        for at in span:
            rows, chunk_stats = swept(at)
        closed, values = call.spans is not None, not plan.teacher_last
        found = objective.visit(stats, slice(first, last), gradient=grads is not None, closed=closed, values=values)
        if grads is None:
            continue
        assert found is not None
        for at in span:
            coefficients = found
            if len(span) > 1:  # only the last one's logits are still there
                rows, chunk_stats = swept(at)
                coefficients = found.at(slice(at.start - first, at.stop - first))
            if kept is None:
                session.add_gradients(at, rows, chunk_stats, coefficients, grads)
            else:
                # sums over ranks begin where a row is complete
                session.add_gradients(at, rows, *of_others(kept.kept.has[at], chunk_stats, coefficients), grads.alone())
                kept.add_gradients(at, chunk_stats, coefficients, grads)
                grads.hidden_done(at)
            if operands.gathered is not None:
                # nobody has the call's hidden states all at once
                session.finish(at, operands.raw, call.own_target[at], grads, operands.raw_order)
    if grads is not None:
        if operands.gathered is None:
            session.finish(slice(0, plan.sizes.tokens), hidden, call.own_target, grads, None)
        if kept is not None:
            kept.finish(grads)
        grads.wait()
    return stats, grads


def kept_columns(call: Call, hidden: Tensor, head: Head) -> KeptColumns | None:
    """The session of the rows whose softmaxes are over sets of columns."""
    if call.kept is None:
        return None
    rows = KeptRows(call.kept, call.every_target, call.objective.scale, hidden)
    return call.backend.kept_columns(head, rows, call.objective.demand)


def sweep_kept(call: Call, kept: KeptColumns, stats: RowStats, grads: Gradients | None) -> Gradients | None:
    """The pass where no row's logits are a matmul's: all tokens at once."""
    everything, objective = slice(0, call.plan.sizes.tokens), call.objective
    kept.stats(everything, stats)
    merge_stats(call, Rows(kept.rows.hidden, call.every_target, call.columns), stats, kept.known_targets)
    coefficients = objective.visit(stats, everything, gradient=grads is not None)
    if grads is not None:
        assert coefficients is not None
        kept.add_gradients(everything, stats, coefficients, grads)
        grads.hidden_done(everything)
        kept.finish(grads)
        grads.wait()
    return grads


def whole_stats(
    call: Call, session: Session, rows: Rows, out: RowStats, kept: KeptColumns | None = None, pairs: bool = True
) -> None:
    """Statistics of a chunk of rows over all of the vocabulary, wherever it is, or over the columns that they keep.
    ``pairs``: those of a teacher beside the student too, where there is one; else they come with the gradients."""
    session.stats(rows, out)
    if session.pieces is not None and call.shard is None:
        merge_blocks(call.backend.merge_ranks, session.pieces, rows.target, out, call.objective.demand)
    if kept is not None:
        at = slice(rows.first, rows.first + rows.target.shape[0])
        kept.stats(at, out)
        rows = rows._replace(target=call.every_target[at])
    paired = pairs and call.objective.demand.pairing is not None
    merge_stats(call, rows, out, session.known_targets, session.pieces)
    if paired:
        session.pair_stats(rows, out)
    if paired and call.shard is not None:
        call.shard.add_pairs(out)


def merge_stats(call: Call, rows: Rows, out: RowStats, known_targets: bool, pieces: Tensor | None = None) -> None:
    """Statistics of this rank's columns become those of all ranks'."""
    if call.shard is not None:
        checks = call.token_checks[rows.first : rows.first + rows.target.shape[0]]
        demand = call.objective.demand
        call.shard.merge(call.backend.merge_ranks, rows, checks, out, demand, known_targets, pieces)


def recompute(
    call: Call,
    hidden: Tensor,
    head: Head,
    stats: RowStats,
    coefficients: Coefficients,
) -> tuple[Tensor | None, ...]:
    """Gradients of hidden, weight and bias from coefficients of all tokens.

    Blocks of tokens outside, tiles of the vocabulary inside: a tile of the weight's gradient is one product per block.
    """
    if call.packing is None:
        return recompute_rows(call, hidden, head, stats, coefficients)
    of_hidden, *others = recompute_rows(call, call.packing.pack(hidden), head, stats, coefficients)
    return None if of_hidden is None else call.packing.unpack(of_hidden), *others


def recompute_rows(
    call: Call, hidden: Tensor, head: Head, stats: RowStats, coefficients: Coefficients
) -> tuple[Tensor | None, ...]:
    """The same of rows in the order in which they run."""
    plan = call.plan
    grads = Gradients.empty(plan, plan.sizes.hidden_dtype, plan.weight_accumulate, hidden.device, call.gradient_buffer)
    grads.over_ranks = None if call.shard is None else call.shard.hidden_gradient()
    if call.counted is not None and grads.hidden is not None:
        grads.hidden.zero_()
    kept = kept_columns(call, hidden, head) if plan.sizes.tokens else None
    if kept is not None and not call.multiplies:
        everything = slice(0, plan.sizes.tokens)
        kept.add_gradients(everything, stats, coefficients, grads)
        grads.hidden_done(everything)
        kept.finish(grads)
        grads.wait()
    elif plan.sizes.tokens:
        operands = Operands(call, hidden, plan.block_tokens)
        session = call.backend.session(head, plan, tiled=True)
        for block in plan.token_blocks():
            rows = operands.rows(block, session)
            d_rows = None
            if grads.hidden is not None:
                d_rows = grads.hidden_rows(block)
                if plan.hidden_accumulate != d_rows.dtype:
                    d_rows = torch.zeros_like(d_rows, dtype=plan.hidden_accumulate)
            fitted, gain = session.fitted(rows, coefficients.at(block))
            of_block = stats.at(block), fitted
            if kept is not None:
                of_block = of_others(kept.kept.has[block], *of_block)
            for tile in plan.column_tiles():
                dlogits = session.tile_grad(rows, tile, *of_block)
                session.add_tile(dlogits, rows, head.weight[tile], d_rows, grads, tile, block.start == 0, gain, plan)
            if d_rows is not None and grads.hidden is not None:
                if gain is not None:
                    d_rows.mul_(gain)
                if d_rows.dtype != grads.hidden.dtype:
                    grads.hidden_rows(block).copy_(d_rows)
            if kept is not None:
                kept.add_gradients(block, stats.at(block), coefficients.at(block), grads)
            if grads.hidden is not None:
                grads.hidden_done(block)
        if kept is not None:
            kept.finish(grads)
        grads.wait()
    return grads.finish(call.backend, [call.objective.one_or_nan], call.objective.one_or_nan, plan)
