"""The tokens of a call: targets [tokens] and fields [tokens, ...], in the order in which hidden states run."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..arithmetic.demand import Structure
from ..core.checks import INFINITY, MAX_ROUNDED_LOGPROB, check_logprobs
from ..core.records import ColumnSets
from ..losses.base import KEPT_FIELDS, TEACHER_FIELDS, Field
from ..losses.batch import Batch
from ..losses.distillation import MAX_PADDING_LOGPROB, check_teacher, counted_entries
from ..parallel.merge import interleaved
from ..parallel.shard import Shard
from ..parallel.tokens import RankSums
from ..plan.segments import Group, groups_of
from ..plan.sizes import slices
from ..stores.operands import TeacherHead
from ..stores.torch_functions import shift_left
from .fields import SEGMENT_ID_FIELDS, TEMPERATURE, make_teacher
from .options import Call
from .spec import Spec, structure_at

# fields of log-probabilities, whose size is checked
LOGPROBS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")


@dataclass(frozen=True, eq=False)
class Packing:
    """An order of a call's rows. Either rows that count come first, in the caller's order, and other rows may be left
    out; or whole segments stand in the order in which chunks take them.

    Chunks gather hidden states by ``order``; the gradient of hidden states is put back into the caller's order at the
    end of a pass. Matmuls run over all rows of ``order``, or over the first ``count`` rows, a number that only the
    device knows."""

    order: Tensor  # [packed] int64: index of each row in the call's tensors; packed <= tokens rows run
    count: Tensor | None  # [] int64: number of rows that count, the first ones; None: all of ``order`` do
    tokens: int  # number of tokens of the call, packed or not

    @classmethod
    def by_target(cls, targets: Tensor, wait: bool) -> "Packing":
        """A packing with rows that count before all others. ``targets`` [tokens], -1 where a token does not count.
        ``wait``: the host waits for the number of rows that count, and ``order`` leaves out all other rows."""
        is_ignored, count = targets < 0, (targets >= 0).sum()
        order = torch.sort(is_ignored.to(torch.uint8), stable=True).indices
        return cls(order[: int(count)], None, len(targets)) if wait else cls(order, count, len(targets))

    def pack(self, values: Tensor) -> Tensor:
        """Returns ``values[order]``, [packed, ...], of ``values`` [tokens, ...]."""
        return values.index_select(0, self.order)

    def places(self, rows: Tensor) -> Tensor:
        """For each element of ``rows``, an index of the call's rows: its position in ``order``; -1 if ``order`` lacks
        it, or if the element is -1."""
        positions = torch.full((self.tokens + 1,), -1, dtype=torch.int64, device=rows.device)
        positions[self.order] = torch.arange(len(self.order), device=rows.device)
        return positions[rows]  # -1 reads the last element, which is -1

    def unpack(self, values: Tensor) -> Tensor:
        """Puts ``values`` [packed, ...] into the caller's order: returns [tokens, ...], 0 elsewhere; differentiable."""
        zeros = values.new_zeros(self.tokens, *values.shape[1:])
        return zeros.index_copy(0, self.order, values)


class RangeChecks(list[Tensor]):
    """Checks of the values in tensors of ids and temperatures, as a list of flags [] bool, one for each check.

    On the CPU a wrong value raises. Elsewhere a flag is true after a wrong value, and ``mark`` turns numbers that all
    results are multiplied by into nan.
    """

    def in_range(self, name: str, ids: Tensor, id_count: int, missing_id: int | None) -> Tensor:
        """Returns ``ids`` with -1 for wrong ids. An id outside of [0, id_count) is wrong, unless it equals
        ``missing_id`` (None: no exception). A wrong id raises IndexError on the CPU and sets a flag elsewhere."""
        is_out_of_range = (ids < 0) | (ids >= id_count)
        if missing_id is not None:
            is_out_of_range &= ids != missing_id
        if reading_is_free(ids) and is_out_of_range.any():
            or_missing_text = "" if missing_id is None else f" or {missing_id} for none"
            raise IndexError(
                f"batch[{name!r}] must be in [0, {id_count}){or_missing_text}, got {int(ids[is_out_of_range][0])}"
            )
        self.append(is_out_of_range.any())
        return torch.where(is_out_of_range, -1, ids)

    def scale_of(self, temperature: Tensor, ignored: Tensor) -> Tensor:
        """``1 / temperature`` [tokens], 1 where ``ignored`` [tokens] bool is true. A temperature that is not positive
        and finite raises ValueError on the CPU and sets a flag elsewhere."""
        is_wrong = ~ignored & ~((temperature > 0) & (temperature < torch.inf))
        if reading_is_free(is_wrong) and is_wrong.any():
            raise ValueError(
                f"temperature must be positive and finite, got {float(temperature[is_wrong][0]):g} for a token; mask "
                "it, or give 1"
            )
        self.append(is_wrong.any())
        return torch.where(ignored, 1.0, 1.0 / temperature)

    def mark(self, *numbers: Tensor) -> None:
        """Fills ``numbers`` with nan where a check has found a wrong value."""
        for is_wrong in self:
            for number in numbers:
                number.masked_fill_(is_wrong, torch.nan)


