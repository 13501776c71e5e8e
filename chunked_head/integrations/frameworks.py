"""What the integrations of training frameworks share: the range of versions they were tested with, and a computation
in the place of a module's own that runs inside of the module's hooks."""

import re
import sys
from collections.abc import Callable, Collection, Mapping
from importlib import metadata
from typing import Any

from torch import nn

from ..call.options import CHECKS
from ..core.options import nearest


def check_version(package: str, lowest: str, below: str, module: str = "") -> None:
    """Raises unless a framework's version is at least ``lowest`` and smaller than ``below``, those that were tested.

    Args:
        package: its name on the package index.
        module: the framework's module, whose ``__version__`` counts where it has been imported (a checkout).

    Raises:
        ImportError: it is not installed. RuntimeError: it is older or newer than what was tested.
    """
    wanted = f"pip install '{package}>={lowest},<{below}'"
    version = getattr(sys.modules.get(module), "__version__", None)
    if version is None:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise ImportError(f"{package} is not installed: {wanted}") from None
    if not numbers(lowest) <= numbers(version) < numbers(below):
        raise RuntimeError(
            f"{package} {version} is none of the versions that this was tested with, from {lowest} to below {below}; "
            f"it may compute its losses otherwise, and nothing was changed. {wanted}, or a chunked_head that knows it"
        )


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version: ``(0, 4, 11)`` of ``"0.4.11.dev0"``."""
    release = re.match(r"\d+(\.\d+)*", version)
    return () if release is None else tuple(int(part) for part in release[0].split("."))


def call_through(module: nn.Module, compute: Callable[..., Any], *args: Any) -> Any:
    """``compute(*args)`` where ``module(*args)`` would run its forward: between the module's hooks.

    Hooks are what gathers a sharded weight before its use (FSDP, Megatron's overlapped parameter gather) and frees it
    again, and what autograd is told about it.
    """
    before = vars(module).get("forward")
    module.forward = compute
    try:
        return module(*args)
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def check_named(options: Mapping[str, Any], known: Collection[str], note: str = "") -> None:
    """Raises what is wrong with options by keyword: one of another name, or a value that is wrong by itself."""
    for name, value in options.items():
        if name not in known:
            names = ", ".join(sorted(known))
            raise TypeError(f"unknown option {name!r}; options are {names}{note}{nearest(name, set(known))}")
        CHECKS[name](value)
