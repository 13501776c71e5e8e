"""The losses: functions that return ``Losses``, which can be added, subtracted and multiplied by numbers.
docs/losses.md compares each with the loss of the same name in other libraries."""

from ..core.checks import answer_names
from .base import FIELDS, Field, Losses, Summand, Teacher
from .distillation import forward_kl, jsd, lk, reverse_kl, topk_kl, tvd
from .label import cross_entropy, entropy, focal, poly1, unlikelihood, z_loss
from .policy import cispo, grpo, kl_to_reference, reinforce, sapo
from .policy_segments import gmpo, gspo, rloo, vespo
from .preference import DPO_VARIANTS, cpo, dpo, kto, orpo, simpo
from .sums import divergence, vocabulary_sum
from .user import custom

__all__ = [
    "FIELDS", "Field", "Losses", "Summand", "Teacher", "cispo", "cpo", "cross_entropy", "custom", "divergence", "dpo",
    "entropy", "focal", "forward_kl", "gmpo", "grpo", "gspo", "jsd", "kl_to_reference", "kto", "lk", "orpo", "poly1",
    "reinforce", "reverse_kl", "rloo", "sapo", "simpo", "topk_kl", "tvd", "unlikelihood", "vespo",
    "vocabulary_sum", "z_loss",
]  # fmt: skip

answer_names(__name__, {
    "losses.grpo(), with the critic's advantages": "ppo", "losses.grpo(**weights.dr_grpo(...))": "drgrpo",
    "losses.grpo(clip_high=0.28, **weights.token_mean(total))": "dapo", "losses.grpo(rollout='truncate')": "tis",
    "losses.reinforce()": "policygradient pg", "losses.cross_entropy()": "crossentropyloss ce nll nllloss sft",
    "losses.cross_entropy(label_smoothing=...)": "labelsmoothing", "losses.jsd()": "js gkd",
    "losses.cross_entropy(token_scaling=True)": "dft", "losses.topk_kl()": "topk",
    "losses.forward_kl(), reverse_kl() or jsd() of a teacher, losses.kl_to_reference() of a reference's tokens":
        "kl kldiv kldivergence kld distillation",
    "losses.simpo(alpha=...)": "alphapo", "losses.dpo(label_smoothing=...)": "cdpo",
    **{f"losses.dpo(variant={variant!r})": variant.partition("_")[0] for variant in DPO_VARIANTS[1:]},
})  # fmt: skip
