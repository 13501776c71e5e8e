"""Whether an installation is right: what is there, which path calls take, and a call held against full logits."""

import contextlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api.cross_entropy import linear_cross_entropy
from ..api.plan import plan
from ..backends import resolve
from ..backends.protocol import has_triton
from ..integrations.trl.patch import KNOWN
from ..kernels.common.gpus import gpu_of
from ..kernels.common.tiles import INTERPRETED
from ..program.plans import Section, facts

PACKAGES = ("triton", "numpy", "transformers", "trl", "liger-kernel")
# by dtype: how far from float64's full logits a loss and a gradient may be, the latter by its norm. 16-bit types round
# exponentials and the gradient itself
BOUNDS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-4, 1e-2)}
CHECKED = 300, 128, 1000  # tokens, hidden, vocab
TIMED = {"cuda": (4096, 2048, 32768), "cpu": (256, 256, 4096)}
SECONDS = 1.0  # of rounds that are timed
PLANNED = 8192, 4096, 128256


def diagnose() -> tuple[dict[str, Any], list[Section]]:
    """What ``--json`` prints, and the same for people. ``odd``: sentences, each with what to do."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: dict[str, Any] = {"versions": versions(device), "call": {}, "self_test": {}}
    found["odd"] = odd(device, found["versions"].get("trl", KNOWN))
    try:
        found["call"] = {"backend": resolve(None, device).__name__.split(".")[-2]}  # type: ignore[attr-defined]
        found["call"] |= facts(plan(*PLANNED, dtype, device=device))
        found["self_test"] = test = self_test(device, dtype)
        checked = ("loss", "loss"), ("hidden", "gradient"), ("weight", "gradient")
        passed = all(test[f"{one}_error"] <= test[f"{bound}_bound"] for one, bound in checked)  # not where one is nan
        result = "pass" if passed else "FAIL, a wrong result: do not train with this installation"
    except Exception as error:  # whatever is broken is what is asked for
        result = f"FAIL, {type(error).__name__}: {' '.join(str(error).split())}"
    tested = {"result, relative to float64": result, **found["self_test"]}
    shown = [("Versions", found["versions"]), ("A call here", found["call"]), ("Self-test", tested)]
    sections: list[Section] = [(title, [*map(as_row, record.items())]) for title, record in shown]
    sections.append(("Odd", [("", sentence) for sentence in found["odd"]]))
    return found | {"result": result, "passed": result == "pass"}, sections


def as_row(item: tuple[str, Any]) -> tuple[str, str]:
    key, value = item
    return key.replace("_", " "), f"{value:.3g}" if isinstance(value, float) else str(value)


def versions(device: torch.device) -> dict[str, str]:
    """Of what runs: a checkout may be another than what is installed. The GPU, with its row of docs/gpus.md."""
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


def operands(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight that gives logits of order 1, targets of which some do not count."""
    tokens, hidden, vocab = shape
    generator = torch.Generator(device).manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator, device=device, dtype=dtype).mul_(2 * hidden**-0.5)
    target = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
    target[::7] = -100
    return states, weight.requires_grad_(), target


@torch.enable_grad()
def self_test(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A call held against float64: relative errors, the worst of three calls (a GPU's third replays what its second
    recorded), and times beside three bare matmuls."""
    states, head, target = operands(CHECKED, dtype, device)
    wide = [tensor.detach().double().requires_grad_() for tensor in (states, head)]
    true, errors = with_gradients(F.cross_entropy(wide[0] @ wide[1].T, target), wide), []
    for _ in range(3):
        found = with_gradients(linear_cross_entropy(states, head, target, chunk_tokens=128), (states, head))
        errors.append([float((ours.double() - t).norm() / t.norm()) for ours, t in zip(found, true, strict=True)])
    worst = torch.tensor(errors).amax(0).tolist()  # nan where one is
    (loss_bound, gradient_bound), (hidden, weight, ids) = BOUNDS[dtype], operands(TIMED[device.type], dtype, device)

    def call() -> None:
        with_gradients(linear_cross_entropy(hidden, weight, ids), (hidden, weight))

    @torch.no_grad()
    def matmuls() -> None:
        logits = hidden @ weight.T
        _ = logits @ weight, logits.T @ hidden

    return {
        "loss_error": worst[0], "loss_bound": loss_bound, "hidden_error": worst[1], "weight_error": worst[2],
        "gradient_bound": gradient_bound, "timed_at": " x ".join(map(str, TIMED[device.type])),
        "call_ms": milliseconds(call), "its_three_matmuls_ms": milliseconds(matmuls),
    }  # fmt: skip


def with_gradients(loss: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return loss.detach(), *torch.autograd.grad(loss, inputs)


def milliseconds(step: Callable[[], None]) -> float:
    """The median, after three rounds that warm up."""
    found, end = list[float](), time.perf_counter() + SECONDS
    while len(found) < 4 or (len(found) < 23 and time.perf_counter() < end):
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found[3:])


def odd(device: torch.device, trl: str) -> list[str]:
    """What is unusual, in words, each with what to do."""
    gpu = device.type == "cuda"
    applies = {
        "torch sees no GPU: calls run on the CPU; nvidia-smi says whether the driver sees one": not gpu,
        "Triton is not installed: calls on the GPU take plain torch; pip install triton": gpu and not has_triton(),
        "this GPU is not in docs/gpus.md: calls keep fp32 logits, which is slower": gpu and gpu_of(device) is None,
        "TRITON_INTERPRET is set: kernels run in an interpreter, for tests alone; unset it to train": INTERPRETED,
        f"patch_trl knows TRL {KNOWN}, not {trl}: pip install 'trl=={KNOWN}.*'": not f"{trl}.".startswith(f"{KNOWN}."),
    }
    return [sentence for sentence, so in applies.items() if so]
