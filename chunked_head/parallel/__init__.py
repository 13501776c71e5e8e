"""Layouts of a call over many GPUs: ranks that hold different rows of the head, or different tokens."""

from .groups import TokenParallel, VocabParallel, shift_targets

__all__ = ["TokenParallel", "VocabParallel", "shift_targets"]
