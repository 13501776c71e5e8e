"""``Source``, the origin of lazy logits: a head and the state in which it was called; ``Forward``, the forwards that
run."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .output import Output, output_of
from .virtual import Virtual, replay

ROWS_AT_ONCE = 1024  # of computed logits, for a result of one number per row
AGREEMENT = "_chunked_head_patch"  # a lazy head's agreement, in its __dict__
HEADS: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # lazy ones
# the innermost forward by thread and id of the head: models may share a head, and threads a model
FORWARDS: dict[tuple[int, int], "Forward"] = {}
Versions = tuple[tuple[str, Tensor, int | None], ...]  # of a head's parameters, by name


@dataclass(eq=False)
class Forward:
    """A patched model's forward that runs in a thread, and whether its logits or a loss were computed. Graphs have
    ``GraphState`` instead."""

    agreement: Any
    outer: "Forward | None" = None  # the forward of another model with the same head, which has called this one
    is_covered: bool = False  # the lazy logits belong to the forward of a model inside of this one
    has_loss: bool = False  # the model made its loss
    logits_in_words: str = ""  # the purpose for which logits were computed, for an error


def enter(forward: Forward, head: Any) -> None:
    """Registers ``forward`` as the innermost forward of this thread that has the head."""
    key = threading.get_ident(), id(head)
    forward.outer = FORWARDS.get(key)
    FORWARDS[key] = forward


def leave(forward: Forward, head: Any) -> None:
    """Removes ``forward``; its outer forward becomes the innermost again."""
    key = threading.get_ident(), id(head)
    del FORWARDS[key]
    if forward.outer is not None:
        FORWARDS[key] = forward.outer
        forward.outer.is_covered = True


def forward_of(agreement: Any) -> Forward | None:
    """The forward of an agreement's model that runs in this thread; None outside of one."""
    for (thread, _), innermost in list(FORWARDS.items()):
        forward: Forward | None = innermost if thread == threading.get_ident() else None
        while forward is not None and forward.agreement is not agreement:
            forward = forward.outer
        if forward is not None:
            return forward
    return None


def running(head: Any) -> Any:
    """The agreement of the forward that calls a head; None outside of one."""
    agreement = head.__dict__.get(AGREEMENT)
    if torch.compiler.is_compiling():  # a graph knows no threads
        return agreement if agreement is not None and agreement.graph.has_lazy_head else None
    forward = FORWARDS.get((threading.get_ident(), id(head)))
    if forward is None:
        return agreement if agreement is not None and agreement.graph.is_tracing else None
    return forward.agreement


def version(tensor: Tensor) -> int | None:
    """The number of writes to a tensor; None where PyTorch does not count."""
    return None if tensor.is_inference() else tensor._version


def versions(head: nn.Module) -> Versions:
    """Parameters of a head with their versions; none under FSDP1, which exchanges parameters as it gathers and
    frees."""
    if hasattr(head, "_is_fsdp_managed_module"):
        return ()
    return tuple((name, parameter, version(parameter)) for name, parameter in head.named_parameters())


def changed(head: nn.Module, versions: Versions) -> str | None:
    """In words, the first parameter of a head that was written to or replaced since ``versions``; None without one."""
    current_parameters = dict(head.named_parameters())
    for name, parameter, count in versions:
        current = current_parameters.get(name)
        if current is parameter and version(parameter) != count:
            return f"the head's {name} has been written to"
        if current is not parameter and current is not None and stays(current) and stays(parameter):
            return f"the head's {name} is another tensor"
    return None


def stays(parameter: Any) -> bool:
    """True for a parameter that no framework exchanges."""
    return type(parameter) in (Tensor, nn.Parameter) and not parameter.is_meta


@functools.cache
def watch_optimizers() -> None:
    """Makes every optimizer's step count as a write to the lazy heads' parameters: a fused one counts none."""
    register_optimizer_step_post_hook(count_writes)


def count_writes(optimizer: Any, *_: Any) -> None:
    head_parameters = {id(parameter) for head in HEADS for parameter in head.parameters()}
    stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
    torch.autograd.graph.increment_version(
        [parameter for parameter in stepped if id(parameter) in head_parameters and not parameter.is_inference()]
    )


