"""The two operators of compiled graphs: ``forward``, with its autograd formula, and ``backward``.

``forward`` returns the call's values first: one vector for each of ``Call.outputs``; or the loss [], and one vector of
its parts and metrics (``SCALAR``). If an operand takes a gradient, further outputs follow:

- for a loss of hidden states, the expected upstream gradient [], and the operands' gradients for it;
- for values per token, if only hidden states take a gradient (``has_unit_rows``), a factor per token that is 0 where
  one does not count, and the rows of hidden's gradient for upstream gradients of 1;
- for every other call (``has_late_gradients``), statistics, from which ``backward`` makes the gradients.

Arguments of both operators: ``operands``, hidden states, weight and perhaps bias, or logits; ``tensors``, all other
tensors of the call; ``key``, the key of its recipe; ``needs_grad``, for each operand whether it takes a gradient.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
from ..metrics import MetricValue
from ..plan.planner import find_late_plan
from ..stores.gradients import Gradients
from .recipes import recipe_of

FORWARD = "(Tensor[] operands, Tensor[] tensors, str key, bool[] needs_grad) -> Tensor[]"  # schema of the operator
BACKWARD = (
    "(Tensor[] operands, Tensor[] tensors, Tensor[] statistics, Tensor[] upstream, str key, bool[] needs_grad)"
    " -> Tensor[]"
)
SCALAR = ("loss", "packed")  # names of the outputs of a call that returns one loss
INTEGERS = ("argmax", "top_k_ids")  # names of the outputs that are int64
# names of the outputs that take no gradient
WITHOUT_GRADIENT = (*INTEGERS, "top_k_logprobs", "packed")  # names of outputs


# ---- the dispatcher's state in a graph


class Dispatch(NamedTuple):
    """Private objects of ``torch._C`` that read and set a thread's dispatch keys."""

    keys: Any  # the enumeration of dispatch keys
    key_set: Any  # the class of a set of dispatch keys
    included: Callable[[], Any]  # returns the keys that this thread includes
    guard: Callable[[Any, Any], Any]  # context that includes a set of keys and excludes another


DISPATCH = ("_C.DispatchKey", "_C.DispatchKeySet", "_C._dispatch_tls_local_include_set", "_C._ForceDispatchKeyGuard")


def dispatch() -> Dispatch | None:
    """The objects of ``Dispatch``; None if this torch lacks one of them."""
    dispatch_objects = private(*DISPATCH)
    return None if dispatch_objects is None else Dispatch(*dispatch_objects)


