"""``outside``, which runs a function outside of a graph of ``torch.compile``. This module imports the compiler, so it
is itself imported only while a graph is traced."""

from collections.abc import Callable
from typing import Any

import torch

REASON = (
    "no graph holds this call: functions of your own, calls over ranks and of several streams run between two graphs; "
    "leave out fullgraph=True"
)


@torch.compiler.disable(reason=REASON)
def outside(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Returns ``function(*args, **kwargs)``; a graph breaks here."""
    return function(*args, **kwargs)
