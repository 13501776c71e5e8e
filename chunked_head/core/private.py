"""Functions that use private names of torch, looked up at first use. Where torch lacks a name, the function takes a
slower way or leaves a check to torch."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@functools.cache
def private(*names: str) -> tuple[Any, ...] | None:
    """Returns the objects of torch with ``names``, such as ``"_C._current_graph_task_id"``; None if torch lacks a
    name."""
    objects = []
    for name in names:
        value: Any = torch
        for attribute in name.split("."):
            value = getattr(value, attribute, None)
        objects.append(value)
    return None if None in objects else tuple(objects)


@functools.cache
def nan_filter() -> Any:
    """Returns ``NanFilter``, the class of a dispatch mode; None if torch has no dispatch modes.

    Autograd's anomaly mode checks each gradient, in all threads, for nan. Inside of ``NanFilter(mask)`` the check sees
    only rows where ``mask`` [rows] is true. Inside of ``NanFilter(None)`` it sees no nan: a trace's tensors have no
    numbers."""
    mode_classes = private("utils._python_dispatch.TorchDispatchMode")
    if mode_classes is None:
        return None
    base: Any = mode_classes[0]

    class NanFilter(base):
        def __init__(self, mask: Tensor | None):
            super().__init__()
            self.mask = mask

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, mask = str(func), self.mask
            if mask is None and name == "aten._local_scalar_dense.default" and torch.is_anomaly_enabled():
                return False
            result = func(*args, **(kwargs or {}))
            if mask is None or name != "aten.isnan.default" or result.shape[:1] != mask.shape:
                return result
            return result & mask.view(-1, *[1] * (result.dim() - 1))

    return NanFilter


def anomalies_at(mask: Tensor | None) -> AbstractContextManager[Any]:
    """A context in which autograd's anomaly mode checks only rows of gradients where ``mask`` [rows] is true; None:
    no row. A nan in another row is replaced by 0 later."""
    checks_nan = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    return nan_filter()(mask) if checks_nan and nan_filter() is not None else nullcontext()


def in_own_thread(function: Callable[[], Result]) -> Result:
    """Calls ``function()`` in a new thread, without this thread's hooks and switched-off dispatch keys, and returns the
    result. The new thread has this thread's stream, grad mode and inference mode."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def with_modes() -> Result:
        with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad), torch.cuda.stream(stream):
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(with_modes).result()


def is_traced() -> bool:
    """True while torch.compile traces and inside of a transform of torch.func, where tensors may have no values. Also
    True if torch lacks the private name of this check."""
    if torch.compiler.is_compiling():
        return True
    transforms_active = private("_C._are_functorch_transforms_active")
    return transforms_active is None or transforms_active[0]()


def breaks_graph(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorates a function to run outside of graphs, like ``torch.compiler.disable``. The compiler is imported only
    while a graph is traced."""

    @functools.wraps(function)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if torch.compiler.is_compiling():
            from .outside import outside

            return outside(function, *args, **kwargs)
        return function(*args, **kwargs)

    return wrapper
