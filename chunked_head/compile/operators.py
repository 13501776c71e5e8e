"""The two operators of compiled graphs: ``forward``, with its autograd formula, and ``backward``.

``forward`` returns the call's values first: one vector for each of ``Call.outputs``; or the loss [], and one vector of
parts and metrics (``SCALAR``). If an operand takes a gradient, further outputs follow:

- for a loss of hidden states, the expected upstream gradient [], and the gradients of the operands for this upstream
  gradient;
- for values per token, if hidden states alone take a gradient (``has_unit_rows``), a factor for each token, which is 0
  where the token does not count, and the rows of hidden's gradient for upstream gradients of 1;
- for every other call (``has_late_gradients``), statistics, from which ``backward`` makes the gradients.

Both operators take ``operands`` (hidden states, weight and perhaps bias; or logits), ``tensors`` (all other tensors of
the call), ``key`` (of the call's recipe) and ``needs_grad`` (for each operand, whether it takes a gradient).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.objective import Objective, ScalarObjective
from ..call.logits_work import LogitsWork
from ..call.options import Call
from ..call.run import Grads, kernel_context, prepared
from ..call.spec import Spec
from ..call.sweep import HeadWork
from ..call.tokens import Tokens, tokens_of
from ..core.checks import PACKAGE
from ..core.private import in_own_thread, private
from ..core.stats import RowStats, layout_of
from ..plan.planner import find_late_plan
from ..stores.gradients import Gradients
from .recipes import call_of_recipe

FORWARD = "(Tensor[] operands, Tensor[] tensors, str key, bool[] needs_grad) -> Tensor[]"  # schema of the operator
BACKWARD = (
    "(Tensor[] operands, Tensor[] tensors, Tensor[] statistics, Tensor[] upstream, str key, bool[] needs_grad)"
    " -> Tensor[]"
)
SCALAR = ("loss", "packed")  # names of the outputs of a call that returns one loss
INTEGERS = ("argmax", "top_k_ids")  # names of the outputs that are int64
WITHOUT_GRADIENT = (*INTEGERS, "top_k_logprobs", "packed")  # names of the outputs that take no gradient


# ---- the dispatcher's state in a graph


# private names of torch: the enumeration of dispatch keys; the class of sets of keys; a function that returns the keys
# that this thread includes; a context in which the thread includes one set of keys and excludes another
DISPATCH = ("_C.DispatchKey", "_C.DispatchKeySet", "_C._dispatch_tls_local_include_set", "_C._ForceDispatchKeyGuard")


def outside_of_graphs(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Wraps ``function`` so that it runs with the dispatch keys of autograd and ``torch.func`` switched on. A graph
    runs operators with both switched off, but inside of an operator autograd differentiates losses by their statistics.
    """

    @functools.wraps(function)
    def with_dispatch(*args: Any) -> list[Tensor]:
        dispatch_objects = private(*DISPATCH)
        if dispatch_objects is None:
            return in_own_thread(functools.partial(function, *args))
        key_enum, key_set_class, read_included_keys, key_guard = dispatch_objects
        with key_guard(read_included_keys(), autocast_keys(key_enum, key_set_class)):
            return function(*args)

    return with_dispatch


@functools.cache
def autocast_keys(key_enum: Any, key_set_class: Any) -> Any:
    """The set of autocast's dispatch keys, the only keys that ``outside_of_graphs`` leaves switched off."""
    key_set = key_set_class(key_enum.Undefined)
    for name in dir(key_enum):
        if name.startswith("Autocast"):
            key_set = key_set.add(getattr(key_enum, name))
    return key_set


# ---- the forward operator


def prepared_call(
    key: str, operands: list[Tensor], tensors: list[Tensor], needs_grad: Sequence[bool]
) -> tuple[Tokens, HeadWork | LogitsWork, Sequence[Any]]:
    """Makes the call of the recipe ``key`` on these tensors. Returns the results of ``prepared``: the call's tokens,
    its work, and the operands of the work."""
    call, spec = call_of_recipe(key, operands, tensors)
    hidden_grad, weight_grad, bias_grad = (*needs_grad, False, False)[:3]
    return prepared(tokens_of(call, spec), (hidden_grad, weight_grad, bias_grad))


def has_late_gradients(call: Call[Any]) -> bool:
    """True for calls whose gradients ``backward`` makes: those that return values per token, and those on logits."""
    return bool(call.outputs) or call.weight is None


