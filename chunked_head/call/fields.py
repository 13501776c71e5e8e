"""The fields of a call's batch, a dense teacher's included: which ones losses and metrics read, and their checks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_device, check_shape, check_tensor, nearest, refuse
from ..core.checks import name as name_of
from ..losses.base import FIELDS, KEPT_FIELDS, TEACHER_FIELDS, Field, Summand, Teacher
from ..metrics import Metric
from ..stores.operands import TeacherHead
from .options import Call

TEMPERATURE = "temperature of each token"  # name of the field that an argument of the call becomes
SEGMENTS_REMEDY = "; pass it with num_segments, or the lengths of all segments to linear_loss as segment_lengths"
SEGMENT_ID_FIELDS = ("segments", "documents")  # names of the fields that have a segment's id for each token
TAKE_BATCH = ("linear_loss", "logits_loss")  # names of the functions that take fields as the mapping ``batch``
# by field: the field whose shape it must have
SHAPED_AS = {"candidate_bias": "kept_ids", "teacher_logprobs": "teacher_ids", "teacher_mask": "teacher_ids"}
FIELDS_OF_UNIT = {
    "token": (),
    "segment": ("segments",),
    "pair": ("segments", "pairs"),
}  # fields that a loss or metric with one value per token, segment or pair needs
MOST_PADDING = 1023  # ids; a vocabulary is padded to a multiple of 1024 at most
NAMING = {"token_weights": Field("token"), "normalizer": Field("constant")}  # by option that may name a field: its kind
# by the type of a field: its name in errors, and a test of a tensor
TYPES: dict[str, tuple[str, Callable[[Tensor], bool]]] = {
    "float": ("floating-point", Tensor.is_floating_point),
    "int": ("int64 or int32", lambda value: value.dtype in (torch.int64, torch.int32)),
    "bool": ("bool", lambda value: value.dtype == torch.bool),
}


def kinds_of(measures: Iterable[Summand | Metric]) -> dict[str, Field]:
    """Returns a ``Field`` for each name of a field: those of the library's ``FIELDS``, and those that ``measures``
    declare. ValueError if two measures declare one name with different kinds."""
    field_kinds = dict(FIELDS)
    for measure in measures:
        for field, kind in measure.extra_fields.items():
            if field_kinds.get(field, kind) != kind:
                raise ValueError(
                    f"batch[{field!r}] is declared as {kind} by {measure.label}, elsewhere as {field_kinds[field]}; "
                    "declare it alike, or under another name"
                )
            field_kinds[field] = kind
        for field, kind in fields_named_by(measure).items():
            field_kinds.setdefault(field, kind)
    return field_kinds


def fields_named_by(measure: Summand | Metric) -> dict[str, Field]:
    """Returns a ``Field`` for each name that stands in ``token_weights`` or ``normalizer`` in place of a tensor."""
    kind_by_name = {getattr(measure, option, None): kind for option, kind in NAMING.items()}
    return {name: kind for name, kind in kind_by_name.items() if isinstance(name, str)}


def fields_to_read(call: Call[Any]) -> tuple[list[str], dict[str, Field]]:
    """Returns the names of the fields that losses and metrics read, and the ``Field`` of each name that the library, a
    loss or a metric defines. ValueError for a missing or unknown field. A user's function reads the fields that it
    declares, and all others of the batch but a dense teacher's and, without ``num_segments``, those of segments."""
    batch, summands = call.batch or {}, [summand for _, summand in call.losses.terms]
    roles_and_measures = [("loss", s) for s in summands] + [("metric", m) for m in call.metrics]
    field_kinds = kinds_of(measure for _, measure in roles_and_measures)
    if unknown := sorted(set(batch) - set(field_kinds) - {TEMPERATURE}, key=str):
        raise ValueError(
            f"batch has a field {unknown[0]!r} that neither the library nor a loss declares"
            f"{nearest(unknown[0], field_kinds)}; known are {', '.join(sorted(field_kinds))}; drop it, or declare it "
            "by fields= of losses.custom or metrics.Metric"
        )
    field_kinds[TEMPERATURE] = Field("token")
    segment_fields = {field for field, kind in field_kinds.items() if kind.kind in ("segment", "pair")}
    segment_fields.update(SEGMENT_ID_FIELDS)
    field_names = [field for field in ("mask", "token_weights", TEMPERATURE, *KEPT_FIELDS) if field in batch]
    for role, measure in roles_and_measures:
        read_fields = [*measure.fields, *fields_named_by(measure)]
        for field in (*read_fields, *FIELDS_OF_UNIT[measure.unit]):
            if field not in batch:
                reason = "needs" if field in read_fields else f"has values per {measure.unit} and needs"
                remedy = SEGMENTS_REMEDY if field == "segments" else "; add it to batch"
                raise ValueError(f"{role} {measure.label} {reason} batch[{field!r}], which is missing{remedy}")
        field_names += [
            *read_fields,
            *FIELDS_OF_UNIT[measure.unit],
            *(field for field in measure.optional_fields if field in batch),
        ]
        for option, right_kind in NAMING.items():
            named_field = getattr(measure, option, None)
            if isinstance(named_field, str) and (
                named_field == "mask" or field_kinds[named_field]._replace(type=right_kind.type) != right_kind
            ):
                remedy = (
                    "the mask applies by itself"
                    if named_field == "mask"
                    else f"not one of kind {field_kinds[named_field].kind!r}"
                )
                raise ValueError(
                    f"{option}={named_field!r} of {measure.label} must name a {right_kind.kind} field; {remedy}"
                )
        if isinstance(measure, Summand) and measure.teacher is not None:
            has_logits, head_fields = (
                "teacher_logits" in batch,
                [field for field in TEACHER_FIELDS[1:] if field in batch],
            )
            refuse({
                f"batch has teacher_logits and {', '.join(head_fields[:1])}; loss {measure.label} takes one: drop the "
                "other":
                    has_logits and head_fields,
                f"loss {measure.label} needs batch['teacher_logits'], or teacher_hidden with teacher_weight":
                    not (has_logits or {"teacher_hidden", "teacher_weight"}.issubset(batch)),
            })  # fmt: skip
        if not measure.is_builtin:
            withheld_names = {*TEACHER_FIELDS, *(segment_fields if call.num_segments is None else ())}
            field_names += [field for field in batch if field not in withheld_names]
    return list(dict.fromkeys(field_names)), field_kinds


