"""Preference losses from whole logits, segment by segment and pair by pair."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import PAIRED, add_row

DPO_VARIANTS = (
    "sigmoid", "hinge", "ipo", "robust", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
    "sigmoid_norm", "aot", "aot_unpaired",
)  # fmt: skip


@add_row(
    PAIRED,
    {}, {"variant": "ipo"}, {"ld_alpha": 0.4, "divergence": "js"},
    {"beta": 0.7}, {"label_smoothing": 0.2}, {"reference_free": True}, {"average": True},
    {"variant": "ipo", "average": False}, {"variant": "sigmoid_norm", "label_smoothing": 0.1, "beta": 2.0},
    {"variant": "robust", "label_smoothing": 0.3}, {"variant": "exo_pair", "label_smoothing": 1e-3},
    {"variant": "discopop", "discopop_tau": 0.3}, *({"variant": variant} for variant in DPO_VARIANTS),
    {"variant": "aot", "label_smoothing": 0.1}, {"variant": "aot", "reference_free": True, "average": True},
    *({"divergence": kind, "variant": "hinge"} for kind in ("forward_kl", "js", "alpha")),
    {"divergence": "alpha", "divergence_alpha": 1.7, "average": True}, {"ld_alpha": 0.3},
    {"ld_alpha": 0.1, "variant": "ipo", "divergence": "js"},
    drawn=3,
)  # fmt: skip
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
    divergence: str = "reverse_kl",
    divergence_alpha: float = 0.5,
    ld_alpha: float | None = None,
) -> Tensor:
    """[P]"""
    if average is None:
        average = variant in ("ipo", "sigmoid_norm")
    reference = torch.zeros_like(x[:, 0]) if reference_free else fields["ref_logprobs"].to(x.dtype)
    token = log_likelihood(x, target) - reference
    if variant in ("aot", "aot_unpaired"):
        return sorted_pairs(token, reference, fields, average, variant, beta, label_smoothing, x)
    pairs = chosen_and_rejected(token, fields, average)
    if ld_alpha is not None:
        pairs = desensitized(token, fields, ld_alpha, average)
    bent = {
        "reverse_kl": lambda u: u,
        "forward_kl": lambda u: 1 - 1 / u.exp(),
        "js": lambda u: torch.log(2 * u.exp() / (u.exp() + 1)),
        "alpha": lambda u: (u.exp() ** (divergence_alpha - 1) - 1) / (divergence_alpha - 1),
    }[divergence]
    return stacked([of_pair(bent(u), bent(v), variant, beta, label_smoothing, discopop_tau) for u, v in pairs], x)


def desensitized(token: Tensor, fields: Mapping[str, Any], alpha: float, average: bool) -> list[tuple[Tensor, Tensor]]:
    """Scores with what a segment has more than the shortest of those it is paired with multiplied by alpha."""
    pairs = fields["pairs"].tolist()

    def one(segment: int) -> Tensor:
        own = token[fields["segments"] == segment]
        shared = min(int((fields["segments"] == other).sum()) for pair in pairs if segment in pair for other in pair)
        score = own[:shared].sum() + alpha * own[shared:].sum()
        return score / max(1, len(own)) if average else score

    return [(one(chosen), one(rejected)) for chosen, rejected in pairs]


def sorted_pairs(
    token: Tensor, reference: Tensor, fields: Mapping[str, Any], average: bool, variant: str, beta: float, eps: float,
    x: Tensor,
) -> Tensor:  # fmt: skip
    """AOT: each pair's number beside the one of its rank; 0 for pairs of a segment without tokens."""
    pairs = fields["pairs"].tolist()
    there = [i for i, pair in enumerate(pairs) if all((fields["segments"] == one).any() for one in pair)]
    if variant == "aot":
        whole = [u - v for u, v in chosen_and_rejected(token + reference, fields, average)]
        other = [u - v for u, v in chosen_and_rejected(reference, fields, average)]
    else:
        whole, other = map(list, zip(*chosen_and_rejected(token, fields, average), strict=True))
    values = [x.sum() * 0.0 for _ in pairs]
    behind = sorted(there, key=lambda i: other[i].item())
    for i, j in zip(sorted(there, key=lambda i: whole[i].item()), behind, strict=True):
        values[i] = of_pair(whole[i], other[j], "sigmoid", beta, eps, 1.0)
    return stacked(values, x)


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


@add_row(
    "segments pairs",
    {}, {"alpha": 0.25}, {"beta": 2.0, "gamma": 1.4}, {"beta": 2.0, "label_smoothing": 0.1}, drawn=1,
)  # fmt: skip
def simpo(
    x: Tensor,
    target: Tensor,
    fields: Mapping[str, Any],
    *,
    beta: float = 0.1,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    alpha: float = 0.0,
) -> Tensor:
    """[P]"""
    values = []
    for u, v in chosen_and_rejected(log_likelihood(x, target), fields, average=True):
        u, v = (rewards(score, alpha) for score in (u, v))
        margin = beta * u - beta * v - gamma
        values.append(-(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin))
    return stacked(values, x)


@add_row(
    "segments pairs",
    {}, {"alpha": -0.5, "average": True}, {"label_smoothing": 0.25, "average": True},
    {"variant": "hinge", "beta": 0.3}, {"variant": "ipo"}, {"variant": "ipo", "average": False}, drawn=1,
)  # fmt: skip
def cpo(
    x: Tensor,
    target: Tensor,
    fields: Mapping[str, Any],
    *,
    beta: float = 0.1,
    variant: str = "sigmoid",
    label_smoothing: float = 0.0,
    average: bool | None = None,
    alpha: float = 0.0,
) -> Tensor:
    """[P]"""
    average = variant == "ipo" if average is None else average
    pairs = chosen_and_rejected(log_likelihood(x, target), fields, average)
    values = [of_pair(rewards(u, alpha), rewards(v, alpha), variant, beta, label_smoothing, 1.0) for u, v in pairs]
    return stacked(values, x)


def rewards(score: Tensor, alpha: float) -> Tensor:
    """AlphaPO's, of a log-probability."""
    return score if alpha == 0 else (1 - score.exp() ** -alpha) / alpha


@add_row("segments pairs", {}, {"beta": 1.0}, drawn=1, sure_is_infinite=True)
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


@add_row(
    "ref_logprobs segments segment_labels",
    {}, {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.3}, {"average": True, "beta": 1.0},
    {"reference_free": True}, optional="kl_baseline", unit="segment", drawn=1,
)  # fmt: skip
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
