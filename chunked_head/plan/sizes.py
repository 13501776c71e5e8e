"""The sizes of a call that decide its plan, and what follows from them by arithmetic: bytes of a row, what runs."""

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch

from ..core.groups import BLOCKS
from ..core.stats import Demand, numbers_sent
from ..kernels.common.gpus import RELATIVE_STRIP, Gpu, split_strips
from ..kernels.common.tiles import PRODUCT_ROWS, STRIPS_AT_ONCE, WHOLE, DhiddenSplit, dhidden_split

ROUNDING_ERROR = {torch.bfloat16: 1.65e-3, torch.float16: 2.1e-4}
# what the losses' arithmetic holds at a time for each token that it is done for, and for each of its columns
BYTES_PER_EVALUATED = 160
BYTES_PER_COLUMN = 96
PLAIN = Demand()
Store = Literal["fast", "relative", "logits", "kept"]  # the last: no logits, tokens keep sets of columns
# of a teacher's logits at a time, where nothing waits for all of a chunk's: the weight is read again for each so many,
# which is half as long as its product takes; a multiple of the rows that other products read at a time
TEACHER_ROWS = 6 * PRODUCT_ROWS


@dataclass(frozen=True)
class Sizes:
    """What a plan is made from."""

    tokens: int
    hidden: int
    vocab: int
    dtype: torch.dtype  # of the matmuls' operands
    hidden_dtype: torch.dtype  # of the hidden states and so of their gradient
    weight_dtype: torch.dtype  # of the weight and so of its gradient
    hidden_grad: bool = True
    weight_grad: bool = True
    bias_grad: bool = False
    bias_dtype: torch.dtype | None = None  # where it is not the weight's
    late_upstream: bool = False  # the upstream gradient is not a scalar: gradients wait for it
    coupled: bool = False  # a token's gradient depends on other tokens' statistics: all of them come first
    by_segments: bool = False  # on those of its segment alone: chunks end where segments do
    demand: Demand = PLAIN  # the statistics
    teacher_columns: int = 0  # of a dense teacher's vocabulary that the student has too
    teacher_width: int = 0  # of its hidden states, 0 where it gives logits
    teacher_cast: bool = False  # whether its head is cast for autocast
    teacher_store: Literal["relative", "logits"] | None = None  # of its logits; None where the caller's are read
    store: Store = "logits"  # what the reused buffer holds between the matmul and the gradient
    largest_part: int | None = None  # columns of the rank that has most of them, where ranks share a vocabulary
    padding: int = 0  # rows of the weight that stand for no id: its gradient has them too
    spread: int = 1  # ranks that each hold an equal part of the hidden states
    ranks: int = 1  # that share the vocabulary, and whose statistics come together
    copied: bool = False  # hidden states that no view flattens, or in another order
    scratch: int = 0  # bytes of the backend's elementwise tiles
    half_products: bool = False  # the device multiplies 16-bit operands into fp32 sums without casting them
    gpu: Gpu | None = None  # whose own matmuls run; None: BLAS's
    multiprocessors: int = 0  # that are there
    deterministic: bool = False  # a token's numbers do not depend on the others, nor on how many there are
    block: int | None = None  # ids of a block, which statistics are summed in before the sum of blocks; of such a call
    skips: bool = False  # products stop at a number of rows that only the device knows
    buffer_dtype: torch.dtype | None = None  # of a buffer of the caller's that the weight's gradient is added to

    @property
    def half(self) -> bool:
        return self.dtype in ROUNDING_ERROR

    def sums_into(self, dtype: torch.dtype) -> bool:
        """Whether a product of operands can be stored in ``dtype``: theirs, or a wide one."""
        return dtype == self.dtype or dtype.itemsize >= 4

    @property
    def own_weight_grad(self) -> bool:
        """Whether the weight's gradient is a tensor of the call's, to be handed over."""
        return self.weight_grad and self.buffer_dtype is None

    def hidden_accumulator(self, tile: int) -> torch.dtype:
        """One tile makes the gradient of hidden in one product; several are added in fp32, where fp16 gets its
        scale."""
        own = self.hidden_dtype
        wide = tile < self.vocab or self.dtype == torch.float16 or not self.sums_into(own)
        return torch.float32 if wide and own.itemsize < 4 else own

    def through_fp32(self, weight_acc: torch.dtype) -> bool:
        """Whether a tile of the weight's gradient is made in fp32 first: fp16 gets its scale there."""
        return self.dtype == torch.float16 or not self.sums_into(weight_acc)

    @property
    def element(self) -> int:
        """Bytes of an operand's element."""
        return self.dtype.itemsize

    @property
    def logit_bytes(self) -> int:
        """Bytes the buffer needs for one logit: 16-bit exponentials or relative logits, else fp32 (fp64) logits."""
        return max(4, self.element) if self.store == "logits" else 2

    @property
    def grads_in_matmul(self) -> bool:
        """Whether tiles whose statistics are known leave the matmul as 16-bit gradients, without logits before them."""
        return self.store != "logits" and self.demand.pairing is None

    def tile_bytes(self, tile: int) -> int:
        """Bytes of a row of a tile in the recompute schedule, the teacher's beside it."""
        if self.store == "kept":
            return 0
        if self.grads_in_matmul:
            return padded_columns(tile) * self.element
        # plain logits to differentiate, whatever the sweep stored
        teacher = min(tile, self.teacher_columns) if self.teacher_store else 0
        return (tile + teacher) * max(4, self.element)

    @functools.cached_property
    def teacher_last(self) -> bool:
        """Whether gradients that are made along with the statistics need no statistic of a dense teacher beside the
        student: the teacher's logits are then made when the student's become gradients, some rows at a time."""
        pairing = self.demand.pairing
        alone = self.ranks == 1 and not (self.coupled or self.by_segments)
        return pairing is not None and pairing.last and self.store == "relative" and alone

    def teacher_rows(self, rows: int) -> int:
        """Of how many rows of a chunk a dense teacher's logits lie in memory at a time."""
        return min(rows, TEACHER_ROWS) if self.teacher_last and self.teacher_store is not None else rows

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes that one more row in a chunk costs: its logits, its strips' statistics, its hidden states."""
        return self.kept_bytes + self.swept_bytes(kept=True)

    def gradient_kept_bytes(self, rows: int) -> int:
        """A chunk's stored logits, its teacher's and the parts of their sums, where gradients are made of them."""
        parts = 0
        if self.teacher_last:
            assert self.demand.pairing is not None
            wanted = self.demand.pairing.forward_kl + self.demand.pairing.entropy
            parts = wanted * 4 * math.ceil(self.vocab / (RELATIVE_STRIP * STRIPS_AT_ONCE))
        return rows * (self.kept_bytes + parts) - (rows - self.teacher_rows(rows)) * self.teacher_bytes

    @property
    def keeps_sweep(self) -> bool:
        """Whether a pass that makes no gradient stores its logits."""
        if self.store != "logits" and self.block is not None:
            return self.demand.pairing is not None
        return self.store == "logits" or not self.demand.one_sweep

    @functools.cached_property
    def teacher_bytes(self) -> int:
        """A row of a dense teacher's logits."""
        if self.teacher_store == "logits":
            return self.teacher_columns * max(4, self.element)
        return padded_columns(self.teacher_columns) * 2 if self.teacher_store == "relative" else 0

    @functools.cached_property
    def kept_bytes(self) -> int:
        """A row of stored logits, and its teacher's."""
        if self.store == "kept":
            return 0
        teacher = self.teacher_bytes
        if self.teacher_store == "relative":
            assert self.gpu is not None
            # for all rows of a chunk: their strips lie as far apart as the student's
            teacher += self.gpu.strips_of(self.teacher_columns, self.teacher_width, True) * 8
        if self.store == "logits":
            return self.vocab * max(4, self.element) + teacher
        return padded_columns(self.vocab) * 2 + teacher

    def swept_bytes(self, kept: bool) -> int:
        """What a row needs beside logits, whether these are kept or not."""
        demand = self.demand
        # all ranks' statistics are gone before the losses' arithmetic begins
        evaluated = max(BYTES_PER_EVALUATED + BYTES_PER_COLUMN * demand.columns, self.merged_bytes)
        if self.store == "kept":
            return evaluated + (4 * self.hidden if self.scratch else 0)  # torch sums hidden's gradient apart
        rows = self.operand_bytes + self.teacher_width * self.element + evaluated
        if self.store == "logits":
            return rows
        assert self.gpu is not None
        relative, block = kept and self.store == "relative", None if kept else self.block
        strips = self.gpu.strips_of(self.vocab, self.hidden, relative, block) + split_strips(demand.views[-1].columns)
        return rows + strips * (
            8
            + 4 * demand.entropy[0]
            + 4 * demand.weighted_sum
            + 8 * demand.top
            + 4 * (len(demand.views) > 1)
            + 4 * any(demand.entropy[1:])
        )

    @property
    def merged_bytes(self) -> int:
        """All pieces' statistics of a row: as they come, as fp64, and what their softmaxes are merged by."""
        pieces = self.ranks if self.block is None else max(self.ranks, BLOCKS)
        if pieces == 1:
            return 0
        numbers, demand = 1 + numbers_sent(self.demand), self.demand
        largest = 8 * 2 * demand.top_k + 8 * demand.columns
        return pieces * (12 * numbers + 48 + largest) + 8 * numbers

    @property
    def own_tokens(self) -> int:
        """Rows of hidden states that are here."""
        return self.tokens // self.spread

    @property
    def operand_bytes(self) -> int:
        """Bytes per row of the matmuls' other operand: a clean copy, and where 16-bit rows are cast, those. Gathered
        rows lie in a buffer of their own."""
        gathered = 0 if self.spread == 1 else self.hidden_dtype.itemsize
        return self.hidden * (gathered + (self.element if self.half_products or not self.half else 10))

    def scattered_bytes(self, accumulate: torch.dtype) -> int:
        """Bytes of a row of hidden's gradient on its way to the rank that has the row: as it was made, and by rank."""
        return 0 if self.spread == 1 or not self.hidden_grad else 2 * self.hidden * accumulate.itemsize

    def dhidden_split(self, rows: int, most_units: int | None = None) -> DhiddenSplit:
        """How a chunk's dhidden is divided, its sums of parts in no more places than there are."""
        if self.gpu is None or not self.own_dhidden or self.deterministic:
            return WHOLE  # nothing is chosen by size
        return dhidden_split(self.gpu.product, rows, self.hidden, self.vocab, self.multiprocessors, most_units)

    @functools.cached_property
    def own_dhidden(self) -> bool:
        """Whether dhidden's products are ours: where they are faster than BLAS's, or have to be."""
        faster = self.gpu is not None and self.gpu.own_dhidden
        return self.store not in ("logits", "kept") and (faster or self.skips or self.deterministic)

    @property
    def weight_elements(self) -> int:
        return (self.vocab + self.padding) * self.hidden

    @property
    def any_grad(self) -> bool:
        return self.hidden_grad or self.weight_grad or self.bias_grad


def padded_columns(columns: int) -> int:
    """Elements of a 16-bit row that starts, as the tensor copy engine asks, on 16 bytes."""
    return math.ceil(columns / 8) * 8
