"""Hooks of other libraries and users on a module, and forwards that they hang on it in the place of its class's."""

import inspect
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules

# hooks of these gather and free parameters or count, whatever the output is
BLIND = ("torch.distributed.fsdp.", "torch.distributed._composable.", "torch.utils.", "deepspeed.", "accelerate.")
OLD_FORWARD = "_old_forward"  # attribute in which accelerate's hooks keep the forward that they call


def watcher(head: Any) -> str | None:
    """The name of a hook that reads the head's output or its gradient, so that logits have to exist; None without."""
    forward = (head._forward_hooks, of_all_modules._global_forward_hooks)
    backward = (head._backward_hooks, head._backward_pre_hooks)
    for kind, registered in (("forward", forward), ("backward", backward)):
        for hook in (hook for hooks in registered for hook in hooks.values()):
            if not module_of(hook).startswith(BLIND):
                return f"a {kind} hook, {getattr(hook, '__qualname__', type(hook).__name__)}"
    return None


def module_of(hook: Any) -> str:
    while hasattr(hook, "func"):  # functools.partial
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


class LateForward:
    """A module's forward: that of the class that the module has when it is called."""

    def __init__(self, module: nn.Module):
        self.module = module

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


def loosen(module: Any) -> None:
    """Has a forward that hangs on a module and is its class's follow the class. Called before the class changes."""
    for name in ("forward", OLD_FORWARD):
        if is_of_class(module.__dict__.get(name), module):
            module.__dict__[name] = LateForward(module)


def hides(module: Any) -> bool:
    """True where a forward that hangs on a module runs instead of its class's."""
    hung = module.__dict__.get("forward")
    beneath = module.__dict__.get(OLD_FORWARD, hung)
    return hung is not None and not isinstance(beneath, LateForward) and not is_of_class(beneath, module)


def is_of_class(hung: Any, module: Any) -> bool:
    return getattr(hung, "__func__", None) is type(module).forward and hung.__self__ is module


def hung_by(module: Any) -> str:
    """The function that hangs on a module as its forward, and its place in the code."""
    hung = module.__dict__.get("forward")
    while (inner := getattr(hung, "__func__", getattr(hung, "func", None))) is not None:
        hung = inner
    code = getattr(hung, "__code__", None)
    if code is None:
        return f"{type(hung).__module__}.{type(hung).__qualname__}"
    return f"{code.co_name} at {Path(code.co_filename).name}:{code.co_firstlineno}"
