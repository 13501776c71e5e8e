"""Which combinations of parameters ``make test`` runs; ``--all`` runs every one.

What is wrong with an option shows by itself or where it meets another one. A product of parameters runs the same two
values together once for each value of all the others, so here each two of different parameters meet once.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

# whether combinations of the second tier are made at all: conftest.py sets it, for processes that tests start too
ASKED = "CHUNKED_HEAD_TESTS"
ALL = os.environ.get(ASKED) == "all"


def tier(param: Any, first: bool) -> list[Any]:
    """A list of the ``pytest.param``: as it is in the first tier; marked exhaustive with ``--all``; else empty."""
    if first:
        return [param]
    return [pytest.param(*param.values, id=param.id, marks=[*param.marks, pytest.mark.exhaustive])] if ALL else []


def first_of(values: Iterable[Any], count: int = 1) -> list[Any]:
    """A parameter's values, of which ``make test`` runs the first ``count``."""
    return [one for i, value in enumerate(values) for one in tier(labelled("", i, value), i < count)]


class Turn(tuple):
    """Values of a parameter that take turns from row to row. They need not meet all values of other parameters."""


def crossed(**parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """``parametrize`` of a test over all combinations, of which ``make test`` runs those of ``pairs``."""
    columns = [[labelled(name, i, value) for i, value in enumerate(values)] for name, values in parameters.items()]
    sizes = [len(column) for column in columns]
    turns = [isinstance(values, Turn) for values in parameters.values()]
    first = dict.fromkeys(
        tuple(sum(met) % size if turn else i for i, size, turn in zip(met, sizes, turns, strict=True))
        for met in pairs([1 if turn else size for size, turn in zip(sizes, turns, strict=True)])
    )
    rows = []
    for at in itertools.product(*map(range, sizes)) if ALL else first:
        chosen = [column[i] for column, i in zip(columns, at, strict=True)]
        param = pytest.param(
            *(value for one in chosen for value in one.values), id="-".join(one.id for one in chosen),
            marks=[mark for one in chosen for mark in one.marks],
        )  # fmt: skip
        rows += tier(param, at in first)
    return pytest.mark.parametrize(tuple(parameters), rows)


def labelled(name: str, index: int, value: Any) -> Any:
    """A value as a ``pytest.param`` with an id."""
    if hasattr(value, "marks"):
        if value.id is not None:
            return value
        return pytest.param(*value.values, marks=value.marks, id=labelled(name, index, *value.values).id)
    if isinstance(value, torch.dtype | str | int | float | None):
        text = str(value).removeprefix("torch.")
    else:
        text = getattr(value, "name", None) or getattr(value, "__name__", None) or f"{name}{index}"
    return pytest.param(value, id=text)


def pairs(sizes: Sequence[int]) -> dict[tuple[int, ...], None]:
    """Rows of indices, one index per column, such that any two indices of different columns stand in one row. The rows
    are the product of the two longest columns, then rows for the pairs that are missing. A further column takes the
    index that forms most new pairs."""
    longest = sorted(range(len(sizes)), key=lambda column: -sizes[column])
    missing = {
        (i, a, j, b) for i, j in itertools.combinations(range(len(sizes)), 2)
        for a in range(sizes[i]) for b in range(sizes[j])
    }  # fmt: skip
    found: dict[tuple[int, ...], None] = {}

    def met(row: dict[int, int], column: int, index: int) -> set[tuple[int, int, int, int]]:
        new = {(i, a, column, index) if i < column else (column, index, i, a) for i, a in row.items()}
        return new & missing

    def complete(row: dict[int, int]) -> None:
        turn = len(found)
        for column in longest:
            if column not in row:
                size = sizes[column]
                row[column] = max(((turn + i) % size for i in range(size)), key=lambda i: len(met(row, column, i)))
        for column, index in row.items():
            missing.difference_update(met({i: a for i, a in row.items() if i != column}, column, index))
        found[tuple(row[column] for column in range(len(sizes)))] = None

    for at in itertools.product(*(range(sizes[column]) for column in longest[:2])):
        complete(dict(zip(longest[:2], at, strict=True)))
    while missing:
        i, a, j, b = min(missing)
        complete({i: a, j: b})
    return found
