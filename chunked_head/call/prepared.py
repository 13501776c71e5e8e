"""A call with its fields beside rows: the first work on tensors."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..arithmetic.demand import Needs
from ..core.batch import PLACES, Batch
from ..core.stats import Kept, Sets, Teacher
from ..losses.base import Field, Losses
from ..metrics import Metric
from ..parallel.tokens import Spread
from ..plan.segments import Group, groups_of, order_of
from ..stores import Backend, Layout
from .fields import TEMPERATURE, Frame
from .gather import of_all_ranks
from .head_options import HeadOptions, LogitsOptions
from .packing import Packing
from .program import Program, completed, frame_of, named_weights
from .rows import TokenRows, in_range, may_look, prepare_fields
from .task import Task
from .teachers import make_teacher

NO_FIELDS: frozenset[str] = frozenset()
DENSE = ("teacher_logits", "teacher_hidden", "teacher_weight")  # what a teacher holds instead


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """A call whose arguments have been checked: what it wants and the fields that go with it."""

    head: HeadOptions | LogitsOptions
    program: Program
    losses: Losses
    metrics: tuple[Metric, ...]
    token_rows: TokenRows
    token_fields: frozenset[str]
    teacher: Teacher | None
    asked: Mapping[str, str]  # the function and its objective's options, by name
    scale: Tensor | None = None  # [tokens] what their logits are multiplied by, 1 / temperature
    kept: Kept | None = None  # columns of tokens whose softmax is over no others
    packing: Packing | None = None
    groups: tuple[Group, ...] | None = None  # of rows whose gradients wait for each other alone
    spread: Spread | None = None  # over ranks, whose counts those of ``token_rows`` are then

    @property
    def dtype(self) -> torch.dtype:
        """Of the matmuls."""
        return self.program.dtype

    @property
    def backend(self) -> Backend:
        return self.program.backend

    @functools.cached_property
    def needs(self) -> Needs:
        return completed(self.program.needs, self.losses, self.metrics, self.head.target is not None)

    @property
    def statistics_dtype(self) -> torch.dtype:
        return self.program.statistics_dtype

    @property
    def class_weights(self) -> Tensor | None:
        """Of the statistic ``weighted_sum``."""
        weighted = self.needs.weighted
        return None if weighted is None else self.losses.terms[weighted][1].tensors["class_weights"]

    @property
    def logit_scale(self) -> float:
        """Of the logits at the first softmax's temperature."""
        return float(self.head.logit_scale) / self.needs.temperature

    @property
    def softcap(self) -> float | None:
        return None if self.head.softcap is None else self.head.softcap / self.needs.temperature

    @property
    def waits_for_nothing(self) -> bool:
        """Whether the host may look at tensors for free."""
        return may_look(self.target) and not self.backend.bounds_rows("fast")

    @property
    def skips(self) -> bool:
        """Whether products stop at a number of rows that only the device knows."""
        return self.packing is not None and self.packing.count is not None

    @property
    def counts(self) -> Tensor:
        """Which of the call's tokens count [tokens], where they stand."""
        counts = self.token_rows.target >= 0
        return counts if self.packing is None else self.packing.unpack(counts)

    @functools.cached_property
    def batch(self) -> Batch:
        """The fields of all tokens."""
        token_rows = self.token_rows
        return Batch(token_rows.fields, token_rows.target, token_rows.num_segments, self.head.vocab, self.spread)

    @functools.cached_property
    def unit_counts(self) -> dict[str, Tensor]:
        """How many of each unit count, in the statistics' dtype: tokens, and what else has been asked for."""
        return {"token": self.token_rows.counted}

    @property
    def one_or_nan(self) -> Tensor:
        return self.token_rows.one_or_nan

    @property
    def target(self) -> Tensor:
        return self.token_rows.target