@dataclass(eq=False)
class Tokens:
    """A checked call with its targets and fields, which have a row for each row of hidden states. In rows of tokens
    that do not count, numbers are 0 and ids -1."""

    call: Call[Any]
    spec: Spec
    structure: Structure
    targets: Tensor  # [tokens] int64, -1 where a token does not count
    counted: Tensor  # [] number of tokens that count, as a float; with ``rank_sums``, of all ranks together
    one_or_nan: Tensor  # [] 1; nan if an id or a temperature is out of range (on the CPU that raises)
    inverse: Tensor  # [] one_or_nan / counted, or one_or_nan where no token counts
    fields: dict[str, Tensor] = field(default_factory=dict)  # by name
    token_fields: frozenset[str] = frozenset()  # names of ``fields`` with a row for each token: 0 (ids -1) if ignored
    teacher: TeacherHead | None = None
    scale: Tensor | None = None  # [tokens] factor of a token's logits, 1 / temperature
    column_sets: ColumnSets | None = (
        None  # the sets of columns that softmaxes are over; None: all are over the vocabulary
    )
    packing: Packing | None = None
    groups: tuple[Group, ...] | None = None  # rows whose gradients wait for each other's statistics only; None: unknown
    rank_sums: RankSums | None = None  # where ranks hold different tokens

    @functools.cached_property
    def batch(self) -> Batch:
        """The call's fields on this rank, not cut into chunks."""
        return Batch(self.fields, self.targets, self.call.num_segments, self.call.vocab, self.rank_sums)


def tokens_of(call: Call[Any], spec: Spec) -> Tokens:
    """Makes the tokens of a call, the call's first work on tensors. Checks the contents of tensors of ids."""
    batch, structure = call.batch or {}, spec.structure
    if structure is None:
        structure = structure_of_call(call, spec)
    tensors_by_name = {"weight": call.weight, "bias": call.bias, "target": call.target}
    tensors_by_name |= {name: batch[name] for name in spec.field_names}
    for name, tensor in {"logits" if call.weight is None else "hidden": call.rows, **tensors_by_name}.items():
        if tensor is not None and tensor.is_neg():
            raise ValueError(
                f"{name} is negated lazily, as z.conj().imag is, and kernels read memory; pass {name}.resolve_neg()"
            )
    target, token_shape = call.target, call.token_shape
    if call.shard is not None and call.sequence_sharded:
        target, batch, token_shape = of_all_ranks(call.shard, call, spec, batch)
    tokens = read_tokens(call, spec, structure, target, batch, token_shape)
    fields, tokens.scale = tokens.fields, tokens.fields.pop(TEMPERATURE, None)
    if fields:
        pairing, field_kinds = structure.pairing, spec.field_kinds
        if structure.teacher is not None and pairing is not None:
            column_count = pairing.columns if call.shard is None else call.local_width
            autocast_dtype = spec.dtype if spec.autocast else None
            tokens.teacher = make_teacher(fields, structure.teacher, column_count, autocast_dtype)
            fields = {name: value for name, value in fields.items() if name not in TEACHER_FIELDS[:3]}
        # ``teacher_entries`` has a row for each token, but no kind: ``read_tokens`` adds it
        token_field_names = [
            name for name in fields if name not in field_kinds or field_kinds[name].kind in ("token", "row")
        ]
        tokens.fields, tokens.token_fields = fields, frozenset(token_field_names)
    if "kept_ids" in spec.field_names and len(tokens.targets):
        tokens = replace(tokens, column_sets=sets_of(tokens, batch, token_shape, call.kept_everywhere))
    if call.weight is not None and call.skip_ignored:
        # on the CPU there is no device to wait for
        host_waits = call.skip_ignored == "wait" or (
            reading_is_free(tokens.targets) and not spec.backend.stops_at_device_count
        )
        return packed(tokens, Packing.by_target(tokens.targets, host_waits))
    if not (spec.can_end_with_segments and call.segments is not None and len(tokens.targets)):
        return tokens
    return replace(tokens, groups=groups_of(*call.segments, token_shape[-1] if token_shape else 1, call.shift))


