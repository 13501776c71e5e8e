"""A process of `benchmarks.parallel`: rows in turns with those of the other ranks; rank 0 writes them."""

import contextlib
import datetime
import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks import measure, shapes, traffic
from benchmarks.command import WARM_UP, Row, Watch
from benchmarks.parallel_rows import ROWS, SHAPE, Bench
from benchmarks.rounds import Turns, time_rounds
from benchmarks.shapes import Shape

ROWS_FILE = "rows.json"
# time until ranks that wait for one that has failed end the run
PATIENCE = datetime.timedelta(seconds=180)
# how far gradients and losses may be from one GPU's: 16-bit types, and wider ones
LIMITS = {True: 0.02, False: 1e-4}
LOSS_LIMITS = {True: 2e-3, False: 1e-5}


@dataclass(frozen=True)
class Task:
    """A measurement in plain values, for processes of ranks."""

    ranks: int
    shapes: tuple[Shape, ...]
    rows: tuple[str, ...]
    rounds: int
    device: str
    dtype: str
    memory: bool


def run_ranks(enter: Callable[..., None], ranks: int, task: Any) -> tuple[list[Row], measure.Failure | None]:
    """Run ``enter(rank, task, folder)`` in a process for each rank.

    Returns the rows that rank 0 has written, and the failure of a process that ended early.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn: Callable[[], Any] = functools.partial(torch.multiprocessing.spawn, enter, (task, folder), ranks)
        _, failure = measure.attempt(spawn)
        written = Path(folder, ROWS_FILE)
        return json.loads(written.read_text()) if written.exists() else [], failure


@contextlib.contextmanager
def process_group(
    rank: int, ranks: int, device_type: str, folder: str, patience: datetime.timedelta
) -> Iterator[torch.device]:
    """Join the ranks' process group and leave it; gives this rank's device, which on a CPU has one thread.

    Args:
        patience: time that a rank waits for another one before the run ends.
    """
    is_gpu = device_type == "cuda"
    device = torch.device("cuda", rank) if is_gpu else torch.device(device_type)
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    distributed.init_process_group(
        "nccl" if is_gpu else "gloo", init_method=f"file://{folder}/meeting",
        rank=rank, world_size=ranks, timeout=patience, device_id=device if is_gpu else None,
    )  # fmt: skip
    yield device
    distributed.destroy_process_group()


def write_rows(folder: str, rows: list[Row]) -> None:
    """Write a run's rows so far, on rank 0."""
    if distributed.get_rank() == 0:
        Path(folder, ROWS_FILE).write_text(json.dumps(rows))


def enter(rank: int, task: Task, folder: str) -> None:
    """Measure every shape on one rank."""
    rows = list[Row]()
    watch = Watch(len(task.shapes) * task.rounds) if rank == 0 else None
    group = process_group(rank, task.ranks, task.device, folder, PATIENCE)
    with watch or contextlib.nullcontext(), group as device:
        for shape in task.shapes:
            rows += Ranks(shape, task, device, watch).measured()
            measure.release()
            write_rows(folder, rows)