def prepare(task: Task, program: Program, rows: int | None = None) -> PreparedCall:
    """Lays fields beside rows; the first work on tensors, whose ids are checked on the way. ``rows``: how many, where
    rows that do not count follow the call's own."""
    head, dtype, backend, needs = task.head, program.dtype, program.backend, program.needs
    losses, batch, own = named_weights(task)
    # kernels read memory, which a lazy negation (``z.conj().imag``) has not reached
    head, batch = head.in_memory(), {name: value.resolve_neg() for name, value in batch.items()}
    known = {**program.known, **own}
    target, frame = head.target, frame_of(task, dtype)
    if isinstance(head, HeadOptions) and head.shard is not None and head.shard.parallel.sequence_sharded:
        target, batch, frame = of_all_ranks(head.shard, head, batch, program.wanted, known, frame)
    token_rows = prepare_fields(
        backend, target, batch, program.wanted, known, frame, head.ignore_index, head.vocab,
        head.beyond if head.shard is None else "", rows,
    )  # fmt: skip
    fields, teacher, token_fields = token_rows.fields, None, NO_FIELDS
    scale = fields.pop(TEMPERATURE, None)
    if fields:
        own_rows = Field("row")  # of what the preparation has made
        token_fields = frozenset(name for name in fields if known.get(name, own_rows).kind in ("token", "row"))
        if needs.teacher is not None and needs.demand.pairing is not None:
            columns = needs.demand.pairing.columns if head.shard is None else head.columns
            teacher = make_teacher(fields, needs.teacher, columns, dtype if program.autocast else None)
            fields = {name: value for name, value in fields.items() if name not in DENSE}
            token_rows = token_rows._replace(fields=fields)
    token_fields &= frozenset(fields)
    asked = {"function": task.function, **task.asked}
    prepared = PreparedCall(head, program, losses, task.metrics, token_rows, token_fields, teacher, asked, scale)
    if "kept_ids" in program.wanted and len(token_rows.target):
        kept = sets_of(prepared, batch, frame, task.kept_everywhere)
        prepared = replace(prepared, kept=kept)
    if isinstance(head, HeadOptions) and (head.skip_ignored or keeps_some(prepared, head)):
        return packed(prepared, packing_of(prepared, head.skip_ignored))
    if not (program.by_segments and task.segments is not None and len(token_rows.target)):
        return prepared
    return replace(prepared, groups=groups_of(task.segments, frame.leading[-1] if frame.leading else 1, frame.shift))


def keeps_some(prepared: PreparedCall, head: HeadOptions) -> bool:
    """Whether some rows keep sets that others do not, and matmuls can stop at a number that the device knows."""
    kept = prepared.kept
    return kept is not None and not kept.everywhere and own_matmuls(head, prepared.program)


def own_matmuls(head: HeadOptions, program: Program) -> bool:
    """Whether the logits are made by a matmul of the backend's own."""
    layout = layout_of(head, program, is_plain(head.weight), plain_rows=True, bias_grad=False)
    return program.backend.bounds_rows(program.backend.store(layout))


def in_order(prepared: PreparedCall, groups: Sequence[Group]) -> PreparedCall:
    """The call with its rows in the order of groups, if that is not their own."""
    ranges = [rows for group in groups for rows in group]
    if all(one.start < next.start for one, next in itertools.pairwise(ranges)):
        return prepared
    order = order_of(ranges, prepared.head.device)
    return packed(prepared, Packing(order, None, len(order)))


def is_plain(weight: Tensor) -> bool:
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0


def layout_of(head: HeadOptions, program: Program, plain_weight: bool, plain_rows: bool, bias_grad: bool) -> Layout:
    """What a backend decides by what it keeps of the logits."""
    return Layout(
        program.backend.traits(head.device).get("gpu"), program.dtype, head.weight.shape[1], plain_weight=plain_weight,
        plain_rows=plain_rows, capped=head.softcap is not None, bias_grad=bias_grad, demand=program.demand,
    )  # fmt: skip


