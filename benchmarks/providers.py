"""The implementations that the benchmarks compare."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.shapes import Shape, parse_bytes, parse_dtype

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Late = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Package(NamedTuple):
    """A rival in a package: the package's name, its module and function, options after the three operands, and the
    compute capability that it needs."""

    name: str
    module: str
    function: str
    options: dict[str, Any]
    capability: tuple[int, int] = (0, 0)


_LIGER = "liger-kernel", "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"
# its kernels for Hopper: on other GPUs, and at sizes that they do not take, they raise
_LIGER_SM90 = "liger-kernel", "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
_TRL = Package("trl", "trl.kernels.chunked_logprob", "ChunkedLogProbFunction", {})
_QUACK = "quack-kernels", "quack.linear_cross_entropy", "chunked_linear_cross_entropy"
PACKAGES = {
    "liger": Package(*_LIGER, {}),
    "liger-16": Package(*_LIGER, {"chunk_mem_const": 16}),
    "liger-hopper": Package(*_LIGER_SM90, "liger_fused_linear_cross_entropy_sm90", {}, (9, 0)),
    # it chooses between its two modes by itself: scaled exponentials need sm_90, bf16 and a vocabulary divisible by 128
    "quack": Package(*_QUACK, {}, (9, 0)),
    # and tunes itself for minutes before the first call of the other one, unless told not to
    "quack-base": Package(*_QUACK, {"use_scaled_exp": False, "tuned": False}, (9, 0)),
    # by default blocks of the gradient of the logits that are all below 2.4e-4 (bf16) are left out
    "cce": Package("cut-cross-entropy", "cut_cross_entropy", "linear_cross_entropy", {"impl": "cce"}, (8, 0)),
    "trl": _TRL,
    # LGPL and AGPL: it is run where it is installed, and nothing of it is here
    "unsloth": Package("unsloth-zoo", "unsloth_zoo.fused_losses.cross_entropy_loss", "unsloth_fused_ce_loss", {}),
}
NAMES = ("ours", "eager", "compile", "torch", *PACKAGES)
# Packages whose own ``__init__`` asks for all of Unsloth: its head is imported below empty ones.
_UNSLOTH_PARENTS = ("unsloth_zoo", "unsloth_zoo.temporary_patches", "unsloth_zoo.fused_losses")
# Functions of log-probabilities and entropy whose gradients come in backward, of logits that are made again there.
LATE_PACKAGES = {
    "late-trl": _TRL,
    "late-liger": Package(
        "liger-kernel", "liger_kernel.ops.fused_linear_scaled_cross_entropy",
        "LigerFusedLinearScaledCrossEntropyFunction", {},
    ),
}  # fmt: skip
LATE = ("late-ours", "late-eager", "late-compile", *LATE_PACKAGES)
NEWER_TORCH = "NEWER_TORCH"  # of a folder, where the installed torch has no chunked linear_cross_entropy
BONUS = 0.01  # of the entropy in their loss, which is otherwise the cross-entropy


class Unavailable(Exception):
    """Raised where a provider is not installed or cannot run on this device; the message says why."""


@dataclass(frozen=True)
class Provider:
    """One implementation with its options, ready to be called with hidden states, weight and targets."""

    label: str
    name: str
    call: Loss
    options: dict[str, Any] = field(default_factory=dict)
    read: Late | None = None  # the log-probabilities and entropies that the loss is made of

    def logprobs(self, *operands: Tensor) -> Tensor:
        return self.read(*operands)[0] if self.read else self.call(*operands)


def parse_spec(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and options of a provider such as `eager` or `ours:chunk_tokens=4096`."""
    name, colon, option_text = text.partition(":")
    if name not in (*NAMES, *LATE):
        raise ValueError(f"provider {name!r} is none of {', '.join((*NAMES, *LATE))}")
    if colon and name != "ours":
        raise ValueError(f"provider {name!r} takes no options, only ours does")
    options: dict[str, Any] = {}
    for assignment in option_text.split(",") if colon else ():
        key, equals, value = assignment.partition("=")
        if not (key.isidentifier() and equals and value):
            raise ValueError(f"option {assignment!r} of provider {text!r} is not of the form key=value")
        options[key] = _parse_value(key, value)
    return name, options


