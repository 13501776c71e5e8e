"""Logits that are not computed (``Virtual``), and the options of this library's functions that stand for them
(``Tail``).

A ``Virtual`` has the hidden states, and the operations on the logits since the head's call. Every function here stands
for the tensor's method of the same name on logits [..., vocab]. An operation on rows is applied to the hidden states at
once; an operation on each logit becomes a step, with a copy of its operand; for any other the result is
``NotImplemented``.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...losses.base import Losses

NUMBERS = (int, float)  # not a union, which torch.compile of torch 2.9 cannot take
MASKS = (torch.bool, torch.uint8)
DIMENSIONS = ("dim", "dim0", "dim1", "axis0", "axis1", "start_dim", "end_dim")  # parameters of a tensor's methods


@dataclass(frozen=True, eq=False)
class Virtual:
    """Logits [..., vocab] that are not computed: the head's output for ``hidden`` [..., hidden], after ``steps``.

    A step is a name with its argument: ``("cast", dtype)``, ``("mul", s)``, ``("div", s)``, ``("tanh", None)``,
    ``("add", [vocab])``, ``("crop", n)``, ``("log_softmax", dtype)``. ``source`` computes the head's output.
    """

    hidden: Tensor
    steps: tuple[tuple[str, Any], ...]
    vocab: int
    dtype: torch.dtype
    source: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.hidden.shape[:-1], self.vocab)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.source.output.device
        return device

    def with_step(self, name: str, argument: Any = None) -> "Virtual":
        return self.with_fields(steps=(*self.steps, (name, argument)))

    def rows(self, hidden: Tensor) -> "Virtual":
        return self.with_fields(hidden=hidden)

    def with_fields(self, **changed: Any) -> "Virtual":
        """A copy with other fields, in terms that torch.compile of torch 2.9 follows."""
        fields = {
            "hidden": self.hidden, "steps": self.steps, "vocab": self.vocab, "dtype": self.dtype,
            "source": self.source,
        }  # fmt: skip
        return Virtual(**(fields | changed))


def replay(logits: Tensor, steps: Sequence[tuple[str, Any]]) -> Tensor:
    """Applies ``steps`` to the head's output; returns the logits [..., vocab]."""
    for name, argument in steps:
        logits = STEPS[name](logits, argument)
    return logits


STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "cast": lambda logits, dtype: logits.to(dtype), "mul": operator.mul, "div": operator.truediv, "add": operator.add,
    "tanh": lambda logits, _: logits.tanh(), "crop": lambda logits, count: logits[..., :count],
    "log_softmax": lambda logits, dtype: logits.log_softmax(-1, dtype=dtype),
}  # fmt: skip


def cast(v: Virtual, dtype: torch.dtype) -> Any:
    if dtype == v.dtype:
        return v
    if not dtype.is_floating_point:
        return NotImplemented
    return v.with_step("cast", dtype).with_fields(dtype=dtype)


