"""Losses of policy gradients: functions of the target's log-probability, advantages and older log-probabilities.

In all docstrings ``r = exp(logprob - old_logprobs)``, and ``A`` are the advantages. Losses are to be minimised. Entropy
bonus and KL to a reference are summands of their own. Normalisers (GRPO, Dr. GRPO, DAPO ...): ``chunked_head.weights``.
This file has losses per token, and functions that losses per segment (``policy_segments``) use as well.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.checks import bound, choice, flag, number, refuse_unknown
from .base import Losses, SummandOptions, make, once
from .batch import Batch, Stats, clamped, gate, kl_estimate


class PolicyOptions(SummandOptions, total=False):
    """Options that every policy loss but ``kl_to_reference`` takes.

    ``rollout``: weights against the mismatch of rollout engine and trainer. The detached factor
    ``v = exp(old_logprobs - rollout_logprobs)`` multiplies this loss's values (and no other summand's); without
    ``old_logprobs``, the detached ``logprob`` stands in their place. "truncate" clamps v to [rollout_min, rollout_max];
    "mask" sets v outside of it to 0, and the token still counts in every denominator. A token of weight 0 has value 0
    whatever its ratio is. None, the default: no weights.
    ``rollout_level``: "token" (default); or "segment", one v per segment from the sum of its log-ratios, and v = 1 for
    tokens of segment -1. Losses per segment at level "token" take the mean of the segment's weights.
    ``rollout_max``: by default 2 for "truncate" and 3 for "mask". ``rollout_min``: by default 0 (None).
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


@once
def reinforce(**policy: Any) -> Losses:
    """``-A * logprob``: REINFORCE. On policy (r = 1), every clipped loss has its gradient.

    Fields: advantages [tokens]; with ``rollout``, rollout_logprobs and optionally old_logprobs. ``policy``:
    ``PolicyOptions``.
    """
    return make_policy("reinforce", _reinforce, {}, policy)


def _reinforce(stats: Stats, batch: Batch, rollout: Rollout | None) -> Tensor:
    advantages = weighted(batch["advantages"], stats, batch, rollout)
    # an advantage of 0 gives 0, even where the log-probability is -inf
    return -advantages * torch.where(advantages == 0, 0.0, stats.logprob)


@once
def grpo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    dual_clip: float | None = None,
    ratio_clamp: float | None = 20.0,
    **policy: Any,
) -> Losses:
    """``-torch.min(r * A, r.clamp(1 - clip_low, 1 + clip_high) * A)``: the clipped surrogate of PPO and GRPO.

    Fields: advantages [tokens], old_logprobs [tokens] (without them r = 1 with the gradient of the ratio).
    A ratio exactly at a bound keeps its gradient. ``clip_low`` is at most 1; 1 clips nothing.
    ``delta``: two-sided clip: r becomes ``min(r, delta)`` in the unclipped branch.
    ``dual_clip`` c > 1: for A < 0 the value is at most ``-c A``. It equals ``delta = c`` for c >= 1 + clip_high; only
    one of the two can be given.
    ``ratio_clamp`` c: the log-ratio is clamped to [-c, c] before exp, without gradient outside; None: no clamp. GRPO,
    Dr. GRPO, DAPO and BNPO differ in normalisers only: ``chunked_head.weights``. ``policy``: ``PolicyOptions``.
    """
    clip = checked_clip("losses.grpo", clip_low, clip_high, delta if dual_clip is None else None)
    if delta is not None and dual_clip is not None:
        raise ValueError("losses.grpo takes delta or dual_clip, which bound the same ratio, not both; leave one out")
    if dual_clip is not None:
        clip["ceiling"] = bound("losses.grpo", "dual_clip", dual_clip, 1.0, open_=True)
    options = {**clip, "ratio_clamp": ratio_clamp}
    return make_policy("grpo", _grpo, options, policy)


def _grpo(stats: Stats, batch: Batch, ratio_clamp: float | None, rollout: Rollout | None, **clip: Any) -> Tensor:
    advantages = weighted(batch["advantages"], stats, batch, rollout)
    log_ratio = clamped(token_log_ratio(stats, batch), ratio_clamp)
    return -advantages * clipped_ratio(log_ratio, advantages, **clip)


@once
def cispo(
    clip_high: float = 4.0, clip_low: float | None = None, ratio_clamp: float | None = 20.0, **policy: Any
) -> Losses:
    """``-r.clamp(max=1 + clip_high).detach() * A * logprob``: the clipped ratio is a detached factor, so that no token
    loses its gradient (MiniMax-M1, arXiv 2506.13585).

    Fields: advantages [tokens], old_logprobs [tokens] (without them r = 1). ``clip_low``: the ratio is at least
    1 - clip_low; None: no lower bound. ``ratio_clamp``: see ``grpo``. ``policy``: ``PolicyOptions``.
    """
    high = 1.0 + bound("losses.cispo", "clip_high", clip_high)
    low = None if clip_low is None else 1.0 - number("losses.cispo", "clip_low", clip_low, 0.0, 1.0)
    options = {"low": low, "high": high, "ratio_clamp": ratio_clamp}
    return make_policy("cispo", _cispo, options, policy)


def _cispo(
    stats: Stats, batch: Batch, low: float | None, high: float, ratio_clamp: float | None, rollout: Rollout | None
) -> Tensor:
    advantages = weighted(batch["advantages"], stats, batch, rollout)
    ratio = clamped(token_log_ratio(stats, batch).detach(), ratio_clamp).exp().clamp(min=low, max=high)
    return -ratio * advantages * torch.where(advantages == 0, 0.0, stats.logprob)


@once
def sapo(tau_pos: float = 1.0, tau_neg: float = 1.05, ratio_clamp: float | None = 20.0, **policy: Any) -> Losses:
    """``-A * 4 / tau * torch.sigmoid(tau * (r - 1))`` with ``tau = torch.where(A > 0, tau_pos, tau_neg)``: a soft gate
    in place of the clip (arXiv 2511.20347). On policy its gradient is REINFORCE's.

    Fields: advantages [tokens], old_logprobs [tokens] (without them r = 1). ``ratio_clamp``: see ``grpo``. ``policy``:
    ``PolicyOptions``.
    """
    options = {
        "tau_pos": number("losses.sapo", "tau_pos", tau_pos, 0.0, 1e6, open_=True),
        "tau_neg": number("losses.sapo", "tau_neg", tau_neg, 0.0, 1e6, open_=True),
        "ratio_clamp": ratio_clamp,
    }
    return make_policy("sapo", _sapo, options, policy)


def _sapo(
    stats: Stats, batch: Batch, tau_pos: float, tau_neg: float, ratio_clamp: float | None, rollout: Rollout | None
) -> Tensor:
    advantages = weighted(batch["advantages"], stats, batch, rollout)
    log_ratio = clamped(token_log_ratio(stats, batch), ratio_clamp)
    # for tau above 1e-30 the gate is flat long before r = exp(80); its gradient would overflow with a larger r
    ratio = torch.where(advantages == 0, 0.0, log_ratio).clamp(max=80.0).exp()
    positive, negative = (gate(tau * (ratio - 1)) * (4 / tau) for tau in (tau_pos, tau_neg))
    return -advantages * torch.where(advantages > 0, positive, negative)


# ---- functions that policy losses share


def checked_clip(where: str, clip_low: float, clip_high: float, delta: float | None = None) -> dict[str, Any]:
    """Options of ``clipped_ratio``: the bounds 1 - clip_low and 1 + clip_high, and the ceiling ``delta`` of the ratio
    where A < 0."""
    low, high = 1.0 - number(where, "clip_low", clip_low, 0.0, 1.0), 1.0 + bound(where, "clip_high", clip_high)
    if delta is None:
        return {"low": low, "high": high, "ceiling": None}
    # of the two ceilings, delta and the clip's, the surrogate's min takes the lower for A > 0, the higher for A < 0
    delta = bound(where, "delta", delta, open_=True)
    return {"low": low, "high": min(delta, high), "ceiling": max(delta, high)}


