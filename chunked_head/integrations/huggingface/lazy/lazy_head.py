"""A head's module that gives lazy logits, or computes what is asked of them inside of its own call.

The module stays what and where it is, parameters, hooks and names: only its class changes, to one made of its own.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ..hung_forward import hides
from ..running import running
from ..watched import watcher
from .lazy_logits import LazyLogits
from .source import Source, is_shard
from .traced_logits import TracedLogits
from .virtual import Virtual

HOLLOW = "hidden states without numbers"
FSDP1 = "FullyShardedDataParallel"


def is_wrapper(kind: type) -> bool:
    """FSDP1 puts a module around the head; what it holds gathered is there while its forward runs."""
    return any(base.__name__ == FSDP1 for base in kind.__mro__)


def inner(head: Any) -> Any:
    return head._fsdp_wrapped_module if is_wrapper(type(head)) else head


def sizes_of(head: Any) -> tuple[int, int] | None:
    """Rows and columns of a head's matrix, or of the one inside of PEFT's or FSDP's wrapper around it."""
    for module in (inner(head), getattr(head, "original_module", None)):
        rows, columns = getattr(module, "out_features", None), getattr(module, "in_features", None)
        if isinstance(rows, int) and isinstance(columns, int):
            return rows, columns
    return None


def is_hollow(hidden: Any) -> bool:
    """Of a shape alone, such as tools have that run a model to see how large things are: on the meta device, or of
    torch's mode of tensors without numbers."""
    fake = not torch.compiler.is_compiling() and "FakeTensor" in [base.__name__ for base in type(hidden).__mro__]
    return hidden.is_meta or fake


class LazyHead:
    """Put before a module's class. ``__call__`` rather than ``forward`` gives lazy logits, so that no hook runs for
    what computes nothing, and frameworks that hang a ``forward`` on the instance do not hide it."""

    weight: Tensor
    _parameters: dict[str, Any]
    plain: bool  # whether the class's forward is nn.Linear's
    base: type  # the class before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patch = running(self)
        if patch is None or len(args) != 1 or kwargs:
            return self.real(*args, **kwargs)
        hidden = args[0]
        reason = HOLLOW if patch.rehearsed is None and is_hollow(hidden) else watcher(self)
        if reason is not None:
            patch.materialises(reason)
            return self.real(hidden)
        source = Source.here(self, patch, hidden)
        dtype = hidden.dtype if source.autocast is None or hidden.dtype == torch.float64 else source.autocast
        virtual = Virtual(hidden, (), self.columns, dtype, source)
        return TracedLogits(virtual) if torch.compiler.is_compiling() else LazyLogits.of(virtual)

    def real(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own call, hooks and all."""
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, chunked_head_loss: Any = None, **kwargs: Any) -> Any:
        if not isinstance(self, LazyHead):  # unpatched, and somebody kept this method
            return type(self).forward(self, *args, **kwargs)
        forward = super().forward  # type: ignore[misc]
        if chunked_head_loss is None:
            return forward(*args, **kwargs)
        if is_wrapper(self.base):
            return forward(*args, chunked_head_loss=chunked_head_loss)
        return chunked_head_loss(self, args[0], forward)

    @property
    def columns(self) -> int:
        """Of its logits. A sharded weight's own shape does not tell."""
        sizes = sizes_of(self)
        assert sizes is not None
        return sizes[0]

    @property
    def reads_weight(self) -> bool:
        """Whether its weight and bias are all there is to it; else chunks go through its own call."""
        if is_wrapper(self.base):
            return inner(self).reads_weight
        # a quantised weight is a tensor of a class of its own
        numbers = type(self._parameters.get("weight")) in (nn.Parameter, Tensor, type(None))
        return self.plain and not hides(self) and (numbers or is_shard(self.weight))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its class is made, not found by name: copies and pickles make it again."""
        return made_again, (self.base,), self.__dict__.copy()


def made_again(base: type) -> Any:
    return object.__new__(lazy_class(base))


@functools.cache
def lazy_class(base: type) -> type:
    """The class of ``base``'s modules that are lazy; the same for the same."""
    plain = base.forward is nn.Linear.forward  # type: ignore[attr-defined]
    names = {"plain": plain, "base": base, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (LazyHead, base), names)
