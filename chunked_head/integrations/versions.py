"""The versions of other packages that an integration was tested with, checked when it is first used."""

import re
from importlib import metadata


def check_version(integration: str, package: str, lowest: str, below: str) -> None:
    """Raises where a package that an integration is for is missing, or of a version that nobody has tried.

    Raises:
        ImportError: the package is not installed.
        RuntimeError: its version is not at least ``lowest`` and smaller than ``below``.
    """
    wanted = f"pip install '{package}>={lowest},<{below}'"
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(f"{integration} needs {package}, which is not installed: {wanted}") from None
    if not numbers(lowest) <= numbers(version) < numbers(below):
        raise RuntimeError(
            f"{integration} was tested with {package} from {lowest} to below {below}, and {version} may compute its "
            f"losses otherwise; nothing was changed. {wanted}, or a chunked_head that knows this {package}"
        )


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version: ``(0, 4, 11)`` of ``"0.4.11.dev0"``."""
    release = re.match(r"\d+(\.\d+)*", version)
    return () if release is None else tuple(int(part) for part in release[0].split("."))
