"""HuggingFace models and trainers on this library's head."""

from .explain import Explanation, explain_model
from .patch import log_metrics, patch_model, unpatch_model

__all__ = ["Explanation", "explain_model", "log_metrics", "patch_model", "unpatch_model"]
