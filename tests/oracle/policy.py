"""Policy losses on full logits: the formulas as published, one segment after another."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .rows import POLICY, SEGMENTED, add_row

Fields = Mapping[str, Any]


def logprobs(x: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)[torch.arange(len(target)), target]


def clamp(values: Tensor, low: float, high: float) -> Tensor:
    """torch.clamp with a gradient of 1 at the bounds, where versions of torch differ."""
    return torch.where(values > high, high, torch.where(values < low, low, values))


def limited(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else torch.clamp(values, -bound, bound)


def members(fields: Fields) -> list[Tensor]:
    """The tokens of each segment."""
    return [torch.nonzero(fields["segments"] == s)[:, 0] for s in range(fields["num_segments"])]


@dataclass
class Policy:
    """Tokens that count, [n] each."""

    x: Tensor  # [n, V]
    fields: Fields
    new: Tensor  # log-probabilities
    log_ratio: Tensor  # to the old policy's
    ratio_clamp: float | None
    weights: Tensor  # of the rollout; 1 without

    @property
    def advantages(self) -> Tensor:
        return self.fields["advantages"]

    @property
    def ratio(self) -> Tensor:
        return limited(self.log_ratio, self.ratio_clamp).exp()

    def by_segment(self, value: Callable[[Tensor], Tensor]) -> Tensor:
        """[num_segments] values of segments' tokens, 0 of those without any."""
        return torch.stack([value(own) if len(own) else self.x.sum() * 0 for own in members(self.fields)])


