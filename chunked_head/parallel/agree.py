"""Ranks that are about to exchange messages make sure that they mean the same."""

import contextlib
import hashlib
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed

from ..core.collectives import all_gather
from ..kernels.common.cache import Cache

Words = Mapping[str, str]  # what a call's ranks must have in common, by argument, written alike in every process
LONGEST = 160  # letters of a value in an error

# Kinds of calls that all ranks of a group are known to make alike. By the group itself: its name comes back, for other
# ranks too, once torch.distributed has been shut down and begun again.
# All ranks forget the same ones, since they ask for the same in the same order.
AGREED: WeakKeyDictionary[Any, Cache[int, bool]] = WeakKeyDictionary()


def talks_always(device: torch.device) -> bool:
    """Whether the host may look at what others have sent for free."""
    return device.type == "cpu"


def agree(words: Words, group: Any, device: torch.device, what: str) -> int:
    """Raises on every rank where ranks are about to do different things; a hash of ``words``.

    A number of each rank, whatever the call is: on the CPU before every call, elsewhere, where the host has to wait for
    it, before the first of its kind.
    """
    key = int.from_bytes(hashlib.sha256(repr(sorted(words.items())).encode()).digest()[:7], "big")
    agreed = AGREED.setdefault(group, Cache(4096))
    if talks_always(device) or agreed.get(key) is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"a call of {what} that ranks have not agreed on cannot be captured: run it once before")
        mine = torch.tensor([key], dtype=torch.int64, device=device)
        keys = mine.new_empty(distributed.get_world_size(group))
        all_gather(keys, mine, group)
        if len(set(keys.tolist())) > 1:
            every: list[Any] = [None] * len(keys)
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                distributed.all_gather_object(every, dict(words), group)
            raise difference(every, distributed.get_rank(group), what)
        agreed[key] = True
    return key


def difference(every: list[dict[str, str]], rank: int, what: str) -> ValueError:
    """Why this call fails on all ranks, in a sentence."""
    mine = every[rank]
    other = next(i for i, given in enumerate(every) if given != mine)
    name = next(name for name in {**mine, **every[other]} if mine.get(name) != every[other].get(name))
    here, there = (short(every[i].get(name, "not there")) for i in (rank, other))
    return ValueError(
        f"rank {rank} of {what} is about to make another call than rank {other}: {name} is {here} here and {there} "
        "there, and must be the same on all ranks"
    )


def short(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[:LONGEST]}..."
