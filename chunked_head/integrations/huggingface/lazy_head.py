"""``LazyHead``: the head of a patched model, whose call returns lazy logits."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ...core.checks import is_dtensor
from .head import hides, pre_hook, unwrapped, watcher
from .lazy_logits import LazyLogits
from .source import AGREEMENT, Source, running
from .traced_logits import TracedLogits
from .virtual import Virtual

LINEAR = nn.Linear.forward
HOLLOW = "hidden states without numbers"


class Passed:
    """Stands for a loss in the head's call, and stores the hidden states that the head's pre-hooks return; None if the
    pre-hooks return more arguments than hidden states."""

    hidden: Tensor | None = None

    def __call__(self, head: Any, hidden: Tensor, forward: Any) -> Tensor:
        self.hidden = hidden
        return hidden


def is_hollow(hidden: Any) -> bool:
    """True on the meta device, and for fake tensors of tools that run a model for its sizes."""
    fake = not torch.compiler.is_compiling() and "FakeTensor" in [base.__name__ for base in type(hidden).__mro__]
    return hidden.is_meta or fake


class LazyHead:
    """A base class that is put before a head's own class; its call returns lazy logits.

    ``__call__`` returns them and not ``forward``: so no hook runs before anything is computed, and a ``forward`` that a
    framework sets on the instance does not hide it.
    """

    weight: Tensor
    _parameters: dict[str, Any]
    _compiled_call_impl: Any
    class_before: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, LazyHead):  # unpatched, and this method is still referenced
            return type(self).__call__(self, *args, **kwargs)
        agreement = running(self)
        if agreement is None or len(args) != 1 or kwargs:
            return self.real(*args, **kwargs)
        hidden = args[0]
        reason = HOLLOW if agreement.rehearsed is None and is_hollow(hidden) else watcher(self)
        hook, is_among_others = pre_hook(self)
        if reason is None and hook is not None and is_among_others:
            reason = f"a forward pre-hook, {hook}, beside hooks of a framework"
        if reason is not None:
            agreement.count_logits(reason)
            return self.real(hidden)
        if hook is not None:  # it runs now, and once, on the model's hidden states
            passed = Passed()
            computed = self.real(hidden, chunked_head_loss=passed)
            if passed.hidden is None:
                agreement.count_logits(f"a forward pre-hook, {hook}, that gives the head more than hidden states")
                return computed
            hidden = passed.hidden
        source = Source.of_call(self, agreement, hidden, hook is not None)
        if source.output.reason:
            agreement.count_logits(source.output.reason)
            return source.call(hidden)
        virtual = Virtual(hidden, (), source.output.columns, source.output.dtype, source)
        return TracedLogits(virtual) if torch.compiler.is_compiling() else LazyLogits.wrap(virtual)

    def real(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own call with all its hooks. A compiled module runs uncompiled where a loss is made in it."""
        compiled = self.class_before.__name__ == "OptimizedModule" or self._compiled_call_impl is not None
        if not compiled or "chunked_head_loss" not in kwargs or torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with torch.compiler.set_stance("force_eager"):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, chunked_head_loss: Any = None, **kwargs: Any) -> Any:
        if not isinstance(self, LazyHead):  # unpatched, and this method is still referenced
            return type(self).forward(self, *args, **kwargs)
        forward = super().forward  # type: ignore[misc]
        passes = isinstance(chunked_head_loss, Passed) and (len(args) != 1 or kwargs)
        if chunked_head_loss is None or passes:
            return forward(*args, **kwargs)
        if unwrapped(self) is not self:
            return forward(*args, chunked_head_loss=chunked_head_loss)
        return chunked_head_loss(self, args[0], forward)

    @property
    def plain(self) -> bool:
        """True while the class's forward is nn.Linear's."""
        forward = self.class_before.forward
        return forward is LINEAR and forward.__module__ == nn.Linear.__module__

    @property
    def reads_weight(self) -> bool:
        """True where logits are the product with weight and bias alone; else chunks go through the head's call."""
        if unwrapped(self) is not self:
            return unwrapped(self).reads_weight
        # a quantised weight is a tensor of a class of its own
        numbers = type(self._parameters.get("weight")) in (nn.Parameter, Tensor, type(None))
        return self.plain and not hides(self) and (numbers or is_dtensor(self.weight))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles of a lazy head have its class from before the patch. If the copy's model is patched, its
        forward makes the head lazy again."""
        reduced: Any = super().__reduce_ex__(protocol)
        if reduced[0] is type(self):  # as of what torch.compile makes
            return self.class_before, *reduced[1:]
        state = self.__getstate__().items()  # type: ignore[attr-defined]
        return object.__new__, (self.class_before,), {key: value for key, value in state if key != AGREEMENT}


@functools.cache
def lazy_class(base: type) -> type:
    """The class of lazy heads whose own class is ``base``."""
    names = {"class_before": base, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (LazyHead, base), names)
