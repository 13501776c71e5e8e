"""Random sequences of calls: each call gives the bits that it gives with all caches empty, in guarded memory.

A seed draws one sequence. Calls of ``fuzz.py`` that are alike but for a few draws follow each other; or all metrics, or
all losses, one after the other in a random order and back, which has each two of them in both orders. Where two of them
share a kernel, a Spec, a plan or a recording that is not theirs, the later one shows. ``PYTHONPATH=tests:tests/helpers
python -m sequences --seconds 180 [--first 0] [--device cuda]``; without a GPU ``TRITON_INTERPRET=1`` stands before it.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fuzz
import torch
import uninitialised
from fuzz import METRICS, Call
from oracle.reference import Term
from oracle.rows import CLASS_WEIGHTS, DENSE
from tables import Emptying
from torch import Tensor

from chunked_head.metrics import Metric

Step = Callable[[], list[Tensor] | str]  # a call, made anew each time: its results, or the words in which it is refused
SHARE = 0.15  # of draws that are others than those of the first call of a sequence
LENGTH = 12
FEW = 10  # of all metrics or losses, in every other sequence of them


class Varied(random.Random):
    """Draws of a seed. Another seed replaces a share of the draws."""

    def __init__(self, seed: int, another: int):
        super().__init__(seed)
        self.others, self.share = random.Random(f"{seed} {another}"), SHARE if another else 0.0

    def choice(self, values: Any) -> Any:
        usual = super().choice(values)
        return self.others.choice(values) if self.others.random() < self.share else usual

    def sample(self, population: Any, k: int, **options: Any) -> Any:
        usual = super().sample(population, k, **options)
        return self.others.sample(population, k) if self.others.random() < self.share else usual


class Pinned(Call):
    """A call of ``linear_loss`` with one loss, and one metric beside entropy."""

    def __init__(self, seed: int, device: str, loss: tuple[Any, ...], metric: Metric | None):
        super().__init__(seed, device, ("triton",))
        self.loss, self.metric, self.function = loss, metric, "linear_loss"

    def draw_losses(self, most: int) -> tuple[list[Term], set[str]]:
        kind, options, fields = self.loss
        weights = torch.rand(self.vocab, generator=self.made)
        options = {name: weights if value is CLASS_WEIGHTS else value for name, value in options.items()}
        # every call has the same fields: what it does not read is no other kind of call
        own = {"teacher_logits"} if DENSE in fields else set[str]()
        return [Term(1.0, kind, options)], {*fields} - {DENSE} | own

    def draw_metrics(self, most: int) -> list[Metric]:
        return [] if self.metric is None else [self.metric, fuzz.metrics.entropy(name="beside")]


def outcome(call: Call) -> list[Tensor] | str:
    """Values, gradients and metrics of a call, or how it is refused."""
    ours, _ = getattr(call, call.function)()
    try:
        found = ours()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    numbers = [*found.values.values(), *found.grads]
    for metric in found.metrics.values():
        numbers += [one for one in (metric.sum, metric.count, metric.extremum) if one is not None]
    return [number.detach().clone() for number in numbers]


def plain_seed(seed: int) -> int:
    """The first seed from ``seed`` on whose call has several tokens that count and no unusual options."""
    while True:
        call = Call(seed, backends=("triton",))
        whole = call.head["shift"] == 0 and call.schedule["skip_ignored"] is False and call.way == "once"
        plain = whole and call.schedule["chunk_tokens"] in (None, 16, 100) and "memory_budget" not in call.schedule
        if plain and 4 <= call.target.numel() <= 24 and call.counts.sum() > 3 and 3 < call.vocab < 50:
            return seed
        seed += 1


def of_metrics(seed: int, device: str) -> list[Step]:
    """One call for each metric with each of its options."""
    loss = fuzz.LOSSES[0]  # its kernel is soon written
    made = [getattr(fuzz.metrics, kind)(**options) for kind, each in METRICS for options in each]
    return [lambda metric=metric: outcome(Pinned(seed, device, loss, metric)) for metric in made]  # type: ignore[misc]


def of_losses(seed: int, device: str) -> list[Step]:
    """One call for each loss with each of its options."""
    return [lambda loss=loss: outcome(Pinned(seed, device, loss, None)) for loss in fuzz.LOSSES]  # type: ignore[misc]


def of_variants(seed: int, device: str, count: int = 5) -> list[Step]:
    """Calls that differ in some draws. The last two are the first call with other random numbers."""

    def step(another: int, numbers: int) -> list[Tensor] | str:
        return outcome(Call(seed, device, draw=Varied(seed, another), numbers=numbers, halves=fuzz.HALVES))

    kinds = [*[(i, seed) for i in range(count)], (0, seed + 1), (0, seed + 2)]
    return [lambda kind=kind: step(*kind) for kind in kinds]  # type: ignore[misc]


def steps_of(seed: int, device: str) -> tuple[list[Step], list[int]]:
    """The calls of a seed, and the order in which they run."""
    draw = random.Random(seed)
    kind = {0: of_metrics, 1: of_losses}.get(seed % 10)
    if kind is not None:
        steps = kind(plain_seed(seed * 1000), device)
        order = draw.sample(range(len(steps)), FEW if seed % 20 >= 10 else len(steps))
        return steps, order + order[-2::-1]
    steps = of_variants(seed, device)
    return steps, draw.choices(range(len(steps)), k=LENGTH)


def same(one: list[Tensor] | str, other: list[Tensor] | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return len(one) == len(other) and all(map(equal, one, other))


def equal(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and bool(((one == other) | (one.isnan() & other.isnan())).all())


class Sequenced:
    """Runs sequences until ``end``, and counts calls."""

    def __init__(self, device: str = "cpu", end: float = math.inf, pause: float = math.inf):
        """``end``: a time of ``time.monotonic``, after which no call begins. ``pause``: seconds between two lines that
        print the number of calls."""
        self.device, self.end, self.pause = device, end, pause
        self.calls, self.unsteady, self.next_line = 0, 0, time.monotonic() + pause
        self.empty = Emptying()

    def run(self, step: Step) -> list[Tensor] | str:
        self.calls += 1
        found = step()
        uninitialised.WATCHED.look()
        if time.monotonic() > self.next_line:
            self.next_line = time.monotonic() + self.pause
            print(f"{self.calls} calls so far", flush=True)
        return found

    def alone(self, step: Step) -> list[Tensor] | str:
        self.empty()
        return self.run(step)

    def check(self, steps: Sequence[Step], order: Sequence[int]) -> str:
        """Text that names the first call whose bits differ from those with empty caches, and the calls before it; "" if
        none differs. The order runs in half of the remaining time, calls with empty caches in the other half."""
        found, middle = list[list[Tensor] | str](), (time.monotonic() + self.end) / 2
        self.empty()
        for i in order:
            if time.monotonic() > middle:
                break
            found.append(self.run(steps[i]))
        expected, unsteady = dict[int, list[Tensor] | str](), set[int]()
        for place, (i, numbers) in enumerate(zip(order, found, strict=False)):
            if i not in expected:
                if time.monotonic() > self.end:
                    break
                expected[i] = self.alone(steps[i])
            if i in unsteady or same(numbers, expected[i]):
                continue
            # sums that a GPU makes in any order
            if self.device == "cpu" or same(self.alone(steps[i]), expected[i]):
                return f"call {i} at place {place} of {list(order[: place + 1])}{self.behind(steps, order, place)}"
            unsteady.add(i)
        self.unsteady += len(unsteady)
        return ""

    def behind(self, steps: Sequence[Step], order: Sequence[int], place: int) -> str:
        """Text that names one earlier call after which the last call differs; "" if none is found before ``end``."""
        last = steps[order[place]]
        expected = self.alone(last)
        for i in dict.fromkeys(order[:place]):
            if time.monotonic() > self.end:
                break
            self.alone(steps[i])
            if not same(self.run(last), expected):
                return f", behind call {i} alone"
        return ""

    def seed(self, seed: int) -> str:
        """What is wrong with the sequence of a seed, or ""."""
        with uninitialised.shown(gpu=self.device != "cpu"):
            try:
                return self.check(*steps_of(seed, self.device))
            except (AssertionError, RuntimeError, IndexError, TypeError, KeyError) as error:
                return f"{type(error).__name__}: {str(error)[:600]}"


def failures(seeds: Iterator[int], device: str = "cpu") -> list[str]:
    sequenced = Sequenced(device)
    return [f"seed {seed}: {wrong}" for seed in seeds if (wrong := sequenced.seed(seed))]


if __name__ == "__main__":
    import argparse
    import itertools
    import os
    import sys

    import quick_interpreter

    parser = argparse.ArgumentParser(description=__doc__)
    # 0 and 1 are of all metrics and all losses: a GPU's kernels of these are compiled for minutes the first time
    parser.add_argument("--first", type=int, default=2)
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no call after so long")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        quick_interpreter.install()
    wrong, begin = 0, time.monotonic()
    sequenced = Sequenced(given.device, begin + given.seconds, pause=20)
    seeds = range(given.first, given.first + given.count)
    for seed in itertools.takewhile(lambda _: time.monotonic() < sequenced.end, seeds):
        if said := sequenced.seed(seed):
            wrong += 1
            print(f"seed {seed}, after {time.monotonic() - begin:.0f} s: {said}", flush=True)
    print(f"{sequenced.calls} calls of {seed - given.first + 1} sequences, {wrong} failed", end="")
    print(f", {sequenced.unsteady} calls give other bits each time" if sequenced.unsteady else "")
    sys.exit(wrong > 0)
