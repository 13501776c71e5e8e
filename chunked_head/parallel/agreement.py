"""The check that all ranks make the same call, and the messages of calls.

Every call begins with a message of fixed size, its agreement: hashes of the call's fields, and the fields as text. The
kind of a call is its fields without their numbers. From the kinds of the last calls, all ranks expect the same kind of
the next call.

A call of the expected kind sends its messages without waiting. The device compares the ranks' agreements, and makes
results nan if they differ. The host reads the comparison at the next call, and raises then. A call of another kind
waits for the comparison, and raises at once if ranks differ. Other ranks, whose call is of the expected kind, do not
wait and send its messages. So the rank that raises first takes part in those messages, with nan: no rank waits for a
message that never comes, or receives a message of another size.
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

MAX_VALUE_LETTERS = 160  # of a field's value in an error
MESSAGE_BYTES = 4096  # of a rank's agreement
NUM_HASHES = 2  # hashes of 8 bytes in front of an agreement's text
HISTORY_LENGTH = 8  # number of last calls from which the kind of the next call is expected
# floats in fields, on which no message's size depends
NUMBER_PATTERN = re.compile(r"\b\d+(\.\d+(e[+-]?\d+)?|e[+-]?\d+)\b")


class Message(NamedTuple):
    """A message of a call after its agreement."""

    collective: Callable[..., Any]  # the function of torch.distributed
    num_elements: int  # of this rank's tensor, or of its part of the result
    dtype: torch.dtype


class Agreement(NamedTuple):
    """This rank's first message of a call, which says what the call is."""

    kind_hash: int  # hash of the call's fields without numbers
    message: Tensor  # [MESSAGE_BYTES / 8] int64 on the device: hashes of kind and call, and the fields as text
    written_event: Any  # event after the GPU's stream has written the message; None on a CPU

    def message_on(self, stream: Any) -> Tensor:
        """The message, for a send on ``stream`` of the GPU (None on a CPU), which waits until it is written."""
        if self.written_event is not None:
            stream.wait_event(self.written_event)
            self.message.record_stream(stream)
        return self.message


