"""``VirtualLogits``: logits that are not computed. ``Tail``: operations on logits, as options of this library.

A function with a parameter ``v`` is the tensor method of the same name, for virtual logits ``v`` [..., vocab]. A method
that moves rows moves rows of the hidden states at once. A method that changes each logit adds a step, with a copy of
the method's operand. Methods return ``NotImplemented`` for operands that need computed logits.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...losses.base import Losses

NUMBER_TYPES = (int, float)  # not a union, which torch.compile of torch 2.9 cannot take
MASK_DTYPES = (torch.bool, torch.uint8)  # dtypes of indices that are masks
DIMENSION_NAMES = ("dim", "dim0", "dim1", "axis0", "axis1", "start_dim", "end_dim")  # of parameters


@dataclass(frozen=True, eq=False)
class VirtualLogits:
    """Logits [..., vocab] that are not computed: the head's output for ``hidden`` [..., hidden], after ``steps``.

    A step is a name with its argument: ``("cast", dtype)``, ``("mul", s)``, ``("div", s)``, ``("tanh", None)``,
    ``("add", vector [vocab])``, ``("crop", number of columns)``, ``("log_softmax", dtype)``.
    """

    hidden: Tensor
    steps: tuple[tuple[str, Any], ...]  # operations since the head's call: names with arguments
    vocab: int  # number of columns of the logits
    dtype: torch.dtype  # of the logits
    head_call: Any  # the ``HeadCall`` that computes the head's output

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.hidden.shape[:-1], self.vocab)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.head_call.layout.device
        return device

    def with_step(self, name: str, argument: Any = None) -> "VirtualLogits":
        return self.with_fields(steps=(*self.steps, (name, argument)))

    def with_hidden(self, hidden: Tensor) -> "VirtualLogits":
        return self.with_fields(hidden=hidden)

    def with_fields(self, **new_fields: Any) -> "VirtualLogits":
        """A copy in which ``new_fields`` replace the fields of the same names. torch.compile of torch 2.9 cannot trace
        ``dataclasses.replace``."""
        fields = {
            "hidden": self.hidden, "steps": self.steps, "vocab": self.vocab, "dtype": self.dtype,
            "head_call": self.head_call,
        }  # fmt: skip
        return VirtualLogits(**(fields | new_fields))


def replay(logits: Tensor, steps: Sequence[tuple[str, Any]]) -> Tensor:
    """Applies ``steps`` to the head's output; returns the logits [..., vocab]."""
    for name, argument in steps:
        logits = STEPS[name](logits, argument)
    return logits


# functions of (logits, argument), by the name of the step
STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "cast": lambda logits, dtype: logits.to(dtype), "mul": operator.mul, "div": operator.truediv, "add": operator.add,
    "tanh": lambda logits, _: logits.tanh(), "crop": lambda logits, count: logits[..., :count],
    "log_softmax": lambda logits, dtype: logits.log_softmax(-1, dtype=dtype),
}  # fmt: skip


def cast(v: VirtualLogits, dtype: torch.dtype) -> Any:
    if dtype == v.dtype:
        return v
    if not dtype.is_floating_point:
        return NotImplemented
    return v.with_step("cast", dtype).with_fields(dtype=dtype)


