"""The oracle: every option on full logits in plain PyTorch, in whatever dtype the tensors have (float64 for truth)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import distillation, label, policy, preference


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float, softcap: float | None) -> Tensor:
    """[..., vocab]: rounded to the dtype of ``hidden`` by the matmul, then fp32 at least, as models do it."""
    x = F.linear(hidden, weight, bias)
    x = x.to(torch.promote_types(x.dtype, torch.float32)) * logit_scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    token_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    shift: int = 0,
) -> Tensor:
    """``chunked_head.linear_cross_entropy`` on full logits; autograd makes the gradients."""
    if shift:
        length = target.shape[-1]
        kept = linear_cross_entropy(
            hidden[..., : max(0, length - shift), :], weight, target[..., shift:],
            bias=bias, class_weights=class_weights, ignore_index=ignore_index, reduction=reduction,
            normalizer=normalizer, token_weights=None if token_weights is None else token_weights[..., shift:],
            label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, logit_scale=logit_scale,
        )  # fmt: skip
        return kept if reduction != "none" else F.pad(kept, (min(shift, length), 0))
    counts = target != ignore_index
    # rows that count, alone: whatever stands in the others cannot matter
    x = logits(hidden[counts], weight, bias, logit_scale, softcap)
    y = target[counts]
    omega = None if class_weights is None else class_weights.to(x.dtype)
    values = F.cross_entropy(x, y, omega, reduction="none", label_smoothing=label_smoothing)
    values = values + z_loss * x.logsumexp(-1).square()
    if token_weights is not None:
        values = values * token_weights[counts].to(x.dtype)
    if reduction == "none":
        return torch.zeros(target.shape, dtype=x.dtype, device=x.device).masked_scatter(counts, values)
    total = values.sum()
    if reduction == "sum":
        return total
    if normalizer is None:
        normalizer = float(len(y)) if omega is None else omega[y].sum()
        normalizer = torch.as_tensor(normalizer, dtype=x.dtype, device=x.device)
        return total / torch.where(normalizer == 0, 1.0, normalizer)
    return total * 0.0 if normalizer == 0 else total / normalizer


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
PAIRS = ("dpo", "simpo", "cpo", "orpo")
SEGMENTS = ("gmpo", "rloo", "kto")


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
        kept = max(0, target.shape[-1] - shift)
        dim = target.dim() - 1
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
    total, parts = x.sum() * 0.0, {}
    for term in terms:
        value = part(x, y, fields, term, reduction, normalizer, temperature)
        parts[term.options.get("name", term.kind)] = value
        total = total + term.coefficient * value
    return total, parts


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
    fields = dict(fields)
    if term.kind in DENSE:
        fields["teacher_x"] = teacher_logits(fields, own, student).to(x.dtype)
    if own.get("t_squared"):
        own["temperature"] = student
    for name, value in own.items():
        own[name] = value.to(x.dtype) if isinstance(value, Tensor) else value
    floats = {k: v.to(x.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in fields.items()}
    values = ORACLE[term.kind](x / student, target, floats, **own)
    unit = "pair" if term.kind in PAIRS else "segment" if term.kind in SEGMENTS else "token"
    if term.kind == "gspo" and own.get("weighting", "segment") == "segment":
        unit = "segment"
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
    if common.get("reduction", reduction) == "sum":
        return values.sum()
    divisor = common.get("normalizer", normalizer)
    if divisor is None:
        return values.sum() / torch.where(counted == 0, 1.0, counted)
    divisor = fields[divisor] if isinstance(divisor, str) else divisor
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


DENSE = ("forward_kl", "reverse_kl", "jsd", "tvd", "lk")
ORACLE: dict[str, Callable[..., Tensor]] = {
    name: getattr(module, name)
    for module, names in (
        (label, ("cross_entropy", "focal", "unlikelihood", "z_loss", "entropy")),
        (policy, ("reinforce", "grpo", "cispo", "sapo", "gspo", "gmpo", "rloo", "vespo", "kl_to_reference")),
        (preference, ("dpo", "simpo", "cpo", "orpo", "kto")),
        (distillation, (*DENSE, "topk_kl")),
    )
    for name in names
}
