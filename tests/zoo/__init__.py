"""``patch_model`` on every class of transformers that has a head over a vocabulary: ``python -m zoo``."""
