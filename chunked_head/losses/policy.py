"""Losses of policy gradients: functions of the target's log-probability, advantages and older log-probabilities.

``r = exp(logprob - old_logprobs)`` throughout, ``A`` the advantages, signs those of a loss to be minimised. Entropy
bonus and KL to a reference are summands of their own. Normalisers (GRPO, Dr. GRPO, DAPO ...): ``chunked_head.weights``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch import Batch
from ..loss_stats import Stats
from .base import Losses, SummandOptions, choice, make, number


class PolicyOptions(SummandOptions, total=False):
    """What every policy loss but ``kl_to_reference`` takes beside its own options.

    ``rollout``: weights against the mismatch of rollout engine and trainer, ``v = exp(old_logprobs -
    rollout_logprobs)``, detached factors of the loss's values (of no other summand); without ``old_logprobs`` the
    detached ``logprob`` stands for them. "truncate" clamps v to [rollout_min, rollout_max], "mask" takes 0 for a v
    outside; a token so masked stays in every count and denominator (verl's rejection masks leave it out: put those into
    ``batch["mask"]``). None, the default: no weights.
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


def reinforce(**policy: Any) -> Losses:
    """``-A logprob``: REINFORCE, and what every clipped loss is on policy.

    Fields: advantages [tokens]; with ``rollout``, rollout_logprobs and optionally old_logprobs. As GPG in verl. An
    importance ratio to the old policy as a detached factor, PipelineRL's form, is ``cispo``.
    ``policy``: ``PolicyOptions``.
    """
    return _make("reinforce", _reinforce, {}, policy)


