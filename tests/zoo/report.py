"""What a sweep of the zoo came to: a table on the terminal, ``docs/zoo.md``, and what there is to complain of."""

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from .check import GRADIENT_TOLERANCE, LOSS_TOLERANCE, VERDICTS, Outcome
from .classes import KINDS

# By minor version of transformers: the classes that the zoo cannot build, and why. It must only shrink.
NOT_BUILT = Path(__file__).with_name("not_built.json")


@dataclass
class Sweep:
    """The outcomes of one version of transformers."""

    version: str
    outcomes: list[Outcome]

    def as_dict(self) -> dict[str, Any]:
        return {"transformers": self.version, "outcomes": [one.as_dict() for one in self.outcomes]}

    @staticmethod
    def of(read: dict[str, Any]) -> "Sweep":
        return Sweep(read["transformers"], [Outcome(**one) for one in read["outcomes"]])

    def counts(self, kind: str | None = None) -> Counter[str]:
        return Counter(one.verdict for one in self.outcomes if kind in (None, one.kind))

    def largest(self, name: str) -> float:
        """The largest error of the classes that are right."""
        errors = (getattr(one, name) for one in self.outcomes if one.verdict in ("fused", "materialised"))
        return max(errors, default=0.0)


def table(sweep: Sweep, everything: bool) -> Table:
    """Counts of all, and a row for every class that is not fused, or for every class."""
    counts = sweep.counts()
    title = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    made = Table(title=f"transformers {sweep.version}: {title}")
    for column in ("class", "verdict", "loss error", "gradient error", "tail or reason"):
        made.add_column(column, overflow="fold")
    for one in sweep.outcomes:
        if everything or one.verdict not in ("fused", "no labels"):
            errors = (f"{one.loss_error:.1e}", f"{one.gradient_error:.1e}")
            made.add_row(one.name, one.verdict, *errors, one.reason or one.tail)
    return made


def complaints(sweep: Sweep) -> list[str]:
    """A line for every class that is wrong, or whose being built is not as the list says."""
    known = json.loads(NOT_BUILT.read_text(encoding="utf-8")).get(minor(sweep.version))
    found = [f"WRONG: {one.name}: {one.reason}" for one in sweep.outcomes if one.verdict == "WRONG"]
    if known is None:
        return [*found, f"{NOT_BUILT.name} has no list for transformers {minor(sweep.version)}"]
    for one in sweep.outcomes:
        if one.verdict == "not built" and one.name not in known:
            found.append(f"not built, and not in {NOT_BUILT.name}: {one.name}: {one.reason}")
        if one.verdict != "not built" and one.name in known:
            found.append(f"built by now: take {one.name} out of {NOT_BUILT.name}")
    return found


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def markdown(sweep: Sweep, others: list[Sweep]) -> str:
    """``docs/zoo.md``."""
    sweeps = sorted([sweep, *others], key=lambda one: [int(part) for part in one.version.split(".")[:2]])
    versions = " and ".join(", ".join(one.version for one in sweeps).rsplit(", ", 1))
    lines = ["# Every model of transformers", "", *INTRODUCTION.format(
        versions=versions, loss=LOSS_TOLERANCE, gradient=GRADIENT_TOLERANCE).strip().splitlines(), ""]  # fmt: skip
    lines += ["| transformers | kind | " + " | ".join(VERDICTS) + " |", "|---|---|" + "---|" * len(VERDICTS)]
    for one in sweeps:
        for kind in KINDS:
            counts = one.counts(kind)
            lines.append(f"| {one.version} | {kind} | " + " | ".join(str(counts[v]) for v in VERDICTS) + " |")
    loss, gradient = (max(one.largest(name) for one in sweeps) for name in ("loss_error", "gradient_error"))
    lines += ["", f"Largest errors of those that are right: loss {loss:.1e}, gradients {gradient:.1e}.", ""]
    for one in sweeps:
        lines += not_fused(one)
    return "\n".join(lines + every_class(sweep)) + "\n"


def not_fused(sweep: Sweep) -> list[str]:
    """A section of what is not simply fused."""
    rows = [f"| `{one.name}` | {one.verdict} | {cell(one.reason)} |"
            for one in sorted(sweep.outcomes, key=lambda one: (VERDICTS.index(one.verdict), one.name))
            if one.verdict not in ("fused", "no labels")]  # fmt: skip
    without = [f"`{one.name}`" for one in sweep.outcomes if one.verdict == "no labels"]
    lines = [f"## Not fused in {sweep.version}", ""]
    lines += ["| class | verdict | reason |", "|---|---|---|", *rows, ""] if rows else []
    return [*lines, f"No loss of labels: {', '.join(without)}.", ""] if without else lines


def every_class(sweep: Sweep) -> list[str]:
    """A section of what is fused, by what stands between head and loss."""
    fused: dict[str, list[str]] = defaultdict(list)
    for one in sweep.outcomes:
        if one.verdict == "fused":
            fused[plainly(one.tail)].append(f"`{one.name}`")
    lines = [f"## Fused in {sweep.version}", "", "| between head and loss | classes |", "|---|---|"]
    return lines + [f"| {tail or 'nothing'} | {', '.join(fused[tail])} |" for tail in sorted(fused)]


def plainly(tail: str) -> str:
    """A tail without what it has not, and without numbers, which the zoo chose."""
    parts = [part for part in tail.split(", ") if part not in ("scale 1", "no softcap")]
    return re.sub(r" to \d+| [\d.]+|\d+ ", "", ", ".join(parts)).replace("(s)", "s")


def cell(text: str) -> str:
    return text.replace("|", "\\|")


INTRODUCTION = """
This page says what `patch_model` does with every class of transformers {versions} that has a head over a
vocabulary. A test builds a small model of each class from its configuration, with scales, caps, biases and router
losses that change the loss. It runs each model with labels, with `num_items_in_batch`, and in evaluation, and does so
three times: plain, patched, and unpatched again. `PYTHONPATH=tests python -m zoo --output docs/zoo.md` writes this
page.

- **fused**: the loss is computed without logits. Its relative error against the unpatched model is below {loss:g}, and
  that of every parameter's gradient below {gradient:g}. The same parameters have gradients, and evaluation gives the
  same logits.
- **materialised**: the same, but the logits are computed, with a warning.
- **refused**: the model stays as it is, with a warning that says why.
- **WRONG**: a value, a gradient or a parameter differs. No class may be wrong.
- **not built**: the test cannot build a small model of this class, so nothing is known about it.
- **no labels**: the forward takes no labels, or computes no loss from them.
"""