def _parse_value(key: str, text: str) -> Any:
    if key.endswith("dtype"):
        return parse_dtype(text)
    if key == "memory_budget":
        return parse_bytes(text)
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def build(spec: str, device: torch.device) -> Provider:
    """Make a provider ready for a device, or raise Unavailable with the reason."""
    name, options = parse_spec(spec)
    if name == "eager":
        return Provider(spec, name, eager)
    if name in LATE:
        read = _late(name, device)
        return Provider(spec, name, functools.partial(_late_loss, read), read=read)
    makers = {"compile": _compiled, "torch": _torch_native} | dict.fromkeys(PACKAGES, _packaged)
    if name in makers:
        return Provider(spec, name, makers[name](name, device))
    return Provider(spec, name, functools.partial(_import_ours(options).linear_cross_entropy, **options), options)


def resolve(specs: Sequence[str], device: torch.device) -> tuple[list[Provider], dict[str, str]]:
    """Build each named provider; return those that can run, and the reason for each one that cannot."""
    ready: list[Provider] = []
    skipped: dict[str, str] = {}
    for spec in dict.fromkeys(specs):
        try:
            ready.append(build(spec, device))
        except Unavailable as reason:
            skipped[spec] = str(reason)
        except Exception as error:  # such as a compiler that does not import: no other provider is lost
            skipped[spec] = f"it could not be set up: {type(error).__name__}: {error}"
    return ready, skipped


def build_again(labels: Sequence[str], device: torch.device) -> list[Provider]:
    """Build providers that could run before, since compiled code is for one shape.

    The call of a provider that cannot be set up any more raises Unavailable, so that its row says why.
    """

    def unavailable(reason: str, *operands: Tensor) -> Tensor:
        raise Unavailable(reason)

    ready, skipped = resolve(labels, device)
    broken = {label: functools.partial(unavailable, reason) for label, reason in skipped.items()}
    return ready + [Provider(label, parse_spec(label)[0], call) for label, call in broken.items()]


def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The usual head: all logits in the input's type, then the cross-entropy in float32."""
    return F.cross_entropy((hidden @ weight.T).float(), target)


