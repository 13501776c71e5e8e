"""The agreement of ranks on every call, and the messages of calls.

Every call begins with its agreement, a message of fixed size: hashes of the call and the call in words. A call has a
kind, its fields without their numbers; the last calls let all ranks expect the kind of the next one.

A call of the expected kind sends its messages at once. The device compares the agreements and turns the call into nan
where they differ; the host reads the result at the next call and raises. A call of another kind waits for the agreement
and raises at once where ranks differ. Ranks that have not waited then still send messages of the expected kind. So the
rank that raises first takes part in these, with nan: no rank receives a message of an unexpected size.
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

from ..core.memory import Cache
from .groups import ROWS, part_sizes

LONGEST = 160  # letters of a value in an error
BYTES, HASHES = 4096, 2  # of a rank's agreement: hashes of 8 bytes, and the call in words
CONTEXT = 8  # last calls from which the next one's kind is expected
NUMBER = re.compile(r"\b\d+(\.\d+(e[+-]?\d+)?|e[+-]?\d+)\b")  # numbers in fields, on which no message's size depends


class Message(NamedTuple):
    """A collective of a call after its agreement."""

    send: Callable[..., Any]
    numbers: int  # elements of this rank's tensor, or of its part of the result
    dtype: torch.dtype


class Agreement(NamedTuple):
    """This rank's agreement on a call."""

    kind: int  # a hash of the call without its numbers
    call: int  # a hash of all of it
    message: Tensor  # [BYTES / 8] int64 on the device: both, and the call in words
    written: Any  # event after the GPU's stream has written the message; None on a CPU

    def sent_from(self, stream: Any) -> Tensor:
        if self.written is not None:
            stream.wait_event(self.written)
            self.message.record_stream(stream)
        return self.message


