"""Each class in a process of its own, a few at a time: one that crashes or never ends takes no other with it."""

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .check import Outcome, check
from .classes import Entry


def work(entry: Entry, answer: Connection) -> None:
    """In the new process."""
    torch.set_num_threads(1)
    answer.send(check(entry))
    answer.close()


def outcomes(entries: Sequence[Entry], workers: int, limit_seconds: float) -> Iterator[Outcome]:
    """Of every class, as they end."""
    context: Any = multiprocessing.get_context("fork")  # transformers is imported once, by the parent
    left, running = list(entries), dict[Connection, tuple[Entry, Any, float]]()
    while left or running:
        while left and len(running) < workers:
            entry = left.pop(0)
            answers, answer = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(entry, answer), daemon=True)
            process.start()
            answer.close()
            running[answers] = entry, process, time.monotonic()
        wait(list(running), timeout=0.2)
        for answers in list(running):
            entry, process, start = running[answers]
            seconds = time.monotonic() - start
            outcome = ended(entry, answers, process, seconds > limit_seconds)
            if outcome is not None:
                outcome.seconds = round(seconds, 2)
                del running[answers]
                yield outcome


def ended(entry: Entry, answers: Connection, process: Any, too_long: bool) -> Outcome | None:
    """What a process came to; None while it runs."""
    outcome = None
    if answers.poll():
        try:
            outcome = answers.recv()
        except EOFError:
            process.join()
            outcome = Outcome(entry.name, entry.kind, "not built", f"its process ended with {process.exitcode}")
    elif too_long:
        process.kill()
        outcome = Outcome(entry.name, entry.kind, "not built", "longer than the limit of time")
    if outcome is not None:
        process.join()
        answers.close()
    return outcome
