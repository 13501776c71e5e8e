"""Streams that meet the same rows of a dense teacher, whose logits are then made once, a chunk at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...backends import Session
from ...core.stats import TEACHER_STATS, Rows, RowStats, Teacher
from ...program.gradient_buffer import StreamsBuffer
from ...program.planner import make_plan
from ...program.plans import MAX_HALF_CHUNKS, Plan, slices
from ..call import Planned, Wants
from ..loop import Call, Operands, Swept, finished, sweep_steps
from ..prepared import PreparedCall


@dataclass(frozen=True)
class SharedTeacher:
    """Which streams of a call meet rows of one teacher, and where."""

    streams: tuple[int, ...]
    offsets: tuple[int, ...]  # of each: which of the rows its first token meets
    rows: int  # from the first that any of them meets to the last

    @classmethod
    def of(cls, prepared: Sequence[PreparedCall], wants: Sequence[Wants]) -> "SharedTeacher | None":
        """The most streams that could share one; None where there are not two, or where they would make no fewer rows
        together."""
        kinds = [kind_of(*stream) for stream in zip(prepared, wants, strict=True)]
        commonest = max(kinds, key=lambda kind: 0 if kind is None else kinds.count(kind))
        streams = tuple(i for i, kind in enumerate(kinds) if kind == commonest)
        if commonest is None or len(streams) < 2:
            return None
        met = [hidden_of(prepared[i]) for i in streams]
        begins = [int(rows.storage_offset() // rows.stride(0)) for rows in met]
        offsets = tuple(begin - min(begins) for begin in begins)
        rows = max(offset + len(rows) for offset, rows in zip(offsets, met, strict=True))
        return cls(streams, offsets, rows) if rows < sum(map(len, met)) else None

    def without_last(self, prepared: Sequence[PreparedCall]) -> list[PreparedCall]:
        """The streams with the teacher's logits made before the gradients."""
        made = list(prepared)
        for i in self.streams:
            program = prepared[i].program
            pairing = program.demand.pairing
            assert pairing is not None
            demand = program.demand._replace(pairing=pairing._replace(last=False))
            made[i] = replace(prepared[i], program=replace(program, demand=demand))
        return made

    def planned(self, plans: Sequence[Planned], named: bool) -> list[Planned] | None:
        """The streams' plans with chunks of the rows that are met; None where they differ, or where 16 bits would be
        too few for so many chunks. ``named``: the chunk is one of the caller's. ValueError where the budget is too
        small."""
        own = [plans[i] for i in self.streams]
        first = own[0]
        if any(alike(planned) != alike(first) for planned in own) or first.plan.schedule == "recompute":
            return None
        request = first.request
        if request.chunk_tokens is not None and not named:
            # so that a stream that begins further on needs no chunk more
            request = replace(request, chunk_tokens=request.chunk_tokens + max(self.offsets))
        plan = make_plan(replace(first.plan.sizes, tokens=self.rows), request)
        if how(plan) != how(first.plan):
            return None
        others = sum(planned.plan.chunks for i, planned in enumerate(plans) if i not in self.streams)
        buffer = plan.sizes.buffer_dtype
        if buffer is not None and buffer.itemsize < 4 and others + len(own) * plan.chunks > MAX_HALF_CHUNKS:
            return None
        plan = replace(plan, note=f"a teacher's logits are made once for {len(own)} streams")
        made = list(plans)
        for i, planned in zip(self.streams, own, strict=True):
            made[i] = planned._replace(plan=replace(plan, sizes=planned.plan.sizes))
        return made


def kind_of(prepared: PreparedCall, wants: Wants) -> tuple[Any, ...] | None:
    """Equal for streams that may share a teacher; None for one that cannot."""
    program, teacher = prepared.program, prepared.teacher
    if teacher is None or teacher.hidden is None or teacher.weight is None or not len(prepared.target):
        return None
    moved = prepared.packing is not None or prepared.groups is not None or prepared.kept is not None
    if moved or program.coupled or prepared.head.shard is not None or prepared.class_weights is not None:
        return None
    hidden, step = teacher.hidden, teacher.hidden.stride(0)
    # a row's temperature may be another in each stream
    if step < hidden.shape[1] or (teacher.scaled and prepared.scale is not None):
        return None
    place = hidden.untyped_storage().data_ptr(), hidden.storage_offset() % step
    options = teacher.logit_scale, teacher.softcap, teacher.scaled, teacher.dtype
    heads = same(teacher.weight), None if teacher.bias is None else same(teacher.bias)
    return (
        program.demand, program.dtype, prepared.logit_scale, prepared.softcap, options, heads, place, hidden.dtype,
        hidden.shape[1], hidden.stride(), wants,
    )  # fmt: skip


