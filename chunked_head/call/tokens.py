"""The tokens of a call: targets and fields beside its rows of hidden states, flat, in the order in which they run."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.demand import Needs
from ..core.batch import PLACES, Batch
from ..core.stats import Kept, Sets, Teacher
from ..losses.base import TEACHER_FIELDS, Field, Losses
from ..metrics import Metric
from ..parallel.hidden_rows import interleaved
from ..parallel.shard import Shard
from ..parallel.tokens import Spread
from ..plan.segments import Group, groups_of, order_of
from ..stores import Backend
from .fields import TEMPERATURE, make_teacher
from .options import HeadOptions, LogitsOptions
from .rows import in_range, lay_fields, may_look
from .spec import Spec, Task, completed, named_weights, own_matmuls

NO_FIELDS: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Packing:
    """An order of a call's tokens: those that count first, in the order in which they stand, or one the host names.

    Hidden states are copied into this order where a pass over them begins, and their gradient is put back at its end.
    Either nobody but the device knows how many count: ``order`` holds all tokens, and the matmuls stop at ``count``.
    Or ``count`` is None, and the matmuls are over all that ``order`` holds: those that count, where the host has waited
    for their number, or all tokens.
    """

    order: Tensor  # [kept] int64: where each token stands in the call's tensors
    count: Tensor | None  # [] int64
    tokens: int  # of the call

    @classmethod
    def of(cls, target: Tensor, wait: bool, kept: Tensor | None = None) -> "Packing":
        """From each row's target, -1 where it does not count; rows ``kept`` [tokens], which no matmul makes the logits
        of, come after the others that count."""
        counts = target >= 0
        last = (~counts).to(torch.uint8) * 2
        first = counts if kept is None else counts & ~kept
        order = torch.sort(last if kept is None else last | kept, stable=True).indices
        if wait:
            return cls(order[: int(counts.sum())], None, len(target))
        return cls(order, first.sum(), len(target))

    def pack(self, values: Tensor) -> Tensor:
        """Values [tokens, ...] in this order [kept, ...]."""
        return values.index_select(0, self.order)

    def places(self, rows: Tensor) -> Tensor:
        """Where rows of the call stand in this order, -1 for those that are none."""
        place = torch.full((self.tokens + 1,), -1, dtype=torch.int64, device=rows.device)
        place[self.order] = torch.arange(len(self.order), device=rows.device)
        return place[rows]  # -1 is the last

    def unpack(self, values: Tensor) -> Tensor:
        """Values [kept, ...] at their tokens' places [tokens, ...], 0 elsewhere; differentiable."""
        everywhere = values.new_zeros(self.tokens, *values.shape[1:])
        return everywhere.index_copy(0, self.order, values)


@dataclass(frozen=True, eq=False)
class Tokens:
    """A call whose arguments have been checked, with the fields that go with its rows of hidden states. Per row, what
    does not count is 0 (ids -1)."""

    head: HeadOptions | LogitsOptions
    spec: Spec
    task: Task[Any]
    losses: Losses
    needs: Needs
    target: Tensor  # [tokens] int64, -1 where a token does not count
    counted: Tensor  # [] of the statistics' dtype: how many do, on all ranks where ``spread`` is there
    one_or_nan: Tensor  # [] of that dtype: nan where an id of any kind is out of range (on the CPU that raises)
    inverse: Tensor  # [] of that dtype: one_or_nan / counted, or / 1 where none does
    fields: dict[str, Tensor]
    token_fields: frozenset[str]  # the fields of which a row is a token's
    teacher: Teacher | None
    scale: Tensor | None = None  # [tokens] what their logits are multiplied by, 1 / temperature
    kept: Kept | None = None  # columns of tokens whose softmax is over no others
    packing: Packing | None = None
    groups: tuple[Group, ...] | None = None  # of rows whose gradients wait for each other alone
    spread: Spread | None = None  # over ranks

    @property
    def backend(self) -> Backend:
        return self.spec.backend

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return self.task.metrics

    @property
    def transform(self) -> tuple[float, float | None]:
        """Scale and softcap of the logits at the first softmax's temperature."""
        head, temperature = self.head, self.needs.temperature
        return float(head.logit_scale) / temperature, None if head.softcap is None else head.softcap / temperature

    @property
    def waits_for_nothing(self) -> bool:
        """Whether the host may look at tensors for free."""
        return may_look(self.target) and not self.backend.bounds_rows("fast")

    @property
    def counts(self) -> Tensor:
        """Which of the call's tokens count [tokens], where they stand."""
        counts = self.target >= 0
        return counts if self.packing is None else self.packing.unpack(counts)

    @functools.cached_property
    def batch(self) -> Batch:
        """The fields of all tokens."""
        return Batch(self.fields, self.target, self.task.num_segments, self.head.vocab, self.spread)

    @functools.cached_property
    def unit_counts(self) -> dict[str, Tensor]:
        """How many of each unit count, in the statistics' dtype: tokens, and what else has been asked for."""
        return {"token": self.counted}


