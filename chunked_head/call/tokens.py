"""The tokens of a call: targets and fields in the order of its rows of hidden states, flat."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..arithmetic.demand import Structure
from ..core.checks import INFINITY, MOST_ROUNDED, check_logprobs
from ..core.stats import shift_left
from ..losses.base import KEPT_FIELDS, TEACHER_FIELDS, Field
from ..losses.batch import Batch
from ..losses.distillation import PADDING, check_teacher, entries
from ..parallel.merge import interleaved
from ..parallel.shard import Shard
from ..parallel.tokens import RankSums
from ..plan.segments import Group, groups_of
from ..plan.sizes import slices
from ..stores.operands import Kept, TeacherHead
from .fields import SEGMENT_IDS, TEMPERATURE, make_teacher
from .options import Call
from .spec import Spec, structure_at

NO_FIELDS: frozenset[str] = frozenset()
LOGPROBS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")


@dataclass(frozen=True, eq=False)
class Packing:
    """An order of a call's tokens: those that count first, in their order, or one that the host names.

    Chunks read hidden states in it, and their gradient is put back at the end of a pass. Matmuls are over all of
    ``order``, or stop at ``count``, where only the device knows how many count.
    """

    order: Tensor  # [kept] int64: where each token stands in the call's tensors
    count: Tensor | None  # [] int64
    tokens: int  # of the call

    @classmethod
    def of(cls, target: Tensor, wait: bool) -> "Packing":
        """The order by each row's target, -1 where it does not count."""
        last, count = target < 0, (target >= 0).sum()
        order = torch.sort(last.to(torch.uint8), stable=True).indices
        return cls(order[: int(count)], None, len(target)) if wait else cls(order, count, len(target))

    def pack(self, values: Tensor) -> Tensor:
        """Values [tokens, ...] in this order [kept, ...]."""
        return values.index_select(0, self.order)

    def places(self, rows: Tensor) -> Tensor:
        """Places of rows of the call in this order, -1 for those that are none."""
        place = torch.full((self.tokens + 1,), -1, dtype=torch.int64, device=rows.device)
        place[self.order] = torch.arange(len(self.order), device=rows.device)
        return place[rows]  # -1 is the last

    def unpack(self, values: Tensor) -> Tensor:
        """Values [kept, ...] at their tokens' places [tokens, ...], 0 elsewhere; differentiable."""
        everywhere = values.new_zeros(self.tokens, *values.shape[1:])
        return everywhere.index_copy(0, self.order, values)


@dataclass(eq=False)
class Tokens:
    """A checked call with the fields of its rows of hidden states; what does not count is 0 (ids -1)."""

    call: Call[Any]
    spec: Spec
    structure: Structure
    target: Tensor  # [tokens] int64, -1 where a token does not count
    counted: Tensor  # [] of the statistics' dtype: how many do, on all ranks where ``rank_sums`` is there
    one_or_nan: Tensor  # [] of that dtype: nan where an id of any kind is out of range (on the CPU that raises)
    inverse: Tensor  # [] of that dtype: one_or_nan / counted, or / 1 where none does
    fields: dict[str, Tensor]
    token_fields: frozenset[str]  # the fields of which a row is a token's
    teacher: TeacherHead | None
    scale: Tensor | None = None  # [tokens] what their logits are multiplied by, 1 / temperature
    kept: Kept | None = None  # columns of tokens whose softmax is over no others
    packing: Packing | None = None
    groups: tuple[Group, ...] | None = None  # of rows that wait for each other only
    rank_sums: RankSums | None = None  # where ranks hold different tokens

    @functools.cached_property
    def batch(self) -> Batch:
        """The fields of all tokens."""
        return Batch(self.fields, self.target, self.call.num_segments, self.call.vocab, self.rank_sums)


