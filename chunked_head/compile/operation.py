"""The decorator of public functions: it runs a call eagerly, or puts an operator into a graph of ``torch.compile``."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

from ..call.options import DEFAULTS, Call
from ..call.run import run
from ..call.spec import spec_of
from ..call.streams import Streams
from ..core.checks import INFINITY, NUMBERS, is_dtensor
from ..core.stats import at_targets
from ..losses.base import Losses
from .operators import forward
from .recipes import TASKS, described

P = ParamSpec("P")
Result = TypeVar("Result")
OPERANDS = ("hidden", "weight", "bias", "logits")  # names of the arguments that operators take apart from other tensors
# names of the arguments with which a call runs outside of graphs: process groups, lengths of segments (new numbers at
# every step), weights in e4m3
EAGER_ARGUMENTS = ("parallel", "segment_lengths", "fp8_weight")
# by public function's name: the function from the operator's outputs and the arguments to the result
IN_GRAPH: dict[str, Callable[[list[Tensor], dict[str, Any]], Any]] = {}


def operation(function: Callable[P, Call[Result] | Streams[Result]]) -> Callable[P, Result]:
    """Decorator for ``function``, which makes a ``Call`` of its arguments. Returns the public function, which runs the
    call and returns the call's result.

    Under ``torch.compile``, ``function`` runs and checks its arguments during tracing, on tensors without data.
    """
    function_name, signature = function.__name__, inspect.signature(function)
    names = tuple(signature.parameters)
    TASKS[function_name] = function

    @functools.wraps(function)
    def public(*args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.compiler.is_compiling():
            arguments = dict(zip(names[: len(args)], args, strict=True)) | kwargs
            is_eager = any(arguments.get(name) is not None for name in EAGER_ARGUMENTS)
            is_eager = is_eager or type(arguments.get("hidden")) in (list, tuple)  # several streams
            is_eager = is_eager or any(is_dtensor(arguments[name]) for name in OPERANDS if name in arguments)
            may_be_in_graph = not is_eager and not arguments.get("inplace")
            if may_be_in_graph and ("loss" not in arguments or isinstance(arguments["loss"], Losses)):
                result = as_operator(function_name, arguments)
                if result is not None:
                    return result
            from ..core.outside import outside

            return outside(execute, function, args, kwargs)  # between two graphs
        return execute(function, args, kwargs)

    return_annotation = signature.return_annotation
    (result_type,) = get_args(
        get_args(return_annotation)[0] if get_origin(return_annotation) in (Union, UnionType) else return_annotation
    )
    public.__annotations__ = function.__annotations__ | {"return": result_type}
    # ``help`` and ``inspect`` list the keywords of ``**options``, the last parameter, one by one
    *parameters, options_parameter = signature.parameters.values()
    keyword_types = get_args(options_parameter.annotation)[0].__annotations__
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=keyword_types[name])
        for name, default in DEFAULTS.items()
        if name in keyword_types
    ]
    public.__signature__ = inspect.Signature(parameters, return_annotation=result_type)  # type: ignore[attr-defined]
    return public


def execute(
    function: Callable[..., Call[Result] | Streams[Result]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Result:
    """Makes the call by ``function``, runs the call eagerly, and returns the call's result, which is differentiable."""
    call = function(*args, **kwargs)
    calls = (call,) if isinstance(call, Call) else call.calls
    try:
        if not isinstance(call, Call):
            return call.run()
        outputs, work = run(call, spec_of(call))
        return call.result(outputs, call, work)
    except BaseException:
        for stream_call in calls:
            buffer = vars(stream_call).get("gradient_buffer")  # a cached property: absent until the call reads it
            if buffer is not None:
                buffer.note_failure()
        raise


def as_operator(name: str, arguments: dict[str, Any]) -> Any:
    """Puts a call of the public function ``name`` into the graph being traced, as one operator. Returns the result of
    the public function; None if an argument contains a user's function.

    This function uses nothing but tuples, attributes and the operator, since a compiler traces it.
    """
    from .tracing import store_recipe

    operands = [arguments[operand] for operand in OPERANDS if arguments.get(operand) is not None]
    device = operands[0].device
    normalizer = arguments.get("normalizer")
    if (
        isinstance(normalizer, NUMBERS)
        and not isinstance(normalizer, bool)
        and normalizer >= 0
        and normalizer < INFINITY
    ):
        # a number would be a constant of the graph; a tensor may change at every step
        arguments = arguments | {"normalizer": torch.ones((), dtype=torch.float64, device=device) * normalizer}
    tensors: list[Tensor] = []
    described_arguments = tuple(
        [(argument, described(value, tensors)) for argument, value in arguments.items() if argument not in OPERANDS]
    )
    autocast_dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    key, is_grad_enabled = store_recipe(name, described_arguments, autocast_dtype), torch.is_grad_enabled()
    if not key:
        return None
    needs_grad = [is_grad_enabled and operand.requires_grad for operand in operands]
    return IN_GRAPH[name](forward(operands, tensors, key, needs_grad), arguments)


def in_graph_values(outputs: list[Tensor], arguments: dict[str, Any]) -> Tensor:
    """The operator's first output, values per token [tokens], in the shape of the targets [...]. Each value stands at
    the position of its target."""
    hidden_or_logits = arguments["hidden"] if "hidden" in arguments else arguments["logits"]
    return at_targets(outputs[0], hidden_or_logits.shape[:-1], arguments.get("shift", 0))
