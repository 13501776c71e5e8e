"""Functions that no graph holds: ``torch.compile`` breaks its graph there."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
Result = TypeVar("Result")


def breaks_graph(function: Callable[P, Result]) -> Callable[P, Result]:
    """``torch.compiler.disable``, which imports the compiler: here that waits until a graph is being traced."""

    @functools.wraps(function)
    def public(*args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.compiler.is_compiling():
            from .outside import outside

            return outside(function, *args, **kwargs)
        return function(*args, **kwargs)

    return public
