"""README and docs/: every Python block and every notebook runs by itself, and every link leads somewhere.

A block that cannot run here (it needs several GPUs, a download) says so in its fence, as readers see it too:
fence: python title="Not run by the tests: needs a download"``.
"""

import contextlib
import importlib
import io
import json
import linecache
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import run_blocks
import torch

import chunked_head

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
MULTI = re.MULTILINE | re.DOTALL
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=ticks) *$", MULTI)
NOT_RUN = re.compile(r'title="Not run by the tests: (needs [^"]{5,})"')
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
MOST_NOT_RUN = 7


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


def execute(name: str, source: str, names: dict[str, Any] | None = None) -> None:
    """With the text where tracebacks and ``inspect.getsource`` look for it."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), {"__name__": "__main__"} if names is None else names)


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
def test_block_runs(block: Block, newcomer: None) -> None:
    """On a page of the site with what is shown below it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        execute(f"<{block.name}>", "\n" * (block.line - 1) + block.code)
    if block.name.startswith("docs") and not run_blocks.VOLATILE.search(printed.getvalue()):
        shown = json.loads(run_blocks.OUTPUTS.read_text()).get(run_blocks.key_of(block.code), "")
        says = f"run docs/assets/run_blocks.py: {printed.getvalue()} is {shown}"
        assert is_same(printed.getvalue(), shown), says


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_notebook_runs(notebook: Path, newcomer: None) -> None:
    """All cells one after the other, as ``docs/assets/run_notebooks.py`` runs them: what they print is what is shown.
    Numbers differ by rounding. Readers are told seconds."""
    cells = json.loads(notebook.read_text())["cells"]
    begun, names = time.thread_time(), {"__name__": "__main__"}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            execute(f"<{notebook.name} {cell['id']}>", "".join(cell["source"]), names)
        shown = "".join(text for output in cell["outputs"] for text in output["text"])
        assert is_same(printed.getvalue(), shown), f"run docs/assets/run_notebooks.py: {printed.getvalue()} is {shown}"
    assert time.thread_time() - begun < 10


NUMBER = re.compile(r"(\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+)")


def is_same(printed: str, shown: str) -> bool:
    """The same words and whole numbers; fractions within two percent, or both below 1e-4."""
    parts = [NUMBER.split(" ".join(text.split())) for text in (printed, shown)]
    if parts[0][::2] != parts[1][::2]:
        return False
    pairs = zip(*[[float(number) for number in split[1::2]] for split in parts], strict=True)
    return all(a == pytest.approx(b, rel=0.02) or max(abs(a), abs(b)) < 1e-4 for a, b in pairs)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_notebook_is_tidy(notebook: Path) -> None:
    """As ``docs/assets/run_notebooks.py`` writes it: what cells print, and nothing of the run."""
    text = notebook.read_text()
    made = json.loads(text)
    assert text == json.dumps(made, indent=1, ensure_ascii=False) + "\n"
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert set(made["metadata"]) == {"kernelspec", "language_info"}
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    for cell in made["cells"]:
        assert not cell["metadata"] and cell.get("execution_count") is None
        prints = cell["cell_type"] == "code" and "print(" in "".join(cell["source"])
        outputs = cell.get("outputs", [])
        assert bool(prints) == bool(outputs), "run docs/assets/run_notebooks.py"
        assert all(output["output_type"] == "stream" for output in outputs)


def test_blocks_that_do_not_run_say_why_and_are_few() -> None:
    unknown = [block.name for block in RUN if block.info and not block.info.startswith("title=")]
    assert not unknown, "neither plain nor marked with a reason"
    assert len(BLOCKS) - len(RUN) <= MOST_NOT_RUN
    assert len(RUN) > 25


def test_code_is_84_columns_wide() -> None:
    """As wide as the site shows it."""
    site = [page for page in PAGES if page.name not in ("CONTRIBUTING.md", "CHANGELOG.md")]
    fences = ((page, fence["code"]) for page in site for fence in FENCE.finditer(page.read_text()))
    wide = [(page.name, line) for page, code in fences for line in code.splitlines() if len(line) > 84]
    assert not wide


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as the site makes them; GitHub's are the same where no two separators follow each other."""
    text = prose(page)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?)\s*$", text, re.M):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", words))
    return found | set(re.findall(r'id="([\w-]+)"', text))


def prose(page: Path) -> str:
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text())["cells"]
        return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return FENCE.sub("", page.read_text())


@pytest.mark.parametrize("page", PAGES + NOTEBOOKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    for link in LINK.findall(prose(page)):
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
    for page in PAGES + NOTEBOOKS:
        for module, name in re.findall(r"\b(?<![\w./])(losses|metrics|weights)\.(?!md\b)([a-z]\w*)", page.read_text()):
            assert hasattr(getattr(chunked_head, module), name), f"{page.relative_to(ROOT)}: {module}.{name}"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"[\w/-]+\.md", text))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if ROOT / "docs" in page.parents}
    pages |= {str(page.relative_to(ROOT / "docs").with_suffix(".md")) for page in NOTEBOOKS}
    assert pages == named


def test_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    modules = {"": chunked_head, "losses.": chunked_head.losses, "metrics.": chunked_head.metrics}
    types = {"AGAINST", "FIELDS", "Field", "Summand", "Teacher", "Finish", "MetricOptions", "Reduce", "Weighting"}
    names = {f"{prefix}{name}" for prefix, module in modules.items() for name in module.__all__ if name not in types}
    shown = set(re.findall(r"^::: chunked_head\.([\w.]+)$", text, re.M))
    for module, members in re.findall(r"^::: chunked_head\.(\w+)\n(?: .*\n)*? +members: \[([^]]+)", text, re.M):
        shown |= {f"{module}.{member.strip()}" for member in members.split(",")}
    # all of a module's names but those that the filters leave out
    for module, hidden in re.findall(
        r'^::: chunked_head\.(\w+)\n(?: .*\n)*? +filters: .*"!\^\(([\w|]+)\)\$"', text, re.M
    ):
        shown |= {f"{module}.{name}" for name in {*modules[f"{module}."].__all__} - {*hidden.split("|")}}
    assert names - shown == set()


def test_architecture_names_what_is_there() -> None:
    """Files from the top of the repository or of the package, each with the names that follow it; and all folders."""
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    found = re.findall(r"`([\w/]+/[\w/]*(?:\.py|\.md)?)`((?:,? (?:and )?`\w+`)*)", text)
    assert len(found) > 60
    for name, names in found:
        path = next((path for top in (ROOT, ROOT / "chunked_head") if (path := top / name).exists()), None)
        assert path is not None, f"{name}: no such file"
        for each in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^( *(def|class) {each}\b|{each}\b.*=)", path.read_text(), re.M), f"{name} has no {each}"
    folders = {path.parent.name for path in (ROOT / "chunked_head").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", text, re.M)) == folders | {"kernels"}


@pytest.mark.parametrize("name, package", [("plain_loop", "torch"), ("lightning_module", "lightning")])
def test_examples_have_the_plain_losses(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops of docs/examples that need no transformers, with this library's head and without."""
    pytest.importorskip(package, reason=f"the example is {package}'s")
    example = importlib.import_module(name)
    calls, real = [], example.linear_cross_entropy

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(example, "linear_cross_entropy", counted)
    ours = example.main()
    assert len(calls) == len(ours) == 6  # every micro-batch's
    theirs = example.main(plain=True)
    assert len(calls) == 6 and ours == pytest.approx(theirs, rel=1e-4) and ours[-1] < ours[0] - 0.1
