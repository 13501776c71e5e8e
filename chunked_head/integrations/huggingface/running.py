"""Which patched forward runs, by thread and head: models may share a head, and threads a model."""

import threading
from typing import Any

import torch

PATCH = "_chunked_head_patch"  # in the head's __dict__
FORWARDS: dict[tuple[int, int], Any] = {}  # what was agreed on, by thread and head
MADE: set[tuple[int, int]] = set()  # thread and what was agreed on, of forwards that have made a loss


def running(head: Any) -> Any:
    """What was agreed on for the forward that calls a head; None outside of one."""
    patch = head.__dict__.get(PATCH)
    if torch.compiler.is_compiling():  # a graph knows no threads
        return patch if patch is not None and patch.lazy else None
    found = FORWARDS.get((threading.get_ident(), id(head)))
    return patch if found is None and patch is not None and patch.traced else found


def exporting() -> bool:
    """Whether ``torch.export`` traces. Inside of a graph torch 2.9 answers its own question with yes in
    ``torch.compile`` too; what it reads outside of one tells them apart."""
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag
