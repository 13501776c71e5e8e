"""Policy-gradient losses per token: functions of the target's log-probability, advantages and older log-probabilities.

In all docstrings ``r = exp(logprob - old_logprobs)``, and ``A`` are the advantages. Losses are to be minimised. Entropy
bonus and KL to a reference are summands of their own. Normalisers (GRPO, Dr. GRPO, DAPO ...): ``chunked_head.weights``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from ..core.checks import bound, choice, flag, number, refuse_unknown
from .base import Losses, SummandOptions, make, sharing_results
from .batch import Batch, Stats, clamped, gate, kl_estimate


class PolicyOptions(SummandOptions, total=False):
    """Options of every policy loss but ``kl_to_reference``.

    ``rollout``: weights against the mismatch of rollout engine and trainer. The detached factor
    ``v = exp(old_logprobs - rollout_logprobs)`` multiplies the values of this loss, and of no other summand. Without
    ``old_logprobs``, v is computed from the detached ``logprob``. "truncate" clamps v to [rollout_min, rollout_max].
    "mask" sets v outside of that interval to 0; such a token still counts in every denominator. A token of weight 0 has
    value 0, whatever its ratio is. ``rollout=None``, the default: no weights.
    ``rollout_level``: "token" (default), or "segment": all tokens of a segment have the same v, exp of the sum of the
    tokens' log-ratios, and v = 1 for tokens of segment -1. At level "token", a loss with one value per segment is
    multiplied by the mean of v over the segment.
    ``rollout_max``: 2 by default for "truncate", 3 for "mask". ``rollout_min``: 0 by default.
    """

    rollout: str | None
    rollout_level: str
    rollout_max: float | None
    rollout_min: float | None


class Rollout(NamedTuple):
    """Checked options of rollout weights."""

    mode: str  # "truncate" or "mask"
    level: str  # "token" or "segment": what has one weight
    max_weight: float
    min_weight: float


@sharing_results
def reinforce(**policy: Unpack[PolicyOptions]) -> Losses:
    """``-A * logprob``: REINFORCE. On policy (r = 1), all clipped losses have the gradient of REINFORCE.

    Fields: advantages [tokens]; with ``rollout``, rollout_logprobs and optionally old_logprobs.
    """
    return make_policy("reinforce", _reinforce, {}, policy)


def _reinforce(stats: Stats, batch: Batch, rollout: Rollout | None) -> Tensor:
    advantages = weighted_advantages(batch["advantages"], stats, batch, rollout)
    # an advantage of 0 gives 0, even where the log-probability is -inf
    return -advantages * torch.where(advantages == 0, 0.0, stats.logprob)


@sharing_results
def grpo(
    clip_low: float = 0.2,  # the clipped ratio is at least 1 - clip_low
    clip_high: float = 0.2,  # the clipped ratio is at most 1 + clip_high
    delta: float | None = None,  # upper bound of the ratio
    dual_clip: float | None = None,  # c: the value is at most -c * A where A < 0
    ratio_clamp: float | None = 20.0,  # bound of the log-ratio's magnitude
    **policy: Unpack[PolicyOptions],
) -> Losses:
    """``-torch.min(r * A, r.clamp(1 - clip_low, 1 + clip_high) * A)``: the clipped surrogate of PPO and GRPO.

    Fields: advantages [tokens], old_logprobs [tokens] (without them r = 1, with the gradient of ``logprob``).
    A ratio exactly at a bound keeps its gradient. ``clip_low`` is at most 1; 1 clips nothing.
    ``delta``: two-sided clip: in the unclipped product ``r * A``, r is replaced by ``min(r, delta)``.
    ``dual_clip=c`` with c > 1: for A < 0 the value is at most ``-c * A``. For c >= 1 + clip_high, ``delta=c`` has the
    same effect. Only one of ``delta`` and ``dual_clip`` can be passed.
    ``ratio_clamp=c``: the log-ratio is clamped to [-c, c] before exp, without gradient where the clamp acts; None: no
    clamp. GRPO, Dr. GRPO, DAPO and BNPO differ in normalisers only: ``chunked_head.weights``.
    """
    clip_options = checked_clip("losses.grpo", clip_low, clip_high, delta if dual_clip is None else None)
    if delta is not None and dual_clip is not None:
        raise ValueError("losses.grpo takes delta or dual_clip, which bound the same ratio, not both; leave one out")
    if dual_clip is not None:
        clip_options["ceiling"] = bound("losses.grpo", "dual_clip", dual_clip, 1.0, is_open=True)
    options = {**clip_options, "ratio_clamp": ratio_clamp}
    return make_policy("grpo", _grpo, options, policy)


def _grpo(
    stats: Stats, batch: Batch, ratio_clamp: float | None, rollout: Rollout | None, **clip_options: Any
) -> Tensor:
    advantages = weighted_advantages(batch["advantages"], stats, batch, rollout)
    log_ratio = clamped(token_log_ratio(stats, batch), ratio_clamp)
    return -advantages * clipped_ratio(log_ratio, advantages, **clip_options)


@sharing_results
def cispo(
    clip_high: float = 4.0,  # the ratio is at most 1 + clip_high
    clip_low: float | None = None,  # the ratio is at least 1 - clip_low
    ratio_clamp: float | None = 20.0,  # bound of the log-ratio's magnitude
    **policy: Unpack[PolicyOptions],
) -> Losses:
    """``-r.clamp(max=1 + clip_high).detach() * A * logprob``: the clipped ratio is a detached factor, so that no token
    loses its gradient (MiniMax-M1, arXiv 2506.13585).

    Fields: advantages [tokens], old_logprobs [tokens] (without them r = 1). ``clip_low``: the ratio is at least
    1 - clip_low; None: no lower bound. ``ratio_clamp``: see ``grpo``.
    """
    max_ratio = 1.0 + bound("losses.cispo", "clip_high", clip_high)
    min_ratio = None if clip_low is None else 1.0 - number("losses.cispo", "clip_low", clip_low, 0.0, 1.0)
    options = {"min_ratio": min_ratio, "max_ratio": max_ratio, "ratio_clamp": ratio_clamp}
    return make_policy("cispo", _cispo, options, policy)


def _cispo(
    stats: Stats, batch: Batch, min_ratio: float | None, max_ratio: float, ratio_clamp: float | None,
    rollout: Rollout | None,
) -> Tensor:  # fmt: skip
    advantages = weighted_advantages(batch["advantages"], stats, batch, rollout)
    ratio = clamped(token_log_ratio(stats, batch).detach(), ratio_clamp).exp().clamp(min=min_ratio, max=max_ratio)
    return -ratio * advantages * torch.where(advantages == 0, 0.0, stats.logprob)


@sharing_results
def sapo(
    tau_pos: float = 1.0, tau_neg: float = 1.05, ratio_clamp: float | None = 20.0, **policy: Unpack[PolicyOptions]
) -> Losses:
    """``-A * 4 / tau * torch.sigmoid(tau * (r - 1))`` with ``tau = torch.where(A > 0, tau_pos, tau_neg)``: a soft gate
    in place of the clip (arXiv 2511.20347). On policy the gradient is the gradient of ``reinforce``.

    Fields: advantages [tokens], old_logprobs [tokens] (without them r = 1). ``ratio_clamp``: see ``grpo``.
    """
    options = {
        "tau_pos": number("losses.sapo", "tau_pos", tau_pos, 0.0, 1e6, is_open=True),
        "tau_neg": number("losses.sapo", "tau_neg", tau_neg, 0.0, 1e6, is_open=True),
        "ratio_clamp": ratio_clamp,
    }
    return make_policy("sapo", _sapo, options, policy)


def _sapo(
    stats: Stats, batch: Batch, tau_pos: float, tau_neg: float, ratio_clamp: float | None, rollout: Rollout | None
) -> Tensor:
    advantages = weighted_advantages(batch["advantages"], stats, batch, rollout)
    log_ratio = clamped(token_log_ratio(stats, batch), ratio_clamp)
    # for tau above 1e-30 the gate is flat long before r = exp(80); its gradient would overflow with a larger r
    ratio = torch.where(advantages == 0, 0.0, log_ratio).clamp(max=80.0).exp()
    positive_gate, negative_gate = (gate(tau * (ratio - 1)) * (4 / tau) for tau in (tau_pos, tau_neg))
    return -advantages * torch.where(advantages > 0, positive_gate, negative_gate)


# ---- functions that policy losses share


def checked_clip(loss_name: str, clip_low: float, clip_high: float, delta: float | None = None) -> dict[str, Any]:
    """Options of ``clipped_ratio``. ``min_ratio`` is 1 - clip_low. Without ``delta``, ``max_ratio`` is 1 + clip_high,
    and ``ceiling`` is None. With ``delta``, ``max_ratio`` is the smaller number of 1 + clip_high and delta, ``ceiling``
    the larger. TypeError or ValueError for wrong numbers. ``loss_name``: for errors."""
    min_ratio = 1.0 - number(loss_name, "clip_low", clip_low, 0.0, 1.0)
    max_ratio = 1.0 + bound(loss_name, "clip_high", clip_high)
    if delta is None:
        return {"min_ratio": min_ratio, "max_ratio": max_ratio, "ceiling": None}
    # of the two ceilings, delta and the clip's, the surrogate's min takes the lower for A > 0, the higher for A < 0
    delta = bound(loss_name, "delta", delta, is_open=True)
    return {"min_ratio": min_ratio, "max_ratio": min(delta, max_ratio), "ceiling": max(delta, max_ratio)}


def checked_clamp(loss_name: str, value: float | None, argument: str = "ratio_clamp") -> float | None:
    """The bound of a clamp, or None. TypeError or ValueError unless ``value`` is None or a positive number."""
    return None if value is None else bound(loss_name, argument, value, is_open=True)


def token_log_ratio(stats: Stats, batch: Batch) -> Tensor:
    """Logarithms [n] of ratios r. Without the field ``old_logprobs``, log r is 0, with gradient 1 by ``logprob``."""
    return stats.logprob - old_logprobs(stats, batch)


def old_logprobs(stats: Stats, batch: Batch) -> Tensor:
    """The field ``old_logprobs`` [n]; the detached ``logprob`` in a batch without this field."""
    return batch["old_logprobs"] if "old_logprobs" in batch else stats.logprob.detach()


def clipped_ratio(
    log_ratio: Tensor, advantages: Tensor, min_ratio: float, max_ratio: float, ceiling: float | None
) -> Tensor:
    """The ratio r [n] for which ``-A r`` is the clipped surrogate: at most ``max_ratio`` where A > 0; at least
    ``min_ratio`` and at most ``ceiling`` where A < 0; 1 where A = 0. A nan stays nan, except where A = 0.

    The logarithm is clamped rather than the ratio: the gradient of a clamped ratio would multiply 0 by an infinite
    ratio.
    """
    ratio = log_ratio.detach().exp()
    is_above_max = (advantages > 0) & (ratio > max_ratio)
    is_below_min = (advantages < 0) & (ratio < min_ratio)
    has_no_gradient = is_above_max | is_below_min | (advantages == 0)
    if ceiling is not None:
        is_beyond_ceiling = (advantages < 0) & (ratio > ceiling)
        has_no_gradient = has_no_gradient | is_beyond_ceiling
    ratio = torch.where(has_no_gradient, 0.0, log_ratio).exp()
    ratio = torch.where(is_above_max, max_ratio, torch.where(is_below_min, min_ratio, ratio))
    return ratio if ceiling is None else torch.where(is_beyond_ceiling, ceiling, ratio)


def rollout_weights(stats: Stats, batch: Batch, rollout: Rollout) -> Tensor:
    """Detached rollout weights [n] of tokens. ``PolicyOptions`` has the formula."""
    log_ratio = old_logprobs(stats, batch) - batch["rollout_logprobs"]
    if rollout.level == "segment":
        log_ratio = batch.per_token(batch.segment_sum(log_ratio))
    weights = log_ratio.exp()
    if rollout.mode == "truncate":
        return weights.clamp(rollout.min_weight, rollout.max_weight)
    return torch.where((weights < rollout.min_weight) | (weights > rollout.max_weight), 0.0, weights)


def weighted_advantages(advantages: Tensor, stats: Stats, batch: Batch, rollout: Rollout | None) -> Tensor:
    """Advantages [n] times rollout weights [n]; unchanged advantages if ``rollout`` is None."""
    return advantages if rollout is None else advantages * rollout_weights(stats, batch, rollout)


def make_policy(
    kind: str,  # name of the loss
    function: Any,  # (stats, batch, rollout, **options) -> values
    options: dict[str, Any],  # keyword arguments of ``function`` but ``rollout``
    policy_options: Mapping[str, Any],  # the user's ``PolicyOptions``
    unit: str | None = None,  # "token" or "segment", of a loss that reads segments; None: "token", reads no segments
) -> Losses:
    """A policy loss. ``function`` gets the options of rollout weights as a ``Rollout``, or None if there are none.
    TypeError or ValueError for wrong options."""
    loss_name, summand_options, rollout = f"losses.{kind}", dict(policy_options), None
    refuse_unknown("losses", kind, policy_options, PolicyOptions.__annotations__)
    mode, level = summand_options.pop("rollout", None), summand_options.pop("rollout_level", "token")
    max_weight, min_weight = summand_options.pop("rollout_max", None), summand_options.pop("rollout_min", None)
    choice(loss_name, "rollout", mode, (None, "truncate", "mask"))
    choice(loss_name, "rollout_level", level, ("token", "segment"))
    if mode is not None:
        min_weight = number(loss_name, "rollout_min", 0.0 if min_weight is None else min_weight, 0.0)
        default_max_weight = 2.0 if mode == "truncate" else 3.0
        max_weight = number(
            loss_name, "rollout_max", default_max_weight if max_weight is None else max_weight, min_weight, 1e30
        )
        rollout = Rollout(mode, level, max_weight, min_weight)
    elif max_weight is not None or min_weight is not None or level != "token":
        raise ValueError(
            f"rollout_level, rollout_max and rollout_min of {loss_name} go with rollout="
            '"truncate" or "mask"; pass it too'
        )
    if "ratio_clamp" in options:
        options["ratio_clamp"] = checked_clamp(loss_name, options["ratio_clamp"])
    reads_segments = unit is not None or (rollout is not None and rollout.level == "segment")
    fields = ("advantages", *["segments"] * reads_segments, *["rollout_logprobs"] * (rollout is not None))
    # REINFORCE has no ratio and reads old log-probabilities for its rollout weights only
    optional_fields = () if kind == "reinforce" and rollout is None else ("old_logprobs",)
    return make(
        kind, function, summand_options, {**options, "rollout": rollout}, fields=fields,
        optional_fields=optional_fields, scope="segment" if reads_segments else "token", unit=unit or "token",
    )  # fmt: skip


ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")  # of a KL divergence: values of ``estimator``


@sharing_results
def kl_to_reference(
    estimator: str = "k3",  # name of an estimate of the KL divergence
    bias_correction: bool = False,  # the estimate is multiplied by the ratio r
    log_ratio_clamp: float | None = 20.0,  # bound of the magnitude of d
    kl_clamp: float | None = None,  # bound of the estimate's magnitude
    ratio_clamp: float | None = 20.0,  # bound of the magnitude of log r
    level: str = "token",  # "token" or "segment": what has one ratio r
    **summand: Unpack[SummandOptions],
) -> Losses:
    """``d.exp() - d - 1`` with ``d = ref_logprobs - logprob``: an estimate of KL(policy || reference) from the
    target's log-probability.

    ``estimator``: "k3" is the formula above, "k1" ``-d``, "abs" ``d.abs()``, "k2" ``d ** 2 / 2``.

    Fields: ref_logprobs [tokens]; for ``bias_correction`` optionally old_logprobs [tokens]; segments for
    ``level="segment"``, which needs ``bias_correction``.
    For tokens sampled from the policy, only k2 has the gradient of the KL. The gradient of k1 is 0 on average, and k3
    has the gradient of another divergence. "k1+", "abs+" and "k3+" have the value of the estimator before the "+", and
    the gradient of k2. ``bias_correction`` multiplies the value by r = exp(logprob - old_logprobs), which takes a
    gradient (DeepSeek-V3.2). Without ``old_logprobs``, r is 1 with the gradient of ``logprob``. With
    ``level="segment"``, r is exp of the mean log-ratio over the token's segment.
    ``log_ratio_clamp`` c clamps d to [-c, c]. ``kl_clamp`` c clamps the value to [-c, c] before ``bias_correction``.
    There is no gradient where a clamp acts, except that ``kl_clamp`` does not change the gradient of "k1+", "abs+" and
    "k3+". ``ratio_clamp`` clamps log r, see ``grpo``. Rollout weights do not multiply this loss.
    """
    loss_name = "losses.kl_to_reference"
    choice(loss_name, "estimator", estimator, ESTIMATORS)
    choice(loss_name, "level", level, ("token", "segment"))
    if level == "segment" and not bias_correction:
        raise ValueError(
            f'level="segment" of {loss_name} is of its bias_correction, which is False; pass True, or no level'
        )
    if flag(f"bias_correction of {loss_name}", bias_correction) and estimator.endswith("+"):
        raise ValueError(
            f"bias_correction of {loss_name} corrects the gradient that estimator {estimator!r} replaces; use "
            f"{estimator[:-1]!r} with it"
        )
    options = {
        "estimator": estimator,
        "bias_correction": bias_correction,
        "log_ratio_clamp": checked_clamp(loss_name, log_ratio_clamp, "log_ratio_clamp"),
        "kl_clamp": checked_clamp(loss_name, kl_clamp, "kl_clamp"),
        "ratio_clamp": checked_clamp(loss_name, ratio_clamp),
        "level": level,
    }
    optional_fields = ("old_logprobs",) if bias_correction else ()
    fields = ("ref_logprobs", "segments") if level == "segment" else ("ref_logprobs",)
    scope: Any = level
    return make(
        "kl_to_reference", estimated_kl, summand, options, fields=fields, optional_fields=optional_fields, scope=scope
    )


def estimated_kl(
    stats: Stats,
    batch: Batch,
    estimator: str,
    bias_correction: bool,  # the estimate is multiplied by the ratio r
    log_ratio_clamp: float | None,  # bound of the magnitude of ref_logprobs - logprob
    kl_clamp: float | None,  # bound of the estimate's magnitude
    ratio_clamp: float | None,  # bound of the magnitude of log r
    level: str = "token",  # "token" or "segment": what has one ratio r
) -> Tensor:
    log_ratio_to_policy = clamped(batch["ref_logprobs"] - stats.logprob, log_ratio_clamp)
    replaces_gradient, estimator = estimator.endswith("+"), estimator.removesuffix("+")
    if kl_clamp is None:
        values = kl_estimate(log_ratio_to_policy, estimator)
    else:
        # without gradient: where the clamp acts, the estimate's slope may be infinite
        detached_values = kl_estimate(log_ratio_to_policy.detach(), estimator)
        is_outside = ~(detached_values.abs() <= kl_clamp) & ~log_ratio_to_policy.isnan()
        # nan is the difference of two infinities
        detached_values = torch.where(detached_values.isnan(), kl_clamp, detached_values)
        unclamped_values = kl_estimate(torch.where(is_outside, 0.0, log_ratio_to_policy), estimator)
        values = torch.where(is_outside, clamped(detached_values, kl_clamp), unclamped_values)
    if replaces_gradient:
        k2_estimate = kl_estimate(log_ratio_to_policy, "k2")
        return values.detach() + (k2_estimate - k2_estimate.detach())
    if bias_correction:
        log_ratio = token_log_ratio(stats, batch)
        log_ratio = batch.per_token(batch.segment_mean(log_ratio)) if level == "segment" else log_ratio
        return values * clamped(log_ratio, ratio_clamp).exp()
    return values
