"""The decorator of public functions: they run at once, or as an operator of a graph being traced."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

from ..call.options import DEFAULTS, Call, Head
from ..call.run import run
from ..call.spec import spec_of
from ..call.streams import Streams
from ..core.checks import INFINITY, NUMBERS, is_dtensor
from ..core.stats import at_targets
from ..losses.base import Losses
from . import operators
from .recipes import TASKS, described

P = ParamSpec("P")
Result = TypeVar("Result")
OPERANDS = ("hidden", "weight", "bias", "logits")
# by public function: from its operator's outputs and its arguments to what it returns
IN_GRAPH: dict[str, Callable[[list[Tensor], dict[str, Any]], Any]] = {}


def operation(function: Callable[P, Call[Result] | Streams[Result]]) -> Callable[P, Result]:
    """A public function of one that checks its arguments and says what to do.

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
            eager = given.get("parallel") is not None or given.get("segment_lengths") is not None
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
    public.__signature__ = spelled_out(signature).replace(return_annotation=result)  # type: ignore[attr-defined]
    return public


def execute(
    function: Callable[..., Call[Result] | Streams[Result]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Result:
    """The result of the call that a public function's arguments make, at once and differentiable."""
    call = function(*args, **kwargs)
    return call.run() if isinstance(call, Streams) else call.result(run(call, spec_of(call)))


def spelled_out(signature: inspect.Signature) -> inspect.Signature:
    """The signature with the keywords of ``**options`` one by one, for ``help`` and ``inspect``."""
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(parameters) < len(signature.parameters):
        kinds = Head.__annotations__
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
            for name, default in DEFAULTS.items()
        ]
    return signature.replace(parameters=parameters)


def as_operator(name: str, given: dict[str, Any]) -> Any:
    """Traced: nothing here but tuples, attributes and one call of an operator; None where that cannot be."""
    from .tracing import registered

    operands = [given[operand] for operand in OPERANDS if given.get(operand) is not None]
    device = operands[0].device
    number = given.get("normalizer")
    if isinstance(number, NUMBERS) and not isinstance(number, bool) and number >= 0 and number < INFINITY:
        # it may be another at every step: as a tensor it is none of the numbers that a graph is made for
        given = given | {"normalizer": torch.ones((), dtype=torch.float64, device=device) * number}
    tensors: list[Tensor] = []
    arguments = tuple([(key, described(value, tensors)) for key, value in given.items() if key not in OPERANDS])
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    key, grad = registered(name, arguments, autocast), torch.is_grad_enabled()
    if not key:
        return None
    wanted = [grad and operand.requires_grad for operand in operands]
    return IN_GRAPH[name](operators.forward(operands, tensors, key, wanted), given)


def in_graph_values(outputs: list[Tensor], given: dict[str, Any]) -> Tensor:
    """Values of tokens in the target's shape, each at its target's place."""
    rows = given["hidden"] if "hidden" in given else given["logits"]
    return at_targets(outputs[0], rows.shape[:-1], given.get("shift", 0))
