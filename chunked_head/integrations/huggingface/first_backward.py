"""Where the gradients of a patched model's first backward come from: its own loss, or one made outside of it."""

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .lazy.lazy_logits import Lazy
from .lazy.traced_logits import TracedLogits

# hooks, and whether losses of the model's own have some; beside what was agreed on, which is copied with its model
WAITING: "weakref.WeakKeyDictionary[Any, tuple[list[RemovableHandle], bool]]" = weakref.WeakKeyDictionary()


def await_backward(agreed: Any, own: Sequence[Tensor], output: Any) -> None:
    """Has ``agreed.had_backward(...)`` called once, when a backward has come to what a forward returned: with whether
    it came to the model's ``own`` losses, whose gradients reach the hidden states with those of all others. A forward
    that made such losses is not forgotten for one that made none."""
    others = tensors_of(output, lazy_only=bool(own))
    if not own and agreed in WAITING and WAITING[agreed][1]:
        return
    forget(agreed)
    waiting = weakref.ref(agreed)  # and nothing of the graph that the hooks are part of

    def came(to_own: bool) -> None:
        agreed = waiting()
        if agreed is not None:
            forget(agreed)
            agreed.had_backward(to_own)

    handles = [loss.register_hook(lambda grad: came(True)) for loss in own if loss.requires_grad]
    handles += [other.register_hook(lambda grad: came(False)) for other in others if other.requires_grad]
    if handles:
        WAITING[agreed] = handles, bool(own)


def forget(agreed: Any) -> None:
    for handle in WAITING.pop(agreed, ((), False))[0]:
        handle.remove()


def tensors_of(output: Any, lazy_only: bool) -> Iterator[Tensor]:
    """The tensors of a model's output; of lazy logits the hidden states, which their gradient comes to."""
    if isinstance(output, Lazy):
        yield output.origin._virtual.hidden
    elif isinstance(output, TracedLogits):
        yield output._virtual.hidden
    elif isinstance(output, Tensor) and not lazy_only:
        yield output
    elif isinstance(output, (dict, tuple, list)):
        for part in output.values() if isinstance(output, dict) else output:
            yield from tensors_of(part, lazy_only)
    elif dataclasses.is_dataclass(output):
        yield from tensors_of(list(vars(output).values()), lazy_only)
