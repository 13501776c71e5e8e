"""Calls on several streams of hidden states: one after the other, with one accumulator for the weight's gradient."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from ..arithmetic.evaluate import evaluate
from ..arithmetic.objective import ScalarObjective
from ..core.checks import name
from ..core.private import in_backward
from ..losses.base import Losses
from ..metrics import Metric, MetricValue
from ..parallel.tokens import metrics_of_all_ranks
from ..plan.planner import make_plan
from ..plan.plans import MAX_HALF_CHUNKS, row_bytes
from ..plan.sizes import Request
from ..stores.gradients import GradientBuffer, Gradients
from .function import Forward, Grads, Loss, forward_of
from .objectives import objective_of
from .options import Call, Result
from .run import Outcome, Wanted, head_call, planned, sizes_of, wanted_of
from .spec import spec_of
from .sweep import HeadCall
from .tokens import Tokens, tokens_of


@dataclass(frozen=True, eq=False)
class Streams(Generic[Result]):
    """A call on several streams as it was made: a call of each, whose losses have the stream's weight as a factor."""

    calls: tuple[Call[Any], ...]
    losses: tuple[Losses, ...]  # of each stream, without its weight
    result: Callable[[Tensor, list[Outcome]], Result]

    def run(self) -> Result:
        specs = [spec_of(call) for call in self.calls]  # before any work on tensors
        prepared = [tokens_of(call, spec) for call, spec in zip(self.calls, specs, strict=True)]
        one = prepared[0].call
        weight, bias = one.weight, one.bias
        wants = [wanted_of(one.call) for one in prepared]
        buffer_dtype, request = None, None
        if wants[0][1] and one.gradient_buffer is None:
            buffer_dtype, request = common_accumulator(prepared, wants)
        pairs = zip(prepared, wants, strict=True)
        plans = [planned(one, want, in_backward(), request, buffer_dtype) for one, want in pairs]
        prepared = [tokens for tokens, *_ in plans]
        objectives: list[Any] = [objective_of(one) for one in prepared]  # ``ScalarObjective`` each
        calls = [head_call(*plan, objective, request) for plan, objective in zip(plans, objectives, strict=True)]
        made: list[StreamsForward] = []

        def forward(weight: Tensor, bias: Tensor | None, *hidden: Tensor) -> StreamsForward:
            return forward_of_streams(calls, buffer_dtype, weight, bias, hidden)

        (total,) = Loss.apply(forward, made, weight, bias, *(rows for _, rows, *_ in plans))
        outcomes = []
        for i, (call, objective) in enumerate(zip(calls, objectives, strict=True)):
            rank_sums = objective.inputs.rank_sums
            ranks = rank_sums.parallel.ranks if rank_sums is not None and rank_sums.parallel.average else 1
            with torch.no_grad():
                parts = zip(objective.parts, self.losses[i].terms, strict=True)
                first, *others = [part * (coefficient * ranks) for part, (coefficient, _) in parts]
                value = sum(others, first)
            ran = made[0].each[i]
            outcomes.append(Outcome((value,), call.plan, prepared[i], objective, ran.stats))
        return self.result(total, outcomes)