def check_fields(call: Call[Any], names: Sequence[str], field_kinds: Mapping[str, Field]) -> None:
    """Raises for a field of a wrong type or shape, then for fields whose shapes do not fit each other."""
    batch: Any = call.batch or {}
    for field in names:
        check_field(call, field, field_kinds[field])
    if unpaired := [field for field in KEPT_FIELDS if field in names and "kept_ids" not in names]:
        raise ValueError(f"batch[{unpaired[0]!r}] goes with batch['kept_ids'], which is missing; add these, or drop it")
    if "kept_offsets" in names:
        kept_ids, kept_offsets, offset_count = batch["kept_ids"], batch["kept_offsets"], math.prod(call.token_shape) + 1
        check_shape("batch['kept_ids']", kept_ids, kept_ids.dim() == 1, "[n] beside kept_offsets", "")
        has_right_shape = tuple(kept_offsets.shape) == (offset_count,)
        check_shape(
            "batch['kept_offsets']",
            kept_offsets,
            has_right_shape,
            f"({offset_count},), one more than there are tokens",
            "",
        )
        if kept_offsets.dtype != torch.int64:
            raise TypeError(f"batch['kept_offsets'] must be int64, got {name_of(kept_offsets.dtype)}; cast it")
    elif "kept_ids" in names:
        kept_ids = batch["kept_ids"]
        has_right_shape = kept_ids.dim() > 0 and tuple(kept_ids.shape[:-1]) == call.token_shape
        expected_text = f"{call.token_shape}, the target's, and one more dimension, -1 for no id, without kept_offsets"
        check_shape("batch['kept_ids']", kept_ids, has_right_shape, expected_text, "")
    for field, partner_field in SHAPED_AS.items():
        if field in names and partner_field in names:
            shape = batch[partner_field].shape
            has_right_shape, expected_text = batch[field].shape == shape, f"{tuple(shape)}, that of {partner_field}"
            check_shape(f"batch[{field!r}]", batch[field], has_right_shape, expected_text, "")


def check_field(call: Call[Any], field: str, kind: Field) -> None:
    """Raises for a field of a wrong type, device, dtype or shape."""
    batch: Any = call.batch
    argument, value, token_shape, num_segments = f"batch[{field!r}]", batch[field], call.token_shape, call.num_segments
    if field == TEMPERATURE or (field in ("mask", "token_weights") and call.function not in TAKE_BATCH):
        argument = field.partition(" ")[0]  # the user's name of the argument
    check_tensor(argument, value, optional=False)
    check_device(argument, value, call.device, "the target's rows")
    if value.requires_grad:
        raise ValueError(f"{argument} takes no gradient here; pass it .detach()ed")
    type_words, has_right_type = TYPES[kind.type]
    if not has_right_type(value):
        raise TypeError(f"{argument} must be {type_words}, got {name_of(value.dtype)}; cast it")
    if num_segments is None and (kind.kind == "segment" or field in SEGMENT_ID_FIELDS):
        raise ValueError(f"{argument} needs num_segments, the number of segments of the call, an int")
    if field in KEPT_FIELDS:
        return
    shape, pairs = tuple(value.shape), batch.get("pairs")
    expected_shape, description = {
        "token": (token_shape, "that of the target"),
        "row": (token_shape, "that of the target"),
        "segment": ((num_segments,), "one per segment"),
        "pair": (tuple((pairs if isinstance(pairs, Tensor) else value).shape[:1]), "one per pair"),
    }.get(kind.kind, ((), "a constant"))
    has_right_dims = len(shape) == len(expected_shape) + kind.trailing
    has_right_shape = has_right_dims and shape[: len(expected_shape)] == expected_shape
    if field == "kl_baseline":
        has_right_shape, description = (
            shape in ((), (1,), (num_segments,)),
            f"(1,) or ({num_segments},), one per segment",
        )
    elif field == "pairs":
        has_right_shape, description = (
            has_right_shape and shape[1] == 2,
            "segment ids of chosen and rejected, [pairs, 2]",
        )
    shape_text = ", ".join([*map(str, expected_shape), *["..."] * kind.trailing])
    check_shape(
        argument, value, has_right_shape, f"({shape_text}), {description}", "nothing is broadcast: expand or reshape it"
    )
    if kind.kind in ("token", "row") and 0 in shape[len(token_shape) :]:
        raise ValueError(f"{argument} must not be empty along its last dimension, got {shape}")