def has_unit_rows(call: Call[Any], spec: Spec, needs_grad: Sequence[bool]) -> bool:
    """True if ``forward`` returns rows of hidden's gradient. The call then returns values per token, of which the plan
    expects one alone to get an upstream gradient, and hidden states are the only operand that takes a gradient."""
    is_only_hidden = call.weight is not None and not any(needs_grad[1:])
    return bool(call.outputs) and spec.num_row_factors == 1 and is_only_hidden


@torch.library.custom_op(f"{PACKAGE}::forward", mutates_args=(), schema=FORWARD)
@outside_of_graphs
def forward(operands: list[Tensor], tensors: list[Tensor], key: str, needs_grad: list[bool]) -> list[Tensor]:
    with torch.no_grad(), kernel_context(operands[0].device):
        tokens, work, work_operands = prepared_call(key, operands, tensors, needs_grad)
        stats, grads = work.forward(work_operands)
        values = returned_values(tokens, work.objective, stats)
        if not any(needs_grad):
            return values
        if has_unit_rows(tokens.call, tokens.spec, needs_grad):
            return [*values, *counts_and_rows(tokens, work, work_operands, stats, grads)]
        if has_late_gradients(tokens.call):
            return [*values, *stats.by_name.values()]
        expected_upstream, gradients = expected_gradients(tokens, work, work_operands, stats, grads)
        return [*values, expected_upstream, *in_shape(gradients, operands, needs_grad)]


def returned_values(tokens: Tokens, objective: Objective, stats: RowStats) -> list[Tensor]:
    """The first outputs of ``forward``: values per token in the caller's order; or the loss [], and the vector that
    ``pack_results`` returns."""
    packing = tokens.packing
    outputs = objective.results(stats)
    if isinstance(objective, ScalarObjective):
        return [*outputs, pack_results(tokens.call, objective)]
    return [*outputs] if packing is None else [packing.unpack(values) for values in outputs]


def pack_results(call: Call[Any], objective: ScalarObjective) -> Tensor:
    """Returns one vector: the reduced value of each summand, then for each metric of the call its sums and its count,
    or its extremum."""
    numbers, metric_values = [*objective.loss_values], objective.metric_values()
    for metric in call.metrics:
        value = metric_values[metric.label]
        numbers += [number for number in (value.sum, value.count, value.extremum) if number is not None]
    return torch.cat([number.detach().reshape(-1).to(objective.dtype) for number in numbers])


def counts_and_rows(
    tokens: Tokens, work: HeadWork | LogitsWork, operands: Sequence[Any], stats: RowStats, grads: Gradients | None
) -> list[Tensor]:
    """Returns factors [tokens], and the rows of hidden's gradient for upstream gradients of 1. A factor is 1 where a
    token counts, else 0; all factors are nan if any id is out of range."""
    objective, hidden = work.objective, tokens.call.rows
    assert isinstance(work, HeadWork)
    if grads is not None:
        rows = grads.hidden
    else:
        unit_coefficients = objective.unit_coefficients(stats, slice(0, len(objective.targets)))
        rows, *_ = work.recompute(operands, stats, unit_coefficients)
    assert rows is not None
    token_factors = -objective.unit_slopes if work.packing is None else work.packing.unpack(-objective.unit_slopes)
    dtype = gradient_dtypes(tokens.call, tokens.spec)[0]
    return [token_factors * objective.one_or_nan, rows.to(dtype).view(hidden.shape)]


def expected_gradients(
    tokens: Tokens, work: HeadWork | LogitsWork, operands: Sequence[Any], stats: RowStats, grads: Gradients | None
) -> tuple[Tensor, Grads]:
    """Returns the expected upstream gradient [], and the gradients of the operands for this upstream gradient.

    ``grads``: gradients of the forward sweep, not multiplied by the upstream gradient yet. None: the plan makes
    gradients in backward, and this function runs the sweep of that backward.
    """
    objective = work.objective
    assert isinstance(objective, ScalarObjective) and isinstance(work, HeadWork)
    plan, one_or_nan = work.plan, objective.one_or_nan
    expected_upstream = torch.ones_like(one_or_nan) * objective.expected_upstream
    hidden_dtype, weight_dtype, bias_dtype = gradient_dtypes(tokens.call, tokens.spec)
    sizes = replace(plan.sizes, hidden_dtype=hidden_dtype, weight_dtype=weight_dtype, bias_dtype=bias_dtype)
    if grads is not None and plan.has_unit_rows:
        return expected_upstream, grads.finish_rows(work.backend, work.row_factors(stats, (expected_upstream,)), sizes)
    if grads is not None:
        return expected_upstream, grads.finish(work.backend, sizes, one_or_nan)
    coefficients = objective.coefficients_for(stats, (expected_upstream,))
    if sizes != plan.sizes:
        late_plan = find_late_plan(sizes, work.request)
        if isinstance(late_plan, str):
            raise ValueError(late_plan)
        work = replace(work, plan=late_plan)
    return expected_upstream, work.recompute(operands, stats, coefficients)


