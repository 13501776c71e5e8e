"""Whether somebody's hooks see what a head gives, and so have to see logits."""

from typing import Any

from torch.nn.modules import module as of_all_modules

# hooks of these gather and free parameters or count, whatever the output is
BLIND = ("torch.distributed.fsdp.", "torch.distributed._composable.", "torch.utils.", "deepspeed.", "accelerate.")


def watcher(head: Any) -> str | None:
    """The name of a hook that sees the head's output or its gradient; None without one."""
    for hooks in (head._forward_hooks, of_all_modules._global_forward_hooks):
        for hook in hooks.values():
            if not blind(hook):
                return f"a forward hook, {name_of(hook)}"
    for hooks in (head._backward_hooks, head._backward_pre_hooks):
        for hook in hooks.values():
            if not blind(hook):
                return f"a backward hook, {name_of(hook)}"
    return None


def blind(hook: Any) -> bool:
    return module_of(hook).startswith(BLIND)


def module_of(hook: Any) -> str:
    while hasattr(hook, "func"):  # functools.partial
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


def name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)
