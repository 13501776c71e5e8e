"""What a patched model must not do in silence: other numbers, or other gradients, than the plain model's."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import tokens

from chunked_head import patch_model

Pair = tuple[Any, Any]
IDS = tokens()["input_ids"]


def pair(make: Callable[[], Any] = tiny_models.llama, **options: Any) -> Pair:
    plain = make()
    return plain, patch_model(copy.deepcopy(plain), **options)


def times_two(x: Any) -> Any:
    return x.mul_(2)


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "to a copy": lambda x: times_two(x.to(torch.float32, copy=True)),
    "to a copy, by place": lambda x: times_two(x.to(torch.float32, False, True)),
    "to rows of a mask": lambda x: times_two(x[torch.arange(22).view(2, 11) % 3 == 0]),
    "to rows of a mask of bytes": lambda x: times_two(x[(torch.arange(22).view(2, 11) % 3 == 0).byte()]),
    "to rows by ids": lambda x: times_two(x[:, torch.tensor([2, 1])]),
    "to a cast to its own dtype": lambda x: times_two(x.to(torch.float32, False, False)),
}


@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_what_is_written(how: str) -> None:
    """Reaches the logits where the tensor's would, and only there."""
    found = []
    for model in pair(when="training"):
        logits = model(input_ids=IDS).logits
        written = WRITTEN[how](logits)
        found.append([getattr(x, "materialise", lambda x=x: x)() for x in (logits, written)])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
