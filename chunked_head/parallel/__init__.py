"""The head over many GPUs: its weight split over the vocabulary, its tokens over sequences and data."""

from .context import shift_targets
from .groups import TokenParallel, VocabParallel

__all__ = ["TokenParallel", "VocabParallel", "shift_targets"]
