"""The two ways to compute: Triton kernels, and torch operations for every device without them."""

from .logits import GivenLogits, LogitsView
from .protocol import Backend, Layout, Targets, check_name, resolve
from .sets import SetRows, SetStore, WithSets
from .store import Store

__all__ = [
    "Backend",
    "GivenLogits",
    "Layout",
    "LogitsView",
    "SetRows",
    "SetStore",
    "Store",
    "Targets",
    "WithSets",
    "check_name",
    "resolve",
]
