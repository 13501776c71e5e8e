"""Private names of torch, looked up at first use. Each function has a slower way for a torch without the name."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

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


def under_hooks() -> bool:
    """True where autograd passes saved tensors to hooks, as inside of an activation checkpoint or of offloading."""
    try:
        with disable_saved_tensors_hooks("to switch them off raises where there are some"):
            return False
    except RuntimeError:
        return True


def plain_saving() -> AbstractContextManager[Any]:
    """A context in which autograd passes saved tensors to no hooks, for functions that are differentiated inside it."""
    # autograd calls the innermost hooks only
    return saved_tensors_hooks(Tensor.detach, Tensor.detach) if under_hooks() else nullcontext()


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


TRANSFORMS = (
    "torch.func transforms (grad, vmap, jvp, ...) do not go with chunked_head, whose kernels they cannot see through; "
    "use loss.backward() or torch.autograd.grad, or full logits inside of the transform"
)
BATCHED = (
    "several upstream gradients at once (is_grads_batched=True, vectorize=True, torch.vmap over a backward) do not go "
    "with chunked_head, whose kernels torch.vmap cannot see through; ask for one after the other "
    "(vectorize=False), or use full logits"
)
FORWARD_MODE = (
    "forward-mode derivatives (torch.autograd.forward_ad, strategy='forward-mode') do not go with chunked_head, which "
    "has gradients in backward only; use loss.backward() or torch.autograd.grad, or full logits"
)


def refuse_transforms() -> None:
    """Raises inside of a transform of torch.func. If this torch cannot tell, the transform itself refuses our
    Function."""
    active = private("_C._are_functorch_transforms_active")
    if active is not None and active[0]():
        raise RuntimeError(TRANSFORMS)


def refuse_batched(upstream: Tensor) -> None:
    """Raises for a batch of upstream gradients (``is_grads_batched``). If this torch cannot tell, an operation without
    a batching rule raises."""
    keys = private("_C._dispatch_keys")
    if keys is not None and "Batched" in str(keys[0](upstream)):  # the key itself has no name in Python
        raise RuntimeError(BATCHED)


def in_backward() -> bool:
    """True while autograd runs a backward; a forward pass is then an activation checkpoint's second run.

    The call then makes no gradients in its forward pass, since a non-reentrant checkpoint discards the new graph. If
    this torch cannot tell, True for every call under hooks on saved tensors: it costs one matmul more.
    """
    task = private("_C._current_graph_task_id")
    return under_hooks() if task is None else task[0]() != -1


def breaks_graph(function: Callable[P, Result]) -> Callable[P, Result]:
    """``torch.compiler.disable(function)``, but the compiler is imported only when a graph is traced."""

    @functools.wraps(function)
    def public(*args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.compiler.is_compiling():
            from .outside import outside

            return outside(function, *args, **kwargs)
        return function(*args, **kwargs)

    return public
