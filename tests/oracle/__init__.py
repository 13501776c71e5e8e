"""The oracle: each loss on full logits, written for the eye rather than the machine, with its row in the tests."""

from . import distillation, label, policy, preference  # noqa: F401
