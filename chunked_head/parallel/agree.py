"""Ranks that are about to exchange messages make sure that they mean the same, and that none of them has refused."""

import contextlib
import contextvars
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from ..core.groups import TokenParallel, VocabParallel
from .collectives import all_gather

Words = Mapping[str, str]  # what a call's ranks must have in common, by argument, written alike in every process
REFUSED = -1  # in the place of a call's hash, from a rank that has raised
RAISED: dict[str, type[Exception]] = {kind.__name__: kind for kind in (TypeError, ValueError, IndexError)}
LONGEST = 160  # letters of a value in an error

# Kinds of calls that all ranks of a group are known to make alike. By the group itself: its name comes back, for other
# ranks too, once torch.distributed has been shut down and begun again.
AGREED: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


class Refusal(NamedTuple):
    """What a rank has raised."""

    kind: str
    message: str


class Talk:
    """Which ranks a call has still to agree with before it may send them anything else."""

    def __init__(self, parallel: Any):
        self.parallel, self.done = parallel, 0
        self.failed = list[Any]()  # groups of which every rank knows that the call fails

    def ahead(self) -> list[Any]:
        """Their groups, in the order of every rank's agreements."""
        tokens = self.parallel.tokens if isinstance(self.parallel, VocabParallel) else self.parallel
        groups = [tokens.group] if isinstance(tokens, TokenParallel) else []
        if isinstance(self.parallel, VocabParallel):
            # where tokens are gathered, their number and fields come before anything else
            groups = [self.parallel.group] * self.parallel.sequence_sharded + groups + [self.parallel.group]
        return groups[self.done :]


TALK: contextvars.ContextVar[Talk | None] = contextvars.ContextVar("talk", default=None)


@contextlib.contextmanager
def raising_together(parallel: Any, operands: Sequence[Any]) -> Iterator[None]:
    """Around a call of a public function: what one rank raises is told to those that wait for its first message.

    On the CPU alone. Elsewhere ranks wait for nothing where a call is of a kind that they know, and hear of nothing.
    """
    talk = Talk(parallel)
    token = TALK.set(talk)
    try:
        yield
    except Exception as error:
        ranks_wait = distributed.is_available() and distributed.is_initialized()
        if ranks_wait and all(talks_always(operand.device) for operand in operands if isinstance(operand, Tensor)):
            for group in talk.ahead():
                if group not in talk.failed:
                    compare(REFUSED, Refusal(type(error).__name__, str(error)), group, torch.device("cpu"))
                    talk.failed.append(group)
        raise
    finally:
        TALK.reset(token)


def shared_by(parallel: Any) -> None:
    """The call in progress is that of these ranks: of DTensors it takes a look to know."""
    talk = TALK.get()
    if talk is not None:
        talk.parallel = parallel


def talks_always(device: torch.device) -> bool:
    """Whether the host may look at what others have sent for free."""
    return device.type == "cpu"


def agree(told: Words, group: Any, device: torch.device, what: str) -> int:
    """Raises on every rank where ranks are about to do different things, or one of them has raised; a hash of ``told``.

    A number of each rank, whatever the call is: on the CPU before every call, elsewhere, where the host has to wait for
    it, before the first of its kind.
    """
    key = int.from_bytes(hashlib.sha256(repr(sorted(told.items())).encode()).digest()[:7], "big")
    agreed, talk = AGREED.setdefault(group, set()), TALK.get()
    if talks_always(device) or key not in agreed:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"a call of {what} that ranks have not agreed on cannot be captured: run it once before")
        every = compare(key, told, group, device)
        if every is not None:
            if talk is not None:
                talk.failed.append(group)
            raise difference(every, distributed.get_rank(group), what)
        agreed.add(key)
    if talk is not None:
        talk.done += 1
    return key


def compare(key: int, told: Words | Refusal, group: Any, device: torch.device) -> list[Any] | None:
    """What every rank tells, where they do not all mean the same."""
    mine = torch.tensor([key], dtype=torch.int64, device=device)
    gathered = mine.new_empty(distributed.get_world_size(group))
    all_gather(gathered, mine, group)
    if REFUSED not in (keys := gathered.tolist()) and len(set(keys)) == 1:
        return None
    every: list[Any] = [None] * len(keys)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        distributed.all_gather_object(every, told if isinstance(told, Refusal) else dict(told), group)
    return every


def difference(every: list[Any], rank: int, what: str) -> Exception:
    """Why this call fails on all ranks, in a sentence."""
    for other, given in enumerate(every):
        if isinstance(given, Refusal):
            kind = RAISED.get(given.kind, RuntimeError)
            return kind(f"rank {other} of {what} has refused this call: {given.message}")
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
