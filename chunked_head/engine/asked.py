"""From a public function's arguments to what it asks: all checked, fields beside rows, the statistics it needs."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import Backend, resolve
from ..core.batch import Batch
from ..core.stats import Teacher
from ..losses.base import Field, Losses, Summand
from ..losses.user.spread_check import check_over_ranks
from ..metrics import Metric
from ..parallel.tokens import Spread
from ..program import checks
from ..program.demand import Answer, Question, answer
from ..program.fields import Frame, check_fields, wanted_fields
from ..program.teachers import check_dense_teacher, make_teacher
from .head_options import HeadOptions, LogitsOptions
from .of_ranks import of_all_ranks, whole_teacher
from .packing import Packing
from .rows import Prepared, prepare_fields


@dataclass(frozen=True, eq=False)
class Asked:
    """A call whose arguments have been checked: what it wants and the fields that go with it."""

    head: HeadOptions | LogitsOptions
    dtype: torch.dtype  # of the matmuls
    backend: Backend
    losses: Losses
    metrics: tuple[Metric, ...]
    answer: Answer
    prepared: Prepared
    token_fields: frozenset[str]
    teacher: Teacher | None
    packing: Packing | None = None
    spread: Spread | None = None  # over ranks, whose counts those of ``prepared`` are then

    def spread_as(self, prepared: Prepared, spread: Spread) -> "Asked":
        return replace(self, prepared=prepared, spread=spread)

    @property
    def statistics_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def logit_scale(self) -> float:
        """Of the logits at the first softmax's temperature."""
        return float(self.head.logit_scale) / self.answer.temperature

    @property
    def softcap(self) -> float | None:
        return None if self.head.softcap is None else self.head.softcap / self.answer.temperature

    @property
    def waits_for_nothing(self) -> bool:
        """Whether the host may look at tensors for free."""
        return self.head.device.type == "cpu" and not self.backend.bounds_rows("fast")

    @property
    def counts(self) -> Tensor:
        """Which of the call's tokens count [tokens], where they stand."""
        counts = self.prepared.target >= 0
        return counts if self.packing is None else self.packing.unpack(counts)

    @functools.cached_property
    def batch(self) -> Batch:
        """The fields of all tokens."""
        prepared = self.prepared
        return Batch(prepared.fields, prepared.target, prepared.num_segments, self.head.vocab, self.spread)

    @functools.cached_property
    def unit_counts(self) -> dict[str, Tensor]:
        """How many of each unit count, in the statistics' dtype: tokens, and what else has been asked for."""
        return {"token": self.prepared.counted}

    @property
    def one_or_nan(self) -> Tensor:
        return self.prepared.one_or_nan


class Checked(NamedTuple):
    """A call whose arguments have been checked, before any work on tensors."""

    head: HeadOptions | LogitsOptions
    dtype: torch.dtype  # of the matmuls
    backend: Backend
    losses: Losses
    metrics: tuple[Metric, ...]
    batch: dict[str, Tensor]
    wanted: list[str]  # fields that are read
    known: dict[str, Field]
    frame: Frame
    answer: Answer
    autocast: bool  # whether it gives the dtype of the matmuls


