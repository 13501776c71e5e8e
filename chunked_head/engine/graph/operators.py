"""The custom operators: a call that makes its gradients as it goes, and the backward of one that cannot.

What ``forward`` returns. Of a scalar loss: the loss, values of parts and metrics in one vector, the expected upstream
gradient with the factor that the gradients still lack, and the gradients that are wanted. Of values per token: those,
and where a gradient is wanted the statistics, of which ``backward`` makes gradients once the upstream ones are known.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.private import in_own_thread, private
from ...core.stats import Demand, Head, RowStats
from ...program.planner import DEFAULT_REQUEST, Request, make_plan
from ..arithmetic.objective import Objective, ScalarObjective
from ..autograd import as_called
from ..call import Wants, planned
from ..loop import Call, recompute, sweep
from ..prepared import PreparedCall, prepare
from ..program import Program
from ..task import Task
from .deferred import Deferred, deferred
from .recipes import recipe_of

Operands = tuple[Tensor, Tensor, Tensor | None]
WANTED = "str key, bool hidden_grad, bool weight_grad, bool bias_grad) -> Tensor[]"
FORWARD = "(Tensor hidden, Tensor weight, Tensor? bias, Tensor[] others, " + WANTED
BACKWARD = "(Tensor hidden, Tensor weight, Tensor? bias, Tensor[] others, Tensor[] stats, Tensor[] upstream, " + WANTED
INTEGERS = ("argmax", "top_k_ids")


DISPATCH = ("_C.DispatchKey", "_C.DispatchKeySet", "_C._dispatch_tls_local_include_set", "_C._ForceDispatchKeyGuard")


def plainly(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """``function`` as if called from outside of any graph. A compiled one runs its operators with the dispatch of
    autograd and of ``torch.func`` switched off, and losses are differentiated to their statistics by those."""

    @functools.wraps(function)
    def run(*args: Any) -> list[Tensor]:
        dispatch = private(*DISPATCH)
        if dispatch is None:
            return in_own_thread(functools.partial(function, *args))
        _, _, include, guard = dispatch
        with guard(include(), switched_off()):
            return function(*args)

    return run


@functools.cache
def switched_off() -> Any:
    """Of all dispatch keys those that stay switched off where nothing is traced and nothing differentiated."""
    dispatch = private(*DISPATCH)
    assert dispatch is not None
    keys, found = dispatch[0], dispatch[1](dispatch[0].Undefined)
    for name in dir(keys):
        if name.startswith("Autocast"):
            found = found.add(getattr(keys, name))
    return found


def begun(task: Task, program: Program, wants: Wants) -> tuple[PreparedCall, Objective, Tensor, Call]:
    """What both operators begin with: fields beside rows, the objective, the plan. Only per-token calls come back."""
    prepared = prepare(task, program)
    made, objective = planned(prepared, wants), task.objective(prepared)
    return prepared, objective, made.rows, made.call(prepared, objective)


@torch.library.custom_op("chunked_head::forward", mutates_args=(), schema=FORWARD)
@plainly
def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    others: list[Tensor],
    key: str,
    hidden_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> list[Tensor]:
    wants = Wants(hidden_grad, weight_grad, bias_grad)
    with torch.no_grad(), as_called(hidden.device):
        task, program = recipe_of(key).task(others, hidden, weight, bias=bias)
        prepared, objective, rows, call = begun(task, program, wants)
        head = call.head(weight, bias)
        stats, grads = sweep(call, rows, head)
        outputs = objective.outputs(stats)
        if task.per_token:
            if prepared.packing is not None:
                outputs = tuple(map(prepared.packing.unpack, outputs))
            return [*outputs, *(stats.named().values() if any(wants) else ())]
        assert isinstance(objective, ScalarObjective)
        made = [*outputs, packed(task, objective, stats), left_over(objective, grads is not None)]
        if any(wants):
            wait = deferred(task, program, wants)
            if grads is None:
                ready = gradients_now(call, rows, head, stats, wait)
            else:
                ready = grads.hidden, grads.whole("weight"), grads.whole("bias")
            made += [grad.to(dtype) for grad, dtype in zip(ready, wait, strict=True) if grad is not None]
        return made


def packed(task: Task, objective: ScalarObjective, stats: RowStats) -> Tensor:
    """Parts, then of each metric the sums and the count, or the extremum, in the order in which they were asked for."""
    found = [*objective.parts]
    values = objective.metric_values(stats)
    for metric in task.metrics:
        value = values[metric.label]
        found += [each for each in (value.sum, value.count, value.extremum) if each is not None]
    return torch.cat([each.detach().reshape(-1).to(objective.dtype) for each in found])


def count_packed(task: Task) -> int:
    """How many numbers those are."""
    of_metrics = sum(metric.components + 1 if metric.reduce == "mean" else 1 for metric in task.metrics)
    return len(task.losses.terms) + of_metrics


def left_over(objective: ScalarObjective, in_forward: bool) -> Tensor:
    """[2]: the upstream gradient that the gradients hold, and what else they are to be multiplied by."""
    one, factor = torch.ones_like(objective.one_or_nan), objective.one_or_nan
    for gain in (objective.gain, *objective.taken_out) if in_forward else ():
        if gain is not None:
            factor = factor * gain
    return torch.stack([one * objective.declared, factor])


def gradients_now(call: Call, rows: Tensor, head: Head, stats: RowStats, wait: Deferred) -> tuple[Tensor | None, ...]:
    """Gradients of a plan that leaves them to backward, with the expected upstream gradient."""
    objective = call.objective
    assert isinstance(objective, ScalarObjective)
    coefficients, gain = objective.late(stats, (torch.ones_like(objective.one_or_nan) * objective.declared,))
    sizes = replace(call.plan.sizes, hidden_dtype=wait.hidden, weight_dtype=wait.weight, bias_dtype=wait.bias)
    if sizes != call.plan.sizes:
        sizes = replace(sizes, late_upstream=True)
        try:
            plan = make_plan(sizes, Request(memory_budget=call.request.memory_budget))
        except ValueError:  # a budget that narrower gradients fitted
            plan = make_plan(sizes, DEFAULT_REQUEST)
        call = replace(call, plan=plan)
    return recompute(call, rows, head, stats, coefficients, gain)


@forward.register_fake
def forward_outputs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, others: list[Tensor], key: str, *wanted: bool
) -> list[Tensor]:
    """Their shapes; raises what is wrong with the arguments."""
    wants = Wants(*wanted)
    task, program = recipe_of(key).task(others, hidden, weight, bias=bias)
    tokens, dtype = math.prod(hidden.shape[:-1]), program.statistics_dtype
    if task.per_token:
        named = RowStats.empty(tokens, program.demand, dtype, hidden.device).named()
        return [*empty_values(task, program.demand, tokens, dtype, hidden), *(named.values() if any(wants) else ())]
    made = [hidden.new_empty(shape, dtype=dtype) for shape in ((), (count_packed(task),), (2,))]
    if any(wants):
        wait = deferred(task, program, wants)
        shapes = (tokens, weight.shape[1]), tuple(weight.shape), (weight.shape[0],)
        made += [
            hidden.new_empty(shape, dtype=each)
            for shape, each, wanted in zip(shapes, wait, wants, strict=True)
            if wanted
        ]
    return made


def empty_values(task: Task, demand: Demand, tokens: int, dtype: torch.dtype, like: Tensor) -> list[Tensor]:
    """Of what is returned per token."""
    made = []
    for name in task.per_token:
        shape = (tokens, demand.top_k) if name.startswith("top_k") else (tokens,)
        made.append(like.new_empty(shape, dtype=torch.int64 if name in INTEGERS else dtype))
    return made


@torch.library.custom_op("chunked_head::backward", mutates_args=(), schema=BACKWARD)
@plainly
def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    others: list[Tensor],
    stats: list[Tensor],
    upstream: list[Tensor],
    key: str,
    hidden_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> list[Tensor]:
    wants = Wants(hidden_grad, weight_grad, bias_grad)
    with torch.no_grad(), as_called(hidden.device):
        task, program = recipe_of(key).task(others, hidden, weight, bias=bias)
        prepared, objective, rows, call = begun(task, program, wants)
        names = RowStats.empty(0, program.demand, objective.dtype, hidden.device).named()
        kept = RowStats(**dict(zip(names, stats, strict=True)))
        if prepared.packing is not None:
            upstream = [prepared.packing.pack(each) for each in upstream]
        coefficients, gain = objective.late(kept, tuple(upstream))
        found = recompute(call, rows, call.head(weight, bias), kept, coefficients, gain)
        return [grad for grad in found if grad is not None]


@backward.register_fake
def backward_outputs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    others: list[Tensor],
    stats: list[Tensor],
    upstream: list[Tensor],
    key: str,
    *wanted: bool,
) -> list[Tensor]:
    rows = hidden.new_empty((math.prod(hidden.shape[:-1]), hidden.shape[-1]))
    made = [rows, weight.new_empty(weight.shape), None if bias is None else bias.new_empty(bias.shape)]
    return [grad for grad, asked_for in zip(made, wanted, strict=True) if asked_for and grad is not None]


def keep(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    """For the gradient: no more than it needs."""
    hidden, weight, bias, others, key, *wants = inputs
    task, _ = recipe_of(key).task(others, hidden, weight, bias=bias)
    ctx.key, ctx.wants, ctx.others, ctx.values = key, wants, len(others), len(task.per_token)
    ctx.shape, ctx.dtypes = hidden.shape, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
    if task.per_token:
        gradless = [value for name, value in zip(task.per_token, output, strict=False) if name in WITHOUT_GRADIENT]
        ctx.mark_non_differentiable(*gradless, *output[ctx.values :])
        ctx.bias = bias is not None
        ctx.save_for_backward(hidden, weight, *([bias] if ctx.bias else []), *others, *output[ctx.values :])
    else:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[2:])


WITHOUT_GRADIENT = (*INTEGERS, "top_k_logprobs")


def differentiate(ctx: Any, upstream: list[Tensor]) -> tuple:
    """Gradients of the operator's arguments; traced."""
    if ctx.values:
        hidden, weight, *rest = ctx.saved_tensors
        bias = rest.pop(0) if ctx.bias else None
        others, stats = rest[: ctx.others], rest[ctx.others :]
        made = backward(hidden, weight, bias, others, stats, upstream[: ctx.values], ctx.key, *ctx.wants)
    else:
        left, *made = ctx.saved_tensors
        ratio = torch.where(upstream[0] == left[0], 1.0, upstream[0] / left[0]) * left[1]
        # plain arithmetic, which a compiler does in the memory of what it reads: the gradients are nobody else's
        dtypes = [dtype for dtype, asked_for in zip(ctx.dtypes, ctx.wants, strict=True) if asked_for]
        made = [
            (grad.to(torch.promote_types(grad.dtype, torch.float32)) * ratio).to(dtype)
            for grad, dtype in zip(made, dtypes, strict=True)
        ]
    found = iter(made)
    d_hidden, d_weight, d_bias = (next(found) if wanted else None for wanted in ctx.wants)
    if d_hidden is not None:
        d_hidden = d_hidden.view(ctx.shape)
    return d_hidden, d_weight, d_bias, [None] * ctx.others, None, None, None, None


forward.register_autograd(differentiate, setup_context=keep)
