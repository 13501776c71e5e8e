"""What the policy losses share: ratios to the old policy and their clip, rollout weights, options."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.loss_stats import Stats
from ..core.options import bound, choice, number, refuse_unknown
from .base import Losses, SummandOptions, make


class PolicyOptions(SummandOptions, total=False):
    """What every policy loss but ``kl_to_reference`` takes beside its own options.

    ``rollout``: weights against the mismatch of rollout engine and trainer, ``v = exp(old_logprobs -
    rollout_logprobs)``, detached factors of the loss's values (of no other summand); without ``old_logprobs`` the
    detached ``logprob`` stands for them. "truncate" clamps v to [rollout_min, rollout_max], "mask" takes 0 for a v
    outside; a token so masked stays in every count and denominator (verl's rejection masks leave it out: put those into
    ``batch["mask"]``). A token whose weight is 0, as is an e^-104 in fp32, has value 0 whatever its ratio is. None, the
    default: no weights.
    ``rollout_level``: "token" (default), or "segment" for one v per segment, of the sum of its log-ratios; tokens of
    segment -1 then have v = 1. For losses per segment, "token" takes the mean of the tokens' weights.
    ``rollout_max``: by default 2 to truncate (verl) and 3 to mask (TRL). ``rollout_min``: None, the default, is 0.
    Sources: TRL ``vllm_importance_sampling_mode`` (its default: segment, mask), verl ``rollout_is``, NeMo-RL TIS
    (truncate) and IcePop (mask).
    """

    rollout: str | None
    rollout_level: str
    rollout_max: float | None
    rollout_min: float | None


class Rollout(NamedTuple):
    """Checked options of the rollout weights."""

    mode: str
    level: str
    most: float
    least: float


def checked_clip(where: str, clip_low: float, clip_high: float, delta: float | None = None) -> dict[str, Any]:
    """Options of ``clipped_ratio``: around 1, of a ratio that is at most ``delta`` unclipped."""
    low, high = 1.0 - number(where, "clip_low", clip_low, 0.0, 1.0), 1.0 + bound(where, "clip_high", clip_high)
    if delta is None:
        return {"low": low, "high": high, "ceiling": None}
    # clip(r) caps what the min sees of A > 0 and stays a floor of what it sees of A < 0
    delta = bound(where, "delta", delta, open_=True)
    return {"low": low, "high": min(delta, high), "ceiling": max(delta, high)}


def checked_clamp(where: str, value: float | None, argument: str = "ratio_clamp") -> float | None:
    return None if value is None else bound(where, argument, value, open_=True)


def token_log_ratio(stats: Stats, batch: Batch) -> Tensor:
    """log r of each token [n]; on policy, where no old log-probabilities are given, 0 with gradient 1."""
    return stats.logprob - old_logprobs(stats, batch)


def old_logprobs(stats: Stats, batch: Batch) -> Tensor:
    return batch["old_logprobs"] if "old_logprobs" in batch else stats.logprob.detach()


def clipped_ratio(log_ratio: Tensor, advantages: Tensor, low: float, high: float, ceiling: float | None) -> Tensor:
    """The ratio r such that ``-A r`` is the clipped surrogate: at most ``high`` where A > 0, at least ``low`` and at
    most ``ceiling`` where A < 0, 1 where A = 0; nan stays nan elsewhere.

    Where a bound acts, or A is 0, the ratio is a constant chosen before exp: a product of 0 and an infinite ratio would
    come out of the gradient of any clamp after it.
    """
    ratio = log_ratio.detach().exp()
    above = (advantages > 0) & (ratio > high)
    below = (advantages < 0) & (ratio < low)
    fixed = above | below | (advantages == 0)
    if ceiling is not None:
        beyond = (advantages < 0) & (ratio > ceiling)
        fixed = fixed | beyond
    ratio = torch.where(fixed, 0.0, log_ratio).exp()
    ratio = torch.where(above, high, torch.where(below, low, ratio))
    return ratio if ceiling is None else torch.where(beyond, ceiling, ratio)


def rollout_weights(stats: Stats, batch: Batch, rollout: Rollout) -> Tensor:
    """One detached weight per token [n]."""
    log_ratio = old_logprobs(stats, batch) - batch["rollout_logprobs"]
    if rollout.level == "segment":
        log_ratio = batch.per_token(batch.segment_sum(log_ratio))
    weights = log_ratio.exp()
    if rollout.mode == "truncate":
        return weights.clamp(rollout.least, rollout.most)
    return torch.where((weights < rollout.least) | (weights > rollout.most), 0.0, weights)


def weighted(advantages: Tensor, stats: Stats, batch: Batch, rollout: Rollout | None) -> Tensor:
    """Advantages of tokens [n] times the rollout weights: of a weight of 0, as of an advantage of 0, nothing is left
    whatever the ratio is."""
    return advantages if rollout is None else advantages * rollout_weights(stats, batch, rollout)


def token_size(batch: Batch) -> Tensor:
    return batch["advantages"].abs()


def make_policy(
    kind: str,
    function: Any,
    options: dict[str, Any],
    policy: dict[str, Any],
    unit: str | None = None,  # None: a loss of tokens that knows no segments
    size: Any = token_size,
) -> Losses:
    """The loss with its rollout weights taken out of ``policy``."""
    refuse_unknown("losses", kind, policy, PolicyOptions.__annotations__)
    summand = {name: value for name, value in policy.items() if not name.startswith("rollout")}
    rollout = _rollout(f"losses.{kind}", **{name: policy[name] for name in policy.keys() - summand.keys()})
    segments = unit is not None or (rollout is not None and rollout.level == "segment")
    fields = ("advantages", *["segments"] * segments, *["rollout_logprobs"] * (rollout is not None))
    # REINFORCE has no ratio: old log-probabilities are part of its rollout weights only
    optional = () if kind == "reinforce" and rollout is None else ("old_logprobs",)
    return make(
        kind, function, summand, {**options, "rollout": rollout}, fields=fields, optional_fields=optional,
        scope="segment" if segments else "token", unit=unit or "token", size=size,
    )  # fmt: skip


def _rollout(
    where: str,
    rollout: str | None = None,
    rollout_level: str = "token",
    rollout_max: float | None = None,
    rollout_min: float | None = None,
) -> Rollout | None:
    if rollout is None:
        if rollout_max is not None or rollout_min is not None or rollout_level != "token":
            raise ValueError(f'rollout_level, rollout_max and rollout_min of {where} go with rollout="truncate"')
        return None
    choice(where, "rollout", rollout, ("truncate", "mask"))
    choice(where, "rollout_level", rollout_level, ("token", "segment"))
    if rollout_max is None:
        rollout_max = 2.0 if rollout == "truncate" else 3.0
    least = 0.0 if rollout_min is None else number(where, "rollout_min", rollout_min, 0.0)
    most = number(where, "rollout_max", rollout_max, least, 1e30)
    return Rollout(rollout, rollout_level, most, least)
