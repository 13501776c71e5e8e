"""``HeadCall``: one call of a head, kept so that its logits can be computed later. ``RunningForward``: the forward of a
patched model while it runs."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .layout import LogitsLayout, layout_of
from .virtual import VirtualLogits, replay

ARGMAX_ROWS = 1024  # rows of logits that argmax computes at a time
PATCH = "_chunked_head_patch"  # attribute of a patched model and of its lazy head: the ModelPatch
LAZY_HEADS: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # heads that are lazy now
# by (thread, id of a head): the innermost forward that runs; models may share a head, and threads may share a model
INNERMOST_FORWARDS: dict[tuple[int, int], "RunningForward"] = {}
ParameterVersions = tuple[tuple[str, Tensor, int | None], ...]  # a head's parameters: names, tensors and versions


class RunningForward:
    """State of a patched model's forward while the forward runs in a thread. In a graph of ``torch.compile`` attributes
    of ``ModelPatch`` hold the state instead."""

    def __init__(self, patch: Any):
        self.patch = patch  # the ModelPatch of the model
        self.outer: RunningForward | None = None  # a forward of another model with the head, which called this model
        self.is_covered = False  # the head's logits belonged to the forward of a model inside of this forward
        self.has_loss = False  # the model has computed its loss
        self.logits_in_words = ""  # the purpose for which logits were computed, for an error

    def enter(self, head: Any) -> None:
        """Makes this forward the innermost of the forwards in this thread that use ``head``."""
        key = threading.get_ident(), id(head)
        self.outer = INNERMOST_FORWARDS.get(key)
        INNERMOST_FORWARDS[key] = self

    def leave(self, head: Any) -> None:
        """Makes ``outer``, the forward around this forward, the innermost again."""
        key = threading.get_ident(), id(head)
        del INNERMOST_FORWARDS[key]
        if self.outer is not None:
            INNERMOST_FORWARDS[key] = self.outer
            self.outer.is_covered = True


def running_forward(patch: Any) -> RunningForward | None:
    """The innermost forward of the patched model that runs in this thread; None if no forward of the model runs."""
    for (thread, _), innermost_forward in list(INNERMOST_FORWARDS.items()):
        forward: RunningForward | None = innermost_forward if thread == threading.get_ident() else None
        while forward is not None and forward.patch is not patch:
            forward = forward.outer
        if forward is not None:
            return forward
    return None


def patch_in_forward(head: Any) -> Any:
    """The ``ModelPatch`` of the innermost forward that runs and whose head is ``head``; None without such a forward."""
    patch = head.__dict__.get(PATCH)
    if torch.compiler.is_compiling():  # a graph knows no threads
        return patch if patch is not None and patch.is_running else None
    forward = INNERMOST_FORWARDS.get((threading.get_ident(), id(head)))
    if forward is None:
        return patch if patch is not None and patch.is_tracing else None
    return forward.patch


def version(tensor: Tensor) -> int | None:
    """The number of in-place writes to a tensor; None for inference tensors, which have no count."""
    return None if tensor.is_inference() else tensor._version


def versions(head: nn.Module) -> ParameterVersions:
    """Names, tensors and versions of a head's parameters. Empty under FSDP1, which replaces parameters when it gathers
    and frees them."""
    if hasattr(head, "_is_fsdp_managed_module"):
        return ()
    return tuple((name, parameter, version(parameter)) for name, parameter in head.named_parameters())


def change_in_words(head: nn.Module, versions: ParameterVersions) -> str | None:
    """A text that names the first parameter of a head that was written to or replaced after ``versions`` were taken;
    None if there is no such parameter."""
    current_parameters = dict(head.named_parameters())
    for name, parameter, old_version in versions:
        current_parameter = current_parameters.get(name)
        if current_parameter is parameter and version(parameter) != old_version:
            return f"the head's {name} has been written to"
        if (
            current_parameter is not parameter
            and current_parameter is not None
            and is_plain_parameter(current_parameter)
            and is_plain_parameter(parameter)
        ):
            return f"the head's {name} is another tensor"
    return None


def is_plain_parameter(parameter: Any) -> bool:
    """True for a Tensor or nn.Parameter, of no subclass, with numbers. Sharding frameworks replace other parameters."""
    return type(parameter) in (Tensor, nn.Parameter) and not parameter.is_meta


@functools.cache
def watch_optimizers() -> None:
    """Registers ``count_writes`` as a hook of all optimizers' steps. A fused step changes parameters and not
    their versions."""
    register_optimizer_step_post_hook(count_writes)


def count_writes(optimizer: Any, *_: Any) -> None:
    """Increments the versions of lazy heads' parameters in an optimizer. Called after each optimizer step."""
    head_parameters = {id(parameter) for head in LAZY_HEADS for parameter in head.parameters()}
    stepped_parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    torch.autograd.graph.increment_version(
        [
            parameter
            for parameter in stepped_parameters
            if id(parameter) in head_parameters and not parameter.is_inference()
        ]
    )


