"""Calls on several streams of hidden states, one after the other, with one accumulator of the weight's gradient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from torch import Tensor

from ..core.stats import RowStats
from ..losses.base import Losses
from ..plan.sizes import Request
from ..stores.gradients import GradientBuffer, Gradients, sum_dtype
from .options import Call, Result
from .run import Grads, Loss, Outcome, Pass, prepared, wanted_of
from .spec import spec_of
from .sweep import LocalCall
from .tokens import tokens_of


class StreamsBuffer(GradientBuffer):
    """The gradient that the streams of one call add to, until the call's backward returns it."""

    fresh = True  # until a stream with tokens has added to it

    def __init__(self, weight: Tensor):
        super().__init__(weight, torch.empty(0, dtype=sum_dtype(weight.dtype), device=weight.device))

    def begin(self, call: LocalCall) -> None:
        """Memory for the sums of one pass over all streams, of which ``call`` is one."""
        assert call.plan is not None
        self.buffer = self.buffer.new_empty(self.weight.shape)
        self.buffer[call.plan.sizes.vocab :].zero_()  # rows that stand for no id
        self.fresh = True

    def added(self, call: LocalCall, grads: Gradients | None) -> None:
        """Notes that a stream has added to the sums; its ``grads`` let go of them."""
        self.fresh = self.fresh and not len(call.objective.target)
        if grads is not None:
            grads.without_weight()

    def handed_over(self) -> None:
        """None: the backward of all streams returns the gradient, once."""

    def finished(self, made: Sequence[Pass], upstream: Grads, late: bool) -> Tensor:
        """The sums in the weight's dtype, nan if an id of any stream was out of range; lets go of them, since a graph
        may outlive its backward. ``late``: made in backward, with the upstream gradient in them."""
        expected, one_or_nan = made[0].call.objective.expected, [one.call.objective.one_or_nan for one in made]
        factors: tuple[Tensor, ...] = (torch.stack(one_or_nan).prod(),)
        if not late:
            assert expected is not None and upstream[0] is not None
            factors = *expected.factors(upstream[0])[:1], *factors
        sums = self.buffer.zero_() if self.fresh else self.buffer
        self.buffer = sums.new_empty(0)
        dtype, backend = self.weight.dtype, made[0].call.backend
        if sums.dtype == dtype:
            backend.scale_([sums], factors)
            return sums
        return backend.scale(sums, factors, dtype)


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
            # if one stream waits for backward all do: their sums must take the same factor
            calls = [call if call.plan.schedule == "loss only" else call.recomputing() for call in calls]
        one, stats = given[0].call, list[RowStats]()
        (total,) = Loss.apply(calls, buffer, stats, *[rows for *_, (rows, *_) in found], one.weight, one.bias)
        outcomes = []
        for (tokens, _, _), call, losses, of_call in zip(found, calls, self.losses, stats, strict=True):
            rank_sums = call.objective.inputs.rank_sums
            ranks = rank_sums.parallel.ranks if rank_sums is not None and rank_sums.parallel.average else 1
            with torch.no_grad():
                parts = zip(call.objective.parts, losses.terms, strict=True)
                first, *others = [part * (coefficient * ranks) for part, (coefficient, _) in parts]
                value = sum(others, first)
            outcomes.append(Outcome((value,), call.plan, tokens, call.objective, of_call))
        return self.result(total, outcomes)


def with_one_buffer(calls: Sequence[Call[Any]]) -> tuple[Sequence[Call[Any]], StreamsBuffer | None]:
    """The calls with one buffer for the weight's gradient, unless the caller has one or none is made."""
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
