"""Ranks that are about to exchange messages make sure, once for each kind of call, that they mean the same."""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed

from .collectives import all_gather


@contextlib.contextmanager
def ids_in_range_everywhere(group: Any) -> Iterator[None]:
    """An IndexError or ValueError of one rank on all: on the CPU, where fields are looked at before they are used."""
    own: IndexError | ValueError | None = None
    try:
        yield
    except (IndexError, ValueError) as error:
        own = error
    failed = torch.tensor([isinstance(own, IndexError), isinstance(own, ValueError)], dtype=torch.float32)
    distributed.all_reduce(failed, group=group)
    if own is not None:
        raise own
    of_ids, of_fields = failed.tolist()
    if of_ids:
        raise IndexError("an id is out of range on another rank of TokenParallel, where the error says which")
    if of_fields:
        raise ValueError("a field is wrong on another rank of TokenParallel, where the error says which")


# Kinds of calls that all ranks of a group are known to make alike. By the group itself: its name comes back, for other
# ranks too, once torch.distributed has been shut down and begun again.
AGREED: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


def agree(told: str, group: Any, device: torch.device, what: str) -> int:
    """Raises on every rank where ranks are about to do different things: one message for each new kind of call.

    ``told`` is what they must have in common, spelt alike in every process. Returns its hash.
    """
    key = int.from_bytes(hashlib.sha256(told.encode()).digest()[:7], "big")
    agreed = AGREED.setdefault(group, set())
    if key in agreed:
        return key
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"a call of {what} that ranks have not agreed on cannot be captured: run it once before")
    mine = torch.tensor([key], dtype=torch.int64, device=device)
    gathered = mine.new_empty(distributed.get_world_size(group))
    all_gather(gathered, mine, group)
    others = [rank for rank, given in enumerate(gathered.tolist()) if given != key]
    if others:
        raise ValueError(
            f"rank {distributed.get_rank(group)} of {what} is about to make another call than rank {others[0]}: sizes, "
            "dtypes, losses, metrics and options must be the same on all ranks (of a weight whose rows are divided "
            f"unevenly, VocabParallel(rows=[...]) says how); here they are {told}"
        )
    agreed.add(key)
    return key