@dataclass(frozen=True, eq=False)
class HeadCall:
    """A lazy head's call with logits that are computed later, and the state in which the model made the call."""

    head: Any  # the lazy module
    patch: Any  # the ModelPatch of the model
    has_grad: bool  # gradients were enabled
    autocast_dtype: torch.dtype | None  # None: autocast was off
    device_type: str  # of autocast
    layout: LogitsLayout  # of the head's logits
    has_run_hooks: bool  # the head's pre-hooks have run on the hidden states
    parameter_versions: ParameterVersions

    @classmethod
    def in_present_state(cls, head: Any, patch: Any, hidden: Tensor, has_run_hooks: bool) -> "HeadCall":
        """The ``HeadCall`` of ``head`` for ``hidden`` [..., hidden], with the present gradient mode and autocast."""
        device_type = "cpu" if hidden.is_meta else hidden.device.type  # autocast knows no meta device
        autocast_dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        parameter_versions = () if torch.compiler.is_compiling() else versions(head)
        layout = layout_of(head, hidden, autocast_dtype, has_run_hooks, patch.layouts)
        return cls(
            head, patch, torch.is_grad_enabled(), autocast_dtype, device_type, layout, has_run_hooks, parameter_versions
        )

    def compute(self, hidden: Tensor) -> Any:
        """Calls the head; returns its logits [..., vocab]. Pre-hooks that have run do not run again."""
        if self.has_run_hooks:
            return self.head.forward(hidden)
        return (self.head.module_call if self.has_lazy_head else self.head)(hidden)

    @property
    def has_lazy_head(self) -> bool:
        """True until the model is unpatched or gets another head."""
        return hasattr(type(self.head), "module_call")

    def without_grad(self) -> "HeadCall":
        return replace(self, has_grad=False)

    @contextlib.contextmanager
    def state(self, has_grad: bool | None = None, has_autocast: bool = True) -> Iterator[None]:
        """A context with the inference mode, gradient mode and autocast of the head's call. ``has_grad``, if not None,
        replaces the call's gradient mode. ``has_autocast=False`` switches autocast off."""
        inference_mode: Any = contextlib.nullcontext()
        if self.has_grad and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            inference_mode = torch.inference_mode(False)  # tensors of inference mode could have no gradient later
        is_autocast = has_autocast and self.autocast_dtype is not None
        autocast = torch.autocast(self.device_type, self.autocast_dtype, is_autocast)
        with inference_mode, torch.set_grad_enabled(self.has_grad if has_grad is None else has_grad), autocast:
            yield

    def loss_state(self) -> Any:
        """A context like ``state``, with gradients only if they are enabled now and were at the head's call."""
        return self.state(self.has_grad and torch.is_grad_enabled())

    def computed_logits(self, logits: VirtualLogits) -> Tensor:
        """Computes ``logits`` [..., vocab]: calls the head with all hooks, then applies the model's operations."""
        with self.state():
            head_output = self.layout.checked(self.compute(logits.hidden))
        # the steps have the dtypes of the autocast under which the model called them
        with self.state(has_autocast=False):
            return replay(head_output, logits.steps)

    def argmax(self, logits: VirtualLogits, keepdim: bool) -> Tensor:
        """Ids of the largest logits, int64 [...], or [..., 1] with ``keepdim``. ``ARGMAX_ROWS`` rows of logits
        exist at a time."""
        hidden_rows = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        head_call = self.without_grad()
        with torch.no_grad():
            logits_without_grad = logits.with_fields(head_call=head_call)
            ids_of_chunks = [
                head_call.computed_logits(logits_without_grad.with_hidden(hidden_chunk)).argmax(-1)
                for hidden_chunk in hidden_rows.split(ARGMAX_ROWS)
            ]
        ids = torch.cat(ids_of_chunks).reshape(logits.shape[:-1])
        return ids.unsqueeze(-1) if keepdim else ids