def gradient_dtypes(call: Call[Any], spec: Spec) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The dtypes of gradients of hidden states, weight and bias among the outputs of ``forward``. Gradients of hidden
    states and weight have the operand's dtype. They have fp32 at least if ``accumulate_dtype`` is fp32 or if matmuls
    are in fp16, since gradients may exceed the range of fp16 before the upstream gradient scales them down. The
    bias's gradient always has fp32 at least."""
    assert call.weight is not None
    hidden_dtype, weight_dtype = call.rows.dtype, call.weight.dtype
    wide_dtype = torch.promote_types(spec.dtype, torch.float32)
    if spec.dtype == torch.float16 or call.accumulate_dtype == torch.float32:
        hidden_dtype = torch.promote_types(hidden_dtype, wide_dtype)
        weight_dtype = torch.promote_types(weight_dtype, wide_dtype)
    return hidden_dtype, weight_dtype, wide_dtype


def in_shape(grads: Grads, operands: Sequence[Tensor], needs_grad: Sequence[bool]) -> list[Tensor]:
    """Views each gradient that is not None in the shape of its operand. Leaves out gradients that are None."""
    present_grads = [grad for grad in grads if grad is not None]
    shapes = [operand.shape for operand in itertools.compress(operands, needs_grad)]
    return [grad.view(shape) for grad, shape in zip(present_grads, shapes, strict=True)]


@forward.register_fake
def forward_outputs(operands: list[Tensor], tensors: list[Tensor], key: str, needs_grad: list[bool]) -> list[Tensor]:
    """Tensors without data, in the shapes and dtypes of ``forward``'s outputs: a compiler traces with them. Raises for
    wrong arguments."""
    call, spec = call_of_recipe(key, operands, tensors)
    first_operand, dtype = operands[0], spec.statistics_dtype
    token_count = math.prod(first_operand.shape[:-1])
    packed_count = len(call.losses.terms)
    packed_count += sum(metric.components + 1 if metric.reduce == "mean" else 1 for metric in call.metrics)
    top_k_shape = token_count, call.top_k or 0
    shapes = {"loss": (), "packed": (packed_count,), "top_k_ids": top_k_shape, "top_k_logprobs": top_k_shape}
    values = [
        first_operand.new_empty(shapes.get(name, (token_count,)), dtype=torch.int64 if name in INTEGERS else dtype)
        for name in call.outputs or SCALAR
    ]
    if not any(needs_grad):
        return values
    if has_unit_rows(call, spec, needs_grad):
        rows = first_operand.new_empty(first_operand.shape, dtype=gradient_dtypes(call, spec)[0])
        return [*values, first_operand.new_empty(token_count, dtype=dtype), rows]
    if has_late_gradients(call):
        stats = RowStats.empty(token_count, layout_of(spec.demand), dtype, first_operand.device)
        return [*values, *stats.by_name.values()]
    operands_and_dtypes = zip(operands, gradient_dtypes(call, spec), strict=False)
    grads = [operand.new_empty(operand.shape, dtype=grad_dtype) for operand, grad_dtype in operands_and_dtypes]
    return [*values, first_operand.new_empty((), dtype=dtype), *itertools.compress(grads, needs_grad)]


# ---- the backward operator


@torch.library.custom_op(f"{PACKAGE}::backward", mutates_args=(), schema=BACKWARD)
@outside_of_graphs
def backward(
    operands: list[Tensor], tensors: list[Tensor], statistics: list[Tensor], upstream: list[Tensor], key: str,
    needs_grad: list[bool],
) -> list[Tensor]:  # fmt: skip
    with torch.no_grad(), kernel_context(operands[0].device):
        tokens, work, work_operands = prepared_call(key, operands, tensors, needs_grad)
        packing, demand = tokens.packing, tokens.spec.demand
        stats = RowStats.from_dict(dict(zip(layout_of(demand).forms, statistics, strict=True)))
        if isinstance(work, LogitsWork):
            return in_shape(work.late_gradients(work_operands, stats, tuple(upstream)), operands, needs_grad)
        if packing is not None:
            upstream = [packing.pack(grad) for grad in upstream]
        coefficients = work.objective.coefficients_for(stats, tuple(upstream))
        return in_shape(work.recompute(work_operands, stats, coefficients), operands, needs_grad)


