"""The two ways to compute: Triton kernels, and torch operations for every device without them."""

from .kept import KeptColumns, KeptRows
from .protocol import Backend, Layout, Targets, check_name, resolve
from .session import Session

__all__ = [
    "Backend",
    "KeptColumns",
    "KeptRows",
    "Layout",
    "Session",
    "Targets",
    "check_name",
    "resolve",
]
