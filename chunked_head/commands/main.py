"""The commands: their arguments, what they print, their exit codes.

0: done. 1: the doctor's self-test failed. 2: bad input, with one line on the error stream.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from .. import losses
from ..api.plan import plan
from ..integrations.huggingface.explain import Explanation, explain_model
from ..kernels.common.gpus import GPUS
from ..losses.base import Losses
from ..program.memory import MiB
from ..program.plans import Plan, facts, name
from .doctor import diagnose
from .show import Section, show

PROGRAM = "python -m chunked_head"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
LOSSES = sorted(one for one in losses.__all__ if one.islower() and one != "custom")
DEVICE = f"cuda, cpu, or an architecture that need not be there ({', '.join(GPUS)}); default: the GPU, else the CPU"
# how a configuration without a class's name becomes a model, in this order
AUTOMATIC = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText", "AutoModelForMaskedLM")


class BadInput(Exception):
    """What is wrong with what was asked, in a line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the arguments)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    asked = parser().parse_args(arguments)
    try:
        return asked.run(asked)
    except (BadInput, TypeError, ValueError) as error:
        print(f"{PROGRAM} {asked.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def parser() -> Parser:
    made = Parser(prog=PROGRAM, description="The head of a language model without its logits: tools.")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(title: str, run: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(title, help=text[0].lower() + text[1:].rstrip("."), description=text)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print JSON for scripts; sizes are bytes")
        return added

    planned = command("plan", run_plan, "How a call of these sizes runs and what memory it takes.")
    for size in ("tokens", "hidden", "vocab"):
        planned.add_argument(f"--{size}", type=int, required=True, metavar="N")
    planned.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the matmuls (default: bf16)")
    planned.add_argument("--loss", nargs="+", choices=LOSSES, metavar="NAME",
                         help=f"summed, default cross_entropy: {', '.join(LOSSES)}")  # fmt: skip
    planned.add_argument("--softcap", type=float, metavar="X")
    planned.add_argument("--teacher-k", type=int, default=0, metavar="K", help="ids per token of a top-K teacher")
    planned.add_argument("--teacher-hidden", type=int, metavar="N", help="columns of a dense teacher's head")
    planned.add_argument("--chunk-tokens", type=int, metavar="N", help="at most so many tokens in a chunk")
    planned.add_argument("--ranks", type=int, default=1, metavar="N", help="that share the vocabulary (default: 1)")

    explained = command("explain", run_explain, "What patch_model would do to a model of transformers, and why.")
    explained.add_argument("model", metavar="MODEL", help="a folder with config.json, such a file, or the name of a "
                           "model whose configuration is in the local cache; nothing is downloaded")  # fmt: skip
    explained.add_argument("--tokens", type=int, default=8192, metavar="N", help="to plan for (default: 8192)")
    explained.add_argument("--dtype", choices=DTYPES, help="of the parameters (default: the configuration's)")
    explained.add_argument("--autocast", choices=DTYPES, help="of torch.autocast, where the model trains under it")

    for added in (planned, explained):
        added.add_argument("--device", metavar="NAME", help=DEVICE)
        added.add_argument("--memory-budget", metavar="SIZE", help="such as 1GiB: of all but the gradients")

    command("doctor", run_doctor, "Versions, the GPU, the path that calls take, and a self-test with its figures.")
    return made


def run_plan(asked: argparse.Namespace) -> int:
    found = plan(
        asked.tokens, asked.hidden, asked.vocab, DTYPES[asked.dtype], loss=sum_of(asked.loss), softcap=asked.softcap,
        teacher_k=asked.teacher_k, teacher_hidden=asked.teacher_hidden, memory_budget=asked.memory_budget,
        chunk_tokens=asked.chunk_tokens, ranks=asked.ranks, device=asked.device,
    )  # fmt: skip
    report(asked.json, of_plan(found), sections_of_plan(found))
    return 0


def sum_of(names: Sequence[str] | None) -> Losses | None:
    """None for the plain cross-entropy, which ``plan`` knows best."""
    return sum(getattr(losses, one)() for one in names) if names else None


def of_plan(found: Plan) -> dict[str, Any]:
    sizes = found.sizes
    return {
        "tokens": sizes.tokens, "hidden": sizes.hidden, "vocab": sizes.vocab, "dtype": name(sizes.dtype),
        "schedule": found.schedule, "chunks": found.chunks, "chunk_tokens": found.chunk_tokens, "store": sizes.store,
        "gpu": None if sizes.gpu is None else sizes.gpu.name, "budget_bytes": found.budget,
        "peak_bytes": found.peak_bytes, "extra_bytes": found.extra_bytes, "gradient_bytes": found.gradient_bytes,
        "weight_accumulate": name(found.weight_accumulate), "hidden_accumulate": name(found.hidden_accumulate),
        "weight_error": found.weight_error, "facts": dict(facts(found)),
        "terms": [term._asdict() for term in found.terms if term.sweep or term.loop or term.finish],
    }  # fmt: skip


def sections_of_plan(found: Plan) -> list[Section]:
    terms = [term for term in found.terms if term.sweep or term.loop or term.finish]
    rows = [(term.name, *(f"{size / MiB:,.1f}" for size in (term.sweep, term.loop, term.finish))) for term in terms]
    totals = [
        ("peak over the inputs", f"{found.peak_bytes / MiB:,.1f} MiB"),
        ("beside the gradients", f"{found.extra_bytes / MiB:,.1f} MiB of {found.budget / MiB:,.0f}"),
    ]
    return [
        Section("Plan", facts(found)), Section("MiB", rows, ("", "sweep", "loop", "finish")), Section("Memory", totals),
    ]  # fmt: skip


def run_explain(asked: argparse.Namespace) -> int:
    options = {} if asked.memory_budget is None else {"memory_budget": asked.memory_budget}
    found = explain_model(
        model_of(asked.model, DTYPES.get(asked.dtype)), asked.tokens, autocast=DTYPES.get(asked.autocast),
        device=asked.device, **options,
    )  # fmt: skip
    report(asked.json, of_explanation(found), [Section("What patch_model would do", found.facts())])
    return 0


def of_explanation(found: Explanation) -> dict[str, Any]:
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    planned = None if found.plan is None else of_plan(found.plan)
    return fields | {
        "full_logits": dict(found.full_logits), "plan": planned, "full_bytes": found.full_bytes,
        "saved_bytes": found.saved_bytes,
    }  # fmt: skip


def model_of(where: str, dtype: torch.dtype | None) -> Any:
    """A model of transformers without numbers, from its configuration alone."""
    try:
        import transformers
    except ImportError as error:
        raise BadInput(f"explain needs transformers (pip install transformers): {error}") from None
    path = Path(where)
    if path.is_dir() and not (path / "config.json").is_file():
        raise BadInput(f"{where} is a folder without config.json")
    try:
        config: Any = transformers.AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds: no file, no JSON, no such name, a model_type that it does not know
        known = "is no model's configuration that transformers reads"
        hint = known if path.exists() else "is no path, and no name in the local cache (nothing is downloaded)"
        raise BadInput(f"{where} {hint}: {str(error).strip().splitlines()[0]}") from None
    named = [getattr(transformers, one, None) for one in getattr(config, "architectures", None) or ()]
    makers = [one for one in named if one is not None]
    automatic = [getattr(transformers, one) for one in AUTOMATIC if hasattr(transformers, one)]
    makers += [functools.partial(one.from_config, trust_remote_code=False) for one in automatic]
    dtype = dtype or next((one.dtype for one in configs_of(config) if getattr(one, "dtype", None) is not None), None)
    failures = []
    for make in makers:
        try:
            with torch.device("meta"):
                made = make(config)
            return made if dtype is None else made.to(dtype)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
    raise BadInput(f"transformers makes no model with a head of {where}: {failures[0]}")


def configs_of(config: Any) -> Iterator[Any]:
    """A configuration, and that of the text model inside of it."""
    yield config
    with contextlib.suppress(AttributeError, ValueError):
        yield config.get_text_config()


def run_doctor(asked: argparse.Namespace) -> int:
    found = diagnose()
    report(asked.json, found.as_dict(), found.sections())
    return 0 if found.passed else 1


def report(as_json: bool, record: dict[str, Any], sections: Sequence[Section]) -> None:
    if as_json:
        print(json.dumps(record, indent=1))
    else:
        show(sections)