def _reinforce(stats: Stats, batch: Batch, rollout: Rollout | None) -> Tensor:
    advantages = batch["advantages"]
    # a log-probability of -inf must not meet an advantage of 0
    values = -advantages * torch.where(advantages == 0, 0.0, stats.logprob)
    return _weighted(values, stats, batch, rollout)


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
    0.2 is everyone's default. ``policy``: ``PolicyOptions``.
    """
    low, high = _clips("grpo", clip_low, clip_high)
    ceiling = None
    if delta is not None and dual_clip is not None:
        raise ValueError("losses.grpo takes delta or dual_clip, which bound the same ratio, not both")
    if delta is not None:
        # clip(r) caps what the min sees of A > 0 and stays a floor of what it sees of A < 0
        delta = number("grpo", "delta", delta, 0.0, open_=True)
        ceiling, high = max(delta, high), min(delta, high)
    if dual_clip is not None:
        ceiling = number("grpo", "dual_clip", dual_clip, 1.0, open_=True)
    options = {"low": low, "high": high, "ceiling": ceiling, "ratio_clamp": _ratio_clamp("grpo", ratio_clamp)}
    return _make("grpo", _grpo, options, policy)


def _grpo(
    stats: Stats,
    batch: Batch,
    low: float,
    high: float,
    ceiling: float | None,
    ratio_clamp: float | None,
    rollout: Rollout | None,
) -> Tensor:
    advantages = batch["advantages"]
    log_ratio = _clamped(_log_ratio(stats, batch), ratio_clamp)
    values = -advantages * _clipped_ratio(log_ratio, advantages, low, high, ceiling)
    return _weighted(values, stats, batch, rollout)


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
    choice("cispo", "bounds", bounds, ("offset", "raw"))
    if bounds == "offset":
        high = 1.0 + number("cispo", "clip_high", clip_high, 0.0)
        low = None if clip_low is None else 1.0 - number("cispo", "clip_low", clip_low, 0.0, 1.0)
    else:
        high = number("cispo", 'clip_high (bounds="raw")', clip_high, 1.0)
        low = None if clip_low is None else number("cispo", 'clip_low (bounds="raw")', clip_low, 0.0, 1.0)
    options = {"low": low, "high": high, "ratio_clamp": _ratio_clamp("cispo", ratio_clamp)}
    return _make("cispo", _cispo, options, policy)


def _cispo(
    stats: Stats, batch: Batch, low: float | None, high: float, ratio_clamp: float | None, rollout: Rollout | None
) -> Tensor:
    advantages = batch["advantages"]
    ratio = _clamped(_log_ratio(stats, batch).detach(), ratio_clamp).exp().clamp(min=low, max=high)
    values = -ratio * advantages * torch.where(advantages == 0, 0.0, stats.logprob)
    return _weighted(values, stats, batch, rollout)


def sapo(tau_pos: float = 1.0, tau_neg: float = 1.05, ratio_clamp: float | None = 20.0, **policy: Any) -> Losses:
    """``-A 4 / tau sigmoid(tau (r - 1))``, tau = tau_pos where A > 0, else tau_neg: a soft gate in place of the clip
    (arXiv 2511.20347). On policy its gradient is REINFORCE's.

    Fields: advantages [tokens], old_logprobs [tokens] (without them r = 1). Defaults: the paper's, TRL's and Liger's.
    ``ratio_clamp``: see ``grpo``. TRL averages it as GRPO: ``weights.sequence_mean``. ``policy``: ``PolicyOptions``.
    """
    options = {
        "tau_pos": number("sapo", "tau_pos", tau_pos, 0.0, 1e6, open_=True),
        "tau_neg": number("sapo", "tau_neg", tau_neg, 0.0, 1e6, open_=True),
        "ratio_clamp": _ratio_clamp("sapo", ratio_clamp),
    }
    return _make("sapo", _sapo, options, policy)


def _sapo(
    stats: Stats,
    batch: Batch,
    tau_pos: float,
    tau_neg: float,
    ratio_clamp: float | None,
    rollout: Rollout | None,
) -> Tensor:
    advantages = batch["advantages"]
    log_ratio = _clamped(_log_ratio(stats, batch), ratio_clamp)
    # for temperatures above 1e-30 the gate is flat long before exp(80), whose square would overflow in its gradient
    ratio = torch.where(advantages == 0, 0.0, log_ratio).clamp(max=80.0).exp()
    positive, negative = (torch.sigmoid(tau * (ratio - 1)) * (4 / tau) for tau in (tau_pos, tau_neg))
    values = -advantages * torch.where(advantages > 0, positive, negative)
    return _weighted(values, stats, batch, rollout)


def gspo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weighting: str = "segment",
    level: str = "segment",
    ratio_clamp: float | None = 20.0,
    **policy: Any,
) -> Losses:
    """``-min(R A_s, clip(R, 1 - clip_low, 1 + clip_high) A_s)`` per segment s, ``log R`` the mean over s of ``logprob -
    old_logprobs``, ``A_s`` the mean of its advantages (arXiv 2507.18071).

    Fields: segments [tokens] int, advantages [tokens], old_logprobs [tokens] (without them R = 1 with its gradient).
    ``weighting``: "segment", one value per segment, their mean counting segments with a token that counts (the paper,
    TRL, NeMo-RL); "token", a segment's value at each of its tokens (Fast-LLM: long segments weigh more). LUSPO is
    "token" with the number of segments as ``normalizer``. Tokens of segment -1 have value 0; by tokens they count.
    ``level``: "segment"; or "token", GSPO-token (verl's GSPO): ``R_t = sg(R) exp(logprob - sg(logprob))`` with each
    token's own advantage, averaged over the segment by weighting "segment".
    ``ratio_clamp`` c: log R is clamped to [-c, c], without gradient outside (verl: at most 10; others none: None).
    The paper clips at 3e-4 and 4e-4; 0.2 is what TRL, verl and Fast-LLM do unless told. ``policy``: ``PolicyOptions``.
    """
    low, high = _clips("gspo", clip_low, clip_high)
    choice("gspo", "weighting", weighting, ("segment", "token"))
    choice("gspo", "level", level, ("segment", "token"))
    options = {
        "low": low,
        "high": high,
        "weighting": weighting,
        "level": level,
        "ratio_clamp": _ratio_clamp("gspo", ratio_clamp),
    }
    size = _segment_mean_size if weighting == "segment" else _segment_size
    return _make("gspo", _gspo, options, policy, unit=weighting, size=size)


def _gspo(
    stats: Stats,
    batch: Batch,
    low: float,
    high: float,
    weighting: str,
    level: str,
    ratio_clamp: float | None,
    rollout: Rollout | None,
) -> Tensor:
    log_ratio = batch.segment_mean(_log_ratio(stats, batch))
    if level == "token":
        advantages = torch.where(batch["segments"] >= 0, batch["advantages"], 0.0)
        # R's value, each token's own gradient
        log_ratio = batch.per_token(log_ratio).detach() + (stats.logprob - stats.logprob.detach())
        values = -advantages * _clipped_ratio(_clamped(log_ratio, ratio_clamp), advantages, low, high)
        values = _weighted(values, stats, batch, rollout)
        return values if weighting == "token" else batch.segment_mean(values)
    advantages = batch.segment_mean(batch["advantages"])
    values = -advantages * _clipped_ratio(_clamped(log_ratio, ratio_clamp), advantages, low, high)
    if weighting == "token":
        return _weighted(batch.per_token(values), stats, batch, rollout)
    return _weighted_segments(values, stats, batch, rollout)


def gmpo(clip_low: float = 0.4, clip_high: float = 0.4, ratio_clamp: float | None = 20.0, **policy: Any) -> Losses:
    """``-A_s exp(mean over s of clip(log r))``: the geometric mean of ratios, each clipped in log space on the side
    that its segment's advantage pushes to: at most clip_high for A_s > 0, at least -clip_low for A_s < 0 (arXiv
    2507.20673).

    One value per segment; ``A_s`` is the mean of its advantages. Fields: segments [tokens] int, advantages [tokens],
    old_logprobs [tokens] (without them the ratio is 1 with its gradient). 0.4 in log space is the paper's advice.
    ``ratio_clamp`` c: the tokens' log-ratios are clamped to [-c, c] first. ``policy``: ``PolicyOptions``.
    """
    options = {
        "clip_low": number("gmpo", "clip_low", clip_low, 0.0),
        "clip_high": number("gmpo", "clip_high", clip_high, 0.0),
        "ratio_clamp": _ratio_clamp("gmpo", ratio_clamp),
    }
    return _make("gmpo", _gmpo, options, policy, unit="segment", size=_segment_mean_size)


def _gmpo(
    stats: Stats, batch: Batch, clip_low: float, clip_high: float, ratio_clamp: float | None, rollout: Rollout | None
) -> Tensor:
    advantages = batch.segment_mean(batch["advantages"])
    direction = batch.per_token(advantages)
    log_ratio = _clamped(_log_ratio(stats, batch), ratio_clamp)
    upper, lower = log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    # an advantage of 0 has no direction and no gradient
    log_ratio = torch.where(direction > 0, upper, torch.where(direction < 0, lower, 0.0))
    values = -advantages * batch.segment_mean(log_ratio).exp()
    return _weighted_segments(values, stats, batch, rollout)


def rloo(clip_low: float = 0.2, clip_high: float = 0.2, ratio_clamp: float | None = 20.0, **policy: Any) -> Losses:
    """``-min(R A_s, clip(R, 1 - clip_low, 1 + clip_high) A_s)`` per segment s, ``log R`` the sum over s of ``logprob -
    old_logprobs``: the ratio of whole completions (arXiv 2402.14740, as TRL's trainer).

    One value per segment; ``A_s``, the mean of the segment's advantages, is the caller's leave-one-out advantage.
    Fields: segments [tokens] int, advantages [tokens], old_logprobs [tokens] (without them R = 1 with its gradient).
    ``ratio_clamp`` c: log R, the sum, is clamped to [-c, c]. Defaults: TRL's. ``policy``: ``PolicyOptions``.
    """
    low, high = _clips("rloo", clip_low, clip_high)
    options = {"low": low, "high": high, "ratio_clamp": _ratio_clamp("rloo", ratio_clamp)}
    return _make("rloo", _rloo, options, policy, unit="segment", size=_segment_size)


def _rloo(
    stats: Stats, batch: Batch, low: float, high: float, ratio_clamp: float | None, rollout: Rollout | None
) -> Tensor:
    advantages = batch.segment_mean(batch["advantages"])
    log_ratio = _clamped(batch.segment_sum(_log_ratio(stats, batch)), ratio_clamp)
    values = -advantages * _clipped_ratio(log_ratio, advantages, low, high)
    return _weighted_segments(values, stats, batch, rollout)


ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")


def kl_to_reference(
    estimator: str = "k3",
    bias_correction: bool = False,
    log_ratio_clamp: float | None = 20.0,
    kl_clamp: float | None = None,
    ratio_clamp: float | None = 20.0,
    **summand: Any,
) -> Losses:
    """An estimate of KL(policy || reference) from the target alone, with ``d = ref_logprobs - logprob``:
    k1 ``-d``; abs ``|d|``; k2 ``d^2 / 2``; k3 ``e^d - d - 1`` (TRL, Liger; verl's low_var_kl).

    Fields: ref_logprobs [tokens]; for ``bias_correction`` optionally old_logprobs [tokens].
    On samples of the policy, the gradient of k2 alone is that of the KL (k1's vanishes on average, k3's is that of
    another divergence). "k1+", "abs+" and "k3+" have the value of the first and the gradient of k2, as verl's;
    NeMo-RL's default, k3 with the score function, has the gradient of "k3+".
    ``bias_correction``: times r = exp(logprob - old_logprobs), with its gradient (DeepSeek-V3.2; TRL and Liger
    ``use_bias_correction_kl``); r is 1 with its gradient where old_logprobs are missing.
    ``log_ratio_clamp`` c: d is clamped to [-c, c]; ``kl_clamp`` c: the value, before the correction. No gradient where
    a clamp acts, but ``kl_clamp`` leaves the gradient of a "+" (as verl). verl: 20 and 10 (k3); NeMo-RL the same;
    PipelineRL 10 and None; TRL and Liger None and None. The default keeps k3 finite and is out of
    reach of ordinary tokens. ``ratio_clamp``: of log r, see ``grpo``.
    ``summand``: ``SummandOptions``; rollout weights don't apply to it.
    """
    choice("kl_to_reference", "estimator", estimator, ESTIMATORS)
    if not isinstance(bias_correction, bool):
        raise TypeError(f"bias_correction of losses.kl_to_reference must be True or False, got {bias_correction!r}")
    if bias_correction and estimator.endswith("+"):
        raise ValueError(
            f"bias_correction of losses.kl_to_reference corrects the gradient that estimator {estimator!r} replaces; "
            f"use {estimator[:-1]!r} with it"
        )
    options = {
        "estimator": estimator,
        "bias_correction": bias_correction,
        "log_ratio_clamp": _ratio_clamp("kl_to_reference", log_ratio_clamp, "log_ratio_clamp"),
        "kl_clamp": _ratio_clamp("kl_to_reference", kl_clamp, "kl_clamp"),
        "ratio_clamp": _ratio_clamp("kl_to_reference", ratio_clamp),
    }
    optional = ("old_logprobs",) if bias_correction else ()
    fields = ("ref_logprobs",)
    return make("kl_to_reference", _kl_to_reference, options, fields=fields, optional_fields=optional, **summand)


def _kl_to_reference(
    stats: Stats,
    batch: Batch,
    estimator: str,
    bias_correction: bool,
    log_ratio_clamp: float | None,
    kl_clamp: float | None,
    ratio_clamp: float | None,
) -> Tensor:
    d = _clamped(batch["ref_logprobs"] - stats.logprob, log_ratio_clamp)
    k2 = 0.5 * d.square()
    kind = estimator.removesuffix("+")
    if kind == "k1":
        values = -d
    elif kind == "abs":
        values = d.abs()
    else:
        values = k2 if kind == "k2" else torch.expm1(d) - d
    values = _clamped(values, kl_clamp)
    if estimator.endswith("+"):
        return (values - k2).detach() + k2
    if bias_correction:
        return values * _clamped(_log_ratio(stats, batch), ratio_clamp).exp()
    return values


def _log_ratio(stats: Stats, batch: Batch) -> Tensor:
    """log r of each token [n]; on policy, where no old log-probabilities are given, 0 with gradient 1."""
    return stats.logprob - _old(stats, batch)


def _old(stats: Stats, batch: Batch) -> Tensor:
    return batch["old_logprobs"] if "old_logprobs" in batch else stats.logprob.detach()


def _clamped(values: Tensor, bound: float | None) -> Tensor:
    """Within [-bound, bound], no gradient outside, infinite values included."""
    return values if bound is None else values.clamp(-bound, bound)


def _clipped_ratio(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, ceiling: float | None = None
) -> Tensor:
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


def _rollout_weights(stats: Stats, batch: Batch, rollout: Rollout) -> Tensor:
    """One detached weight per token [n]."""
    log_ratio = _old(stats, batch) - batch["rollout_logprobs"]
    if rollout.level == "segment":
        log_ratio = batch.per_token(batch.segment_sum(log_ratio))
    weights = log_ratio.exp()
    if rollout.mode == "truncate":
        return weights.clamp(rollout.least, rollout.most)
    return torch.where((weights < rollout.least) | (weights > rollout.most), 0.0, weights)


def _weighted(values: Tensor, stats: Stats, batch: Batch, rollout: Rollout | None) -> Tensor:
    return values if rollout is None else values * _rollout_weights(stats, batch, rollout)


def _weighted_segments(values: Tensor, stats: Stats, batch: Batch, rollout: Rollout | None) -> Tensor:
    return values if rollout is None else values * batch.segment_mean(_rollout_weights(stats, batch, rollout))


def _size(batch: Batch) -> Tensor:
    return batch["advantages"].abs()


def _segment_size(batch: Batch) -> Tensor:
    # not of A_s: tokens of a GSPO-token segment have gradients where advantages cancel in the mean
    return torch.maximum(_size(batch), batch.per_token(batch.segment_mean(_size(batch))))


def _segment_mean_size(batch: Batch) -> Tensor:
    return _segment_size(batch) / batch.per_token(batch.segment_count()).clamp(min=1.0)


def _make(
    kind: str,
    function: Any,
    options: dict[str, Any],
    policy: dict[str, Any],
    unit: str | None = None,  # None: a loss of tokens that knows no segments
    size: Any = _size,
) -> Losses:
    """The loss with its rollout weights taken out of ``policy``."""
    policy = dict(policy)
    names = ("rollout", "rollout_level", "rollout_max", "rollout_min")
    given = {name: policy.pop(name) for name in names if name in policy}
    rollout = _rollout(kind, **given)
    segments = unit is not None or (rollout is not None and rollout.level == "segment")
    fields = ["advantages"]
    if segments:
        fields.append("segments")
    if rollout is not None:
        fields.append("rollout_logprobs")
    # REINFORCE has no ratio: old log-probabilities are part of its rollout weights only
    optional = () if kind == "reinforce" and rollout is None else ("old_logprobs",)
    return make(
        kind,
        function,
        {**options, "rollout": rollout},
        fields=tuple(fields),
        optional_fields=optional,
        scope="segment" if segments else "token",
        unit=unit or "token",
        size=size,
        **policy,
    )


def _rollout(
    where: str,
    rollout: str | None = None,
    rollout_level: str = "token",
    rollout_max: float | None = None,
    rollout_min: float | None = None,
) -> Rollout | None:
    if rollout is None:
        if rollout_max is not None or rollout_min is not None or rollout_level != "token":
            raise ValueError(f'rollout_level, rollout_max and rollout_min of losses.{where} go with rollout="truncate"')
        return None
    choice(where, "rollout", rollout, ("truncate", "mask"))
    choice(where, "rollout_level", rollout_level, ("token", "segment"))
    if rollout_max is None:
        rollout_max = 2.0 if rollout == "truncate" else 3.0
    least = 0.0 if rollout_min is None else number(where, "rollout_min", rollout_min, 0.0)
    most = number(where, "rollout_max", rollout_max, least, 1e30)
    return Rollout(rollout, rollout_level, most, least)


def _clips(where: str, clip_low: float, clip_high: float) -> tuple[float, float]:
    """The least and the largest ratio."""
    return 1.0 - number(where, "clip_low", clip_low, 0.0), 1.0 + number(where, "clip_high", clip_high, 0.0)


def _ratio_clamp(where: str, value: float | None, argument: str = "ratio_clamp") -> float | None:
    return None if value is None else number(where, argument, value, 0.0, open_=True)
