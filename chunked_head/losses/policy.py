"""Losses of policy gradients: functions of the target's log-probability, advantages and older log-probabilities.

``r = exp(logprob - old_logprobs)`` throughout, ``A`` the advantages, signs those of a loss to be minimised. Entropy
bonus and KL to a reference are summands of their own. Normalisers (GRPO, Dr. GRPO, DAPO ...): ``chunked_head.weights``.
Here are those whose values are per token; those of segments are in ``policy_segments``.
"""

from typing import Any

import torch
from torch import Tensor

from ..core.batch import Batch
from ..core.estimates import clamped, gate, kl_estimate
from ..core.loss_stats import Stats
from ..core.options import bound, choice, flag, number
from .base import Losses, make
from .policy_shared import (
    Rollout,
    checked_clamp,
    checked_clip,
    clipped_ratio,
    make_policy,
    token_log_ratio,
    weighted,
)


def reinforce(**policy: Any) -> Losses:
    """``-A logprob``: REINFORCE, and what every clipped loss is on policy.

    Fields: advantages [tokens]; with ``rollout``, rollout_logprobs and optionally old_logprobs. As GPG in verl. An
    importance ratio to the old policy as a detached factor, PipelineRL's form, is ``cispo``.
    ``policy``: ``PolicyOptions``.
    """
    return make_policy("reinforce", _reinforce, {}, policy)


def _reinforce(stats: Stats, batch: Batch, rollout: Rollout | None) -> Tensor:
    advantages = weighted(batch["advantages"], stats, batch, rollout)
    # a log-probability of -inf must not meet an advantage of 0
    return -advantages * torch.where(advantages == 0, 0.0, stats.logprob)


