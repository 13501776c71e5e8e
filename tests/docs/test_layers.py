"""Imports run one way: from each layer to those below it, and within a layer without a circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# from the lowest to the highest; kernels know nothing but each other
LAYERS = ("kernels", "core", "losses", "metrics", "program", "parallel", "backends", "engine", "api", "integrations",
          "commands", "__main__")  # fmt: skip
MOST_FILES = 12


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("chunked_head", *parts) if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for folder in ("chunked_head", "kernels") for path in (ROOT / folder).rglob("*.py")}


def imported(name: str, text: str, is_package: bool) -> set[str]:
    """Modules of ours that a module imports, wherever in it."""
    found = set()
    package = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom):
            continue
        start = package[: len(package) + 1 - node.level] if node.level else []
        base = ".".join([*start, *(node.module or "").split(".")]).rstrip(".")
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            found.add(whole if whole in FILES else base)
    return {module for module in found if module in FILES and module != name}


IMPORTS = {name: imported(name, path.read_text(), path.name == "__init__.py") for name, path in FILES.items()}


def layer_of(module: str) -> int:
    parts = module.split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 else len(LAYERS)


@pytest.mark.parametrize("module", sorted(FILES))
def test_imports_run_one_way(module: str) -> None:
    higher = [other for other in IMPORTS[module] if layer_of(other) > layer_of(module)]
    assert not higher, f"{module} is of a layer below {higher}"


@pytest.mark.parametrize("module", sorted(module for module in FILES if module.startswith("chunked_head.kernels")))
def test_kernels_share_what_is_common(module: str) -> None:
    """A folder of kernels knows itself and ``common``, which knows itself alone."""
    own = module.rsplit(".", 1)[0]
    others = {other.rsplit(".", 1)[0] for other in IMPORTS[module]}
    assert others <= {own, "chunked_head.kernels.common"}


def test_no_circle() -> None:
    tuple(TopologicalSorter(IMPORTS).static_order())  # raises CycleError, which names the circle


@pytest.mark.parametrize("folder", sorted({str(path.parent.relative_to(ROOT)) for path in FILES.values()}))
def test_a_folder_is_seen_at_a_glance(folder: str) -> None:
    assert len(list((ROOT / folder).glob("*.py"))) <= MOST_FILES


def test_the_test_sees_an_import() -> None:
    text = "def run():\n    from ..engine import loop\n    from .stats import Rows\n"
    assert imported("chunked_head.core.private", text, False) == {"chunked_head.engine.loop", "chunked_head.core.stats"}
