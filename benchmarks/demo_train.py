"""One training run of the demo, in a process of its own so that its memory is its own."""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks import measure
from benchmarks.demo_model import Decoder, ModelConfig, PlainHead

LEARNING_RATE = 2e-3
LEARNING_RATE_WARM_UP = 3  # steps of linear warm-up, then constant
VALIDATION_BATCHES = 2

PLAIN, OURS = "plain", "ours"


@dataclass(frozen=True)
class TrainingConfig:
    model: ModelConfig
    steps: int
    batch: int
    seed: int
    device: str
    memory_budget: str | None


@dataclass
class RunResult:
    """Measurements of one run; seconds are one entry per step, bytes are above the memory in use before step 1."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    head_seconds: list[float] = field(default_factory=list)
    validation_loss: float = float("nan")
    peak_bytes: int = 0
    baseline_bytes: int = 0
    state_bytes: int = 0
    parameters: int = 0


Report = Callable[[int, float], None]


def run_in_child(
    connection: Connection,
    head_name: str,
    config: TrainingConfig,
    training: npt.NDArray[np.int32],
    held_out: npt.NDArray[np.int32],
) -> None:
    """Entry of the child process: sends ("step", ...) as it goes, then ("done", RunResult) or ("error", text)."""
    try:
        result = train(head_name, config, training, held_out, lambda *step: connection.send(("step", step)))
        connection.send(("done", result))
    except torch.OutOfMemoryError as error:
        connection.send(("error", f"the GPU's memory is not enough; use a smaller --batch or --context\n{error}"))
    except Exception:  # whatever it is, the parent reports it: a child's own traceback would tear the progress bar
        connection.send(("error", traceback.format_exc()))
    finally:
        connection.close()


def train(
    head_name: str,
    config: TrainingConfig,
    training: npt.NDArray[np.int32],
    held_out: npt.NDArray[np.int32],
    report: Report,
) -> RunResult:
    device = torch.device(config.device)
    _load_everything_lazy(head_name, config.memory_budget, device)
    torch.manual_seed(config.seed)
    model = Decoder(config.model).to(device)
    head = build_head(head_name, model.lm_head, config.memory_budget)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    batches = _training_batches(training, config)
    result = RunResult(parameters=sum(parameter.numel() for parameter in model.parameters()))
    resident = measure.ResidentPeak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        result.baseline_bytes = torch.cuda.memory_allocated(device)
    with resident:
        for step, windows in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / LEARNING_RATE_WARM_UP)
            _training_step(model, head, optimizer, windows.to(device), result)
            report(step, result.losses[-1])
    if device.type == "cuda":
        result.peak_bytes = torch.cuda.max_memory_allocated(device) - result.baseline_bytes
    else:
        result.peak_bytes, result.baseline_bytes = resident.bytes, resident.baseline
    result.state_bytes = _state_bytes(optimizer)
    result.validation_loss = _validate(model, head, held_out, config, device)
    return result


def build_head(name: str, linear: nn.Linear, memory_budget: str | None) -> nn.Module:
    """The head of one run, around the model's own nn.Linear: both train the very same (tied) parameter."""
    if name == PLAIN:
        return PlainHead(linear)
    from chunked_head import ChunkedHead  # here, so that the plain run's memory does not include the library

    # No setting unless the user asked for one: what is measured is what a default user gets.
    options = {} if memory_budget is None else {"memory_budget": memory_budget}
    head = ChunkedHead.from_linear(linear, **options)
    if head.weight is not linear.weight:
        raise RuntimeError("ChunkedHead.from_linear must share the linear layer's parameter, but made its own")
    return head


def precision(device: torch.device) -> str:
    return "bf16 autocast over fp32 weights" if device.type == "cuda" else "fp32"


def _training_step(
    model: Decoder, head: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor, result: RunResult
) -> None:
    """One step: a window of T + 1 tokens gives T inputs and, one further on, their T targets."""
    start = _now(windows.device)
    with _autocast(windows.device):
        hidden = model(windows[:, :-1])
        head_start = _now(windows.device)
        loss = head(hidden, windows[:, 1:])
    loss.backward()
    head_end = _now(windows.device)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    result.losses.append(loss.item())
    result.step_seconds.append(_now(windows.device) - start)
    result.head_seconds.append(head_end - head_start)


@torch.no_grad()
def _validate(
    model: Decoder,
    head: nn.Module,
    held_out: npt.NDArray[np.int32],
    config: TrainingConfig,
    device: torch.device,
) -> float:
    """Mean loss over evenly spaced held-out windows, through the run's own head."""
    count = VALIDATION_BATCHES * config.batch
    starts = np.linspace(0, len(held_out) - config.model.context - 1, count).astype(np.int64)
    losses = []
    for batch in starts.reshape(VALIDATION_BATCHES, config.batch):
        windows = _windows(held_out, batch, config.model.context).to(device)
        with _autocast(device):
            losses.append(head(model(windows[:, :-1]), windows[:, 1:]).item())
    return float(np.mean(losses))


def _training_batches(tokens: npt.NDArray[np.int32], config: TrainingConfig) -> Iterator[Tensor]:
    """Random windows; a generator of their own keeps the order the same whatever else draws random numbers."""
    generator = np.random.default_rng(config.seed)
    for _ in range(config.steps):
        starts = generator.integers(0, len(tokens) - config.model.context, size=config.batch)
        yield _windows(tokens, starts, config.model.context)


def _windows(tokens: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], context: int) -> Tensor:
    return torch.from_numpy(np.stack([tokens[start : start + context + 1] for start in starts])).long()


def _load_everything_lazy(head_name: str, memory_budget: str | None, device: torch.device) -> None:
    """One step of a toy model: what PyTorch and the head load or compile on first use is no step's memory or time."""
    torch.manual_seed(0)
    model = Decoder(ModelConfig(vocab=64, hidden=32, layers=1, context=8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    tokens = torch.randint(64, (2, 9), device=device)
    _training_step(model, build_head(head_name, model.lm_head, memory_budget), optimizer, tokens, RunResult())


def _autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Gradients (as large as the parameters) and AdamW's two moments: any head needs them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = sum(parameter.nbytes for parameter in parameters)
    moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim() > 0)
    return gradients + moments
