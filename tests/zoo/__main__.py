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
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import Progress

from . import report
from .check import Outcome
from .classes import KINDS, find
from .pool import outcomes


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
    console = Console()
    torch.set_num_threads(1)  # before any work: classes are run in forks of this process
    transformers.logging.set_verbosity_error()
    entries = [entry for entry in find(asked.kind) if not asked.only or entry.name in asked.only]
    unknown = set(asked.only or ()) - {entry.name for entry in entries}
    if unknown:
        console.print(f"transformers {transformers.__version__} has no {sorted(unknown)[0]} of kind {asked.kind}")
        return 2
    found: list[Outcome] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"transformers {transformers.__version__}", total=len(entries))
        for outcome in outcomes(entries, asked.workers, asked.limit_seconds):
            found.append(outcome)
            progress.update(task, advance=1, description=f"transformers {transformers.__version__}: {outcome.name}")
            if outcome.verdict == "WRONG":
                progress.console.print(f"[red]WRONG[/red] {outcome.name}: {outcome.reason}")
    sweep = report.Sweep(transformers.__version__, sorted(found, key=lambda one: one.name))
    console.print(report.table(sweep, everything=bool(asked.only)))
    if asked.json:
        asked.json.write_text(json.dumps(sweep.as_dict(), indent=1) + "\n", encoding="utf-8")
    if asked.output:
        others = [report.Sweep.of(json.loads(path.read_text(encoding="utf-8"))) for path in asked.beside]
        asked.output.write_text(report.markdown(sweep, others), encoding="utf-8")
    complaints = report.complaints(sweep)
    for complaint in complaints:
        console.print(complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
