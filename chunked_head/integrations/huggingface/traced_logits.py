"""Lazy logits inside of ``torch.compile``."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused import cross_entropy
from .lazy_logits import WRITING, View, computed, through, writes
from .virtual import COPIES, OPERATORS, VIEWS, Virtual, picks

PURE = {
    "softmax",
    "log_softmax",
    "logsumexp",
    "argmax",
    "max",
    "min",
    "amax",
    "amin",
    "sum",
    "mean",
    "topk",
    "exp",
    "sigmoid",
    "std",
    "var",
    "norm",
    "gather",
    "matmul",
    "cross_entropy",
}  # methods whose results share no memory with the logits


class TracedLogits:
    """Lazy logits as a plain object with a tensor's methods, which a compiler can trace. Any other use of it computes
    the logits in the graph."""

    def __init__(self, virtual: Virtual, base: Any = None, view: View | None = None):
        self._virtual, self._origin, self._view = virtual, base, view
        self._real: Tensor | None = None  # once something may be written to them or to what they are views of

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
        source = self._virtual.source
        return source.grad and (
            self._virtual.hidden.requires_grad or any(p.requires_grad for p in source.head.parameters())
        )

    def materialise(self) -> Tensor:
        return self.in_memory() if self.is_shared() else self._virtual.source.real(self._virtual)

    def is_shared(self) -> bool:
        """True where these logits, or those that they are a view of, are computed because something may write to
        them."""
        return self._real is not None or (self._origin is not None and self._origin.is_shared())

    def in_memory(self) -> Tensor:
        """These logits, computed as a view of those of ``_origin``."""
        if self._real is None:
            computes = self._origin is None
            self._real = (
                self._virtual.source.real(self._virtual) if computes else through(self._origin.in_memory(), self._view)
            )
        return self._real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_virtual", "_origin", "_way", "_real"):
            raise AttributeError(name)
        return getattr(self.computed(name), name)

    def computed(self, purpose: str) -> Tensor:
        """The logits, for a method that reads them; RuntimeError for one that writes, which would reach a copy."""
        if writes(purpose):
            raise RuntimeError(f"{purpose} on lazy logits inside of torch.compile is not supported; unpatch the model")
        self._virtual.source.agreement.count_logits(purpose)
        return self.materialise() if purpose in PURE else self.in_memory()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else kwargs.pop("input", None)
        if isinstance(first, TracedLogits) and not first.is_shared():
            if function is F.cross_entropy:
                loss = cross_entropy(first._virtual, *args[1:], **kwargs)
                if loss is not NotImplemented:
                    return loss
            elif function is torch.tanh:
                return first.tanh()
        args = (first, *args[1:])
        name = function.__name__
        return function(*computed(args, name), **computed(kwargs, name))


def method_result(logits: TracedLogits, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the tensor's method ``name`` of lazy logits."""
    operation = (COPIES | VIEWS).get(name)
    result = NotImplemented if operation is None or logits.is_shared() else operation(logits._virtual, *args, **kwargs)
    if result is NotImplemented:
        return getattr(logits.computed(name), name)(*args, **kwargs)
    copied = name not in VIEWS or (name == "__getitem__" and picks(args[0]))
    base = None if copied else logits
    if isinstance(result, Virtual):
        return TracedLogits(result, base, View(getattr(Tensor, name), args, kwargs))
    views = [View(getattr(Tensor, name), args, kwargs, i) for i in range(len(result))]
    return tuple([TracedLogits(virtual, base, view) for virtual, view in zip(result, views, strict=True)])


def method(name: str) -> Callable[..., Any]:
    def called(self: TracedLogits, *args: Any, **kwargs: Any) -> Any:
        return method_result(self, name, args, kwargs)

    return called


for _name in (*COPIES, *VIEWS, *OPERATORS, *WRITING):
    if _name != "__iter__":
        setattr(TracedLogits, _name, method(OPERATORS.get(_name, _name)))