class Ranks:
    """The history of a group's calls, equal on all its ranks, and the result of the last agreement."""

    def __init__(self, device: torch.device):
        self.last = deque[int](maxlen=CONTEXT)  # kinds of the last calls
        self.followers: Cache[tuple[int, ...], int] = Cache(4096)  # the kind that came after kinds of calls
        self.messages: Cache[int, list[Message]] = Cache(4096)  # by kind: those of a forward pass
        self.sent: list[Message] | None = None  # messages of the present call, while its kind is new; else None
        self.agreements: Cache[str, Agreement] = Cache(64)  # by call in words
        self.captured: list[Agreement] = []  # what recorded graphs send
        self.zero_or_nan = torch.zeros((), dtype=torch.float32, device=device)
        self.host_zero_or_nan = torch.zeros((), dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
        # the last agreement until the host has read it: event after ``host_zero_or_nan`` is written, agreements
        # [ranks, ...], name of the layout
        self.unseen: tuple[Any, Tensor, str] | None = None
        self.error = ""  # set after calls of two kinds, which leave the ranks out of step

    def expected(self) -> int | None:
        """The kind of the next call: the one that followed the same last calls, else the same last call, else that
        again."""
        last = tuple(self.last)
        kind = self.followers.get(last) or self.followers.get(last[-1:])
        return kind or (last[-1] if last else None)

    def note(self, kind: int) -> None:
        """Notes a call of this kind, ahead of its messages."""
        last = tuple(self.last)
        if last:
            self.followers[last] = self.followers[last[-1:]] = kind
        self.last.append(kind)
        self.sent = None
        if self.messages.get(kind) is None:
            self.sent = self.messages[kind] = []

    def look(self) -> None:
        """ValueError where the last call was not the same on all ranks. Waits for that call's agreement only: the
        device has finished it, or has the remaining work of that call queued behind it."""
        if self.unseen is not None:
            (written, agreements, layout), self.unseen = self.unseen, None
            if written is not None:
                written.synchronize()
            if self.host_zero_or_nan.isnan():
                agreements = agreements.cpu()
                error = difference(agreements, layout)
                if (agreements[:, 0] != agreements[0, 0]).any():
                    self.error = error
                self.zero_or_nan.zero_()  # calls of one kind have sent equal messages: ranks are in step
                raise ValueError(error)
        if self.error:
            raise ValueError(self.error)

    def stand_by(self, kind: int | None, group: Any) -> None:
        """Takes part in the messages of a call of this kind, with nan."""
        ranks, device = distributed.get_world_size(group), self.zero_or_nan.device
        for send, numbers, dtype in (kind and self.messages.get(kind)) or ():
            nan = torch.nan if dtype.is_floating_point else 0
            gathered, tensor = (torch.full((n,), nan, dtype=dtype, device=device) for n in (ranks * numbers, numbers))
            if send is distributed.all_reduce:
                send(tensor, group=group)
            else:
                send(
                    *((gathered, tensor) if send is distributed.all_gather_into_tensor else (tensor, gathered)),
                    group=group,
                )


RANKS: WeakKeyDictionary[Any, dict[torch.device, Ranks]] = (
    WeakKeyDictionary()
)  # by group: a later group may have the same name


def agrees_each_time(device: torch.device) -> bool:
    """True where the host waits for the agreement of every call: on a CPU, where waiting costs nothing."""
    return device.type == "cpu"


def is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def agree(fields: dict[str, str], group: Any, device: torch.device, layout: str) -> Tensor:
    """[] fp32 on the device: 0, or nan where ``fields`` differ between ranks. ``layout``: "TokenParallel" or
    "VocabParallel", for errors. ValueError where the host sees a difference, in this call or in the last one."""
    captured, ranks_by_device = is_captured(device), RANKS.setdefault(group, {})
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    words, ranks = repr(sorted(fields.items())), ranks_by_device.get(device)
    if captured and (ranks is None or ranks.agreements.get(words) is None):
        raise RuntimeError(f"a call of {layout} that ranks have not agreed on cannot be captured: run it once before")
    if ranks is None:
        ranks = ranks_by_device[device] = Ranks(device)
    if not captured:
        ranks.look()
    agreement = ranks.agreements.get_or_make(words, lambda: agreement_of(fields, device))
    message = agreement.message if captured else agreement.sent_from(stream)
    agreements = message.new_empty(distributed.get_world_size(group), len(message))
    distributed.all_gather_into_tensor(agreements.view(-1), message, group=group)
    expected = ranks.expected()
    if captured:
        ranks.captured.append(agreement)
    elif agrees_each_time(device) or agreement.kind != expected:
        host_agreements = waited_for(agreements)
        if (host_agreements[:, :HASHES] != host_agreements[0, :HASHES]).any():
            error = difference(host_agreements, layout)
            if expected in host_agreements[:, 0].tolist() and not agrees_each_time(device):
                ranks.error = error
                ranks.stand_by(expected, group)
            raise ValueError(error)
        ranks.note(agreement.kind)
        return ranks.zero_or_nan
    ranks.zero_or_nan.masked_fill_((agreements[:, :HASHES] != message[:HASHES]).any(), torch.nan)
    if not captured:
        ranks.host_zero_or_nan.copy_(ranks.zero_or_nan, non_blocking=True)
        ranks.unseen = None if stream is None else stream.record_event(), agreements, layout
        ranks.note(agreement.kind)
    return ranks.zero_or_nan


def waited_for(agreements: Tensor) -> Tensor:
    """Agreements on the host, which waits for them."""
    return agreements.cpu()


def hash_of(fields: dict[str, str]) -> int:
    return int.from_bytes(hashlib.sha256(repr(sorted(fields.items())).encode()).digest()[:7], "big")


def without_numbers(value: str) -> str:
    return NUMBER.sub("number", value) if "." in value or "e-" in value or "e+" in value else value


def agreement_of(fields: dict[str, str], device: torch.device) -> Agreement:
    """This rank's agreement. Words that exceed its size are cut: first long values, in the end all."""
    kind, call = hash_of({name: without_numbers(value) for name, value in fields.items()}), hash_of(fields)
    words, most = b"", LONGEST
    while not words or len(words) > BYTES - 8 * HASHES:
        shown = {name: value if len(value) <= most else value[:most] + "..." for name, value in fields.items()}
        words, most = zlib.compress(repr(shown).encode()), most // 2
        if not most:
            words = zlib.compress(b"{}")
    buffer = torch.zeros(BYTES, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    buffer[8 * HASHES :][: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    message = buffer.view(torch.int64)
    message[0], message[1] = kind, call
    message = message.to(device, non_blocking=True)
    return Agreement(kind, call, message, torch.cuda.current_stream(device).record_event() if message.is_cuda else None)


def difference(agreements: Tensor, layout: str) -> str:
    """Text of an error, equal on all ranks: the first field that differs, with its values on rank 0 and another
    rank."""
    calls = agreements[:, 1].tolist()
    differing_rank = next(rank for rank, call in enumerate(calls) if call != calls[0])
    fields = [literal_eval(zlib.decompressobj().decompress(words_of(agreement)).decode()) for agreement in agreements]
    first, second = fields[0], fields[differing_rank]
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    # first the function and fields that a rank lacks: other differences follow from these
    names.sort(key=lambda name: name != "function" and name in first and name in second)
    explanation = "what differs is too long to tell"
    if names:
        first_value, differing_value = (
            fields_of_rank.get(names[0], "missing")[:LONGEST] for fields_of_rank in (first, second)
        )
        explanation = f"{names[0]} is {first_value} on rank 0 and {differing_value} on rank {differing_rank}"
    remedy = split_remedy(fields) if names[:1] == [ROWS] else ""
    return f"ranks of {layout} make different calls: {explanation}; it must be the same on all ranks{remedy}"


def split_remedy(calls: list[dict[str, str]]) -> str:
    """The end of an error for ranks with different numbers of rows: the argument that tells them each rank's number."""
    if not all(fields.get(ROWS, "").endswith("]") for fields in calls):
        return ""
    rows = [json.loads(fields[ROWS])[rank] for rank, fields in enumerate(calls)]
    is_even = part_sizes(sum(rows), len(rows)) == tuple(rows)
    return f"; ranks hold {rows} rows: pass " + (
        f"vocab_size={sum(rows)}" if is_even else f"VocabParallel(rows={rows})"
    )


def words_of(message: Tensor) -> bytes:
    return bytes(message[HASHES:].contiguous().view(torch.uint8).tolist())


def begin_backward(group: Any) -> None:
    """Ends the noting of a forward pass's messages, ahead of those of its backward. ValueError where the last call was
    not the same on all ranks: a rank that has raised takes no part in the backward."""
    for device, ranks in RANKS.get(group, {}).items():
        ranks.sent = None
        if not is_captured(device):
            ranks.look()


def noted(send: Callable[..., Any], tensor: Tensor, group: Any) -> Callable[..., Any]:
    """``send``, noted as a message of the present call."""
    ranks = RANKS.get(group, {}).get(tensor.device)
    if ranks is not None and ranks.sent is not None and not is_captured(tensor.device):
        ranks.sent.append(Message(send, tensor.numel(), tensor.dtype))
    return send


def all_reduce(tensor: Tensor, group: Any, async_op: bool = False) -> Any:
    """``torch.distributed``'s, as a message of a call; so are those below."""
    return noted(distributed.all_reduce, tensor, group)(tensor, group=group, async_op=async_op)


def all_gather(gathered: Tensor, tensor: Tensor, group: Any) -> None:
    noted(distributed.all_gather_into_tensor, tensor, group)(gathered, tensor, group=group)


def reduce_scatter(output: Tensor, tensor: Tensor, group: Any) -> Any:
    return noted(distributed.reduce_scatter_tensor, output, group)(output, tensor, group=group, async_op=True)