class Ranks:
    """One shape's rows, on one rank."""

    def __init__(self, shape: Shape, task: Task, device: torch.device, watch: Watch | None) -> None:
        self.shape, self.task, self.device, self.watch = shape, task, device, watch
        self.dtype = shapes.parse_dtype(task.dtype)
        self.rank = distributed.get_rank()
        self.bench = Bench(shape, self.dtype, device, task.rows)
        self.one = torch.zeros(1, device=device)
        self.rows: dict[str, Row] = {}
        self.steps: dict[str, Callable[[], Any]] = {}

    def measured(self) -> list[Row]:
        """Measure all rows; return a record for each. Rank 0's records have more fields."""
        for name in self.task.rows:
            self.stage(f"warm-up of {name}")
            row = ROWS[name]
            ratio = (row.must or {}).get(self.task.ranks) if self.shape == SHAPE else None
            self.rows[name] = {
                "shape": str(self.shape), "dtype": self.task.dtype, "row": name, "provider": row.label, "status": "ok",
                "ranks": 1 if row.one_rank else self.task.ranks, "must": ratio,
            }  # fmt: skip
            self.rows[name] |= self.together(functools.partial(self.ready, name))
        self.bench.expected.clear()
        self.stage(f"{self.task.rounds} rounds")
        self.time()
        for name in self.steps:
            if ROWS[name].workload is not None and self.rows[name]["status"] == "ok":
                self.stage(f"what else is asked of {name}")
                self.examine(name)
        return list(self.rows.values())

    def stage(self, text: str) -> None:
        if self.watch is not None:
            self.watch.stage(f"{self.shape}: {text}")

    def idle(self, name: str) -> bool:
        """True where this rank has nothing to do with a row."""
        return ROWS[name].one_rank and self.rank > 0

    def together(self, action: Callable[[], Row]) -> Row:
        """Run an action on all ranks; return rank 0's record, or the failure of the first rank that failed."""
        record, failure = measure.attempt(action, self.bench)
        records = self.gathered(failure.record() if failure else record)
        failed = [rank_record for rank_record in records if rank_record.get("status", "ok") != "ok"]
        return failed[0] if failed else {**records[0], **agreement(records)}

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value."""
        values: list[Any] = [None] * self.task.ranks
        distributed.all_gather_object(values, value)
        return values

    def ready(self, name: str) -> Row:
        """Make a row's step and run it; return its loss and its gradients' errors against one GPU's."""
        if ROWS[name].workload is None:
            self.steps[name] = nothing if self.idle(name) else self.bench.floor(name)
            self.steps[name]()
            return {}
        if self.idle(name):
            self.steps[name] = nothing
            return {}
        step = self.bench.step(name)
        for _ in range(WARM_UP):
            step.operands.clear()
            loss = float(step())
        record: Row = {"loss": loss, "plan": self.bench.plan(step, self.dtype)}
        record |= self.bench.errors(name, step)
        half = self.dtype.itemsize < 4
        if self.rank == 0 and not ROWS[name].one_rank:
            below = ROWS[name].below
            assert below is not None
            expected = self.rows[below]["loss"]
            errors = [record["d_hidden_error"], record["d_weight_error"]]
            within = [abs(loss - expected) <= LOSS_LIMITS[half] * max(1.0, abs(expected))]
            record["agrees"] = all([*within, *(error <= LIMITS[half] for error in errors)])  # nan is within nothing
        step.operands.clear()
        self.steps[name] = step
        return record

    def meet(self) -> None:
        """On a GPU a message that the device waits for and the host does not, so that launches can run ahead."""
        distributed.all_reduce(self.one)

    def longest(self, value: float) -> float:
        """The largest of the ranks' numbers."""
        return max(self.gathered(value))

    def time(self) -> None:
        """Add to every row the slowest rank's milliseconds in each round."""
        ready = {name: step for name, step in self.steps.items() if self.rows[name]["status"] == "ok"}
        self.steps = ready
        tick = self.watch.tick if self.watch is not None else nothing
        turns = Turns(self.bench, self.device, self.meet, self.longest)
        times, failures = time_rounds(ready, turns, self.task.rounds, tick)
        records = self.gathered((times, {name: failure.record() for name, failure in failures.items()}))
        for name in ready:
            failed = [failures[name] for _, failures in records if name in failures]
            if failed:
                self.rows[name] |= failed[0]
                continue
            slowest = [
                max(milliseconds) for milliseconds in zip(*(times[name].rounds for times, _ in records), strict=True)
            ]
            self.rows[name] |= replace(times[name], rounds=slowest).row()
            means = [measure.quantile(times[name].rounds, 0.5) for times, _ in records]
            self.rows[name]["ms_of_ranks"] = means[:1] if ROWS[name].one_rank else means

    def examine(self, name: str) -> None:
        """Add peak memory of every rank, and the messages between ranks in a step."""
        step, row = self.steps[name], self.rows[name]
        if self.task.memory:
            peak, failure = None, None
            if isinstance(step, measure.Step):
                peak, failure = measure.attempt(functools.partial(measure.gpu_peak, step, step.operands), self.bench)
            records = [
                rank_record
                for rank_record in self.gathered(failure.record() if failure else peak)
                if rank_record is not None
            ]
            failed = [rank_record for rank_record in records if "peak_bytes" not in rank_record]
            row |= {"memory_error": failed[0]} if failed else self.memory(step, records)
        if not ROWS[name].one_rank:
            self.bench.clear()
            messages, failure = measure.attempt(lambda: traffic.count(step), self.bench)
            row |= {"traffic_error": failure.record()} if failure else described(messages)
            self.bench.clear()

    def memory(self, step: Callable[[], Any], records: list[dict[str, int]]) -> Row:
        """Return the largest peak, every rank's peak, and the largest without gradients."""
        peaks = [rank_record["peak_bytes"] for rank_record in records]
        record: Row = {"peak_bytes": max(peaks), "peak_bytes_of_ranks": peaks}
        if isinstance(step, measure.Step):
            record["beside_gradients_bytes"] = max(peaks) - self.bench.gradient_bytes(step)
        return record


def nothing() -> None:
    """Do nothing: a rank's step in a row that only rank 0 runs."""


def agreement(records: list[Row]) -> Row:
    """Return whether rank 0 agrees with one GPU and every rank's loss equals rank 0's to the bit."""
    losses = [record["loss"] for record in records if "loss" in record]
    if "agrees" not in records[0]:
        return {}
    return {"agrees": records[0]["agrees"] and all(loss == losses[0] for loss in losses)}


def described(messages: list[traffic.Message]) -> Row:
    """Collectives in numbers: how many, and their bytes by kind."""
    kinds = dict.fromkeys(message.kind for message in messages)
    by_kind = {kind: [message.bytes for message in messages if message.kind == kind] for kind in kinds}
    return {
        "messages": len(messages), "message_bytes": sum(message.bytes for message in messages), "traffic": by_kind,
    }  # fmt: skip