def to(v: VirtualLogits, *args: Any, **kwargs: Any) -> Any:
    """Casts logits to the dtype in the arguments of ``Tensor.to``. NotImplemented for another device."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if kwargs.get("copy") or [boolean for boolean in args if isinstance(boolean, bool)][1:] == [True]:
        v = v.with_fields()  # a copy: writes to the result do not reach the original
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


def factor_method(name: str) -> Callable[[VirtualLogits, Any], Any]:
    """Makes the method that multiplies (``name`` is ``"mul"``) or divides (``"div"``) logits by a number."""

    def scaled_logits(v: VirtualLogits, other: Any, **kwargs: Any) -> Any:
        if kwargs:
            return NotImplemented
        if isinstance(other, Tensor) and other.dim() == 0 and other.device.type == "cpu" and not other.requires_grad:
            other = other.item()
        if not isinstance(other, NUMBER_TYPES) or isinstance(other, bool):
            return NotImplemented
        return v.with_step(name, float(other))

    return scaled_logits


def add(v: VirtualLogits, other: Any, **kwargs: Any) -> Any:
    """Adds ``other``, a vector over the vocabulary: [vocab], or [1, ..., vocab]."""
    if not isinstance(other, Tensor) or other.dim() == 0 or kwargs:
        return NotImplemented
    if other.shape[-1] != v.vocab or other.numel() != v.vocab or other.dim() > len(v.shape):
        return NotImplemented
    if other.dtype != v.dtype:
        return NotImplemented  # the sum would be of another dtype
    return v.with_step("add", other.reshape(-1).clone())


def getitem(v: VirtualLogits, index: Any) -> Any:
    split_indices = split_index(v, index)
    if split_indices is None:
        return NotImplemented
    row_index, column_index = split_indices
    cropped_logits = crop(v, column_index)
    return (
        NotImplemented
        if cropped_logits is NotImplemented
        else cropped_logits.with_hidden(v.hidden[(*row_index, slice(None))])
    )


def gathers(index: Any) -> bool:
    """True if indexing with ``index`` copies, False if it returns a view."""
    indices = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, Tensor) and (item.dim() > 0 or item.dtype in MASK_DTYPES) for item in indices)


def split_index(v: VirtualLogits, index: Any) -> tuple[tuple[Any, ...], Any] | None:
    """Splits an index of logits into a tuple that indexes rows and an index of the vocabulary. None for an
    index that cannot be split."""
    indices = index if isinstance(index, tuple) else (index,)
    num_indexed_dims = 0
    for item in indices:
        if item is Ellipsis or item is None:
            continue
        if isinstance(item, list):
            if not all(isinstance(element, int) and not isinstance(element, bool) for element in item):
                return None
        elif not isinstance(item, (int, slice, Tensor)) or isinstance(item, bool):
            return None
        num_indexed_dims += item.dim() if isinstance(item, Tensor) and item.dtype in MASK_DTYPES else 1
    full_slices = (slice(None),) * (len(v.shape) - num_indexed_dims)
    ellipsis_position = next((i for i, item in enumerate(indices) if item is Ellipsis), None)
    if ellipsis_position is None:
        indices = (*indices, *full_slices)
    else:
        indices = (*indices[:ellipsis_position], *full_slices, *indices[ellipsis_position + 1 :])
    column_index = indices[-1]
    if column_index is None or (
        isinstance(column_index, Tensor) and column_index.dtype in MASK_DTYPES and column_index.dim() > 1
    ):
        return None
    return indices[:-1], column_index


def crop(v: VirtualLogits, column_index: Any) -> Any:
    if not isinstance(column_index, slice):
        return NotImplemented
    slice_bounds = column_index.start, column_index.stop, column_index.step
    # not slice.indices, which torch 2.9 cannot trace
    start, stop, step = [None if bound is None else operator.index(bound) for bound in slice_bounds]
    start = start or 0
    if step not in (None, 1) or not (start == 0 or start <= -v.vocab):
        return NotImplemented
    stop = v.vocab if stop is None else min(stop, v.vocab) if stop >= 0 else v.vocab + stop
    if stop <= 0:
        return NotImplemented
    return v if stop == v.vocab else v.with_step("crop", stop).with_fields(vocab=stop)


def as_sizes(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Integers as a tuple, from a method's arguments: several integers, or one sequence of integers."""
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args


