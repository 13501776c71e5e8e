"""The agreement of ranks on every call, and the messages of calls.

Every call begins with its agreement, a message of fixed size: hashes of the call, and the call as text. The kind of a
call is its fields without their numbers. From the kinds of the last calls, all ranks expect the same next kind.

A call of the expected kind sends its messages without waiting. The device compares the agreements, and makes results
nan where they differ; the host reads the comparison at the next call, and raises. A call of another kind waits for the
comparison, and raises at once where ranks differ. Other ranks, whose call was of the expected kind, have not waited and
send its messages. Hence the rank that raises first takes part in those messages, with nan, so that no rank waits for a
message, or receives one of another size.
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

LONGEST = 160  # most letters of a value in an error
BYTES, HASHES = 4096, 2  # bytes of a rank's agreement, and the number of hashes (8 bytes each) in front of its text
CONTEXT = 8  # number of last calls from which the next one's kind is expected
NUMBER = re.compile(r"\b\d+(\.\d+(e[+-]?\d+)?|e[+-]?\d+)\b")  # floats in fields; no message's size depends on them


class Message(NamedTuple):
    """A collective message of a call, after its agreement."""

    send: Callable[..., Any]
    numbers: int  # number of elements of this rank's tensor, or of its part of the result
    dtype: torch.dtype


class Agreement(NamedTuple):
    """This rank's agreement on a call."""

    kind: int  # hash of the call's fields without numbers
    call: int  # hash of all fields of the call
    message: Tensor  # [BYTES / 8] int64 on the device: both hashes, and the call as text
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
        self.followers: Cache[tuple[int, ...], int] = Cache(4096)  # by kinds of consecutive calls: the next call's kind
        self.messages: Cache[int, list[Message]] = Cache(4096)  # by kind: the messages of a forward pass
        self.sent: list[Message] | None = None  # messages of the present call, while its kind is new; else None
        self.agreements: Cache[str, Agreement] = Cache(64)  # by the call's text
        self.captured: list[Agreement] = []  # agreements that captured CUDA graphs send, kept alive
        self.zero_or_nan = torch.zeros((), dtype=torch.float32, device=device)
        self.host_zero_or_nan = torch.zeros((), dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
        # the last agreement until the host has read it: event after ``host_zero_or_nan`` is written, agreements
        # [ranks, ...], name of the layout
        self.unseen: tuple[Any, Tensor, str] | None = None
        self.error = ""  # set after calls of two kinds, which leave the ranks out of step

    def expected(self) -> int | None:
        """The expected kind of the next call: the kind that followed the same last calls; or the one that followed the
        same last call; or the last kind."""
        last = tuple(self.last)
        kind = self.followers.get(last) or self.followers.get(last[-1:])
        return kind or (last[-1] if last else None)

    def note(self, kind: int) -> None:
        """Adds a call of this kind to the history, before its messages."""
        last = tuple(self.last)
        if last:
            self.followers[last] = self.followers[last[-1:]] = kind
        self.last.append(kind)
        self.sent = None
        if self.messages.get(kind) is None:
            self.sent = self.messages[kind] = []

    def look(self) -> None:
        """Raises ValueError if the last call was not the same on all ranks. The host waits for that call's agreement
        only, which the device runs before the rest of the call."""
        if self.unseen is not None:
            (written, agreements, layout), self.unseen = self.unseen, None
            if written is not None:
                written.synchronize()
            if self.host_zero_or_nan.isnan():
                agreements = agreements.cpu()
                error = difference(agreements, layout)
                if (agreements[:, 0] != agreements[0, 0]).any():
                    self.error = error
                self.zero_or_nan.zero_()  # the calls had one kind and so equal messages: the next call can run
                raise ValueError(error)
        if self.error:
            raise ValueError(self.error)

    def stand_by(self, kind: int | None, group: Any) -> None:
        """Sends nan in all messages of a call of this kind, since other ranks send them."""
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
)  # by the group itself, since a later group may have the same name


def agrees_each_time(device: torch.device) -> bool:
    """True where the host waits for the agreement of every call: on a CPU, where waiting costs nothing."""
    return device.type == "cpu"


def is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def agree(fields: dict[str, str], group: Any, device: torch.device, layout: str) -> Tensor:
    """Compares ``fields`` over the ranks of ``group``. Returns [] fp32 on the device: 0, or nan where they differ.
    ValueError where the host knows of a difference, in this call or in the last one. ``layout``: "TokenParallel" or
    "VocabParallel", for errors."""
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
    """The agreements as a tensor on the host, which waits for the device."""
    return agreements.cpu()


def hash_of(fields: dict[str, str]) -> int:
    return int.from_bytes(hashlib.sha256(repr(sorted(fields.items())).encode()).digest()[:7], "big")


def without_numbers(value: str) -> str:
    return NUMBER.sub("number", value) if "." in value or "e-" in value or "e+" in value else value


def agreement_of(fields: dict[str, str], device: torch.device) -> Agreement:
    """This rank's agreement. If the text exceeds its size, long values are cut first, then the text."""
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
    """An error's text, equal on all ranks: the first field that differs, with its values on rank 0 and on the
    first rank that differs from it."""
    calls = agreements[:, 1].tolist()
    differing_rank = next(rank for rank, call in enumerate(calls) if call != calls[0])
    fields = [literal_eval(zlib.decompressobj().decompress(words_of(agreement)).decode()) for agreement in agreements]
    first, second = fields[0], fields[differing_rank]
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    # the function, and fields that only one of the ranks has, come first: other differences follow from them
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
    """The end of an error's text for ranks with different numbers of the head's rows: the ``rows=`` to pass."""
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
    """Ends the list of a forward pass's messages, before backward sends its own. ValueError if the last call was not
    the same on all ranks: a rank that has raised takes no part in the backward."""
    for device, ranks in RANKS.get(group, {}).items():
        ranks.sent = None
        if not is_captured(device):
            ranks.look()


def noted(send: Callable[..., Any], tensor: Tensor, group: Any) -> Callable[..., Any]:
    """``send``, after this message of ``tensor`` is added to those of the present call."""
    ranks = RANKS.get(group, {}).get(tensor.device)
    if ranks is not None and ranks.sent is not None and not is_captured(tensor.device):
        ranks.sent.append(Message(send, tensor.numel(), tensor.dtype))
    return send


def all_reduce(tensor: Tensor, group: Any, async_op: bool = False) -> Any:
    """``torch.distributed.all_reduce`` as a message of a call."""
    return noted(distributed.all_reduce, tensor, group)(tensor, group=group, async_op=async_op)


def all_gather(gathered: Tensor, tensor: Tensor, group: Any) -> None:
    noted(distributed.all_gather_into_tensor, tensor, group)(gathered, tensor, group=group)


def reduce_scatter(output: Tensor, tensor: Tensor, group: Any) -> Any:
    return noted(distributed.reduce_scatter_tensor, output, group)(output, tensor, group=group, async_op=True)
