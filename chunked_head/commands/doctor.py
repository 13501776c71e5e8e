"""Whether an installation is right: what is there, which path calls take, and a call held against full logits."""

import contextlib
import platform
import statistics
import sys
import timeit
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functions.cross_entropy import linear_cross_entropy
from ..functions.plan import plan
from ..integrations.huggingface.explain import in_a_line
from ..integrations.trl import KNOWN
from ..kernels.common.gpus import gpu_of
from ..kernels.common.tiles import INTERPRETED
from ..plan.plans import facts
from ..stores import resolve
from ..stores.protocol import has_triton

PACKAGES = ("triton", "numpy", "transformers", "trl", "liger-kernel")
# by dtype: how far from float64's full logits a loss and a gradient may be, the latter by its norm. 16-bit types round
# exponentials and the gradient itself
BOUNDS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-4, 1e-2)}
CHECKED = 300, 128, 1000  # tokens, hidden, vocab
TIMED = {"cuda": (4096, 2048, 32768), "cpu": (256, 256, 4096)}
ROUNDS = 8  # that are timed, of which three warm up
PLANNED = 8192, 4096, 128256


def diagnose() -> dict[str, Any]:
    """``odd``: sentences, each with what to do. ``result``: of the self-test."""
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
        result = f"FAIL, {in_a_line(error)}"
    return found | {"result": result, "passed": result == "pass"}


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


@torch.enable_grad()
def self_test(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A call held against float64: relative errors, the worst of three calls (a GPU's third replays what its second
    recorded), and times beside three bare matmuls."""
    hidden, weight, target = operands(CHECKED, dtype, device)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    true, errors = with_gradients(F.cross_entropy(wide[0] @ wide[1].T, target), wide), []
    for _ in range(3):
        found = with_gradients(linear_cross_entropy(hidden, weight, target, chunk_tokens=128), (hidden, weight))
        errors.append([float((ours.double() - t).norm() / t.norm()) for ours, t in zip(found, true, strict=True)])
    loss_error, hidden_error, weight_error = torch.tensor(errors).amax(0).tolist()  # nan where one is
    states, head, ids = operands(TIMED[device.type], dtype, device)

    @torch.no_grad()
    def matmuls() -> None:
        logits = states @ head.T
        _ = logits @ head, logits.T @ states

    return {
        "loss_error": loss_error, "loss_bound": BOUNDS[dtype][0], "hidden_error": hidden_error,
        "weight_error": weight_error, "gradient_bound": BOUNDS[dtype][1],
        "timed_at": " x ".join(map(str, TIMED[device.type])),
        "call_ms": milliseconds(lambda: with_gradients(linear_cross_entropy(states, head, ids), (states, head))),
        "its_three_matmuls_ms": milliseconds(matmuls),
    }  # fmt: skip


def operands(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight that gives logits of order 1, targets of which some do not count."""
    tokens, hidden, vocab = shape
    made: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    states, weight = (torch.randn(rows, hidden, dtype=dtype, **made) for rows in (tokens, vocab))
    target = torch.randint(0, vocab, (tokens,), **made)
    target[::7] = -100
    return states.requires_grad_(), weight.mul_(2 * hidden**-0.5).requires_grad_(), target


def with_gradients(loss: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return loss.detach(), *torch.autograd.grad(loss, inputs)


def milliseconds(step: Callable[[], Any]) -> float:
    """The median."""

    def waited() -> None:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return statistics.median(timeit.repeat(waited, number=1, repeat=ROUNDS)[3:]) * 1e3
