"""Fields of a call's batch: which of them losses and metrics read, and checks of each, a dense teacher's too."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ..core.checks import check_device, check_shape, check_tensor, nearest, refuse
from ..core.checks import name as name_of
from ..losses.base import FIELDS, KEPT_FIELDS, TEACHER_FIELDS, Field, Losses, Summand, Teacher
from ..metrics import Metric
from ..stores.operands import TeacherHead

TEMPERATURE = "temperature of each token"  # an argument of the call, brought into the order of rows as fields are
SEGMENTS = "; pass it with num_segments, or the lengths of all segments to linear_loss as segment_lengths"
# what to do with fields that other libraries have
INSTEAD = {
    "teacher_offsets": "; a top-K teacher has K ids for every token: pad teacher_ids and teacher_logprobs to [..., K], "
    "log-probabilities with -inf"
}
SEGMENT_IDS = ("segments", "documents")
OF_UNIT = {"token": (), "segment": ("segments",), "pair": ("segments", "pairs")}  # fields that values per unit need
NAMING = {"token_weights": Field("token"), "normalizer": Field("constant")}  # options that may name a field
TYPES: dict[str, tuple[str, Callable[[Tensor], bool]]] = {
    "float": ("floating-point", Tensor.is_floating_point),
    "int": ("int64 or int32", lambda value: value.dtype in (torch.int64, torch.int32)),
    "bool": ("bool", lambda value: value.dtype == torch.bool),
}


def kinds_of(parts: Iterable[Summand | Metric]) -> dict[str, Field]:
    known = dict(FIELDS)
    for part in parts:
        for field, kind in part.extra_fields.items():
            if known.get(field, kind) != kind:
                raise ValueError(f"batch[{field!r}] is declared as {kind} by {part.label}, elsewhere as {known[field]}")
            known[field] = kind
        for field, kind in named_by(part).items():
            known.setdefault(field, kind)
    return known


def named_by(part: Summand | Metric) -> dict[str, Field]:
    """Fields that a loss names where it could hold a tensor, and so declares."""
    named = {getattr(part, option, None): kind for option, kind in NAMING.items()}
    return {name: kind for name, kind in named.items() if isinstance(name, str)}


def wanted_fields(
    losses: Losses,
    metrics: Iterable[Metric],
    batch: Mapping[str, Tensor],
    extra: Mapping[str, Field],
    num_segments: int | None,
) -> tuple[list[str], dict[str, Field]]:
    """Names of the fields that losses and metrics read, all of them in the batch, else a ValueError; and the kinds of
    all fields, with those of ``extra``, which losses bring along. A user's function may read any field, and is given
    all but a dense teacher's tensors and, without ``num_segments``, fields of segments: these it has to declare."""

    def of_segments(field: str) -> bool:
        return field in SEGMENT_IDS or known[field].kind in ("segment", "pair")

    summands, segments = [summand for _, summand in losses.terms], num_segments is not None
    parts = [("loss", s) for s in summands] + [("metric", m) for m in metrics]
    known = kinds_of(part for _, part in parts) | dict(extra)
    unknown = sorted(set(batch) - set(known), key=str)
    if unknown:
        known.pop(TEMPERATURE, None)
        meant = INSTEAD.get(unknown[0]) or nearest(unknown[0], known)
        raise ValueError(
            f"batch has a field {unknown[0]!r} that neither the library nor a loss declares{meant}; known are "
            f"{', '.join(sorted(known))}; drop it, or declare it by losses.custom(fields=...)"
        )
    wanted = [field for field in ("mask", "token_weights", TEMPERATURE, *KEPT_FIELDS) if field in batch]
    for what, part in parts:
        read = [*part.fields, *named_by(part)]
        for field in (*read, *OF_UNIT[part.unit]):
            if field not in batch:
                why = "needs" if field in read else f"has values per {part.unit} and needs"
                remedy = SEGMENTS if field == "segments" else ""
                raise ValueError(f"{what} {part.label} {why} batch[{field!r}], which is missing{remedy}")
        wanted += [*read, *OF_UNIT[part.unit], *(field for field in part.optional_fields if field in batch)]
        for option, right in NAMING.items():
            name = getattr(part, option, None)
            if isinstance(name, str) and (name == "mask" or known[name]._replace(type=right.type) != right):
                remedy = "the mask applies by itself" if name == "mask" else f"not one of kind {known[name].kind!r}"
                raise ValueError(f"{option}={name!r} of {part.label} must name a {right.kind} field; {remedy}")
        if isinstance(part, Summand) and part.teacher is not None:
            check_teacher(part, batch)
        if not part.builtin:
            wanted += [field for field in batch if field not in TEACHER_FIELDS and (segments or not of_segments(field))]
    return list(dict.fromkeys(wanted)), known