def reshape(v: VirtualLogits, *shape: Any) -> Any:
    sizes = as_sizes(shape)
    if not sizes or not all(isinstance(size, (int, torch.SymInt)) and not isinstance(size, bool) for size in sizes):
        return NotImplemented
    if sizes[-1] == -1:
        num_new_rows = 1
        for size in sizes[:-1]:
            num_new_rows = num_new_rows * size
        num_rows = 1
        for size in v.shape[:-1]:
            num_rows = num_rows * size
        if num_new_rows != num_rows:
            return NotImplemented
    elif sizes[-1] != v.vocab:
        return NotImplemented
    return v.with_hidden(v.hidden.reshape(*sizes[:-1], v.hidden.shape[-1]))


def expand(v: VirtualLogits, *sizes: Any) -> Any:
    shape = as_sizes(sizes)
    if not shape or shape[-1] not in (-1, v.vocab):
        return NotImplemented
    return v.with_hidden(v.hidden.expand(*shape[:-1], -1))


def nonnegative_dim(v: VirtualLogits, dim: int) -> int:
    return dim + len(v.shape) if dim < 0 else dim


def unsqueeze(v: VirtualLogits, dim: int) -> Any:
    position = dim + len(v.shape) + 1 if dim < 0 else dim
    return NotImplemented if position >= len(v.shape) else v.with_hidden(v.hidden.unsqueeze(position))


def permute(v: VirtualLogits, *dims: Any) -> Any:
    dim_order = [nonnegative_dim(v, dim) for dim in as_sizes(dims)]
    if not dim_order or dim_order[-1] != len(v.shape) - 1:
        return NotImplemented
    return v.with_hidden(v.hidden.permute(dim_order))


def row_method(name: str, *parameter_names: str, **defaults: int) -> Callable[..., Any]:
    """Makes a method of virtual logits that calls the method ``name`` of the hidden states; NotImplemented for the
    vocabulary's dimension. ``parameter_names`` and ``defaults``: parameters and default values of ``name``."""

    def method(v: VirtualLogits, *args: Any, **kwargs: Any) -> Any:
        arguments = defaults | dict(zip(parameter_names, args, strict=False)) | kwargs
        for key in parameter_names:
            if key in DIMENSION_NAMES:
                dim = arguments.get(key)
                if not isinstance(dim, int) or nonnegative_dim(v, dim) >= len(v.shape) - 1:
                    return NotImplemented
                arguments[key] = nonnegative_dim(v, dim)
        result = getattr(v.hidden, name)(**arguments)
        return v.with_hidden(result) if isinstance(result, Tensor) else tuple(v.with_hidden(piece) for piece in result)

    return method


def same_logits(v: VirtualLogits, *args: Any, **kwargs: Any) -> VirtualLogits:
    """Returns ``v``, for methods that only copy or change strides. Neither matters before logits are computed."""
    return v


def detach(v: VirtualLogits) -> VirtualLogits:
    return v.with_fields(hidden=v.hidden.detach(), head_call=v.head_call.without_grad())


def step_method(name: str, argument: Any = None) -> Callable[..., Any]:
    return lambda v: v.with_step(name, argument)


