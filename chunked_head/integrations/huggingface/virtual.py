"""Logits that are not computed: hidden states, the operations on the logits since, and what these come to as options of
this library's functions.

Every operation here is the one of the same name on the ``[..., vocab]`` tensor of logits. Those on rows are done to the
hidden states at once, those on each logit are written down with copies of their operands. ``NotImplemented`` means that
an operation is neither.
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
    """``hidden`` [..., hidden]; ``steps`` done to the head's output, in order; ``vocab`` columns that are left.

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

    def then(self, name: str, argument: Any = None) -> "Virtual":
        return self.but(steps=(*self.steps, (name, argument)))

    def rows(self, hidden: Tensor) -> "Virtual":
        return self.but(hidden=hidden)

    def but(self, **changed: Any) -> "Virtual":
        """A copy with other fields, in terms that torch.compile of torch 2.9 follows."""
        fields = {
            "hidden": self.hidden, "steps": self.steps, "vocab": self.vocab, "dtype": self.dtype,
            "source": self.source,
        }  # fmt: skip
        return Virtual(**(fields | changed))


def replay(logits: Tensor, steps: Sequence[tuple[str, Any]]) -> Tensor:
    """The logits [..., vocab] that the steps make of the head's output."""
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
    return v.then("cast", dtype).but(dtype=dtype)


def to(v: Virtual, *args: Any, **kwargs: Any) -> Any:
    """Casts only: logits of another device are computed first."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if kwargs.get("copy") or [flag for flag in args if isinstance(flag, bool)][1:] == [True]:
        v = v.but()  # another: what is written to it reaches nothing
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
        return v.then(name, float(other))

    return scaled


def add(v: Virtual, other: Any, **kwargs: Any) -> Any:
    """Adds a vector over the vocabulary, of any number of leading dimensions of 1."""
    right = isinstance(other, Tensor) and other.dim() > 0 and not kwargs
    if not right or other.shape[-1] != v.vocab or other.numel() != v.vocab or other.dim() > len(v.shape):
        return NotImplemented
    if other.dtype != v.dtype:
        return NotImplemented  # the sum would be of another dtype
    return v.then("add", other.reshape(-1).clone())


def getitem(v: Virtual, index: Any) -> Any:
    given = split_index(v, index)
    if given is None:
        return NotImplemented
    rows, last = given
    cropped = crop(v, last)
    return NotImplemented if cropped is NotImplemented else cropped.rows(v.hidden[(*rows, slice(None))])


def picks(index: Any) -> bool:
    """True where an index gathers into new memory rather than views."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and (part.dim() > 0 or part.dtype in MASKS) for part in parts)


def split_index(v: Virtual, index: Any) -> tuple[tuple[Any, ...], Any] | None:
    """The parts of an index for the rows and for the vocabulary; None where these cannot be separated."""
    parts = index if isinstance(index, tuple) else (index,)
    taken = 0
    for part in parts:
        if part is Ellipsis or part is None:
            continue
        if isinstance(part, list):
            if not all(isinstance(one, int) and not isinstance(one, bool) for one in part):
                return None
        elif not isinstance(part, (int, slice, Tensor)) or isinstance(part, bool):
            return None
        taken += part.dim() if isinstance(part, Tensor) and part.dtype in MASKS else 1
    rest = (slice(None),) * (len(v.shape) - taken)
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), None)
    parts = (*parts, *rest) if at is None else (*parts[:at], *rest, *parts[at + 1 :])
    last = parts[-1]
    if last is None or (isinstance(last, Tensor) and last.dtype in MASKS and last.dim() > 1):
        return None
    return parts[:-1], last


def crop(v: Virtual, last: Any) -> Any:
    if not isinstance(last, slice):
        return NotImplemented
    start, stop, step = last.indices(v.vocab)
    if start != 0 or step != 1 or stop <= 0:
        return NotImplemented
    return v if stop == v.vocab else v.then("crop", stop).but(vocab=stop)


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
    at = dim + len(v.shape) + 1 if dim < 0 else dim
    return NotImplemented if at >= len(v.shape) else v.rows(v.hidden.unsqueeze(at))


