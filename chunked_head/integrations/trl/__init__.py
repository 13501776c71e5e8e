"""TRL's trainers on this library's head."""

from .patch import check_fused_head, patch_trl, patched_trl, unpatch_trl

__all__ = ["check_fused_head", "patch_trl", "patched_trl", "unpatch_trl"]
