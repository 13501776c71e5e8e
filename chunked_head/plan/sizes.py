"""The sizes of a call and the user's request, from which a plan is made; and the buffers that make up a plan's memory.

A call runs through five phases. A buffer is in memory from its first phase to its last.
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
CHUNK_MULTIPLE = 128
BYTE = torch.uint8
TILE_ELEMENTS = 1 << 18  # elements of a block of logits in elementwise torch operations
LEAST_DEMAND = Demand()
# rows of a teacher's logits at a time, for ``Sizes.teacher_last``: reading the weight takes half as long as the product
# with so many rows; a multiple of the rows that other products read at a time
TEACHER_ROWS = 6 * PRODUCT_ROWS


class Phase(IntEnum):
    """The parts of a call, in the order in which they run."""

    SWEEP = 0  # logits and statistics of a chunk
    LOSSES = 1  # the losses' arithmetic, on vectors of tokens
    LOOP = 2  # gradients of a chunk, or of all tokens in backward
    HIDDEN = 3  # the gradient of hidden states is scaled by the upstream gradient, cast and returned
    WEIGHT = 4  # the gradients of weight and bias are scaled, cast and returned


SWEEP, LOSSES, LOOP, HIDDEN, WEIGHT = Phase


class Buffer(NamedTuple):
    """A tensor that a call allocates; or several of equal lifetime, counted as one."""

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
    """Bytes in memory in the phase with the most bytes. ``other_bytes_by_phase``: bytes of further buffers in
    each of the five phases."""
    return max(map(sum, zip(other_bytes_by_phase, phase_bytes(buffers), strict=True)))


def phase_bytes(buffers: Iterable[Buffer]) -> list[int]:
    """Bytes in memory in each of the five phases."""
    changes = [0] * (len(Phase) + 1)
    for _, shape, dtype, first, last, _ in buffers:
        size = math.prod(shape) * dtype.itemsize
        changes[first] += size
        changes[last + 1] -= size
    return list(itertools.accumulate(changes[:-1]))


@dataclass(frozen=True)
class Sizes:
    """The numbers and choices that a plan is made from; holds no tensor."""

    # shapes
    tokens: int
    hidden: int
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
    # the time at which gradients can be made
    # gradients wait for backward: the upstream gradient is one number per token, or the call runs inside of a backward
    waits_for_backward: bool = False
    waits_for_all: bool = False  # gradients wait for the statistics of all tokens
    ends_with_segments: bool = False  # chunks end where segments end: gradients wait for their own segments' statistics
    # number of factors that a row of hidden's gradient waits for, 2 for several; 0 if another operand takes a gradient
    num_row_factors: int = 0
    # statistics
    demand: Demand = LEAST_DEMAND
    deterministic: bool = False  # a token's results do not depend on other tokens or their number
    # a dense teacher
    teacher_width: int = 0  # columns of its hidden states; 0 if the caller gives its logits
    teacher_cast: bool = False  # autocast casts its head
    # hidden states
    copied: bool = False  # they are copied, since no view of them is [tokens, hidden]
    moved: bool = False  # they run in another order than the caller's, to which their gradient is put back
    skips: bool = False  # products stop at a number of rows on the device
    # the weight's e4m3 copy: "made" by the call, or "given" by the caller; None: logits have operands of ``dtype``
    fp8: Literal["made", "given"] | None = None
    # ranks
    ranks: int = 1  # ranks that share the vocabulary, whose statistics are merged
    largest_part: int | None = None  # columns of the rank that has most of them; None: all columns are on this rank
    hidden_ranks: int = 1  # ranks that each have an equal part of the hidden states
    # the backend and the device
    in_blocks: bool = False  # statistics and gradients are torch operations, by blocks of rows
    half_products: bool = False  # the device sums 16-bit products in fp32 without a cast
    gpu: Gpu | None = None  # the GPU that this library's matmul kernels run on; None: BLAS multiplies
    multiprocessors: int = 0  # of that GPU

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
        """Columns of a dense teacher's logits on this rank that stand for an id of the student."""
        return 0 if self.demand.pairing is None else self.demand.pairing.columns

    @functools.cached_property
    def teacher_made(self) -> bool:
        """True where the call makes the teacher's logits; False where the caller gives them."""
        return self.teacher_width > 0

    @property
    def returns_weight_grad(self) -> bool:
        """True where the call returns the weight's gradient; False where it adds it to the caller's buffer."""
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
        """True where the matmul can store a product in ``dtype``: the operands' dtype, or one of 32 bits or more."""
        return dtype == self.dtype or dtype.itemsize >= 4

    @functools.cached_property
    def e4m3_gradients(self) -> bool:
        """True where gradients of the forward pass are products of e4m3 operands: of stored exponentials, with fp8."""
        can_multiply = self.gpu is not None and self.gpu.e4m3_gradients and self.store.name == "fast"
        has_all_rows = self.hidden_ranks == 1 and not self.deterministic  # cuBLAS chooses by the number of rows
        return self.fp8 is not None and can_multiply and has_all_rows and self.any_grad and not self.waits_for_backward

    @property
    def grads_in_matmul(self) -> bool:
        """True where the recompute schedule's matmul stores a tile's 16-bit dlogits and no logits (``GradStore``)."""
        return self.own_matmul and not self.demand.sums and self.demand.pairing is None

    @property
    def keeps_sweep(self) -> bool:
        """True where logits are stored even in a pass without gradients."""
        return self.fp8 is not None or not (self.own_matmul and self.demand.one_sweep)

    @functools.cached_property
    def teacher_last(self) -> bool:
        """True where the forward pass's gradients need no statistic of teacher and student together. The teacher's
        logits are then made along with the gradients, some rows at a time."""
        pairing = self.demand.pairing
        is_simple = self.ranks == 1 and not (self.waits_for_all or self.ends_with_segments)
        return pairing is not None and pairing.last and self.own_matmul and is_simple

    def teacher_rows(self, rows: int) -> int:
        """Rows of a chunk's teacher logits that lie in memory at a time."""
        return min(rows, TEACHER_ROWS) if self.teacher_last and self.teacher_made else rows

    @functools.cached_property
    def own_dhidden(self) -> bool:
        """True where this library's kernel computes dhidden, because it is faster than BLAS's or has to skip rows."""
        is_faster = self.gpu is not None and self.gpu.own_dhidden
        return self.own_matmul and (is_faster or self.skips or self.deterministic)

    def dhidden_split(self, rows: int, most_units: int | None = None) -> DhiddenSplit:
        """The split of a chunk's product for dhidden. ``most_units``: the number of parts for which there is memory;
        None: no limit."""
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
    default: int = DEFAULT_BUDGET  # bytes where memory_budget is None; ``find_plan`` replaces it

    def __post_init__(self) -> None:
        chunk_tokens = self.chunk_tokens
        if chunk_tokens is not None and (
            isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or chunk_tokens < 1
        ):
            raise ValueError(f"chunk_tokens must be a positive int, got {chunk_tokens!r}")
        self.budget  # noqa: B018  (raises what is wrong with it)
        if self.accumulate_dtype is not None and not isinstance(self.accumulate_dtype, torch.dtype):
            raise TypeError(
                f"accumulate_dtype must be None or a torch.dtype such as torch.float32, got {self.accumulate_dtype!r}"
            )

    @property
    def explicit(self) -> bool:
        return self.memory_budget is not None

    @functools.cached_property
    def budget(self) -> int:
        return self.default if self.memory_budget is None else parse_bytes(self.memory_budget, "memory_budget")


