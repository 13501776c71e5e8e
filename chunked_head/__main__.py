"""``python -m chunked_head``: commands that print the plan of a call, what ``patch_model`` would do to a model, and the
state of an installation.

Exit codes: 0 for success, 1 if the doctor's self-test failed, 2 for bad input, with a line on the error stream.
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
from .core.gpus import GPUS, gpu_of
from .core.tiles import INTERPRETED
from .functions.cross_entropy import linear_cross_entropy
from .functions.plan import plan
from .integrations.trl import TRL
from .plan.plans import Plan, Section, as_text, facts, sections
from .stores import backend_of
from .stores.backend import has_triton

Report = tuple[dict[str, Any], list[Section]]  # result of a command: a record for JSON, and sections of text
PROGRAM = "chunked-head" if Path(sys.argv[0]).stem == "chunked-head" else "python -m chunked_head"
NO_GPU = "cpu: torch sees no GPU here; --device H100 or another card's name plans for that"
NO_DTYPE = "bfloat16: the configuration names none; --dtype fp32 is for a model in float32"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
LOSSES = sorted(name for name in losses.__all__ if name.islower() and name != "custom")
MODEL = "a folder with config.json, such a file, or a name in the local cache; nothing is downloaded"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the arguments)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that ``arguments`` name (None: the process's arguments); returns the exit code."""
    options = vars(parser().parse_args(arguments))
    command, run_command, as_json = (options.pop(name) for name in ("command", "run", "json"))
    try:
        record, report_sections = run_command(**options)  # a ``Report``
    except (TypeError, ValueError) as error:
        print(f"{PROGRAM} {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(record, indent=1, default=str))
    else:
        print(as_text([section for section in report_sections if section[1]]))
    return 0 if record.get("passed", True) else 1


def parser() -> Parser:
    """The parser of all commands' arguments. ``run`` among the parsed values is the function that runs the command."""
    program = Parser(prog=PROGRAM, description="The head of a language model without its logits: tools.")
    program.add_argument(
        "--version", action="version", version=f"chunked_head {library_version()}, torch {torch.__version__}"
    )
    subcommands = program.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(title: str, run: Any, description: str) -> Any:
        subcommand = subcommands.add_parser(
            title, help=description[0].lower() + description[1:].rstrip("."), description=description
        )
        subcommand.set_defaults(run=run)
        subcommand.add_argument("--json", action="store_true", help="print JSON for scripts; sizes are bytes")
        return subcommand.add_argument

    int_argument: dict[str, Any] = {"type": int, "metavar": "N"}
    tokens_argument: dict[str, Any] = {"type": token_count, "metavar": "N"}
    dtype_argument: dict[str, Any] = {"choices": DTYPES}
    add_plan = command("plan", run_plan, "How a call of these sizes runs and what memory it takes.")  # add_argument
    add_plan("--tokens", **tokens_argument, required=True, help="such as 8192 or 8k")
    for size_name in ("--hidden", "--vocab"):
        add_plan(size_name, **int_argument, required=True)
    add_plan("--dtype", **dtype_argument, default="bf16", help="of the matmuls (default: bf16)")
    loss_help = f"summed, default cross_entropy: {', '.join(LOSSES)}"
    add_plan("--loss", nargs="+", default=["cross_entropy"], choices=LOSSES, metavar="NAME", help=loss_help)
    add_plan("--softcap", type=float, metavar="X")
    add_plan("--teacher-k", **int_argument, default=0, help="ids per token of a top-K teacher")
    add_plan("--teacher-hidden", **int_argument, help="hidden size of a dense teacher")
    add_plan("--chunk-tokens", **tokens_argument, help="at most so many tokens in a chunk")
    add_plan("--ranks", **int_argument, default=1, help="that share the vocabulary (default: 1)")
    add_plan("--verbose", action="store_true", help="list the call's buffers, with their shapes and lifetimes")
    add_explain = command("explain", run_explain, "What patch_model would do to a model of transformers, and why.")
    add_explain("model", metavar="MODEL", help=MODEL)
    add_explain("--tokens", **tokens_argument, default=8192, help="to plan for (default: 8192)")
    add_explain("--dtype", **dtype_argument, help="of the parameters (default: the configuration's, else bf16)")
    add_explain("--autocast", **dtype_argument, help="of torch.autocast, where the model trains under it")
    device_help = (
        f"cuda, cpu, or a GPU that need not be there: a card such as H100, L40S or RTX 4090, or {', '.join(GPUS)}"
    )
    for add_argument in (add_plan, add_explain):
        add_argument("--device", metavar="NAME", help=f"{device_help} (default: the GPU, else the CPU)")
        add_argument("--memory-budget", metavar="SIZE", help="such as 1GiB: of all but the gradients")
    command("doctor", run_doctor, "Versions, the GPU, the path that calls take, and a self-test with its figures.")
    return program


def library_version() -> str:
    """Version of the imported package, which may be a checkout while another version is installed."""
    return str(sys.modules["chunked_head"].__version__)


def token_count(text: str) -> int:
    """The number of tokens that a text such as "8192", "8k" or "1m" stands for; ArgumentTypeError for other texts."""
    factor = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    try:
        return int(text if factor == 1 else text[:-1]) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number such as 8192, 8k or 1m, got {text!r}") from None


def run_plan(dtype: str, loss: list[str], verbose: bool, **sizes: Any) -> Report:
    call_plan = plan(dtype=DTYPES[dtype], loss=sum(getattr(losses, name)() for name in loss), **sizes)
    shown_sections = [section for section in sections(call_plan) if verbose or section[0] != "Buffers"]
    is_default_cpu = sizes["device"] is None and not torch.cuda.is_available()
    return plan_record(call_plan), [*shown_sections, ("Planned for", [("", NO_GPU)] if is_default_cpu else [])]


def plan_record(call_plan: Plan) -> dict[str, Any]:
    """A plan as numbers, texts and lists, for JSON."""
    field_names = ("schedule", "chunks", "chunk_tokens", "peak_bytes", "extra_bytes", "gradient_bytes", "weight_error")
    return {
        **{name: getattr(call_plan, name) for name in field_names}, "budget_bytes": call_plan.budget,
        "store": call_plan.sizes.store.name, "facts": dict(facts(call_plan)),
        "buffers": [buffer._asdict() | {"bytes": buffer.bytes} for buffer in call_plan.buffers],
    }  # fmt: skip


def run_explain(model: str, dtype: str | None, autocast: str | None, **options: Any) -> Report:
    from .integrations.huggingface.explain import explain_model

    model_on_meta, is_dtype_set = hollow_model(model, DTYPES.get(dtype or ""))
    explanation = explain_model(model_on_meta, autocast=DTYPES.get(autocast or ""), **options)
    record = vars(explanation) | {"plan": explanation.plan and plan_record(explanation.plan)}
    lines = explanation.facts() + ([] if is_dtype_set else [("dtype", NO_DTYPE)])
    lines += [("planned for", NO_GPU)] if options["device"] is None and not torch.cuda.is_available() else []
    return record, [("What patch_model would do", lines)]


def hollow_model(source: str, dtype: torch.dtype | None) -> tuple[Any, bool]:
    """Returns a model of transformers on the meta device, built from a configuration; and a bool: True if
    ``dtype`` or the configuration sets the model's dtype, False if the dtype is bfloat16 by default. ``source``: path
    or name of the configuration (``MODEL``). ValueError if there is no such model."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"explain needs transformers (pip install transformers): {error}") from None
    try:
        config: Any = transformers.AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = getattr(transformers, config.architectures[0])(config)
    except Exception as error:  # of many kinds: no file, no JSON, no such name, a model that transformers does not know
        if isinstance(error, OSError) and not Path(source).exists():
            raise ValueError(
                f"{source} is neither a folder with config.json or such a file, nor a model in the local cache, and "
                f"nothing is downloaded; name one that is there, or fetch it first (hf download {source})"
            ) from None
        raise ValueError(f"{source} is not {MODEL}: {in_a_line(error)}") from None
    dtype = dtype or getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return model.to(dtype or torch.bfloat16), dtype is not None


def run_doctor() -> Report:
    diagnosis = diagnose()
    results_by_name = diagnosis["self_test"] | {"result, relative to float64": diagnosis["result"]}
    shown_sections: list[Section] = []
    records = {"Versions": diagnosis["versions"], "A call here": diagnosis["call"], "Self-test": results_by_name}
    for title, record in records.items():
        texts = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in record.values()]
        shown_sections.append((title, [(key.replace("_", " "), text) for key, text in zip(record, texts, strict=True)]))
    return diagnosis, [*shown_sections, ("Odd", [("", sentence) for sentence in diagnosis["odd"]])]


PACKAGES = ("triton", "numpy", "transformers", "trl", "liger-kernel")  # packages whose versions the doctor prints
# largest relative errors of a loss and of a gradient (its norm) against full logits in float64, by dtype. 16-bit types
# round exponentials and the gradient
BOUNDS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-4, 1e-2)}  # (loss, gradient)


def diagnose() -> dict[str, Any]:
    """The doctor's results by name. ``versions``: texts. ``call``: facts about a call of a usual size. ``self_test``:
    errors and bounds. ``result``: "pass" or the failure. ``passed``: a bool. ``odd``: sentences on what is unusual."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    record: dict[str, Any] = {"versions": versions(device), "call": {}, "self_test": {}}
    record["odd"] = unusual_facts(device, record["versions"].get("trl", TRL.tested_versions[-1]))
    try:
        record["call"] = {"backend": backend_of(None, device).name}
        record["call"] |= facts(plan(8192, 4096, 128256, dtype, device=device))
        record["self_test"] = results_by_name = self_test(device, dtype)
        bound_names = {"loss": "loss", "hidden": "gradient", "weight": "gradient"}
        # a nan does not pass
        has_passed = all(
            results_by_name[f"{name}_error"] <= results_by_name[f"{bound_name}_bound"]
            for name, bound_name in bound_names.items()
        )
        result = "pass" if has_passed else "FAIL, a wrong result: do not train with this installation"
    except Exception as error:  # the doctor reports whatever is broken
        result = f"FAIL, {in_a_line(error)}"
    return record | {"result": result, "passed": result == "pass"}


def versions(device: torch.device) -> dict[str, str]:
    """Versions of Python and packages by name; and as "GPU" a text about the GPU, if ``device`` is one."""
    installed_versions = {
        "python": platform.python_version(),
        "chunked-head": library_version(),
        "torch": torch.__version__,
    }
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed_versions[package] = metadata.version(package)
    if device.type == "cuda":
        gpu_properties, gpu = torch.cuda.get_device_properties(device), gpu_of(device)
        runtime = f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"HIP {torch.version.hip}"
        memory_size, row_name = f"{gpu_properties.total_memory / 2**30:.0f} GiB", gpu.name if gpu else "not"
        installed_versions["GPU"] = f"{gpu_properties.name}, {memory_size}; {runtime}; {row_name} in docs/gpus.md"
    return installed_versions


def unusual_facts(device: torch.device, trl_version: str) -> list[str]:
    """Sentences about what is unusual in the installation, each with a remedy. ``trl_version``: version of the
    installed TRL; a tested version if TRL is not installed."""
    has_gpu = device.type == "cuda"
    truth_by_sentence = {
        "torch sees no GPU: calls run on the CPU; nvidia-smi says whether the driver sees one": not has_gpu,
        "Triton is not installed: calls on the GPU take plain torch; pip install triton": has_gpu and not has_triton(),
        "this GPU is not in docs/gpus.md: calls keep fp32 logits, which is slower": has_gpu and gpu_of(device) is None,
        "TRITON_INTERPRET is set: kernels run in an interpreter, for tests alone; unset it to train": INTERPRETED,
        f"TRL {trl_version} was not tested; patch_trl() warns where it differs from {', '.join(TRL.tested_versions)}":
            trl_version.split(".")[:2] not in [version.split(".")[:2] for version in TRL.tested_versions],
    }  # fmt: skip
    return [sentence for sentence, is_true in truth_by_sentence.items() if is_true]


@torch.enable_grad()
def self_test(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Errors and bounds by name, for the loss and each gradient. An error is relative to the result in float64, and
    the largest of three calls."""
    draw_options: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    hidden, weight = (torch.randn(rows, 128, dtype=dtype, **draw_options) for rows in (300, 1000))
    target = torch.randint(0, 1000, (300,), **draw_options)
    target[::7] = -100
    weight.mul_(2 * 128**-0.5)  # logits of order 1
    for operand in (hidden, weight):
        operand.requires_grad_()
    fp64_operands = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact_loss = F.cross_entropy(fp64_operands[0] @ fp64_operands[1].T, target)
    exact_results, errors_of_calls = loss_and_gradients(exact_loss, fp64_operands), []
    for _ in range(3):
        loss = linear_cross_entropy(hidden, weight, target, chunk_tokens=128)
        results = loss_and_gradients(loss, (hidden, weight))
        errors_of_calls.append([
            float((result.double() - exact_result).norm() / exact_result.norm())
            for result, exact_result in zip(results, exact_results, strict=True)
        ])  # fmt: skip
    loss_error, hidden_error, weight_error = torch.tensor(errors_of_calls).amax(0).tolist()  # amax keeps a nan
    return {
        "loss_error": loss_error, "loss_bound": BOUNDS[dtype][0], "hidden_error": hidden_error,
        "weight_error": weight_error, "gradient_bound": BOUNDS[dtype][1],
    }  # fmt: skip


def loss_and_gradients(loss: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The loss, detached, and then its gradients with respect to ``inputs``."""
    return loss.detach(), *torch.autograd.grad(loss, inputs)


if __name__ == "__main__":
    sys.exit(main())