def cast_method(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda v, **kwargs: cast(v, dtype)


# methods that leave logits uncomputed, by name: COPIES return new memory, VIEWS return views
COPIES: dict[str, Callable[..., Any]] = {
    "float": cast_method(torch.float32), "half": cast_method(torch.float16), "bfloat16": cast_method(torch.bfloat16),
    "double": cast_method(torch.float64), "to": to, "mul": factor_method("mul"), "multiply": factor_method("mul"),
    "div": factor_method("div"), "true_divide": factor_method("div"), "divide": factor_method("div"),
    "tanh": step_method("tanh"), "add": add, "clone": same_logits, "neg": step_method("mul", -1.0),
    "negative": step_method("mul", -1.0), "index_select": row_method("index_select", "dim", "index"),
}  # fmt: skip
VIEWS: dict[str, Callable[..., Any]] = {
    "__getitem__": getitem, "view": reshape, "reshape": reshape, "expand": expand, "unsqueeze": unsqueeze,
    "permute": permute, "contiguous": same_logits, "detach": detach, "squeeze": row_method("squeeze", "dim"),
    "narrow": row_method("narrow", "dim", "start", "length"),
    "flatten": row_method("flatten", "start_dim", "end_dim", start_dim=0, end_dim=-1),
    "transpose": row_method("transpose", "dim0", "dim1"), "swapaxes": row_method("swapaxes", "axis0", "axis1"),
    "split": row_method("split", "split_size", "dim", dim=0), "chunk": row_method("chunk", "chunks", "dim", dim=0),
    "unbind": row_method("unbind", "dim", dim=0), "__iter__": row_method("unbind", "dim", dim=0),
    "select": row_method("select", "dim", "index"),
}  # fmt: skip
OPERATORS = {"__mul__": "mul", "__rmul__": "mul", "__truediv__": "div", "__add__": "add", "__radd__": "add"}


@dataclass(frozen=True)
class Tail:
    """A model's operations between head and loss. The loss reads ``softcap * tanh(logit_scale * (hidden @
    weight[:vocab].T + bias) / softcap)``. ``softcap`` and ``vocab`` are None without a cap and without a crop.

    ``biases``: vectors that the model adds to the logits, each with the factor by which the model had scaled the logits
    before. The vector divided by this factor is a bias of the head.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    vocab: int | None = None
    biases: tuple[tuple[Tensor, float], ...] = ()  # pairs of a vector [vocab] and a factor

    def bias(self, module_bias: Tensor | None, weight: Tensor) -> Tensor | None:
        """The bias of the cropped head [vocab], differentiable; None without a bias. ``module_bias``: the bias of
        the head's module, before the crop."""
        num_columns = weight.shape[0] if self.vocab is None else self.vocab
        bias_sum = None if module_bias is None else module_bias[:num_columns]
        for vector, factor in self.biases:
            addend = vector[:num_columns] if factor == 1 else vector[:num_columns] / factor
            bias_sum = addend if bias_sum is None else bias_sum + addend
        return bias_sum

    def __str__(self) -> str:
        texts = [f"scale {self.logit_scale:g}", f"softcap {self.softcap:g}" if self.softcap else "no softcap"]
        texts += [f"{len(self.biases)} added vector(s)"] if self.biases else []
        texts += [f"vocabulary cropped to {self.vocab}"] if self.vocab is not None else []
        return ", ".join(texts)


class RehearsedLoss(NamedTuple):
    """A loss of hidden states on the meta device. It is recorded and not computed (``explain.py``)."""

    tail: Tail
    hidden: Tensor
    weight: Tensor | None  # None if the head's own forward would compute each chunk's logits
    bias: Tensor | None
    autocast_dtype: torch.dtype | None  # None: autocast was off
    logits_dtype: torch.dtype  # of the logits that the loss reads
    loss: Losses | None = None  # None for log-probabilities alone
    reduction: str = "none"
    location: str = ""  # place in the model's code, as file:line


def tail_of(logits: VirtualLogits) -> Tail | None:
    """The ``Tail`` that describes the steps of ``logits``; None if no ``Tail`` has the same result."""
    inner_factor, outer_factor, is_capped = 1.0, 1.0, False  # the factors before and after the tanh
    vocab, biases = None, []
    for name, argument in logits.steps:
        if name in ("mul", "div"):
            if argument == 0:
                return None
            factor = argument if name == "mul" else 1.0 / argument
            if is_capped:
                outer_factor *= factor
            else:
                inner_factor *= factor
        elif name == "tanh":
            if is_capped:
                return None
            is_capped = True
        elif name == "crop":
            vocab = argument
        elif name == "log_softmax" or (name == "add" and is_capped):
            return None
        elif name == "add":
            if argument.dtype != logits.hidden.dtype and logits.head_call.autocast_dtype is None:
                return None  # a bias has its weight's dtype
            biases.append((argument, inner_factor))
    if not is_capped:
        return Tail(inner_factor, None, vocab, tuple(biases))
    if outer_factor <= 0:
        return None
    return Tail(inner_factor * outer_factor, outer_factor, vocab, tuple(biases))