def check_fields(
    batch: Mapping[str, Tensor],
    wanted: list[str],
    known: Mapping[str, Field],
    leading: tuple[int, ...],
    device: torch.device,
    num_segments: int | None,
) -> None:
    """Raises what is wrong with each field, then with those that must agree."""
    for field in wanted:
        check_field(field, batch, known[field], leading, device, num_segments)
    if set(KEPT_FIELDS) & set(wanted):
        check_kept(batch, leading)
    ids = batch["teacher_ids"] if "teacher_ids" in wanted else None
    for field in ("teacher_logprobs", "teacher_mask"):
        if field in wanted and ids is not None:
            same = batch[field].shape == ids.shape
            check_shape(f"batch[{field!r}]", batch[field], same, f"{tuple(ids.shape)}, that of teacher_ids", "")


def check_field(
    field: str,
    batch: Mapping[str, Tensor],
    kind: Field,
    leading: tuple[int, ...],
    device: torch.device,
    num_segments: int | None,
) -> None:
    where, value = f"batch[{field!r}]", batch[field]
    check_tensor(where, value, optional=False)
    check_device(where, value, device, "the target's rows")
    if value.requires_grad:
        raise ValueError(f"{where} takes no gradient here; pass it .detach()ed")
    words, right_type = TYPES[kind.type]
    if not right_type(value):
        raise TypeError(f"{where} must be {words}, got {name_of(value.dtype)}; cast it")
    if num_segments is None and (kind.kind == "segment" or field in SEGMENT_IDS):
        raise ValueError(f"{where} needs num_segments, the number of segments of the call, an int")
    if field in KEPT_FIELDS:
        return
    shape, pairs = tuple(value.shape), batch.get("pairs")
    first, of = {
        "token": (leading, "that of the target"),
        "row": (leading, "that of the target"),
        "segment": ((num_segments,), "one per segment"),
        "pair": (tuple((pairs if isinstance(pairs, Tensor) else value).shape[:1]), "one per pair"),
    }.get(kind.kind, ((), "a constant"))
    right = len(shape) == len(first) + kind.trailing and shape[: len(first)] == first
    if field == "kl_baseline":
        right, of = shape in ((), (1,), (num_segments,)), f"(1,) or ({num_segments},), one per segment"
    elif field == "pairs":
        right, of = right and shape[1] == 2, "segment ids of chosen and rejected, [pairs, 2]"
    expected = ", ".join([*map(str, first), *["..."] * kind.trailing])
    check_shape(where, value, right, f"({expected}), {of}", "nothing is broadcast: expand or reshape it")
    if kind.kind in ("token", "row") and 0 in shape[len(leading) :]:
        raise ValueError(f"{where} must not be empty along its last dimension, got {shape}")


