"""The sizes of a call and the user's request, from which a plan is made; and the buffers of a plan.

A call runs through five phases. A buffer is in memory from its first phase to its last phase.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import torch

from ..core.gpus import UNCUT, DhiddenSplit, Gpu, dhidden_split
from ..core.stats import Demand, Layout, layout_of
from ..core.tiles import PRODUCT_ROWS

MiB = 1 << 20
CHUNK_MULTIPLE = 128  # rows
BYTE = torch.uint8
TILE_ELEMENTS = 1 << 18  # elements of a block of logits in elementwise torch operations
LEAST_DEMAND = Demand()
# rows of a teacher's logits in memory at a time, for ``Sizes.teacher_last``. With so many rows, a product takes twice
# as long as reading the weight
TEACHER_ROWS = 6 * PRODUCT_ROWS


class Phase(IntEnum):
    """The phases of a call, in the order in which they run."""

    SWEEP = 0  # logits and statistics of a chunk
    LOSSES = 1  # the losses' arithmetic, on vectors of tokens
    LOOP = 2  # gradients of a chunk, or of all tokens in backward
    HIDDEN = 3  # the gradient of hidden states is scaled by the upstream gradient, cast and returned
    WEIGHT = 4  # the gradients of weight and bias are scaled, cast and returned


SWEEP, LOSSES, LOOP, HIDDEN, WEIGHT = Phase


class Buffer(NamedTuple):
    """A tensor that a call allocates; or several tensors of equal lifetime, counted as a single tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # uint8: bytes of several dtypes
    first: Phase
    last: Phase
    kind: Literal["extra", "gradient", "cast"] = "extra"  # the budget limits "extra"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def peak_of(buffers: Iterable[Buffer], other_bytes_by_phase: Sequence[int] = (0, 0, 0, 0, 0)) -> int:
    """Bytes in memory in the phase with the most bytes. ``other_bytes_by_phase``: bytes of further buffers in each
    phase."""
    return max(map(sum, zip(other_bytes_by_phase, phase_bytes(buffers), strict=True)))


def phase_bytes(buffers: Iterable[Buffer]) -> list[int]:
    """Bytes of the buffers that are in memory in each of the five phases."""
    byte_changes = [0] * (len(Phase) + 1)
    for _, shape, dtype, first, last, _ in buffers:
        buffer_bytes = math.prod(shape) * dtype.itemsize
        byte_changes[first] += buffer_bytes
        byte_changes[last + 1] -= buffer_bytes
    return list(itertools.accumulate(byte_changes[:-1]))