def outside_of_graphs(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Wraps ``function`` so that it runs with the dispatch keys of autograd and ``torch.func`` switched on. A graph
    runs operators with both switched off, but inside of an operator autograd differentiates losses by their statistics.
    """

    @functools.wraps(function)
    def with_dispatch(*args: Any) -> list[Tensor]:
        dispatch_objects = dispatch()
        if dispatch_objects is None:
            return in_own_thread(functools.partial(function, *args))
        with dispatch_objects.guard(dispatch_objects.included(), switched_off()):
            return function(*args)

    return with_dispatch


@functools.cache
def switched_off() -> Any:
    """The set of autocast's dispatch keys, the only ones that ``outside_of_graphs`` leaves switched off."""
    dispatch_objects = dispatch()
    assert dispatch_objects is not None
    autocast_keys = dispatch_objects.key_set(dispatch_objects.keys.Undefined)
    for name in dir(dispatch_objects.keys):
        if name.startswith("Autocast"):
            autocast_keys = autocast_keys.add(getattr(dispatch_objects.keys, name))
    return autocast_keys


# ---- the forward operator


def prepared_call(
    key: str, operands: list[Tensor], tensors: list[Tensor], needs_grad: Sequence[bool]
) -> tuple[Tokens, HeadWork | LogitsWork, Sequence[Any]]:
    """Returns the tokens, the work and its operands, as ``prepared`` does, of a call: the recipe of ``key``, on these
    tensors."""
    call, spec = recipe_of(key).call(operands, tensors)
    hidden_grad, weight_grad, bias_grad = (*needs_grad, False, False)[:3]
    return prepared(tokens_of(call, spec), (hidden_grad, weight_grad, bias_grad))


def has_late_gradients(call: Call[Any]) -> bool:
    """True for calls whose gradients ``backward`` makes: those that return values per token, and those on logits."""
    return bool(call.outputs) or call.weight is None


def has_unit_rows(call: Call[Any], spec: Spec, needs_grad: Sequence[bool]) -> bool:
    """True for calls on hidden states that return values per token, if the plan expects an upstream gradient of just
    one of these values, and hidden states are the only operand that takes a gradient."""
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
    """The operator's first outputs: values per token in the caller's order; or the loss [] and ``packed``."""
    packing = tokens.packing
    outputs, loss_values, metric_totals = objective.results(stats)
    if isinstance(objective, ScalarObjective):
        metric_values = objective.metric_values(stats, metric_totals)
        return [*outputs, packed(tokens.call, loss_values, metric_values, objective.dtype)]
    return [*outputs] if packing is None else [packing.unpack(values) for values in outputs]


def packed(
    call: Call[Any], loss_values: Sequence[Tensor], metrics: dict[str, MetricValue], dtype: torch.dtype
) -> Tensor:
    """One vector: the summands' reduced values, then of each metric sums and count, or the extremum, in the caller's
    order. ``metrics``: values by label."""
    numbers = [*loss_values]
    for metric in call.metrics:
        value = metrics[metric.label]
        numbers += [number for number in (value.sum, value.count, value.extremum) if number is not None]
    return torch.cat([number.detach().reshape(-1).to(dtype) for number in numbers])


def counts_and_rows(
    tokens: Tokens, work: HeadWork | LogitsWork, operands: Sequence[Any], stats: RowStats, grads: Gradients | None
) -> list[Tensor]:
    """Returns two tensors: [tokens], 1 where a token counts, else 0, but nan for all tokens if any id is out of range;
    and the rows of hidden's gradient at upstream gradients of 1."""
    objective, hidden = work.objective, tokens.call.rows
    assert isinstance(work, HeadWork)
    if grads is not None:
        rows = grads.hidden
    else:
        unit_coefficients = objective.unit_coefficients(stats, slice(0, len(objective.targets)))
        rows, *_ = work.recompute(operands, stats, unit_coefficients)
    assert rows is not None
    token_counts = -objective.unit_slopes if work.packing is None else work.packing.unpack(-objective.unit_slopes)
    dtype = gradient_dtypes(tokens.call, tokens.spec)[0]
    return [token_counts * objective.one_or_nan, rows.to(dtype).view(hidden.shape)]


def expected_gradients(
    tokens: Tokens, work: HeadWork | LogitsWork, operands: Sequence[Any], stats: RowStats, grads: Gradients | None
) -> tuple[Tensor, Grads]:
    """Returns the expected upstream gradient [], and the operands' gradients for it.

    ``grads``: gradients of the forward sweep, not yet multiplied by the upstream gradient; None if the plan makes
    gradients in backward: then this function makes them.
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
    """The dtypes of the operator's gradients of hidden states, weight and bias, before they are multiplied by the
    upstream gradient: the operand's dtype; fp32 if ``accumulate_dtype`` is fp32, and for fp16, whose range an
    unscaled gradient may exceed."""
    assert call.weight is not None
    hidden, weight = call.rows.dtype, call.weight.dtype
    wide_dtype = torch.promote_types(spec.dtype, torch.float32)
    if spec.dtype == torch.float16 or call.accumulate_dtype == torch.float32:
        return torch.promote_types(hidden, wide_dtype), torch.promote_types(weight, wide_dtype), wide_dtype
    return hidden, weight, wide_dtype


def in_shape(grads: Grads, operands: Sequence[Tensor], needs_grad: Sequence[bool]) -> list[Tensor]:
    """The gradients that are not None, each viewed in the shape of its operand."""
    gradient_iterator = iter([grad for grad in grads if grad is not None])
    return [
        next(gradient_iterator).view(operand.shape)
        for operand, needs in zip(operands, needs_grad, strict=True)
        if needs
    ]


@forward.register_fake
def forward_outputs(operands: list[Tensor], tensors: list[Tensor], key: str, needs_grad: list[bool]) -> list[Tensor]:
    """Tensors without data of the shapes and dtypes of ``forward``'s outputs, for tracing. Raises for wrong
    arguments."""
    call, spec = recipe_of(key).call(operands, tensors)
    first_operand, dtype = operands[0], spec.statistics_dtype
    token_count = math.prod(first_operand.shape[:-1])
    packed_count = len(call.losses.terms)
    packed_count += sum(metric.components + 1 if metric.reduce == "mean" else 1 for metric in call.metrics)
    top_k = token_count, call.top_k or 0
    shapes = {"loss": (), "packed": (packed_count,), "top_k_ids": top_k, "top_k_logprobs": top_k}
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
        return [
            *values,
            *RowStats.empty(token_count, layout_of(spec.demand), dtype, first_operand.device).by_name.values(),
        ]
    dtypes = gradient_dtypes(call, spec)
    grads = [
        operand.new_empty(operand.shape, dtype=grad_dtype)
        for operand, grad_dtype in zip(operands, dtypes, strict=False)
    ]
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


class SavedGradients(NamedTuple):
    """A state of autograd's formula: it has saved the expected upstream gradient, and the gradients for it."""

    dtypes: list[torch.dtype]  # dtypes of the operands that take a gradient


class SavedRows(NamedTuple):
    """A state of autograd's formula: it has saved [tokens] 1 where a token counts, else 0, and rows of hidden's
    gradient."""

    dtype: torch.dtype  # of hidden states


class SavedStatistics(NamedTuple):
    """A state of autograd's formula: it has saved operands, other tensors and statistics, in this order."""

    operands: int  # number of operands
    tensors: int  # number of other tensors
    values: int  # number of outputs whose upstream gradients ``backward`` takes


def save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    """Saves on ``ctx`` the tensors that ``differentiate`` reads."""
    operands, tensors, key, needs_grad = inputs
    call, spec = recipe_of(key).call(operands, tensors)
    output_names = call.outputs or SCALAR
    outputs_without_gradient = [
        value for name, value in zip(output_names, output, strict=False) if name in WITHOUT_GRADIENT
    ]
    tensors_for_gradients = output[len(output_names) :]
    ctx.mark_non_differentiable(*outputs_without_gradient, *tensors_for_gradients)
    ctx.key, ctx.needs_grad, ctx.tensors = key, needs_grad, len(tensors)
    if has_unit_rows(call, spec, needs_grad):
        ctx.saved = SavedRows(operands[0].dtype)
        ctx.save_for_backward(*tensors_for_gradients)
    elif has_late_gradients(call):
        ctx.saved = SavedStatistics(len(operands), len(tensors), len(call.outputs) or 1)
        ctx.save_for_backward(*operands, *tensors, *tensors_for_gradients)
    else:
        ctx.saved = SavedGradients([operand.dtype for operand in itertools.compress(operands, needs_grad)])
        ctx.save_for_backward(*tensors_for_gradients)


def differentiate(ctx: Any, upstream: list[Tensor]) -> tuple:
    """Gradients of ``forward``'s arguments; a compiler traces this function."""
    if isinstance(ctx.saved, SavedStatistics):
        grads = late_gradients(ctx, ctx.saved, upstream)
    elif isinstance(ctx.saved, SavedRows):
        grads = [scaled_rows(ctx, ctx.saved, upstream[0])]
    else:
        grads = scaled_gradients(ctx, ctx.saved, upstream[0])
    gradient_iterator = iter(grads)
    return [next(gradient_iterator) if needs else None for needs in ctx.needs_grad], [None] * ctx.tensors, None, None


def late_gradients(ctx: Any, saved: SavedStatistics, upstream: list[Tensor]) -> list[Tensor]:
    """Gradients that the operator ``backward`` makes from statistics."""
    saved_tensors, num_inputs = [*ctx.saved_tensors], saved.operands + saved.tensors
    operands, tensors = saved_tensors[: saved.operands], saved_tensors[saved.operands : num_inputs]
    return backward(operands, tensors, saved_tensors[num_inputs:], upstream[: saved.values], ctx.key, ctx.needs_grad)


def scaled_rows(ctx: Any, saved: SavedRows, upstream: Tensor) -> Tensor:
    """Saved rows times their tokens' upstream gradients [tokens]; 0 where a token does not count, or where its
    upstream gradient is 0."""
    token_counts, rows = ctx.saved_tensors
    row_factor = torch.where(token_counts == 0, 0.0, upstream * token_counts).view(*rows.shape[:-1], 1)
    wide_rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return torch.where(row_factor == 0, 0.0, wide_rows * row_factor).to(saved.dtype)


def scaled_gradients(ctx: Any, saved: SavedGradients, upstream: Tensor) -> list[Tensor]:
    """The saved gradients, multiplied by the ratio [] of the upstream gradient to the expected upstream gradient."""
    expected_upstream, *grads = ctx.saved_tensors
    ratio = torch.where(upstream == expected_upstream, 1.0, upstream / expected_upstream)
    # plain arithmetic: a compiler runs it in place, since nothing else reads these gradients
    return [
        (grad.to(torch.promote_types(grad.dtype, torch.float32)) * ratio).to(dtype)
        for grad, dtype in zip(grads, saved.dtypes, strict=True)
    ]


forward.register_autograd(differentiate, setup_context=save)
