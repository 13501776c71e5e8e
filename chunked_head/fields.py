"""The tensors that travel with tokens: checked, laid beside the hidden states that they go with, and cleaned of what
does not count."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .backends import Backend, Targets
from .losses.base import FIELDS, Field, Losses, Summand
from .losses.topk import PADDING, entries
from .metrics import Metric
from .options import nearest
from .parallel.dtensor import is_dtensor
from .plans import name, slices
from .prepare import shift_left
from .teachers import TEACHER, check_teacher

LOGPROBS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
LARGEST_LOGPROB = 1.0  # 16-bit logits of a hundred, less their own logsumexp, may be rounded so far
TYPES = {"float": "floating-point", "int": "int64 or int32", "bool": "bool"}


class Prepared(NamedTuple):
    """Per row of hidden states; what does not count is 0 (ids -1)."""

    target: Tensor  # [tokens] int64, -1 where a token does not count
    counted: Tensor  # [] of the statistics' dtype: how many do
    one_or_nan: Tensor  # [] of that dtype: nan where an id of any kind is out of range (on the CPU that raises)
    fields: dict[str, Tensor]
    num_segments: int | None


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
        if isinstance(part, Summand):
            # named by a loss, and so declared by it
            for option, kind in ((part.token_weights, Field("token")), (part.normalizer, Field("constant"))):
                if isinstance(option, str):
                    known.setdefault(option, kind)
    return known


def wanted_fields(
    losses: Losses, metrics: Iterable[Metric], batch: Mapping[str, Tensor], own: Mapping[str, Field]
) -> tuple[list[str], dict[str, Field]]:
    """The fields that the losses and metrics of a call read, all there; and what is known of every field, among them
    ``own``, which losses brought along."""
    summands = [summand for _, summand in losses.terms]
    parts = [("loss", s) for s in summands] + [("metric", m) for m in metrics]
    known = kinds_of(part for _, part in parts) | dict(own)
    unknown = sorted(set(batch) - set(known), key=str)
    if unknown:
        raise ValueError(
            f"batch has a field {unknown[0]!r} that neither the library nor a loss declares"
            f"{nearest(unknown[0], known)}; known are {', '.join(sorted(known))}; drop it, or declare it by "
            "losses.custom(fields=...)"
        )
    wanted = [field for field in ("mask", "token_weights") if field in batch]
    for what, part in parts:
        for field in part.fields:
            if field not in batch:
                raise ValueError(f"{what} {part.label} needs batch[{field!r}], which is missing")
        wanted += [*part.fields, *(field for field in part.optional_fields if field in batch)]
        for option in (getattr(part, "token_weights", None), getattr(part, "normalizer", None)):
            if isinstance(option, str):
                if option not in batch:
                    raise ValueError(f"{what} {part.label} needs batch[{option!r}], which is missing")
                wanted.append(option)
        for field in {"token": (), "segment": ("segments",), "pair": ("segments", "pairs")}[part.unit]:
            if field not in batch:
                raise ValueError(f"{what} {part.label} has values per {part.unit} and needs batch[{field!r}]")
            wanted.append(field)
        normalizer = getattr(part, "normalizer", None)
        if isinstance(normalizer, str) and (known[normalizer].kind != "constant" or known[normalizer].trailing):
            raise ValueError(
                f"normalizer={normalizer!r} of {part.label} must name a constant, a 0-d tensor in batch; that field is "
                f"of kind {known[normalizer].kind!r}"
            )
        if isinstance(part, Summand) and part.teacher is not None:
            check_teacher(part, batch)
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
    if value.device != frame.device:
        raise ValueError(f"{where} is on {value.device}, the target's rows on {frame.device}; move one of them")
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
        if field in ("segments", "documents"):
            need_segments(f"batch[{field!r}]", frame)
    of_ids = [field for field in ("teacher_logprobs", "teacher_mask") if field in wanted and "teacher_ids" in wanted]
    for field in of_ids:
        if batch[field].shape != batch["teacher_ids"].shape:
            raise ValueError(
                f"batch[{field!r}] must have the shape of teacher_ids, {tuple(batch['teacher_ids'].shape)}, got "
                f"{tuple(batch[field].shape)}"
            )


def prepare_fields(
    backend: Backend,
    target: Tensor | None,
    batch: Mapping[str, Tensor],
    wanted: list[str],
    known: Mapping[str, Field],
    frame: Frame,
    ignore_index: int,
    vocab: int,
) -> Prepared:
    """Targets paired with the hidden states that predict them, fields likewise."""
    if target is None:
        # every token counts: no id that stands for it may be the one that is ignored
        ignore_index = -1
        target = torch.zeros(frame.leading, dtype=torch.int64, device=frame.device)
    mask = batch["mask"] if "mask" in wanted else None
    target, counted, one_or_nan = read_targets(backend, target, mask, frame, ignore_index, vocab)
    wrongs: list[Tensor] = []
    fields: dict[str, Tensor] = {}
    read = [field for field in wanted if field != "mask"]
    counts = target >= 0 if read else target
    for field in read:
        value, kind = batch[field], known[field]
        if kind.kind in ("token", "row"):
            value, wrong = beside_rows(field, value, kind, counts, frame)
            wrongs += [] if wrong is None else [wrong]
        elif field == "pairs":
            value, wrong = in_range(field, value.to(torch.int64), frame.num_segments or 0, None)
            wrongs.append(wrong)
        elif field not in TEACHER:
            # a copy: backward may read it, and would not notice that the caller had changed it
            value = value.to(frame.dtype if kind.type == "float" else value.dtype, copy=True)
        fields[field] = value
    if "teacher_ids" in fields:
        fields["teacher_ids"], wrong = clean_ids(fields, target, vocab)
        if "teacher_logprobs" in fields:
            fields["teacher_entries"] = distinct(fields["teacher_logprobs"], fields["teacher_ids"])
        wrongs.append(wrong)
    for wrong in wrongs:
        one_or_nan.masked_fill_(wrong, torch.nan)
    return Prepared(target, counted, one_or_nan, fields, frame.num_segments)


def beside_rows(field: str, value: Tensor, kind: Field, counts: Tensor, frame: Frame) -> tuple[Tensor, Tensor | None]:
    """A field of tokens [tokens, ...], in the order of the hidden states' rows, of which ``counts`` do."""
    dims = len(frame.leading)
    if kind.kind == "token":
        fill = -1 if kind.type == "int" else 0
        value = shift_left(value, frame.shift, fill, dims - 1) if dims else value
    value = value.reshape(-1, *value.shape[dims:])
    if field in ("teacher_logits", "teacher_hidden"):
        if value.stride(1) != 1 and value.shape[1] != 1:
            raise ValueError(f"batch[{field!r}] must be contiguous along its last dimension; pass .contiguous()")
        return value, None
    here = counts.reshape(-1, *[1] * (value.dim() - 1))
    if kind.type == "bool":
        return value & here, None
    if kind.type == "int":
        value = torch.where(here, value.to(torch.int64), -1)
        return (
            in_range(field, value, frame.num_segments or 0, -1) if field in ("segments", "documents") else (value, None)
        )
    value = torch.where(here, value.to(frame.dtype), 0.0)
    if field in LOGPROBS and value.device.type == "cpu" and value.numel():
        check_logprobs(field, float(value.max()))
    return value, None


