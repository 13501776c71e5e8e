"""Lazy logits inside of ``torch.compile``: a plain object with a tensor's methods, which is what a graph can be traced
through. What is asked of it beyond those computes the logits in the graph."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused_loss import cross_entropy
from .virtual import COPIES, IN_PLACE, OPERATORS, VIEWS, Virtual, picks


class TracedLogits:
    """See ``LazyLogits``."""

    def __init__(self, virtual: Virtual):
        self._virtual = virtual
        self._viewed = False  # whether another shares what would be its memory

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._virtual.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._virtual.dtype

    @property
    def device(self) -> torch.device:
        return self._virtual.hidden.device

    @property
    def ndim(self) -> int:
        return self._virtual.hidden.ndim

    def dim(self) -> int:
        return self._virtual.hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        shape = self.shape
        return shape if dim is None else shape[dim]

    def materialise(self) -> Tensor:
        """The logits, as the unpatched model would have computed them."""
        return self._virtual.source.real(self._virtual)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_virtual", "_viewed"):
            raise AttributeError(name)
        return getattr(real(self, name), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else kwargs.pop("input", None)
        if isinstance(first, TracedLogits):
            if function is F.cross_entropy:
                found = cross_entropy(first._virtual, *args[1:], **kwargs)
                if found is not NotImplemented:
                    return found
            elif function is torch.tanh:
                return first.tanh()
            args = (first, *args[1:])
        name = function.__name__
        return function(*[real(one, name) for one in args], **{key: real(one, name) for key, one in kwargs.items()})


def done(logits: TracedLogits, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor's method of lazy logits."""
    operation = (IN_PLACE | COPIES | VIEWS).get(name)
    found = NotImplemented if operation is None else operation(logits._virtual, *args, **kwargs)
    if name in IN_PLACE or name == "__setitem__":
        if found is NotImplemented or logits._viewed:
            raise RuntimeError(f"{name} on lazy logits inside of torch.compile is not supported; unpatch the model")
        logits._virtual = found
        return logits
    if found is NotImplemented:
        return getattr(real(logits, name), name)(*args, **kwargs)
    if found is logits._virtual and name != "clone":
        return logits  # as a tensor's cast to its own dtype is the tensor
    made = TracedLogits(found) if isinstance(found, Virtual) else tuple([TracedLogits(part) for part in found])
    if name in VIEWS and not (name == "__getitem__" and picks(args[0])):
        logits._viewed = True
        for one in made if isinstance(made, tuple) else (made,):
            one._viewed = True
    return made


def real(value: Any, what: str) -> Any:
    """With logits computed for lazy ones, in containers too; ``what`` asks for them."""
    if isinstance(value, (tuple, list)):
        return type(value)([real(part, what) for part in value])
    if not isinstance(value, TracedLogits):
        return value
    value._virtual.source.patch.materialises(what)
    return value.materialise()


def method(name: str) -> Callable[..., Any]:
    def called(self: TracedLogits, *args: Any, **kwargs: Any) -> Any:
        return done(self, name, args, kwargs)

    return called


for _name in (*COPIES, *VIEWS, *IN_PLACE, *OPERATORS, "__setitem__"):
    if _name != "__iter__" and OPERATORS.get(_name) not in IN_PLACE:
        setattr(TracedLogits, _name, method(OPERATORS.get(_name, _name)))
