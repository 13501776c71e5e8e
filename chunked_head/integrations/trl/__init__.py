"""TRL's trainers on this library's head."""

from .lazy_teacher import distil_from_hidden
from .patch import check_fused_head, patch_trl, patched_trl, unpatch_trl

__all__ = ["check_fused_head", "distil_from_hidden", "patch_trl", "patched_trl", "unpatch_trl"]
