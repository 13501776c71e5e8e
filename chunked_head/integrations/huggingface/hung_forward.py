"""Forwards that frameworks hang on a module itself, which hide its class's."""

import inspect
from pathlib import Path
from typing import Any

from torch import nn

OLD_FORWARD = "_old_forward"  # what accelerate's hooks call, beside the forward that it hangs on an instance


class LateForward:
    """A module's forward: that of whatever class it has by then."""

    def __init__(self, module: nn.Module):
        self.module = module

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


def loosen(module: Any) -> None:
    """Has forwards that are hung on a module, and are its class's, follow its class. Before that changes."""
    for name in ("forward", OLD_FORWARD):
        if is_own(module.__dict__.get(name), module):
            module.__dict__[name] = LateForward(module)


def hides(module: Any) -> bool:
    """Whether what is hung on a module keeps its class's forward from being the one that runs."""
    hung = module.__dict__.get("forward")
    beneath = module.__dict__.get(OLD_FORWARD, hung)
    return hung is not None and not isinstance(beneath, LateForward) and not is_own(beneath, module)


def is_own(hung: Any, module: Any) -> bool:
    return getattr(hung, "__func__", None) is type(module).forward and hung.__self__ is module


def hung_by(module: Any) -> str:
    """Who hung what hides a module's forward, and where in the code."""
    hung = module.__dict__.get("forward")
    while (inner := getattr(hung, "__func__", getattr(hung, "func", None))) is not None:
        hung = inner
    code = getattr(hung, "__code__", None)
    if code is None:
        return f"{type(hung).__module__}.{type(hung).__qualname__}"
    return f"{code.co_name} at {Path(code.co_filename).name}:{code.co_firstlineno}"