def check_logprobs(field: str, largest: float) -> None:
    """Raises where log-probabilities are none. Elsewhere than on the CPU nobody looks, which would be to wait."""
    if largest > LARGEST_LOGPROB:
        raise ValueError(
            f"batch[{field!r}] must hold log-probabilities, which are at most 0, got {largest:g}; negate them if they "
            "are losses (-log p), take .log() if they are probabilities"
        )


def in_range(field: str, ids: Tensor, number: int, none: int | None) -> tuple[Tensor, Tensor]:
    """Ids in [0, number), or the one that means none; an IndexError on the CPU, elsewhere whether there is another."""
    wrong = (ids < 0) | (ids >= number)
    if none is not None:
        wrong &= ids != none
    if ids.device.type == "cpu" and wrong.any():
        raise IndexError(
            f"batch[{field!r}] must be in [0, {number})"
            + (f" or {none} for none" if none is not None else "")
            + f", got {int(ids[wrong][0])}"
        )
    return torch.where(wrong, -1, ids), wrong.any()


def clean_ids(fields: Mapping[str, Tensor], target: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The teacher's K ids per token, -1 for those that stand for none, whatever id they hold."""
    ids = fields["teacher_ids"]
    valid = (target >= 0)[:, None]
    if "teacher_logprobs" in fields:
        valid = valid & ~(fields["teacher_logprobs"] <= PADDING)  # nan counts: an error should show
    if "teacher_mask" in fields:
        valid = valid & fields["teacher_mask"]
    cleaned, wrong = in_range("teacher_ids", torch.where(valid, ids, -1), vocab, -1)
    return cleaned.contiguous(), wrong


def distinct(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Which entries count [tokens, K]: found here, once, because every one is compared with every other."""
    step = max(1, (1 << 24) // max(1, ids.shape[1] ** 2))
    blocks = slices(len(ids), step)
    return torch.cat([entries(logprobs[at], ids[at], ids[at] >= 0) for at in blocks]) if len(ids) else ids >= 0


def read_targets(
    backend: Backend, target: Tensor, mask: Tensor | None, frame: Frame, ignore_index: int, vocab: int
) -> Targets:
    """Targets beside the rows that predict them; on the CPU an IndexError names one that is out of range."""
    found = backend.read_targets(target, mask, frame.shift, ignore_index, vocab, frame.dtype)
    if target.device.type == "cpu" and found.one_or_nan.isnan():
        paired = shift_left(target, frame.shift, ignore_index).reshape(-1)
        wrong = (paired != ignore_index) & ((paired < 0) | (paired >= vocab))
        if mask is not None:
            wrong &= shift_left(mask, frame.shift, 0).reshape(-1)
        first = int(wrong.nonzero()[0])
        raise IndexError(
            f"target must be in [0, {vocab}) (the vocabulary) or ignore_index ({ignore_index}), got "
            f"{int(paired[first])} for row {first}, leading dimensions flattened; mask it with ignore_index"
        )
    return found
