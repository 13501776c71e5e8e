"""Whether somebody's hooks see what a head gives, and so have to see logits."""

from typing import Any

from torch.nn.modules import module as of_all_modules

# hooks of these gather and free parameters or count, whatever the output is
BLIND = ("torch.distributed.fsdp.", "torch.distributed._composable.", "torch.utils.", "deepspeed.", "accelerate.")


def watcher(head: Any) -> str | None:
    """The name of a hook that sees the head's output or its gradient; None without one."""
    forward = (head._forward_hooks, of_all_modules._global_forward_hooks)
    backward = (head._backward_hooks, head._backward_pre_hooks)
    for kind, registered in (("forward", forward), ("backward", backward)):
        for hooks in registered:
            for hook in hooks.values():
                if not module_of(hook).startswith(BLIND):
                    return f"a {kind} hook, {getattr(hook, '__qualname__', type(hook).__name__)}"
    return None


def module_of(hook: Any) -> str:
    while hasattr(hook, "func"):  # functools.partial
        hook = hook.func
    return getattr(hook, "__module__", None) or ""