def check_kept(batch: Mapping[str, Tensor], leading: tuple[int, ...]) -> None:
    """The sets that tokens keep: ids [n] with offsets [tokens + 1], or ids [..., K]."""
    ids, offsets, bias = (batch.get(name) for name in KEPT_FIELDS)
    count = math.prod(leading) + 1
    if ids is None:
        first = "candidate_bias" if offsets is None else "kept_offsets"
        raise ValueError(f"batch[{first!r}] goes with batch['kept_ids'], which is missing")
    if offsets is None:
        right = ids.dim() == len(leading) + 1 and tuple(ids.shape[:-1]) == leading
        expected = f"{leading}, the target's, and one more dimension, -1 where there is no id, without kept_offsets"
        check_shape("batch['kept_ids']", ids, right, expected, "")
    else:
        check_shape("batch['kept_ids']", ids, ids.dim() == 1, "[n] beside kept_offsets", "")
        right = tuple(offsets.shape) == (count,)
        check_shape("batch['kept_offsets']", offsets, right, f"({count},), one more than there are tokens", "")
        if offsets.dtype != torch.int64:
            raise TypeError(f"batch['kept_offsets'] must be int64, got {name_of(offsets.dtype)}; cast it")
    if bias is not None:
        same = bias.shape == ids.shape
        check_shape("batch['candidate_bias']", bias, same, f"{tuple(ids.shape)}, that of kept_ids", "")


def check_teacher(summand: Summand, batch: Mapping[str, Tensor]) -> None:
    """Raises where there is not exactly one dense teacher."""
    logits, rest = "teacher_logits" in batch, [field for field in TEACHER_FIELDS[1:] if field in batch]
    refuse({
        f"batch has teacher_logits and {', '.join(rest[:1])}; loss {summand.label} takes one of them, teacher_logits "
        "or teacher_hidden with teacher_weight": logits and rest,
        f"loss {summand.label} needs batch['teacher_logits'], or batch['teacher_hidden'] with batch['teacher_weight']":
            not (logits or {"teacher_hidden", "teacher_weight"}.issubset(batch)),
    })  # fmt: skip


def check_dense_teacher(
    batch: Mapping[str, Tensor], wanted: list[str], dtype: torch.dtype, autocast: bool
) -> int | None:
    """Rows of the teacher's vocabulary, None without one; its two matmul operands must fit each other, in their dtypes
    too where autocast does not cast them."""
    if "teacher_logits" in wanted:
        return batch["teacher_logits"].shape[-1]
    if "teacher_hidden" not in wanted:
        return None
    hidden, weight, bias = batch["teacher_hidden"], batch["teacher_weight"], batch.get("teacher_bias")
    right = weight.dim() == 2 and hidden.shape[-1] == weight.shape[1] and 0 not in weight.shape
    expected = f"[vocabulary, {hidden.shape[-1]}], the width of teacher_hidden"
    check_shape("batch['teacher_weight']", weight, right, expected, "")
    for name, tensor in (("teacher_weight", weight), ("teacher_bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype and not autocast:
            raise TypeError(
                f"batch[{name!r}] must have the dtype of teacher_hidden, {hidden.dtype}, got {tensor.dtype}; cast one "
                f"of them or run under torch.autocast({hidden.device.type!r})"
            )
    if bias is not None:
        rows = (weight.shape[0],)
        check_shape("batch['teacher_bias']", bias, tuple(bias.shape) == rows, f"{rows}", "")
    if (hidden.dtype == torch.float64) != (dtype == torch.float64):
        raise TypeError(f"batch['teacher_hidden'] is {hidden.dtype}, the student's matmuls are in {dtype}")
    return weight.shape[0]


def make_teacher(
    fields: Mapping[str, Tensor], options: Teacher, columns: int, dtype: torch.dtype | None
) -> TeacherHead:
    """The teacher over the vocabulary that it shares with the student, its temperature in scale and cap, or that of
    each token; ``dtype``: of its matmul, where autocast gives one."""
    temperature = 1.0 if options.temperature is None else options.temperature
    weight, bias = fields.get("teacher_weight"), fields.get("teacher_bias")
    return TeacherHead(
        fields.get("teacher_logits"),
        fields.get("teacher_hidden"),
        None if weight is None else weight[:columns].detach(),
        None if bias is None else bias[:columns].detach().contiguous(),  # as kernels read it
        options.logit_scale / temperature,
        None if options.softcap is None else options.softcap / temperature,
        options.temperature is None,
        dtype,
    )
