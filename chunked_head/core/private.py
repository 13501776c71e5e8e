"""Names of torch that may be gone in the next version: looked up when they are first needed, each with a documented,
slower way for a torch without it."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.autograd.graph import disable_saved_tensors_hooks

Result = TypeVar("Result")


@functools.cache
def private(*names: str) -> tuple[Any, ...] | None:
    """What torch has under all of these names, such as ``"_C._current_graph_task_id"``; None where one is missing."""
    found = []
    for name in names:
        value: Any = torch
        for part in name.split("."):
            value = getattr(value, part, None)
        found.append(value)
    return None if None in found else tuple(found)


def under_hooks() -> bool:
    """Whether autograd gives what it saves to hooks: an activation checkpoint's, or those of offloading."""
    try:
        with disable_saved_tensors_hooks("to switch them off raises where there are some"):
            return False
    except RuntimeError:
        return True


HOOKS = [f"_C._autograd._{verb}_saved_tensors_default_hooks" for verb in ("top", "pop", "push")]


def without_hooks(function: Callable[[], Result]) -> Result:
    """What ``function`` returns, run without hooks on what autograd saves."""
    stack = private(*HOOKS)
    if stack is None:
        return in_own_thread(function) if under_hooks() else function()
    top, pop, push = stack
    hooks = []
    try:
        while (pair := top(True)) is not None:
            hooks.append(pair)
            pop()
        return function()
    finally:
        for pack, unpack in reversed(hooks):
            push(pack, unpack)


def in_own_thread(function: Callable[[], Result]) -> Result:
    """What ``function`` returns, run by a new thread: torch keeps hooks and what is switched off of its dispatcher by
    thread, and a new one begins without."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def carried() -> Result:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.cuda.stream(stream):
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(carried).result()