def unrounded(rounded: Any, exact: Any) -> Any:
    """The values of ``exact`` with the gradient of ``rounded``. ``exact`` are statistics before a head's hooks,
    ``rounded`` after them: hooks cast statistics to the logits' 16-bit dtype."""
    if isinstance(exact, tuple):
        return tuple(unrounded(*pair) for pair in zip(rounded, exact, strict=True))
    if rounded.dtype.itemsize >= exact.dtype.itemsize:
        return rounded
    return exact.detach() + (rounded - rounded.detach()).to(exact.dtype)


@dataclass(frozen=True, eq=False)
class Source:
    """A deferred call of a head, and the state in which it was called."""

    head: Any  # the module, whose call computes
    agreement: Any  # of its model
    grad: bool  # gradients were enabled
    autocast: torch.dtype | None  # autocast's dtype where it was on
    device_type: str
    output: Output
    has_run_hooks: bool  # the head's pre-hooks have run
    parameters: Versions = ()  # the head's

    @classmethod
    def of_call(cls, head: Any, agreement: Any, hidden: Tensor, has_run_hooks: bool) -> "Source":
        kind = "cpu" if hidden.is_meta else hidden.device.type  # autocast knows no device without numbers
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        parameters = () if torch.compiler.is_compiling() else versions(head)
        output = output_of(head, hidden, autocast, has_run_hooks, agreement.outputs)
        return cls(head, agreement, torch.is_grad_enabled(), autocast, kind, output, has_run_hooks, parameters)

    def call(self, hidden: Tensor, **options: Any) -> Any:
        """The head's own call, without the hooks that have run."""
        if self.has_run_hooks:
            return self.head.forward(hidden, **options)
        return (self.head.real if self.fuses else self.head)(hidden, **options)

    @property
    def fuses(self) -> bool:
        """True while the head takes losses: until its model is unpatched or has another head."""
        return hasattr(type(self.head), "real")

    def without_grad(self) -> "Source":
        return replace(self, grad=False)

    @contextlib.contextmanager
    def state(self, grad: bool | None = None, autocast: bool = True) -> Iterator[None]:
        """A context with the state in which the head was called, for what is computed later. ``grad``, if not None,
        replaces the call's own; ``autocast=False`` leaves its autocast out."""
        inference_mode: Any = contextlib.nullcontext()
        if self.grad and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            inference_mode = torch.inference_mode(False)  # tensors of inference mode could have no gradient later
        grad, autocast = self.grad if grad is None else grad, autocast and self.autocast is not None
        with inference_mode, torch.set_grad_enabled(grad), torch.autocast(self.device_type, self.autocast, autocast):
            yield

    def loss_state(self) -> Any:
        """``state`` for a loss: with gradients where they were enabled at the head's call and are enabled now."""
        return self.state(self.grad and torch.is_grad_enabled())

    def in_call(self, hidden: Tensor, function: Callable[..., Any]) -> Any:
        """The result of ``function(head, hidden, forward)``, run in the place of the head's forward: its hooks have
        made its parameters ready there. ``forward`` is the head's own."""
        if torch.compiler.is_compiling():  # FSDP's hooks are outside of graphs
            with self.loss_state():
                return self.call(hidden, chunked_head_loss=function)
        exact: list[Any] = []

        def compute(head: Any, hidden: Tensor, forward: Any) -> Any:
            exact.append(function(head, hidden, forward))
            return exact[0]

        with self.loss_state():
            return unrounded(self.call(hidden, chunked_head_loss=compute), exact[0])

    def real(self, logits: Virtual) -> Tensor:
        """The logits [..., vocab], computed by the head itself with all its hooks."""
        with self.state():
            computed = self.output.checked(self.call(logits.hidden))
        # the model's operations ran under the autocast of their place, which the steps' dtypes show
        with self.state(autocast=False):
            return replay(computed, logits.steps)

    def argmax(self, logits: Virtual, keepdim: bool) -> Tensor:
        """Ids of the largest real logits, some rows at a time."""
        rows = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        with torch.no_grad():
            without_grad = logits.with_fields(source=self.without_grad())
            ids_of_chunks = [
                self.without_grad().real(without_grad.rows(chunk)).argmax(-1) for chunk in rows.split(ROWS_AT_ONCE)
            ]
        ids = torch.cat(ids_of_chunks).reshape(logits.shape[:-1])
        return ids.unsqueeze(-1) if keepdim else ids
