"""A step of a head (loss and backward) and its peak memory, bare products, and failures."""

import contextlib
import functools
import gc
import multiprocessing
import multiprocessing.connection
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor

from benchmarks.providers import Loss
from benchmarks.shapes import Operands

OUT_OF_MEMORY = "out of memory"
_CHILD_SECONDS, _EXIT_SECONDS = 900.0, 5.0
_SAMPLE_SECONDS = 0.002
_M_MMAP_THRESHOLD = -3


class Holder(Protocol):
    """Holder of gradients between steps: operands, a model."""

    def clear(self) -> None:
        """Lets go of them."""


@dataclass
class Step:
    """A step of a provider: its loss, and with ``backward`` the gradients for ``upstream``."""

    loss: Loss
    operands: Operands
    upstream: float = 1.0
    backward: bool = True

    def __call__(self) -> Tensor:
        if not self.backward:
            with torch.no_grad():
                return self.loss(self.operands.hidden, self.operands.weight, self.operands.target)
        loss = self.loss(self.operands.hidden, self.operands.weight, self.operands.target)
        (loss if self.upstream == 1 else loss * self.upstream).backward()
        return loss.detach()


@dataclass(frozen=True)
class Failure:
    """Reason that a provider has no figures: out of memory, or an error with its last places in the code."""

    status: str
    error: str
    where: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        message = f"{type(error).__name__}: {error}"[:600]
        frames = traceback.extract_tb(error.__traceback__)[-8:]
        where = tuple(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
        return cls(OUT_OF_MEMORY if _is_out_of_memory(error) else "failed", message, where)

    def record(self) -> dict[str, Any]:
        return {"status": self.status, "error": self.error, "where": list(self.where)}


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    signs = ("out of memory", "can't allocate memory", "not enough memory", "cublas_status_alloc_failed")
    return any(sign in str(error).lower() for sign in signs)


def attempt(action: Callable[[], Any], operands: Holder | None = None) -> tuple[Any, Failure | None]:
    """Run an action; return its value, or the failure after giving its memory back."""
    try:
        return action(), None
    except Exception as error:  # a provider that fails is a row in the table
        failure = Failure.of(error)
    # Only here, past the except clause, has Python dropped the traceback that keeps the failed step's tensors alive.
    release(operands)
    return None, failure


def release(operands: Holder | None = None) -> None:
    """Drop the gradients and give cached GPU memory back to the driver."""
    if operands is not None:
        operands.clear()
    gc.collect()
    if torch.cuda.is_available():
        # After an illegal access even this raises; the table of what was measured must still come out.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


class Floor:
    """The three matrix products that every head needs, into buffers allocated beforehand.

    Logits = h W^T, dH = dlogits W and dW = dlogits^T h, all in the input's type. The logits stand in for dlogits:
    a matrix product's time hardly depends on the values, as long as they are not zeros. Where the [T, V] buffer
    would take more than a quarter of the free memory, the products run in row blocks.

    ``products``: 1 is the logits; 2 is the logits and dH; 3 is all; 4 is all and a second product of logits.
    """

    def __init__(self, operands: Operands, device: torch.device) -> None:
        self.hidden, self.weight = operands.hidden.detach(), operands.weight.detach()
        tokens, vocab = self.hidden.shape[0], self.weight.shape[0]
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
        self.rows = max(1, min(tokens, free // 4 // (vocab * self.hidden.element_size())))
        self.logits = torch.empty(self.rows, vocab, dtype=self.hidden.dtype, device=device)
        self.d_hidden, self.d_weight = torch.empty_like(self.hidden), torch.empty_like(self.weight)

    @torch.no_grad()
    def __call__(self, products: int = 3) -> None:
        for start in range(0, self.hidden.shape[0], self.rows):
            hidden = self.hidden[start : start + self.rows]
            logits = self.logits[: hidden.shape[0]]
            for _ in range(max(1, products - 2)):
                torch.mm(hidden, self.weight.T, out=logits)
            if products == 1:
                continue
            torch.mm(logits, self.weight, out=self.d_hidden[start : start + self.rows])
            if products == 2:
                continue
            if start == 0:
                torch.mm(logits.T, hidden, out=self.d_weight)
            else:
                torch.addmm(self.d_weight, logits.T, hidden, out=self.d_weight)


def floor_steps(operands: Operands, device: torch.device, products: Collection[int]) -> dict[str, Callable[[], Any]]:
    """Make steps of bare products by their number (`3 products`); all share their buffers."""
    release(operands)  # the floor sizes its buffers by the free memory
    floor = Floor(operands, device)
    return {products_name(count): functools.partial(floor, count) for count in sorted(products)}


def products_name(count: int) -> str:
    return f"{count} product{'s' * (count > 1)}"


def quantile(values: list[float], fraction: float) -> float:
    """The value below which a fraction of the values lies, interpolated."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(fraction))


def gpu_peak(step: Callable[[], Any], operands: Holder) -> dict[str, int]:
    """Return peak bytes of one step on a GPU beside what was allocated before it, gradients included.

    The caller has run the step before, so that cuBLAS holds its workspace already. `peak_bytes` counts the blocks
    that the allocator handed out, `requested_bytes` what was asked for before rounding.
    """
    release(operands)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    requested_before = int(torch.cuda.memory_stats().get("requested_bytes.all.current", 0))
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    requested = int(torch.cuda.memory_stats().get("requested_bytes.all.peak", 0)) - requested_before
    release(operands)
    return {"peak_bytes": int(peak), "requested_bytes": requested}


def peak(step: Step) -> tuple[dict[str, int] | None, Failure | None]:
    """Peak bytes of a step over the inputs; none on a CPU, where nothing counts what tensors take."""
    if not step.operands.hidden.is_cuda:
        return None, None
    return attempt(functools.partial(gpu_peak, step, step.operands), step.operands)


def messages(target: Callable[..., None], *args: Any, seconds: float = _CHILD_SECONDS) -> Iterator[Any]:
    """Yield what ``target(sender, *args)`` sends from a fresh process, and a Failure where the process fails or takes
    more than ``seconds``."""
    context, end = multiprocessing.get_context("spawn"), time.monotonic() + seconds
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=target, args=(sender, *args))
    child.start()
    sender.close()  # only the child's end stays open, so that its death is seen here
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            yield receiver.recv()
        yield Failure("failed", f"cut after {seconds:g} seconds")
    except EOFError:
        child.join(_EXIT_SECONDS)
        if child.exitcode:
            # The kernel ends a process that takes more than there is with signal 9.
            status = OUT_OF_MEMORY if child.exitcode == -9 else "failed"
            yield Failure(status, f"its process ended with exit code {child.exitcode}")
    finally:
        receiver.close()
        child.join(0 if child.is_alive() and time.monotonic() > end else _EXIT_SECONDS)
        child.kill()


class ResidentPeak:
    """Highest resident memory of this process within a ``with`` block, minus that at its start (``bytes``).

    A thread reads it; PyTorch's operators release the GIL, so it keeps reading while they run."""

    def __enter__(self) -> "ResidentPeak":
        self._process, self._done = psutil.Process(), threading.Event()
        self.baseline = self._highest = int(self._process.memory_info().rss)
        self._exact = _reset_high_water()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        # what the block made is still there, so the last reading counts it even if the sampler missed everything
        self._read()
        self._done.set()
        self._sampler.join()
        self.bytes = max(self._highest, _high_water() if self._exact else 0) - self.baseline

    def _read(self) -> None:
        self._highest = max(self._highest, self._process.memory_info().rss)

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_SECONDS):
            self._read()


def _reset_high_water() -> bool:
    """Reset Linux's own record of the largest resident set, which misses nothing; False where that is not possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return bool(_high_water() <= psutil.Process().memory_info().rss + 2**24)
    except OSError:
        return False


def _high_water() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