def grpo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    dual_clip: float | None = None,
    ratio_clamp: float | None = 20.0,
    **policy: Any,
) -> Losses:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``: the clipped surrogate of PPO and GRPO.

    Fields: advantages [tokens], old_logprobs [tokens] (without them r = 1 with the gradient of the ratio).
    ``clip_high`` above ``clip_low`` is DAPO's asymmetric clip (0.28); at a bound the gradient still flows.
    ``delta``: two-sided clip (INTELLECT-2, TRL, Liger): r becomes ``min(r, delta)`` in the unclipped branch.
    ``dual_clip`` c > 1: for A < 0 the value is at most ``-c A`` (verl, default 3 there; OpenRLHF; NeMo-RL). Equal to
    ``delta = c`` where c >= 1 + clip_high; one of the two can be given.
    ``ratio_clamp`` c: the log-ratio is clamped to [-c, c] before exp, without gradient outside (verl: 20; TRL, Liger
    and Fast-LLM have none: None). GRPO, Dr. GRPO, DAPO and BNPO differ in normalisers only: ``chunked_head.weights``.
    0.2 is everyone's default; ``clip_low`` is at most 1, which clips nothing. ``policy``: ``PolicyOptions``.
    """
    clip = checked_clip("losses.grpo", clip_low, clip_high, delta if dual_clip is None else None)
    if delta is not None and dual_clip is not None:
        raise ValueError("losses.grpo takes delta or dual_clip, which bound the same ratio, not both")
    if dual_clip is not None:
        clip["ceiling"] = bound("losses.grpo", "dual_clip", dual_clip, 1.0, open_=True)
    options = {**clip, "ratio_clamp": checked_clamp("losses.grpo", ratio_clamp)}
    return make_policy("grpo", _grpo, options, policy)


def _grpo(stats: Stats, batch: Batch, ratio_clamp: float | None, rollout: Rollout | None, **clip: Any) -> Tensor:
    advantages = weighted(batch["advantages"], stats, batch, rollout)
    log_ratio = clamped(token_log_ratio(stats, batch), ratio_clamp)
    return -advantages * clipped_ratio(log_ratio, advantages, **clip)


def cispo(
    clip_high: float = 4.0,
    clip_low: float | None = None,
    bounds: str = "offset",
    ratio_clamp: float | None = 20.0,
    **policy: Any,
) -> Losses:
    """``-sg(clip(r)) A logprob``: the clipped ratio is a detached factor, so that no token loses its gradient
    (MiniMax-M1, arXiv 2506.13585).

    Fields: advantages [tokens], old_logprobs [tokens] (without them r = 1). No lower bound unless ``clip_low`` is set.
    ``bounds``: "offset" clips r to [1 - clip_low, 1 + clip_high], as the paper, verl, NeMo-RL and PipelineRL's
    reinforce; "raw" to [clip_low, clip_high] itself, as TRL and Liger, where ``epsilon_high`` is the bound. A raw bound
    below 1 would shrink every on-policy gradient and is refused. The default caps r at 5, which TRL advises after
    ScaleRL. ``ratio_clamp``: see ``grpo``. ``policy``: ``PolicyOptions``.
    """
    choice("losses.cispo", "bounds", bounds, ("offset", "raw"))
    if bounds == "offset":
        high = 1.0 + bound("losses.cispo", "clip_high", clip_high)
        low = None if clip_low is None else 1.0 - number("losses.cispo", "clip_low", clip_low, 0.0, 1.0)
    else:
        high = bound("losses.cispo", 'clip_high (bounds="raw")', clip_high, 1.0)
        low = None if clip_low is None else number("losses.cispo", 'clip_low (bounds="raw")', clip_low, 0.0, 1.0)
    options = {"low": low, "high": high, "ratio_clamp": checked_clamp("losses.cispo", ratio_clamp)}
    return make_policy("cispo", _cispo, options, policy)


def _cispo(
    stats: Stats, batch: Batch, low: float | None, high: float, ratio_clamp: float | None, rollout: Rollout | None
) -> Tensor:
    advantages = weighted(batch["advantages"], stats, batch, rollout)
    ratio = clamped(token_log_ratio(stats, batch).detach(), ratio_clamp).exp().clamp(min=low, max=high)
    return -ratio * advantages * torch.where(advantages == 0, 0.0, stats.logprob)


def sapo(tau_pos: float = 1.0, tau_neg: float = 1.05, ratio_clamp: float | None = 20.0, **policy: Any) -> Losses:
    """``-A 4 / tau sigmoid(tau (r - 1))``, tau = tau_pos where A > 0, else tau_neg: a soft gate in place of the clip
    (arXiv 2511.20347). On policy its gradient is REINFORCE's.

    Fields: advantages [tokens], old_logprobs [tokens] (without them r = 1). Defaults: the paper's, TRL's and Liger's.
    ``ratio_clamp``: see ``grpo``. TRL averages it as GRPO: ``weights.sequence_mean``. ``policy``: ``PolicyOptions``.
    """
    options = {
        "tau_pos": number("losses.sapo", "tau_pos", tau_pos, 0.0, 1e6, open_=True),
        "tau_neg": number("losses.sapo", "tau_neg", tau_neg, 0.0, 1e6, open_=True),
        "ratio_clamp": checked_clamp("losses.sapo", ratio_clamp),
    }
    return make_policy("sapo", _sapo, options, policy)


def _sapo(
    stats: Stats, batch: Batch, tau_pos: float, tau_neg: float, ratio_clamp: float | None, rollout: Rollout | None
) -> Tensor:
    advantages = weighted(batch["advantages"], stats, batch, rollout)
    log_ratio = clamped(token_log_ratio(stats, batch), ratio_clamp)
    # for temperatures above 1e-30 the gate is flat long before exp(80), whose square would overflow in its gradient
    ratio = torch.where(advantages == 0, 0.0, log_ratio).clamp(max=80.0).exp()
    positive, negative = (gate(tau * (ratio - 1)) * (4 / tau) for tau in (tau_pos, tau_neg))
    return -advantages * torch.where(advantages > 0, positive, negative)


ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")


def kl_to_reference(
    estimator: str = "k3",
    bias_correction: bool = False,
    log_ratio_clamp: float | None = 20.0,
    kl_clamp: float | None = None,
    ratio_clamp: float | None = 20.0,
    level: str = "token",
    **summand: Any,
) -> Losses:
    """An estimate of KL(policy || reference) from the target alone, with ``d = ref_logprobs - logprob``:
    k1 ``-d``; abs ``|d|``; k2 ``d^2 / 2``; k3 ``e^d - d - 1`` (TRL, Liger; verl's low_var_kl).

    Fields: ref_logprobs [tokens]; for ``bias_correction`` optionally old_logprobs [tokens].
    On samples of the policy, the gradient of k2 alone is that of the KL (k1's vanishes on average, k3's is that of
    another divergence). "k1+", "abs+" and "k3+" have the value of the first and the gradient of k2, as verl's;
    NeMo-RL's default, k3 with the score function, has the gradient of "k3+".
    ``bias_correction``: times r = exp(logprob - old_logprobs), with its gradient (DeepSeek-V3.2; TRL and Liger
    ``use_bias_correction_kl``); r is 1 with its gradient where old_logprobs are missing. With ``level="segment"`` r is
    that of the token's segment, of the mean of its log-ratios (TRL with sequence-level importance sampling).
    ``log_ratio_clamp`` c: d is clamped to [-c, c]; ``kl_clamp`` c: the value, before the correction. No gradient where
    a clamp acts, but ``kl_clamp`` leaves the gradient of a "+" (as verl). verl: 20 and 10 (k3); NeMo-RL the same;
    PipelineRL 10 and None; TRL and Liger None and None. The default keeps k3 finite and is out of
    reach of ordinary tokens. ``ratio_clamp``: of log r, see ``grpo``.
    ``summand``: ``SummandOptions``; rollout weights don't apply to it.
    """
    where = "losses.kl_to_reference"
    choice(where, "estimator", estimator, ESTIMATORS)
    choice(where, "level", level, ("token", "segment"))
    if level == "segment" and not bias_correction:
        raise ValueError(f'level="segment" of {where} is of its bias_correction, which is False')
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


def clamped_estimate(d: Tensor, estimator: str, bound: float | None) -> Tensor:
    """Within [-bound, bound]; outside, found before any gradient is, ``d`` has no part in it: its slope may be
    infinite."""
    if bound is None:
        return kl_estimate(d, estimator)
    value = kl_estimate(d.detach(), estimator)
    outside = ~(value.abs() <= bound) & ~d.isnan()
    value = value.nan_to_num(torch.inf).clamp(-bound, bound)  # the difference of two infinities, too
    return torch.where(outside, value, kl_estimate(torch.where(outside, 0.0, d), estimator))


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
    values = clamped_estimate(d, estimator.removesuffix("+"), kl_clamp)
    if estimator.endswith("+"):
        k2 = kl_estimate(d, "k2")
        return values.detach() + (k2 - k2.detach())
    if bias_correction:
        log_ratio = token_log_ratio(stats, batch)
        log_ratio = batch.per_token(batch.segment_mean(log_ratio)) if level == "segment" else log_ratio
        return values * clamped(log_ratio, ratio_clamp).exp()
    return values