def structure_of_call(call: Call[Any], spec: Spec) -> Structure:
    """The structure of a call with a user's function; a Spec keeps no such structure. If the call has a target, all
    losses and metrics count as readers of the target, since a user's function may read it in some calls only."""
    structure, _ = structure_at(call, spec.field_names, spec.columns, spec.teacher_vocab)
    if call.target is None:
        return structure
    measures_by_field: dict[str, Any] = {
        name: tuple([(replace(measure, reads_target=True), view) for measure, view in getattr(structure, name)])
        for name in ("summands", "metrics", "segment_metrics")
    }
    return replace(structure, **measures_by_field)


def read_tokens(
    call: Call[Any],
    spec: Spec,
    structure: Structure,
    target: Tensor | None,
    batch: Mapping[str, Tensor],
    token_shape: tuple[int, ...],
) -> Tokens:
    """Makes the tokens of a call from the caller's ``target`` and ``batch``. Moves targets and fields by ``shift``, to
    the rows of hidden states that predict them. Fields are 0, and ids -1, where a token does not count. ``token_shape``
    is that of the target. A wrong value raises on the CPU; elsewhere it makes ``one_or_nan`` and ``inverse`` nan."""
    dtype, field_kinds, shift, ignore_index = spec.statistics_dtype, spec.field_kinds, call.shift, call.ignore_index
    if target is None:
        # every token counts, with id 0; -1 takes the place of the caller's ignore_index, which may be 0
        ignore_index = -1
        target = torch.zeros(token_shape, dtype=torch.int64, device=call.device)
    on_cpu, mask = reading_is_free(target), batch["mask"] if "mask" in spec.field_names else None
    read_targets = spec.backend.read_targets
    targets, counted, one_or_nan, inverse = read_targets(target, mask, shift, ignore_index, call.vocab, dtype)
    tokens = Tokens(call, spec, structure, targets, counted, one_or_nan, inverse)
    if on_cpu and tokens.one_or_nan.isnan():
        refuse_target(call, target, mask, ignore_index)
    checks, fields = RangeChecks(), tokens.fields
    names = [name for name in spec.field_names if name != "mask" and name not in KEPT_FIELDS]
    number_fields = [name for name in names if field_kinds[name] == Field("token") and name != TEMPERATURE]
    if number_fields:
        # one launch; on the CPU ``check_logprobs`` raises where log-probabilities are too large
        most_sizes = [INFINITY if on_cpu or name not in LOGPROBS else MAX_ROUNDED_LOGPROB for name in number_fields]
        number_values = spec.backend.read_fields(
            [batch[name] for name in number_fields], targets, shift, dtype, most_sizes
        )
        fields.update(zip(number_fields, number_values, strict=True))
    for name in LOGPROBS:
        if name in fields and on_cpu:
            check_logprobs(f"batch[{name!r}]", fields[name])
    other_names = [name for name in names if name not in number_fields]
    is_ignored = targets < 0 if other_names else targets
    for name in other_names:
        value, field_kind = batch[name], field_kinds[name]
        if field_kind.kind in ("token", "row"):
            value = rows_of_field(call, spec, name, value, is_ignored, token_shape, checks)
        elif name == "pairs":
            value = checks.in_range(name, value.to(torch.int64), call.num_segments or 0, None)
        elif name not in TEACHER_FIELDS:
            # a copy: the caller may change it before backward reads it
            value = value.to(dtype if field_kind.type == "float" else value.dtype, copy=True)
        fields[name] = value
    if "teacher_ids" in fields:
        fields.update(columns_of_teacher(fields, targets, call.vocab, checks))
        if on_cpu and "teacher_entries" in fields:
            loss_options = [summand.options for _, summand in call.losses.terms if summand.kind == "topk_kl"]
            is_normalized = not all(o["teacher_renormalize"] for o in loss_options)
            entries_of_teacher = fields["teacher_logprobs"], fields["teacher_entries"]
            check_teacher("batch['teacher_logprobs']", *entries_of_teacher, is_normalized)
    if checks:
        checks.mark(tokens.one_or_nan, tokens.inverse)
    return tokens