def sets_of(prepared: PreparedCall, batch: Mapping[str, Tensor], frame: Frame, everywhere: bool) -> Kept:
    """The sets that rows keep; what is wrong with them makes everything nan, on the CPU it raises."""
    target, vocab = prepared.target, prepared.head.vocab
    ids, offsets, given = batch["kept_ids"].reshape(-1).contiguous(), batch.get("kept_offsets"), None
    if "candidate_bias" in batch:
        bias = batch["candidate_bias"].reshape(-1).to(prepared.statistics_dtype)
        given = (bias / prepared.needs.temperature).contiguous()
    starts, ends = target.new_empty(2, len(target)).unbind()
    rows = target.new_empty(len(ids) + len(target))
    columns = torch.empty_like(rows, dtype=torch.int32)
    kept = Kept(starts, ends, rows, columns, everywhere, None if given is None else given.new_zeros(len(rows)))
    length, of = frame.leading[-1] if frame.leading else 1, None if offsets is None else offsets.contiguous()
    sets = Sets(ids, of, given, length, frame.shift, vocab, everywhere)
    prepared.backend.kept_sets(kept, sets, target, (prepared.one_or_nan, prepared.token_rows.inverse))
    if not may_look(target):
        return kept
    missing = int(((target >= 0) & ~kept.has).sum())
    if prepared.one_or_nan.isnan():
        refuse_sets(ids, offsets, vocab, missing if everywhere else 0)
    return replace(kept, everywhere=everywhere or not missing)


def refuse_sets(ids: Tensor, offsets: Tensor | None, vocab: int, missing: int) -> None:
    if offsets is not None and (offsets[0] != 0 or offsets[-1] != len(ids) or (offsets[1:] < offsets[:-1]).any()):
        raise ValueError(
            f"batch['kept_offsets'] must rise from 0 to {len(ids)}, the number of kept_ids, got {offsets.tolist()}"
        )
    if missing:
        raise ValueError(
            f"kept_everywhere=True and candidates say that every token keeps ids, and {missing} tokens that count keep "
            "none; give them some, or leave kept_everywhere False: then their softmax is over the vocabulary"
        )
    in_range("kept_ids", ids, vocab, -1)


def packing_of(prepared: PreparedCall, skip: bool | str) -> Packing:
    """Of tokens that count before those that do not."""
    # on the CPU there is no device to wait for
    wait = skip == "wait" or prepared.waits_for_nothing
    return Packing.of(prepared.target, wait, None if prepared.kept is None else prepared.kept.has)


def packed(prepared: PreparedCall, packing: Packing) -> PreparedCall:
    """The call with its tokens in another order."""
    token_rows, teacher, kept = prepared.token_rows, prepared.teacher, prepared.kept
    fields, token_fields = token_rows.fields, prepared.token_fields
    fields = {name: packing.pack(value) if name in token_fields else value for name, value in fields.items()}
    if "segments" in fields and prepared.groups is None:
        # a segment's tokens do not stand in their order any more
        fields[PLACES], token_fields = packing.order, token_fields | {PLACES}
    if teacher is not None and teacher.logits is not None and packing.count is not None:
        raise ValueError(
            "skip_ignored=True cannot move the rows of batch['teacher_logits'], which are read where they lie; give "
            'teacher_hidden and teacher_weight, or skip_ignored="wait"'
        )
    if teacher is not None:
        teacher = replace(
            teacher,
            logits=None if teacher.logits is None else packing.pack(teacher.logits),
            hidden=None if teacher.hidden is None else packing.pack(teacher.hidden),
        )
    token_rows = token_rows._replace(target=packing.pack(token_rows.target), fields=fields)
    scale = None if prepared.scale is None else packing.pack(prepared.scale)
    if kept is not None:
        starts, ends = packing.pack(kept.starts), packing.pack(kept.ends)
        kept = replace(kept, starts=starts, ends=ends, rows=packing.places(kept.rows))
    return replace(
        prepared, token_rows=token_rows, token_fields=token_fields, teacher=teacher, scale=scale, kept=kept,
        packing=packing,
    )  # fmt: skip
