"""The check that all ranks make the same call, and the messages of calls.

Every call begins with a message of fixed size, its agreement: hashes of the call's fields, and the fields as text. The
kind of a call is its fields without their numbers. All ranks expect the same kind of the next call, by the kinds of the
last calls.

A call of the expected kind sends its messages without waiting. The device compares the ranks' agreements, and makes
results nan if they differ. The host reads the comparison at the next call, and raises then. A call of another kind
waits for the comparison, and raises at once if ranks differ. A rank whose call is of the expected kind does not wait,
and sends the messages of that kind. So a rank that is about to raise first sends the same messages, filled with nan: no
rank waits for a message that never comes, or receives a message of another size.
"""

import hashlib
import json
import re
import zlib
from ast import literal_eval
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from ..core.memory import Cache
from .groups import ROWS, part_sizes

MAX_VALUE_LETTERS = 160  # of a field's value in an error
MESSAGE_BYTES = 4096  # of a rank's agreement
NUM_HASHES = 2  # hashes of 8 bytes in front of an agreement's text
HISTORY_LENGTH = 8  # number of last calls from which the kind of the next call is expected
# a float in the text of a field; no message's size depends on floats
FLOAT_PATTERN = re.compile(r"\b\d+(\.\d+(e[+-]?\d+)?|e[+-]?\d+)\b")
# a message after the agreement: function of torch.distributed, number of elements of this rank's tensor (in a
# reduce-scatter, of this rank's part of the result), and their dtype
Message = tuple[Callable[..., Any], int, torch.dtype]


class Agreement:
    """This rank's first message of a call: it tells other ranks what the call is.

    ``kind_hash``: hash of the call's fields without numbers. ``message`` [MESSAGE_BYTES / 8] int64 on the device:
    hashes of kind and call, and the fields as text. Long values are cut until the text fits into the message. If cuts
    are not enough, the text has no fields. ``written_event``: event after the GPU's stream has written the message;
    None on a CPU.
    """

    def __init__(self, fields: dict[str, str], device: torch.device):
        call_hash = hash_of_fields(fields)
        self.kind_hash = hash_of_fields({name: without_numbers(value) for name, value in fields.items()})
        text_bytes, max_letters = b"", MAX_VALUE_LETTERS
        while not text_bytes or len(text_bytes) > MESSAGE_BYTES - 8 * NUM_HASHES:
            shortened_fields = {
                name: value if len(value) <= max_letters else value[:max_letters] + "..."
                for name, value in fields.items()
            }
            text_bytes, max_letters = zlib.compress(repr(shortened_fields).encode()), max_letters // 2
            if not max_letters:
                text_bytes = zlib.compress(b"{}")
        host_buffer = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        host_buffer[8 * NUM_HASHES :][: len(text_bytes)] = torch.frombuffer(bytearray(text_bytes), dtype=torch.uint8)
        message = host_buffer.view(torch.int64)
        message[0], message[1] = self.kind_hash, call_hash
        self.message = message.to(device, non_blocking=True)
        self.written_event = torch.cuda.current_stream(device).record_event() if self.message.is_cuda else None

    def message_on(self, stream: Any) -> Tensor:
        """Returns the message, to be sent on the GPU's ``stream`` (None on a CPU). Makes the stream wait until the
        message is written."""
        if self.written_event is not None:
            stream.wait_event(self.written_event)
            self.message.record_stream(stream)
        return self.message


