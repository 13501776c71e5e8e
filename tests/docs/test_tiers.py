"""What ``make test`` runs and what it leaves out: pairs of parameters, parts of the rest, places of mutations."""

import itertools
import re
from pathlib import Path

import mutate
import pytest
from tiers import pairs

ROOT = Path(__file__).parents[2]


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
