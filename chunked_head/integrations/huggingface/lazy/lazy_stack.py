"""Lazy logits of several heads as one tensor: ``torch.stack`` of them, as models of many codebooks have it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .lazy_logits import QUERIES, STACKING, Lazy, LazyLogits, computed, named, refuse_functions, writes


class Heads(NamedTuple):
    """Lazy logits of each head, stacked along ``dim``; ``later``: reshapes since, after which all are one tensor."""

    parts: tuple[LazyLogits, ...]
    dim: int
    later: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = ()


class LazyStack(Lazy):
    """``torch.stack`` of lazy logits. To index it gives one head's lazy logits again, or fewer rows of all; to reshape
    it keeps it lazy; everything else computes it."""

    _heads: Heads

    @staticmethod
    def of(heads: Heads, shape: tuple[int, ...] | None = None) -> "LazyStack":
        one = heads.parts[0]
        if shape is None:
            shape = (*one.shape[: heads.dim], len(heads.parts), *one.shape[heads.dim :])
        made = LazyStack.shaped(shape, one.dtype, one.device)
        made._heads = heads
        return made

    @property
    def origin(self) -> LazyLogits:
        return self._heads.parts[0]

    def materialise(self) -> Tensor:
        if self._real is None:
            real = torch.stack([part.materialise() for part in self._heads.parts], self._heads.dim)
            for function, args, kwargs in self._heads.later:
                real = function(real, *args, **kwargs)
            self._real = real
        return self._real

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in QUERIES:
            return Tensor.__torch_function__(function, (), args, kwargs)
        first = args[0] if args else None
        if isinstance(first, LazyStack) and first._real is None:
            if writes(function):
                raise RuntimeError(f"{named(function)} on lazy logits of several heads: use logits.materialise()")
            if named(function) in ("detach", "clone") and refuse_functions(first.origin):
                return LazyStack.of(first._heads, tuple(first.shape))
            if function is Tensor.__getitem__ and not first._heads.later:
                found = picked(first, args[1])
                if found is not None:
                    return found
            elif function in RESHAPES:
                return reshaped(first, function, args[1:], kwargs)
        return function(*computed(args, named(function)), **computed(kwargs, named(function)))


RESHAPES = {Tensor.reshape, Tensor.view, Tensor.flatten, Tensor.contiguous, torch.reshape, torch.flatten}


def stacked(parts: Any, dim: int = 0) -> Any:
    """None where it is no stack of the same steps of several heads' lazy logits."""
    lazy = isinstance(parts, (tuple, list)) and all(isinstance(part, LazyLogits) for part in parts)
    if not lazy or any(part._real is not None or part.shape != parts[0].shape for part in parts):
        return None
    rank = parts[0].dim() + 1
    at = dim + rank if dim < 0 else dim
    if at >= rank - 1 or any(part.dtype != parts[0].dtype for part in parts):
        return None
    return LazyStack.of(Heads(tuple(parts), at))


STACKING[torch.stack] = stacked


def picked(stack: LazyStack, index: Any) -> Any:
    """By ints and slices alone; None for any other index."""
    rank, heads = stack.dim(), stack._heads
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or (isinstance(part, (int, slice)) and not isinstance(part, bool)) for part in parts):
        return None
    rest = (slice(None),) * (rank - sum(part is not Ellipsis for part in parts))
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts = (*parts[:at], *rest, *parts[at + 1 :])
    which, others = parts[heads.dim], (*parts[: heads.dim], *parts[heads.dim + 1 :])
    if isinstance(which, int):
        return heads.parts[which][others]
    chosen = tuple(part[others] for part in heads.parts[which])
    if not chosen or not all(isinstance(part, LazyLogits) for part in chosen):
        return None
    gone = sum(isinstance(part, int) for part in others[: heads.dim])
    return LazyStack.of(Heads(chosen, heads.dim - gone))


def reshaped(stack: LazyStack, function: Any, args: Any, kwargs: dict[str, Any]) -> LazyStack:
    shape = function(torch.empty(stack.shape, device="meta"), *args, **kwargs).shape
    if function is Tensor.contiguous:
        return stack
    heads = stack._heads
    return LazyStack.of(heads._replace(later=(*heads.later, (function, args, kwargs))), tuple(shape))
