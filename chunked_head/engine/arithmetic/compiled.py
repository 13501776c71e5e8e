"""The losses' arithmetic where it has no kernel: compiled by ``torch.compile`` on a GPU, once for each structure, else
plain PyTorch. A structure is what cannot change without other code: which functions with which options, at which
softmax.
"""

import functools
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...core.private import in_own_thread, private, under_hooks
from ...kernels.common.recording import refuse
from ...program.demand import Structure
from .evaluate import Evaluation, Inputs, evaluate

Result = TypeVar("Result")

COMPILED: dict[tuple, Callable[..., Any]] = {}
SLOW: dict[tuple, str] = {}  # structures that do not compile, and why
MOST_COMPILED = 256


HOOKS = [f"_C._autograd._{verb}_saved_tensors_default_hooks" for verb in ("top", "pop", "push")]


def run(structure: Structure, leaves: dict[str, Tensor], inputs: Inputs, fused: bool) -> Evaluation:
    """``evaluate``, compiled where ``fused``; a user's function that does not compile runs as it is, with a warning.

    No tape holds it: a user's function may read what changes from call to call. It runs without the hooks of an
    activation checkpoint around the call: the vectors' graph lives and dies in here, and ``torch.func`` refuses to run
    under hooks.
    """
    refuse("losses without a kernel", never=True)
    return without_hooks(functools.partial(run_unhooked, structure, leaves, inputs, fused))


def without_hooks(function: Callable[[], Result]) -> Result:
    """What ``function`` returns, run without hooks on what autograd saves."""
    stack = private(*HOOKS)
    if stack is None:
        return in_own_thread(function) if under_hooks() else function()
    top, pop, push = stack
    hooks = []
    try:
        while (pair := top(True)) is not None:
            hooks.append(pair)
            pop()
        return function()
    finally:
        for pack, unpack in reversed(hooks):
            push(pack, unpack)


def run_unhooked(structure: Structure, leaves: dict[str, Tensor], inputs: Inputs, fused: bool) -> Evaluation:
    key = structure.key
    if not fused or not structure.compiled or key in SLOW:
        return evaluate(structure, leaves, inputs)
    if key not in COMPILED:
        if len(COMPILED) >= MOST_COMPILED:
            COMPILED.clear()
        COMPILED[key] = torch.compile(closed(structure), dynamic=True, fullgraph=True)
    errors = private("_dynamo.exc.TorchDynamoException") or (RuntimeError,)  # of which that is a kind
    try:
        return Evaluation(*COMPILED[key](leaves, inputs))
    except errors as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        names = ", ".join(summand.label for summand, _ in structure.summands)
        warnings.warn(f"losses {names} do not compile ({reason}); they run as plain autograd", stacklevel=2)
        SLOW[key] = reason
        del COMPILED[key]
        return evaluate(structure, leaves, inputs)


def closed(structure: Structure) -> Callable[..., tuple]:
    """``evaluate`` of one structure, as a function with code of its own: the compiler keeps what it has compiled by
    code, and gives up on code that it has seen with a handful of structures. A program's structure holds no tensor of
    a call, which this outlives."""

    def compiled(leaves: dict[str, Tensor], inputs: Inputs) -> tuple:
        return tuple(evaluate(structure, leaves, inputs))

    code = compiled.__code__.replace(co_name=f"evaluate_{len(COMPILED)}")
    return FunctionType(code, compiled.__globals__, code.co_name, closure=compiled.__closure__)
