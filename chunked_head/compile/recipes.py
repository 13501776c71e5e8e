"""Recipes: the arguments of a call without its tensors. The operator in a graph takes the tensors and the recipe's key.

``described`` separates tensors from other arguments. A compiler traces ``described``, and so guards every value that
the function reads. ``restored`` puts tensors and other arguments together again at run time.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..call.options import Call
from ..call.spec import Spec, spec_of
from ..core.checks import NUMBERS
from ..core.divergences import DIVERGENCES, TRACED
from ..core.records import VocabularySum
from ..losses.base import Losses, Summand, is_library
from ..metrics.values import Metric

# by kind: a class whose objects ``described`` takes apart, and the names of the fields that its constructor takes
RECORDS: dict[str, tuple[type, tuple[str, ...]]] = {
    kind: (record_class, tuple([field.name for field in fields(record_class) if field.init]))
    for kind, record_class in (("summand", Summand), ("metric", Metric))
}
FORMAT_VERSION = 4  # of the operators' outputs; a part of keys, which are on disk with graphs: raise it with a change

TASKS: dict[str, Callable[..., Any]] = {}  # functions from arguments to a ``Call``, by the public function's name
# by key, the recipe of each call in a traced graph: the public function's name, its arguments as ``described`` returns
# them, and autocast's dtype when the call was traced (None: autocast was off). A recipe is never removed: the graph's
# code has the key, and no event tells when that code is freed
RECIPES: dict[str, tuple[str, tuple, torch.dtype | None]] = {}
FUNCTIONS = dict(DIVERGENCES)  # functions of sums over the vocabulary, by the name that recipes have


def call_of_recipe(key: str, operands: list[Tensor], tensors: list[Tensor]) -> tuple[Call[Any], Spec]:
    """Makes the call of a recipe on these tensors. Returns the call and its Spec. Raises as the public function does
    for wrong arguments, and RuntimeError in a process that has not traced the call."""
    if key not in RECIPES:
        raise RuntimeError(
            f"the graph asks for a call {key!r} that this process has not traced; a graph goes with the process that "
            "compiled it: compile the function here"
        )
    function, described_arguments, autocast_dtype = RECIPES[key]
    arguments = {name: restored(value, tensors) for name, value in described_arguments}
    if len(operands) > 2:
        arguments["bias"] = operands[2]
    if arguments.get("accumulate_into") is not None:
        raise ValueError(
            "accumulate_into does not go with torch.compile, whose graphs hold operators that change none of their "
            "arguments; leave it None there, or call from outside of the compiled function"
        )
    skip_ignored = arguments.get("skip_ignored")
    if skip_ignored == "wait":
        raise ValueError('skip_ignored="wait" does not go with torch.compile: a graph waits for nothing; use True')
    with torch.autocast(operands[0].device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
        call = TASKS[function](*operands[:2], **arguments)
        spec = spec_of(call)
    if skip_ignored and not spec.backend.stops_at_device_count:
        raise ValueError(
            "skip_ignored=True inside a compiled graph needs backend='triton': torch's own products take the rows "
            "that count out, and a graph's tensors do not change their sizes by what is in them"
        )
    return call, spec


def described(value: Any, tensors: list[Tensor]) -> tuple:
    """``value`` as nested tuples of plain values. Appends the value's tensors to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", len(tensors) - 1
    if isinstance(value, Losses):
        return "losses", described(value.terms, tensors)
    if isinstance(value, VocabularySum):
        return "sum", (value.function.name, value.numbers)
    for kind, (record_class, field_names) in RECORDS.items():
        if isinstance(value, record_class):
            return kind, tuple([described(getattr(value, name), tensors) for name in field_names])
    if isinstance(value, Mapping):
        return "mapping", tuple([(name, described(item, tensors)) for name, item in value.items()])
    if type(value) in (list, tuple):
        return "tuple", tuple([described(item, tensors) for item in value])
    if isinstance(value, NUMBERS):
        # a member of a set is a constant for the compiler: a symbolic number becomes its present value
        return "plain", next(iter({value}))
    return "plain", value


def restored(description: tuple, tensors: list[Tensor]) -> Any:
    """The value that ``described`` has turned into ``description``. ``tensors``: the list with the value's tensors."""
    kind, content = description
    if kind == "tensor":
        return tensors[content]
    if kind == "losses":
        return Losses(restored(content, tensors))
    if kind == "sum":
        name, numbers = content
        return VocabularySum(FUNCTIONS[name], numbers)
    if kind in RECORDS:
        record_class, field_names = RECORDS[kind]
        names_and_fields = zip(field_names, content, strict=True)
        return record_class(**{name: restored(field, tensors) for name, field in names_and_fields})
    if kind == "mapping":
        return {name: restored(item, tensors) for name, item in content}
    if kind == "tuple":
        return tuple(restored(item, tensors) for item in content)
    return content


def store_recipe(function: str, arguments: tuple, autocast_dtype: torch.dtype | None) -> str:
    """Stores a recipe and returns its key. The key is equal in all processes, since compiled graphs are kept on disk.
    Returns "" if ``arguments`` contain a user's function, since no graph holds such a call."""
    if has_users_function(arguments):
        return ""
    note_functions(arguments)
    digest = hashlib.sha256(text_of((FORMAT_VERSION, arguments, autocast_dtype)).encode()).hexdigest()[:24]
    key = f"{function}-{digest}"
    RECIPES.setdefault(key, (function, arguments, autocast_dtype))
    return key


def text_of(value: Any) -> str:
    """A text for ``value``, which is nested tuples of plain values. Different values have different texts."""
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(text_of, value))})"
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(map(text_of, value))})"
    if isinstance(value, Mapping):
        return f"mapping({', '.join(f'{text_of(key)}: {text_of(item)}' for key, item in value.items())})"
    if isinstance(value, functools.partial):
        return f"partial({text_of(value.func)}, {text_of(value.args)}, {text_of(value.keywords)})"
    if callable(value) and not isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__name__} {value!r}"


def has_users_function(value: Any) -> bool:
    """True if the nested tuples ``value`` contain a function that a user has written."""
    if isinstance(value, functools.partial):
        value = (value.func, value.args, *value.keywords.values())
    if isinstance(value, tuple):
        return any(map(has_users_function, value))
    return callable(value) and not isinstance(value, type) and not is_library(value)


def note_functions(description: Any) -> None:
    """Adds the functions of all vocabulary sums in ``description`` to ``FUNCTIONS``, where ``restored`` finds them.
    ``description``: a result of ``described``."""
    if isinstance(description, tuple):
        if len(description) == 2 and description[0] == "sum" and isinstance(description[1], tuple):
            name = description[1][0]
            if name not in FUNCTIONS and (function := TRACED.get(name)) is not None:
                FUNCTIONS[name] = function
        for element in description:
            note_functions(element)
