"""The sizes of a call that decide its plan, and what its caller asks of the plan."""

import functools
import math
import re
from dataclasses import dataclass
from typing import Literal

import torch

from ..core.stats import Demand
from ..kernels.common.gpus import Gpu
from ..kernels.common.tiles import PRODUCT_ROWS, WHOLE, DhiddenSplit, dhidden_split

MiB = 1 << 20
CHUNK_MULTIPLE = 128
HALF_TILE = 64  # rows that dweight's product takes at a time
HALF_DTYPES = (torch.bfloat16, torch.float16)
PLAIN = Demand()
Store = Literal["fast", "relative", "logits", "kept"]  # the last: no logits, tokens keep sets of columns
# rows of a teacher's logits at a time, where no statistic waits for all of a chunk's: the weight is read again for each
# so many, which is half as long as its product takes; a multiple of the rows that other products read at a time
TEACHER_ROWS = 6 * PRODUCT_ROWS


@dataclass(frozen=True)
class Sizes:
    """The numbers and choices that a plan is made from; holds no tensor."""

    # shapes
    tokens: int
    hidden: int
    vocab: int  # columns of the logits on this rank
    dtype: torch.dtype  # of the matmuls' operands
    hidden_dtype: torch.dtype  # of the hidden states and of their gradient
    weight_dtype: torch.dtype  # of the weight and of its gradient
    padding: int = 0  # rows of the weight that stand for no id: its gradient has them too
    # gradients
    hidden_grad: bool = True
    weight_grad: bool = True
    bias_grad: bool = False
    bias_dtype: torch.dtype | None = None  # where it is not the weight's
    buffer_dtype: torch.dtype | None = None  # of a buffer of the caller's that the weight's gradient is added to
    # the time at which gradients can be made
    late_upstream: bool = False  # the upstream gradient is not a scalar: gradients wait for it
    coupled: bool = False  # a token's gradient depends on other tokens' statistics: all of them come first
    by_segments: bool = False  # on those of its segment only: chunks end where segments do
    # statistics
    demand: Demand = PLAIN
    deterministic: bool = False  # a token's numbers do not depend on the other tokens, nor on their number
    block: int | None = None  # ids of a block, which statistics are summed in before the sum of blocks
    # a dense teacher
    teacher_width: int = 0  # columns of its hidden states, 0 where it gives logits
    teacher_cast: bool = False  # whether its head is cast for autocast
    teacher_store: Literal["relative", "logits"] | None = None  # of its logits; None where the caller's are read
    # hidden states
    copied: bool = False  # no view flattens them, or they run in another order
    skips: bool = False  # products stop at a number of rows that only the device knows
    # ranks
    ranks: int = 1  # that share the vocabulary, and whose statistics come together
    largest_part: int | None = None  # columns of the rank that has most of them
    spread: int = 1  # ranks that each have an equal part of the hidden states
    # the backend and the device
    store: Store = "logits"  # the content of the reused buffer between the matmul and the gradient
    scratch: int = 0  # bytes of the backend's elementwise tiles
    half_products: bool = False  # the device multiplies 16-bit operands into fp32 sums without casting them
    gpu: Gpu | None = None  # the architecture whose matmuls of ours run; None: BLAS's
    multiprocessors: int = 0  # of that GPU

    @property
    def half(self) -> bool:
        return self.dtype in HALF_DTYPES

    @property
    def any_grad(self) -> bool:
        return self.hidden_grad or self.weight_grad or self.bias_grad

    @property
    def teacher_columns(self) -> int:
        """Columns of a dense teacher's logits on this rank, those of ids that the student has too."""
        return 0 if self.demand.pairing is None else self.demand.pairing.columns

    @property
    def returns_weight_grad(self) -> bool:
        """True where the call makes a tensor of the weight's gradient and hands it over."""
        return self.weight_grad and self.buffer_dtype is None

    @property
    def own_tokens(self) -> int:
        """Rows of hidden states on this rank."""
        return self.tokens // self.spread

    @property
    def weight_elements(self) -> int:
        return (self.vocab + self.padding) * self.hidden

    def sums_into(self, dtype: torch.dtype) -> bool:
        """True where a product of operands can be stored in ``dtype``: theirs, or a wide one."""
        return dtype == self.dtype or dtype.itemsize >= 4

    def hidden_accumulator(self, tile: int) -> torch.dtype:
        """The dtype in which tiles' products add up to the gradient of hidden: one tile makes it in one product,
        several add in fp32, where fp16 gets its scale."""
        own = self.hidden_dtype
        wide = tile < self.vocab or self.dtype == torch.float16 or not self.sums_into(own)
        return torch.float32 if wide and own.itemsize < 4 else own

    def through_fp32(self, weight_acc: torch.dtype) -> bool:
        """True where a tile of the weight's gradient is made in fp32 first: fp16 gets its scale there."""
        return self.dtype == torch.float16 or not self.sums_into(weight_acc)

    @property
    def grads_in_matmul(self) -> bool:
        """True where tiles of known statistics leave the matmul as 16-bit gradients, without logits before them."""
        return self.store != "logits" and self.demand.pairing is None

    @property
    def keeps_sweep(self) -> bool:
        """True where a pass that makes no gradient stores its logits."""
        if self.store != "logits" and self.block is not None:
            return self.demand.pairing is not None
        return self.store == "logits" or not self.demand.one_sweep

    @functools.cached_property
    def teacher_last(self) -> bool:
        """True where gradients made along with the statistics need no statistic of a dense teacher and the
        student: the teacher's logits are then made when the student's become gradients, some rows at a time."""
        pairing = self.demand.pairing
        simple = self.ranks == 1 and not (self.coupled or self.by_segments)
        return pairing is not None and pairing.last and self.store == "relative" and simple

    def teacher_rows(self, rows: int) -> int:
        """Rows of a chunk's teacher logits that lie in memory at a time."""
        return min(rows, TEACHER_ROWS) if self.teacher_last and self.teacher_store is not None else rows

    @functools.cached_property
    def own_dhidden(self) -> bool:
        """True where dhidden's products are kernels of ours: faster than BLAS's, or the ones that can skip rows."""
        faster = self.gpu is not None and self.gpu.own_dhidden
        return self.store not in ("logits", "kept") and (faster or self.skips or self.deterministic)

    def dhidden_split(self, rows: int, most_units: int | None = None) -> DhiddenSplit:
        """The parts of a chunk's dhidden, their sums in no more places than there are."""
        if self.gpu is None or not self.own_dhidden or self.deterministic:
            return WHOLE  # nothing is chosen by size
        return dhidden_split(self.gpu.product, rows, self.hidden, self.vocab, self.multiprocessors, most_units)