def permute(v: Virtual, *dims: Any) -> Any:
    order = [positive(v, dim) for dim in numbers(dims)]
    if not order or order[-1] != len(v.shape) - 1:
        return NotImplemented
    return v.rows(v.hidden.permute(order))


def by_rows(name: str, *names: str, **defaults: int) -> Callable[..., Any]:
    """The tensor's own method of parameters of these names, along any dimensions but the vocabulary's."""

    def done(v: Virtual, *args: Any, **kwargs: Any) -> Any:
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        for key in names:
            if key in DIMENSIONS:
                along = given.get(key)
                if not isinstance(along, int) or positive(v, along) >= len(v.shape) - 1:
                    return NotImplemented
                given[key] = positive(v, along)
        found = getattr(v.hidden, name)(**given)
        return v.rows(found) if isinstance(found, Tensor) else tuple(v.rows(part) for part in found)

    return done


def same(v: Virtual, *args: Any, **kwargs: Any) -> Virtual:
    """These logits: a tensor that is not computed has one layout."""
    return v


def detach(v: Virtual) -> Virtual:
    return v.but(hidden=v.hidden.detach(), source=v.source.without_grad())


def step(name: str, argument: Any = None) -> Callable[..., Any]:
    return lambda v: v.then(name, argument)


def casting(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda v, **kwargs: cast(v, dtype)


# by the name of the tensor's method: everything that leaves logits uncomputed. Views stay with what they are views of.
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
    """``x = softcap * tanh(logit_scale * (hidden @ weight[:vocab].T + bias) / softcap)``, each part where asked.

    ``biases``: vectors over the vocabulary and the factor that each had when it was added: to be divided by it.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    vocab: int | None = None
    biases: tuple[tuple[Tensor, float], ...] = ()

    def bias(self, given: Tensor | None, weight: Tensor) -> Tensor | None:
        """The bias of the cropped head [vocab], differentiable; ``given``: the module's."""
        count = weight.shape[0] if self.vocab is None else self.vocab
        total = None if given is None else given[:count]
        for vector, scale in self.biases:
            part = vector[:count] if scale == 1 else vector[:count] / scale
            total = part if total is None else total + part
        return total

    def __str__(self) -> str:
        parts = [f"scale {self.logit_scale:g}", f"softcap {self.softcap:g}" if self.softcap else "no softcap"]
        parts += [f"{len(self.biases)} added vector(s)"] if self.biases else []
        parts += [f"vocabulary cropped to {self.vocab}"] if self.vocab is not None else []
        return ", ".join(parts)


class Rehearsed(NamedTuple):
    """A loss of hidden states without numbers, noted instead of made. ``weight``: None where the head's own forward
    would run, some rows at a time. ``loss``: None where it is made of log-probabilities. ``logits``: their dtype where
    the loss takes them. ``made_at``: where the model calls it."""

    tail: Tail
    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None
    autocast: torch.dtype | None
    logits: torch.dtype
    loss: Losses | None = None
    reduction: str = "none"
    made_at: str = ""


def tail_of(logits: Virtual) -> Tail | None:
    """The tail that the steps make; None where they make none."""
    before, after, capped = 1.0, 1.0, False  # factors before and after the tanh
    vocab, biases = None, []
    for name, argument in logits.steps:
        if name in ("mul", "div"):
            if argument == 0:
                return None
            by = argument if name == "mul" else 1.0 / argument
            before, after = (before, after * by) if capped else (before * by, after)
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
            biases.append((argument, before))
    if not capped:
        return Tail(before, None, vocab, tuple(biases))
    if after <= 0:
        return None
    return Tail(before * after, after, vocab, tuple(biases))
