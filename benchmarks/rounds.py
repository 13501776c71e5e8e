"""Times of steps that take turns on one device, once its clocks and power have settled: docs/internals/measuring.md."""

import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gauge import Gauge
from benchmarks.measure import Failure, Holder, attempt, floor_steps, products_name, quantile
from benchmarks.shapes import Operands

# A step has settled when the median of a second lies within STEADY of the second's before it; at most so many seconds.
STEADY, MOST_SECONDS = 0.005, 6
# Seconds of a turn before what is timed: until no quarter of a second lies NOTICEABLE off the settled median.
NOTICEABLE, LEAST_LEAD, MOST_LEAD, PIECE = 0.01, 0.25, 1.5, 0.25
TIMED_SECONDS = 0.3
# Of a turn that lasts until it is steady: seconds of a piece, and most pieces. Least rounds of such turns.
STEADY_PIECE, MOST_PIECES, LEAST_ROUNDS = 0.2, 8, 3
Step = Callable[[], Any]


@dataclass
class Times:
    """Measurements of a step, in milliseconds a run.

    Args:
        seconds: medians of each second until the step had settled; one run where the device is a CPU.
        lead: seconds of a turn before what is timed.
        rounds: means of the timed runs of each round.
        state: medians of clocks, power and temperature in those (``gauge.FIELDS``).
    """

    seconds: list[float]
    lead: float = 0.0
    rounds: list[float] = field(default_factory=list)
    state: dict[str, float] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[int, int]:
        """Numbers of runs of a turn: before the timed ones, and timed."""
        milliseconds = max(self.seconds[-1], 1e-3)
        return math.ceil(1e3 * self.lead / milliseconds), max(1, math.ceil(1e3 * TIMED_SECONDS / milliseconds))

    @property
    def change(self) -> float:
        """Relative change of the median by the last round; infinite before LEAST_ROUNDS."""
        if len(self.rounds) < LEAST_ROUNDS:
            return math.inf
        return quantile(self.rounds, 0.5) / quantile(self.rounds[:-1], 0.5) - 1.0

    def row(self) -> dict[str, Any]:
        """Fields of a row: the rounds' median and middle half, each round's milliseconds, and the GPU's state."""
        row: dict[str, Any] = {name: quantile(self.rounds, share) for name, share in QUANTILES.items()}
        row |= {"ms_rounds": [round(value, 4) for value in self.rounds]} | self.state
        settled = {"ms_seconds": [round(value, 4) for value in self.seconds], "lead_seconds": self.lead}
        return row | settled if self.lead else row


QUANTILES = {"ms": 0.5, "ms_p25": 0.25, "ms_p75": 0.75}


@dataclass
class Turns:
    """A device on which steps take turns. Gradients of ``operands`` are dropped before each run.

    Args:
        meet: lets processes that take the same turns wait for each other.
        agree: makes one number, equal in all processes, of each process's own.
    """

    operands: Holder
    device: torch.device
    meet: Callable[[], Any] = lambda: None
    agree: Callable[[float], float] = float

    def run(self, step: Step, count: int) -> list[float]:
        """Return the milliseconds of each of ``count`` runs, launched without a wait between them."""
        if self.device.type != "cuda":
            return [self._waited(step) for _ in range(count)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self.operands.clear()
            step()
            event.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]

    def _waited(self, step: Step) -> float:
        self.operands.clear()
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3

    def short(self, step: Step) -> Times:
        """Runs a step that does not settle three times; on a CPU once."""
        self.meet()
        return Times([self.agree(self.run(step, 3 if self.device.type == "cuda" else 1)[-1])])

    def settle(self, step: Step) -> Times:
        """Runs a step, second by second, until its time has settled."""
        self.meet()
        milliseconds = self.agree(quantile(self.run(step, 3)[1:], 0.5)) if self.device.type == "cuda" else 0.0
        if milliseconds <= 0:
            return Times(self.run(step, 1))
        runs, medians = list[float](), list[float]()
        while len(medians) < MOST_SECONDS:
            self.meet()
            second = self.run(step, max(3, math.ceil(1e3 / milliseconds)))
            runs += second
            milliseconds = self.agree(quantile(second, 0.5))
            medians.append(milliseconds)
            if len(medians) > 1 and abs(medians[-1] - medians[-2]) <= STEADY * medians[-2]:
                break
        return Times(medians, self.agree(lead_of(runs, medians[-1])))

    def turn(self, step: Step, times: Times) -> tuple[float, float]:
        """Run a lead-in, then timed runs, whose mean goes into ``times``; return when these began and ended."""
        lead, timed = times.runs if times.lead else (0, 1)
        self.meet()
        for _ in range(lead):
            self.operands.clear()
            step()
        self.operands.clear()
        self.meet()
        milliseconds = self.run(step, timed)
        end = time.monotonic()
        times.rounds.append(sum(milliseconds) / timed)
        return end - sum(milliseconds) / 1e3, end

    def steady_turn(self, step: Step, times: Times) -> tuple[float, float]:
        """Run pieces of a turn until two in a row take equally long, to STEADY; the last one goes into ``times``.

        Returns when the last piece began and ended.
        """
        count = max(1, math.ceil(1e3 * STEADY_PIECE / max(times.seconds[-1], 1e-3)))
        count, pieces = (count, MOST_PIECES) if self.device.type == "cuda" else (1, 1)
        previous = 0.0
        for _ in range(pieces):
            self.meet()
            milliseconds = self.run(step, count)
            end, mean = time.monotonic(), self.agree(sum(milliseconds) / count)
            if abs(mean - previous) <= STEADY * previous:
                break
            previous = mean
        times.rounds.append(mean)
        return end - sum(milliseconds) / 1e3, end


