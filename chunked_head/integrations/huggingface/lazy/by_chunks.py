"""Heads whose own forward computes their logits: some rows at a time, and again in backward."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BYTES_AT_ONCE = 256 << 20  # of logits where a head's own forward computes them
COPIES_OF_LOGITS = 4  # of a chunk in fp32: its cast, log-probabilities, gradient


def rows_at_once(columns: int) -> int:
    """Rows of a chunk."""
    return max(1, BYTES_AT_ONCE // (columns * torch.float32.itemsize * COPIES_OF_LOGITS))


def in_chunks(function: Callable[..., Any], rows: int, *tensors: Tensor) -> list[Any]:
    """``function(*chunks, before)`` of each chunk of ``rows`` rows of the tensors, computed again in backward.

    ``before``: a list of the chunk's own, the same at both times: what the first puts there the second finds.
    """
    run = functools.partial(checkpoint, use_reentrant=False) if torch.is_grad_enabled() else called
    return [run(function, *parts, []) for parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True)]


def called(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
