"""The agreement of ranks on every call, in a message of one size ahead of the call's others; and these others.

A rank waits for that message where its call is of another kind than the last calls let all ranks expect. Where it is of
the expected kind it sends the kind's messages at once: the device looks at the agreement and turns the call into nan,
and the host looks at the next call. A rank that has waited and found a difference stands by those that have not: it
sends the expected kind's messages too, of nan, so that no rank gets a message of a size that it does not expect.
"""

import hashlib
import json
import re
import zlib
from ast import literal_eval
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from ..kernels.common.cache import Cache
from .groups import ROWS, part_sizes

LONGEST = 160  # letters of a value in an error
BYTES, HASHES = 4096, 2  # of a rank's agreement: hashes of 8 bytes, and the call in words
CONTEXT = 8  # calls that tell the next one's kind
NUMBER = re.compile(r"\b\d+(\.\d+(e[+-]?\d+)?|e[+-]?\d+)\b")  # which no message's size depends on


class Message(NamedTuple):
    """A collective of a call after its agreement."""

    send: Callable[..., Any]
    numbers: int  # of this rank's tensor, or of its part of the result
    dtype: torch.dtype


class Own(NamedTuple):
    """This rank's agreement on a call."""

    kind: int  # a hash of the call without its numbers
    call: int  # a hash of all of it
    message: Tensor  # [BYTES / 8] int64 on the device: both, and the call in words
    written: Any  # an event on the GPU's stream that has written it

    def sent_from(self, stream: Any) -> Tensor:
        if self.written is not None:
            stream.wait_event(self.written)
            self.message.record_stream(stream)
        return self.message