def to(v: Virtual, *args: Any, **kwargs: Any) -> Any:
    """Casts only: logits of another device are computed first."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if kwargs.get("copy") or [flag for flag in args if isinstance(flag, bool)][1:] == [True]:
        v = v.with_fields()  # a copy: writes to it do not reach the original
    for argument in args:
        if isinstance(argument, torch.dtype):
            dtype = argument
        elif isinstance(argument, Tensor):
            dtype, device = argument.dtype, argument.device
        elif isinstance(argument, (str, int, torch.device)) and not isinstance(argument, bool):
            device = argument
    if device is not None and torch.empty(0, device=device).device != v.device:
        return NotImplemented
    return v if dtype is None else cast(v, dtype)


def factor(name: str) -> Callable[[Virtual, Any], Any]:
    def scaled(v: Virtual, other: Any, **kwargs: Any) -> Any:
        if kwargs:
            return NotImplemented
        if isinstance(other, Tensor) and other.dim() == 0 and other.device.type == "cpu" and not other.requires_grad:
            other = other.item()
        if not isinstance(other, NUMBERS) or isinstance(other, bool):
            return NotImplemented
        return v.with_step(name, float(other))

    return scaled


def add(v: Virtual, other: Any, **kwargs: Any) -> Any:
    """Adds a vector over the vocabulary, of any number of leading dimensions of 1."""
    fits = isinstance(other, Tensor) and other.dim() > 0 and not kwargs
    if not fits or other.shape[-1] != v.vocab or other.numel() != v.vocab or other.dim() > len(v.shape):
        return NotImplemented
    if other.dtype != v.dtype:
        return NotImplemented  # the sum would be of another dtype
    return v.with_step("add", other.reshape(-1).clone())


def getitem(v: Virtual, index: Any) -> Any:
    split = split_index(v, index)
    if split is None:
        return NotImplemented
    row_index, column_index = split
    cropped = crop(v, column_index)
    return NotImplemented if cropped is NotImplemented else cropped.rows(v.hidden[(*row_index, slice(None))])


def picks(index: Any) -> bool:
    """True where an index gathers into new memory rather than views."""
    indices = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, Tensor) and (item.dim() > 0 or item.dtype in MASKS) for item in indices)


def split_index(v: Virtual, index: Any) -> tuple[tuple[Any, ...], Any] | None:
    """The parts of an index for the rows and for the vocabulary; None where these cannot be separated."""
    indices = index if isinstance(index, tuple) else (index,)
    indexed = 0
    for item in indices:
        if item is Ellipsis or item is None:
            continue
        if isinstance(item, list):
            if not all(isinstance(element, int) and not isinstance(element, bool) for element in item):
                return None
        elif not isinstance(item, (int, slice, Tensor)) or isinstance(item, bool):
            return None
        indexed += item.dim() if isinstance(item, Tensor) and item.dtype in MASKS else 1
    missing = (slice(None),) * (len(v.shape) - indexed)
    ellipsis = next((i for i, item in enumerate(indices) if item is Ellipsis), None)
    indices = (*indices, *missing) if ellipsis is None else (*indices[:ellipsis], *missing, *indices[ellipsis + 1 :])
    column_index = indices[-1]
    if column_index is None or (
        isinstance(column_index, Tensor) and column_index.dtype in MASKS and column_index.dim() > 1
    ):
        return None
    return indices[:-1], column_index


def crop(v: Virtual, column_index: Any) -> Any:
    if not isinstance(column_index, slice):
        return NotImplemented
    bounds = column_index.start, column_index.stop, column_index.step
    # not slice.indices, which torch 2.9 cannot trace
    start, stop, step = [None if bound is None else operator.index(bound) for bound in bounds]
    start = start or 0
    if step not in (None, 1) or not (start == 0 or start <= -v.vocab):
        return NotImplemented
    stop = v.vocab if stop is None else min(stop, v.vocab) if stop >= 0 else v.vocab + stop
    if stop <= 0:
        return NotImplemented
    return v if stop == v.vocab else v.with_step("crop", stop).with_fields(vocab=stop)


def numbers(args: tuple[Any, ...]) -> tuple[int, ...]:
    """A shape or dimensions, given one by one or as one sequence."""
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args


def reshape(v: Virtual, *shape: Any) -> Any:
    sizes = numbers(shape)
    if not sizes or not all(isinstance(size, (int, torch.SymInt)) and not isinstance(size, bool) for size in sizes):
        return NotImplemented
    if sizes[-1] == -1:
        rows = 1
        for size in sizes[:-1]:
            rows = rows * size
        total = 1
        for size in v.shape[:-1]:
            total = total * size
        if rows != total:
            return NotImplemented
    elif sizes[-1] != v.vocab:
        return NotImplemented
    return v.rows(v.hidden.reshape(*sizes[:-1], v.hidden.shape[-1]))


def expand(v: Virtual, *sizes: Any) -> Any:
    shape = numbers(sizes)
    if not shape or shape[-1] not in (-1, v.vocab):
        return NotImplemented
    return v.rows(v.hidden.expand(*shape[:-1], -1))


def positive(v: Virtual, dim: int) -> int:
    return dim + len(v.shape) if dim < 0 else dim


def unsqueeze(v: Virtual, dim: int) -> Any:
    position = dim + len(v.shape) + 1 if dim < 0 else dim
    return NotImplemented if position >= len(v.shape) else v.rows(v.hidden.unsqueeze(position))


def permute(v: Virtual, *dims: Any) -> Any:
    order = [positive(v, dim) for dim in numbers(dims)]
    if not order or order[-1] != len(v.shape) - 1:
        return NotImplemented
    return v.rows(v.hidden.permute(order))


def by_rows(name: str, *names: str, **defaults: int) -> Callable[..., Any]:
    """A function that applies the tensor's method ``name`` to the hidden states; NotImplemented along the vocabulary.
    ``names``: the method's parameters; ``defaults``: their default values."""

    def method(v: Virtual, *args: Any, **kwargs: Any) -> Any:
        arguments = defaults | dict(zip(names, args, strict=False)) | kwargs
        for key in names:
            if key in DIMENSIONS:
                along = arguments.get(key)
                if not isinstance(along, int) or positive(v, along) >= len(v.shape) - 1:
                    return NotImplemented
                arguments[key] = positive(v, along)
        result = getattr(v.hidden, name)(**arguments)
        return v.rows(result) if isinstance(result, Tensor) else tuple(v.rows(piece) for piece in result)

    return method


def same(v: Virtual, *args: Any, **kwargs: Any) -> Virtual:
    """The same logits: a tensor that is not computed has one layout."""
    return v