@backward.register_fake
def backward_outputs(
    operands: list[Tensor], tensors: list[Tensor], statistics: list[Tensor], upstream: list[Tensor], key: str,
    needs_grad: list[bool],
) -> list[Tensor]:  # fmt: skip
    return [operand.new_empty(operand.shape) for operand in itertools.compress(operands, needs_grad)]


# ---- autograd's formula of the forward operator


# what autograd has saved, by ``ctx.saved_kind``: "gradients": the expected upstream gradient, and the operands'
# gradients for it; "rows": a factor for each token, and rows of hidden's gradient; "statistics": operands, other
# tensors of the call, and statistics


def save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    """Saves on ``ctx`` what ``differentiate`` reads."""
    operands, tensors, key, needs_grad = inputs
    call, spec = call_of_recipe(key, operands, tensors)
    output_names = call.outputs or SCALAR
    outputs_without_gradient = [
        value for name, value in zip(output_names, output, strict=False) if name in WITHOUT_GRADIENT
    ]
    tensors_for_gradients = output[len(output_names) :]
    ctx.mark_non_differentiable(*outputs_without_gradient, *tensors_for_gradients)
    ctx.key, ctx.needs_grad, ctx.num_tensors, ctx.num_values = key, needs_grad, len(tensors), len(call.outputs) or 1
    ctx.dtypes = [operand.dtype for operand in itertools.compress(operands, needs_grad)]
    if has_unit_rows(call, spec, needs_grad):
        ctx.saved_kind = "rows"
        ctx.save_for_backward(*tensors_for_gradients)
    elif has_late_gradients(call):
        ctx.saved_kind = "statistics"
        ctx.save_for_backward(*operands, *tensors, *tensors_for_gradients)
    else:
        ctx.saved_kind = "gradients"
        ctx.save_for_backward(*tensors_for_gradients)


def differentiate(ctx: Any, upstream: list[Tensor]) -> tuple:
    """Gradients of ``forward``'s arguments; a compiler traces this function."""
    if ctx.saved_kind == "statistics":
        grads = late_gradients(ctx, upstream[: ctx.num_values])
    elif ctx.saved_kind == "rows":
        grads = [scaled_rows(ctx, upstream[0])]
    else:
        grads = scaled_gradients(ctx, upstream[0])
    grad_iterator = iter(grads)
    operand_grads = [next(grad_iterator) if has_grad else None for has_grad in ctx.needs_grad]
    return operand_grads, [None] * ctx.num_tensors, None, None


def late_gradients(ctx: Any, upstream: list[Tensor]) -> list[Tensor]:
    """Gradients of the operands, which the operator ``backward`` makes from statistics. ``upstream``: the upstream
    gradients of the call's values."""
    saved_tensors, num_operands = [*ctx.saved_tensors], len(ctx.needs_grad)
    num_inputs = num_operands + ctx.num_tensors
    operands, tensors = saved_tensors[:num_operands], saved_tensors[num_operands:num_inputs]
    return backward(operands, tensors, saved_tensors[num_inputs:], upstream, ctx.key, ctx.needs_grad)


def scaled_rows(ctx: Any, upstream: Tensor) -> Tensor:
    """The gradient of hidden states: each saved row times its token's upstream gradient. A row is 0 where the token
    does not count, or where the upstream gradient is 0. ``upstream`` [tokens]."""
    token_factors, rows = ctx.saved_tensors
    row_factor = torch.where(token_factors == 0, 0.0, upstream * token_factors).view(*rows.shape[:-1], 1)
    wide_rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return torch.where(row_factor == 0, 0.0, wide_rows * row_factor).to(ctx.dtypes[0])


def scaled_gradients(ctx: Any, upstream: Tensor) -> list[Tensor]:
    """The saved gradients, multiplied by the ratio of ``upstream`` [] to the expected upstream gradient."""
    expected_upstream, *grads = ctx.saved_tensors
    ratio = torch.where(upstream == expected_upstream, 1.0, upstream / expected_upstream)
    # plain arithmetic: a compiler runs it in place, since nothing else reads these gradients
    return [
        (grad.to(torch.promote_types(grad.dtype, torch.float32)) * ratio).to(dtype)
        for grad, dtype in zip(grads, ctx.dtypes, strict=True)
    ]


forward.register_autograd(differentiate, setup_context=save)