def tokens_of(task: Task, spec: Spec, rows: int | None = None) -> Tokens:
    """Lays fields beside rows; the first work on tensors, whose ids are checked on the way. ``rows``: how many, where
    rows that do not count follow the call's own."""
    head, needs = task.head, spec.needs if spec.library else completed(spec, task)
    losses, batch, own = named_weights(task)
    # kernels read memory, which a lazy negation (``z.conj().imag``) has not reached
    head, batch = head.in_memory(), {name: value.resolve_neg() for name, value in batch.items()}
    known = {**spec.known, **own}
    target, leading = head.target, head.leading
    if isinstance(head, HeadOptions) and head.shard is not None and head.shard.parallel.sequence_sharded:
        target, batch, leading = of_all_ranks(head.shard, head, batch, spec.wanted, known)
    targets, fields = lay_fields(spec, head, target, batch, known, leading, task.num_segments, rows)
    teacher, token_fields, scale = None, NO_FIELDS, fields.pop(TEMPERATURE, None)
    if fields:
        own_rows = Field("row")  # of what the preparation has made
        if needs.teacher is not None and needs.demand.pairing is not None:
            columns = needs.demand.pairing.columns if head.shard is None else head.columns
            teacher = make_teacher(fields, needs.teacher, columns, spec.dtype if spec.autocast else None)
            fields = {name: value for name, value in fields.items() if name not in TEACHER_FIELDS[:3]}
        token_fields = frozenset([name for name in fields if known.get(name, own_rows).kind in ("token", "row")])
    tokens = Tokens(head, spec, task, losses, needs, *targets, fields, token_fields, teacher, scale)
    if "kept_ids" in spec.wanted and len(tokens.target):
        tokens = replace(tokens, kept=sets_of(tokens, batch, leading, task.kept_everywhere))
    if isinstance(head, HeadOptions) and (head.skip_ignored or (tokens.kept is not None and keeps_some(tokens, head))):
        return packed(tokens, packing_of(tokens, head.skip_ignored))
    if not (spec.by_segments and task.segments is not None and len(tokens.target)):
        return tokens
    return replace(tokens, groups=groups_of(task.segments, leading[-1] if leading else 1, head.shift))


def of_all_ranks(
    shard: Shard,
    head: HeadOptions,
    batch: dict[str, Tensor],
    wanted: Sequence[str],
    known: Mapping[str, Field],
) -> tuple[Tensor | None, dict[str, Tensor], tuple[int, ...]]:
    """Targets and fields of every rank's tokens, where each has hidden states of its own; and their leading shape."""
    dims = len(head.leading)
    own = {name: batch[name].flatten(0, dims - 1) for name in wanted if known[name].kind in ("token", "row")}
    if head.target is not None:
        own["target"] = head.target.reshape(-1)
    count = math.prod(head.leading)
    fields = {"tokens": str(count), "batch": str(sorted(own))}
    fields |= {f"batch[{name!r}]": f"{list(value.shape[1:])} {value.dtype}" for name, value in own.items()}
    shard.agreed_on(fields, head.device)
    whole = {name: interleaved(value, shard.group) for name, value in own.items()}
    target = whole.pop("target", None)
    return target, {**batch, **whole}, (count * shard.parallel.ranks,)


def keeps_some(tokens: Tokens, head: HeadOptions) -> bool:
    """Whether some rows keep sets that others do not, and matmuls can stop at a number that the device knows."""
    kept = tokens.kept
    return kept is not None and not kept.everywhere and own_matmuls(head, tokens.spec)


def in_order(tokens: Tokens, groups: Sequence[Group]) -> Tokens:
    """The call with its rows in the order of groups, if that is not their own."""
    ranges = [rows for group in groups for rows in group]
    if all(one.start < next.start for one, next in itertools.pairwise(ranges)):
        return tokens
    order = order_of(ranges, tokens.head.device)
    return packed(tokens, Packing(order, None, len(order)))


def sets_of(tokens: Tokens, batch: Mapping[str, Tensor], leading: tuple[int, ...], everywhere: bool) -> Kept:
    """The sets that rows keep; what is wrong with them makes everything nan, on the CPU it raises."""
    target, vocab = tokens.target, tokens.head.vocab
    ids, offsets, given = batch["kept_ids"].reshape(-1).contiguous(), batch.get("kept_offsets"), None
    if "candidate_bias" in batch:
        bias = batch["candidate_bias"].reshape(-1).to(tokens.spec.statistics_dtype)
        given = (bias / tokens.needs.temperature).contiguous()
    starts, ends = target.new_empty(2, len(target)).unbind()
    rows = target.new_empty(len(ids) + len(target))
    columns = torch.empty_like(rows, dtype=torch.int32)
    kept = Kept(starts, ends, rows, columns, everywhere, None if given is None else given.new_zeros(len(rows)))
    length, of = leading[-1] if leading else 1, None if offsets is None else offsets.contiguous()
    sets = Sets(ids, of, given, length, tokens.head.shift, vocab, everywhere)
    tokens.backend.kept_sets(kept, sets, target, (tokens.one_or_nan, tokens.inverse))
    if not may_look(target):
        return kept
    missing = int(((target >= 0) & ~kept.has).sum())
    if tokens.one_or_nan.isnan():
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


def packing_of(tokens: Tokens, skip: bool | str) -> Packing:
    """Of tokens that count before those that do not."""
    # on the CPU there is no device to wait for
    wait = skip == "wait" or tokens.waits_for_nothing
    return Packing.of(tokens.target, wait, None if tokens.kept is None else tokens.kept.has)


def packed(tokens: Tokens, packing: Packing) -> Tokens:
    """The call with its tokens in another order."""
    teacher, kept = tokens.teacher, tokens.kept
    fields, token_fields = tokens.fields, tokens.token_fields
    fields = {name: packing.pack(value) if name in token_fields else value for name, value in fields.items()}
    if "segments" in fields and tokens.groups is None:
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
    scale = None if tokens.scale is None else packing.pack(tokens.scale)
    if kept is not None:
        starts, ends = packing.pack(kept.starts), packing.pack(kept.ends)
        kept = replace(kept, starts=starts, ends=ends, rows=packing.places(kept.rows))
    return replace(
        tokens, target=packing.pack(tokens.target), fields=fields, token_fields=token_fields, teacher=teacher,
        scale=scale, kept=kept, packing=packing,
    )  # fmt: skip
