"""The losses: functions that return sums of losses, to be added, subtracted and multiplied by numbers. docs/losses.md
says what other libraries have under these names, and where they differ."""

from typing import TYPE_CHECKING

from ..core.checks import hints_of
from .base import FIELDS, Field, Losses, Summand, Teacher
from .distillation import forward_kl, jsd, lk, reverse_kl, topk_kl, tvd
from .label import cross_entropy, entropy, focal, poly1, unlikelihood, z_loss
from .policy import cispo, grpo, kl_to_reference, reinforce, sapo
from .policy_segments import gmpo, gspo, rloo, vespo
from .preference import cpo, dpo, kto, orpo, simpo
from .sums import divergence, vocabulary_sum
from .user import custom

__all__ = [
    "FIELDS", "Field", "Losses", "Summand", "Teacher", "cispo", "cpo", "cross_entropy", "custom", "divergence", "dpo",
    "entropy", "focal", "forward_kl", "gmpo", "grpo", "gspo", "jsd", "kl_to_reference", "kto", "lk", "orpo", "poly1",
    "reinforce", "reverse_kl", "rloo", "sapo", "simpo", "topk_kl", "tvd", "unlikelihood", "vespo",
    "vocabulary_sum", "z_loss",
]  # fmt: skip

CROSS_ENTROPY = "that is losses.cross_entropy()"
DENSE = "losses.forward_kl(), reverse_kl() and jsd() are of a teacher, losses.kl_to_reference() of a reference's tokens"
if not TYPE_CHECKING:  # a type checker would take every name of a module with ``__getattr__``
    __getattr__ = hints_of(__name__, __all__, {
        "ppo": "PPO's clipped loss, with the critic's advantages, is losses.grpo()",
        "dapo": "that is losses.grpo(clip_high=0.28, **weights.token_mean(total))",
        "drgrpo": "that is losses.grpo(**weights.dr_grpo(...))",
        "crossentropyloss": CROSS_ENTROPY, "ce": CROSS_ENTROPY, "nll": CROSS_ENTROPY, "nllloss": CROSS_ENTROPY,
        "sft": CROSS_ENTROPY, "labelsmoothing": "that is losses.cross_entropy(label_smoothing=...)",
        "dft": "that is losses.cross_entropy(token_scaling=True)", "policygradient": "that is losses.reinforce()",
        "pg": "that is losses.reinforce()", "kl": DENSE, "kldiv": DENSE, "kldivergence": DENSE, "kld": DENSE,
        "distillation": DENSE, "gkd": "that is losses.jsd(beta)", "js": "that is losses.jsd()",
        "topk": "that is losses.topk_kl()", "alphapo": "that is losses.simpo(alpha=...)",
        "cdpo": "that is losses.dpo(label_smoothing=...)", "tis": "that is losses.grpo(rollout='truncate')",
        **{name: f"that is losses.dpo(variant={variant!r})" for name, variant in {
            "ipo": "ipo", "hinge": "hinge", "slic": "hinge", "robustdpo": "robust", "exo": "exo_pair",
            "nca": "nca_pair", "bco": "bco_pair", "sppo": "sppo_hard", "apo": "apo_zero", "discopop": "discopop",
            "aot": "aot",
        }.items()},
    })  # fmt: skip