@dataclass(frozen=True)
class Sizes:
    """The numbers and choices that a plan is made from; holds no tensor."""

    # shapes
    tokens: int
    hidden: int  # hidden size
    vocab: int  # columns of the logits on this rank
    dtype: torch.dtype  # dtype of the matmuls' operands
    hidden_dtype: torch.dtype  # dtype of the hidden states and of their gradient
    weight_dtype: torch.dtype  # dtype of the weight and of its gradient
    store: Any  # the class of ``stores/`` that keeps a chunk's logits
    padding: int = 0  # rows of the weight that stand for no id: its gradient has them too
    # gradients
    hidden_grad: bool = True
    weight_grad: bool = True
    bias_grad: bool = False
    bias_dtype: torch.dtype | None = None  # None: the weight's dtype
    buffer_dtype: torch.dtype | None = None  # dtype of the caller's buffer for the weight's gradient; None without one
    # what gradients wait for
    waits_for_backward: bool = False  # the upstream gradient has a number per token, or the call runs in a backward
    waits_for_all: bool = False  # a loss reads the statistics of all tokens
    ends_with_segments: bool = False  # chunks end where segments end; a loss reads the statistics of its segment
    # number of factors that a row of hidden's gradient waits for, 2 for several; 0 if another operand takes a gradient
    num_row_factors: int = 0
    # statistics
    demand: Demand = LEAST_DEMAND
    deterministic: bool = False  # a token's results do not depend on other tokens, nor on the number of tokens
    # a dense teacher
    teacher_width: int = 0  # columns of the teacher's hidden states; 0 if the caller gives the teacher's logits
    teacher_cast: bool = False  # autocast casts the teacher's head
    # hidden states
    is_copied: bool = False  # hidden states are copied, since no view of them is [tokens, hidden]
    is_moved: bool = False  # rows run in another order than the caller's; the gradient is put back into that order
    has_device_count: bool = False  # products stop at a number of rows that stands on the device
    fp8_copy: Literal["made", "given"] | None = None  # the weight's e4m3 copy, made by the call or given by the caller
    # ranks
    ranks: int = 1  # ranks that share the vocabulary, whose statistics are merged
    largest_part: int | None = None  # number of columns of the rank with the most columns; None: no rank has others
    hidden_ranks: int = 1  # number of ranks that hold equal shares of the hidden states
    # the backend and the device
    in_blocks: bool = False  # statistics and gradients are torch operations, by blocks of rows
    half_products: bool = False  # the device sums 16-bit products in fp32 without a cast
    gpu: Gpu | None = None  # the GPU that this library's matmul kernels run on; None: BLAS multiplies
    multiprocessors: int = 0  # number of multiprocessors of ``gpu``

    @functools.cached_property
    def half(self) -> bool:
        """True for 16-bit operands of the matmuls."""
        return self.dtype.itemsize == 2

    @functools.cached_property
    def wide(self) -> torch.dtype:
        """The dtype of statistics, and of logits in ``LogitsStore``: fp32, or fp64 for fp64 operands."""
        return torch.promote_types(self.dtype, torch.float32)

    @functools.cached_property
    def own_matmul(self) -> bool:
        """True where a kernel of this library makes the logits; False where BLAS does."""
        return self.store.stops_at_device_count and self.store.has_matmul

    @functools.cached_property
    def any_grad(self) -> bool:
        """True where some operand takes a gradient."""
        return self.hidden_grad or self.weight_grad or self.bias_grad

    @functools.cached_property
    def teacher_columns(self) -> int:
        """Number of columns of a dense teacher's logits on this rank that stand for an id of the student."""
        return 0 if self.demand.pairing is None else self.demand.pairing.columns

    @functools.cached_property
    def teacher_made(self) -> bool:
        """True where the call makes the teacher's logits; False where the caller gives them."""
        return self.teacher_width > 0

    @property
    def returns_weight_grad(self) -> bool:
        """True where the call returns the weight's gradient; False if the gradient is added to a buffer."""
        return self.weight_grad and self.buffer_dtype is None

    @property
    def own_tokens(self) -> int:
        """Number of rows of hidden states on this rank."""
        return self.tokens // self.hidden_ranks

    @property
    def weight_elements(self) -> int:
        """Number of elements of this rank's weight, padding included."""
        return (self.vocab + self.padding) * self.hidden

    @functools.cached_property
    def layout(self) -> Layout:
        """The names, shapes and dtypes of the statistics' vectors."""
        return layout_of(self.demand)

    def sums_into(self, dtype: torch.dtype) -> bool:
        """True if a matmul of the operands can store its result in ``dtype``, which is the case for the operands' dtype
        and for dtypes of at least 32 bits."""
        return dtype == self.dtype or dtype.itemsize >= 4

    @functools.cached_property
    def e4m3_gradients(self) -> bool:
        """True where the forward pass stores exponentials in e4m3, and makes gradients by products of e4m3 operands."""
        can_multiply = self.gpu is not None and self.gpu.e4m3_gradients and self.store.name == "fast"
        has_all_rows = self.hidden_ranks == 1 and not self.deterministic  # cuBLAS chooses by the number of rows
        makes_grads = self.any_grad and not self.waits_for_backward
        return self.fp8_copy is not None and can_multiply and has_all_rows and makes_grads

    @property
    def grads_in_matmul(self) -> bool:
        """True where the recompute schedule's matmul stores 16-bit gradients of logits, not logits (``GradStore``)."""
        return self.own_matmul and not self.demand.sums and self.demand.pairing is None

    @property
    def keeps_sweep(self) -> bool:
        """True where the sweep stores logits even in a pass that makes no gradients."""
        return self.fp8_copy is not None or not (self.own_matmul and self.demand.one_sweep)

    @functools.cached_property
    def teacher_last(self) -> bool:
        """True where gradients of the forward pass need no sum over student and teacher. The teacher's logits are made
        with the gradients then, some rows at a time."""
        pairing = self.demand.pairing
        is_chunk_independent = self.ranks == 1 and not (self.waits_for_all or self.ends_with_segments)
        return pairing is not None and pairing.is_fused and self.own_matmul and is_chunk_independent

    def teacher_rows(self, rows: int) -> int:
        """Number of rows of the teacher's logits in memory at a time, for chunks of ``rows`` rows."""
        return min(rows, TEACHER_ROWS) if self.teacher_last and self.teacher_made else rows

    @functools.cached_property
    def own_dhidden(self) -> bool:
        """True where a kernel of this library computes dhidden, since the kernel is faster than BLAS or since the call
        skips rows or is deterministic."""
        is_faster = self.gpu is not None and self.gpu.own_dhidden
        return self.own_matmul and (is_faster or self.has_device_count or self.deterministic)

    def dhidden_split(self, rows: int, most_units: int | None = None) -> DhiddenSplit:
        """The split of a chunk's dhidden product along the vocabulary into parts. ``most_units``: number of parts whose
        sums fit the buffer of partial sums; None: four for each multiprocessor."""
        if self.gpu is None or not self.own_dhidden or self.deterministic:
            return UNCUT  # nothing is chosen by size
        return dhidden_split(self.gpu.product, rows, self.hidden, self.vocab, self.multiprocessors, most_units)


