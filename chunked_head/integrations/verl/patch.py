"""verl's workers on this library's head: its two functions of the head in their places."""

import functools
import importlib
import sys
from typing import Any, Unpack

from ...call.options import Execution
from ..frameworks import check_named, check_version
from .functions import FusedLinearForPPO, linear_cross_entropy

TESTED = ("0.9", "0.10")
# modules of verl's and names in them, which it looks up at every call
SEAMS = (
    ("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"),
    ("verl.utils.experimental.torch_functional", "FusedLinearForPPO"),
)
# these have bound theirs where they are imported already
BOUND = ("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap")
_originals: dict[tuple[str, str], Any] = {}


def patch_verl(*, reduce_dhidden: bool | None = None, **options: Unpack[Execution]) -> None:
    """Puts this library's head behind ``use_fused_kernels``, whichever ``impl_backend``, in this process.

    Args:
        reduce_dhidden: as in ``linear_cross_entropy``: True for Megatron's tensor parallelism without sequence
            parallelism.
        options: of every call, as in ``chunked_head.Execution`` without ``parallel``.

    Raises:
        TypeError, ValueError: for an option that is wrong by itself.
        ImportError: verl is not installed. RuntimeError: it is a version that was not tested. Nothing is changed then.
    """
    check_named(options, Execution.__annotations__.keys() - {"parallel"})
    check_version("verl", *TESTED, "verl")
    function = functools.partial(linear_cross_entropy, reduce_dhidden=reduce_dhidden, **options)
    module = type("FusedLinearForPPO", (FusedLinearForPPO,), {"options": dict(options)})
    found = {(path, name): getattr(importlib.import_module(path), name) for path, name in SEAMS}
    for (path, name), ours in zip(SEAMS, (function, module), strict=True):
        _originals.setdefault((path, name), found[path, name])
        put(path, name, ours)


def unpatch_verl() -> None:
    """Gives verl its own functions back; without ``patch_verl`` before it, nothing happens."""
    for (path, name), original in list(_originals.items()):
        put(path, name, original)
        del _originals[path, name]


def put(path: str, name: str, value: Any) -> None:
    """``value`` under a name of verl's, wherever it is looked up."""
    for place in (path, *BOUND):
        module = sys.modules.get(place)
        if module is not None and hasattr(module, name):
            setattr(module, name, value)
