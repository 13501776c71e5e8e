"""Whether somebody records what is launched and done, to do it again: chunked_head's ``replay/recorder.py``."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# arguments of kernels that are the call's own numbers: of tokens, and along the last dimension of the targets
CALL_SIZES = ("call_tokens", "call_length")


class Launched(NamedTuple):
    """A launch of a compiled kernel: ``run(*arguments)``, one of which is the stream."""

    run: Callable[..., None]
    arguments: tuple[Any, ...]
    stream_at: int
    stream: Callable[[], int]  # the current one of the device
    sizes: Sequence[tuple[int, int]] = ()  # which of the arguments are the call's own sizes, and which of these


class Recording(threading.local):
    """The ``Recorder`` of what this thread does, if there is one."""

    recorder: Any = None
    never: bool = False  # whether something has been done, since this was false, that no tape may hold


RECORDING = Recording()


def sizes_among(names: Sequence[str]) -> list[tuple[int, int]]:
    """Places of ``CALL_SIZES`` among a kernel's arguments, and which each is."""
    return [(i, CALL_SIZES.index(name)) for i, name in enumerate(names) if name in CALL_SIZES]


def refuse(reason: str, never: bool = False) -> None:
    """What is being done now is not to be done again from a tape, this once or ``never``."""
    RECORDING.never |= never
    if RECORDING.recorder is not None:
        RECORDING.recorder.stop(reason)
