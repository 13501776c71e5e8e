"""Calls on several streams of hidden states: they run one after the other and add to one gradient of the weight."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic

import torch
from torch import Tensor

from ..arithmetic.objective import ScalarObjective
from ..losses.base import Losses
from ..plan.sizes import Request
from ..stores.gradients import GradientBuffer, Gradients, sum_dtype
from .options import Call, Result
from .planning import grads_asked_for
from .run import CallFunction, Grads, on_device, prepared
from .spec import spec_of
from .sweep import LocalWork
from .tokens import tokens_of


class StreamsBuffer(GradientBuffer):
    """The gradient that the streams of one call add to, until the call's backward returns it."""

    fresh = True  # no stream with tokens has added to the sums yet: the first product is stored, not added

    def __init__(self, weight: Tensor):
        super().__init__(weight, torch.empty(0, dtype=sum_dtype(weight.dtype), device=weight.device))

    def begin(self, work: LocalWork) -> None:
        """Allocates the sums [vocab, hidden] of one pass over all streams. ``work``: the work of any stream."""
        assert work.plan is not None
        self.buffer = self.buffer.new_empty(self.weight.shape)
        self.buffer[work.plan.sizes.vocab :].zero_()  # rows that stand for no id
        self.fresh = True

    def added(self, work: LocalWork, grads: Gradients | None) -> None:
        """Notes that a stream has added to the sums. Drops the reference to the sums from ``grads``, the gradients of
        the stream."""
        self.fresh = self.fresh and not len(work.objective.targets)
        if grads is not None:
            grads.drop_weight()

    def result(self) -> None:
        """Returns None in place of a stream's gradient of the weight: ``finished`` returns the sum over all streams."""

    def finished(self, works: Sequence[LocalWork], upstream: Grads, has_late_gradients: bool) -> Tensor:
        """Returns the sums in the weight's dtype; nan if an id of any stream was out of range. The buffer keeps no
        reference to the sums, since a graph may outlive its backward. ``has_late_gradients``: backward made the sums,
        already multiplied by the upstream gradient."""
        work = works[0]
        factors: tuple[Tensor, ...] = (torch.stack([work.objective.one_or_nan for work in works]).prod(),)
        if not has_late_gradients:
            assert isinstance(work.objective, ScalarObjective) and upstream[0] is not None
            factors = work.objective.upstream_ratio(upstream[0]), *factors
        sums = self.buffer.zero_() if self.fresh else self.buffer
        self.buffer = sums.new_empty(0)
        if sums.dtype == self.weight.dtype:
            work.backend.scale_([sums], *factors)
            return sums
        return work.backend.scale(sums, self.weight.dtype, *factors)


class Streams(Generic[Result]):
    """A request on several streams: one ``Call`` for each stream, its losses multiplied by the stream's weight."""

    def __init__(
        self,
        calls: Sequence[Call[Any]],
        losses: Sequence[Losses],  # of each stream, without the stream's weight as a factor
        result: Callable[[Tensor, list[Any]], Result],  # from the sum of all losses, and each call's result
    ):
        self.calls, self.losses, self.result = calls, losses, result

    def run(self) -> Result:
        calls, buffer = with_one_buffer(self.calls)
        specs = [spec_of(call) for call in calls]  # checks of all streams come before any work on tensors
        first_call = calls[0]
        with on_device(first_call.device):
            tokens_of_streams = [tokens_of(call, spec) for call, spec in zip(calls, specs, strict=True)]
            prepared_streams = [prepared(tokens) for tokens in tokens_of_streams]
            works: list[Any] = [work for _, work, _ in prepared_streams]  # ``HeadWork`` each
            if any(work.plan.schedule == "recompute" for work in works):
                # if one stream makes gradients in backward, all do: their sums take one factor
                works = [work if work.plan.schedule == "loss only" else work.recomputing() for work in works]
            hidden = [operands[0] for _, _, operands in prepared_streams]
            (total,) = CallFunction.apply(works, buffer, *hidden, first_call.weight, first_call.bias)
        results = []
        for call, work, losses in zip(calls, works, self.losses, strict=True):
            objective, rank_sums = work.objective, work.objective.inputs.rank_sums
            averaged_ranks = rank_sums.parallel.ranks if rank_sums is not None and rank_sums.parallel.average else 1
            with torch.no_grad():
                values_and_terms = zip(objective.loss_values, losses.terms, strict=True)
                first_loss, *other_losses = [
                    loss_value * (coefficient * averaged_ranks) for loss_value, (coefficient, _) in values_and_terms
                ]
                stream_value = sum(other_losses, first_loss)
            results.append(call.result((stream_value,), call, work))
        return self.result(total, results)


def with_one_buffer(calls: Sequence[Call[Any]]) -> tuple[Sequence[Call[Any]], StreamsBuffer | None]:
    """Returns the calls with a common buffer for the weight's gradient, and that buffer; or the unchanged calls and
    None, if the caller passes ``accumulate_into`` or the weight takes no gradient."""
    first_call, weight = calls[0], calls[0].weight
    assert weight is not None
    request = Request(first_call.memory_budget)
    if first_call.accumulate_into is not None or not grads_asked_for(first_call)[1] or weight.dim() != 2:
        return calls, None
    buffer = StreamsBuffer(weight)
    budget = first_call.memory_budget
    if request.explicit and buffer.buffer.dtype != weight.dtype:
        budget = request.budget - weight.numel() * buffer.buffer.element_size()
        if budget <= 0:
            raise ValueError(
                f"raise memory_budget={first_call.memory_budget!r}: it has no room for a gradient of weight in fp32"
            )
    return [replace(call, accumulate_into=buffer, memory_budget=budget) for call in calls], buffer
