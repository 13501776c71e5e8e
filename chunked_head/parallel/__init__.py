"""The head over many GPUs: its weight split over the vocabulary, its tokens over sequences and data."""

from .groups import TokenParallel, VocabParallel, shift_targets

__all__ = ["TokenParallel", "VocabParallel", "shift_targets"]