def same(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def hidden_of(prepared: PreparedCall) -> Tensor:
    assert prepared.teacher is not None and prepared.teacher.hidden is not None
    return prepared.teacher.hidden


def alike(planned: Planned) -> tuple[Any, ...]:
    return replace(planned.plan.sizes, tokens=0), planned.request, how(planned.plan)


def how(plan: Plan) -> tuple[Any, ...]:
    return plan.schedule, plan.hidden_accumulate, plan.weight_accumulate


class HeldTeacher:
    """The logits of a chunk of the teacher's rows in a session, and their statistics."""

    def __init__(self, shared: SharedTeacher, calls: Sequence[Call], session: Session):
        lead, self.session = calls[0], session
        first = calls[shared.offsets.index(0)].objective.teacher
        assert first is not None and first.hidden is not None
        count, hidden = lead.plan.chunk_tokens, first.hidden
        every = hidden.as_strided((shared.rows, hidden.shape[1]), hidden.stride())
        self.teacher: Teacher = replace(first, hidden=every).cast()
        assert self.teacher.weight is not None
        self.buffer = self.teacher.weight.new_empty(count, hidden.shape[1])
        self.clean_rows = lead.backend.clean_rows
        # -1 where a row counts for no stream
        self.target = lead.target.new_full((shared.rows,), -1)
        for call, offset in zip(calls, shared.offsets, strict=True):
            rows = self.target[offset : offset + len(call.target)]
            torch.maximum(rows, call.target, out=rows)
        self.stats = RowStats.empty(count, lead.objective.demand, lead.objective.dtype, hidden.device)
        self.chunk = slice(0, 0)

    def make(self, chunk: slice) -> None:
        assert self.teacher.hidden is not None
        self.chunk, count = chunk, chunk.stop - chunk.start
        clean, target = self.buffer[:count], self.target[chunk]
        self.clean_rows(clean, self.teacher.hidden[chunk], target, None)
        rows = Rows(clean, target, teacher=replace(self.teacher, hidden=clean))
        self.session.hold_teacher(rows, self.stats.at(slice(0, count)))


class SharingOperands(Operands):
    """A stream's rows, whose teacher is held."""

    def __init__(self, call: Call, hidden: Tensor, buffer: Tensor, held: HeldTeacher, offset: int):
        alone = replace(call, objective=replace(call.objective, teacher=None))
        super().__init__(alone, hidden, len(buffer), buffer)
        self.held, self.offset = held, offset

    def chunk(self, met: slice) -> slice:
        """Of the stream's rows, those that meet these of the teacher."""
        start, stop = (min(max(end - self.offset, 0), self.tokens) for end in (met.start, met.stop))
        return slice(start, stop)

    def rows(self, rows: slice, session: Session, stats: RowStats | None = None) -> Rows:
        first = self.offset - self.held.chunk.start
        there = slice(rows.start + first, rows.stop + first)
        assert stats is not None
        for name in TEACHER_STATS:
            out, value = getattr(stats, name), getattr(self.held.stats, name)
            if out is not None:
                out.copy_(value[there])
        return super().rows(rows, session, stats)._replace(held=there)


def sweep_together(
    shared: SharedTeacher, calls: Sequence[Call], hidden: Sequence[Tensor], weight: Tensor, bias: Tensor | None
) -> dict[int, Swept]:
    """The sweeps of the streams that share a teacher, by the number of the stream: a chunk of the teacher's rows, and
    then each stream's that meet them."""
    calls, hidden = [calls[i] for i in shared.streams], [hidden[i] for i in shared.streams]
    lead = calls[0]
    head, plan = lead.head(weight, bias), lead.plan
    session = lead.backend.session(head, plan, tiled=False)
    held = HeldTeacher(shared, calls, session)
    buffer = torch.empty(plan.chunk_tokens, hidden[0].shape[1], dtype=plan.sizes.dtype, device=hidden[0].device)
    chunks, sweeps = list(slices(shared.rows, plan.chunk_tokens)), []
    for call, rows, offset in zip(calls, hidden, shared.offsets, strict=True):
        operands = SharingOperands(call, rows, buffer, held, offset)
        own = [operands.chunk(chunk) for chunk in chunks]
        sweeps.append((sweep_steps(call, rows, head, operands, session, own), own))
    for i, chunk in enumerate(chunks):
        held.make(chunk)
        for call, (steps, own) in zip(calls, sweeps, strict=True):
            next(steps)
            if isinstance(call.gradient_buffer, StreamsBuffer):
                call.gradient_buffer.fresh &= own[i].start == own[i].stop
    return {i: finished(steps) for i, (steps, _) in zip(shared.streams, sweeps, strict=True)}
