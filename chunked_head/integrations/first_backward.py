"""Where the gradients of a patched model's first backward come from: its own loss, or one made outside of it."""

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from .lazy_logits import Lazy
from .traced_logits import TracedLogits

# what is waited for, and whether losses of the model's own are in it; beside what was agreed on, which is copied and
# pickled with its model
WAITING: "weakref.WeakKeyDictionary[Any, tuple[RemovableHandle, bool]]" = weakref.WeakKeyDictionary()


def await_backward(agreed: Any, own: Sequence[Tensor], output: Any) -> None:
    """Has ``agreed.had_backward(...)`` called once, when a backward has come to what a forward returned: with whether
    it came to the model's ``own`` losses. A forward that made such losses is not forgotten for one that made none."""
    own = [loss for loss in own if loss.requires_grad]
    others = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    if not (own or others) or (not own and agreed in WAITING and WAITING[agreed][1]):
        return
    forget(agreed)

    def came(grads: Sequence[Tensor | None]) -> None:
        forget(agreed)
        agreed.had_backward(any(grad is not None for grad in grads[: len(own)]))

    handle = register_multi_grad_hook([*own, *others], came)
    WAITING[agreed] = handle, bool(own)


def forget(agreed: Any) -> None:
    waiting = WAITING.pop(agreed, None)
    if waiting is not None:
        waiting[0].remove()


def tensors_of(output: Any) -> Iterator[Tensor]:
    """The tensors of a model's output; of lazy logits the hidden states, which their gradient comes to."""
    if isinstance(output, Lazy):
        yield output.origin._virtual.hidden
    elif isinstance(output, TracedLogits):
        yield output._virtual.hidden
    elif isinstance(output, Tensor):
        yield output
    elif isinstance(output, (dict, tuple, list)):
        for part in output.values() if isinstance(output, dict) else output:
            yield from tensors_of(part)
    elif dataclasses.is_dataclass(output):
        yield from tensors_of(list(vars(output).values()))