class GroupHistory:
    """The last calls of a process group, equal on all its ranks, and the result of the last comparison."""

    def __init__(self, device: torch.device):
        self.recent_kinds = deque[int](maxlen=HISTORY_LENGTH)  # hashes of the kinds of the last calls
        self.next_kinds: Cache[tuple[int, ...], int] = Cache(4096)  # by kinds of consecutive calls
        self.messages_by_kind: Cache[int, list[Message]] = Cache(4096)  # messages of a forward pass
        self.recorded_messages: list[Message] | None = None  # of the present call, if its kind is new; else None
        self.agreements: Cache[str, Agreement] = Cache(64)  # by the call's text
        self.captured_agreements: list[Agreement] = []  # agreements that captured CUDA graphs send, kept alive
        self.zero_or_nan = torch.zeros((), dtype=torch.float32, device=device)
        self.host_zero_or_nan = torch.zeros((), dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
        # the last comparison, until the host has read it: the event after ``host_zero_or_nan`` is written, agreements
        # [ranks, ...], name of the layout
        self.unread_comparison: tuple[Any, Tensor, str] | None = None
        self.error = ""  # set after calls of two kinds, which leave the ranks out of step

    def expected_kind(self) -> int | None:
        """The kind that the next call is expected to have: the kind that came next when ``recent_kinds`` were last the
        same; else the kind that came next after the last call of the present last kind; else that last kind. None
        before the first call."""
        recent_kinds = tuple(self.recent_kinds)
        next_kind = self.next_kinds.get(recent_kinds) or self.next_kinds.get(recent_kinds[-1:])
        return next_kind or (recent_kinds[-1] if recent_kinds else None)

    def add_call(self, kind_hash: int) -> None:
        """Adds a call of a kind to the history, before its messages."""
        recent_kinds = tuple(self.recent_kinds)
        if recent_kinds:
            self.next_kinds[recent_kinds] = self.next_kinds[recent_kinds[-1:]] = kind_hash
        self.recent_kinds.append(kind_hash)
        self.recorded_messages = None
        if self.messages_by_kind.get(kind_hash) is None:
            self.recorded_messages = self.messages_by_kind[kind_hash] = []

    def check_last_call(self) -> None:
        """ValueError if the last call was not the same on all ranks. The host waits for the comparison only, which the
        device runs before the rest of that call."""
        if self.unread_comparison is not None:
            (written_event, agreements, layout), self.unread_comparison = self.unread_comparison, None
            if written_event is not None:
                written_event.synchronize()
            if self.host_zero_or_nan.isnan():
                agreements = agreements.cpu()
                error = difference_in_words(agreements, layout)
                if (agreements[:, 0] != agreements[0, 0]).any():
                    self.error = error
                self.zero_or_nan.zero_()  # the calls had one kind and so equal messages: the next call can run
                raise ValueError(error)
        if self.error:
            raise ValueError(self.error)

    def send_nan(self, kind_hash: int | None, group: Any) -> None:
        """Sends nan in all messages of a call of a kind, since other ranks send the messages of such a call."""
        num_ranks, device = distributed.get_world_size(group), self.zero_or_nan.device
        for collective, num_elements, dtype in (kind_hash and self.messages_by_kind.get(kind_hash)) or ():
            fill_value = torch.nan if dtype.is_floating_point else 0
            gathered_tensor, tensor = (
                torch.full((size,), fill_value, dtype=dtype, device=device)
                for size in (num_ranks * num_elements, num_elements)
            )
            if collective is distributed.all_reduce:
                collective(tensor, group=group)
            else:
                collective(
                    *(
                        (gathered_tensor, tensor)
                        if collective is distributed.all_gather_into_tensor
                        else (tensor, gathered_tensor)
                    ),
                    group=group,
                )


# histories by process group and device; keys are groups, since a later group may have the name of an earlier one
RANKS: WeakKeyDictionary[Any, dict[torch.device, GroupHistory]] = WeakKeyDictionary()


def agrees_each_time(device: torch.device) -> bool:
    """True if the host waits for the comparison of every call: on a CPU, where waiting costs nothing."""
    return device.type == "cpu"


def is_captured(device: torch.device) -> bool:
    """True while a CUDA graph captures the calls on a device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def agree(fields: dict[str, str], group: Any, device: torch.device, layout: str) -> Tensor:
    """Compares the fields of a call over the ranks of ``group``. Returns a 0-d fp32 tensor on the device: 0, or nan if
    they differ. ValueError if the host knows that they differ, in this call or in the last one. ``layout``:
    "TokenParallel" or "VocabParallel", for errors."""
    is_captured_call, ranks_by_device = is_captured(device), RANKS.setdefault(group, {})
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    call_text, history = repr(sorted(fields.items())), ranks_by_device.get(device)
    if is_captured_call and (history is None or history.agreements.get(call_text) is None):
        raise RuntimeError(f"a call of {layout} that ranks have not agreed on cannot be captured: run it once before")
    if history is None:
        history = ranks_by_device[device] = GroupHistory(device)
    if not is_captured_call:
        history.check_last_call()
    agreement = history.agreements.get_or_make(call_text, lambda: agreement_of(fields, device))
    message = agreement.message if is_captured_call else agreement.message_on(stream)
    agreements = message.new_empty(distributed.get_world_size(group), len(message))
    distributed.all_gather_into_tensor(agreements.view(-1), message, group=group)
    expected_kind = history.expected_kind()
    if is_captured_call:
        history.captured_agreements.append(agreement)
    elif agrees_each_time(device) or agreement.kind_hash != expected_kind:
        host_agreements = waited_for(agreements)
        if (host_agreements[:, :NUM_HASHES] != host_agreements[0, :NUM_HASHES]).any():
            error = difference_in_words(host_agreements, layout)
            if expected_kind in host_agreements[:, 0].tolist() and not agrees_each_time(device):
                history.error = error
                history.send_nan(expected_kind, group)
            raise ValueError(error)
        history.add_call(agreement.kind_hash)
        return history.zero_or_nan
    history.zero_or_nan.masked_fill_((agreements[:, :NUM_HASHES] != message[:NUM_HASHES]).any(), torch.nan)
    if not is_captured_call:
        history.host_zero_or_nan.copy_(history.zero_or_nan, non_blocking=True)
        history.unread_comparison = None if stream is None else stream.record_event(), agreements, layout
        history.add_call(agreement.kind_hash)
    return history.zero_or_nan


def waited_for(agreements: Tensor) -> Tensor:
    """The agreements as a CPU tensor; the host waits for the device."""
    return agreements.cpu()


def hash_of_fields(fields: dict[str, str]) -> int:
    """A hash of 7 bytes, equal on all ranks for equal fields."""
    return int.from_bytes(hashlib.sha256(repr(sorted(fields.items())).encode()).digest()[:7], "big")


def without_numbers(value: str) -> str:
    """A field's value with the word "number" in the place of each float."""
    return NUMBER_PATTERN.sub("number", value) if "." in value or "e-" in value or "e+" in value else value


def agreement_of(fields: dict[str, str], device: torch.device) -> Agreement:
    """This rank's agreement on a call with these fields. If the text is too long, long values are cut; if that is not
    enough, the text is left out."""
    call_hash = hash_of_fields(fields)
    kind_hash = hash_of_fields({name: without_numbers(value) for name, value in fields.items()})
    text_bytes, max_letters = b"", MAX_VALUE_LETTERS
    while not text_bytes or len(text_bytes) > MESSAGE_BYTES - 8 * NUM_HASHES:
        shortened_fields = {
            name: value if len(value) <= max_letters else value[:max_letters] + "..." for name, value in fields.items()
        }
        text_bytes, max_letters = zlib.compress(repr(shortened_fields).encode()), max_letters // 2
        if not max_letters:
            text_bytes = zlib.compress(b"{}")
    host_buffer = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    host_buffer[8 * NUM_HASHES :][: len(text_bytes)] = torch.frombuffer(bytearray(text_bytes), dtype=torch.uint8)
    message = host_buffer.view(torch.int64)
    message[0], message[1] = kind_hash, call_hash
    message = message.to(device, non_blocking=True)
    written_event = torch.cuda.current_stream(device).record_event() if message.is_cuda else None
    return Agreement(kind_hash, message, written_event)


def difference_in_words(agreements: Tensor, layout: str) -> str:
    """The text of an error, equal on all ranks: the first field that differs, its value on rank 0, and its value on the
    first rank where it differs. ``agreements`` [ranks, MESSAGE_BYTES / 8] int64 on the CPU."""
    call_hashes = agreements[:, 1].tolist()
    differing_rank = next(rank for rank, call_hash in enumerate(call_hashes) if call_hash != call_hashes[0])
    fields_by_rank = [
        literal_eval(zlib.decompressobj().decompress(text_bytes_of(agreement)).decode()) for agreement in agreements
    ]
    first_fields, differing_fields = fields_by_rank[0], fields_by_rank[differing_rank]
    differing_names = [
        name for name in {**first_fields, **differing_fields} if first_fields.get(name) != differing_fields.get(name)
    ]
    # the function, and fields that only one of the ranks has, come first: other differences follow from them
    differing_names.sort(key=lambda name: name != "function" and name in first_fields and name in differing_fields)
    explanation = "what differs is too long to tell"
    if differing_names:
        first_value, differing_value = (
            fields_of_rank.get(differing_names[0], "missing")[:MAX_VALUE_LETTERS]
            for fields_of_rank in (first_fields, differing_fields)
        )
        explanation = f"{differing_names[0]} is {first_value} on rank 0 and {differing_value} on rank {differing_rank}"
    remedy = split_remedy(fields_by_rank) if differing_names[:1] == [ROWS] else ""
    return f"ranks of {layout} make different calls: {explanation}; it must be the same on all ranks{remedy}"


def split_remedy(fields_by_rank: list[dict[str, str]]) -> str:
    """The end of the text of an error for ranks with different numbers of rows of the head: the argument to pass. "" if
    the fields do not say."""
    if not all(fields.get(ROWS, "").endswith("]") for fields in fields_by_rank):
        return ""
    rows_by_rank = [json.loads(fields[ROWS])[rank] for rank, fields in enumerate(fields_by_rank)]
    is_even = part_sizes(sum(rows_by_rank), len(rows_by_rank)) == tuple(rows_by_rank)
    return f"; ranks hold {rows_by_rank} rows: pass " + (
        f"vocab_size={sum(rows_by_rank)}" if is_even else f"VocabParallel(rows={rows_by_rank})"
    )


def text_bytes_of(message: Tensor) -> bytes:
    """The compressed text of an agreement."""
    return bytes(message[NUM_HASHES:].contiguous().view(torch.uint8).tolist())


def begin_backward(group: Any) -> None:
    """Ends the recording of a forward pass's messages, before backward sends messages. ValueError if the last call was
    not the same on all ranks, since a rank that has raised sends no messages of a backward."""
    for device, history in RANKS.get(group, {}).items():
        history.recorded_messages = None
        if not is_captured(device):
            history.check_last_call()


def recording_collective(collective: Callable[..., Any], tensor: Tensor, group: Any) -> Callable[..., Any]:
    """Returns ``collective``. First adds a message of ``tensor`` to the recorded messages of the present call, if the
    kind of that call is new."""
    history = RANKS.get(group, {}).get(tensor.device)
    if history is not None and history.recorded_messages is not None and not is_captured(tensor.device):
        history.recorded_messages.append(Message(collective, tensor.numel(), tensor.dtype))
    return collective


def all_reduce(tensor: Tensor, group: Any, async_op: bool = False) -> Any:
    """``torch.distributed.all_reduce``, recorded among the call's messages if its kind is new
    (``recording_collective``)."""
    return recording_collective(distributed.all_reduce, tensor, group)(tensor, group=group, async_op=async_op)


def all_gather(gathered_tensor: Tensor, tensor: Tensor, group: Any) -> None:
    """``torch.distributed.all_gather_into_tensor``, recorded as by ``all_reduce``."""
    recording_collective(distributed.all_gather_into_tensor, tensor, group)(gathered_tensor, tensor, group=group)


def reduce_scatter(output: Tensor, tensor: Tensor, group: Any) -> Any:
    """An asynchronous ``torch.distributed.reduce_scatter_tensor``, recorded as by ``all_reduce``; returns its
    ``Work``."""
    return recording_collective(distributed.reduce_scatter_tensor, output, group)(
        output, tensor, group=group, async_op=True
    )
