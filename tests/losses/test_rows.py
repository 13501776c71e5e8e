"""What adding a loss or a metric takes: its function, its name, its row in tests/oracle, its row in docs/losses.md.

All other tests read these. Each test here names the place that lacks something.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loss_cases import FACTORIES, LOSS_CASES
from oracle.metrics import COMMON, METRICS
from oracle.rows import ROWS

from chunked_head import losses, metrics
from chunked_head.losses import Losses
from chunked_head.metrics import Metric

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "losses.md").read_text()


# made of a user's function; the losses have rows with some functions all the same
OF_USERS = (losses.custom, losses.divergence, losses.vocabulary_sum, metrics.vocabulary_sum)


def factories(package: Any) -> list[Callable[..., Any]]:
    """Public functions of a package's modules that make a loss or a metric; ``once`` wraps each."""
    names = [each.name for each in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return [
        function for module in modules for name, function in vars(module).items()
        if not name.startswith("_") and hasattr(function, "__wrapped__") and function.__module__ == module.__name__
        and function.__annotations__.get("return") in (Losses, Metric) and function not in OF_USERS
    ]  # fmt: skip


ALL = [(package, function) for package in (losses, metrics) for function in factories(package)]
EACH = pytest.mark.parametrize(
    ("package", "factory"),
    [pytest.param(*each, id=f"{each[0].__name__.partition('.')[2]}.{each[1].__name__}") for each in ALL],
)


def own_options(factory: Callable[..., Any]) -> set[str]:
    named = inspect.signature(factory).parameters.values()
    return {option.name for option in named if option.kind != option.VAR_KEYWORD}


@EACH
def test_it_is_public(package: Any, factory: Callable[..., Any]) -> None:
    name = factory.__name__
    assert getattr(package, name, None) is factory and name in package.__all__, (
        f"__init__.py of {package.__name__} lacks {name}, of {factory.__module__}: import it and add it to __all__"
    )
    assert factory in FACTORIES


@EACH
def test_its_row_tries_every_option(package: Any, factory: Callable[..., Any]) -> None:
    name, table = factory.__name__, ROWS if package is losses else METRICS
    assert name in table, f"tests/oracle/ has no row of {package.__name__}.{name}: its formula on full logits"
    tried = {option for options in table[name].options for option in options}
    missing = own_options(factory) - tried - (set() if package is losses else COMMON)
    assert not missing, f"the row of {name} in tests/oracle/ tries no value of {sorted(missing)}"


@EACH
def test_its_row_in_the_docs_names_every_option(package: Any, factory: Callable[..., Any]) -> None:
    """In the section that has the row: options may stand in a table of their own, or in words about several losses."""
    sections = [
        text for text in re.split(r"^## ", DOCS, flags=re.M)[1:] if text.startswith("Metrics") == (package is metrics)
    ]
    name = factory.__name__
    home = [text for text in sections if re.search(rf"^(?:\| )?`{name}(?:`|\()", text, re.M)]
    assert home, f"docs/losses.md has no row of {package.__name__}.{name}"
    missing = {option for option in own_options(factory) if not re.search(rf"`{option}\b", "".join(home))}
    assert not missing, f"docs/losses.md names no {sorted(missing)} in the section of {name}"


def test_nothing_else_has_a_row() -> None:
    """No row is of what is no longer there; every loss is in some case, which all backends run."""
    for package, table in ((losses, ROWS), (metrics, METRICS)):
        of_users = {"divergence", "vocabulary_sum"} if package is losses else set()
        assert set(table) == of_users | {factory.__name__ for home, factory in ALL if home is package}
    assert {term.kind for case in LOSS_CASES for term in case.terms} == set(ROWS)
