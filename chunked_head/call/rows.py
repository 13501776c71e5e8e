"""Targets and fields of tokens, laid beside the hidden states that they go with and cleaned of what does not count."""

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from ..core.shift import shift_left
from ..losses.base import KEPT_FIELDS, TEACHER_FIELDS, Field
from ..losses.topk import PADDING, entries
from ..plan.plans import slices
from ..stores import Targets
from .fields import TEMPERATURE
from .options import HeadOptions, LogitsOptions
from .spec import Spec

LOGPROBS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
LARGEST_LOGPROB = 1.0  # 16-bit logits of a hundred, less their own logsumexp, may be rounded so far


def may_look(tensor: Tensor) -> bool:
    """Whether nobody waits for what looks into it."""
    return tensor.device.type == "cpu"


def lay_fields(
    spec: Spec,
    head: HeadOptions | LogitsOptions,
    target: Tensor | None,
    batch: Mapping[str, Tensor],
    known: Mapping[str, Field],
    leading: tuple[int, ...],
    segments: int | None,
    rows: int | None = None,
) -> tuple[Targets, dict[str, Tensor]]:
    """Targets [tokens] paired with the hidden states that predict them, and the fields that are read likewise: what
    does not count is 0 (ids -1). ``leading``: the shape of both. ``segments``: their number. ``rows``: the number of
    rows, where rows that do not count follow the call's own."""
    dtype, wanted, ignore_index = spec.statistics_dtype, spec.wanted, head.ignore_index
    if target is None:
        # every token counts: no id that stands for it may be the one that is ignored
        ignore_index = -1
        target = torch.zeros(leading, dtype=torch.int64, device=head.device)
    mask = batch["mask"] if "mask" in wanted else None
    targets = spec.backend.read_targets(target, mask, head.shift, ignore_index, head.vocab, dtype, rows)
    looks = may_look(target)
    if looks and targets.one_or_nan.isnan():
        refuse_target(head, target, mask, ignore_index)
    target = targets.target
    wrongs: list[Tensor] = []
    fields: dict[str, Tensor] = {}
    read = [field for field in wanted if field != "mask" and field not in KEPT_FIELDS]
    numbers = [field for field in read if known[field] == Field("token") and field != TEMPERATURE]
    if numbers:
        values = spec.backend.read_fields([batch[field] for field in numbers], target, head.shift, dtype)
        fields.update(zip(numbers, values, strict=True))
    for field in LOGPROBS:
        if field in fields and looks and len(target):
            check_logprobs(field, float(fields[field].max()))
    others = [field for field in read if field not in numbers]
    ignored = target < 0 if others else target
    for field in others:
        value, kind = batch[field], known[field]
        if kind.kind in ("token", "row"):
            value, wrong = beside_rows(field, value, kind, ignored, leading, head.shift, dtype, segments)
            wrongs += [] if wrong is None else [wrong]
        elif field == "pairs":
            value, wrong = in_range(field, value.to(torch.int64), segments or 0, None)
            wrongs.append(wrong)
        elif field not in TEACHER_FIELDS:
            # a copy: backward may read it, and would not notice that the caller had changed it
            value = value.to(dtype if kind.type == "float" else value.dtype, copy=True)
        fields[field] = value
    if "teacher_ids" in fields:
        fields["teacher_ids"], wrong = clean_ids(fields, target, head.vocab)
        if "teacher_logprobs" in fields:
            fields["teacher_entries"] = distinct(fields["teacher_logprobs"], fields["teacher_ids"])
        wrongs.append(wrong)
    for wrong in wrongs:
        targets.one_or_nan.masked_fill_(wrong, torch.nan)
        targets.inverse.masked_fill_(wrong, torch.nan)
    return targets, fields


def beside_rows(
    field: str,
    value: Tensor,
    kind: Field,
    ignored: Tensor,
    leading: tuple[int, ...],
    shift: int,
    dtype: torch.dtype,
    segments: int | None,
) -> tuple[Tensor, Tensor | None]:
    """A field of tokens [tokens, ...], in the order of the hidden states' rows, 0 (ids -1) where ``ignored``."""
    dims = len(leading)
    if kind.kind == "token":
        fill = -1 if kind.type == "int" else 0
        value = shift_left(value, shift, fill, dims - 1) if dims else value
    value = value.reshape(-1, *value.shape[dims:])
    if field in ("teacher_logits", "teacher_hidden"):
        if value.stride(1) != 1 and value.shape[1] != 1:
            raise ValueError(f"batch[{field!r}] must be contiguous along its last dimension; pass .contiguous()")
        return value, None
    nowhere = ignored.reshape(-1, *[1] * (value.dim() - 1))
    if kind.type == "bool":
        return value & ~nowhere, None
    if kind.type == "int":
        value = value.to(torch.int64).masked_fill(nowhere, -1)
        return in_range(field, value, segments or 0, -1) if field in ("segments", "documents") else (value, None)
    value = value.to(dtype).masked_fill(nowhere, 0.0)
    if field == TEMPERATURE:
        return inverse_temperature(value, ~ignored.view(value.shape))
    return value, None


def inverse_temperature(temperature: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """1 / temperature [tokens], 1 where a token does not count; a ValueError on the CPU where one is not positive,
    elsewhere whether one is not."""
    wrong = counts & ~((temperature > 0) & (temperature < torch.inf))
    if may_look(wrong) and wrong.any():
        raise ValueError(f"temperature must be positive and finite, got {float(temperature[wrong][0]):g} for a token")
    return torch.where(counts, 1.0 / temperature, 1.0), wrong.any()


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
    if may_look(ids) and wrong.any():
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


def refuse_target(
    head: HeadOptions | LogitsOptions, target: Tensor, mask: Tensor | None, ignore_index: int
) -> NoReturn:
    """An IndexError for the first target out of range."""
    shift, vocab = head.shift, head.vocab
    paired = shift_left(target, shift, ignore_index).reshape(-1)
    wrong = (paired != ignore_index) & ((paired < 0) | (paired >= vocab))
    if mask is not None:
        wrong &= shift_left(mask, shift, 0).reshape(-1)
    first = int(wrong.nonzero()[0])
    beyond = head.beyond if head.shard is None and paired[first] >= vocab else ""
    remedies = ["mask it with ignore_index", beyond]
    raise IndexError(
        f"target must be in [0, {vocab}) (the vocabulary) or ignore_index ({ignore_index}), got "
        f"{int(paired[first])} for row {first}, leading dimensions flattened; {'; '.join(filter(None, remedies))}"
    )
