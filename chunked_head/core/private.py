"""Private names of torch, looked up at first use. Each function has a slower way for a torch without the name."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
Result = TypeVar("Result")


@functools.cache
def private(*names: str) -> tuple[Any, ...] | None:
    """The objects of torch with these names, such as ``"_C._current_graph_task_id"``; None if torch lacks one."""
    objects = []
    for name in names:
        value: Any = torch
        for attribute in name.split("."):
            value = getattr(value, attribute, None)
        objects.append(value)
    return None if None in objects else tuple(objects)


@functools.cache
def answering() -> Any:
    """The class of a mode that answers anomaly mode, which asks for each gradient, in all threads, if it has a nan. The
    mode's ``mask`` [rows] says which rows are looked at; None: no row, as in a trace, whose tensors have no numbers."""
    modes = private("utils._python_dispatch.TorchDispatchMode")
    if modes is None:
        return None
    base: Any = modes[0]

    class Answer(base):
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

    return Answer


def anomalies_at(mask: Tensor | None) -> AbstractContextManager[Any]:
    """A context in which anomaly mode looks at gradients' rows where ``mask`` [rows] is true; None: at no row. Other
    rows may be nan; they are replaced by 0 later."""
    is_on = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    return answering()(mask) if is_on and answering() is not None else nullcontext()


def in_own_thread(function: Callable[[], Result]) -> Result:
    """Result of ``function`` in a new thread, which begins without torch's hooks and switched-off dispatch keys."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def carried() -> Result:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.cuda.stream(stream):
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(carried).result()


def is_traced() -> bool:
    """True while torch.compile traces, and inside of a transform of torch.func, where tensors may have no values. True
    if this torch cannot tell."""
    if torch.compiler.is_compiling():
        return True
    active = private("_C._are_functorch_transforms_active")
    return active is None or active[0]()


def breaks_graph(function: Callable[P, Result]) -> Callable[P, Result]:
    """``torch.compiler.disable(function)``, but the compiler is imported only when a graph is traced."""

    @functools.wraps(function)
    def public(*args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.compiler.is_compiling():
            from .outside import outside

            return outside(function, *args, **kwargs)
        return function(*args, **kwargs)

    return public