def detach(v: Virtual) -> Virtual:
    return v.with_fields(hidden=v.hidden.detach(), source=v.source.without_grad())


def step(name: str, argument: Any = None) -> Callable[..., Any]:
    return lambda v: v.with_step(name, argument)


def casting(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda v, **kwargs: cast(v, dtype)


# methods that leave logits uncomputed, by name: those that return new memory, and those that return views
COPIES: dict[str, Callable[..., Any]] = {
    "float": casting(torch.float32), "half": casting(torch.float16), "bfloat16": casting(torch.bfloat16),
    "double": casting(torch.float64), "to": to, "mul": factor("mul"), "multiply": factor("mul"), "div": factor("div"),
    "true_divide": factor("div"), "divide": factor("div"), "tanh": step("tanh"), "add": add, "clone": same,
    "index_select": by_rows("index_select", "dim", "index"), "neg": step("mul", -1.0), "negative": step("mul", -1.0),
}  # fmt: skip
VIEWS: dict[str, Callable[..., Any]] = {
    "__getitem__": getitem, "view": reshape, "reshape": reshape, "expand": expand, "unsqueeze": unsqueeze,
    "permute": permute, "contiguous": same, "detach": detach, "squeeze": by_rows("squeeze", "dim"),
    "narrow": by_rows("narrow", "dim", "start", "length"),
    "flatten": by_rows("flatten", "start_dim", "end_dim", start_dim=0, end_dim=-1),
    "transpose": by_rows("transpose", "dim0", "dim1"), "swapaxes": by_rows("swapaxes", "axis0", "axis1"),
    "split": by_rows("split", "split_size", "dim", dim=0), "chunk": by_rows("chunk", "chunks", "dim", dim=0),
    "unbind": by_rows("unbind", "dim", dim=0), "__iter__": by_rows("unbind", "dim", dim=0),
    "select": by_rows("select", "dim", "index"),
}  # fmt: skip
OPERATORS = {"__mul__": "mul", "__rmul__": "mul", "__truediv__": "div", "__add__": "add", "__radd__": "add"}


@dataclass(frozen=True)
class Tail:
    """The operations between head and loss: ``x = softcap * tanh(logit_scale * (hidden @ weight[:vocab].T + bias) /
    softcap)``; None for those that the model lacks.

    ``biases``: vectors over the vocabulary, each with the factor that the logits had when it was added; the bias of the
    head is the vector divided by the factor.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    vocab: int | None = None
    biases: tuple[tuple[Tensor, float], ...] = ()

    def bias(self, module_bias: Tensor | None, weight: Tensor) -> Tensor | None:
        """The bias of the cropped head [vocab], differentiable. ``module_bias``: the module's own, before the crop."""
        count = weight.shape[0] if self.vocab is None else self.vocab
        total = None if module_bias is None else module_bias[:count]
        for vector, scale in self.biases:
            addend = vector[:count] if scale == 1 else vector[:count] / scale
            total = addend if total is None else total + addend
        return total

    def __str__(self) -> str:
        words = [f"scale {self.logit_scale:g}", f"softcap {self.softcap:g}" if self.softcap else "no softcap"]
        words += [f"{len(self.biases)} added vector(s)"] if self.biases else []
        words += [f"vocabulary cropped to {self.vocab}"] if self.vocab is not None else []
        return ", ".join(words)


class Rehearsed(NamedTuple):
    """A loss of hidden states without numbers, noted instead of computed."""

    tail: Tail
    hidden: Tensor
    weight: Tensor | None  # None where the head's own forward would run, some rows at a time
    bias: Tensor | None
    autocast: torch.dtype | None
    logits: torch.dtype  # of the logits that the loss reads
    loss: Losses | None = None  # None of log-probabilities
    reduction: str = "none"
    made_at: str = ""  # place in the model's code, as file:line


def tail_of(logits: Virtual) -> Tail | None:
    """The tail with the same result as the steps of ``logits``; None if there is none."""
    inner, outer, capped = 1.0, 1.0, False  # factors before and after the tanh
    vocab, biases = None, []
    for name, argument in logits.steps:
        if name in ("mul", "div"):
            if argument == 0:
                return None
            factor = argument if name == "mul" else 1.0 / argument
            inner, outer = (inner, outer * factor) if capped else (inner * factor, outer)
        elif name == "tanh":
            if capped:
                return None
            capped = True
        elif name == "crop":
            vocab = argument
        elif name == "log_softmax" or (name == "add" and capped):
            return None
        elif name == "add":
            if argument.dtype != logits.hidden.dtype and logits.source.autocast is None:
                return None  # a head's bias is of its weight's dtype
            biases.append((argument, inner))
    if not capped:
        return Tail(inner, None, vocab, tuple(biases))
    if outer <= 0:
        return None
    return Tail(inner * outer, outer, vocab, tuple(biases))