def tokens_of(call: Call[Any], spec: Spec) -> Tokens:
    """Lays fields in the order of rows; the first work on tensors, whose ids are checked on the way."""
    batch, structure = call.batch or {}, spec.structure
    if structure is None:
        structure, _ = structure_at(call, spec.wanted, spec.columns, spec.teacher_vocab)
        if call.target is not None:  # which a user's function may read in some calls only
            parts: dict[str, Any] = {
                name: tuple([(replace(part, reads_target=True), view) for part, view in getattr(structure, name)])
                for name in ("summands", "metrics", "segment_metrics")
            }
            structure = replace(structure, **parts)
    operands = {"weight": call.weight, "bias": call.bias, "target": call.target}
    operands |= {name: batch[name] for name in spec.wanted}
    for name, one in {"logits" if call.weight is None else "hidden": call.rows, **operands}.items():
        if one is not None and one.is_neg():
            raise ValueError(
                f"{name} is negated lazily, as z.conj().imag is, and kernels read memory; pass {name}.resolve_neg()"
            )
    target, leading = call.target, call.leading
    if call.shard is not None and call.sequence_sharded:
        target, batch, leading = of_all_ranks(call.shard, call, spec, batch)
    targets, fields = lay_fields(spec, call, target, batch, leading)
    teacher, token_fields, scale = None, NO_FIELDS, fields.pop(TEMPERATURE, None)
    if fields:
        own_rows, pairing = Field("row"), structure.pairing  # a field that was made here has a row for each token
        if structure.teacher is not None and pairing is not None:
            columns = pairing.columns if call.shard is None else call.columns
            teacher = make_teacher(fields, structure.teacher, columns, spec.dtype if spec.autocast else None)
            fields = {name: value for name, value in fields.items() if name not in TEACHER_FIELDS[:3]}
        token_fields = frozenset([name for name in fields if spec.known.get(name, own_rows).kind in ("token", "row")])
    tokens = Tokens(call, spec, structure, *targets, fields, token_fields, teacher, scale)
    if "kept_ids" in spec.wanted and len(tokens.target):
        tokens = replace(tokens, kept=sets_of(tokens, batch, leading, call.kept_everywhere))
    if call.weight is not None and call.skip_ignored:
        # on the CPU there is no device to wait for
        wait = call.skip_ignored == "wait" or (reading_is_free(tokens.target) and not spec.backend.bounds_rows)
        return packed(tokens, Packing.of(tokens.target, wait))
    if not (spec.by_segments and call.segments is not None and len(tokens.target)):
        return tokens
    return replace(tokens, groups=groups_of(call.segments, leading[-1] if leading else 1, call.shift))


def lay_fields(
    spec: Spec, call: Call[Any], target: Tensor | None, batch: Mapping[str, Tensor], leading: tuple[int, ...]
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], dict[str, Tensor]]:
    """Targets [tokens] and fields at the hidden states that predict them, 0 (ids -1) where a token does not count, and
    the three numbers of ``Tokens``. ``leading``: the shape of targets and fields."""
    dtype, wanted, known, ignore_index = spec.statistics_dtype, spec.wanted, spec.known, call.ignore_index
    if target is None:
        # every token counts: no id that stands for it may be the one that is ignored
        ignore_index = -1
        target = torch.zeros(leading, dtype=torch.int64, device=call.device)
    mask = batch["mask"] if "mask" in wanted else None
    targets = spec.backend.read_targets(target, mask, call.shift, ignore_index, call.vocab, dtype)
    looks, (paired, _, *numbers_or_nan) = reading_is_free(target), targets
    if looks and numbers_or_nan[0].isnan():
        refuse_target(call, target, mask, ignore_index)
    target = paired
    wrongs: list[Tensor] = []  # [] bool each: ids are out of range (where nothing raised)
    fields: dict[str, Tensor] = {}
    read = [field for field in wanted if field != "mask" and field not in KEPT_FIELDS]
    numbers = [field for field in read if known[field] == Field("token") and field != TEMPERATURE]
    if numbers:
        # on the CPU the error below is in words
        most = [INFINITY if looks or field not in LOGPROBS else MOST_ROUNDED for field in numbers]
        values = spec.backend.read_fields([batch[field] for field in numbers], target, call.shift, dtype, most)
        fields.update(zip(numbers, values, strict=True))
    for field in LOGPROBS:
        if field in fields and looks:
            check_logprobs(f"batch[{field!r}]", fields[field])
    others = [field for field in read if field not in numbers]
    ignored = target < 0 if others else target
    for field in others:
        value, kind = batch[field], known[field]
        if kind.kind in ("token", "row"):
            value = rows_of_field(call, spec, field, value, ignored, leading, wrongs)
        elif field == "pairs":
            value = in_range(field, value.to(torch.int64), call.num_segments or 0, None, wrongs)
        elif field not in TEACHER_FIELDS:
            # a copy: the caller may change it before backward reads it
            value = value.to(dtype if kind.type == "float" else value.dtype, copy=True)
        fields[field] = value
    if "teacher_ids" in fields:
        fields |= columns_of_teacher(fields, target, call.vocab, wrongs)
        if looks and "teacher_entries" in fields:
            kinds = [summand.options for _, summand in call.losses.terms if summand.kind == "topk_kl"]
            is_normalized = not all(options["teacher_renormalize"] for options in kinds)
            entry = fields["teacher_logprobs"], fields["teacher_entries"]
            check_teacher("batch['teacher_logprobs']", *entry, is_normalized)
    for wrong in wrongs:
        for number in numbers_or_nan:
            number.masked_fill_(wrong, torch.nan)
    return targets, fields


