"""What the integrations of training frameworks share: the range of versions they were tested with, and a computation
in the place of a module's own that runs inside of the module's hooks."""

import re
import sys
from collections.abc import Callable, Collection, Mapping
from importlib import metadata
from typing import Any

from torch import nn

from ..core.options import nearest
from ..engine.execution import CHECKS


def check_version(module: str, package: str, first: str, last: str) -> None:
    """Raises unless a framework's version lies between those of the first and the last minor release that were tested.

    Args:
        module: the framework's module, whose ``__version__`` counts where it has been imported (a checkout).
        package: its name on the package index.

    Raises:
        ImportError: it is not installed. RuntimeError: it is older or newer than what was tested.
    """
    version = getattr(sys.modules.get(module), "__version__", None)
    if version is None:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise ImportError(f"{package} is not installed: pip install '{package}=={last}.*'") from None
    if not numbers(first) <= numbers(version) <= numbers(last):
        raise RuntimeError(
            f"{package} {version} is none of the versions that this was tested with, {first} to {last}: its seam may "
            f"mean something else. Install '{package}=={last}.*', or a chunked_head that knows {package} {version}"
        )


def numbers(version: str) -> tuple[int, ...]:
    """Major and minor number of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


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


def check_named(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises what is wrong with options by keyword: one of another name, or a value that is wrong by itself."""
    for name, value in options.items():
        if name not in known:
            names = ", ".join(sorted(known))
            raise TypeError(f"unknown option {name!r}; options are {names}{nearest(name, set(known))}")
        CHECKS[name](value)
