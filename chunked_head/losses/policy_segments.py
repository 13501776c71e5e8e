"""Policy-gradient losses with a ratio per segment: ``gspo``, ``gmpo``, ``rloo`` and ``vespo``."""

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from ..core.checks import bound, choice, number
from .base import Losses, sharing_results
from .batch import Batch, Stats, clamped
from .policy import (
    PolicyOptions,
    Rollout,
    checked_clip,
    clipped_ratio,
    make_policy,
    rollout_weights,
    token_log_ratio,
    weighted_advantages,
)


@sharing_results
def gspo(
    clip_low: float = 0.2,  # the clipped ratio is at least 1 - clip_low
    clip_high: float = 0.2,  # the clipped ratio is at most 1 + clip_high
    weighting: str = "segment",  # "segment" or "token": what has one value
    level: str = "segment",  # "segment" or "token": what has one ratio
    delta: float | None = None,  # upper bound of the ratio
    ratio_clamp: float | None = 20.0,  # bound of the log-ratio's magnitude
    **policy: Unpack[PolicyOptions],
) -> Losses:
    """``-torch.min(R * A_s, R.clamp(1 - clip_low, 1 + clip_high) * A_s)`` per segment, with
    ``R = segment_mean(logprob - old_logprobs).exp()`` and ``A_s = segment_mean(A)`` (arXiv 2507.18071).

    Fields: segments [tokens] int, advantages [tokens], old_logprobs [tokens] (without them R = 1, with a gradient).
    ``weighting``: "segment": one value per segment, and the mean is over segments with a token that counts.
    "token": the segment's value at each of its tokens, and the mean is over tokens. Tokens of segment -1 have value 0,
    and count in the mean over tokens.
    ``level``: "segment", or "token" for GSPO-token: ``R_t = sg(R) exp(logprob - sg(logprob))`` (sg: without gradient)
    with each token's advantage; for ``weighting="segment"`` a segment's value is the mean over its tokens.
    ``delta``: the two-sided clip of ``grpo``. ``ratio_clamp=c``: log R is clamped to [-c, c], without gradient where
    the clamp acts. The paper clips at 3e-4 and 4e-4.
    """
    options = {
        **checked_clip("losses.gspo", clip_low, clip_high, delta),
        "weighting": choice("losses.gspo", "weighting", weighting, ("segment", "token")),
        "level": choice("losses.gspo", "level", level, ("segment", "token")),
        "ratio_clamp": ratio_clamp,
    }
    return make_policy("gspo", _gspo, options, policy, unit=weighting)


def _gspo(
    stats: Stats,
    batch: Batch,
    weighting: str,  # "segment" or "token": what has one value
    level: str,  # "segment" or "token": what has one ratio
    ratio_clamp: float | None,
    rollout: Rollout | None,
    **clip_options: Any,
) -> Tensor:
    log_ratio = batch.segment_mean(token_log_ratio(stats, batch))
    if level == "token":
        advantages = weighted_advantages(batch["advantages"], stats, batch, rollout)
        advantages = torch.where(batch["segments"] >= 0, advantages, 0.0)
        # the value of log R, with the gradient of each token's log-probability
        log_ratio = batch.per_token(log_ratio).detach() + (stats.logprob - stats.logprob.detach())
        values = -advantages * clipped_ratio(clamped(log_ratio, ratio_clamp), advantages, **clip_options)
        return values if weighting == "token" else batch.segment_mean(values)
    if weighting == "segment":
        advantages = _weighted_segment_means(stats, batch, rollout)
    else:
        advantages = weighted_advantages(
            batch.per_token(batch.segment_mean(batch["advantages"])), stats, batch, rollout
        )
        log_ratio = batch.per_token(log_ratio)
    return -advantages * clipped_ratio(clamped(log_ratio, ratio_clamp), advantages, **clip_options)


@sharing_results
def gmpo(
    clip_low: float = 0.4, clip_high: float = 0.4, ratio_clamp: float | None = 20.0, **policy: Unpack[PolicyOptions]
) -> Losses:
    """``-A_s * segment_mean(clipped).exp()`` per segment, with ``A_s = segment_mean(A)`` and ``clipped =
    torch.where(per_token(A_s) > 0, r.log().clamp(max=clip_high), r.log().clamp(min=-clip_low))``: the geometric mean of
    ratios, each clipped from above for a positive advantage of its segment, else from below (arXiv 2507.20673).

    Fields: segments [tokens] int, advantages [tokens], old_logprobs [tokens] (without them r = 1, with the gradient of
    ``logprob``). ``ratio_clamp=c``: the tokens' log-ratios are clamped to [-c, c] first.
    """
    options = {
        "clip_low": bound("losses.gmpo", "clip_low", clip_low),
        "clip_high": bound("losses.gmpo", "clip_high", clip_high),
        "ratio_clamp": ratio_clamp,
    }
    return make_policy("gmpo", _gmpo, options, policy, unit="segment")


def _gmpo(
    stats: Stats, batch: Batch, clip_low: float, clip_high: float, ratio_clamp: float | None, rollout: Rollout | None
) -> Tensor:
    advantages = _weighted_segment_means(stats, batch, rollout)
    token_advantages = batch.per_token(advantages)
    log_ratio = clamped(token_log_ratio(stats, batch), ratio_clamp)
    # a ratio exactly at its bound keeps its gradient; torch.clamp's is 1 at a bound before torch 2.14, and 0 from it on
    upper_clipped = torch.where(log_ratio > clip_high, clip_high, log_ratio)
    lower_clipped = torch.where(log_ratio < -clip_low, -clip_low, log_ratio)
    # for an advantage of 0 the value is 0 without gradient
    log_ratio = torch.where(token_advantages > 0, upper_clipped, torch.where(token_advantages < 0, lower_clipped, 0.0))
    return -advantages * batch.segment_mean(log_ratio).exp()


