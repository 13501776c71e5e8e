"""A head's module that gives lazy logits, or computes what is asked of them inside of its own call.

The module stays what and where it is, parameters, hooks and names: only its class changes, to one made of its own.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ..hooks import hides, watcher
from .lazy_logits import LazyLogits
from .source import PATCH, Source, is_shard, running
from .traced_logits import TracedLogits
from .virtual import Virtual

HOLLOW = "hidden states without numbers"
FSDP1 = "FullyShardedDataParallel"
# modules around a head, and where they have it: what FSDP1 gathers is there while its forward runs
WRAPPERS = {FSDP1: "_fsdp_wrapped_module", "OptimizedModule": "_orig_mod"}


def inner(head: Any) -> Any:
    """The module inside of a wrapper, else the module itself."""
    names = [WRAPPERS[kind.__name__] for kind in type(head).__mro__ if kind.__name__ in WRAPPERS]
    return getattr(head, names[0]) if names else head


def sizes_of(head: Any) -> tuple[int, int] | None:
    """Rows and columns of a head's matrix, or of the one inside of PEFT's or FSDP's wrapper around it."""
    for module in (inner(head), getattr(head, "original_module", None)):
        rows, columns = getattr(module, "out_features", None), getattr(module, "in_features", None)
        if isinstance(rows, int) and isinstance(columns, int):
            return rows, columns
    return None


def is_hollow(hidden: Any) -> bool:
    """True for hidden states without numbers: on the meta device, or torch's fake tensors, as tools use them that run a
    model for its sizes."""
    fake = not torch.compiler.is_compiling() and "FakeTensor" in [base.__name__ for base in type(hidden).__mro__]
    return hidden.is_meta or fake


class LazyHead:
    """Put before a module's class. ``__call__`` rather than ``forward`` gives lazy logits, so that no hook runs for
    what computes nothing, and frameworks that hang a ``forward`` on the instance do not hide it."""

    weight: Tensor
    _parameters: dict[str, Any]
    _compiled_call_impl: Any
    plain: bool  # whether the class's forward is nn.Linear's
    class_before: type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, LazyHead):  # unpatched, and this method is still referenced
            return type(self).__call__(self, *args, **kwargs)
        patch = running(self)
        if patch is None or len(args) != 1 or kwargs:
            return self.real(*args, **kwargs)
        hidden = args[0]
        reason = HOLLOW if patch.rehearsed is None and is_hollow(hidden) else watcher(self) or watcher(inner(self))
        if reason is not None:
            patch.materialises(reason)
            return self.real(hidden)
        source = Source.here(self, patch, hidden)
        dtype = hidden.dtype if source.autocast is None or hidden.dtype == torch.float64 else source.autocast
        virtual = Virtual(hidden, (), self.columns, dtype, source)
        return TracedLogits(virtual) if torch.compiler.is_compiling() else LazyLogits.of(virtual)

    def real(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own call, hooks and all; of a compiled module uncompiled where a loss is made in it."""
        compiled = self.class_before.__name__ == "OptimizedModule" or self._compiled_call_impl is not None
        if not compiled or "chunked_head_loss" not in kwargs or torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with torch.compiler.set_stance("force_eager"):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, chunked_head_loss: Any = None, **kwargs: Any) -> Any:
        if not isinstance(self, LazyHead):  # unpatched, and this method is still referenced
            return type(self).forward(self, *args, **kwargs)
        forward = super().forward  # type: ignore[misc]
        if chunked_head_loss is None:
            return forward(*args, **kwargs)
        if inner(self) is not self:
            return forward(*args, chunked_head_loss=chunked_head_loss)
        return chunked_head_loss(self, args[0], forward)

    @property
    def columns(self) -> int:
        """Columns of the logits, which a sharded weight's shape does not tell."""
        return (sizes_of(self) or (0, 0))[0]

    @property
    def reads_weight(self) -> bool:
        """True where logits are the product with weight and bias alone; else chunks go through the head's call."""
        if inner(self) is not self:
            return inner(self).reads_weight
        # a quantised weight is a tensor of a class of its own
        numbers = type(self._parameters.get("weight")) in (nn.Parameter, Tensor, type(None))
        return self.plain and not hides(self) and (numbers or is_shard(self.weight))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the class before, until a patched model's forward finds them."""
        made: Any = super().__reduce_ex__(protocol)
        if made[0] is type(self):  # as of what torch.compile makes
            return self.class_before, *made[1:]
        state = self.__getstate__().items()  # type: ignore[attr-defined]
        return object.__new__, (self.class_before,), {key: value for key, value in state if key != PATCH}


@functools.cache
def lazy_class(base: type) -> type:
    """The class of ``base``'s modules that are lazy."""
    plain = base.forward is nn.Linear.forward  # type: ignore[attr-defined]
    names = {"plain": plain, "class_before": base, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (LazyHead, base), names)