def check(
    head: HeadOptions | LogitsOptions,
    dtype: torch.dtype,  # that head.check() returned
    losses: Losses,
    metrics: tuple[Metric, ...] = (),
    batch: Mapping[str, Tensor] | None = None,
    num_segments: int | None = None,
) -> Checked:
    """Checks what is left to check; looks at no tensor's values."""
    backend = resolve(head.backend, head.device)
    backend.check(head.device, dtype, "logits" if isinstance(head, LogitsOptions) else "hidden")
    for _, summand in losses.terms:
        for name, tensor in summand.tensors.items():
            checks.check_class_weights(tensor, head.vocab, head.device, f"{name} of {summand.label}")
    if batch is not None and not isinstance(batch, Mapping):
        raise TypeError(
            "batch must be a mapping of names to tensors, such as {'advantages': advantages}, or None, got "
            f"{type(batch).__name__}"
        )
    losses, batch, own = named_weights(losses, dict(batch or {}))
    wanted, known = wanted_fields(losses, metrics, batch, own)
    parts: list[Summand | Metric] = [*(summand for _, summand in losses.terms), *metrics]
    reads = [part for part in parts if part.reads_target]
    if head.target is None and reads:
        raise ValueError(f"target is None, and {reads[0].label} reads it; pass token ids")
    if num_segments is not None:
        checks.check_int("num_segments", num_segments)
        if num_segments < 1:
            raise ValueError(f"num_segments must be at least 1, got {num_segments}")
    device, statistics = head.device, torch.promote_types(dtype, torch.float32)
    frame = Frame(head.leading, device, statistics, head.shift, num_segments)
    for name in {s.token_weights for _, s in losses.terms if isinstance(s.token_weights, str)}:
        if known[name].kind != "token" or known[name].trailing or name == "mask":
            remedy = "the mask applies by itself" if name == "mask" else f"not one of kind {known[name].kind!r}"
            raise ValueError(f"token_weights={name!r} must name a token field; {remedy}")
    check_fields(batch, wanted, known, frame)
    if head.tokens is not None:
        for part in parts:
            check_over_ranks(part, "loss" if isinstance(part, Summand) else "metric", frozenset(wanted), known)
    # as the student's operands
    autocast = torch.is_autocast_enabled(device.type) and dtype != torch.float64
    teacher_vocab = check_dense_teacher(batch, wanted, dtype, autocast)
    if teacher_vocab is not None:
        teacher_vocab = whole_teacher(head, batch, teacher_vocab)
    columns = batch["teacher_ids"].shape[-1] if "teacher_ids" in wanted else 0
    answered = answer(Question(losses, metrics, head.temperature, head.vocab, columns, teacher_vocab))
    return Checked(head, dtype, backend, losses, metrics, batch, wanted, known, frame, answered, autocast)


def ask(checked: Checked) -> Asked:
    """Lays fields beside rows; the first work on tensors, whose ids are checked on the way."""
    head, dtype, backend, losses, metrics, batch, wanted, known, frame, answered, autocast = checked
    target = head.target
    if isinstance(head, HeadOptions) and head.shard is not None and head.shard.parallel.sequence_sharded:
        target, batch, frame = of_all_ranks(head.shard, head, batch, wanted, known, frame)
    prepared = prepare_fields(backend, target, batch, wanted, known, frame, head.ignore_index, head.vocab)
    own_rows = Field("row")  # of what the preparation has made
    token_fields = frozenset(name for name in prepared.fields if known.get(name, own_rows).kind in ("token", "row"))
    teacher = None
    if answered.teacher is not None and answered.demand.pairing is not None:
        columns = answered.demand.pairing.columns if head.shard is None else head.columns
        teacher = make_teacher(prepared.fields, answered.teacher, columns, dtype if autocast else None)
    fields = {
        k: v for k, v in prepared.fields.items() if k not in ("teacher_logits", "teacher_hidden", "teacher_weight")
    }
    prepared = prepared._replace(fields=fields)
    asked = Asked(
        head, dtype, backend, losses, metrics, answered, prepared, token_fields & frozenset(fields), teacher
    )  # fmt: skip
    return packed(asked, head.skip_ignored) if isinstance(head, HeadOptions) and head.skip_ignored else asked


def packed(asked: Asked, skip: bool | str) -> Asked:
    """The call with its tokens in an order in which those that count come first."""
    prepared, teacher = asked.prepared, asked.teacher
    # on the CPU there is no device to wait for
    packing = Packing.of(prepared.target, wait=skip == "wait" or asked.waits_for_nothing)
    fields = packing.pack_fields(prepared.fields, asked.token_fields)
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
    prepared = prepared._replace(target=packing.pack(prepared.target), fields=fields)
    return replace(asked, prepared=prepared, teacher=teacher, packing=packing)


def named_weights(losses: Losses, batch: dict[str, Any]) -> tuple[Losses, dict[str, Any], dict[str, Field]]:
    """Token weights that a loss holds itself, as fields of a name of their own."""
    own: dict[str, Field] = {}
    terms = []
    for coefficient, summand in losses.terms:
        if isinstance(summand.token_weights, Tensor):
            key = f"token_weights of {summand.label}"
            batch[key], own[key] = summand.token_weights, Field("token")
            summand = replace(summand, token_weights=key)
        terms.append((coefficient, summand))
    return Losses(tuple(terms)) if own else losses, batch, own
