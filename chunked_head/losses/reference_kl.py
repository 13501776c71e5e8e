"""An estimate of the KL divergence to a reference, a summand beside losses of policy gradients."""

from typing import Any

import torch
from torch import Tensor

from ..core.checks import choice, flag
from .base import Losses, make, once
from .batch import Batch, Stats, clamped, kl_estimate
from .policy import checked_clamp, token_log_ratio

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

    ``estimator``: "k3" is this (TRL, Liger; verl's low_var_kl), "k1" ``-d``, "abs" ``d.abs()``, "k2" ``d ** 2 / 2``.

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
    value = torch.where(value.isnan(), bound, value)  # the difference of two infinities
    return torch.where(outside, clamped(value, bound), kl_estimate(torch.where(outside, 0.0, d), estimator))


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
