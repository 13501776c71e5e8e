"""Lazy logits inside of ``torch.compile``."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused import cross_entropy
from .lazy_logits import WRITING_METHODS, view_function, with_computed, writes_to_tensor
from .virtual import COPIES, OPERATORS, VIEWS, VirtualLogits, gathers

# methods whose results share no memory with the logits
NONVIEW_METHODS = {"softmax", "log_softmax", "logsumexp", "argmax", "max", "min", "amax", "amin", "sum", "mean", "topk",
                   "exp", "sigmoid", "std", "var", "norm", "gather", "matmul", "cross_entropy"}  # fmt: skip


class TracedLogits:
    """Lazy logits as an object that compilers can trace: no tensor, but with methods of tensors. Methods that need
    numbers compute the logits in the graph."""

    def __init__(self, virtual: VirtualLogits, base: Any = None, view_of: Any = None):
        self._virtual, self._view_base, self._view_of = virtual, base, view_of  # as in LazyLogits.wrap
        self._computed: Tensor | None = None  # set where these logits or their base may be written to

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._virtual.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._virtual.dtype

    @property
    def device(self) -> torch.device:
        return self._virtual.device

    @property
    def ndim(self) -> int:
        return self._virtual.hidden.ndim

    def dim(self) -> int:
        return self._virtual.hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        shape = self.shape
        return shape if dim is None else shape[dim]

    @property
    def requires_grad(self) -> bool:
        head_call = self._virtual.head_call
        return head_call.has_grad and (
            self._virtual.hidden.requires_grad or any(p.requires_grad for p in head_call.head.parameters())
        )

    def materialise(self) -> Tensor:
        return self.in_memory() if self.is_shared() else self._virtual.head_call.computed_logits(self._virtual)

    def is_shared(self) -> bool:
        """True if the logits, or the logits that they are a view of, have been computed in one memory."""
        return self._computed is not None or (self._view_base is not None and self._view_base.is_shared())

    def in_memory(self) -> Tensor:
        """Returns the computed logits, as a view of the computed ``_view_base`` if there is a base."""
        if self._computed is None:
            if self._view_base is None:
                self._computed = self._virtual.head_call.computed_logits(self._virtual)
            else:
                self._computed = self._view_of(self._view_base.in_memory())
        return self._computed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_virtual", "_view_base", "_view_of", "_computed"):
            raise AttributeError(name)
        return getattr(self.compute_for(name), name)

    def compute_for(self, purpose: str) -> Tensor:
        """Computes the logits for the method ``purpose``; returns them. RuntimeError if the method writes to the
        logits, since only a copy would change."""
        if writes_to_tensor(purpose):
            raise RuntimeError(f"{purpose} on lazy logits inside of torch.compile is not supported; unpatch the model")
        self._virtual.head_call.patch.count_logits(purpose)
        return self.materialise() if purpose in NONVIEW_METHODS else self.in_memory()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first_argument = args[0] if args else kwargs.pop("input", None)
        if isinstance(first_argument, TracedLogits) and not first_argument.is_shared():
            if function is F.cross_entropy:
                loss = cross_entropy(first_argument._virtual, *args[1:], **kwargs)
                if loss is not NotImplemented:
                    return loss
            elif function is torch.tanh:
                return first_argument.tanh()
        args = (first_argument, *args[1:])
        name = function.__name__
        return function(*with_computed(args, name), **with_computed(kwargs, name))


def method_result(logits: TracedLogits, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the method ``name`` of lazy logits. Returns lazy logits if the method needs no numbers, else a tensor."""
    operation = (COPIES | VIEWS).get(name)
    result = NotImplemented if operation is None or logits.is_shared() else operation(logits._virtual, *args, **kwargs)
    if result is NotImplemented:
        return getattr(logits.compute_for(name), name)(*args, **kwargs)
    is_copy = name not in VIEWS or (name == "__getitem__" and gathers(args[0]))
    base, function = None if is_copy else logits, getattr(Tensor, name)
    if isinstance(result, VirtualLogits):
        return TracedLogits(result, base, view_function(function, args, kwargs))
    return tuple(
        [TracedLogits(piece, base, view_function(function, args, kwargs, i)) for i, piece in enumerate(result)]
    )


def method(name: str) -> Callable[..., Any]:
    """The method ``name`` of ``TracedLogits``."""

    def method_of_logits(self: TracedLogits, *args: Any, **kwargs: Any) -> Any:
        return method_result(self, name, args, kwargs)

    return method_of_logits


for _name in (*COPIES, *VIEWS, *OPERATORS, *WRITING_METHODS):
    if _name != "__iter__":
        setattr(TracedLogits, _name, method(OPERATORS.get(_name, _name)))
