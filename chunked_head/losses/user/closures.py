"""Functions of the same code over equal plain values, made one object.

To the compiler they are one then, and what was found out about the first holds for all.
"""

from collections.abc import Callable
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ...kernels.common.cache import Cache

Function = Callable[..., Tensor]

PLAIN = (type(None), bool, int, str, bytes, complex, torch.dtype, torch.device, type, ModuleType, BuiltinFunctionType)
REMEMBERED = 256  # functions; beyond that the oldest are forgotten, and compiled anew if they come back
_functions: Cache[tuple, FunctionType] = Cache(REMEMBERED)
_results: Cache[tuple, Any] = Cache(REMEMBERED)


def frozen(function: Function) -> tuple[Function, tuple | None]:
    """The first function of the same code over equal values, with those values, and what says that it is the same.

    A copy with cells of its own: were a variable of the first one's maker to change, all others would change with it.
    What closes over anything but plain values (a tensor, an object) stays itself, and None.
    """
    if type(function) is not FunctionType:
        return function, None
    try:
        key, copy = _freeze(function, ())
    except _NotPlainError:
        return function, None
    return _functions.made(key, lambda: copy), key


class _NotPlainError(Exception):
    pass


def _freeze(value: Any, inside: tuple[int, ...]) -> tuple[tuple, Any]:
    """A key that is equal for equal plain values, types included (1, 1.0 and True are three), and a lasting copy."""
    if isinstance(value, float):
        return (type(value), value.hex()), value  # tells 0.0 from -0.0, and nan is equal to nan
    if isinstance(value, PLAIN):
        return (type(value), value), value
    if type(value) is tuple:
        pairs = [_freeze(item, inside) for item in value]
        return (tuple, *(key for key, _ in pairs)), tuple(item for _, item in pairs)
    if type(value) is not FunctionType or id(value) in inside or value.__dict__:
        raise _NotPlainError
    inside = (*inside, id(value))
    try:
        contents = tuple(cell.cell_contents for cell in value.__closure__ or ())
    except ValueError as error:  # a variable without a value yet
        raise _NotPlainError from error
    keyword_defaults = value.__kwdefaults__ or {}
    closure_key, closure = _freeze(contents, inside)
    defaults_key, defaults = _freeze(value.__defaults__ or (), inside)
    keywords_key, keywords = _freeze(tuple(keyword_defaults.values()), inside)
    key = (
        FunctionType, value.__code__, id(value.__globals__), closure_key, defaults_key, tuple(keyword_defaults),
        keywords_key,
    )  # fmt: skip
    if not closure:
        return key, value
    copy = FunctionType(
        value.__code__, value.__globals__, value.__name__, defaults or None, tuple(map(CellType, closure))
    )
    copy.__kwdefaults__ = dict(zip(keyword_defaults, keywords, strict=True)) or None
    copy.__doc__, copy.__qualname__, copy.__module__ = value.__doc__, value.__qualname__, value.__module__
    return key, copy


def known(key: tuple | None, make: Callable[[], Any]) -> Any:
    """What is known of a function, found out once; without a key anew each time."""
    return make() if key is None else _results.made(key, make)
