"""``patch_model`` on every class of the installed transformers that has a head over a vocabulary.

    PYTHONPATH=tests python -m zoo --output docs/zoo.md                # a few minutes on two cores, nothing downloaded
    PYTHONPATH=tests python -m zoo --kind causal --only LlamaForCausalLM Gemma2ForCausalLM

Each class is built small from its configuration alone (``models.py``), with a scale, cap, bias and router loss that
are not neutral, and run with labels, with ``num_items_in_batch`` too, and in evaluation: as it is, patched, and
unpatched again (``check.py``). The status is 1 where one is WRONG, or is not built that ``not_built.json`` does
not name.
"""

import argparse
import json
import multiprocessing
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import transformers

from .check import GRADIENT_TOLERANCE, KINDS, LOSS_TOLERANCE, VERDICTS, Entry, Outcome, check, find

# By minor version of transformers: the classes that the zoo cannot build, and why. It must only shrink.
NOT_BUILT = Path(__file__).with_name("not_built.json")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zoo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=(*KINDS, "all"), default="all")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="classes by name")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table as Markdown, such as docs/zoo.md")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome")
    parser.add_argument("--beside", type=Path, nargs="+", default=[], metavar="FILE",
                        help="other versions' outcomes, from --json, to stand in --output too")  # fmt: skip
    parser.add_argument("--limit-seconds", type=float, default=120, metavar="N", help="for each class (default: 120)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="classes at a time (default: 2)")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    asked = arguments(given)
    torch.set_num_threads(1)  # before any work: classes are run in forks of this process
    transformers.logging.set_verbosity_error()
    entries = [entry for entry in find(asked.kind) if not asked.only or entry.name in asked.only]
    unknown = set(asked.only or ()) - {entry.name for entry in entries}
    if unknown:
        print(f"transformers {transformers.__version__} has no {sorted(unknown)[0]} of kind {asked.kind}")
        return 2
    found: list[Outcome] = []
    for one in outcomes(entries, asked.workers, asked.limit_seconds):
        found.append(one)
        if asked.only or one.verdict not in ("fused", "no labels"):
            errors = f"loss {one.loss_error:.1e}, gradients {one.gradient_error:.1e}"
            print(f"{len(found)} of {len(entries)}: {one.name}: {one.verdict}, {errors}: {one.reason or one.tail}")
    sweep = Sweep(transformers.__version__, sorted(found, key=lambda one: one.name))
    print(
        f"transformers {sweep.version}:", ", ".join(f"{count} {verdict}" for verdict, count in sweep.counts().items())
    )
    if asked.json:
        made = {"transformers": sweep.version, "outcomes": [asdict(one) for one in sweep.outcomes]}
        asked.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if asked.output:
        asked.output.write_text(markdown(sweep, [Sweep.read(path) for path in asked.beside]), encoding="utf-8")
    wrong = complaints(sweep)
    print("\n".join(wrong))
    return 1 if wrong else 0


# ---- each class in a process of its own, a few at a time: one that crashes or never ends takes no other with it


def work(entry: Entry, answer: Connection) -> None:
    """In the new process."""
    torch.set_num_threads(1)
    answer.send(check(entry))
    answer.close()


def outcomes(entries: Sequence[Entry], workers: int, limit_seconds: float) -> Iterator[Outcome]:
    """Of every class, as they end."""
    context: Any = multiprocessing.get_context("fork")  # transformers is imported once, by the parent
    left, running = list(entries), dict[Connection, tuple[Entry, Any, float]]()
    while left or running:
        while left and len(running) < workers:
            entry = left.pop(0)
            answers, answer = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(entry, answer), daemon=True)
            process.start()
            answer.close()
            running[answers] = entry, process, time.monotonic()
        wait(list(running), timeout=0.2)
        for answers in list(running):
            entry, process, start = running[answers]
            seconds = time.monotonic() - start
            outcome = ended(entry, answers, process, seconds > limit_seconds)
            if outcome is not None:
                outcome.seconds = round(seconds, 2)
                del running[answers]
                yield outcome


def ended(entry: Entry, answers: Connection, process: Any, too_long: bool) -> Outcome | None:
    """What a process came to; None while it runs."""
    outcome = None
    if answers.poll():
        try:
            outcome = answers.recv()
        except EOFError:
            process.join()
            outcome = Outcome(entry.name, entry.kind, "not built", f"its process ended with {process.exitcode}")
    elif too_long:
        process.kill()
        outcome = Outcome(entry.name, entry.kind, "not built", "longer than the limit of time")
    if outcome is not None:
        process.join()
        answers.close()
    return outcome


@dataclass
class Sweep:
    """The outcomes of one version of transformers."""

    version: str
    outcomes: list[Outcome]

    @staticmethod
    def read(path: Path) -> "Sweep":
        made = json.loads(path.read_text(encoding="utf-8"))
        return Sweep(made["transformers"], [Outcome(**one) for one in made["outcomes"]])

    def counts(self, kind: str | None = None) -> Counter[str]:
        return Counter(one.verdict for one in self.outcomes if kind in (None, one.kind))

    def largest(self, name: str) -> float:
        """The largest error of the classes that are right."""
        errors = (getattr(one, name) for one in self.outcomes if one.verdict in ("fused", "materialised"))
        return max(errors, default=0.0)


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
    return "\n".join(lines + not_fused(sweeps) + every_class(sweep)) + "\n"


def not_fused(sweeps: list[Sweep]) -> list[str]:
    """A section of what is not simply fused: a row for each class, verdict and reason, and their versions."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    without: dict[str, list[str]] = defaultdict(list)
    for sweep in sweeps:
        for one in sweep.outcomes:
            if one.verdict == "no labels":
                without[one.name].append(sweep.version)
            elif one.verdict != "fused":
                found[one.verdict, one.name, cell(one.reason)].append(sweep.version)
    lines = ["## Not fused", "", "| class | verdict | reason | versions |", "|---|---|---|---|"]
    for verdict, name, reason in sorted(found, key=lambda key: (VERDICTS.index(key[0]), *key[1:])):
        lines.append(f"| `{name}` | {verdict} | {reason} | {among(found[verdict, name, reason], sweeps)} |")
    named = [
        f"`{name}`" + f" ({among(without[name], sweeps)})" * (len(without[name]) < len(sweeps)) for name in without
    ]
    return [*lines, "", *[f"No loss of labels: {', '.join(sorted(named))}.", ""][: 2 * bool(named)]]


def among(versions: list[str], sweeps: list[Sweep]) -> str:
    return "all" if len(versions) == len(sweeps) else ", ".join(versions)


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


if __name__ == "__main__":
    sys.exit(main())
