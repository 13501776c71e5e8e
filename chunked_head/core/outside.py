"""A function that breaks a graph. Its decorator imports the compiler: import it only while a graph is traced."""

from collections.abc import Callable
from typing import Any

import torch

REASON = (
    "no graph holds this call: functions of your own, calls over ranks and of several streams run between two graphs; "
    "leave out fullgraph=True"
)


@torch.compiler.disable(reason=REASON)
def outside(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