def rows_of_field(
    call: Call[Any],
    spec: Spec,
    name: str,
    value: Tensor,
    is_ignored: Tensor,
    token_shape: tuple[int, ...],
    checks: RangeChecks,
) -> Tensor:
    """Returns a field [tokens, ...] in the order of hidden states. Where ``is_ignored`` [tokens] bool is true, numbers
    are 0 and ids -1."""
    kind, leading_dims = spec.field_kinds[name], len(token_shape)
    if kind.kind == "token" and leading_dims:
        value = shift_left(value, call.shift, -1 if kind.type == "int" else 0, leading_dims - 1)
    value = value.reshape(-1, *value.shape[leading_dims:])
    if name in ("teacher_logits", "teacher_hidden"):
        if value.stride(1) != 1 and value.shape[1] != 1:
            raise ValueError(f"batch[{name!r}] must be contiguous along its last dimension; pass .contiguous()")
        return value
    is_ignored = is_ignored.reshape(-1, *[1] * (value.dim() - 1))
    if kind.type == "bool":
        return value & ~is_ignored
    if kind.type == "int":
        value = value.to(torch.int64).masked_fill(is_ignored, -1)
        return checks.in_range(name, value, call.num_segments or 0, -1) if name in SEGMENT_ID_FIELDS else value
    value = value.to(spec.statistics_dtype).masked_fill(is_ignored, 0.0)
    return value if name != TEMPERATURE else checks.scale_of(value, is_ignored)