def eager_late(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and entropies, by all logits in float32."""
    logprobs = (hidden @ weight.T).float().log_softmax(1)
    return logprobs.gather(1, target[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


def _late_loss(read: Late, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logprobs, entropy = read(hidden, weight, target)
    return -(logprobs + BONUS * entropy).mean()


def _late(name: str, device: torch.device) -> Late:
    if name == "late-eager":
        return eager_late
    if name == "late-compile":
        return _compiled(name, device, eager_late)
    if name == "late-ours":
        return functools.partial(_import_ours({}).linear_logprobs, entropy=True)
    function = _function(LATE_PACKAGES[name], device)

    def read(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
        if name == "late-trl":
            return _trl(function, hidden, weight, target, ("entropy",))[:2]
        loss, entropy = function.apply(hidden, weight, target, 1.0, -100, 1, True)
        return -loss, entropy

    return read


def _compiled(name: str, device: torch.device, function: Callable[..., Any] = eager) -> Callable[..., Any]:
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise Unavailable("torch.compile needs Triton on a GPU, and it is not installed")
    if device.type == "cpu" and not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        raise Unavailable("torch.compile needs a C++ compiler on a CPU, and none was found")
    # Without the reset a run over many shapes meets the recompile limit and silently measures eager instead.
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def _torch_native(name: str, device: torch.device) -> Loss:
    function = getattr(F, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None and NEWER_TORCH in os.environ:
        function, options = _newer_torch(Path(os.environ[NEWER_TORCH]))
    if function is None or options is None:
        words = f"torch {torch.__version__} has no chunked linear_cross_entropy (2.13 and later have it)"
        raise Unavailable(f"{words}; {NEWER_TORCH} names a newer one's folder")

    def call(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = function(hidden, weight, target, options=options())
        return loss

    return call


def _newer_torch(folder: Path) -> tuple[Any, Any]:
    """Return ``F.linear_cross_entropy`` and its class of options from the Python files of a newer torch.

    Args:
        folder: of that torch; it needs no more than ``nn/functional.py``, ``nn/modules/linear_cross_entropy.py`` and
            ``nn/modules/linear_cross_entropy_options.py``.
    """
    for name in ("linear_cross_entropy_options", "linear_cross_entropy"):
        title = f"torch.nn.modules.{name}"  # as the function imports it
        spec = importlib.util.spec_from_file_location(title, folder / "nn" / "modules" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[title] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    namespace = dict(vars(F))
    body = ast.parse((folder / "nn" / "functional.py").read_text()).body
    functions = [node for node in body if "linear_cross_entropy" in getattr(node, "name", "")]
    code = "\n\n".join(ast.unparse(node) for node in functions)
    exec(f"import dataclasses\n\n{code}", namespace)
    options = sys.modules["torch.nn.modules.linear_cross_entropy_options"]
    return namespace["linear_cross_entropy"], options.LinearCrossEntropyOptions


def newer_torch() -> dict[str, str]:
    """Return the version of the newer torch whose ``F.linear_cross_entropy`` is measured, if there is such a torch."""
    path = Path(os.environ.get(NEWER_TORCH, "")) / "version.py"
    version = re.search(r"__version__ = '([^'+]+)", path.read_text()) if path.is_file() else None
    return {"F.linear_cross_entropy's Python of torch": version[1]} if version else {}


def _packaged(name: str, device: torch.device) -> Loss:
    package = PACKAGES[name]
    function = functools.partial(_function(package, device), **package.options)

    def call(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss: Tensor
        if name.startswith("quack"):  # it raises where a chunk has as many tokens as the hidden size, 4096 by default
            loss = function(hidden, weight, target, chunk_size=8192 if hidden.shape[1] == 4096 else 4096)
        elif name == "trl":
            loss = -_trl(function.func, hidden, weight, target, ())[0].mean()
        elif name == "unsloth":
            loss = function(None, hidden[None], weight, None, target[None], shift_labels=False)
        else:
            loss = function(hidden, weight, target)
        return loss

    return call


def _trl(function: Any, hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]) -> Any:
    """Log-probabilities and further outputs, 32768 columns at a time as TRL's trainers ask for."""
    return function.apply(hidden, weight, None, target, 1.0, 32768, None, 1.0, outputs)


def _function(package: Package, device: torch.device) -> Any:
    if device.type != "cuda":
        raise Unavailable(f"{package.name} needs a GPU")
    if torch.cuda.get_device_capability(device) < package.capability:
        capability = ".".join(map(str, package.capability))
        raise Unavailable(f"{package.name} needs a GPU of compute capability {capability} or newer")
    try:
        if package.name == "unsloth-zoo":
            _import_empty(_UNSLOTH_PARENTS)
        return getattr(importlib.import_module(package.module), package.function)
    except Exception as error:  # whatever a foreign package raises on import, no other provider is lost
        if isinstance(error, ModuleNotFoundError) and error.name == package.module.split(".")[0]:
            raise Unavailable(f"the package {package.name} is not installed") from error
        raise Unavailable(f"{package.name} did not import: {type(error).__name__}: {error}") from error


def _import_empty(names: Sequence[str]) -> None:
    """Put packages in place that find their modules and run nothing of their own; the parent stands first."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(name=name)
        if name not in sys.modules:
            spec.loader = None  # nothing runs
            sys.modules[name] = importlib.util.module_from_spec(spec)


def _import_ours(options: dict[str, Any]) -> Any:
    try:
        module = importlib.import_module("chunked_head")
        parameters = inspect.signature(module.linear_cross_entropy).parameters
    except Exception as error:  # reported like any other provider's absence
        raise Unavailable(f"chunked_head did not import: {type(error).__name__}: {error}") from error
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [key for key in options if key not in parameters and not takes_any]
    if unknown:
        raise ValueError(f"chunked_head.linear_cross_entropy has no option {', '.join(unknown)}")
    return module


def predict(provider: Provider, shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, Any] | None:
    """The plan of a call of ours, from `chunked_head.plan`; None for the peers."""
    if provider.name != "ours":
        return None
    try:
        make_plan = importlib.import_module("chunked_head").plan
        parameters = inspect.signature(make_plan).parameters
        options = {key: value for key, value in provider.options.items() if key in parameters}
        plan = make_plan(shape.tokens, shape.hidden, shape.vocab, dtype, device=device.type, **options)
        return describe_plan(plan)
    except Exception as error:  # a wrong prediction is worth a note, not the measurement
        return {"error": f"{type(error).__name__}: {error}"}


def describe_plan(plan: Any) -> dict[str, Any]:
    """A plan in plain values."""
    return {
        "peak_bytes": int(plan.peak_bytes),
        "extra_bytes": int(plan.extra_bytes),
        "chunk_tokens": int(plan.chunk_tokens),
        "chunks": int(plan.chunks),
        "schedule": str(plan.schedule),
        "accumulate_dtype": str(plan.weight_accumulate).removeprefix("torch."),
        "text": str(plan).split("\n"),
    }


def checked_spec(text: str) -> str:
    """Return a provider's text; raises ValueError where it names no provider, or an unknown option of ours."""
    _, options = parse_spec(text)
    if options:
        with contextlib.suppress(Unavailable):  # `resolve` reports it
            _import_ours(options)
    return text
