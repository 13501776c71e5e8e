"""Messages of ranks in a call, counted; and a model of their cost on more ranks than we have."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.shapes import Shape

# What one rank sends of a message over n ranks, by rings: of all of the message's bytes.
SENT: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all-gather": lambda ranks: (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
}
_KINDS = {"allreduce": "all-reduce", "allgather": "all-gather", "reducescatter": "reduce-scatter"}


class Message(NamedTuple):
    """A collective: its kind, and its bytes (all ranks' pieces of an all-gather)."""

    kind: str
    bytes: int


class Traffic(TorchDispatchMode):
    """Notes every collective that this process takes part in while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes again as what it is made of
        found = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        if "c10d" in space:
            self.note(name.replace("_", ""), args, found)
        return found

    def note(self, name: str, args: Any, found: Any) -> None:
        if name in ("waittensor", "wraptensorautograd", "barrier"):
            return
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), name)
        # plain ones come with what they write, functional ones return it
        tensors = _tensors(args) or _tensors([found])
        self.messages.append(Message(kind, max(tensor.nbytes for tensor in tensors)))


def _tensors(values: Any) -> list[Tensor]:
    found = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def count(step: Callable[[], Any]) -> list[Message]:
    """The messages of one step."""
    with Traffic() as traffic:
        step()
    return traffic.messages


class Machine(NamedTuple):
    """Assumptions of the model; bytes are per second and GPU, in one direction."""

    flops: float = 690e12  # three bare products, bf16, one H200: 37.5 ms at 8192 x 4096 x 128256
    host: int = 8  # GPUs in a host
    nvlink: float = 360e9  # of 450: 80 %
    network: float = 45e9  # of 50: one port of 400 Gb/s for each GPU
    first_us: float = 12.0  # that a small message takes within a host
    hop_us: float = 5.0  # more for each doubling of hosts, both ways together


class Cost(NamedTuple):
    """Milliseconds of a call on one of ``ranks``."""

    ranks: int
    chunks: int
    products: float
    statistics: float  # messages that the gradient waits for
    hidden: float  # sum of the gradient of hidden states, covered or not
    exposed: float  # what of it no product covers

    @property
    def total(self) -> float:
        return self.products + self.statistics + self.exposed


def message_ms(kind: str, size: float, ranks: int, machine: Machine) -> float:
    """Latency, and bytes over the narrowest link: all of a host's ports carry a ring each."""
    hosts = math.ceil(ranks / machine.host)
    width = machine.nvlink if hosts == 1 else min(machine.nvlink, machine.host * machine.network)
    latency = machine.first_us + machine.hop_us * math.ceil(math.log2(hosts))
    return latency / 1e3 + SENT[kind](ranks) * size / width * 1e3


def cost(shape: Shape, ranks: int, chunks: int, targets: int, numbers: int, pairs: int, products: int = 3) -> Cost:
    """A call of so many products, whose chunks gather ``numbers`` floats a token and rank.

    They add up ``pairs`` floats a token after it, and two bytes for each of hidden's numbers; the call ``targets``
    floats of every token before the first.
    """
    machine, tokens = Machine(), shape.tokens / chunks
    product = shape.flops / 3 / ranks / machine.flops * 1e3
    statistics = message_ms("all-gather", 4 * numbers * tokens * ranks, ranks, machine)
    statistics += message_ms("all-reduce", 4 * pairs * tokens, ranks, machine) if pairs else 0.0
    before = message_ms("all-reduce", 4 * targets * shape.tokens, ranks, machine) if targets else 0.0
    summed = message_ms("all-reduce", 2 * tokens * shape.hidden, ranks, machine)
    # meanwhile the chunk's product for the weight and the next chunk's logits run
    cover = product / chunks
    exposed = max(0.0, summed - cover) + (chunks - 1) * max(0.0, summed - 2 * cover)
    return Cost(ranks, chunks, products * product, before + chunks * statistics, chunks * summed, exposed)