def common_accumulator(prepared: Sequence[Tokens], wants: Sequence[Wanted]) -> tuple[torch.dtype, Request]:
    """The dtype in which all streams' chunks add up, and what each stream's plan is to be made by: as one call on all
    of their tokens would have it."""
    again, tokens = in_backward(), sum(len(one.target) for one in prepared)
    found = []
    for one, want in zip(prepared, wants, strict=True):
        copied = one.packing is not None or not one.call.rows.is_contiguous()
        skips = one.packing is not None and one.packing.count is not None
        given: dict[str, Any] = {"again": again, "copied": copied, "skips": skips, "teacher": one.teacher}
        found.append(sizes_of(one.call, one.spec, tokens, want, **given))
    sizes = replace(max(found, key=row_bytes), coupled=False, late_upstream=False)
    request = prepared[0].spec.request
    waits = again or any(one.spec.coupled for one in prepared)  # for a backward, in blocks of tokens
    plan = make_plan(sizes, request)
    chunks = sum(-(-len(one.target) // plan.chunk_tokens) for one in prepared)
    half = sizes.weight_dtype.itemsize < 4
    few = plan.schedule == "forward" and not waits and chunks <= MAX_HALF_CHUNKS
    if half and not few and (plan.weight_accumulate.itemsize < 4 or plan.schedule != "forward"):
        if request.accumulate_dtype not in (None, torch.float32):
            raise ValueError(
                f"accumulate_dtype={name(request.accumulate_dtype)} is accurate over at most {MAX_HALF_CHUNKS} "
                f"chunks, and these streams have {chunks} or more; raise memory_budget or chunk_tokens, or leave "
                "accumulate_dtype=None"
            )
        plan = make_plan(sizes, replace(request, accumulate_dtype=torch.float32))
    if plan.schedule != "forward":
        raise ValueError(
            f"memory_budget={request.memory_budget!r} is too small for streams, which add up the weight's gradient in "
            f"the forward pass; raise it, or call linear_loss once for each stream\n{plan}"
        )
    if not request.explicit:
        return plan.weight_accumulate, Request(chunk_tokens=plan.chunk_tokens)
    waiting = 0 if plan.weight_accumulate == sizes.weight_dtype else sizes.weight_elements * 4
    return plan.weight_accumulate, Request(request.budget - waiting, request.chunk_tokens)


class StreamsBuffer(GradientBuffer):
    """The gradient that the streams of one call add to, until the call's backward returns it."""

    fresh = True  # until a stream with tokens has added to it

    def __init__(self, weight: Tensor, vocab: int, dtype: torch.dtype):
        super().__init__(weight, torch.empty(weight.shape, dtype=dtype, device=weight.device))
        self.buffer[vocab:].zero_()  # rows that stand for no id

    def handed_over(self) -> None:
        """None: the backward of all streams returns the gradient, once."""

    def taken(self) -> Tensor:
        """The sums, which nothing here keeps: a graph may outlive its backward."""
        sums = self.buffer
        object.__setattr__(self, "buffer", sums.new_empty(0))
        return sums


# gradients that wait for backward: of each stream, None where backward makes them; of the weight, of all
StreamsGrads = tuple[list[Gradients | None], StreamsBuffer | None]


class StreamsForward(NamedTuple):
    """The forward passes of all streams, in the place of one ``Forward``."""

    each: list[Forward]
    vocab: int
    buffer_dtype: torch.dtype | None  # of the weight's gradient; None: the caller has a buffer, or no gradient is made
    grads: StreamsGrads | None
    outputs: tuple[Tensor, ...]
    saved: Sequence[Tensor]
    saved_ends: Sequence[int]  # where those of each stream end among weight, bias, hidden states and ``saved``
    any_grad: bool
    reads_saved: bool
    stats: None = None
    differentiable: int = 1
    inplace: bool = False

    def gradients(self, grads: StreamsGrads | None, saved: Sequence[Tensor], upstream: Grads) -> Grads:
        """Gradients of the weight, the bias and each stream's hidden states."""
        (given,), expected = upstream, self.each[0].call.objective.expected
        assert given is not None and expected is not None
        waiting, buffer = grads or ([None] * len(self.each), None)
        found: list[Grads] = [(None, None, None)] * len(self.each)
        for i, ready in enumerate(waiting):
            if ready is not None:
                found[i] = self.each[i].gradients(ready, (), upstream)
        late = [i for i, ready in enumerate(waiting) if ready is None and self.each[i].any_grad]
        if buffer is not None and late:
            self.each[0].call.backend.scale_([buffer.buffer], expected.factors(given)[:1])
        for i in late:
            if buffer is None and self.buffer_dtype is not None:
                buffer = StreamsBuffer(saved[0], self.vocab, self.buffer_dtype)
            operands = [saved[2 + i], *saved[:2], *saved[slice(*self.saved_ends[i : i + 2])]]
            found[i] = gradients_into(buffer, self.each[i], operands, upstream)
        of_hidden, of_weight, of_bias = zip(*found, strict=True)
        if buffer is None:
            d_weight = next((one for one in of_weight if one is not None), None)
        else:
            d_weight = finished(buffer, self.each, given, scaled=bool(late))
        return d_weight, added(of_bias), *of_hidden


def forward_of_streams(
    calls: Sequence[HeadCall],
    buffer_dtype: torch.dtype | None,
    weight: Tensor,
    bias: Tensor | None,
    hidden: Sequence[Tensor],
) -> StreamsForward:
    """The forward pass of one stream after the other."""
    vocab, buffer = calls[0].plan.sizes.vocab, None
    if buffer_dtype is not None and any(call.plan.schedule == "forward" for call in calls):
        buffer = StreamsBuffer(weight, vocab, buffer_dtype)
    made = []
    for call, rows in zip(calls, hidden, strict=True):
        if buffer is not None and call.plan.schedule == "forward":
            call = replace(call, gradient_buffer=buffer)
        one = forward_of(call, rows, weight, bias)
        made.append(one)
        if buffer is not None and one.grads is not None:
            buffer.fresh &= call.plan.sizes.tokens == 0
            # finished once, for all streams
            one.grads.without_weight()
    first, *others = (one.outputs[0] for one in made)
    saved = [tensor for one in made for tensor in one.saved]
    ends = [*itertools.accumulate((len(one.saved) for one in made), initial=2 + len(made))]
    grads = [one.grads for one in made], buffer
    any_grad = any(one.any_grad for one in made)
    reads = any(one.reads_saved or (one.grads is None and one.any_grad) for one in made)
    each = [one._replace(outputs=(), grads=None, saved=()) for one in made]
    return StreamsForward(each, vocab, buffer_dtype, grads, (sum(others, first),), saved, ends, any_grad, reads)


def gradients_into(buffer: StreamsBuffer | None, made: Forward, operands: Sequence[Tensor], upstream: Grads) -> Grads:
    """A stream's gradients once the upstream gradient is known: its logits are computed again."""
    if made.call.gradient_buffer is not None:
        made.call.gradient_buffer.check_there()
    call, stats = made.later(operands)
    assert isinstance(call, HeadCall)
    if buffer is not None:
        # blocks of tokens add to it, and there may be many of them
        sizes = replace(call.plan.sizes, buffer_dtype=buffer.buffer.dtype)
        call = replace(call, gradient_buffer=buffer, plan=replace(call.plan, sizes=sizes))
    found = call.late_gradients(operands, stats, upstream)
    if buffer is not None:
        buffer.fresh &= call.plan.sizes.tokens == 0
    return found


def added(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of the streams' gradients of the bias, rounded once more."""
    there = [part for part in parts if part is not None]
    if len(there) < 2:
        return there[0] if there else None
    dtype = there[0].dtype
    return torch.stack(there).sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)


def finished(buffer: StreamsBuffer, made: Sequence[Forward], given: Tensor, scaled: bool) -> Tensor:
    """The weight's gradient in the weight's dtype; nan where an id of any stream was out of range."""
    if buffer.fresh:
        buffer.buffer.zero_()
    first, *others = (one.call.objective.expected for one in made if one.call.objective.expected is not None)
    one_or_nan = first.one_or_nan
    for other in others:
        one_or_nan = one_or_nan * other.one_or_nan
    factors = (one_or_nan,) if scaled else (*first.factors(given)[:1], one_or_nan)
    dtype, backend, sums = buffer.weight.dtype, made[0].call.backend, buffer.taken()
    if sums.dtype == dtype:
        backend.scale_([sums], factors)
        return sums
    return backend.scale(sums, factors, dtype)


def value_over_streams(metric: Metric, outcomes: Sequence[Outcome]) -> MetricValue:
    """``sum over i of v_1 * ... * v_i`` of the metric's values v in the streams, summed over the tokens that count in
    the first; a stream in which a token does not count ends its product."""
    objective: ScalarObjective = outcomes[0].objective
    with torch.no_grad():
        first, *others = itertools.accumulate([values_of(metric, ran) for ran in outcomes], torch.mul)
        total = sum(others, first).sum() * torch.stack([ran.tokens.one_or_nan for ran in outcomes]).prod()
    value = MetricValue("mean", total, objective.counts[place_of(metric, objective)])
    rank_sums = objective.inputs.rank_sums
    return value if rank_sums is None else metrics_of_all_ranks({metric.label: value}, rank_sums.parallel)[metric.label]


def place_of(metric: Metric, objective: ScalarObjective) -> int:
    """The metric's place among those of the objective's structure."""
    return [each.label for each, _ in objective.structure.metrics].index(metric.label)


def values_of(metric: Metric, ran: Outcome) -> Tensor:
    """The metric's value for each of the call's tokens, 0 where a token does not count [tokens]."""
    objective, packing = ran.objective, ran.tokens.packing
    own = objective.structure.metrics[place_of(metric, objective)]
    structure = replace(objective.structure, summands=(), metrics=(own,), leaves=frozenset())
    values = evaluate(structure, ran.stats.named(), objective.inputs).table[0]
    return values if packing is None else packing.unpack(values)