@sharing_results
def rloo(
    clip_low: float = 0.2,  # the clipped ratio is at least 1 - clip_low
    clip_high: float = 0.2,  # the clipped ratio is at most 1 + clip_high
    delta: float | None = None,  # upper bound of the ratio
    ratio_clamp: float | None = 20.0,  # bound of the log-ratio's magnitude
    **policy: Unpack[PolicyOptions],
) -> Losses:
    """``-torch.min(R * A_s, R.clamp(1 - clip_low, 1 + clip_high) * A_s)`` per segment, with
    ``R = segment_sum(logprob - old_logprobs).exp()``, the ratio of complete answers, and ``A_s = segment_mean(A)``
    (arXiv 2402.14740, as in TRL's trainer).

    ``advantages`` are leave-one-out advantages, which the caller computes.
    Fields: segments [tokens] int, advantages [tokens], old_logprobs [tokens] (without them R = 1, with a gradient).
    ``delta``: the two-sided clip of ``grpo``. ``ratio_clamp=c``: log R, the sum over tokens, is clamped to [-c, c].
    """
    clip_options = checked_clip("losses.rloo", clip_low, clip_high, delta)
    options = {**clip_options, "ratio_clamp": ratio_clamp}
    return make_policy("rloo", _rloo, options, policy, unit="segment")


def _rloo(
    stats: Stats, batch: Batch, ratio_clamp: float | None, rollout: Rollout | None, **clip_options: Any
) -> Tensor:
    advantages = _weighted_segment_means(stats, batch, rollout)
    log_ratio = clamped(batch.segment_sum(token_log_ratio(stats, batch)), ratio_clamp)
    return -advantages * clipped_ratio(log_ratio, advantages, **clip_options)


MIN_SEGMENT_RATIO = 1e-8  # lower bound of the ratio w of a segment in VESPO, as in TRL


@sharing_results
def vespo(
    k_pos: float = 2.0,  # k where A >= 0
    lambda_pos: float = 3.0,  # l where A >= 0
    k_neg: float = 3.0,  # k where A < 0
    lambda_neg: float = 2.0,  # l where A < 0
    ratio_clamp: float = 20.0,  # bound of the log-ratio's magnitude
    **policy: Unpack[PolicyOptions],
) -> Losses:
    """``-phi.detach() * A * logprob`` with ``phi = w ** k * (l * (1 - w)).exp()``, ``k = torch.where(A >= 0, k_pos,
    k_neg)`` and ``l = torch.where(A >= 0, lambda_pos, lambda_neg)``, where ``w = per_token(segment_sum(logprob -
    old_logprobs).exp())`` is the ratio of the token's segment: a soft bound in place of the clip (VESPO, arXiv
    2602.10693, as in TRL).

    There is one value per token, 0 for tokens of segment -1. Lambdas below 1e-4 count as 1e-4. ``ratio_clamp=c``: a
    token's log-ratio is clamped to [-c, c], and log w to [log 1e-8, c]. Rollout weights (``rollout_level="token"``
    only) do not multiply the value: their logarithms are added to log w, with the same clamps. Fields: segments
    [tokens] int, advantages [tokens], old_logprobs [tokens] (without them w = 1).
    """
    if policy.get("rollout_level", "token") != "token":
        raise ValueError('rollout_level of losses.vespo must be "token": a segment\'s weight is a sum over its tokens')
    options = {
        "k_pos": number("losses.vespo", "k_pos", k_pos, 0.0),
        "lambda_pos": max(1e-4, number("losses.vespo", "lambda_pos", lambda_pos, 0.0)),
        "k_neg": number("losses.vespo", "k_neg", k_neg, 0.0),
        "lambda_neg": max(1e-4, number("losses.vespo", "lambda_neg", lambda_neg, 0.0)),
        "ratio_clamp": bound("losses.vespo", "ratio_clamp", ratio_clamp, is_open=True),
    }
    return make_policy("vespo", _vespo, options, policy, unit="token")


def _vespo(
    stats: Stats,
    batch: Batch,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
    ratio_clamp: float,
    rollout: Rollout | None,
) -> Tensor:
    advantages, min_log_weight = batch["advantages"], math.log(MIN_SEGMENT_RATIO)
    log_ratio = clamped(token_log_ratio(stats, batch).detach(), ratio_clamp)
    if rollout is not None:
        log_ratio = log_ratio + rollout_weights(stats, batch, rollout).log().clamp(min_log_weight, ratio_clamp)
    # a ratio beyond e^80 has a weight of 0 and may be infinite
    log_w = batch.per_token(batch.segment_sum(log_ratio).clamp(min_log_weight, min(ratio_clamp, 80.0)))
    log_phi = torch.where(
        advantages >= 0,
        k_pos * log_w - lambda_pos * log_w.expm1(),
        k_neg * log_w - lambda_neg * log_w.expm1(),
    )
    is_weighted = (batch["segments"] >= 0) & (advantages != 0)
    # phi alone may overflow fp32 where its product with the advantage does not
    root_of_phi = (0.5 * log_phi).exp()
    return -torch.where(is_weighted, root_of_phi * advantages * root_of_phi, 0.0) * torch.where(
        is_weighted, stats.logprob, 0.0
    )


def _weighted_segment_means(stats: Stats, batch: Batch, rollout: Rollout | None) -> Tensor:
    """Mean advantages [num_segments] of segments, multiplied by mean rollout weights unless ``rollout`` is None."""
    advantages = batch.segment_mean(batch["advantages"])
    return advantages if rollout is None else advantages * batch.segment_mean(rollout_weights(stats, batch, rollout))