def columns_of_teacher(
    fields: Mapping[str, Tensor], targets: Tensor, vocab: int, checks: RangeChecks
) -> dict[str, Tensor]:
    """Returns two fields by name: ``teacher_ids`` [tokens, K], -1 for padding, masked ids and tokens that do not count;
    and, only if the batch has a teacher's log-probabilities, ``teacher_entries`` [tokens, K] bool: true for the other
    ids, but for repeats of an id in a row (``counted_entries``)."""
    ids, logprobs = fields["teacher_ids"], fields.get("teacher_logprobs")
    is_valid = (targets >= 0)[:, None]
    if logprobs is not None:
        is_valid = is_valid & ~(logprobs <= MAX_PADDING_LOGPROB)  # an entry of nan counts, and shows in the loss
    if "teacher_mask" in fields:
        is_valid = is_valid & fields["teacher_mask"]
    ids = checks.in_range("teacher_ids", torch.where(is_valid, ids, -1), vocab, -1).contiguous()
    if logprobs is None:
        return {"teacher_ids": ids}
    # computed once for all losses: every entry is compared with every other
    row_blocks = slices(len(ids), max(1, (1 << 24) // max(1, ids.shape[1] ** 2)))
    entries_of_blocks = [counted_entries(logprobs[block], ids[block], ids[block] >= 0) for block in row_blocks]
    return {"teacher_ids": ids, "teacher_entries": torch.cat(entries_of_blocks) if entries_of_blocks else ids >= 0}


def refuse_target(call: Call[Any], target: Tensor, mask: Tensor | None, ignore_index: int) -> NoReturn:
    """Raises IndexError for the first target out of range."""
    shift, vocab = call.shift, call.vocab
    targets = shift_left(target, shift, ignore_index).reshape(-1)
    is_wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
    if mask is not None:
        is_wrong &= shift_left(mask, shift, 0).reshape(-1)
    row = int(is_wrong.nonzero()[0])
    remedy = ""
    if call.shard is None and targets[row] >= vocab:
        remedy = "; if ranks share the vocabulary, pass parallel=VocabParallel(group)"
        remedy += ", or these are hidden states: pass them to linear_loss" if call.weight is None else ""
    raise IndexError(
        f"target must be in [0, {vocab}) (the vocabulary) or ignore_index ({ignore_index}), got "
        f"{int(targets[row])} for row {row}, leading dimensions flattened; mask it with ignore_index{remedy}"
    )


def reading_is_free(tensor: Tensor) -> bool:
    """True for a tensor on the CPU, whose values the host reads without waiting for a device."""
    return tensor.device.type == "cpu"


def of_all_ranks(
    shard: Shard, call: Call[Any], spec: Spec, batch: Mapping[str, Tensor]
) -> tuple[Tensor | None, Mapping[str, Tensor], tuple[int, ...]]:
    """Gathers targets and fields from ranks that hold different tokens. Returns the targets of all ranks' tokens, the
    fields by name, and the leading shape of targets and fields, (number of all ranks' tokens,)."""
    leading_dims, token_count = len(call.token_shape), math.prod(call.token_shape)
    token_field_names = [name for name in spec.field_names if spec.field_kinds[name].kind in ("token", "row")]
    local_tensors = {name: batch[name].flatten(0, leading_dims - 1) for name in token_field_names}
    if call.target is not None:
        local_tensors["target"] = call.target.reshape(-1)
    fields = {"tokens": str(token_count), "batch": str(sorted(local_tensors))}
    fields |= {f"batch[{name!r}]": f"{list(value.shape[1:])} {value.dtype}" for name, value in local_tensors.items()}
    shard.agreed_on(fields, call.device)
    gathered_tensors = {name: interleaved(value, shard.group) for name, value in local_tensors.items()}
    return gathered_tensors.pop("target", None), {**batch, **gathered_tensors}, (token_count * shard.parallel.ranks,)


def in_order(tokens: Tokens, groups: Sequence[Group]) -> Tokens:
    """The tokens in the order of ``groups``; the same object if they are in this order already."""
    ranges = [rows for group in groups for rows in group]
    if all(rows.start < following.start for rows, following in itertools.pairwise(ranges)):
        return tokens
    order = torch.cat([torch.arange(rows.start, rows.stop, device="cpu") for rows in ranges])
    return packed(tokens, Packing(order.to(tokens.call.device, non_blocking=True), None, len(order)))


def sets_of(tokens: Tokens, batch: Mapping[str, Tensor], token_shape: tuple[int, ...], everywhere: bool) -> ColumnSets:
    """Sets of columns from the batch's ``kept_ids`` and ``kept_offsets``. Wrong ids or offsets raise on the CPU and
    make all results nan elsewhere. ``everywhere``: the user promises that every token that counts has a set."""
    targets, vocab = tokens.targets, tokens.call.vocab
    ids, offsets, set_bias = batch["kept_ids"].reshape(-1).contiguous(), batch.get("kept_offsets"), None
    if "candidate_bias" in batch:
        flat_bias = batch["candidate_bias"].reshape(-1).to(tokens.spec.statistics_dtype)
        set_bias = (flat_bias / tokens.structure.temperature).contiguous()
    set_begins, set_ends = targets.new_empty(2, len(targets)).unbind()
    set_rows = targets.new_empty(len(ids) + len(targets))
    set_columns = torch.empty_like(set_rows, dtype=torch.int32)
    bias = None if set_bias is None else set_bias.new_zeros(len(set_rows))
    column_sets = ColumnSets(set_begins, set_ends, set_rows, set_columns, everywhere, bias)
    sequence_length = token_shape[-1] if token_shape else 1
    set_offsets = None if offsets is None else offsets.contiguous()
    outputs = set_begins, set_ends, set_rows, set_columns, column_sets.bias, tokens.one_or_nan, tokens.inverse
    tokens.spec.backend.kept_sets(
        *outputs, targets, ids, set_offsets, set_bias, sequence_length, tokens.call.shift, vocab, everywhere
    )
    if not reading_is_free(targets):
        return column_sets
    missing_count = int(((targets >= 0) & ~column_sets.has_set).sum())
    if tokens.one_or_nan.isnan():
        if offsets is not None and (offsets[0] != 0 or offsets[-1] != len(ids) or (offsets[1:] < offsets[:-1]).any()):
            raise ValueError(
                f"batch['kept_offsets'] must rise from 0 to {len(ids)}, the number of kept_ids, got {offsets.tolist()}"
            )
        if missing_count and everywhere:
            raise ValueError(
                f"kept_everywhere=True, or candidates, and {missing_count} tokens that count keep none; give them ids"
            )
        RangeChecks().in_range("kept_ids", ids, vocab, -1)
    return replace(column_sets, everywhere=everywhere or not missing_count)


def packed(tokens: Tokens, packing: Packing) -> Tokens:
    """The tokens with targets and fields in the order of ``packing``. Hidden states of student and teacher stay in the
    caller's order."""
    teacher, column_sets, scale, token_fields = tokens.teacher, tokens.column_sets, tokens.scale, tokens.token_fields
    if teacher is not None and teacher.logits is not None:
        if packing.count is not None:
            raise ValueError(
                "skip_ignored=True cannot move rows of batch['teacher_logits']; give teacher_hidden, or use 'wait'"
            )
        teacher = teacher.rows(packing.order)
    if column_sets is not None:
        set_begins, set_ends = packing.pack(column_sets.begins), packing.pack(column_sets.ends)
        column_sets = replace(column_sets, begins=set_begins, ends=set_ends, rows=packing.places(column_sets.rows))
    return replace(
        tokens,
        targets=packing.pack(tokens.targets),
        column_sets=column_sets,
        packing=packing,
        fields={name: packing.pack(value) if name in token_fields else value for name, value in tokens.fields.items()},
        teacher=teacher,
        scale=None if scale is None else packing.pack(scale),
    )
