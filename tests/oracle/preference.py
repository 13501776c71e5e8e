"""Preference losses from whole logits, segment by segment and pair by pair."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def dpo(
    x: Tensor,  # [n, V]: tokens that count only
    target: Tensor,  # [n]
    fields: Mapping[str, Any],
    *,
    beta: float = 0.1,
    variant: str = "sigmoid",
    label_smoothing: float = 0.0,
    average: bool | None = None,
    reference_free: bool = False,
    discopop_tau: float = 0.05,
) -> Tensor:
    """[P]"""
    if average is None:
        average = variant in ("ipo", "sigmoid_norm")
    token = log_likelihood(x, target) - (0.0 if reference_free else fields["ref_logprobs"].to(x.dtype))
    pairs = chosen_and_rejected(token, fields, average)
    return stacked([of_pair(u, v, variant, beta, label_smoothing, discopop_tau) for u, v in pairs], x)


def of_pair(u: Tensor, v: Tensor, variant: str, beta: float, eps: float, tau: float) -> Tensor:
    d = beta * (u - v)
    if variant == "hinge":
        return (1 - d).clamp(min=0)
    if variant == "ipo":
        return (u - v - 1 / (2 * beta)) ** 2
    if variant == "sppo_hard":
        return (u - 1 / (2 * beta)) ** 2 + (v + 1 / (2 * beta)) ** 2
    if variant == "apo_zero":
        return 1 - torch.sigmoid(beta * u) + torch.sigmoid(beta * v)
    if variant == "apo_down":
        return torch.sigmoid(beta * u) + 1 - torch.sigmoid(d)
    if variant == "nca_pair":
        return F.softplus(-beta * u) + (F.softplus(beta * u) + F.softplus(beta * v)) / 2
    if variant == "bco_pair":
        return F.softplus(-beta * u) + F.softplus(beta * v)
    if variant == "exo_pair":
        p = torch.sigmoid(d)
        return p * torch.log(p / (1 - eps)) + (1 - p) * torch.log((1 - p) / eps)
    if variant == "discopop":
        modulation = torch.sigmoid(d / tau)
        return F.softplus(-d) * (1 - modulation) + torch.exp(-d) * modulation
    if variant == "robust":
        return ((1 - eps) * F.softplus(-d) - eps * F.softplus(d)) / (1 - 2 * eps)
    assert variant in ("sigmoid", "sigmoid_norm")
    return (1 - eps) * F.softplus(-d) + eps * F.softplus(d)


def simpo(
    x: Tensor,
    target: Tensor,
    fields: Mapping[str, Any],
    *,
    beta: float = 0.1,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
) -> Tensor:
    """[P]"""
    values = []
    for u, v in chosen_and_rejected(log_likelihood(x, target), fields, average=True):
        margin = beta * u - beta * v - gamma
        values.append(-(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin))
    return stacked(values, x)


def cpo(
    x: Tensor,
    target: Tensor,
    fields: Mapping[str, Any],
    *,
    beta: float = 0.1,
    variant: str = "sigmoid",
    label_smoothing: float = 0.0,
    average: bool | None = None,
) -> Tensor:
    """[P]"""
    return dpo(
        x, target, fields, beta=beta, variant=variant, label_smoothing=label_smoothing, average=average,
        reference_free=True,
    )  # fmt: skip


def orpo(x: Tensor, target: Tensor, fields: Mapping[str, Any], *, beta: float = 0.1) -> Tensor:
    """[P]"""
    values = []
    for u, v in chosen_and_rejected(log_likelihood(x, target), fields, average=True):
        if u == 0 or v == 0:  # a segment without tokens: the pair does not count, and its odds are infinite
            values.append(u * 0.0 + v * 0.0)
            continue
        odds_of_chosen, odds_of_rejected = u.exp() / (1 - u.exp()), v.exp() / (1 - v.exp())
        values.append(-beta * torch.log(odds_of_chosen / (odds_of_chosen + odds_of_rejected)))
    return stacked(values, x)


def kto(
    x: Tensor,
    target: Tensor,
    fields: Mapping[str, Any],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    average: bool = False,
    reference_free: bool = False,
) -> Tensor:
    """[num_segments]"""
    token = log_likelihood(x, target) - (0.0 if reference_free else fields["ref_logprobs"].to(x.dtype))
    baseline = fields.get("kl_baseline")
    values = []
    for s in range(fields["num_segments"]):
        kl = torch.zeros((), dtype=x.dtype)
        if baseline is not None:
            kl = (baseline[s] if baseline.dim() else baseline).detach().to(x.dtype)
        reward = beta * (score(token, fields, s, average) - max(kl, torch.zeros_like(kl)))
        if fields["segment_labels"][s]:
            values.append(desirable_weight * (1 - torch.sigmoid(reward)))
        else:
            values.append(undesirable_weight * (1 - torch.sigmoid(-reward)))
    return stacked(values, x)


def log_likelihood(x: Tensor, target: Tensor) -> Tensor:
    return -F.cross_entropy(x, target, reduction="none")


def score(token: Tensor, fields: Mapping[str, Any], segment: int, average: bool) -> Tensor:
    own = token[fields["segments"] == segment]
    return own.mean() if average and len(own) else own.sum()


def chosen_and_rejected(token: Tensor, fields: Mapping[str, Any], average: bool) -> list[tuple[Tensor, Tensor]]:
    return [
        (score(token, fields, chosen, average), score(token, fields, rejected, average))
        for chosen, rejected in fields["pairs"].tolist()
    ]


def stacked(values: list[Tensor], x: Tensor) -> Tensor:
    return torch.stack(values) if values else x.sum() * x.new_zeros(0)
