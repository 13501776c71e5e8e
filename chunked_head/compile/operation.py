"""The decorator of public functions, which run at once or as an operator of a graph being traced, and the operators.

``forward`` returns values: per token, or the loss and one vector of its parts and metrics. If a gradient is wanted,
the expected upstream gradient and gradients at it follow for a loss of hidden states, else the statistics, from which
``backward`` makes gradients.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

from ..arithmetic.objective import ScalarObjective
from ..call.logits_call import LogitsCall
from ..call.options import DEFAULTS, Call
from ..call.run import Grads, kernel_context, on_device, prepared, run
from ..call.spec import Spec, spec_of
from ..call.streams import Streams
from ..call.sweep import HeadCall
from ..call.tokens import tokens_of
from ..core.checks import INFINITY, NUMBERS, PACKAGE, is_dtensor
from ..core.private import in_own_thread, private
from ..core.stats import RowStats, at_targets
from ..losses.base import Losses
from ..plan.planner import find_late_plan
from .recipes import TASKS, described, recipe_of

P = ParamSpec("P")
Result = TypeVar("Result")
OPERANDS = ("hidden", "weight", "bias", "logits")
# by public function: from its operator's outputs and its arguments to what it returns
IN_GRAPH: dict[str, Callable[[list[Tensor], dict[str, Any]], Any]] = {}


def operation(function: Callable[P, Call[Result] | Streams[Result]]) -> Callable[P, Result]:
    """A public function, which runs the call that ``function`` makes of checked arguments.

    Under ``torch.compile`` the checks run on tensors without data while the graph is made, and raise there.
    """
    name, signature = function.__name__, inspect.signature(function)
    names = tuple(signature.parameters)
    TASKS[name] = function

    @functools.wraps(function)
    def public(*args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.compiler.is_compiling():
            given = dict(zip(names[: len(args)], args, strict=True)) | kwargs
            # lengths of segments are other numbers at every step
            eager = any(given.get(name) is not None for name in ("parallel", "segment_lengths", "fp8_weight"))
            eager = eager or type(given.get("hidden")) in (list, tuple)  # several streams
            eager = eager or any(is_dtensor(given[name]) for name in OPERANDS if name in given)
            in_graph = not eager and not given.get("inplace")
            if in_graph and ("loss" not in given or isinstance(given["loss"], Losses)):
                made = as_operator(name, given)
                if made is not None:
                    return made
            from ..core.outside import outside

            return outside(execute, function, args, kwargs)  # between two graphs
        return execute(function, args, kwargs)

    returned = signature.return_annotation
    (result,) = get_args(get_args(returned)[0] if get_origin(returned) in (Union, UnionType) else returned)
    public.__annotations__ = function.__annotations__ | {"return": result}
    # for ``help`` and ``inspect`` the keywords of ``**options``, which come last, one by one
    *parameters, options = signature.parameters.values()
    kinds = get_args(options.annotation)[0].__annotations__
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
        for name, default in DEFAULTS.items()
        if name in kinds
    ]
    public.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    return public


def execute(
    function: Callable[..., Call[Result] | Streams[Result]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Result:
    """The result of the call that a public function's arguments make, at once and differentiable."""
    call = function(*args, **kwargs)
    calls = (call,) if isinstance(call, Call) else call.calls
    with on_device(calls[0].device):
        try:
            return call.result(run(call, spec_of(call))) if isinstance(call, Call) else call.run()
        except BaseException:
            for one in calls:
                buffer = vars(one).get("gradient_buffer")  # where the call has come to look at it
                if buffer is not None:
                    buffer.note_failure()
            raise


def as_operator(name: str, given: dict[str, Any]) -> Any:
    """Traced: nothing here but tuples, attributes and one call of an operator; None where that cannot be."""
    from .tracing import registered

    operands = [given[operand] for operand in OPERANDS if given.get(operand) is not None]
    device = operands[0].device
    number = given.get("normalizer")
    if isinstance(number, NUMBERS) and not isinstance(number, bool) and number >= 0 and number < INFINITY:
        # a tensor may change at every step without another graph
        given = given | {"normalizer": torch.ones((), dtype=torch.float64, device=device) * number}
    tensors: list[Tensor] = []
    arguments = tuple([(key, described(value, tensors)) for key, value in given.items() if key not in OPERANDS])
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    key, grad = registered(name, arguments, autocast), torch.is_grad_enabled()
    if not key:
        return None
    wanted = [grad and operand.requires_grad for operand in operands]
    return IN_GRAPH[name](forward(operands, tensors, key, wanted), given)


def in_graph_values(outputs: list[Tensor], given: dict[str, Any]) -> Tensor:
    """Values of tokens in the target's shape, each at its target's place."""
    rows = given["hidden"] if "hidden" in given else given["logits"]
    return at_targets(outputs[0], rows.shape[:-1], given.get("shift", 0))


