"""The drawings of docs/internals/architecture.md are of the code: the road of a call, and what layers import."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from test_layers import IMPORTS, LAYERS, ROOT, layer_of

from chunked_head import linear_cross_entropy

PAGE = ROOT / "docs" / "internals" / "architecture.md"
LEFT_OUT = "core/", "plan/sizes.py"  # what every file calls


def drawing(heading: str) -> str:
    """The first block without a language below a heading of the page."""
    below = PAGE.read_text().split(f"\n## {heading}\n")[1]
    found = re.search(r"^```\n(.*?)\n```$", below, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]


def file_of(frame: FrameType) -> str | None:
    """A frame's file as the drawing has it; None for other code than the library's, and for what is left out."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT) or frame.f_code.co_name.startswith("<"):
        return None
    name = path.relative_to(ROOT).as_posix()
    is_drawn = name.startswith(("chunked_head/", "kernels/"))
    name = name.removeprefix("chunked_head/")
    return name if is_drawn and not name.startswith(LEFT_OUT) else None


def road(step: Callable[[], Any]) -> dict[tuple[str, ...], list[str]]:
    """Functions by which a step enters each file from another one, by the files on the way there, in order."""
    entries: dict[tuple[str, ...], list[str]] = {}

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or file_of(frame) is None:
            return
        files, caller = list[str](), frame
        while caller is not None:
            name = file_of(caller)
            if name is not None and (not files or files[-1] != name):
                files.append(name)
            caller = caller.f_back
        before = frame.f_back
        while before is not None and file_of(before) is None:
            before = before.f_back
        if before is None or file_of(before) != files[0]:
            functions = entries.setdefault(tuple(files[::-1]), [])
            if frame.f_code.co_name not in functions:
                functions.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        step()
    finally:
        sys.setprofile(None)
    return entries


def tree(entries: dict[tuple[str, ...], list[str]], above: tuple[str, ...] = ()) -> Iterator[str]:
    """Lines of a road: each file, with its functions, below the file that enters it."""
    for files, functions in entries.items():
        if files[:-1] == above:
            yield "  " * len(above) + f"{files[-1]}: {', '.join(functions)}"
            yield from tree(entries, files)


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or a coverage tool runs")
def test_the_road_of_a_call() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
    target = torch.randint(0, 100, (8,))

    def step() -> None:
        linear_cross_entropy(hidden, weight, target, backend="torch").backward()

    step()  # a new call makes its Spec and its plan
    step()
    text = "\n".join(tree(road(step)))
    assert drawing("The road of one call") == text, f"draw this:\n{text}"


def test_the_layers() -> None:
    below: dict[str, set[int]] = {layer: set() for layer in LAYERS}
    for module, imported in IMPORTS.items():
        if (layer := layer_of(module)) < len(LAYERS):
            below[LAYERS[layer]] |= {layer_of(name) for name in imported} - {layer, len(LAYERS)}
    width = max(map(len, LAYERS))
    lines = [
        f"{layer:<{width}} -> {' '.join(LAYERS[i] for i in sorted(below[layer], reverse=True)) or 'nothing'}"
        for layer in reversed(LAYERS)
    ]
    text = "\n".join(lines)
    assert drawing("The layers") == text, f"draw this:\n{text}"
