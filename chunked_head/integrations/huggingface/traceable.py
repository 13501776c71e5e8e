"""``CrossEntropyLoss()`` in a model's forward, inside of ``torch.compile``.

The compiler knows torch's own class by identity and makes a call of tensors of it, which lazy logits in a graph are
not. A class that inherits from it is traced like any other, down to ``F.cross_entropy``: it stands for torch's in the
modules whose forwards make one, for patched models and others alike, until the last patched one is unpatched or gone.
"""

import functools
import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

NAME = "CrossEntropyLoss"


class SameInstances(type):
    """Torch's are ours: who asks whether something is one gets the same answer."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, nn.CrossEntropyLoss)


class CrossEntropyLoss(nn.CrossEntropyLoss, metaclass=SameInstances):
    __doc__ = nn.CrossEntropyLoss.__doc__


@functools.cache
def traceable_nn() -> types.ModuleType:
    """``torch.nn`` with that class, for forwards that say ``nn.CrossEntropyLoss()``."""
    made = types.ModuleType(nn.__name__, nn.__doc__)
    vars(made).update(vars(nn) | {NAME: CrossEntropyLoss})
    return made


# by the id of a module's globals and a name in them: the globals, what stood there and stands there now, who needs it
NEEDED: dict[tuple[int, str], tuple[dict[str, Any], Any, Any, "weakref.WeakSet[Any]"]] = {}


def make_traceable(model: nn.Module, owner: Any) -> None:
    weakref.finalize(owner, put_back).atexit = False
    for where, name, ours in places(model):
        key = id(where), name
        if key not in NEEDED:
            NEEDED[key] = where, where[name], ours, weakref.WeakSet()
            where[name] = ours
        NEEDED[key][3].add(owner)


def make_plain_again(owner: Any) -> None:
    for *_, owners in NEEDED.values():
        owners.discard(owner)
    put_back()


def put_back() -> None:
    """What nobody needs any more."""
    for key, (where, before, ours, owners) in list(NEEDED.items()):
        if not owners:
            del NEEDED[key]
            if where.get(key[1]) is ours:  # and nobody's who came later
                where[key[1]] = before


def places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Globals of the model's methods that lead to torch's class, each with what is to stand there."""
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        for member in vars(kind).values():
            function = inspect.unwrap(member) if isinstance(member, types.FunctionType) else None
            if isinstance(function, types.FunctionType) and NAME in function.__code__.co_names:
                for name in function.__code__.co_names:
                    found = function.__globals__.get(name)
                    if found is nn.CrossEntropyLoss or found is CrossEntropyLoss:
                        yield function.__globals__, name, CrossEntropyLoss
                    elif found is nn or found is traceable_nn():
                        yield function.__globals__, name, traceable_nn()
