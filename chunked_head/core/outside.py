"""What breaks a graph. To make it imports the compiler, so this is imported where a graph is being traced."""

from collections.abc import Callable
from typing import Any

import torch

REASON = "no graph holds this call; make a loss of a function by losses.custom, before the compiled function"


@torch.compiler.disable(reason=REASON)
def outside(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
