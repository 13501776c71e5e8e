"""Calls on several streams of hidden states: one after the other, with one accumulator for the weight's gradient."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from ..losses.base import Losses
from ..plan.sizes import Request
from ..stores.gradients import GradientBuffer, Gradients, sum_dtype
from .options import Call, Result
from .run import Forward, Grads, Loss, Outcome, forward_of, prepared, wanted_of
from .spec import spec_of
from .sweep import HeadCall, LocalCall
from .tokens import tokens_of


class StreamsBuffer(GradientBuffer):
    """The gradient that the streams of one call add to, until the call's backward returns it."""

    fresh = True  # until a stream with tokens has added to it

    def __init__(self, weight: Tensor):
        super().__init__(weight, torch.empty(0, dtype=sum_dtype(weight.dtype), device=weight.device))

    def begin(self, call: LocalCall) -> None:
        """Memory for the sums of one pass over all streams, of which ``call`` is one."""
        assert call.plan is not None
        object.__setattr__(self, "buffer", self.buffer.new_empty(self.weight.shape))
        self.buffer[call.plan.sizes.vocab :].zero_()  # rows that stand for no id
        self.fresh = True

    def handed_over(self) -> None:
        """None: the backward of all streams returns the gradient, once."""

    def taken(self) -> Tensor:
        """The sums, which nothing here keeps: a graph may outlive its backward."""
        sums = self.buffer.zero_() if self.fresh else self.buffer
        object.__setattr__(self, "buffer", sums.new_empty(0))
        return sums


@dataclass(frozen=True, eq=False)
class Streams(Generic[Result]):
    """A call on several streams as it was made: a call of each, whose losses have the stream's weight as a factor."""

    calls: tuple[Call[Any], ...]
    losses: tuple[Losses, ...]  # of each stream, without its weight
    result: Callable[[Tensor, list[Outcome]], Result]

    def run(self) -> Result:
        asked, buffer = with_one_buffer(self.calls)
        specs = [spec_of(call) for call in asked]  # before any work on tensors
        given = [tokens_of(call, spec) for call, spec in zip(asked, specs, strict=True)]
        found = [prepared(tokens) for tokens in given]
        calls: list[Any] = [call for _, call, _ in found]  # ``HeadCall`` each
        if any(call.plan.schedule == "recompute" for call in calls):
            # what one stream's gradients wait for, all of them do: sums of both kinds would not be scaled alike
            calls = [call if call.plan.schedule == "loss only" else call.recomputing() for call in calls]
        made: list[StreamsForward] = []
        one, forward = given[0].call, functools.partial(forward_of_streams, calls, buffer)
        (total,) = Loss.apply(forward, made, one.weight, one.bias, *(operands[0] for *_, operands in found))
        outcomes = []
        for (tokens, _, _), call, losses, ran in zip(found, calls, self.losses, made[0].each, strict=True):
            rank_sums = call.objective.inputs.rank_sums
            ranks = rank_sums.parallel.ranks if rank_sums is not None and rank_sums.parallel.average else 1
            with torch.no_grad():
                parts = zip(call.objective.parts, losses.terms, strict=True)
                first, *others = [part * (coefficient * ranks) for part, (coefficient, _) in parts]
                value = sum(others, first)
            outcomes.append(Outcome((value,), call.plan, tokens, call.objective, ran.stats))
        return self.result(total, outcomes)


def with_one_buffer(calls: Sequence[Call[Any]]) -> tuple[Sequence[Call[Any]], StreamsBuffer | None]:
    """The calls with one buffer for the weight's gradient, unless the caller has one or no such gradient is made."""
    first, weight = calls[0], calls[0].weight
    assert weight is not None
    request = Request(first.memory_budget)
    if first.accumulate_into is not None or not wanted_of(first)[1] or weight.dim() != 2:
        return calls, None
    buffer = StreamsBuffer(weight)
    budget = first.memory_budget
    if request.explicit and buffer.buffer.dtype != weight.dtype:
        budget = request.budget - weight.numel() * buffer.buffer.element_size()
        if budget <= 0:
            raise ValueError(
                f"raise memory_budget={first.memory_budget!r}: it has no room for a gradient of weight in fp32"
            )
    return [replace(call, accumulate_into=buffer, memory_budget=budget) for call in calls], buffer