class Ranks:
    """What the ranks of a group know of each other's calls: the same on all of them."""

    def __init__(self, device: torch.device):
        self.last = deque[int](maxlen=CONTEXT)  # kinds of the last calls
        self.followers: Cache[tuple[int, ...], int] = Cache(4096)  # the kind that came after kinds of calls
        self.messages: Cache[int, list[Message]] = Cache(4096)  # by kind: those of a forward pass
        self.sent: list[Message] | None = None  # of the present call, where they are to be noted
        self.agreements: Cache[str, Own] = Cache(64)  # by call in words
        self.captured: list[Own] = []  # what recorded graphs send
        self.zero_or_nan = torch.zeros((), dtype=torch.float32, device=device)
        self.seen = torch.zeros((), dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
        # the last call's, unless the host has looked: an event after ``seen`` is written, agreements [ranks, ...], name
        self.unseen: tuple[Any, Tensor, str] | None = None
        self.error = ""  # of calls of two kinds, after which ranks are not in step any more

    def expected(self) -> int | None:
        """The kind of the next call: what came last after the same calls, or after the same one, or the same again."""
        last = tuple(self.last)
        found = self.followers.get(last) or self.followers.get(last[-1:])
        return found or (last[-1] if last else None)

    def note(self, kind: int) -> None:
        """Notes a call, whose messages follow."""
        last = tuple(self.last)
        if last:
            self.followers[last] = self.followers[last[-1:]] = kind
        self.last.append(kind)
        self.sent = None
        if self.messages.get(kind) is None:
            self.sent = self.messages[kind] = []

    def look(self) -> None:
        """Raises where the last call was not the same on all ranks. Waits for its first message alone, which the device
        has left behind or has the rest of that call to run after."""
        if self.unseen is not None:
            (written, every, what), self.unseen = self.unseen, None
            if written is not None:
                written.synchronize()
            if self.seen.isnan():
                every = every.cpu()
                error = difference(every, what)
                if (every[:, 0] != every[0, 0]).any():
                    self.error = error
                self.zero_or_nan.zero_()  # of one kind the ranks' messages went on in order
                raise ValueError(error)
        if self.error:
            raise ValueError(self.error)

    def stand_by(self, kind: int | None, group: Any) -> None:
        """Sends the messages of a call of this kind, of nan."""
        ranks, device = distributed.get_world_size(group), self.zero_or_nan.device
        for send, numbers, dtype in (kind and self.messages.get(kind)) or ():
            nan = torch.nan if dtype.is_floating_point else 0
            every, own = (torch.full((n,), nan, dtype=dtype, device=device) for n in (ranks * numbers, numbers))
            if send is distributed.all_reduce:
                send(own, group=group)
            else:
                send(*((every, own) if send is distributed.all_gather_into_tensor else (own, every)), group=group)


RANKS: WeakKeyDictionary[Any, dict[torch.device, Ranks]] = WeakKeyDictionary()  # by group: names may come again


def agrees_each_time(device: torch.device) -> bool:
    """True where ranks wait for each other's agreement on every call, which costs a host nothing more."""
    return device.type == "cpu"


def is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def agree(fields: dict[str, str], group: Any, device: torch.device, what: str) -> Tensor:
    """[] 0, or nan where ``fields`` differ between ranks. Raises where the host sees that, of the last call too."""
    captured, known = is_captured(device), RANKS.setdefault(group, {})
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    words, ranks = repr(sorted(fields.items())), known.get(device)
    if captured and (ranks is None or ranks.agreements.get(words) is None):
        raise RuntimeError(f"a call of {what} that ranks have not agreed on cannot be captured: run it once before")
    if ranks is None:
        ranks = known[device] = Ranks(device)
    if not captured:
        ranks.look()
    own = ranks.agreements.made(words, lambda: agreement_of(fields, device))
    message = own.message if captured else own.sent_from(stream)
    every = message.new_empty(distributed.get_world_size(group), len(message))
    distributed.all_gather_into_tensor(every.view(-1), message, group=group)
    expected = ranks.expected()
    if captured:
        ranks.captured.append(own)
    elif agrees_each_time(device) or own.kind != expected:
        there = waited_for(every)
        if (there[:, :HASHES] != there[0, :HASHES]).any():
            error = difference(there, what)
            if expected in there[:, 0].tolist() and not agrees_each_time(device):
                ranks.error = error
                ranks.stand_by(expected, group)
            raise ValueError(error)
        ranks.note(own.kind)
        return ranks.zero_or_nan
    ranks.zero_or_nan.masked_fill_((every[:, :HASHES] != message[:HASHES]).any(), torch.nan)
    if not captured:
        ranks.seen.copy_(ranks.zero_or_nan, non_blocking=True)
        ranks.unseen = None if stream is None else stream.record_event(), every, what
        ranks.note(own.kind)
    return ranks.zero_or_nan


def waited_for(every: Tensor) -> Tensor:
    """Agreements that the host has."""
    return every.cpu()


def hash_of(fields: dict[str, str]) -> int:
    return int.from_bytes(hashlib.sha256(repr(sorted(fields.items())).encode()).digest()[:7], "big")


def without_numbers(value: str) -> str:
    return NUMBER.sub("number", value) if "." in value or "e-" in value or "e+" in value else value


def agreement_of(fields: dict[str, str], device: torch.device) -> Own:
    """This rank's agreement, with the fields in words, shorter ones where they are too many."""
    kind, call = hash_of({name: without_numbers(value) for name, value in fields.items()}), hash_of(fields)
    words, most = b"", LONGEST
    while not words or len(words) > BYTES - 8 * HASHES:
        shown = {name: value if len(value) <= most else value[:most] + "..." for name, value in fields.items()}
        words, most = zlib.compress(repr(shown).encode()), most // 2
        if not most:
            words = zlib.compress(b"{}")
    made = torch.zeros(BYTES, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    made[8 * HASHES :][: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    message = made.view(torch.int64)
    message[0], message[1] = kind, call
    message = message.to(device, non_blocking=True)
    return Own(kind, call, message, torch.cuda.current_stream(device).record_event() if message.is_cuda else None)


def difference(every: Tensor, what: str) -> str:
    """An error, equal on all ranks: the first field that differs, with its values on rank 0 and another."""
    calls = every[:, 1].tolist()
    other = next(rank for rank, call in enumerate(calls) if call != calls[0])
    fields = [literal_eval(zlib.decompressobj().decompress(words_of(own)).decode()) for own in every]
    first, second = fields[0], fields[other]
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    # what follows from the function, a loss or a metric comes later
    names.sort(key=lambda name: name != "function" and name in first and name in second)
    told = "what differs is too long to tell"
    if names:
        here, there = (given.get(names[0], "missing")[:LONGEST] for given in (first, second))
        told = f"{names[0]} is {here} on rank 0 and {there} on rank {other}"
    remedy = split_remedy(fields) if names[:1] == [ROWS] else ""
    return f"ranks of {what} make different calls: {told}; it must be the same on all ranks{remedy}"


def split_remedy(calls: list[dict[str, str]]) -> str:
    """What tells ranks how many rows each holds, for the end of an error; each believes that all hold as many as it."""
    if not all(fields.get(ROWS, "").endswith("]") for fields in calls):
        return ""
    rows = [json.loads(fields[ROWS])[rank] for rank, fields in enumerate(calls)]
    right = part_sizes(sum(rows), len(rows)) == tuple(rows)
    return f"; ranks hold {rows} rows: pass " + (f"vocab_size={sum(rows)}" if right else f"VocabParallel(rows={rows})")


def words_of(message: Tensor) -> bytes:
    return bytes(message[HASHES:].contiguous().view(torch.uint8).tolist())


def begin_backward(group: Any) -> None:
    """Ends the messages of a forward pass, ahead of a backward's own. Raises where ranks have made other calls: those
    that have waited for the agreement do not take part."""
    for device, ranks in RANKS.get(group, {}).items():
        ranks.sent = None
        if not is_captured(device):
            ranks.look()


def noted(send: Callable[..., Any], own: Tensor, group: Any) -> Callable[..., Any]:
    ranks = RANKS.get(group, {}).get(own.device)
    if ranks is not None and ranks.sent is not None and not is_captured(own.device):
        ranks.sent.append(Message(send, own.numel(), own.dtype))
    return send


def all_reduce(tensor: Tensor, group: Any, async_op: bool = False) -> Any:
    """``torch.distributed``'s, as a message of a call; so are those below."""
    return noted(distributed.all_reduce, tensor, group)(tensor, group=group, async_op=async_op)


def all_gather(every: Tensor, own: Tensor, group: Any) -> None:
    noted(distributed.all_gather_into_tensor, own, group)(every, own, group=group)


def reduce_scatter(own: Tensor, every: Tensor, group: Any) -> Any:
    return noted(distributed.reduce_scatter_tensor, own, group)(own, every, group=group, async_op=True)
