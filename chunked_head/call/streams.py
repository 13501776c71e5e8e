"""How a call on several streams runs: each as a call of its own, with one accumulator for the weight's gradient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from ..core.options import name
from ..core.shift import in_backward
from ..losses.base import Losses
from ..plan.planner import Request, make_plan
from ..plan.plans import MAX_HALF_CHUNKS
from .function import Forward
from .head_options import HeadOptions
from .prepared import PreparedCall, is_plain, prepare
from .program import program_of
from .run import Outcome, Placed, Planned, Wants, planned, sizes_of
from .streams_function import StreamCalls, StreamsLoss
from .task import Result, Task


@dataclass(frozen=True, eq=False)
class Streams(Generic[Result]):
    """A call on several streams as it was made: a task for each, whose losses have the stream's weight as a factor."""

    tasks: tuple[Task[Any], ...]
    losses: tuple[Losses, ...]  # of each stream, without its weight
    result: Callable[[Tensor, list[Outcome]], Result]

    def run(self) -> Result:
        programs = [program_of(task) for task in self.tasks]
        prepared = [prepare(task, program) for task, program in zip(self.tasks, programs, strict=True)]
        heads = [head_of(one) for one in prepared]
        weight, bias = heads[0].weight, heads[0].bias
        wants = [Wants.of(head.hidden, weight, bias) for head in heads]
        plans = plans_of(prepared, wants)
        prepared = [plan.prepared for plan in plans.each]
        objectives = [task.objective(one) for task, one in zip(self.tasks, prepared, strict=True)]
        calls = [plan.call(objective) for plan, objective in zip(plans.each, objectives, strict=True)]
        made: list[Forward] = []
        streams = StreamCalls(calls, plans.buffer_dtype)
        total = StreamsLoss.apply(streams, made, weight, bias, *(plan.rows for plan in plans.each))
        outcomes = []
        for i, call in enumerate(calls):
            spread = objectives[i].spread
            ranks = spread.parallel.ranks if spread is not None and spread.parallel.average else 1
            with torch.no_grad():
                parts = zip(objectives[i].parts, self.losses[i].terms, strict=True)
                first, *others = [part * (coefficient * ranks) for part, (coefficient, _) in parts]
                value = sum(others, first)
            outcomes.append(Outcome((value,), call.plan, prepared[i], objectives[i], made[i].stats, call, made[i]))
        return self.result(total, outcomes)


def head_of(prepared: PreparedCall) -> HeadOptions:
    """A stream is of hidden states."""
    assert isinstance(prepared.head, HeadOptions)
    return prepared.head


class Plans(NamedTuple):
    """How the streams run."""

    buffer_dtype: torch.dtype | None  # of the buffer that all add the weight's gradient to, where it is the call's
    each: list[Planned]


def plans_of(prepared: Sequence[PreparedCall], wants: Sequence[Wants]) -> Plans:
    common = wants[0].weight and head_of(prepared[0]).gradient_buffer is None
    buffer_dtype, request = common_accumulator(prepared, wants) if common else (None, None)
    pairs = zip(prepared, wants, strict=True)
    return Plans(buffer_dtype, [planned(*pair, in_backward(), request, buffer_dtype) for pair in pairs])


def common_accumulator(prepared: Sequence[PreparedCall], wants: Sequence[Wants]) -> tuple[torch.dtype, Request]:
    """The dtype in which all streams' chunks add up, and what each stream's plan is to be made by: as one call on all
    of their tokens would have it."""
    again, tokens = in_backward(), sum(len(one.target) for one in prepared)
    found = []
    for one, want in zip(prepared, wants, strict=True):
        head = head_of(one)
        copied = one.packing is not None or not head.hidden.is_contiguous()
        placed = Placed(tokens, want, again, one.skips, False, copied, is_plain(head.weight), True, None)
        found.append(sizes_of(head, one.program, placed, one.teacher))
    sizes = replace(max(found, key=lambda each: each.row_bytes), coupled=False, late_upstream=False)
    request = prepared[0].program.request
    waits = again or any(one.program.coupled for one in prepared)  # for a backward, in blocks of tokens
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