def lead_of(runs: list[float], settled: float) -> float:
    """Seconds until the medians of quarter seconds stay within NOTICEABLE of the settled one, within the bounds."""
    length = max(1, math.ceil(1e3 * PIECE / settled))
    pieces = [runs[start : start + length] for start in range(0, len(runs), length)]
    distant = [number for number, piece in enumerate(pieces) if abs(quantile(piece, 0.5) / settled - 1) > NOTICEABLE]
    seconds = sum(sum(piece) for piece in pieces[: distant[-1] + 1]) / 1e3 if distant else 0.0
    return min(MOST_LEAD, max(LEAST_LEAD, seconds))


def time_rounds(
    steps: Mapping[str, Step],
    turns: Turns,
    rounds: int,
    tick: Callable[[], Any] = lambda: None,
    say: Callable[[str], Any] = lambda text: None,
    settling: Collection[str] | None = None,
) -> tuple[dict[str, Times], dict[str, Failure]]:
    """Times of each step, which first settle one after the other and then take turns, and failures of those that fail.

    The order is reversed in every other round, so that a slow change of the clocks falls on all steps alike. On a CPU
    settling is one run that is not counted, and a turn one run. A step that fails leaves the turns.

    Args:
        settling: where there are more steps than there is time to let settle, those that do, right before the turns.
            All turns then last until they are steady (``Turns.steady_turn``), and ``rounds`` is the most: they end once
            a round moves no step's median by more than STEADY. None: all settle, and turns have the lead that it took.
    """
    times: dict[str, Times] = {}
    failures: dict[str, Failure] = {}
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}

    def tried(name: str, action: Callable[[], Any]) -> Any:
        value, failure = attempt(action, turns.operands)
        if failure is not None:
            failures[name] = failure
            times.pop(name, None)
        return value

    for name in sorted(steps, key=lambda name: settling is not None and name in settling):
        settles = settling is None or name in settling
        settled = tried(name, functools.partial(turns.settle if settles else turns.short, steps[name]))
        if settled is not None:
            times[name] = settled
    times = {name: times[name] for name in steps if name in times}
    seconds = sum(settled.lead + TIMED_SECONDS for settled in times.values() if settled.lead)
    say(f"{rounds} rounds of {seconds:.1f} seconds" if settling is None else f"{rounds} rounds at most")
    turn = turns.turn if settling is None else turns.steady_turn
    with Gauge(turns.device) as gauge:
        for number in range(rounds):
            for name in list(times) if number % 2 == 0 else reversed(list(times)):
                span = tried(name, functools.partial(turn, steps[name], times[name]))
                spans[name] += [span] if span is not None else []
            tick()
            if settling is not None and all(abs(settled.change) <= STEADY for settled in times.values()):
                break
    turns.operands.clear()
    for name, span_list in spans.items():
        if name in times:
            times[name].state = gauge.medians(span_list)
    return times, failures


def records(
    steps: Mapping[str, Step],
    operands: Holder,
    device: torch.device,
    rounds: int,
    tick: Callable[[], Any] = lambda: None,
    say: Callable[[str], Any] = lambda text: None,
    settling: Collection[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Let steps take turns; return each step's fields of a row (``Times.row``), or the record of its failure."""
    times, failures = time_rounds(steps, Turns(operands, device), rounds, tick, say, settling)
    return {key: failures[key].record() if key in failures else {"status": "ok"} | times[key].row() for key in steps}


def time_with_products(
    products: Mapping[str, int],
    steps: Mapping[str, Callable[[], Any]],
    operands: Operands,
    device: torch.device,
    rounds: int,
    tick: Callable[[], Any] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Let steps and bare products take turns; return each step's times and their ratio to its number of products.

    A step that failed has the record of its failure instead.
    """
    floors, _ = attempt(lambda: floor_steps(operands, device, set(products.values())), operands)
    found = records({**(floors or {}), **steps}, operands, device, rounds, tick)
    for key in steps:
        below = found.get(products_name(products[key]), {}).get("ms")
        if below and "ms" in found[key]:
            found[key] |= {"floor_ms": below, "ratio": found[key]["ms"] / below}
    return {key: found[key] for key in steps}
