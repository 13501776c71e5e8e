"""HuggingFace models and trainers on this library's head."""

from .patch import patch_model, unpatch_model
from .trainer import log_metrics

__all__ = ["log_metrics", "patch_model", "unpatch_model"]
