"""The losses: functions that return sums of losses, to be added, subtracted and multiplied by numbers. docs/losses.md
says what other libraries have under these names, and where they differ."""

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
