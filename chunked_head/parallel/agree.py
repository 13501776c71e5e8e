"""Ranks that are about to exchange messages make sure that they mean the same."""

import contextlib
import dataclasses
import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed

from ..core.collectives import all_gather
from ..kernels.common.cache import Cache

LONGEST = 160  # letters of a value in an error

# Kinds of calls that all ranks of a group are known to make alike. By the group itself: its name comes back, for other
# ranks too, once torch.distributed has been shut down and begun again.
# All ranks forget the same ones, since they ask for the same in the same order.
AGREED: WeakKeyDictionary[Any, Cache[int, bool]] = WeakKeyDictionary()


def described(record: Any, prefix: str = "") -> dict[str, str]:
    """The fields of a dataclass or NamedTuple, and of those in it."""
    found: dict[str, str] = {}
    for name in getattr(record, "_fields", None) or [field.name for field in dataclasses.fields(record)]:
        value = getattr(record, name)
        if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
            found |= described(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = str(value)
    return found


def talks_always(device: torch.device) -> bool:
    """Whether the host may look at what others have sent for free."""
    return device.type == "cpu"


def agree(fields: dict[str, str], group: Any, device: torch.device, what: str) -> int:
    """Raises on every rank where ``fields``, which must be written alike in every process, differ; their hash.

    A number of each rank, whatever the call is: on the CPU before every call, elsewhere, where the host has to wait for
    it, before the first of its kind.
    """
    key = int.from_bytes(hashlib.sha256(repr(sorted(fields.items())).encode()).digest()[:7], "big")
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
                distributed.all_gather_object(every, fields, group)
            raise difference(every, what)
        agreed[key] = True
    return key


def difference(every: list[dict[str, str]], what: str) -> ValueError:
    """The same on all ranks: the first field that differs, as the first two ranks have it that it differs on."""
    first = every[0]
    other = next(rank for rank, given in enumerate(every) if given != first)
    name = next(name for name in {**first, **every[other]} if first.get(name) != every[other].get(name))
    here, there = (short(every[rank].get(name, "missing")) for rank in (0, other))
    return ValueError(
        f"ranks of {what} make different calls: {name} is {here} on rank 0 and {there} on rank {other}; it must be the "
        "same on all ranks"
    )


def short(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[:LONGEST]}..."