DEFAULT_BUDGET = 640 * MiB  # of a call whose head no other rank shares, and that has no more rows than this is for


@dataclass(frozen=True)
class Request:
    """The arguments of a call that steer its plan."""

    memory_budget: int | str | None = None
    chunk_tokens: int | None = None
    accumulate_dtype: torch.dtype | None = None
    default: int = DEFAULT_BUDGET  # bytes where memory_budget is None: ``find_plan`` says how many

    def __post_init__(self) -> None:
        chunk = self.chunk_tokens
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
            raise ValueError(f"chunk_tokens must be a positive int, got {chunk!r}")
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget, "memory_budget")
        if self.accumulate_dtype is not None and not isinstance(self.accumulate_dtype, torch.dtype):
            raise TypeError(
                f"accumulate_dtype must be None or a torch.dtype such as torch.float32, got {self.accumulate_dtype!r}"
            )

    @property
    def explicit(self) -> bool:
        return self.memory_budget is not None

    @property
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


def slices(total: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def balanced(tokens: int, most: int) -> int:
    """Rows of equal chunks of at most ``most``, a multiple of 128, 64 or 16, where ``most`` leaves room for that."""
    if tokens <= most:
        return max(tokens, 1)
    rows = math.ceil(tokens / math.ceil(tokens / most))
    rounded = (math.ceil(rows / multiple) * multiple for multiple in (CHUNK_MULTIPLE, HALF_TILE, 16))
    return next((choice for choice in rounded if choice <= most), rows)