DEFAULT_REQUEST = Request()


def parse_bytes(value: int | str, argument: str) -> int:
    """Bytes from an int or from a string such as ``"640MiB"``, ``"1.5 GB"``."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f'{argument} must be an int (bytes) or a string such as "640MiB", got {value!r}')
    size = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", value, re.IGNORECASE)
        if match is None:
            raise ValueError(f'{argument} must be bytes or a size such as "640MiB" or "1.5GB", got {value!r}')
        number, prefix, binary = match.groups()
        base = 1024 if binary else 1000
        size = int(float(number) * base ** " KMGT".index(prefix.upper() or " "))
    if int(size) <= 0:
        raise ValueError(f"{argument} must be positive, got {value!r}")
    return int(size)


def amount(size: int) -> str:
    """A number of bytes as text, from 1 MiB on also in MiB."""
    return f"{size} bytes" if size < MiB else f"{size} bytes ({size / MiB:.1f} MiB)"


def slices(total_size: int, slice_size: int) -> list[slice]:
    """Slices of ``slice_size`` elements that follow each other from 0 to ``total_size``; the last may be shorter."""
    return [slice(start, min(start + slice_size, total_size)) for start in range(0, total_size, slice_size)]


def balanced(tokens: int, most_rows: int) -> int:
    """Rows of a chunk, for nearly equal chunks of at most ``most_rows`` rows: a multiple of 128, else of 64 (the
    rows that dweight's kernel reads at a time), else of 16, if one of these multiples does not exceed ``most_rows``."""
    if tokens <= most_rows:
        return max(tokens, 1)
    rows = math.ceil(tokens / math.ceil(tokens / most_rows))
    rounded = (math.ceil(rows / multiple) * multiple for multiple in (CHUNK_MULTIPLE, 64, 16))
    return next((choice for choice in rounded if choice <= most_rows), rows)


def rows_of(tokens: int, chunks: int) -> int:
    """Rows of a chunk, for at most ``chunks`` nearly equal chunks of ``tokens`` tokens; a multiple of 128 where
    there are several chunks."""
    rows = -(-max(tokens, 1) // chunks)
    return min(max(tokens, 1), -(-rows // CHUNK_MULTIPLE) * CHUNK_MULTIPLE)


def padded_columns(columns: int) -> int:
    """Elements in memory of a 16-bit row of ``columns`` elements, so many that the next row starts on 16 bytes, as
    the tensor copy engine demands."""
    return math.ceil(columns / 8) * 8


def padded_e4m3(columns: int) -> int:
    """Elements in memory of an e4m3 row of ``columns`` elements: a multiple of 16."""
    return math.ceil(columns / 16) * 16


def cast_rows(hidden_size: int) -> int:
    """Rows of the weight that are cast to fp32 at a time, so that the copy takes about 16 MiB."""
    return max(CHUNK_MULTIPLE, 4 * MiB // max(hidden_size, 1))
