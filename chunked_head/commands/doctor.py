"""Whether an installation is right: what is there, which path calls take, and a call held against full logits."""

import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api.cross_entropy import linear_cross_entropy
from ..api.plan import plan
from ..backends import resolve
from ..backends.protocol import has_triton
from ..core.private import private
from ..integrations.trl.patch import check_version
from ..kernels.common.gpus import HERE, gpu_of
from ..kernels.common.tiles import INTERPRETED
from ..program.plans import facts, name
from .show import Section

PACKAGES = ("chunked-head", "torch", "triton", "numpy", "transformers", "trl", "liger-kernel")
FLOORS = {"torch": (2, 9), "triton": (3, 5)}
# by dtype: how far from float64's full logits a loss and a gradient may be, the latter by its norm. 16-bit types round
# exponentials and the gradient itself
BOUNDS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-4, 1e-2)}
CHECKED = 300, 128, 1000  # tokens, hidden, vocab
TIMED = {"cuda": (4096, 2048, 32768), "cpu": (256, 256, 4096)}
SECONDS = 2.0  # of rounds that are timed
PLANNED = 8192, 4096, 128256


@dataclass(frozen=True)
class SelfTest:
    """A call held against float64: relative errors, the worst of three calls (a GPU's third replays what its second
    recorded). Times are medians; ``first_seconds`` has what the first call
    imports and compiles."""

    shape: tuple[int, int, int]
    dtype: str
    loss_error: float
    hidden_error: float
    weight_error: float
    loss_bound: float
    gradient_bound: float
    first_seconds: float
    timed_shape: tuple[int, int, int]
    call_ms: float
    matmuls_ms: float

    @property
    def passed(self) -> bool:
        """Not where an error is nan."""
        gradients = self.hidden_error <= self.gradient_bound and self.weight_error <= self.gradient_bound
        return self.loss_error <= self.loss_bound and gradients


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found. ``failure``: what the self-test raised, or empty. ``odd``: sentences, each with what to
    do."""

    versions: dict[str, str | None]
    gpu: dict[str, Any] | None
    call: dict[str, str]
    self_test: SelfTest | None
    failure: str
    odd: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return self.self_test is not None and self.self_test.passed

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}

    def sections(self) -> list[Section]:
        gpu = {} if self.gpu is None else self.gpu
        return [
            Section("Versions", [(key, version or "not installed") for key, version in self.versions.items()]),
            Section("GPU", [(key, "-" if value is None else str(value)) for key, value in gpu.items()]),
            Section("A call here", list(self.call.items())),
            Section("Self-test", self.tested()),
            Section("Odd", [("", sentence) for sentence in self.odd]),
        ]

    def tested(self) -> list[tuple[str, str]]:
        one = self.self_test
        if one is None:
            return [("result", f"FAIL, {self.failure}")]

        def error(value: float, bound: float) -> str:
            return f"{value:.1e} (at most {bound:.0e})"

        return [
            ("result", "pass" if one.passed else "FAIL, a wrong result: do not train with this installation"),
            ("against float64, relative", f"{times(one.shape)}, {one.dtype}"),
            ("loss", error(one.loss_error, one.loss_bound)),
            ("gradient of hidden", error(one.hidden_error, one.gradient_bound)),
            ("gradient of weight", error(one.weight_error, one.gradient_bound)),
            ("first call", f"{one.first_seconds:.2f} s, with what it imported and compiled"),
            (f"time at {times(one.timed_shape)}", f"{one.call_ms:.3g} ms, its three matmuls {one.matmuls_ms:.3g} ms"),
        ]


def diagnose() -> Diagnosis:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    call, test, failure = dict[str, str](), None, ""
    try:
        call = call_on(device, dtype)
        test = self_test(device, dtype)
    except Exception as error:  # whatever is broken is what is asked for
        failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
    found = versions()
    return Diagnosis(found, gpu(device), call, test, failure, tuple(odd(found, device)))


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    # of what runs: a checkout may be another than what is installed
    return found | {"chunked-head": sys.modules["chunked_head"].__version__, "torch": torch.__version__}


def gpu(device: torch.device) -> dict[str, Any] | None:
    """The GPU, and which row of docs/gpus.md it takes; None without one."""
    if device.type != "cuda":
        return None
    properties, row = torch.cuda.get_device_properties(device), gpu_of(device)
    looked_up = private("_C._cuda_getDriverVersion") if torch.version.hip is None else None
    driver = looked_up[0]() if looked_up else None
    return {
        "name": properties.name,
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "row of docs/gpus.md": None if row is None else row.name,
        "torch's CUDA" if torch.version.hip is None else "torch's HIP": torch.version.cuda or torch.version.hip,
        "driver's CUDA": None if driver is None else f"{driver // 1000}.{driver % 1000 // 10}",
    }


def call_on(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The backend and the path of a cross-entropy, and why."""
    planned = dict(facts(plan(*PLANNED, dtype, device=device)))
    backend = resolve(None, device).__name__.split(".")[-2]  # type: ignore[attr-defined]
    if device.type != "cuda":
        why = "no GPU"
    elif backend == "triton":
        why = "a GPU with Triton"
    else:
        why = "this GPU is none that the kernels are compiled for" if has_triton() else "Triton is not installed"
    return {
        "backend": f"{backend} ({why})", "a call of": f"{times(PLANNED)}, {name(dtype)}",
        **{key: planned[key] for key in ("schedule", "chunks", "logits buffer", "matmuls") if key in planned},
    }  # fmt: skip


