"""Policy losses on full logits: the formulas as published, one segment after another."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Fields = Mapping[str, Any]


def logprobs(x: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)[torch.arange(len(target)), target]


def log_ratios(x: Tensor, target: Tensor, fields: Fields) -> Tensor:
    new = logprobs(x, target)
    return new - fields.get("old_logprobs", new.detach())


def clamp(values: Tensor, low: float, high: float) -> Tensor:
    """torch.clamp with a gradient of 1 at the bounds, where versions of torch differ."""
    return torch.where(values > high, high, torch.where(values < low, low, values))


def limited(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else torch.clamp(values, -bound, bound)


def members(fields: Fields) -> list[Tensor]:
    """The tokens of each segment."""
    return [torch.nonzero(fields["segments"] == s)[:, 0] for s in range(fields["num_segments"])]


def surrogate(
    ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, delta: float | None = None
) -> Tensor:
    clipped = clamp(ratio, 1 - clip_low, 1 + clip_high)
    free = ratio if delta is None else torch.clamp(ratio, max=delta)
    return -torch.min(free * advantage, clipped * advantage)


def rollout_weights(
    x: Tensor,
    target: Tensor,
    fields: Fields,
    rollout: str | None,
    rollout_level: str = "token",
    rollout_max: float | None = None,
    rollout_min: float | None = None,
) -> Tensor:
    """[n], 1 without rollout weights."""
    if rollout is None:
        return torch.ones(len(target), dtype=x.dtype)
    difference = fields.get("old_logprobs", logprobs(x, target)).detach() - fields["rollout_logprobs"]
    if rollout_level == "segment":
        whole = torch.zeros_like(difference)
        for tokens in members(fields):
            whole[tokens] = difference[tokens].sum()
        difference = whole
    weights = difference.exp()
    high = rollout_max or (2.0 if rollout == "truncate" else 3.0)
    low = rollout_min or 0.0
    if rollout == "truncate":
        return weights.clip(low, high)
    return torch.tensor([w if low <= w <= high else 0.0 for w in weights.tolist()], dtype=x.dtype)


def reinforce(x: Tensor, target: Tensor, fields: Fields, *, rollout: str | None = None, **options) -> Tensor:
    weights = rollout_weights(x, target, fields, rollout, **options)
    return -weights * fields["advantages"] * logprobs(x, target)


def grpo(
    x: Tensor,
    target: Tensor,
    fields: Fields,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    dual_clip: float | None = None,
    ratio_clamp: float | None = 20.0,
    rollout: str | None = None,
    **options,
) -> Tensor:
    advantages = fields["advantages"]
    ratio = limited(log_ratios(x, target, fields), ratio_clamp).exp()
    free = ratio if delta is None else torch.clamp(ratio, max=delta)
    clipped = clamp(ratio, 1 - clip_low, 1 + clip_high)
    values = -torch.min(free * advantages, clipped * advantages)
    if dual_clip is not None:
        values = torch.where(advantages < 0, torch.min(values, -dual_clip * advantages), values)
    return values * rollout_weights(x, target, fields, rollout, **options)


def cispo(
    x: Tensor,
    target: Tensor,
    fields: Fields,
    *,
    clip_high: float = 4.0,
    clip_low: float | None = None,
    bounds: str = "offset",
    ratio_clamp: float | None = 20.0,
    rollout: str | None = None,
    **options,
) -> Tensor:
    high = clip_high if bounds == "raw" else 1 + clip_high
    low = 0.0 if clip_low is None else clip_low if bounds == "raw" else 1 - clip_low
    with torch.no_grad():
        factor = torch.clamp(limited(log_ratios(x, target, fields), ratio_clamp).exp(), low, high)
    values = -factor * fields["advantages"] * logprobs(x, target)
    return values * rollout_weights(x, target, fields, rollout, **options)


def sapo(
    x: Tensor,
    target: Tensor,
    fields: Fields,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    ratio_clamp: float | None = 20.0,
    rollout: str | None = None,
    **options,
) -> Tensor:
    advantages = fields["advantages"]
    ratio = limited(log_ratios(x, target, fields), ratio_clamp).exp()
    tau = torch.tensor([tau_pos if a > 0 else tau_neg for a in advantages.tolist()], dtype=x.dtype)
    values = -advantages * 4 / (tau * (1 + torch.exp(-tau * (ratio - 1))))
    return values * rollout_weights(x, target, fields, rollout, **options)


def gspo(
    x: Tensor,
    target: Tensor,
    fields: Fields,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weighting: str = "segment",
    level: str = "segment",
    delta: float | None = None,
    ratio_clamp: float | None = 20.0,
    rollout: str | None = None,
    **options,
) -> Tensor:
    new, differences = logprobs(x, target), log_ratios(x, target, fields)
    factors = rollout_weights(x, target, fields, rollout, **options)
    tokens_values, segment_values = torch.zeros_like(new), []
    for tokens in members(fields):
        if len(tokens) == 0:
            segment_values.append(new.sum() * 0)
            continue
        log_ratio, advantage = differences[tokens].mean(), fields["advantages"][tokens]
        if level == "segment":
            ratio = limited(log_ratio, ratio_clamp).exp().expand(len(tokens))
            advantage = advantage.mean().expand(len(tokens))
        else:
            moving = new[tokens] - new[tokens].detach()
            ratio = limited(log_ratio.detach() + moving, ratio_clamp).exp()
        values = surrogate(ratio, advantage, clip_low, clip_high, delta) * factors[tokens]
        tokens_values = tokens_values.index_put((tokens,), values)
        segment_values.append(values.mean())
    return torch.stack(segment_values) if weighting == "segment" else tokens_values


def gmpo(
    x: Tensor,
    target: Tensor,
    fields: Fields,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    ratio_clamp: float | None = 20.0,
    rollout: str | None = None,
    **options,
) -> Tensor:
    differences = limited(log_ratios(x, target, fields), ratio_clamp)
    factors = rollout_weights(x, target, fields, rollout, **options)
    values = []
    for tokens in members(fields):
        if len(tokens) == 0:
            values.append(x.sum() * 0)
            continue
        advantage = fields["advantages"][tokens].mean()
        sign = torch.sign(advantage)
        d = differences[tokens]
        pessimistic = sign * torch.min(sign * d, sign * clamp(d, -clip_low, clip_high))
        values.append(-advantage * pessimistic.exp().prod() ** (1 / len(tokens)) * factors[tokens].mean())
    return torch.stack(values)


def rloo(
    x: Tensor,
    target: Tensor,
    fields: Fields,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    ratio_clamp: float | None = 20.0,
    rollout: str | None = None,
    **options,
) -> Tensor:
    differences = log_ratios(x, target, fields)
    factors = rollout_weights(x, target, fields, rollout, **options)
    values = []
    for tokens in members(fields):
        if len(tokens) == 0:
            values.append(x.sum() * 0)
            continue
        ratio = limited(differences[tokens].sum(), ratio_clamp).exp()
        value = surrogate(ratio, fields["advantages"][tokens].mean(), clip_low, clip_high, delta)
        values.append(value * factors[tokens].mean())
    return torch.stack(values)


def vespo(
    x: Tensor,
    target: Tensor,
    fields: Fields,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    ratio_clamp: float = 20.0,
    rollout: str | None = None,
    **options,
) -> Tensor:
    logs = limited(log_ratios(x, target, fields).detach(), ratio_clamp)
    if rollout is not None:
        weights = rollout_weights(x, target, fields, rollout, **options)
        logs = logs + torch.tensor([max(w, 1e-8) for w in weights.tolist()], dtype=x.dtype).log()
    values = torch.zeros_like(logs)
    for tokens in members(fields):
        w = min(max(float(logs[tokens].sum()), math.log(1e-8)), ratio_clamp)
        for token in tokens.tolist():
            advantage = float(fields["advantages"][token])
            k, rate = (k_pos, lambda_pos) if advantage >= 0 else (k_neg, lambda_neg)
            phi = math.exp(w) ** k * math.exp(rate * (1 - math.exp(w)))
            values = values.index_put(
                (torch.tensor([token]),), -phi * advantage * logprobs(x, target)[token : token + 1]
            )
    return values


def kl_to_reference(
    x: Tensor,
    target: Tensor,
    fields: Fields,
    *,
    estimator: str = "k3",
    bias_correction: bool = False,
    log_ratio_clamp: float | None = 20.0,
    kl_clamp: float | None = None,
    ratio_clamp: float | None = 20.0,
    level: str = "token",
) -> Tensor:
    d = limited(fields["ref_logprobs"] - logprobs(x, target), log_ratio_clamp)
    formulas = {"k1": -d, "abs": torch.abs(d), "k2": d**2 / 2, "k3": torch.exp(d) - d - 1}
    values = limited(formulas[estimator.rstrip("+")], kl_clamp)
    if estimator.endswith("+"):
        values = values.detach() + d**2 / 2 - (d**2 / 2).detach()
    if bias_correction:
        logs = log_ratios(x, target, fields)
        if level == "segment":
            own, logs = logs, torch.zeros_like(logs)
            for tokens in members(fields):
                logs = logs.index_put((tokens,), own[tokens].mean().expand(len(tokens)))
        values = values * limited(logs, ratio_clamp).exp()
    return values
