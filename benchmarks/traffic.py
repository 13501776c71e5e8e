"""Messages of ranks in a call, counted."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {"allreduce": "all-reduce", "allgather": "all-gather", "reducescatter": "reduce-scatter"}


class Message(NamedTuple):
    """A collective: its kind, and its bytes (all ranks' pieces of an all-gather)."""

    kind: str
    bytes: int


class Traffic(TorchDispatchMode):
    """Record of every collective that this process takes part in within a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes again as what it is made of
        found = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        if "c10d" in space:
            self.note(name.replace("_", ""), args, found)
        return found

    def note(self, name: str, args: Any, found: Any) -> None:
        if name in ("waittensor", "wraptensorautograd", "barrier"):
            return
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), name)
        # plain ones come with what they write, functional ones return it
        tensors = _tensors(args) or _tensors([found])
        self.messages.append(Message(kind, max(tensor.nbytes for tensor in tensors)))


def _tensors(values: Any) -> list[Tensor]:
    found = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def count(step: Callable[[], Any]) -> list[Message]:
    """The messages of one step."""
    with Traffic() as traffic:
        step()
    return traffic.messages
