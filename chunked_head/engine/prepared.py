"""A call with its fields beside rows: the first work on tensors."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..backends import Backend
from ..core.batch import Batch
from ..core.stats import Kept, Teacher
from ..losses.base import Field, Losses
from ..metrics import Metric
from ..parallel.tokens import Spread
from ..program.demand import Needs
from ..program.fields import TEMPERATURE, Frame
from ..program.teachers import make_teacher
from .head_options import HeadOptions, LogitsOptions
from .packing import Packing
from .program import Program, frame_of, named_weights
from .ranks.gather import of_all_ranks
from .rows import TokenRows, kept_ids, prepare_fields
from .task import Task

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
    scale: Tensor | None = None  # [tokens] what their logits are multiplied by, 1 / temperature
    kept: Kept | None = None  # columns of tokens whose softmax is over no others
    packing: Packing | None = None
    spread: Spread | None = None  # over ranks, whose counts those of ``token_rows`` are then

    def spread_as(self, token_rows: TokenRows, spread: Spread) -> "PreparedCall":
        return replace(self, token_rows=token_rows, spread=spread)

    @property
    def dtype(self) -> torch.dtype:
        """Of the matmuls."""
        return self.program.dtype

    @property
    def backend(self) -> Backend:
        return self.program.backend

    @property
    def needs(self) -> Needs:
        return self.program.needs

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
        return self.head.device.type == "cpu" and not self.backend.bounds_rows("fast")

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


def prepare(task: Task, program: Program) -> PreparedCall:
    """Lays fields beside rows; the first work on tensors, whose ids are checked on the way."""
    head, dtype, backend, needs = task.head, program.dtype, program.backend, program.needs
    losses, batch, own = named_weights(task)
    known = {**program.known, **own}
    target, frame = head.target, frame_of(task, dtype)
    if isinstance(head, HeadOptions) and head.shard is not None and head.shard.parallel.sequence_sharded:
        target, batch, frame = of_all_ranks(head.shard, head, batch, program.wanted, known, frame)
    token_rows = prepare_fields(backend, target, batch, program.wanted, known, frame, head.ignore_index, head.vocab)
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
    prepared = PreparedCall(head, program, losses, task.metrics, token_rows, token_fields, teacher, scale)
    sets = None
    if "kept_ids" in program.wanted and len(token_rows.target):
        sets = sets_of(prepared, batch, frame, task.kept_everywhere)
    if isinstance(head, HeadOptions) and head.skip_ignored:
        prepared, sets = packed(prepared, head.skip_ignored, sets)
    if sets is None:
        return prepared
    rows, ids, everywhere, _ = sets
    return replace(prepared, kept=Kept.of(rows, ids, prepared.target, head.vocab, everywhere))


Sets = tuple[Tensor, Tensor, bool, Tensor]  # rows, their ids, whether every row that counts has some, which have


def sets_of(prepared: PreparedCall, batch: Mapping[str, Tensor], frame: Frame, everywhere: bool) -> Sets:
    """The sets that rows keep; what is wrong with them makes everything nan, on the CPU it raises."""
    target, one_or_nan = prepared.target, prepared.one_or_nan
    rows, ids, wrong = kept_ids(batch, target >= 0, frame, prepared.head.vocab)
    has = torch.zeros(len(target) + 1, dtype=torch.bool, device=target.device)
    has = has.scatter_(0, torch.where(rows >= 0, rows, len(target)), True)[:-1]
    missing = (target >= 0) & ~has
    if everywhere:
        if missing.device.type == "cpu" and missing.any():
            raise ValueError(
                f"kept_everywhere=True, and {int(missing.sum())} tokens that count keep no ids; leave it False, then "
                "their softmax is over the vocabulary"
            )
        wrong = wrong | missing.any()
    elif missing.device.type == "cpu":  # to look costs nothing
        everywhere = not missing.any()
    for number in (one_or_nan, prepared.token_rows.inverse):
        number.masked_fill_(wrong, torch.nan)
    return rows, ids, everywhere, has


def packed(prepared: PreparedCall, skip: bool | str, sets: Sets | None) -> tuple[PreparedCall, Sets | None]:
    """The call with its tokens in an order in which those that count come first; and the sets that they keep."""
    token_rows, teacher = prepared.token_rows, prepared.teacher
    # on the CPU there is no device to wait for
    wait = skip == "wait" or prepared.waits_for_nothing
    packing = Packing.of(token_rows.target, wait, None if sets is None else sets[3])
    fields = packing.pack_fields(token_rows.fields, prepared.token_fields)
    if teacher is not None and packing.waited:
        teacher = replace(
            teacher,
            logits=None if teacher.logits is None else packing.pack(teacher.logits),
            hidden=None if teacher.hidden is None else packing.pack(teacher.hidden),
        )
    elif teacher is not None and teacher.logits is not None:
        raise ValueError(
            "skip_ignored=True cannot move the rows of batch['teacher_logits'], which are read where they lie; give "
            'teacher_hidden and teacher_weight, or skip_ignored="wait"'
        )
    token_rows = token_rows._replace(target=packing.pack(token_rows.target), fields=fields)
    scale = None if prepared.scale is None else packing.pack(prepared.scale)
    if sets is not None:
        rows = packing.places(sets[0])
        sets = rows, torch.where(rows >= 0, sets[1], -1), *sets[2:]
    return replace(prepared, token_rows=token_rows, teacher=teacher, scale=scale, packing=packing), sets
