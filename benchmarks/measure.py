"""Time and peak memory of one step of a head (loss and backward), and the record of the machine it ran on."""

import contextlib
import functools
import gc
import math
import multiprocessing
import multiprocessing.connection
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor

from benchmarks.providers import Loss
from benchmarks.shapes import Operands

OUT_OF_MEMORY = "out of memory"
# before what is timed, and timed: at least so many runs, and for so long
SETTLING_RUNS, SETTLING_MS, TIMED_MS = 2, 500.0, 100.0
_CHILD_SECONDS, _EXIT_SECONDS = 900.0, 5.0
_SAMPLE_SECONDS = 0.002
_M_MMAP_THRESHOLD = -3


class Holder(Protocol):
    """Holder of gradients between steps: operands, a model."""

    def clear(self) -> None:
        """Lets go of them."""


@dataclass
class Step:
    """One step of a provider: the loss, and its backward with a chosen gradient from above, or no gradient at all."""

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
    """Why a provider gave no number: out of memory, or an error with its last places in the code."""

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

    ``products`` is 3; 1 for the logits; 4 for a second product of logits as well, a teacher's or the same again.
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
            if start == 0:
                torch.mm(logits.T, hidden, out=self.d_weight)
            else:
                torch.addmm(self.d_weight, logits.T, hidden, out=self.d_weight)


def time_rounds(
    steps: Mapping[str, Callable[[], Any]],
    operands: Holder,
    device: torch.device,
    rounds: int,
    tick: Callable[[], Any] = lambda: None,
    meet: Callable[[], Any] = lambda: None,
    alike: Callable[[dict[str, float]], dict[str, float]] = lambda milliseconds: milliseconds,
) -> tuple[dict[str, list[float]], dict[str, Failure]]:
    """Milliseconds of each step in each round, the steps taking turns.

    The order is reversed in every other round, so that a slow change of the clocks falls on all steps alike. On a GPU a
    turn is runs for half a second, and then a tenth in which the mean run is timed: at its power limit a GPU's clocks
    depend on what the last tenths of a second asked of it, and a step would be charged, or credited, for its neighbour.
    A first round is not counted: in it the allocator settles on blocks for all the steps together, and turns are short.
    A step that fails leaves the turn and is returned with its failure. Where several processes take the same turns,
    ``meet`` makes them wait for each other, and ``alike`` makes the same of their times in the first round.
    """
    lengths = dict.fromkeys(steps, (SETTLING_RUNS if device.type == "cuda" else 0, 1))
    times: dict[str, list[float]] = {name: [] for name in steps}
    failures: dict[str, Failure] = {}
    for number in range(-1, rounds):
        pending: list[tuple[str, Callable[[], float]]] = []
        for name in list(steps) if number % 2 == 0 else reversed(list(steps)):
            if name in failures:
                continue
            turn = functools.partial(_turn, steps[name], operands, device, meet, *lengths[name])
            reading, failure = attempt(turn, operands)
            if failure is not None:
                failures[name] = failure
            else:
                pending.append((name, reading))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number < 0 and device.type == "cuda":
            found = alike({name: reading() for name, reading in pending})
            lengths |= {name: turn_runs(milliseconds) for name, milliseconds in found.items()}
        if number >= 0:
            for name, reading in pending:
                times[name].append(reading())
            tick()
    operands.clear()
    return {name: values for name, values in times.items() if name not in failures}, failures


def records(
    steps: Mapping[str, Callable[[], Any]],
    operands: Holder,
    device: torch.device,
    rounds: int,
    tick: Callable[[], Any] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Times of steps that take turns, as ``row_times`` has them, or the record of a step's failure."""
    times, failures = time_rounds(steps, operands, device, rounds, tick)
    return {
        key: failures[key].record() if key in failures else {"status": "ok"} | row_times(times[key]) for key in steps
    }


def row_times(values: list[float]) -> dict[str, Any]:
    """A row's milliseconds: the median of the rounds, their 20th and 80th percentiles, and each round's."""
    found: dict[str, Any] = {name: quantile(values, at) for name, at in (("ms", 0.5), ("ms_p20", 0.2), ("ms_p80", 0.8))}
    return found | {"ms_rounds": [round(value, 4) for value in values]}


def floor_steps(operands: Operands, device: torch.device, products: Collection[int]) -> dict[str, Callable[[], Any]]:
    """Bare products by how many they are (`3 products`); all share their buffers."""
    release(operands)  # the floor sizes its buffers by the free memory
    floor = Floor(operands, device)
    return {products_name(count): functools.partial(floor, count) for count in sorted(products)}


def products_name(count: int) -> str:
    return f"{count} product{'s' * (count > 1)}"


def time_with_products(
    products: Mapping[str, int],
    steps: Mapping[str, Callable[[], Any]],
    operands: Operands,
    device: torch.device,
    rounds: int,
    tick: Callable[[], Any] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Each step's times, and their ratio to as many bare products as are named for it, all taking turns.

    A step that failed has the record of its failure instead.
    """
    floors, _ = attempt(lambda: floor_steps(operands, device, set(products.values())), operands)
    found = records({**(floors or {}), **steps}, operands, device, rounds, tick)
    for key in steps:
        below = found.get(products_name(products[key]), {}).get("ms")
        if below and "ms" in found[key]:
            found[key] |= {"floor_ms": below, "ratio": found[key]["ms"] / below}
    return {key: found[key] for key in steps}


def turn_runs(milliseconds: float) -> tuple[int, int]:
    """Runs before what is timed, and timed runs, of a step that takes so long."""
    if milliseconds <= 0:
        return SETTLING_RUNS, 1
    return max(SETTLING_RUNS, math.ceil(SETTLING_MS / milliseconds)), math.ceil(TIMED_MS / milliseconds)


def _turn(
    step: Callable[[], Any],
    operands: Holder,
    device: torch.device,
    meet: Callable[[], Any],
    settling: int,
    timed: int,
) -> Callable[[], float]:
    """Runs that settle the clocks, and then the ones that are timed."""
    meet()
    for _ in range(settling):
        operands.clear()
        step()
    operands.clear()
    meet()
    return _timed(step, operands, device, timed)


def _timed(step: Callable[[], Any], operands: Holder, device: torch.device, runs: int) -> Callable[[], float]:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for run in range(runs):
            if run:
                operands.clear()
            step()
        end.record()
        # Read after the round: waiting here would put the host's launch time into every provider's figure.
        return lambda: float(start.elapsed_time(end)) / runs
    begin = time.perf_counter()
    step()
    milliseconds = (time.perf_counter() - begin) * 1e3
    return lambda: milliseconds


def quantile(values: list[float], fraction: float) -> float:
    """The value below which a fraction of the values lies, interpolated."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(fraction))


def gpu_peak(step: Callable[[], Any], operands: Holder) -> dict[str, int]:
    """Peak bytes of one step over what is there before it, the gradients included, on a GPU.

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
    """Everything that ``target(sender, *args)`` sends from a fresh process; a Failure where that ends without success,
    or takes longer."""
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