def operands(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight that gives logits of order 1, targets of which some do not count."""
    tokens, hidden, vocab = shape
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(tokens, hidden, generator=generator, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator, device=device, dtype=dtype).mul_(2 * hidden**-0.5)
    target = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
    target[::7] = -100
    return rows, weight.requires_grad_(), target


def self_test(device: torch.device, dtype: torch.dtype) -> SelfTest:
    rows, head, target = operands(CHECKED, dtype, device)
    errors = []
    with torch.enable_grad():
        wide = rows.detach().double().requires_grad_(), head.detach().double().requires_grad_()
        exact = F.cross_entropy(wide[0] @ wide[1].T, target)
        true = (exact.detach(), *torch.autograd.grad(exact, wide))
        start = time.perf_counter()
        for call in range(3):
            loss = linear_cross_entropy(rows, head, target, chunk_tokens=128)
            found = (loss.detach(), *torch.autograd.grad(loss, (rows, head)))
            errors.append([float((ours.double() - t).norm() / t.norm()) for ours, t in zip(found, true, strict=True)])
            if call == 0:
                first = time.perf_counter() - start
        timed = TIMED[device.type]
        call_ms, matmuls_ms = times_of(*operands(timed, dtype, device))
    # nan is worse than any number
    loss, hidden, weight = (max(each, key=lambda error: (error != error, error)) for each in zip(*errors, strict=True))
    return SelfTest(CHECKED, name(dtype), loss, hidden, weight, *BOUNDS[dtype], first, timed, call_ms, matmuls_ms)


def times_of(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[float, float]:
    """Milliseconds of a call with its gradients, and of three bare matmuls, taking turns."""

    def call() -> None:
        torch.autograd.grad(linear_cross_entropy(hidden, weight, target), (hidden, weight))

    def matmuls() -> None:
        with torch.no_grad():
            logits = hidden @ weight.T
            _ = logits @ weight, logits.T @ hidden

    steps: tuple[Callable[[], None], ...] = call, matmuls
    for _ in range(3):
        for step in steps:
            step()
    found: list[list[float]] = [[], []]
    end = time.perf_counter() + SECONDS
    while len(found[0]) < 20 and (not found[0] or time.perf_counter() < end):
        for step, values in zip(steps, found, strict=True):
            synchronize(hidden.device)
            start = time.perf_counter()
            step()
            synchronize(hidden.device)
            values.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found[0]), statistics.median(found[1])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def odd(found: dict[str, str | None], device: torch.device) -> list[str]:
    """What is unusual, in words, each with what to do."""
    said = []
    for package, floor in FLOORS.items():
        version = found[package]
        if version is not None and number(version) < floor:
            least = ".".join(map(str, floor))
            said.append(f"{package} {version} is older than {least}: pip install '{package}>={least}'")
    if device.type != "cuda":
        build = "" if torch.version.cuda or torch.version.hip else ", and this torch is built without one's support"
        said.append(f"torch sees no GPU{build}: calls run on the CPU; nvidia-smi says whether the driver sees one")
    elif not has_triton():
        said.append("Triton is not installed, so that calls on the GPU take plain torch: pip install triton")
    elif gpu_of(device) is None:
        said.append("this GPU is not in docs/gpus.md: calls keep fp32 logits, slower than those that are")
    if INTERPRETED:
        said.append("TRITON_INTERPRET is set: kernels run in Triton's interpreter, for tests alone; unset it to train")
        if number(found["numpy"] or "0") >= (2, 4) and number(found["triton"] or "9") < (3, 6):
            said.append("Triton 3.5's interpreter fails with NumPy 2.4: pip install 'numpy<2.4' or 'triton>=3.6'")
    if HERE is not None:
        said.append(f"CHUNKED_HEAD_ARCH={HERE} stands for the GPU that is there, for tests alone; unset it to train")
    if found["trl"] is not None:
        try:
            check_version()
        except RuntimeError as error:
            said.append(str(error))
    return said


def number(version: str) -> tuple[int, ...]:
    """Its first two numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
