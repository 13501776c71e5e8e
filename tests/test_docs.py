"""README and docs/: every Python block runs by itself, and every link leads somewhere.

A block that cannot run here (it needs several GPUs, a download) says so in its fence, as readers see it too:
fence: python title="Not run by the tests: needs a download"``.
"""

import linecache
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import chunked_head

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
MULTI = re.MULTILINE | re.DOTALL
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=ticks) *$", MULTI)
NOT_RUN = re.compile(r'title="Not run by the tests: (needs [^"]{5,})"')
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
MOST_NOT_RUN = 9


class Block(NamedTuple):
    page: Path
    line: int
    info: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for fence in FENCE.finditer(text):
            language, _, rest = fence["info"].strip().partition(" ")
            if language in ("python", "py"):
                code = re.sub(f"^{fence['indent']}", "", fence["code"], flags=re.M)
                found.append(Block(page, text.count("\n", 0, fence.start("code")) + 1, rest, code))
    return found


BLOCKS = blocks()
RUN = [block for block in BLOCKS if not NOT_RUN.fullmatch(block.info)]


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a block finds is what a fresh interpreter has, but for modules that were imported."""
    environment = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    random.seed(0)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "accelerate" in sys.modules:  # which keeps what the first Accelerator was made for
        sys.modules["accelerate"].state.AcceleratorState._reset_state(True)
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
def test_block_runs(block: Block, newcomer: None) -> None:
    """With the text of the page at its lines, as tracebacks and ``inspect.getsource`` look for it."""
    name = f"<{block.name}>"
    source = "\n" * (block.line - 1) + block.code
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), {"__name__": "__main__"})


def test_blocks_that_do_not_run_say_why_and_are_few() -> None:
    unknown = [block.name for block in RUN if block.info and not block.info.startswith("title=")]
    assert not unknown, "neither plain nor marked with a reason"
    assert len(BLOCKS) - len(RUN) <= MOST_NOT_RUN
    assert len(RUN) > 30


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as the site makes them; GitHub's are the same where no two separators follow each other."""
    text = FENCE.sub("", page.read_text())
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?)\s*$", text, re.M):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", words))
    return found | set(re.findall(r'id="([\w-]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"
        inside = ROOT / "docs"
        assert inside not in page.parents or inside in target.parents, f"{link}: the site has nothing outside of docs/"


def test_names_in_the_text_exist() -> None:
    """``losses.gspo``, ``weights.sequence_mean`` and others, in tables too."""
    for page in PAGES:
        for module, name in re.findall(r"\b(?<![\w./])(losses|metrics|weights)\.(?!md\b)([a-z]\w*)", page.read_text()):
            assert hasattr(getattr(chunked_head, module), name), f"{page.relative_to(ROOT)}: {module}.{name}"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"[\w/-]+\.md", text))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if ROOT / "docs" in page.parents}
    assert pages == named


def test_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    modules = {"": chunked_head, "losses.": chunked_head.losses, "metrics.": chunked_head.metrics}
    types = {"AGAINST", "FIELDS", "Field", "Summand", "Teacher", "Finish", "MetricOptions", "Reduce", "Weighting"}
    names = {f"{prefix}{name}" for prefix, module in modules.items() for name in module.__all__ if name not in types}
    missing = {name for name in names if f"::: chunked_head.{name}\n" not in text}
    assert missing == {"losses", "metrics", "weights", "metrics.unit_weights"}
