"""Options of losses and metrics that are refused, by name and with what would do."""

import math
from collections.abc import Callable

import pytest
import torch

from chunked_head import gathered_topk_kl, losses, metrics
from chunked_head.metrics import Metric, MetricValue, merge

ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: losses.cross_entropy(1.1), "label_smoothing of losses.cross_entropy"),
        (lambda: losses.cross_entropy(-0.1), "label_smoothing of losses.cross_entropy"),
        (lambda: losses.cross_entropy(token_scaling=1), "token_scaling of losses.cross_entropy"),
        (lambda: losses.cross_entropy(class_weights=[1.0]), "class_weights of losses.cross_entropy"),
        (lambda: losses.cross_entropy(class_weights=torch.ones(2, 2)), r"shape \(2, 2\)"),
        (lambda: losses.cross_entropy(class_weights=torch.ones(3).long()), "torch.int64"),
        (lambda: losses.cross_entropy(class_weights=torch.ones(3).requires_grad_()), "requires_grad=True"),
        (lambda: losses.focal(-1.0), "gamma of losses.focal"),
        (lambda: losses.focal(alpha=-0.5), "alpha of losses.focal"),
        (lambda: losses.focal(alpha=torch.ones(1, 3)), "alpha of losses.focal"),
        (lambda: losses.grpo(delta=0.0), "delta of losses.grpo"),
        (lambda: losses.grpo(dual_clip=1.0), "dual_clip of losses.grpo"),
        (lambda: losses.grpo(delta=4.0, dual_clip=3.0), "delta or dual_clip"),
        (lambda: losses.cispo(0.3, bounds="raw"), "clip_high .* of losses.cispo"),
        (lambda: losses.dpo(variant="kto"), "variant of losses.dpo must be one of 'sigmoid'"),
        (lambda: losses.cpo(variant="robust"), "variant of losses.cpo must be one of"),
        (lambda: losses.grpo(ratio_clamp=0.0), "ratio_clamp of losses.grpo"),
        (lambda: losses.sapo(tau_pos=0.0), "tau_pos of losses.sapo"),
        (lambda: losses.grpo(rollout="mask", rollout_min=4.0), "rollout_max of losses.grpo"),
        (lambda: losses.grpo(rollout_max=4.0), "rollout_max .* of losses.grpo go with"),
        (lambda: losses.kl_to_reference("k3+", True), "bias_correction of losses.kl_to_reference"),
        (lambda: losses.kl_to_reference("k3", 1), "bias_correction of losses.kl_to_reference"),
        (lambda: losses.kl_to_reference(kl_clamp=-1.0), "kl_clamp of losses.kl_to_reference"),
        (lambda: losses.dpo(beta=0.0), "beta of losses.dpo must be a number in"),
        (lambda: losses.dpo(variant="exo_pair"), "must be between 0 and 1 for 'exo_pair'"),
        (lambda: losses.dpo(variant="robust", label_smoothing=0.5), "must be below 0.5 for 'robust'"),
        (lambda: losses.dpo(variant="hinge", label_smoothing=0.1), "does not apply to variant 'hinge'"),
        (lambda: losses.dpo(variant="discopop", discopop_tau=0.0), "discopop_tau of losses.dpo"),
        (lambda: losses.dpo(token_weights="token_weights"), "values are per pair"),
        (lambda: losses.orpo(beta=-1.0), "beta of losses.orpo must be a number"),
        (lambda: losses.kto(desirable_weight=-1.0), "desirable_weight of losses.kto must be a number"),
        (lambda: losses.forward_kl(temperature=0), "for T = 0 train on the argmax"),
        (lambda: losses.forward_kl(temperature=0, t_squared=True), "for T = 0 train on the teacher's argmax"),
        (lambda: losses.forward_kl(teacher_temperature=0), "for T = 0 train on the teacher's argmax"),
        (lambda: losses.tvd(teacher_temperature=-1.0), "teacher_temperature of losses.tvd must be a number"),
        (lambda: losses.tvd(teacher_temperature=math.inf), "must be a positive number, got inf"),
        (lambda: losses.reverse_kl(teacher_softcap=0.0), "teacher_softcap of losses.reverse_kl must be a pos"),
        (lambda: losses.reverse_kl(t_squared=True), "t_squared of losses.reverse_kl needs the loss's own"),
        (lambda: losses.jsd(1.5), "beta of losses.jsd must be a number in"),
        (lambda: losses.topk_kl(beta=-0.1), "beta of losses.topk_kl must be a number in"),
        (lambda: losses.topk_kl(normalize="vocab", teacher_temperature=2.0), "pass teacher_renormalize=True"),
        (lambda: losses.topk_kl(teacher_temperature=0.0), "teacher_temperature of losses.topk_kl must be a pos"),
        (lambda: gathered_topk_kl(ONES, ONES), "lse is needed with normalize='tail'"),
        (
            lambda: gathered_topk_kl(ONES, torch.ones(2, 4), normalize="topk"),
            r"teacher_logprobs must have shape \(2, 3\), got \(2, 4\)",
        ),
        (
            lambda: gathered_topk_kl(ONES, ONES, normalize="topk", reduction="sum", normalizer=2.0),
            "normalizer goes with",
        ),
        (lambda: gathered_topk_kl(ONES.long(), ONES, normalize="topk"), "floating-point"),
        (
            lambda: gathered_topk_kl(ONES, ONES, normalize="topk", temperature=0.0),
            "temperature of losses.gathered_topk_kl must be a positive number",
        ),
        (lambda: metrics.entropy("max", weighting="segment"), "weighting of metrics.entropy"),
        (lambda: metrics.ratio(level="segment", weighting="segment"), "weighting of metrics.ratio"),
        (lambda: metrics.ratio(ratio_clamp=-1.0), "ratio_clamp of metrics.ratio"),
        (lambda: metrics.effective_sample_size(weighting="segment"), "metrics.effective_sample_size"),
        (lambda: metrics.entropy(temperature=0), "temperature of metrics.entropy"),
        (lambda: Metric("mine", max, unit="segment"), 'scope="segment"'),
        (lambda: merge(MetricValue("max"), MetricValue("min")), "cannot be merged"),
    ],
)
def test_wrong_options(make: Callable[[], object], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        make()