class GroupHistory:
    """The kinds and messages of a process group's last calls, equal on all ranks, and the last comparison's result."""

    def __init__(self, device: torch.device):
        self.recent_kinds = deque[int](maxlen=HISTORY_LENGTH)  # hashes of the kinds of the last calls
        self.next_kinds: Cache[tuple[int, ...], int] = Cache(4096)  # by kinds of consecutive calls: the next kind
        self.messages_by_kind: Cache[int, list[Message]] = Cache(4096)  # messages of a forward pass
        self.recorded_messages: list[Message] | None = None  # of the present call if its kind is new, else None
        self.agreements: Cache[str, Agreement] = Cache(64)  # by the call's text
        self.captured_agreements: list[Agreement] = []  # agreements that captured CUDA graphs send, kept alive
        self.zero_or_nan = torch.zeros((), dtype=torch.float32, device=device)  # nan once ranks made different calls
        self.host_zero_or_nan = torch.zeros((), dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
        # the last comparison, until the host has read it: the event after ``host_zero_or_nan`` is written, agreements
        # [ranks, ...], name of the layout
        self.unread_comparison: tuple[Any, Tensor, str] | None = None
        self.error = ""  # set after calls of two kinds, which leave the ranks out of step

    def expected_kind(self) -> int | None:
        """The hash of the kind that the next call is expected to have; None before the first call. It is the kind that
        last followed all of ``recent_kinds``. If none has, it is the kind that last followed the kind of the last call.
        If none has either, it is the kind of the last call."""
        recent_kinds = tuple(self.recent_kinds)
        next_kind = self.next_kinds.get(recent_kinds) or self.next_kinds.get(recent_kinds[-1:])
        return next_kind or (recent_kinds[-1] if recent_kinds else None)

    def add_call(self, kind_hash: int) -> None:
        """Adds a call to the history, before the call sends its messages."""
        recent_kinds = tuple(self.recent_kinds)
        if recent_kinds:
            self.next_kinds[recent_kinds] = self.next_kinds[recent_kinds[-1:]] = kind_hash
        self.recent_kinds.append(kind_hash)
        self.recorded_messages = None
        if self.messages_by_kind.get(kind_hash) is None:
            self.recorded_messages = self.messages_by_kind[kind_hash] = []

    def check_last_call(self) -> None:
        """Raises ValueError if the ranks' last calls differed. The host waits until the device has compared them. The
        device does this before the rest of the last call."""
        if self.unread_comparison is not None:
            (written_event, agreements, layout), self.unread_comparison = self.unread_comparison, None
            if written_event is not None:
                written_event.synchronize()
            if self.host_zero_or_nan.isnan():
                agreements = agreements.cpu()
                error = difference_in_words(agreements, layout)
                if (agreements[:, 0] != agreements[0, 0]).any():
                    self.error = error
                self.zero_or_nan.zero_()  # calls of one kind have equal messages: the next call can run
                raise ValueError(error)
        if self.error:
            raise ValueError(self.error)

    def send_nan(self, kind_hash: int | None, group: Any) -> None:
        """Sends all messages of a call of this kind, filled with nan, since other ranks have begun such a call."""
        num_ranks, device = distributed.get_world_size(group), self.zero_or_nan.device
        for collective, num_elements, dtype in (kind_hash and self.messages_by_kind.get(kind_hash)) or ():
            fill_value = torch.nan if dtype.is_floating_point else 0
            gathered_tensor, tensor = (
                torch.full((size,), fill_value, dtype=dtype, device=device)
                for size in (num_ranks * num_elements, num_elements)
            )
            if collective is distributed.all_reduce:
                collective(tensor, group=group)
            elif collective is distributed.all_gather_into_tensor:
                collective(gathered_tensor, tensor, group=group)
            else:
                collective(tensor, gathered_tensor, group=group)


# histories by process group and device; keys are groups, since a later group may have the name of an earlier one
HISTORIES: WeakKeyDictionary[Any, dict[torch.device, GroupHistory]] = WeakKeyDictionary()


def waits_for_comparison(device: torch.device) -> bool:
    """True if the host waits for the comparison of every call: on a CPU, where waiting costs nothing."""
    return device.type == "cpu"


def is_captured(device: torch.device) -> bool:
    """True while a CUDA graph captures the work on ``device``."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def agree(fields: dict[str, str], group: Any, device: torch.device, layout: str) -> Tensor:
    """Compares the fields of a call over the ranks of ``group``. Returns [] fp32 on ``device``: 0, or nan if fields
    differ. ValueError if the host knows that fields differ, in this call or in the last one. ``layout``:
    "TokenParallel" or "VocabParallel", for errors."""
    is_captured_call, histories = is_captured(device), HISTORIES.setdefault(group, {})
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    call_text, history = repr(sorted(fields.items())), histories.get(device)
    if is_captured_call and (history is None or history.agreements.get(call_text) is None):
        raise RuntimeError(f"a call of {layout} that ranks have not agreed on cannot be captured: run it once before")
    if history is None:
        history = histories[device] = GroupHistory(device)
    if not is_captured_call:
        history.check_last_call()
    agreement = history.agreements.get_or_make(call_text, lambda: Agreement(fields, device))
    message = agreement.message if is_captured_call else agreement.message_on(stream)
    agreements = message.new_empty(distributed.get_world_size(group), len(message))
    distributed.all_gather_into_tensor(agreements.view(-1), message, group=group)
    expected_kind = history.expected_kind()
    if is_captured_call:
        history.captured_agreements.append(agreement)
    elif waits_for_comparison(device) or agreement.kind_hash != expected_kind:
        host_agreements = read_agreements(agreements)
        if (host_agreements[:, :NUM_HASHES] != host_agreements[0, :NUM_HASHES]).any():
            error = difference_in_words(host_agreements, layout)
            if expected_kind in host_agreements[:, 0].tolist() and not waits_for_comparison(device):
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


def read_agreements(agreements: Tensor) -> Tensor:
    """Copies the agreements to the CPU; the host waits for the device."""
    return agreements.cpu()


def hash_of_fields(fields: dict[str, str]) -> int:
    """A hash of 7 bytes, equal on all ranks for equal fields."""
    return int.from_bytes(hashlib.sha256(repr(sorted(fields.items())).encode()).digest()[:7], "big")


def without_numbers(value: str) -> str:
    """The text of a field's value, with the word "number" in place of each float."""
    return FLOAT_PATTERN.sub("number", value) if "." in value or "e-" in value or "e+" in value else value


def difference_in_words(agreements: Tensor, layout: str) -> str:
    """The text of an error, equal on all ranks. It names a field that differs, its value on rank 0, and its value on
    the first rank that made another call. ``agreements`` [ranks, MESSAGE_BYTES / 8] int64 on the CPU."""
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
    """The end of an error's text, which names the argument to pass if ranks hold different numbers of the head's rows;
    "" if these numbers are missing or cut in the text of a rank's fields."""
    if not all(fields.get(ROWS, "").endswith("]") for fields in fields_by_rank):
        return ""
    rows_by_rank = [json.loads(fields[ROWS])[rank] for rank, fields in enumerate(fields_by_rank)]
    is_even = part_sizes(sum(rows_by_rank), len(rows_by_rank)) == tuple(rows_by_rank)
    return f"; ranks hold {rows_by_rank} rows: pass " + (
        f"vocab_size={sum(rows_by_rank)}" if is_even else f"VocabParallel(rows={rows_by_rank})"
    )


def text_bytes_of(message: Tensor) -> bytes:
    """The compressed text in an agreement's message [MESSAGE_BYTES / 8] int64."""
    return bytes(message[NUM_HASHES:].contiguous().view(torch.uint8).tolist())


def begin_backward(group: Any) -> None:
    """Ends the recording of a forward pass's messages, before backward sends messages. ValueError if the ranks' last
    calls differed: a rank that has raised sends no messages of a backward."""
    for device, history in HISTORIES.get(group, {}).items():
        history.recorded_messages = None
        if not is_captured(device):
            history.check_last_call()


def recording_collective(collective: Callable[..., Any], tensor: Tensor, group: Any) -> Callable[..., Any]:
    """Returns ``collective``. If the present call is the first of its kind, records the message that ``collective``
    sends: one with the size and dtype of ``tensor``."""
    history = HISTORIES.get(group, {}).get(tensor.device)
    if history is not None and history.recorded_messages is not None and not is_captured(tensor.device):
        history.recorded_messages.append((collective, tensor.numel(), tensor.dtype))
    return collective


def all_reduce(tensor: Tensor, group: Any, async_op: bool = False) -> Any:
    """``torch.distributed.all_reduce``, recorded in the first call of a kind (``recording_collective``)."""
    return recording_collective(distributed.all_reduce, tensor, group)(tensor, group=group, async_op=async_op)


def all_gather(gathered_tensor: Tensor, tensor: Tensor, group: Any) -> None:
    """``torch.distributed.all_gather_into_tensor``, recorded in the first call of a kind."""
    recording_collective(distributed.all_gather_into_tensor, tensor, group)(gathered_tensor, tensor, group=group)


def reduce_scatter(output: Tensor, tensor: Tensor, group: Any) -> Any:
    """Starts ``torch.distributed.reduce_scatter_tensor``, recorded in the first call of a kind. Returns torch's
    ``Work``, to be waited for."""
    return recording_collective(distributed.reduce_scatter_tensor, output, group)(
        output, tensor, group=group, async_op=True
    )
