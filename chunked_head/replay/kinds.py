"""What a replay is good for: everything that the Python of a call depends on."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..call.spec import TENSORS
from ..core.checks import exact
from ..core.private import in_backward, refuse_transforms
from ..kernels.common.tiles import BEHIND
from ..losses.base import Losses
from ..metrics import Metric
from ..plan.planner import padded_rows
from ..stores.gradients import GradientBuffer, resolve

Kind = tuple[Hashable, ...]
PLAIN = {type(None), bool, int, float, str, torch.dtype}
DEVICES = {"cuda"}  # where the device would wait for the host
OF_TOKENS = {"target", "mask", "token_weights", "batch"}  # arguments whose tensors may have a number for each token


def with_even_sets(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with ``kept_ids`` padded to one of few numbers of ids, on a GPU: each step of a training run has another
    number, and a replay is for tensors of the same shapes."""
    batch = kwargs.get("batch")
    if isinstance(batch, Mapping) and "kept_offsets" in batch:
        return {**kwargs, "batch": with_even_sets(batch)}
    ids = kwargs.get("kept_ids")
    if kwargs.get("kept_offsets") is None or not isinstance(ids, Tensor) or ids.device.type not in DEVICES:
        return kwargs
    if ids.dim() != 1 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        return kwargs  # the call says what is wrong
    step = 1 << max(10, len(ids).bit_length() - 4)  # at most an eighth more
    more, bias = -len(ids) % step, kwargs.get("candidate_bias")
    if not more or (bias is not None and (not isinstance(bias, Tensor) or bias.shape != ids.shape)):
        return kwargs
    even = {"kept_ids": torch.cat([ids, ids.new_full((more,), BEHIND)])}
    if bias is not None:
        even["candidate_bias"] = torch.cat([bias, bias.new_zeros(more)])
    return {**kwargs, **even}


class Arguments:
    """Those of a call by name: ``tensors``, of which a replay is made, and their ``kind``, with all else that the call
    depends on but its ``leading`` shape, of which it holds ``rows``; None for what has no replay."""

    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any], kwargs: Mapping[str, Any]):
        given = {**args, **kwargs}
        self.tensors: list[Tensor] = []
        self.values: list[Any] = [function, len(args), len(kwargs), *given]
        self.gradient_buffer: GradientBuffer | None = None
        self.of_tokens: list[int] = []  # which of the tensors are hidden states, or have a number for each token
        self.leading: tuple[int, ...] = ()
        self.sizes = 0, 0  # ``CALL_SIZES``
        self.rows: int | None = None  # that it may run with, those behind its tokens' for nothing; None: its tokens'
        hidden, weight = given.get("hidden"), given.get("weight")
        on_a_gpu = isinstance(hidden, Tensor) and isinstance(weight, Tensor) and hidden.device.type in DEVICES
        self.kind = self.kind_of(given) if on_a_gpu else None

    def kind_of(self, given: Mapping[str, Any]) -> Kind | None:
        refuse_transforms()  # their tensors have no address
        if given.get("segment_lengths") is not None:
            return None  # other numbers at every step
        hidden, tensors = given["hidden"], self.tensors
        *before, width = hidden.shape
        self.leading = leading = tuple(before)
        self.sizes = hidden.numel() // max(width, 1), leading[-1] if leading else 1
        for name, value in given.items():
            first = len(tensors)
            if not self.add(value):
                return None
            if name == "hidden":
                self.of_tokens.append(first)
            elif name in OF_TOKENS:
                self.of_tokens += [i for i in range(first, len(tensors)) if tensors[i].shape == leading]
        if not self.add_buffer(given):
            return None
        rows = set(self.of_tokens)
        if all(tensors[i].is_contiguous() for i in rows):
            self.rows = padded_rows(self.sizes[0])
        else:
            rows = set()
        addresses = [tensor.data_ptr() for tensor in tensors]
        forms = [
            (width if i in rows else (tensor.shape, tensor.stride()), tensor.dtype, tensor.device,
             tensor.requires_grad, addresses[i] & 15)
            for i, tensor in enumerate(tensors)
        ]  # fmt: skip
        shared: tuple[int, ...] = ()
        if len(set(addresses)) < len(addresses):  # one tensor given twice, or parts of one that are as long
            spans = [(address, tensor.nbytes) for address, tensor in zip(addresses, tensors, strict=True)]
            shared = tuple(map(spans.index, spans))
        device = hidden.device
        cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        current = torch.cuda.current_device() if device.type == "cuda" else None
        of_sizes = self.rows, len(leading)
        return *self.values, *forms, *of_sizes, shared, torch.is_grad_enabled(), cast, in_backward(), current

    def add(self, value: Any) -> bool:
        """Whether it is known what a call reads of this."""
        kind = type(value)
        if kind in TENSORS:
            self.tensors.append(value)
            self.values.append(Tensor)
            return value.layout is torch.strided and not value.is_neg()
        if kind in PLAIN:
            self.values.append(exact(value))
            return True
        if kind is dict:
            self.values.append(tuple(value))
            return all(map(self.add, value.values()))
        if kind is tuple or kind is list:
            self.values.append(len(value))
            return all(map(self.add, value))
        if isinstance(value, Metric):
            self.values += value.signature, exact(value.settings)
            return value.builtin
        return isinstance(value, Losses) and all(self.add_summand(*term) for term in value.terms)

    def add_summand(self, coefficient: Any, summand: Any) -> bool:
        self.values += summand.signature, exact(summand.settings)
        numbers = coefficient, summand.normalizer, summand.token_weights
        return summand.builtin and all(map(self.add, (*numbers, *summand.tensors.values())))

    def add_buffer(self, given: Mapping[str, Any]) -> bool:
        """The one that the weight's gradient is added to, which may be an attribute of the weight."""
        accumulate_into = given.get("accumulate_into")
        if accumulate_into is None:
            return True
        operands = {name: given.get(name) for name in ("hidden", "target", "bias")}
        # of what else stands in their place the call says that it is wrong
        others = {name: value if isinstance(value, Tensor) else None for name, value in operands.items()}
        self.gradient_buffer = resolve(accumulate_into, given["weight"], others)
        return self.gradient_buffer is None or self.add(self.gradient_buffer.buffer)
