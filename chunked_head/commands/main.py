"""The commands: their arguments, what they print, their exit codes.

0: done. 1: the doctor's self-test failed. 2: bad input, with one line on the error stream.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from .. import losses
from ..api.plan import plan
from ..integrations.huggingface.explain import explain_model
from ..kernels.common.gpus import GPUS
from ..program.plans import Plan, Section, facts, sections
from .doctor import diagnose
from .show import show

Found = tuple[dict[str, Any], list[Section]]  # for scripts, and for people
PROGRAM = "python -m chunked_head"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
LOSSES = sorted(one for one in losses.__all__ if one.islower() and one != "custom")
DEVICE = f"cuda, cpu, or an architecture that need not be there ({', '.join(GPUS)}); default: the GPU, else the CPU"
MODEL = "a folder with config.json, such a file, or a name in the local cache; nothing is downloaded"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the arguments)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    asked = parser().parse_args(arguments)
    try:
        record, shown = asked.run(asked)
    except (TypeError, ValueError) as error:
        print(f"{PROGRAM} {asked.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if asked.json:
        print(json.dumps(record, indent=1, default=str))
    else:
        show(shown)
    return 0 if record.get("passed", True) else 1


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
    planned.add_argument("--teacher-hidden", type=int, metavar="N", help="hidden size of a dense teacher")
    planned.add_argument("--chunk-tokens", type=int, metavar="N", help="at most so many tokens in a chunk")
    planned.add_argument("--ranks", type=int, default=1, metavar="N", help="that share the vocabulary (default: 1)")

    explained = command("explain", run_explain, "What patch_model would do to a model of transformers, and why.")
    explained.add_argument("model", metavar="MODEL", help=MODEL)
    explained.add_argument("--tokens", type=int, default=8192, metavar="N", help="to plan for (default: 8192)")
    explained.add_argument("--dtype", choices=DTYPES, help="of the parameters (default: the configuration's)")
    explained.add_argument("--autocast", choices=DTYPES, help="of torch.autocast, where the model trains under it")
    for added in (planned, explained):
        added.add_argument("--device", metavar="NAME", help=DEVICE)
        added.add_argument("--memory-budget", metavar="SIZE", help="such as 1GiB: of all but the gradients")

    text = "Versions, the GPU, the path that calls take, and a self-test with its figures."
    command("doctor", lambda asked: diagnose(), text)
    return made


def run_plan(asked: argparse.Namespace) -> Found:
    sizes: dict[str, Any] = {key: value for key, value in vars(asked).items() if key not in ("command", "run", "json")}
    summed = sum(getattr(losses, one)() for one in asked.loss) if asked.loss else None
    found = plan(**sizes | {"dtype": DTYPES[asked.dtype], "loss": summed})
    return of_plan(found), sections(found)


def of_plan(found: Plan) -> dict[str, Any]:
    numbers = ("schedule", "chunks", "chunk_tokens", "peak_bytes", "extra_bytes", "gradient_bytes", "weight_error")
    return {
        **{key: getattr(found, key) for key in numbers}, "budget_bytes": found.budget, "store": found.sizes.store,
        "facts": dict(facts(found)), "terms": [term._asdict() for term in found.terms],
    }  # fmt: skip


def run_explain(asked: argparse.Namespace) -> Found:
    options = {} if asked.memory_budget is None else {"memory_budget": asked.memory_budget}
    options |= {"autocast": DTYPES.get(asked.autocast), "device": asked.device}
    found = explain_model(model_of(asked.model, DTYPES.get(asked.dtype)), asked.tokens, **options)
    record = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    record |= {"plan": found.plan and of_plan(found.plan)}
    return record, [("What patch_model would do", found.facts())]


def model_of(where: str, dtype: torch.dtype | None) -> Any:
    """A model of transformers without numbers, from its configuration alone."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"explain needs transformers (pip install transformers): {error}") from None
    try:
        config: Any = transformers.AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = getattr(transformers, config.architectures[0])(config)
    except Exception as error:  # of many kinds: no file, no JSON, no such name, a model that transformers does not know
        raise ValueError(f"{where} is not {MODEL}: {type(error).__name__}: {error}") from None
    dtype = dtype or getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return model if dtype is None else model.to(dtype)