def rows_of_field(
    call: Call[Any],
    spec: Spec,
    field: str,
    value: Tensor,
    ignored: Tensor,
    leading: tuple[int, ...],
    wrongs: list[Tensor],
) -> Tensor:
    """A field of tokens [tokens, ...] in the order of hidden states, 0 (ids -1) where ``ignored``."""
    kind, dims = spec.known[field], len(leading)
    if kind.kind == "token" and dims:
        value = shift_left(value, call.shift, -1 if kind.type == "int" else 0, dims - 1)
    value = value.reshape(-1, *value.shape[dims:])
    if field in ("teacher_logits", "teacher_hidden"):
        if value.stride(1) != 1 and value.shape[1] != 1:
            raise ValueError(f"batch[{field!r}] must be contiguous along its last dimension; pass .contiguous()")
        return value
    nowhere = ignored.reshape(-1, *[1] * (value.dim() - 1))
    if kind.type == "bool":
        return value & ~nowhere
    if kind.type == "int":
        value = value.to(torch.int64).masked_fill(nowhere, -1)
        return in_range(field, value, call.num_segments or 0, -1, wrongs) if field in SEGMENT_IDS else value
    value = value.to(spec.statistics_dtype).masked_fill(nowhere, 0.0)
    if field != TEMPERATURE:
        return value
    wrong = ~nowhere & ~((value > 0) & (value < torch.inf))
    if reading_is_free(wrong) and wrong.any():
        raise ValueError(
            f"temperature must be positive and finite, got {float(value[wrong][0]):g} for a token; mask it, or give 1"
        )
    wrongs.append(wrong.any())
    return torch.where(nowhere, 1.0, 1.0 / value)  # what logits are multiplied by


def in_range(field: str, ids: Tensor, number: int, none: int | None, wrongs: list[Tensor]) -> Tensor:
    """Ids in [0, number), or ``none``; for others an IndexError on the CPU, elsewhere one more of ``wrongs``."""
    wrong = (ids < 0) | (ids >= number)
    if none is not None:
        wrong &= ids != none
    if reading_is_free(ids) and wrong.any():
        or_none = "" if none is None else f" or {none} for none"
        raise IndexError(f"batch[{field!r}] must be in [0, {number}){or_none}, got {int(ids[wrong][0])}")
    wrongs.append(wrong.any())
    return torch.where(wrong, -1, ids)