def of_a_policy(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of the logits [n, V], targets and fields, with the options that all of these losses have."""

    @functools.wraps(loss)
    def whole(x: Tensor, target: Tensor, fields: Fields, *, ratio_clamp: float | None = 20.0, **options: Any) -> Tensor:
        rollout = {name: options.pop(name) for name in list(options) if name.startswith("rollout")}
        new = logprobs(x, target)
        log_ratio = new - fields.get("old_logprobs", new.detach())
        return loss(Policy(x, fields, new, log_ratio, ratio_clamp, rollout_weights(new, fields, **rollout)), **options)

    return whole


def rollout_weights(
    new: Tensor,
    fields: Fields,
    rollout: str | None = None,
    rollout_level: str = "token",
    rollout_max: float | None = None,
    rollout_min: float | None = None,
) -> Tensor:
    if rollout is None:
        return torch.ones_like(new)
    difference = fields.get("old_logprobs", new).detach() - fields["rollout_logprobs"]
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
    return torch.tensor([w if low <= w <= high else 0.0 for w in weights.tolist()], dtype=new.dtype)


def surrogate(
    ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, delta: float | None = None
) -> Tensor:
    clipped = clamp(ratio, 1 - clip_low, 1 + clip_high)
    free = ratio if delta is None else torch.clamp(ratio, max=delta)
    return -torch.min(free * advantage, clipped * advantage)


@add_row(POLICY + " rollout_logprobs", {"rollout": "truncate"}, {}, drawn=1)
@of_a_policy
def reinforce(b: Policy) -> Tensor:
    return -b.weights * b.advantages * b.new


@add_row(
    POLICY,
    {}, {"dual_clip": 1.1, "clip_high": 0.28}, {"clip_low": 0.1, "clip_high": 0.28},
    {"clip_low": 0.0, "clip_high": 0.0}, {"clip_low": 1.0, "clip_high": 0.2}, {"delta": 1.3},
    {"delta": 1.1},  # below 1 + clip_high
    {"delta": 0.7},  # below 1 - clip_low too
    {"dual_clip": 1.5}, {"dual_clip": 1.1}, {"clip_high": 0.5, "delta": 4.0, "ratio_clamp": None}, {"ratio_clamp": 0.3},
)  # fmt: skip
@of_a_policy
def grpo(
    b: Policy, clip_low: float = 0.2, clip_high: float = 0.2, delta: float | None = None, dual_clip: float | None = None
) -> Tensor:
    values = surrogate(b.ratio, b.advantages, clip_low, clip_high, delta)
    if dual_clip is not None:
        values = torch.where(b.advantages < 0, torch.min(values, -dual_clip * b.advantages), values)
    return values * b.weights


@add_row(
    POLICY,
    {"clip_high": 0.1}, {}, {"clip_high": 0.3}, {"clip_high": 0.3, "clip_low": 0.2},
    {"clip_high": 0.2, "ratio_clamp": None}, {"clip_high": 0.5, "ratio_clamp": 0.1}, drawn=1,
)  # fmt: skip
@of_a_policy
def cispo(b: Policy, clip_high: float = 4.0, clip_low: float | None = None) -> Tensor:
    factor = torch.clamp(b.ratio.detach(), 0.0 if clip_low is None else 1 - clip_low, 1 + clip_high)
    return -factor * b.advantages * b.new * b.weights


@add_row(POLICY, {}, {"tau_pos": 3.0, "tau_neg": 0.5}, {"ratio_clamp": None}, {"ratio_clamp": 0.3})
@of_a_policy
def sapo(b: Policy, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    tau = torch.tensor([tau_pos if a > 0 else tau_neg for a in b.advantages.tolist()], dtype=b.x.dtype)
    return -b.advantages * 4 / (tau * (1 + torch.exp(-tau * (b.ratio - 1)))) * b.weights


@add_row(
    SEGMENTED,
    {}, {"weighting": "token", "level": "token"},
    *(
        {"clip_low": low, "clip_high": high, "weighting": weighting, "level": level, "ratio_clamp": clamp}
        for low, high, clamp in ((0.2, 0.2, 20.0), (0.02, 0.03, None), (0.2, 0.1, 0.15))
        for weighting in ("segment", "token") for level in ("segment", "token")
    ),
    *({"delta": delta, "level": level} for delta in (0.7, 1.05, 1.3) for level in ("segment", "token")),
    unit="segment",
)  # fmt: skip
@of_a_policy
def gspo(
    b: Policy,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weighting: str = "segment",
    level: str = "segment",
    delta: float | None = None,
) -> Tensor:
    def values(tokens: Tensor) -> Tensor:
        log_ratio, advantage = b.log_ratio[tokens].mean(), b.advantages[tokens]
        if level == "segment":
            ratio = limited(log_ratio, b.ratio_clamp).exp().expand(len(tokens))
            advantage = advantage.mean().expand(len(tokens))
        else:
            moving = b.new[tokens] - b.new[tokens].detach()
            ratio = limited(log_ratio.detach() + moving, b.ratio_clamp).exp()
        return surrogate(ratio, advantage, clip_low, clip_high, delta) * b.weights[tokens]

    if weighting == "segment":
        return b.by_segment(lambda tokens: values(tokens).mean())
    found = torch.zeros_like(b.new)
    for tokens in filter(len, members(b.fields)):
        found = found.index_put((tokens,), values(tokens))
    return found


@add_row(
    SEGMENTED, {}, {"clip_low": 0.1, "clip_high": 0.2}, {"ratio_clamp": None}, {"ratio_clamp": 0.3}, unit="segment"
)
@of_a_policy
def gmpo(b: Policy, clip_low: float = 0.4, clip_high: float = 0.4) -> Tensor:
    def value(tokens: Tensor) -> Tensor:
        advantage = b.advantages[tokens].mean()
        sign, d = torch.sign(advantage), limited(b.log_ratio, b.ratio_clamp)[tokens]
        pessimistic = sign * torch.min(sign * d, sign * clamp(d, -clip_low, clip_high))
        return -advantage * pessimistic.exp().prod() ** (1 / len(tokens)) * b.weights[tokens].mean()

    return b.by_segment(value)


@add_row(
    SEGMENTED,
    {}, {"clip_low": 0.05, "clip_high": 0.6}, {"ratio_clamp": None}, {"ratio_clamp": 0.1}, {"delta": 1.3},
    unit="segment",
)  # fmt: skip
@of_a_policy
def rloo(b: Policy, clip_low: float = 0.2, clip_high: float = 0.2, delta: float | None = None) -> Tensor:
    def value(tokens: Tensor) -> Tensor:
        ratio = limited(b.log_ratio[tokens].sum(), b.ratio_clamp).exp()
        one = surrogate(ratio, b.advantages[tokens].mean(), clip_low, clip_high, delta)
        return one * b.weights[tokens].mean()

    return b.by_segment(value)


@add_row(
    SEGMENTED + " rollout_logprobs",
    {"ratio_clamp": 3.0}, {"rollout": "truncate"}, {"rollout": "mask"}, {}, {"ratio_clamp": 0.1},
    {"k_pos": 0.5, "lambda_pos": 0.2, "k_neg": 1.5, "lambda_neg": 0.3},
)  # fmt: skip
@of_a_policy
def vespo(
    b: Policy, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> Tensor:
    logs = limited(b.log_ratio.detach(), b.ratio_clamp)
    logs = logs + torch.tensor([max(w, 1e-8) for w in b.weights.tolist()], dtype=b.x.dtype).log()
    values = torch.zeros_like(logs)
    for tokens in members(b.fields):
        w = min(max(float(logs[tokens].sum()), math.log(1e-8)), b.ratio_clamp or math.inf)
        for token in tokens:
            advantage = float(b.advantages[token])
            k, rate = (k_pos, lambda_pos) if advantage >= 0 else (k_neg, lambda_neg)
            phi = math.exp(w) ** k * math.exp(rate * (1 - math.exp(w)))
            values = values.index_put((token,), -phi * advantage * b.new[token])
    return values


ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")
KL_CLAMPS: list[dict[str, Any]] = [
    {}, {"log_ratio_clamp": None}, {"log_ratio_clamp": 0.3}, {"kl_clamp": 0.05}, {"ratio_clamp": 0.2},
]  # fmt: skip


@add_row(
    "ref_logprobs old_logprobs segments",
    {}, {"estimator": "k1", "bias_correction": True}, {"estimator": "k3+", "kl_clamp": 10.0, "log_ratio_clamp": None},
    *({"estimator": one, **clamp} for one in ESTIMATORS for clamp in KL_CLAMPS),
    *(
        {"estimator": one, "bias_correction": True, "level": level, **clamp}
        for one in ESTIMATORS[:4] for level in ("token", "segment") for clamp in KL_CLAMPS
    ),
    drawn=3,
)  # fmt: skip
@of_a_policy
def kl_to_reference(
    b: Policy,
    estimator: str = "k3",
    bias_correction: bool = False,
    log_ratio_clamp: float | None = 20.0,
    kl_clamp: float | None = None,
    level: str = "token",
) -> Tensor:
    d = limited(b.fields["ref_logprobs"] - b.new, log_ratio_clamp)
    formulas = {"k1": -d, "abs": torch.abs(d), "k2": d**2 / 2, "k3": torch.exp(d) - d - 1}
    values = limited(formulas[estimator.rstrip("+")], kl_clamp)
    if estimator.endswith("+"):
        values = values.detach() + d**2 / 2 - (d**2 / 2).detach()
    if bias_correction:
        logs = b.log_ratio
        if level == "segment":
            logs = torch.zeros_like(logs)
            for tokens in members(b.fields):
                logs = logs.index_put((tokens,), b.log_ratio[tokens].mean().expand(len(tokens)))
        values = values * limited(logs, b.ratio_clamp).exp()
    return values