def checked_clamp(where: str, value: float | None, argument: str = "ratio_clamp") -> float | None:
    return None if value is None else bound(where, argument, value, open_=True)


def token_log_ratio(stats: Stats, batch: Batch) -> Tensor:
    """log r of each token [n]. Without old log-probabilities, on policy, its value is 0 and its gradient 1."""
    return stats.logprob - old_logprobs(stats, batch)


def old_logprobs(stats: Stats, batch: Batch) -> Tensor:
    return batch["old_logprobs"] if "old_logprobs" in batch else stats.logprob.detach()


def clipped_ratio(log_ratio: Tensor, advantages: Tensor, low: float, high: float, ceiling: float | None) -> Tensor:
    """The ratio r [n] for which ``-A r`` is the clipped surrogate: at most ``high`` where A > 0; at least ``low`` and
    at most ``ceiling`` where A < 0; 1 where A = 0. A nan stays nan, except where A = 0.

    The logarithm is clamped, not the ratio: the gradient of the latter's clamp would multiply 0 by an infinite ratio.
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
    """Weights [n] of tokens against the mismatch of rollout engine and trainer (``PolicyOptions``), detached."""
    log_ratio = old_logprobs(stats, batch) - batch["rollout_logprobs"]
    if rollout.level == "segment":
        log_ratio = batch.per_token(batch.segment_sum(log_ratio))
    weights = log_ratio.exp()
    if rollout.mode == "truncate":
        return weights.clamp(rollout.least, rollout.most)
    return torch.where((weights < rollout.least) | (weights > rollout.most), 0.0, weights)


def weighted(advantages: Tensor, stats: Stats, batch: Batch, rollout: Rollout | None) -> Tensor:
    """Advantages [n] times rollout weights; 0 where either is 0, even if the other is infinite or nan."""
    return advantages if rollout is None else advantages * rollout_weights(stats, batch, rollout)


def make_policy(
    kind: str,
    function: Any,
    options: dict[str, Any],
    policy: dict[str, Any],
    unit: str | None = None,  # None: a loss of tokens that knows no segments
) -> Losses:
    """A policy loss. ``policy``: the user's ``PolicyOptions``, of which those about rollout weights become one option,
    ``rollout``."""
    where, summand, rollout = f"losses.{kind}", dict(policy), None
    refuse_unknown("losses", kind, policy, PolicyOptions.__annotations__)
    mode, level = summand.pop("rollout", None), summand.pop("rollout_level", "token")
    most, least = summand.pop("rollout_max", None), summand.pop("rollout_min", None)
    choice(where, "rollout", mode, (None, "truncate", "mask"))
    choice(where, "rollout_level", level, ("token", "segment"))
    if mode is not None:
        least = number(where, "rollout_min", 0.0 if least is None else least, 0.0)
        default = 2.0 if mode == "truncate" else 3.0
        most = number(where, "rollout_max", default if most is None else most, least, 1e30)
        rollout = Rollout(mode, level, most, least)
    elif most is not None or least is not None or level != "token":
        raise ValueError(
            f'rollout_level, rollout_max and rollout_min of {where} go with rollout="truncate" or "mask"; pass it too'
        )
    if "ratio_clamp" in options:
        options["ratio_clamp"] = checked_clamp(where, options["ratio_clamp"])
    segments = unit is not None or (rollout is not None and rollout.level == "segment")
    fields = ("advantages", *["segments"] * segments, *["rollout_logprobs"] * (rollout is not None))
    # REINFORCE has no ratio and reads old log-probabilities for its rollout weights only
    optional = () if kind == "reinforce" and rollout is None else ("old_logprobs",)
    return make(
        kind, function, summand, {**options, "rollout": rollout}, fields=fields, optional_fields=optional,
        scope="segment" if segments else "token", unit=unit or "token",
    )  # fmt: skip


ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")


@once
def kl_to_reference(
    estimator: str = "k3",
    bias_correction: bool = False,
    log_ratio_clamp: float | None = 20.0,
    kl_clamp: float | None = None,
    ratio_clamp: float | None = 20.0,
    level: str = "token",
    **summand: Any,
) -> Losses:
    """``d.exp() - d - 1`` with ``d = ref_logprobs - logprob``: an estimate of KL(policy || reference) from the target.

    ``estimator``: "k3" is this, "k1" ``-d``, "abs" ``d.abs()``, "k2" ``d ** 2 / 2``.

    Fields: ref_logprobs [tokens]; for ``bias_correction`` optionally old_logprobs [tokens].
    On samples of the policy, only k2 has the KL's gradient: k1's is 0 on average, and k3's is that of another
    divergence. "k1+", "abs+" and "k3+" have the value of the estimator before the "+", and the gradient of k2.
    ``bias_correction`` multiplies by r = exp(logprob - old_logprobs), which takes a gradient (DeepSeek-V3.2); without
    old_logprobs r is 1 and has that gradient too. With ``level="segment"`` r is exp of the mean log-ratio over the
    token's segment.
    ``log_ratio_clamp`` c clamps d to [-c, c]. ``kl_clamp`` c clamps the value to [-c, c] before ``bias_correction``.
    There is no gradient where a clamp acts, except that ``kl_clamp`` leaves the gradient of a "+". ``ratio_clamp``
    clamps log r, see ``grpo``. ``summand``: ``SummandOptions``; rollout weights do not multiply this loss.
    """
    where = "losses.kl_to_reference"
    choice(where, "estimator", estimator, ESTIMATORS)
    choice(where, "level", level, ("token", "segment"))
    if level == "segment" and not bias_correction:
        raise ValueError(
            f'level="segment" of {where} is of its bias_correction, which is False; pass True, or no level'
        )
    if flag(f"bias_correction of {where}", bias_correction) and estimator.endswith("+"):
        raise ValueError(
            f"bias_correction of {where} corrects the gradient that estimator {estimator!r} replaces; use "
            f"{estimator[:-1]!r} with it"
        )
    options = {
        "estimator": estimator,
        "bias_correction": bias_correction,
        "log_ratio_clamp": checked_clamp(where, log_ratio_clamp, "log_ratio_clamp"),
        "kl_clamp": checked_clamp(where, kl_clamp, "kl_clamp"),
        "ratio_clamp": checked_clamp(where, ratio_clamp),
        "level": level,
    }
    optional = ("old_logprobs",) if bias_correction else ()
    fields = ("ref_logprobs", "segments") if level == "segment" else ("ref_logprobs",)
    scope: Any = level
    return make("kl_to_reference", estimated_kl, summand, options, fields=fields, optional_fields=optional, scope=scope)


def estimated_kl(
    stats: Stats,
    batch: Batch,
    estimator: str,
    bias_correction: bool,
    log_ratio_clamp: float | None,
    kl_clamp: float | None,
    ratio_clamp: float | None,
    level: str = "token",
) -> Tensor:
    d = clamped(batch["ref_logprobs"] - stats.logprob, log_ratio_clamp)
    replaced, estimator = estimator.endswith("+"), estimator.removesuffix("+")
    if kl_clamp is None:
        values = kl_estimate(d, estimator)
    else:
        # found without gradient: outside of the clamp the estimate's slope may be infinite
        value = kl_estimate(d.detach(), estimator)
        outside = ~(value.abs() <= kl_clamp) & ~d.isnan()
        value = torch.where(value.isnan(), kl_clamp, value)  # nan is the difference of two infinities
        unclipped = kl_estimate(torch.where(outside, 0.0, d), estimator)
        values = torch.where(outside, clamped(value, kl_clamp), unclipped)
    if replaced:
        k2 = kl_estimate(d, "k2")
        return values.detach() + (k2 - k2.detach())
    if bias_correction:
        log_ratio = token_log_ratio(stats, batch)
        log_ratio = batch.per_token(batch.segment_mean(log_ratio)) if level == "segment" else log_ratio
        return values * clamped(log_ratio, ratio_clamp).exp()
    return values
