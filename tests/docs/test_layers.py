"""Imports run one way: from each layer to those below it, and within a layer without a circle."""

import ast
import itertools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import mutate
import pytest
from tiers import pairs

ROOT = Path(__file__).resolve().parents[2]
# from the lowest to the highest
LAYERS = ("reference", "core", "kernels", "losses", "metrics", "plan", "parallel", "stores", "arithmetic", "call",
          "compile", "functions", "integrations", "__main__")  # fmt: skip
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
    """A folder of kernels knows itself, ``common`` and the records of ``core``; ``common`` knows no other folder."""
    own = module.rsplit(".", 1)[0]
    others = {other.rsplit(".", 1)[0] for other in IMPORTS[module]}
    assert others <= {own, "chunked_head.kernels.common", "chunked_head.core"}


@pytest.mark.parametrize("module", sorted(FILES))
def test_imports_are_of_this_checkout(module: str) -> None:
    """An import of a file that has gone works where another checkout is installed, and nowhere else."""
    path = FILES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package[: len(package) + 1 - node.level], *(node.module or "").split(".")]).rstrip(".")
            names = [base] if base in FILES else [f"{base}.{alias.name}" for alias in node.names]
            assert set(names) <= set(FILES), f"line {node.lineno}: {names} is no file"


def test_no_circle() -> None:
    tuple(TopologicalSorter(IMPORTS).static_order())  # raises CycleError, which names the circle


@pytest.mark.parametrize("folder", sorted({str(path.parent.relative_to(ROOT)) for path in FILES.values()}))
def test_a_folder_is_seen_at_a_glance(folder: str) -> None:
    assert len(list((ROOT / folder).glob("*.py"))) <= MOST_FILES


# what catches errors of any kind, or those that our own checks raise, and why it has to; by module and function
BROAD = {
    ("__main__", "diagnose"): "reports whatever is broken",
    ("__main__", "main"): "prints an error of the arguments in a line",
    ("__main__", "token_count"): "says what is expected of a number",
    ("__main__", "hollow_model"): "transformers raises errors of many kinds",
    ("integrations.frameworks", "parameters_difference"): "what stands in a framework may have no signature",
    ("integrations.huggingface.explain", "explain_model"): "reports what patch_model would raise",
    ("integrations.huggingface.explain", "hollow_copy_of"): "copies modules of others",
    ("integrations.huggingface.explain", "rehearse"): "runs models of others",
    ("losses.sums", "number_of_parameters"): "says that a function has no signature",
    ("losses.sums", "trace"): "says why a user's function cannot be traced",
    ("losses.user_checks", "has_rank_independent_values"): "runs a user's function on tokens that it may refuse",
    ("call.run", "gradients_of"): "notes what lies in the caller's buffer, and raises it on",
    ("compile.operation", "execute"): "notes what lies in the caller's buffer, and raises it on",
    ("integrations.cut_cross_entropy", "translated"): "names the option as the other library does",
    ("integrations.huggingface.layout", "layout_by_trial"): "says what a head's own forward raises, and is left",
    ("losses.user_checks", "names_read"): "finds out whether a user's function runs without a field",
    ("losses.user_checks", "values_on_sample"): "names the loss whose function raised",
}


def broad_handlers(text: str) -> list[str]:
    """Functions that catch ``ValueError``, ``Exception``, ``BaseException`` or anything."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.ExceptHandler):
            caught = ["Exception"] if node.type is None else [getattr(n, "id", "") for n in ast.walk(node.type)]
            if {"ValueError", "Exception", "BaseException"} & set(caught):
                found.append(function)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(text), "")
    return found


def test_errors_decide_nothing() -> None:
    """A ValueError may be a mistake in what is called: whoever catches one to try something else hides it."""
    found = {
        (module.removeprefix("chunked_head."), function)
        for module, path in FILES.items()
        for function in broad_handlers(path.read_text())
    }
    assert found == set(BROAD)


# ---- what `make test` runs and what it leaves out


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (2, 3, 4), (2, 3, 4, 3), (3, 3, 2, 2, 2, 2), (1, 5, 2)], ids=str)
def test_each_two_values_meet(sizes: tuple[int, ...]) -> None:
    rows = pairs(sizes)
    for (i, a), (j, b) in itertools.combinations(enumerate(sizes), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(range(a), range(b)))
    assert {row[0] for row in rows} == set(range(sizes[0]))
    longest = sorted(sizes)[-2:]
    assert len(rows) <= longest[0] * longest[-1] + len(sizes)


def test_parts_have_all_folders() -> None:
    listed = re.findall(r"^PART_\d := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    folders = {path.parent for path in (ROOT / "tests").glob("*/test_*.py")}
    assert sorted(" ".join(listed).split()) == sorted(folder.relative_to(ROOT).as_posix() for folder in folders)


def test_mutations_have_their_places() -> None:
    assert not mutate.misplaced() and len(mutate.MUTATIONS) >= 60
    named = {word for one in mutate.MUTATIONS for word in one.tests.split() if word.startswith("tests/")}
    assert not [name for name in named if not (ROOT / name).is_file()]
