"""The built site's reference (`make docs`): what a user calls, each parameter once and with a text."""

import html
import re
from pathlib import Path

import pytest

SITE = Path(__file__).parents[2] / "site"
OBJECT = re.compile(r'<div class="doc doc-object doc-(?:function|class)">')
ITEM = re.compile(r'<li class="doc-section-item field-body">\s*<b><code>(.*?)</code></b>(.*?)</li>', re.DOTALL)
TEXT = re.compile(r'<div class="doc-md-description">(.*?)</div>', re.DOTALL)
TAG = re.compile(r"<[^>]+>")


@pytest.fixture(scope="module")
def reference() -> str:
    page = SITE / "api" / "index.html"
    if not page.is_file():
        pytest.skip("`make docs` builds the site")
    return page.read_text()


def test_returns_and_defaults_are_those_of_a_call(reference: str) -> None:
    text = html.unescape(TAG.sub("", reference))
    assert "Call[" not in text
    assert not re.search(r"(default:\s*|= )\.\.\.", text)
    signature = text[text.index("linear_cross_entropy(") :]
    assert signature[: signature.index("Parameters:")].count("ignore_index: int = -100") == 1
    assert re.match(r"[^)]*\) -> Tensor\n", signature)


def test_each_parameter_has_a_text_and_stands_once(reference: str) -> None:
    objects = OBJECT.split(reference)
    assert len(objects) > 100
    for part in objects[1:]:
        title = re.search(r'id="(chunked_head[\w.]+)"', part)
        items = ITEM.findall(part)
        empty = [name for name, rest in items if not (found := TEXT.search(rest)) or not TAG.sub("", found[1]).strip()]
        names = [name for name, _ in items]
        assert not empty, (title and title[1], empty)
        assert len(names) == len(set(names)), (title and title[1], names)
