"""Memory that a sweep makes, and the recorder that listens to its steps; nothing here needs Triton."""

import threading
from typing import Any

import torch

# by thread, the ``recording.Recorder`` of the sweep that it runs
RECORDERS: dict[int, Any] = {}


def recorder() -> Any:
    """The recorder of the sweep that this thread runs, or None."""
    return RECORDERS.get(threading.get_ident()) if RECORDERS else None


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty`` of stores, statistics and gradients."""
    made = torch.empty(*shape, dtype=dtype, device=device)
    if RECORDERS and (listening := recorder()) is not None:
        listening.made(made)
    return made
