"""``LazyHead``: the head of a patched model. Its call returns lazy logits. A loss of lazy logits is computed inside of
another call of the head (``run_inside``), so that all hooks of the head run."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...core.checks import is_dtensor
from .head import has_instance_forward, input_hook, reading_hook, unwrapped
from .head_call import PATCH, HeadCall, patch_in_forward
from .lazy_logits import LazyLogits
from .traced_logits import TracedLogits
from .virtual import VirtualLogits

LINEAR_FORWARD = nn.Linear.forward
HOLLOW_REASON = "hidden states without numbers"  # why a call does not return lazy logits


class HiddenRecorder:
    """A callable that runs in place of a head's own forward and stores the hidden states that the pre-hooks return."""

    hidden: Tensor | None = None  # None also if the pre-hooks have returned more than hidden states

    def __call__(self, head: Any, hidden: Tensor, forward: Any) -> Tensor:
        self.hidden = hidden
        return hidden


def has_no_numbers(hidden: Any) -> bool:
    """True for tensors on the meta device, and for fake tensors, on which tools run a model to learn its sizes."""
    is_fake = not torch.compiler.is_compiling() and "FakeTensor" in [base.__name__ for base in type(hidden).__mro__]
    return hidden.is_meta or is_fake


class LazyHead:
    """The first base class of a lazy head's class; the second is the class before the patch. The head's call returns
    lazy logits while the forward of a patched model runs.

    Lazy logits come from ``__call__``, not from ``forward``: no hook runs before logits are computed, and a ``forward``
    that a framework sets on the instance does not replace ``__call__``."""

    weight: Tensor
    _parameters: dict[str, Any]
    _compiled_call_impl: Any  # nn.Module's compiled call; None if the head is not compiled
    class_before: Any  # the head's class before the patch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, LazyHead):  # unpatched, and this method is still referenced
            return type(self).__call__(self, *args, **kwargs)
        patch = patch_in_forward(self)
        if patch is None or len(args) != 1 or kwargs:
            return self.module_call(*args, **kwargs)
        hidden = args[0]
        reason = HOLLOW_REASON if patch.rehearsed is None and has_no_numbers(hidden) else reading_hook(self)
        hook_name, has_framework_hook = input_hook(self)
        if reason is None and hook_name is not None and has_framework_hook:
            reason = f"a forward pre-hook, {hook_name}, beside hooks of a framework"
        if reason is not None:
            patch.count_logits(reason)
            return self.module_call(hidden)
        if hook_name is not None:  # the hook runs now, and once, on the model's hidden states
            recorder = HiddenRecorder()
            logits = self.module_call(hidden, chunked_head_function=recorder)
            if recorder.hidden is None:
                patch.count_logits(f"a forward pre-hook, {hook_name}, that gives the head more than hidden states")
                return logits
            hidden = recorder.hidden
        head_call = HeadCall.in_present_state(self, patch, hidden, hook_name is not None)
        if head_call.layout.reason:
            patch.count_logits(head_call.layout.reason)
            return head_call.compute(hidden)
        virtual_logits = VirtualLogits(hidden, (), head_call.layout.num_columns, head_call.layout.dtype, head_call)
        return TracedLogits(virtual_logits) if torch.compiler.is_compiling() else LazyLogits.wrap(virtual_logits)

    def module_call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the head with all hooks, by ``__call__`` of the class that the head had before the patch. A compiled
        head runs uncompiled if ``kwargs`` has a ``chunked_head_function``."""
        is_compiled = self.class_before.__name__ == "OptimizedModule" or self._compiled_call_impl is not None
        if not is_compiled or "chunked_head_function" not in kwargs or torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with torch.compiler.set_stance("force_eager"):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def run_inside(self, function: Callable[..., Any], hidden: Tensor, has_run_hooks: bool) -> Any:
        """Calls the head with ``function(head, hidden, head_forward)`` in place of the head's forward; returns the
        function's result. Hooks of the head gather the parameters before ``function`` runs. ``has_run_hooks``: the
        pre-hooks have run on ``hidden`` already, and do not run again."""
        call_head = self.forward if has_run_hooks else self.module_call
        if torch.compiler.is_compiling():  # FSDP's hooks are outside of graphs
            return call_head(hidden, chunked_head_function=function)
        results: list[Any] = []  # of ``function``, before hooks cast them

        def store_result(head: Any, hidden: Tensor, head_forward: Any) -> Any:
            results.append(function(head, hidden, head_forward))
            return results[0]

        return unrounded(call_head(hidden, chunked_head_function=store_result), results[0])

    def forward(self, *args: Any, chunked_head_function: Any = None, **kwargs: Any) -> Any:
        if not isinstance(self, LazyHead):  # unpatched, and this method is still referenced
            return type(self).forward(self, *args, **kwargs)
        forward = super().forward  # type: ignore[misc]
        has_other_arguments = isinstance(chunked_head_function, HiddenRecorder) and (len(args) != 1 or kwargs)
        if chunked_head_function is None or has_other_arguments:
            return forward(*args, **kwargs)
        if unwrapped(self) is not self:
            return forward(*args, chunked_head_function=chunked_head_function)
        return chunked_head_function(self, args[0], forward)

    @property
    def has_linear_forward(self) -> bool:
        """True if the class before the patch has nn.Linear's forward."""
        forward = self.class_before.forward
        return forward is LINEAR_FORWARD and forward.__module__ == nn.Linear.__module__

    @property
    def reads_weight(self) -> bool:
        """True if the product with weight and bias alone makes the logits. Else losses call the head for each chunk."""
        if unwrapped(self) is not self:
            return unwrapped(self).reads_weight
        # a quantised weight is a tensor of a class of its own
        has_plain_weight = type(self._parameters.get("weight")) in (nn.Parameter, Tensor, type(None))
        if not self.has_linear_forward or has_instance_forward(self):
            return False
        return has_plain_weight or is_dtensor(self.weight)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Gives copies and pickles of a lazy head the class from before the patch. A patched model's forward makes a
        copied head lazy again."""
        pickle_values: Any = super().__reduce_ex__(protocol)
        if pickle_values[0] is type(self):  # as for the wrapper that torch.compile makes
            return self.class_before, *pickle_values[1:]
        attributes = self.__getstate__().items()  # type: ignore[attr-defined]
        return object.__new__, (self.class_before,), {key: value for key, value in attributes if key != PATCH}


def unrounded(rounded_result: Any, exact_result: Any) -> Any:
    """Returns the values of ``exact_result`` with the gradient of ``rounded_result``: two tensors of one shape, or two
    tuples of tensors. ``exact_result``: result of a function that ran inside of a head's call. ``rounded_result``:
    result of the call, which the head's hooks may have cast to 16 bits."""
    if isinstance(exact_result, tuple):
        return tuple(unrounded(*pair) for pair in zip(rounded_result, exact_result, strict=True))
    if rounded_result.dtype.itemsize >= exact_result.dtype.itemsize:
        return rounded_result
    return exact_result.detach() + (rounded_result - rounded_result.detach()).to(exact_result.dtype)


@functools.cache
def lazy_class_of(base: type) -> type:
    """The class of lazy heads whose class before the patch is ``base``."""
    members = {"class_before": base, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (LazyHead, base), members)