def check_dense_teacher(call: Call[Any], names: Sequence[str], dtype: torch.dtype, autocast: bool) -> int | None:
    """Checks a dense teacher's operands, and that ranks split both vocabularies alike. Returns the number of ids
    in the teacher's vocabulary; None without a dense teacher."""
    batch: Any = call.batch
    if "teacher_logits" in names:
        id_count = batch["teacher_logits"].shape[-1]
    elif "teacher_hidden" not in names:
        return None
    else:
        hidden, weight, bias = batch["teacher_hidden"], batch["teacher_weight"], batch.get("teacher_bias")
        id_count = weight.shape[0]
        has_right_shape = weight.dim() == 2 and hidden.shape[-1] == weight.shape[1] and 0 not in weight.shape
        expected_text = f"[vocabulary, {hidden.shape[-1]}], the width of teacher_hidden"
        check_shape("batch['teacher_weight']", weight, has_right_shape, expected_text, "")
        for name, tensor in (("teacher_weight", weight), ("teacher_bias", bias)):
            if tensor is not None and tensor.dtype != hidden.dtype and not autocast:
                raise TypeError(
                    f"batch[{name!r}] must have the dtype of teacher_hidden, {hidden.dtype}, got {tensor.dtype}; cast "
                    f"one of them or run under torch.autocast({hidden.device.type!r})"
                )
        if bias is not None:
            check_shape("batch['teacher_bias']", bias, tuple(bias.shape) == (id_count,), f"({id_count},)", "")
        if (hidden.dtype == torch.float64) != (dtype == torch.float64):
            raise TypeError(
                f"batch['teacher_hidden'] is {hidden.dtype}, the student's matmuls are in {dtype}; cast one"
            )
    if call.shard is None:
        check_vocabularies(call, id_count)
        return id_count
    refuse({
        "sequence_sharded=True takes no batch['teacher_logits']; give teacher_hidden and teacher_weight":
            call.sequence_sharded and "teacher_logits" in batch,
        f"the teacher has {id_count} rows on this rank, the student {call.local_vocab}; split both vocabularies alike":
            id_count != call.local_vocab,
    })  # fmt: skip
    return call.vocab


def check_vocabularies(call: Call[Any], id_count: int) -> None:
    """Raises ValueError if a teacher's number of ids is off by more than padding; with ``vocab_size``, more is fine."""
    surplus_ids, has_vocab_size = id_count - call.vocab, call.vocab_size is not None
    if abs(surplus_ids) > MOST_PADDING and not (has_vocab_size and surplus_ids > 0):
        raise ValueError(
            f"the teacher must have the student's vocabulary of {call.vocab} ids, up to {MOST_PADDING} of padding, got "
            f"one of {id_count}; ids of another tokenizer mean other tokens. If the first {min(id_count, call.vocab)} "
            f"ids are the same in both, pass vocab_size={min(id_count, call.vocab)}"
        )


def make_teacher(
    fields: Mapping[str, Tensor], options: Teacher, column_count: int, dtype: torch.dtype | None
) -> TeacherHead:
    """The dense teacher, with weight and bias cut to the first ``column_count`` ids, the ids that the student has too.
    ``dtype``: dtype of the teacher's matmul under autocast, else None."""
    temperature = 1.0 if options.temperature is None else options.temperature
    weight, bias = fields.get("teacher_weight"), fields.get("teacher_bias")
    return TeacherHead(
        fields.get("teacher_logits"),
        fields.get("teacher_hidden"),
        None if weight is None else weight[:column_count].detach(),
        None if bias is None else bias[:column_count].detach().contiguous(),  # kernels read no strides of a bias
        options.logit_scale / temperature,
        None if options.softcap is None else options.softcap / temperature,
        options.temperature is None,
        dtype,
    )
