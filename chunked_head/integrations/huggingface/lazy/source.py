"""Where lazy logits came from: the head's module, and the state of autograd and autocast that it was called in."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....core.checks import is_dtensor
from .unchanged import Remembered, remembered
from .virtual import Virtual, replay

ROWS_AT_ONCE = 1024  # of real logits where only a row's own result is kept


def is_shard(weight: Any) -> bool:
    return is_dtensor(weight)


@dataclass(frozen=True, eq=False)
class Source:
    """``head``: the module, whose ``real`` call computes. ``patch``: what was agreed on for its model."""

    head: Any
    patch: Any
    grad: bool
    autocast: torch.dtype | None  # autocast's dtype where it was on
    device_type: str
    parameters: Remembered = ()  # the head's

    @classmethod
    def here(cls, head: Any, patch: Any, hidden: Tensor) -> "Source":
        kind = "cpu" if hidden.is_meta else hidden.device.type  # autocast knows no device without numbers
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        parameters = () if torch.compiler.is_compiling() else remembered(head)
        return cls(head, patch, torch.is_grad_enabled(), autocast, kind, parameters)

    @property
    def fuses(self) -> bool:
        """Whether the head still takes losses: no more once its model is unpatched, or has another."""
        return hasattr(type(self.head), "real")

    def without_grad(self) -> "Source":
        return replace(self, grad=False)

    @contextlib.contextmanager
    def state(self) -> Iterator[None]:
        """As the head was called: logits read later are those that it would have given then."""
        cast = torch.autocast(self.device_type, dtype=self.autocast, enabled=self.autocast is not None)
        with self.grad_mode(), cast:
            yield

    @contextlib.contextmanager
    def grad_mode(self) -> Iterator[None]:
        without: Any = contextlib.nullcontext()
        if self.grad and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            without = torch.inference_mode(False)  # else what is computed could have no gradient later
        with without, torch.set_grad_enabled(self.grad):
            yield

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The same for a loss, which is differentiable where the head's call is and its own."""
        grad = self.grad and torch.is_grad_enabled()
        with self.state(), torch.set_grad_enabled(grad):
            yield

    def inside(self, hidden: Tensor, function: Callable[..., Any]) -> Any:
        """``function(head, hidden, forward)`` inside of the head's call, where its hooks have made its parameters
        ready."""
        with self.taken():
            return self.head.real(hidden, chunked_head_loss=function)

    def real(self, logits: Virtual) -> Tensor:
        """The logits [..., vocab], computed by the head itself with all its hooks."""
        with self.state():
            computed = (self.head.real if self.fuses else self.head)(logits.hidden)
        # what was done to them followed the autocast of its own place: the steps say what came of it
        with self.grad_mode(), torch.autocast(self.device_type, enabled=False):
            return replay(computed, logits.steps)

    def argmax(self, logits: Virtual, keepdim: bool) -> Tensor:
        """Of the real logits, some rows at a time."""
        rows = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        with torch.no_grad():
            quiet = logits.but(source=self.without_grad())
            found = [self.without_grad().real(quiet.rows(part)).argmax(-1) for part in rows.split(ROWS_AT_ONCE)]
        ids = torch.cat(found).reshape(logits.shape[:-1])
        return ids.unsqueeze(-1) if keepdim else ids