class StreamsForward(NamedTuple):
    """The forward passes of all streams, in the place of one ``Forward``."""

    each: list[Forward]
    buffer: StreamsBuffer | None  # of the weight's gradient; None: the caller has one, or no such gradient is made
    grads: list[Gradients | None] | None  # of each stream, that wait for backward; None where backward makes them
    outputs: tuple[Tensor, ...]
    saved: Sequence[Tensor]
    saved_ends: Sequence[int]  # where those of each stream end among weight, bias, hidden states and ``saved``
    any_grad: bool
    reads_saved: bool
    call: LocalCall  # of the first
    stats: None = None

    def gradients(self, grads: list[Gradients | None] | None, saved: Sequence[Tensor], upstream: Grads) -> Grads:
        """Gradients of the weight, the bias and each stream's hidden states."""
        buffer, late = self.buffer, grads is None
        if late and buffer is not None:
            buffer.begin(self.each[0].call)
        found: list[Grads] = []
        for i, one in enumerate(self.each):
            if not one.any_grad:
                found.append((None, None, None))
            elif grads is not None:
                found.append(one.gradients(grads[i], (), upstream))
            else:
                operands = [saved[2 + i], *saved[:2], *saved[slice(*self.saved_ends[i : i + 2])]]
                found.append(one.gradients(None, operands, upstream))
                if buffer is not None:
                    buffer.fresh &= not len(one.call.objective.target)
        of_hidden, of_weight, of_bias = zip(*found, strict=True)
        biases, d_bias = [one for one in of_bias if one is not None], None
        if biases:  # rounded once more
            dtype = biases[0].dtype
            d_bias = torch.stack(biases).sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        if buffer is None:
            d_weight = next((one for one in of_weight if one is not None), None)
        else:
            d_weight = finished(buffer, self.each, upstream, late)
        return d_weight, d_bias, *of_hidden


def forward_of_streams(
    calls: Sequence[HeadCall], buffer: StreamsBuffer | None, weight: Tensor, bias: Tensor | None, *hidden: Tensor
) -> StreamsForward:
    """The forward pass of one stream after the other."""
    late = any(call.plan.schedule == "recompute" for call in calls)
    if buffer is not None and not late:
        buffer.begin(calls[0])
    made = []
    for call, rows in zip(calls, hidden, strict=True):
        one = forward_of(call, rows, weight, bias)
        made.append(one)
        if buffer is not None and one.grads is not None:
            buffer.fresh &= not len(call.objective.target)
            one.grads.without_weight()  # finished once, for all streams
    first, *others = (one.outputs[0] for one in made)
    saved = [tensor for one in made for tensor in one.saved]
    ends = [*itertools.accumulate((len(one.saved) for one in made), initial=2 + len(made))]
    any_grad = any(one.any_grad for one in made)
    reads = late or any(one.reads_saved for one in made)
    grads = None if late else [one.grads for one in made]
    each = [one._replace(outputs=(), grads=None, saved=()) for one in made]
    return StreamsForward(each, buffer, grads, (sum(others, first),), saved, ends, any_grad, reads, each[0].call)


def finished(buffer: StreamsBuffer, made: Sequence[Forward], upstream: Grads, late: bool) -> Tensor:
    """The weight's gradient in the weight's dtype; nan where an id of any stream was out of range."""
    expected, one_or_nan = made[0].call.objective.expected, [one.call.objective.one_or_nan for one in made]
    factors: tuple[Tensor, ...] = (torch.stack(one_or_nan).prod(),)
    if not late:
        assert expected is not None and upstream[0] is not None
        factors = *expected.factors(upstream[0])[:1], *factors
    dtype, backend, sums = buffer.weight.dtype, made[0].call.backend, buffer.taken()
    if sums.dtype == dtype:
        backend.scale_([sums], factors)
        return sums
    return backend.scale(sums, factors, dtype)