def columns_of_teacher(
    fields: Mapping[str, Tensor], target: Tensor, vocab: int, wrongs: list[Tensor]
) -> dict[str, Tensor]:
    """The teacher's K ids per token, -1 for none, and the entries that count by log-probabilities."""
    ids, logprobs = fields["teacher_ids"], fields.get("teacher_logprobs")
    valid = (target >= 0)[:, None]
    if logprobs is not None:
        valid = valid & ~(logprobs <= PADDING)  # nan counts: an error should show
    if "teacher_mask" in fields:
        valid = valid & fields["teacher_mask"]
    ids = in_range("teacher_ids", torch.where(valid, ids, -1), vocab, -1, wrongs).contiguous()
    if logprobs is None:
        return {"teacher_ids": ids}
    # found once, because every entry is compared with every other
    blocks = slices(len(ids), max(1, (1 << 24) // max(1, ids.shape[1] ** 2)))
    each = [entries(logprobs[at], ids[at], ids[at] >= 0) for at in blocks]
    return {"teacher_ids": ids, "teacher_entries": torch.cat(each) if each else ids >= 0}


def refuse_target(call: Call[Any], target: Tensor, mask: Tensor | None, ignore_index: int) -> NoReturn:
    """An IndexError for the first target out of range."""
    shift, vocab = call.shift, call.vocab
    paired = shift_left(target, shift, ignore_index).reshape(-1)
    wrong = (paired != ignore_index) & ((paired < 0) | (paired >= vocab))
    if mask is not None:
        wrong &= shift_left(mask, shift, 0).reshape(-1)
    first = int(wrong.nonzero()[0])
    beyond = ""
    if call.shard is None and paired[first] >= vocab:
        beyond = "; if ranks share the vocabulary, pass parallel=VocabParallel(group)"
        beyond += ", or these are hidden states: pass them to linear_loss" if call.weight is None else ""
    raise IndexError(
        f"target must be in [0, {vocab}) (the vocabulary) or ignore_index ({ignore_index}), got "
        f"{int(paired[first])} for row {first}, leading dimensions flattened; mask it with ignore_index{beyond}"
    )


def reading_is_free(tensor: Tensor) -> bool:
    """True for a tensor whose values the host has without waiting for a device."""
    return tensor.device.type == "cpu"


def of_all_ranks(
    shard: Shard, call: Call[Any], spec: Spec, batch: Mapping[str, Tensor]
) -> tuple[Tensor | None, Mapping[str, Tensor], tuple[int, ...]]:
    """Targets and fields of all ranks' tokens, where each has its own hidden states; and their leading shape."""
    dims, count = len(call.leading), math.prod(call.leading)
    per_token = [name for name in spec.wanted if spec.known[name].kind in ("token", "row")]
    local = {name: batch[name].flatten(0, dims - 1) for name in per_token}
    if call.target is not None:
        local["target"] = call.target.reshape(-1)
    fields = {"tokens": str(count), "batch": str(sorted(local))}
    fields |= {f"batch[{name!r}]": f"{list(value.shape[1:])} {value.dtype}" for name, value in local.items()}
    shard.agreed_on(fields, call.device)
    gathered = {name: interleaved(value, shard.group) for name, value in local.items()}
    return gathered.pop("target", None), {**batch, **gathered}, (count * shard.parallel.ranks,)


def in_order(tokens: Tokens, groups: Sequence[Group]) -> Tokens:
    """The call with its rows in the order of groups, if that is not their own."""
    ranges = [rows for group in groups for rows in group]
    if all(one.start < next.start for one, next in itertools.pairwise(ranges)):
        return tokens
    order = torch.cat([torch.arange(rows.start, rows.stop, device="cpu") for rows in ranges])
    return packed(tokens, Packing(order.to(tokens.call.device, non_blocking=True), None, len(order)))


def sets_of(tokens: Tokens, batch: Mapping[str, Tensor], leading: tuple[int, ...], everywhere: bool) -> Kept:
    """The sets that rows keep; what is wrong with them makes everything nan, on the CPU it raises."""
    target, vocab = tokens.target, tokens.call.vocab
    ids, offsets, given = batch["kept_ids"].reshape(-1).contiguous(), batch.get("kept_offsets"), None
    if "candidate_bias" in batch:
        bias = batch["candidate_bias"].reshape(-1).to(tokens.spec.statistics_dtype)
        given = (bias / tokens.structure.temperature).contiguous()
    starts, ends = target.new_empty(2, len(target)).unbind()
    rows = target.new_empty(len(ids) + len(target))
    columns = torch.empty_like(rows, dtype=torch.int32)
    kept = Kept(starts, ends, rows, columns, everywhere, None if given is None else given.new_zeros(len(rows)))
    length, of = leading[-1] if leading else 1, None if offsets is None else offsets.contiguous()
    made = starts, ends, rows, columns, kept.bias, tokens.one_or_nan, tokens.inverse
    tokens.spec.backend.kept_sets(*made, target, ids, of, given, length, tokens.call.shift, vocab, everywhere)
    if not reading_is_free(target):
        return kept
    missing = int(((target >= 0) & ~kept.has).sum())
    if tokens.one_or_nan.isnan():
        if offsets is not None and (offsets[0] != 0 or offsets[-1] != len(ids) or (offsets[1:] < offsets[:-1]).any()):
            raise ValueError(
                f"batch['kept_offsets'] must rise from 0 to {len(ids)}, the number of kept_ids, got {offsets.tolist()}"
            )
        if missing and everywhere:
            raise ValueError(
                f"kept_everywhere=True, or candidates, and {missing} tokens that count keep none; give them ids"
            )
        in_range("kept_ids", ids, vocab, -1, [])
    return replace(kept, everywhere=everywhere or not missing)


def packed(tokens: Tokens, packing: Packing) -> Tokens:
    """The call with its tokens in another order; hidden states, a teacher's too, stay in their own."""
    teacher, kept, scale, own = tokens.teacher, tokens.kept, tokens.scale, tokens.token_fields
    if teacher is not None and teacher.logits is not None:
        if packing.count is not None:
            raise ValueError(
                "skip_ignored=True cannot move rows of batch['teacher_logits']; give teacher_hidden, or use 'wait'"
            )
        teacher = teacher.rows(packing.order)
    if kept is not None:
        starts, ends = packing.pack(kept.starts), packing.pack(kept.ends)
        kept = replace(kept, starts=starts, ends=ends, rows=packing.places(kept.rows))
    return replace(
        tokens,
        target=packing.pack(tokens.target),
        kept=kept,
        packing=packing,
        fields={name: packing.pack(value) if name in own else value for name, value in tokens.fields.items()},
        teacher=teacher,
        scale=None if scale is None else packing.pack(scale),
    )