DEFAULT_BUDGET = 1280 * MiB  # bytes of a call on one rank; ``planner.default_budget`` may give more


@dataclass(frozen=True)
class Request:
    """The arguments of a call that steer its plan."""

    memory_budget: int | str | None = None
    chunk_tokens: int | None = None
    accumulate_dtype: torch.dtype | None = None
    default: int = DEFAULT_BUDGET  # bytes where ``memory_budget`` is None; ``find_plan`` replaces them

    def __post_init__(self) -> None:
        chunk_tokens = self.chunk_tokens
        if chunk_tokens is not None and (
            isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or chunk_tokens < 1
        ):
            raise ValueError(f"chunk_tokens must be a positive int, got {chunk_tokens!r}")
        self.budget  # noqa: B018  (raises for a wrong memory_budget)
        if self.accumulate_dtype is not None and not isinstance(self.accumulate_dtype, torch.dtype):
            raise TypeError(
                f"accumulate_dtype must be None or a torch.dtype such as torch.float32, got {self.accumulate_dtype!r}"
            )

    @property
    def explicit(self) -> bool:
        """True where the caller has set a ``memory_budget``."""
        return self.memory_budget is not None

    @functools.cached_property
    def budget(self) -> int:
        """Bytes of ``memory_budget``, or the default."""
        return self.default if self.memory_budget is None else parse_bytes(self.memory_budget, "memory_budget")


DEFAULT_REQUEST = Request()


def parse_bytes(value: int | str, argument: str) -> int:
    """Number of bytes from an int or from a string such as ``"640MiB"``, ``"1.5 GB"``. TypeError or ValueError, which
    names ``argument``, for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f'{argument} must be an int (bytes) or a string such as "640MiB", got {value!r}')
    byte_count = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", value, re.IGNORECASE)
        if match is None:
            raise ValueError(f'{argument} must be bytes or a size such as "640MiB" or "1.5GB", got {value!r}')
        number, prefix, binary_mark = match.groups()
        base = 1024 if binary_mark else 1000
        byte_count = int(float(number) * base ** " KMGT".index(prefix.upper() or " "))
    if int(byte_count) <= 0:
        raise ValueError(f"{argument} must be positive, got {value!r}")
    return int(byte_count)


def bytes_in_words(byte_count: int) -> str:
    """A number of bytes as text, from 1 MiB on also in MiB."""
    return f"{byte_count} bytes" if byte_count < MiB else f"{byte_count} bytes ({byte_count / MiB:.1f} MiB)"


def slices(total_size: int, slice_size: int) -> list[slice]:
    """Consecutive slices of ``slice_size`` elements, from 0 to ``total_size``; the last slice may be shorter."""
    return [slice(start, min(start + slice_size, total_size)) for start in range(0, total_size, slice_size)]


def balanced(tokens: int, most_rows: int) -> int:
    """Number of rows of a chunk, for nearly equal chunks of at most ``most_rows`` rows. Rounds up to a multiple of 128,
    64 (rows that dweight's kernel reads at a time) or 16, the first with at most ``most_rows`` rows; else to an int."""
    if tokens <= most_rows:
        return max(tokens, 1)
    rows = math.ceil(tokens / math.ceil(tokens / most_rows))
    rounded_rows = (math.ceil(rows / multiple) * multiple for multiple in (CHUNK_MULTIPLE, 64, 16))
    return next((choice for choice in rounded_rows if choice <= most_rows), rows)


def rows_of(tokens: int, most_chunks: int) -> int:
    """Number of rows of a chunk, for at most ``most_chunks`` nearly equal chunks of ``tokens`` tokens; a multiple of
    128 where there are several chunks."""
    rows = -(-max(tokens, 1) // most_chunks)
    return min(max(tokens, 1), -(-rows // CHUNK_MULTIPLE) * CHUNK_MULTIPLE)


def padded_columns(columns: int) -> int:
    """Number of elements in memory of a 16-bit row of ``columns`` elements. The next row starts on a multiple of 16
    bytes, as the tensor memory accelerator demands."""
    return math.ceil(columns / 8) * 8


def padded_e4m3(columns: int) -> int:
    """Number of elements in memory of an e4m3 row of ``columns`` elements: a multiple of 16."""
    return math.ceil(columns / 16) * 16


def cast_rows(hidden_size: int) -> int:
    """Number of rows of the weight that are cast to fp32 at a time. The copy takes about 16 MiB."""
    return max(CHUNK_MULTIPLE, 4 * MiB // max(hidden_size, 1))
