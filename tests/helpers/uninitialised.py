"""Memory that nobody has written, made to show: what new memory holds is nan, or an integer that means nothing."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

MAKERS = [
    (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]  # fmt: skip


@contextmanager
def shown() -> Iterator[None]:
    """Whatever asks torch for new memory gets it filled."""
    with ExitStack() as stack:
        for place, name in MAKERS:
            stack.enter_context(mock.patch.object(place, name, filling(getattr(place, name))))
        yield


def filling(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        if not torch.compiler.is_compiling():
            fill(made)
        return made

    return filled


def fill(made: torch.Tensor) -> None:
    # not what a mode watches, to which a fill is one more operation; nor a compiler's tensors, which hold nothing
    if type(made) is not torch.Tensor or torch._C._len_torch_dispatch_stack():
        return
    if made.is_floating_point():
        made.detach().fill_(torch.nan)
    elif made.dtype != torch.bool and not made.is_complex():
        info = torch.iinfo(made.dtype)
        made.detach().fill_(info.min or info.max)
