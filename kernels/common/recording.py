"""Whether somebody records what is launched and done, to do it again: chunked_head's ``engine/replay/recorder.py``."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Launched(NamedTuple):
    """A launch of a compiled kernel: ``run(*arguments)``, one of which is the stream."""

    run: Callable[..., None]
    arguments: tuple[Any, ...]
    stream_at: int
    stream: Callable[[], int]  # the current one of the device


class Recording(threading.local):
    """The ``Recorder`` of what this thread does, if there is one."""

    recorder: Any = None
    never: bool = False  # whether something has been done, since this was false, that no tape may hold


RECORDING = Recording()


def refuse(reason: str, never: bool = False) -> None:
    """What is being done now is not to be done again from a tape, this once or ``never``."""
    RECORDING.never |= never
    if RECORDING.recorder is not None:
        RECORDING.recorder.stop(reason)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What is done inside is no part of a tape; whoever uses the tape does it himself."""
    recorder, RECORDING.recorder = RECORDING.recorder, None
    try:
        yield
    finally:
        RECORDING.recorder = recorder
