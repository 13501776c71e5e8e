"""The oracle: every option on full logits in plain PyTorch, in whatever dtype the tensors have (float64 for truth)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import DENSE, ROWS


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float, softcap: float | None) -> Tensor:
    """[..., vocab]: rounded to the dtype of ``hidden`` by the matmul, then fp32 at least, as models do it."""
    x = F.linear(hidden, weight, bias)
    x = x.to(torch.promote_types(x.dtype, torch.float32)) * logit_scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def of_kept(x: Tensor, ids: Tensor, target: Tensor) -> Tensor:
    """Logits [n, V] of the columns ``ids`` [n, K] and of the target, of all where there are none; the others have a
    probability of 0."""
    inside = torch.zeros_like(x, dtype=torch.bool)
    for row, own in enumerate(ids):
        inside[row, own[own >= 0]] = True
        inside[row, target[row]] = True
        if (own < 0).all():
            inside[row] = True
    return torch.where(inside, x, -1e30)


class Term(NamedTuple):
    """One loss of a sum: a coefficient, the name of a loss in ``chunked_head.losses``, and what is given to it."""

    coefficient: float
    kind: str
    options: Mapping[str, Any] = {}


SUMMAND_OPTIONS = ("temperature", "token_weights", "normalizer", "reduction", "name")


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | None,
    terms: Sequence[Term],
    *,
    batch: Mapping[str, Tensor] | None = None,
    num_segments: int | None = None,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    shift: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and parts of ``chunked_head.linear_loss`` on full logits, by the formulas beside this file."""
    batch = dict(batch or {})
    if isinstance(temperature, Tensor):
        batch["temperature"] = temperature
    if target is None:
        target = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    if shift:
        length, dim = target.shape[-1], target.dim() - 1
        kept = max(0, length - shift)
        moved = {
            name: v.narrow(dim, v.shape[dim] - kept, kept) for name, v in batch.items() if kind_of(name) == "token"
        }
        still = {name: v.narrow(dim, 0, kept) for name, v in batch.items() if kind_of(name) == "row"}
        batch |= moved | still
        hidden, target = hidden.narrow(dim, 0, kept), target[..., target.shape[-1] - kept :]
    counts = target != ignore_index
    if "mask" in batch:
        counts = counts & batch["mask"]
    # rows that count, alone: whatever stands in the others cannot matter
    fields: dict[str, Any] = {
        name: value[counts] if kind_of(name) in ("token", "row") else value for name, value in batch.items()
    }
    fields["num_segments"] = num_segments
    x = logits(hidden[counts], weight, bias, logit_scale, softcap)
    if "kept_ids" in fields:
        x = of_kept(x, fields.pop("kept_ids"), target[counts])
    temperature = fields["temperature"][:, None].to(x.dtype) if isinstance(temperature, Tensor) else temperature
    y = target[counts]
    total, parts = torch.where(x.isfinite(), x, 0.0).sum() * 0.0, {}
    for term in terms:
        value = part(x, y, fields, term, reduction, normalizer, temperature)
        parts[term.options.get("name", term.kind)] = value
        total = total + term.coefficient * value
    if reduction == "none":
        each = torch.zeros(target.shape, dtype=x.dtype, device=x.device).masked_scatter(counts, total)
        total = F.pad(each, (min(shift, length), 0)) if shift else each
    return total, parts


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    **options: Any,
) -> Tensor:
    """``chunked_head.linear_cross_entropy`` on full logits."""
    own: dict[str, Any] = {"label_smoothing": label_smoothing}
    if class_weights is not None:
        own["class_weights"] = class_weights
        kept = target[..., options.get("shift", 0) :] if target.dim() else target
        if normalizer is None:  # z-loss is divided by it, too
            normalizer = class_weights[kept[kept != options.get("ignore_index", -100)]].double().sum()
    batch = {} if token_weights is None else {"token_weights": token_weights}
    terms = [Term(1.0, "cross_entropy", own), *[Term(z_loss, "z_loss")][: z_loss > 0]]
    return linear_loss(hidden, weight, target, terms, batch=batch, normalizer=normalizer, **options)[0]


def part(
    x: Tensor,
    target: Tensor,
    fields: Mapping[str, Any],
    term: Term,
    reduction: str,
    normalizer: float | Tensor | None,
    temperature: float | Tensor,
) -> Tensor:
    """The reduced value of one loss."""
    common = {name: value for name, value in term.options.items() if name in SUMMAND_OPTIONS}
    own = {name: value for name, value in term.options.items() if name not in SUMMAND_OPTIONS}
    student = common.get("temperature") or temperature
    fields, row = dict(fields), ROWS[term.kind]
    if DENSE in row.fields:
        fields["teacher_x"] = teacher_logits(fields, own, student).to(x.dtype)
    if own.get("t_squared"):
        own["temperature"] = student
    for name, value in own.items():
        own[name] = value.to(x.dtype) if isinstance(value, Tensor) else value
    floats = {k: v.to(x.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in fields.items()}
    values = row.formula(x / student, target, floats, **own)
    unit = row.unit_of(own)
    if unit == "token":
        weights = common.get("token_weights", "token_weights")
        weights = fields.get(weights) if isinstance(weights, str) else weights
        values = values if weights is None else values * weights.to(x.dtype)
        counted: Tensor = torch.tensor(float(len(target)), dtype=x.dtype, device=x.device)
        if "class_weights" in own:
            counted = own["class_weights"][target].sum()
    else:
        present = torch.tensor(
            [(fields["segments"] == s).any() for s in range(fields["num_segments"])], device=x.device
        )
        if unit == "pair":
            present = present[fields["pairs"]].all(1)
        values, counted = values[present], present.sum().to(x.dtype)
    if common.get("reduction", reduction) != "mean":
        return values if reduction == "none" else values.sum()
    divisor = common.get("normalizer", normalizer)
    if divisor is None:
        return values.sum() / torch.where(counted == 0, 1.0, counted)
    divisor = torch.as_tensor(fields[divisor] if isinstance(divisor, str) else divisor, dtype=x.dtype, device=x.device)
    return values.sum() * 0.0 if divisor == 0 else values.sum() / divisor


def teacher_logits(
    fields: Mapping[str, Any], options: Mapping[str, Any], student_temperature: float | Tensor
) -> Tensor:
    """A dense teacher's logits, capped and tempered."""
    if "teacher_logits" in fields:
        raw = fields["teacher_logits"]
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32)) * options.get("teacher_logit_scale", 1.0)
        cap = options.get("teacher_softcap")
        raw = raw if cap is None else cap * torch.tanh(raw / cap)
    else:
        raw = logits(
            fields["teacher_hidden"], fields["teacher_weight"], fields.get("teacher_bias"),
            options.get("teacher_logit_scale", 1.0), options.get("teacher_softcap"),
        )  # fmt: skip
    return raw / (options.get("teacher_temperature") or student_temperature)


def kind_of(field: str) -> str:
    """Whether a field is indexed like the target, like the hidden states, or otherwise."""
    if field in ("teacher_logits", "teacher_hidden", "teacher_ids", "teacher_logprobs", "teacher_mask"):
        return "row"
    return "other" if field in ("pairs", "segment_labels", "kl_baseline", "teacher_weight", "teacher_bias") else "token"