# ---- the operators

# operands: logits, or hidden states, weight and perhaps bias; ``wanted``: which of them take a gradient
FORWARD = "(Tensor[] operands, Tensor[] others, str key, bool[] wanted) -> Tensor[]"
BACKWARD = "(Tensor[] operands, Tensor[] others, Tensor[] stats, Tensor[] upstream, str key, bool[] wanted) -> Tensor[]"
SCALAR = ("loss", "packed")
INTEGERS = ("argmax", "top_k_ids")
WITHOUT_GRADIENT = (*INTEGERS, "top_k_logprobs", "packed")
DISPATCH = ("_C.DispatchKey", "_C.DispatchKeySet", "_C._dispatch_tls_local_include_set", "_C._ForceDispatchKeyGuard")


def plainly(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """``function`` as if called outside of a graph, which runs operators with the dispatch of autograd and
    ``torch.func`` switched off: losses are differentiated to their statistics by these."""

    @functools.wraps(function)
    def outside_of_graphs(*args: Any) -> list[Tensor]:
        dispatch = private(*DISPATCH)
        if dispatch is None:
            return in_own_thread(functools.partial(function, *args))
        _, _, include, guard = dispatch
        with guard(include(), switched_off()):
            return function(*args)

    return outside_of_graphs


@functools.cache
def switched_off() -> Any:
    """Dispatch keys that stay switched off where nothing is traced and nothing differentiated."""
    dispatch = private(*DISPATCH)
    assert dispatch is not None
    keys, found = dispatch[0], dispatch[1](dispatch[0].Undefined)
    for name in dir(keys):
        if name.startswith("Autocast"):
            found = found.add(getattr(keys, name))
    return found


def comes_late(asked: Call[Any]) -> bool:
    """True where ``backward`` makes the gradients."""
    return bool(asked.outputs) or asked.weight is None


@torch.library.custom_op(f"{PACKAGE}::forward", mutates_args=(), schema=FORWARD)
@plainly
def forward(operands: list[Tensor], others: list[Tensor], key: str, wanted: list[bool]) -> list[Tensor]:
    with torch.no_grad(), kernel_context(operands[0].device):
        asked, spec = recipe_of(key).call(operands, others)
        of_hidden, of_weight, of_bias = (*wanted, False, False)[:3]
        tokens, call, of = prepared(tokens_of(asked, spec), (of_hidden, of_weight, of_bias))
        objective = call.objective
        stats, grads = call.forward(*of)
        outputs = objective.outputs(stats)
        if isinstance(objective, ScalarObjective):
            outputs = *outputs, packed(asked, objective, stats)
        elif tokens.packing is not None:
            outputs = tuple(map(tokens.packing.unpack, outputs))
        if not any(wanted):
            return [*outputs]
        if comes_late(asked):
            return [*outputs, *stats.named().values()]
        assert isinstance(objective, ScalarObjective) and isinstance(call, HeadCall)
        plan, one_or_nan = call.plan, objective.one_or_nan
        expected = torch.ones_like(one_or_nan) * objective.expected.upstream
        hidden, weight, bias = waiting_dtypes(asked, spec)
        sizes = replace(plan.sizes, hidden_dtype=hidden, weight_dtype=weight, bias_dtype=bias)
        if grads is not None:
            ready: Grads = grads.finish(call.backend, [one_or_nan], one_or_nan, sizes)
        else:  # the plan leaves them to backward
            coefficients = objective.coefficients_for(stats, (expected,))
            if sizes != plan.sizes:
                late = find_late_plan(sizes, call.request)
                if isinstance(late, str):
                    raise ValueError(late)
                call = replace(call, plan=late)
            ready = call.recompute(of, stats, coefficients)
        return [*outputs, expected, *shaped(ready, operands, wanted)]


def shaped(grads: Sequence[Tensor | None], operands: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    """Gradients that were made, as their operands are."""
    found = iter([grad for grad in grads if grad is not None])
    return [next(found).view(operand.shape) for operand, asked in zip(operands, wanted, strict=True) if asked]


def packed(asked: Call[Any], objective: ScalarObjective, stats: RowStats) -> Tensor:
    """Parts, then sums and count or the extremum of each metric, in the order of the call's arguments."""
    found = [*objective.parts]
    values = objective.metric_values(stats)
    for metric in asked.metrics:
        value = values[metric.label]
        found += [each for each in (value.sum, value.count, value.extremum) if each is not None]
    return torch.cat([each.detach().reshape(-1).to(objective.dtype) for each in found])


def waiting_dtypes(asked: Call[Any], spec: Spec) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Dtypes in which gradients of hidden states, weight and bias wait for the upstream gradient: the operands', or
    fp32 where ``accumulate_dtype`` says so and in fp16, whose range they may exceed till then."""
    assert asked.weight is not None
    hidden, weight = asked.rows.dtype, asked.weight.dtype
    wide = torch.promote_types(spec.dtype, torch.float32)
    if spec.dtype == torch.float16 or asked.accumulate_dtype == torch.float32:
        return torch.promote_types(hidden, wide), torch.promote_types(weight, wide), wide
    return hidden, weight, wide


@forward.register_fake
def forward_outputs(operands: list[Tensor], others: list[Tensor], key: str, wanted: list[bool]) -> list[Tensor]:
    """Their shapes; raises what is wrong with the arguments."""
    asked, spec = recipe_of(key).call(operands, others)
    first, dtype = operands[0], spec.statistics_dtype
    tokens = math.prod(first.shape[:-1])
    numbers = len(asked.losses.terms)
    numbers += sum(metric.components + 1 if metric.reduce == "mean" else 1 for metric in asked.metrics)
    top_k = tokens, spec.demand.top_k
    shapes = {"loss": (), "packed": (numbers,), "top_k_ids": top_k, "top_k_logprobs": top_k}
    made = [
        first.new_empty(shapes.get(name, (tokens,)), dtype=torch.int64 if name in INTEGERS else dtype)
        for name in asked.outputs or SCALAR
    ]
    if not any(wanted):
        return made
    if comes_late(asked):
        return [*made, *RowStats.empty(tokens, spec.demand, dtype, first.device).named().values()]
    dtypes = waiting_dtypes(asked, spec)
    grads = [each.new_empty(each.shape, dtype=own) for each, own in zip(operands, dtypes, strict=False)]
    return [*made, first.new_empty((), dtype=dtype), *itertools.compress(grads, wanted)]


@torch.library.custom_op(f"{PACKAGE}::backward", mutates_args=(), schema=BACKWARD)
@plainly
def backward(
    operands: list[Tensor], others: list[Tensor], stats: list[Tensor], upstream: list[Tensor], key: str,
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    with torch.no_grad(), kernel_context(operands[0].device):
        asked, spec = recipe_of(key).call(operands, others)
        of_hidden, of_weight, of_bias = (*wanted, False, False)[:3]
        tokens, call, of = prepared(tokens_of(asked, spec), (of_hidden, of_weight, of_bias))
        names = RowStats.empty(0, spec.demand, spec.statistics_dtype, of[0].device).named()
        kept = RowStats.of(dict(zip(names, stats, strict=True)))
        if isinstance(call, LogitsCall):
            return shaped(call.late_gradients(of, kept, upstream), operands, wanted)
        if tokens.packing is not None:
            upstream = [tokens.packing.pack(each) for each in upstream]
        found = call.recompute(of, kept, call.objective.coefficients_for(kept, tuple(upstream)))
        return shaped(found, operands, wanted)


@backward.register_fake
def backward_outputs(
    operands: list[Tensor], others: list[Tensor], stats: list[Tensor], upstream: list[Tensor], key: str,
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    return [operand.new_empty(operand.shape) for operand in itertools.compress(operands, wanted)]


def keep(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    """Saves what the gradient needs, and no more."""
    operands, others, ctx.key, ctx.wanted = inputs
    asked, _ = recipe_of(ctx.key).call(operands, others)
    names = asked.outputs or SCALAR
    gradless = [value for name, value in zip(names, output, strict=False) if name in WITHOUT_GRADIENT]
    kept = output[len(names) :]
    ctx.mark_non_differentiable(*gradless, *kept)
    ctx.late, ctx.values = comes_late(asked), len(asked.outputs) or 1
    ctx.operands, ctx.others = len(operands), len(others)
    ctx.dtypes = [operand.dtype for operand in itertools.compress(operands, ctx.wanted)]
    ctx.save_for_backward(*(operands if ctx.late else ()), *(others if ctx.late else ()), *kept)


def differentiate(ctx: Any, upstream: list[Tensor]) -> tuple:
    """Gradients of the operator's arguments; traced."""
    if ctx.late:
        saved, count = [*ctx.saved_tensors], ctx.operands + ctx.others
        operands, others, stats = saved[: ctx.operands], saved[ctx.operands : count], saved[count:]
        made = backward(operands, others, stats, upstream[: ctx.values], ctx.key, ctx.wanted)
    else:
        expected, *made = ctx.saved_tensors
        ratio = torch.where(upstream[0] == expected, 1.0, upstream[0] / expected)
        # plain arithmetic, which a compiler does in place: the gradients have no other reader
        made = [
            (grad.to(torch.promote_types(grad.dtype, torch.float32)) * ratio).to(dtype)
            for grad, dtype in zip(made, ctx.dtypes, strict=True)
        ]
    found = iter(made)
    return [next(found) if own else None for own in ctx.wanted], [None] * ctx.others, None, None


forward.register_autograd(differentiate, setup_context=keep)
