"""The tensors that travel with tokens, checked."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.checks import check_device, is_dtensor
from ..core.options import name, nearest
from ..losses.base import FIELDS, KEPT_FIELDS, TEACHER_FIELDS, Field, Losses, Summand
from ..metrics import Metric
from .teachers import check_teacher

TEMPERATURE = "temperature of each token"  # an argument of the call, laid beside rows as fields are
SEGMENTS = "; pass it with num_segments, or the lengths of all segments to linear_loss as segment_lengths"
# what to do with fields that other libraries have
INSTEAD = {
    "teacher_offsets": "; a top-K teacher has K ids for every token: pad teacher_ids and teacher_logprobs to [..., K], "
    "log-probabilities with -inf"
}
SEGMENT_IDS = ("segments", "documents")
TYPES = {"float": "floating-point", "int": "int64 or int32", "bool": "bool"}


class Frame(NamedTuple):
    """What fields are held against."""

    leading: tuple[int, ...]  # shape of the target
    device: torch.device
    dtype: torch.dtype  # of the statistics
    shift: int
    num_segments: int | None


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
    if not isinstance(part, Summand):
        return {}
    named = (part.token_weights, Field("token")), (part.normalizer, Field("constant"))
    return {option: kind for option, kind in named if isinstance(option, str)}


def wanted_fields(
    losses: Losses,
    metrics: Iterable[Metric],
    batch: Mapping[str, Tensor],
    own: Mapping[str, Field],
    num_segments: int | None,
) -> tuple[list[str], dict[str, Field]]:
    """The fields that the losses and metrics of a call read, all there; and what is known of every field, among them
    ``own``, which losses brought along. A user's function may read any at any call, and is given all but what has to be
    declared: the tensors of a dense teacher, and what is of segments in a call that has none."""

    def of_segments(field: str) -> bool:
        return field in SEGMENT_IDS or known[field].kind in ("segment", "pair")

    summands, segments = [summand for _, summand in losses.terms], num_segments is not None
    parts = [("loss", s) for s in summands] + [("metric", m) for m in metrics]
    known = kinds_of(part for _, part in parts) | dict(own)
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
        needed = [*part.fields, *named_by(part)]
        for field in needed:
            if field not in batch:
                remedy = SEGMENTS if field == "segments" else ""
                raise ValueError(f"{what} {part.label} needs batch[{field!r}], which is missing{remedy}")
        wanted += [*needed, *(field for field in part.optional_fields if field in batch)]
        for field in {"token": (), "segment": ("segments",), "pair": ("segments", "pairs")}[part.unit]:
            if field not in batch:
                remedy = SEGMENTS if field == "segments" else ""
                raise ValueError(f"{what} {part.label} has values per {part.unit} and needs batch[{field!r}]{remedy}")
            wanted.append(field)
        normalizer = getattr(part, "normalizer", None)
        if isinstance(normalizer, str) and (known[normalizer].kind != "constant" or known[normalizer].trailing):
            raise ValueError(
                f"normalizer={normalizer!r} of {part.label} must name a constant, a 0-d tensor in batch; that field is "
                f"of kind {known[normalizer].kind!r}"
            )
        if isinstance(part, Summand) and part.teacher is not None:
            check_teacher(part, batch)
        if not part.own:
            wanted += [field for field in batch if field not in TEACHER_FIELDS and (segments or not of_segments(field))]
    return list(dict.fromkeys(wanted)), known


def check_field(field: str, value: Tensor, kind: Field, frame: Frame) -> None:
    where = f"batch[{field!r}]"
    if not isinstance(value, Tensor):
        raise TypeError(f"{where} must be a torch.Tensor, got {type(value).__name__}")
    if is_dtensor(value):
        raise TypeError(
            f"{where} is a DTensor; pass .to_local(): of this rank's tokens, of a teacher's vocabulary its part as the "
            "student's is split"
        )
    if value.layout != torch.strided:
        raise TypeError(f"{where} must be a dense tensor, got layout {value.layout}; pass .to_dense()")
    check_device(where, value, frame.device, "the target's rows")
    if value.requires_grad:
        raise ValueError(f"{where} takes no gradient here; pass it .detach()ed")
    right = {
        "float": value.is_floating_point(),
        "int": value.dtype in (torch.int64, torch.int32),
        "bool": value.dtype == torch.bool,
    }[kind.type]
    if not right:
        raise TypeError(f"{where} must be {TYPES[kind.type]}, got {name(value.dtype)}; cast it")
    dims = len(frame.leading)
    if field in KEPT_FIELDS:
        return
    if field == "kl_baseline":
        if tuple(value.shape) not in ((), (1,), (frame.num_segments,)):
            raise ValueError(
                f"{where} must be a 0-d tensor, one of shape (1,) or one number per segment, ({frame.num_segments},), "
                f"got shape {tuple(value.shape)}"
            )
        return
    if kind.kind in ("token", "row"):
        if value.dim() != dims + kind.trailing or tuple(value.shape[:dims]) != frame.leading:
            shape = ", ".join([*map(str, frame.leading), *["..."] * bool(kind.trailing)])
            raise ValueError(
                f"{where} must have shape ({shape}), that of the target"
                + (f" and {kind.trailing} more dimensions" if kind.trailing else "")
                + f", got {tuple(value.shape)}; nothing is broadcast: expand it to that shape"
            )
        if 0 in value.shape[dims:]:
            raise ValueError(f"{where} must not be empty along its last dimension, got {tuple(value.shape)}")
    elif kind.kind == "segment":
        need_segments(where, frame)
        if value.dim() != 1 + kind.trailing or value.shape[0] != frame.num_segments:
            shape = ", ".join([str(frame.num_segments), *["..."] * kind.trailing])
            raise ValueError(f"{where} must have shape ({shape}), one per segment, got {tuple(value.shape)}")
    elif kind.kind == "pair":
        if field == "pairs" and (value.dim() != 2 or value.shape[1] != 2):
            raise ValueError(
                f"{where} must be [pairs, 2], segment ids of chosen and rejected, got {tuple(value.shape)}"
            )
    elif value.dim() != kind.trailing:
        raise ValueError(f"{where} must have {kind.trailing} dimensions, got shape {tuple(value.shape)}; reshape it")


def need_segments(where: str, frame: Frame) -> None:
    if frame.num_segments is None:
        raise ValueError(f"{where} needs num_segments, the number of segments of the call, an int")


def check_fields(batch: Mapping[str, Tensor], wanted: list[str], known: Mapping[str, Field], frame: Frame) -> None:
    """Every field by itself, then those that must agree."""
    for field in wanted:
        check_field(field, batch[field], known[field], frame)
        if field in SEGMENT_IDS:
            need_segments(f"batch[{field!r}]", frame)
    if set(KEPT_FIELDS) & set(wanted):
        check_kept(batch, frame)
    of_ids = [field for field in ("teacher_logprobs", "teacher_mask") if field in wanted and "teacher_ids" in wanted]
    for field in of_ids:
        if batch[field].shape != batch["teacher_ids"].shape:
            raise ValueError(
                f"batch[{field!r}] must have the shape of teacher_ids, {tuple(batch['teacher_ids'].shape)}, got "
                f"{tuple(batch[field].shape)}"
            )


def check_kept(batch: Mapping[str, Tensor], frame: Frame) -> None:
    """The sets that tokens keep: ids [n] with offsets [tokens + 1], or ids [..., K]."""
    ids, offsets = batch.get("kept_ids"), batch.get("kept_offsets")
    tokens = math.prod(frame.leading)
    if ids is None:
        first = "candidate_bias" if offsets is None else "kept_offsets"
        raise ValueError(f"batch[{first!r}] goes with batch['kept_ids'], which is missing")
    if "candidate_bias" in batch and batch["candidate_bias"].shape != ids.shape:
        raise ValueError(
            f"batch['candidate_bias'] must have the shape of kept_ids, {tuple(ids.shape)}, got "
            f"{tuple(batch['candidate_bias'].shape)}"
        )
    if offsets is None:
        if tuple(ids.shape[:-1]) != frame.leading or ids.dim() != len(frame.leading) + 1:
            raise ValueError(
                f"batch['kept_ids'] without kept_offsets must have the target's shape {frame.leading} and one more "
                f"dimension, -1 where there is no id, got {tuple(ids.shape)}"
            )
    elif ids.dim() != 1 or tuple(offsets.shape) != (tokens + 1,):
        raise ValueError(
            f"batch['kept_ids'] must be [n] and batch['kept_offsets'] [{tokens + 1}], one more than there are tokens, "
            f"got {tuple(ids.shape)} and {tuple(offsets.shape)}"
        )
    if offsets is not None and offsets.dtype != torch.int64:
        raise TypeError(f"batch['kept_offsets'] must be int64, got {name(offsets.dtype)}; cast it")
