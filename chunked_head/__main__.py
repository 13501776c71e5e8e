"""``python -m chunked_head``: what a call takes, what a model would get, and the state of an installation.

Exit codes: 0 done; 1 the doctor's self-test failed; 2 bad input, with one line on the error stream.
"""

import argparse
import contextlib
import json
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from . import losses
from .core.checks import in_a_line
from .functions.cross_entropy import linear_cross_entropy
from .functions.plan import plan
from .integrations.trl import TRL
from .kernels.common.gpus import GPUS, gpu_of
from .kernels.common.tiles import INTERPRETED
from .plan.plans import Plan, Section, as_text, facts, sections
from .stores import backend_of
from .stores.backend import has_triton

Found = tuple[dict[str, Any], list[Section]]  # for scripts, and for people
PROGRAM = "python -m chunked_head"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
LOSSES = sorted(one for one in losses.__all__ if one.islower() and one != "custom")
MODEL = "a folder with config.json, such a file, or a name in the local cache; nothing is downloaded"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the arguments)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    asked = vars(parser().parse_args(arguments))
    command, run, as_json = (asked.pop(name) for name in ("command", "run", "json"))
    try:
        record, shown = run(**asked)
    except (TypeError, ValueError) as error:
        print(f"{PROGRAM} {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(record, indent=1, default=str))
    else:
        print(as_text([section for section in shown if section[1]]))
    return 0 if record.get("passed", True) else 1


def parser() -> Parser:
    made = Parser(prog=PROGRAM, description="The head of a language model without its logits: tools.")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(title: str, run: Any, text: str) -> Any:
        added = commands.add_parser(title, help=text[0].lower() + text[1:].rstrip("."), description=text)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print JSON for scripts; sizes are bytes")
        return added.add_argument

    number: dict[str, Any] = {"type": int, "metavar": "N"}
    dtype: dict[str, Any] = {"choices": DTYPES}
    add = command("plan", run_plan, "How a call of these sizes runs and what memory it takes.")
    for size in ("--tokens", "--hidden", "--vocab"):
        add(size, **number, required=True)
    add("--dtype", **dtype, default="bf16", help="of the matmuls (default: bf16)")
    listed = f"summed, default cross_entropy: {', '.join(LOSSES)}"
    add("--loss", nargs="+", default=["cross_entropy"], choices=LOSSES, metavar="NAME", help=listed)
    add("--softcap", type=float, metavar="X")
    add("--teacher-k", **number, default=0, help="ids per token of a top-K teacher")
    add("--teacher-hidden", **number, help="hidden size of a dense teacher")
    add("--chunk-tokens", **number, help="at most so many tokens in a chunk")
    add("--ranks", **number, default=1, help="that share the vocabulary (default: 1)")
    explain = command("explain", run_explain, "What patch_model would do to a model of transformers, and why.")
    explain("model", metavar="MODEL", help=MODEL)
    explain("--tokens", **number, default=8192, help="to plan for (default: 8192)")
    explain("--dtype", **dtype, help="of the parameters (default: the configuration's)")
    explain("--autocast", **dtype, help="of torch.autocast, where the model trains under it")
    device = f"cuda, cpu, or an architecture that need not be there ({', '.join(GPUS)}); default: the GPU, else the CPU"
    for each in (add, explain):
        each("--device", metavar="NAME", help=device)
        each("--memory-budget", metavar="SIZE", help="such as 1GiB: of all but the gradients")
    command("doctor", run_doctor, "Versions, the GPU, the path that calls take, and a self-test with its figures.")
    return made


def run_plan(dtype: str, loss: list[str], **sizes: Any) -> Found:
    found = plan(dtype=DTYPES[dtype], loss=sum(getattr(losses, one)() for one in loss), **sizes)
    return of_plan(found), sections(found)


def of_plan(found: Plan) -> dict[str, Any]:
    numbers = ("schedule", "chunks", "chunk_tokens", "peak_bytes", "extra_bytes", "gradient_bytes", "weight_error")
    return {
        **{key: getattr(found, key) for key in numbers}, "budget_bytes": found.budget, "store": found.sizes.store.name,
        "facts": dict(facts(found)),
        "buffers": [buffer._asdict() | {"bytes": buffer.bytes} for buffer in found.buffers],
    }  # fmt: skip


def run_explain(model: str, dtype: str | None, autocast: str | None, **options: Any) -> Found:
    from .integrations.huggingface.explain import explain_model

    found = explain_model(model_of(model, DTYPES.get(dtype or "")), autocast=DTYPES.get(autocast or ""), **options)
    record = vars(found) | {"plan": found.plan and of_plan(found.plan)}
    return record, [("What patch_model would do", found.facts())]


def model_of(where: str, dtype: torch.dtype | None) -> Any:
    """A model of transformers without numbers, from its configuration."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"explain needs transformers (pip install transformers): {error}") from None
    try:
        config: Any = transformers.AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = getattr(transformers, config.architectures[0])(config)
    except Exception as error:  # of many kinds: no file, no JSON, no such name, a model that transformers does not know
        if isinstance(error, OSError) and not Path(where).exists():
            raise ValueError(
                f"{where} is neither a folder with config.json or such a file, nor a model in the local cache, and "
                f"nothing is downloaded; name one that is there, or fetch it first (hf download {where})"
            ) from None
        raise ValueError(f"{where} is not {MODEL}: {in_a_line(error)}") from None
    dtype = dtype or getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return model if dtype is None else model.to(dtype)


def run_doctor() -> Found:
    found = diagnose()
    tested = found["self_test"] | {"result, relative to float64": found["result"]}
    shown: list[Section] = []
    for title, record in (("Versions", found["versions"]), ("A call here", found["call"]), ("Self-test", tested)):
        texts = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in record.values()]
        shown.append((title, [(key.replace("_", " "), text) for key, text in zip(record, texts, strict=True)]))
    return found, [*shown, ("Odd", [("", sentence) for sentence in found["odd"]])]


PACKAGES = ("triton", "numpy", "transformers", "trl", "liger-kernel")
# by dtype: how far from float64's full logits a loss and a gradient may be, the latter by its norm. 16-bit types round
# exponentials and the gradient itself
BOUNDS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-4, 1e-2)}


def diagnose() -> dict[str, Any]:
    """``odd``: sentences, each with what to do. ``result``: of the self-test."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: dict[str, Any] = {"versions": versions(device), "call": {}, "self_test": {}}
    found["odd"] = odd(device, found["versions"].get("trl", TRL.tested[-1]))
    try:
        found["call"] = {"backend": backend_of(None, device).name}
        found["call"] |= facts(plan(8192, 4096, 128256, dtype, device=device))
        found["self_test"] = test = self_test(device, dtype)
        checked = ("loss", "loss"), ("hidden", "gradient"), ("weight", "gradient")
        passed = all(test[f"{one}_error"] <= test[f"{bound}_bound"] for one, bound in checked)  # not where one is nan
        result = "pass" if passed else "FAIL, a wrong result: do not train with this installation"
    except Exception as error:  # whatever is broken is what is asked for
        result = f"FAIL, {in_a_line(error)}"
    return found | {"result": result, "passed": result == "pass"}


def versions(device: torch.device) -> dict[str, str]:
    """Versions of what runs, in which a checkout and an installation may differ; the GPU, its row of docs/gpus.md."""
    own = sys.modules["chunked_head"].__version__
    found = {"python": platform.python_version(), "chunked-head": own, "torch": torch.__version__}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if device.type == "cuda":
        there, row = torch.cuda.get_device_properties(device), gpu_of(device)
        runtime = f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"HIP {torch.version.hip}"
        memory, known = f"{there.total_memory / 2**30:.0f} GiB", row.name if row else "not"
        found["GPU"] = f"{there.name}, {memory}; {runtime}; {known} in docs/gpus.md"
    return found


def odd(device: torch.device, trl: str) -> list[str]:
    """Sentences about what is unusual, each with what to do."""
    gpu = device.type == "cuda"
    applies = {
        "torch sees no GPU: calls run on the CPU; nvidia-smi says whether the driver sees one": not gpu,
        "Triton is not installed: calls on the GPU take plain torch; pip install triton": gpu and not has_triton(),
        "this GPU is not in docs/gpus.md: calls keep fp32 logits, which is slower": gpu and gpu_of(device) is None,
        "TRITON_INTERPRET is set: kernels run in an interpreter, for tests alone; unset it to train": INTERPRETED,
        f"TRL {trl} was not tested; patch_trl() warns where it differs from {', '.join(TRL.tested)}": not any(
            trl.split(".")[:2] == tested.split(".")[:2] for tested in TRL.tested
        ),
    }
    return [sentence for sentence, so in applies.items() if so]


@torch.enable_grad()
def self_test(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A call compared with float64: relative errors, the worst of three calls."""
    made: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    hidden, weight = (torch.randn(rows, 128, dtype=dtype, **made) for rows in (300, 1000))
    target = torch.randint(0, 1000, (300,), **made)
    target[::7] = -100
    weight.mul_(2 * 128**-0.5)  # logits of order 1
    for operand in (hidden, weight):
        operand.requires_grad_()
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    true, errors = with_gradients(F.cross_entropy(wide[0] @ wide[1].T, target), wide), []
    for _ in range(3):
        found = with_gradients(linear_cross_entropy(hidden, weight, target, chunk_tokens=128), (hidden, weight))
        errors.append([float((ours.double() - t).norm() / t.norm()) for ours, t in zip(found, true, strict=True)])
    loss_error, hidden_error, weight_error = torch.tensor(errors).amax(0).tolist()  # nan where one is
    return {
        "loss_error": loss_error, "loss_bound": BOUNDS[dtype][0], "hidden_error": hidden_error,
        "weight_error": weight_error, "gradient_bound": BOUNDS[dtype][1],
    }  # fmt: skip


def with_gradients(loss: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return loss.detach(), *torch.autograd.grad(loss, inputs)


if __name__ == "__main__":
    sys.exit(main())
