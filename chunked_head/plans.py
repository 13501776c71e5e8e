"""The plan of a call: chunk size, schedule and accumulation dtype from sizes alone, before anything is allocated.

Bytes are counted per phase of a call (its loop, and the finish that hands the gradients over), because what waits in
the loop and what is handed over never lie in memory at the same time as everything else.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

MiB = 1 << 20
DEFAULT_BUDGET = 640 * MiB
CHUNK_MULTIPLE = 128
# fewer rows than this leave the matmuls starved and make every pass over the gradient of the weight count
GOOD_CHUNK = 2048
# sums of 16-bit roundings: the error of a 16-bit accumulator grows as sqrt((chunks + 1) / 2)
MAX_HALF_CHUNKS = 8
ROUNDING_ERROR = {torch.bfloat16: 1.65e-3, torch.float16: 2.1e-4}
# target, validity, weights, statistics, values and what the loss makes of them
BYTES_PER_TOKEN = 48

CAST_BYTES = 16 * MiB

Schedule = Literal["loss only", "forward", "recompute"]
Store = Literal["fast", "exp", "logits"]


@dataclass(frozen=True)
class Term:
    """One line of the memory table: bytes while the loop runs, while the gradients are handed over, and (where the
    gradients are recomputed) in the sweep for statistics before."""

    name: str
    loop: int
    finish: int = 0
    sweep: int = 0
    kind: Literal["extra", "gradient", "cast"] = "extra"  # the budget limits the first


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
    weighted_sum: bool = False  # label smoothing: one more statistic
    store: Store = "logits"  # what the reused buffer holds between the matmul and the gradient
    copied: bool = False  # hidden states that no view flattens
    scratch: int = 0  # bytes of the backend's elementwise tiles
    half_products: bool = False  # the device multiplies 16-bit operands into fp32 sums without casting them

    @property
    def half(self) -> bool:
        return self.dtype in ROUNDING_ERROR

    def sums_into(self, dtype: torch.dtype) -> bool:
        """Whether a product of operands can be stored in ``dtype``: theirs, or a wide one."""
        return dtype == self.dtype or dtype.itemsize >= 4

    def through_fp32(self, weight_acc: torch.dtype) -> bool:
        """Whether a tile of the weight's gradient is made in fp32 first: fp16 gets its scale there."""
        return self.dtype == torch.float16 or not self.sums_into(weight_acc)

    @property
    def element(self) -> int:
        """Bytes of an operand's element."""
        return self.dtype.itemsize

    @property
    def logit_bytes(self) -> int:
        """Bytes the buffer needs for one logit: 16-bit exponentials, else fp32 (fp64) logits."""
        return max(4, self.element) if self.store == "logits" else self.element

    @property
    def row_bytes(self) -> int:
        """Bytes that one more row in a chunk costs: its logits, its strips' statistics, its hidden states."""
        if self.store != "logits":
            strips = 2 * math.ceil(self.vocab / 256)
            logits = math.ceil(self.vocab / 8) * 8 * self.element + strips * (12 if self.weighted_sum else 8)
        else:
            logits = self.vocab * self.logit_bytes
        return logits + self.operand_bytes

    @property
    def operand_bytes(self) -> int:
        """Bytes per row of the matmuls' other operand: a clean copy, and where 16-bit rows are cast, those."""
        return self.hidden * (self.element if self.half_products or not self.half else 10)

    @property
    def weight_elements(self) -> int:
        return self.vocab * self.hidden

    @property
    def any_grad(self) -> bool:
        return self.hidden_grad or self.weight_grad or self.bias_grad

    @property
    def gradient_terms(self) -> tuple[Term, ...]:
        """The gradients that are handed over, as they stand during the finish."""
        d_hidden = self.tokens * self.hidden * self.hidden_dtype.itemsize if self.hidden_grad else 0
        d_weight = self.weight_elements * self.weight_dtype.itemsize if self.weight_grad else 0
        d_bias = self.vocab * self.weight_dtype.itemsize if self.bias_grad else 0
        return (
            Term("gradient of hidden", 0, d_hidden, kind="gradient"),
            Term("gradient of weight", 0, d_weight + d_bias, kind="gradient"),
        )

    @property
    def common_terms(self) -> tuple[Term, ...]:
        """What every schedule needs from start to end."""
        copy = self.tokens * self.hidden * self.hidden_dtype.itemsize if self.copied else 0
        cast = self.weight_elements * self.element if self.weight_dtype != self.dtype else 0
        vectors = self.tokens * BYTES_PER_TOKEN
        return (
            Term("contiguous hidden states", copy, copy, copy),
            Term("weight cast for autocast", cast, 0, cast, kind="cast"),
            Term("per-token vectors", vectors, vectors, vectors),
        )


@dataclass(frozen=True)
class Plan:
    """How a call runs and what it will need; ``print`` shows it as a table. Holds no tensor.

    ``chunk_tokens`` rows of logits at a time in sweeps over the whole vocabulary; in the ``recompute`` schedule the
    gradients are made from ``block_tokens`` rows by ``tile_columns`` columns at a time.
    """

    sizes: Sizes
    budget: int
    schedule: Schedule
    chunk_tokens: int
    block_tokens: int
    tile_columns: int
    hidden_accumulate: torch.dtype
    weight_accumulate: torch.dtype
    terms: tuple[Term, ...]
    note: str = ""

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return self.weight_accumulate

    @property
    def chunks(self) -> int:
        return math.ceil(self.sizes.tokens / self.chunk_tokens)

    @property
    def blocks(self) -> int:
        return math.ceil(self.sizes.tokens / self.block_tokens)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that the call hands over."""
        return sum(term.finish for term in self.terms if term.kind == "gradient")

    @property
    def peak_bytes(self) -> int:
        """Predicted peak over the inputs, gradients and (under autocast) the cast weight included."""
        return peak_of(self.terms)

    @property
    def extra_bytes(self) -> int:
        """Predicted peak beside the gradients and the cast weight: what ``memory_budget`` limits."""
        return extra_of(self.terms)

    @property
    def weight_error(self) -> float | None:
        """Expected relative rounding error of the weight's gradient, where a 16-bit type rounds it."""
        if not self.sizes.weight_grad or self.sizes.weight_dtype not in ROUNDING_ERROR:
            return None
        roundings = 1
        if self.weight_accumulate == self.sizes.weight_dtype:
            roundings = self.blocks if self.schedule == "recompute" else self.chunks
        return ROUNDING_ERROR[self.sizes.weight_dtype] * math.sqrt((roundings + 1) / 2)

    def buffer_elements(self, tiled: bool) -> int:
        """Logits that a call holds at a time: a chunk's, or a block's tile in the recompute schedule's backward."""
        return self.block_tokens * self.tile_columns if tiled else self.chunk_tokens * self.sizes.vocab

    def token_chunks(self) -> Iterator[slice]:
        return slices(self.sizes.tokens, self.chunk_tokens)

    def token_blocks(self) -> Iterator[slice]:
        return slices(self.sizes.tokens, self.block_tokens)

    def column_tiles(self) -> Iterator[slice]:
        return slices(self.sizes.vocab, self.tile_columns)

    def __str__(self) -> str:
        return table(self)


def slices(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


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


def balanced(tokens: int, most: int) -> int:
    """Rows of equal chunks of at most ``most``, a multiple of 128 where ``most`` leaves room for that."""
    if tokens <= most:
        return max(tokens, 1)
    rows = math.ceil(tokens / math.ceil(tokens / most))
    rounded = math.ceil(rows / CHUNK_MULTIPLE) * CHUNK_MULTIPLE
    return rounded if rounded <= most else rows


def rows_of(tokens: int, chunks: int) -> int:
    """Rows of equal chunks, no more of them than ``chunks``, a multiple of 128 where there are several."""
    rows = -(-max(tokens, 1) // chunks)
    return min(max(tokens, 1), -(-rows // CHUNK_MULTIPLE) * CHUNK_MULTIPLE)


def forward_terms(sizes: Sizes, rows: int, hidden_acc: torch.dtype, weight_acc: torch.dtype) -> tuple[Term, ...]:
    """Gradients in the forward pass: they wait in ``*_acc`` and are the gradients where that is their dtype."""
    d_hidden, d_weight = sizes.gradient_terms
    wait_h = sizes.tokens * sizes.hidden * hidden_acc.itemsize if sizes.hidden_grad else 0
    wait_w = sizes.weight_elements * weight_acc.itemsize if sizes.weight_grad else 0
    cast_h, cast_w = hidden_acc != sizes.hidden_dtype, weight_acc != sizes.weight_dtype
    # the gradient of hidden is handed over first, and its accumulator is gone before the weight's gradient comes
    left_h = max(0, wait_h - d_weight.finish) if cast_h and cast_w else wait_h if cast_h else 0
    return (
        replace(d_hidden, loop=0 if cast_h else d_hidden.finish),
        replace(d_weight, loop=0 if cast_w else d_weight.finish),
        Term("gradient of hidden, waiting", wait_h if cast_h else 0, left_h),
        Term("gradient of weight, waiting", wait_w if cast_w else 0, wait_w if cast_w else 0),
        Term("logits of a chunk and its rows", rows * sizes.row_bytes),
        Term("rows scaled, target's terms", fast_rows(sizes, rows, hidden_acc) if sizes.store == "fast" else 0),
        Term("work space of tiles", work_space(sizes, sizes.vocab, rows)),
        *sizes.common_terms,
    )


def sweep_terms(sizes: Sizes, rows: int) -> tuple[Term, ...]:
    """A pass that keeps statistics and no gradient."""
    return (
        Term("logits of a chunk and its rows", 0, sweep=rows * sizes.row_bytes),
        Term("work space of tiles", 0, sweep=work_space(sizes, sizes.vocab, rows)),
        *sizes.common_terms,
    )


def recompute_terms(
    sizes: Sizes, rows: int, block: int, tile: int, hidden_acc: torch.dtype, weight_acc: torch.dtype
) -> tuple[Term, ...]:
    """Gradients in backward, once the upstream gradient is known: blocks of tokens, tiles of vocabulary inside."""
    d_hidden, d_weight = sizes.gradient_terms
    accumulate_h = sizes.hidden_grad and hidden_acc != sizes.hidden_dtype
    cast_w = sizes.weight_grad and weight_acc != sizes.weight_dtype
    waiting = sizes.weight_elements * weight_acc.itemsize if cast_w else 0
    product = tile * sizes.hidden * 4 if sizes.weight_grad and sizes.through_fp32(weight_acc) else 0
    return (
        replace(d_hidden, loop=d_hidden.finish),
        replace(d_weight, loop=0 if cast_w else d_weight.finish),
        Term("gradient of weight, waiting", waiting, waiting),
        Term("gradient of hidden, a block", block * sizes.hidden * 4 if accumulate_h else 0),
        # in backward there are plain logits to differentiate, whatever the sweep stored
        Term("logits of a block's tile", block * tile * max(4, sizes.element)),
        Term("hidden states of a block", block * sizes.operand_bytes),
        Term(
            "work space of tiles", product + work_space(sizes, tile, block), sweep=work_space(sizes, sizes.vocab, rows)
        ),
        *sweep_terms(sizes, rows)[:1],
        *sizes.common_terms,
    )


def fast_rows(sizes: Sizes, rows: int, hidden_acc: torch.dtype) -> int:
    """The fast road's scaled operand, fp32 product on its way to a 16-bit gradient, and sums of targets' rows."""
    scaled = rows * sizes.hidden * sizes.element if sizes.weight_grad else 0
    product = rows * sizes.hidden * 4 if sizes.hidden_grad and hidden_acc != torch.float32 else 0
    target_rows = sizes.tokens * 28 + sizes.tokens * sizes.hidden // 4 if sizes.weight_grad else 0
    return scaled + product + target_rows


def work_space(sizes: Sizes, columns: int, rows: int) -> int:
    """Elementwise tiles of a backend that needs them, and where 16-bit operands are cast, the tiles of that."""
    elementwise = min(sizes.scratch, rows * columns * sizes.logit_bytes)
    if not sizes.half or sizes.half_products:
        return elementwise
    # a tile of the weight, and of its gradient
    return elementwise + 2 * 4 * sizes.hidden * min(columns, cast_rows(sizes.hidden))


def cast_rows(hidden: int) -> int:
    """Rows of the weight whose fp32 copy is about 16 MiB: what is cast at a time."""
    return max(CHUNK_MULTIPLE, CAST_BYTES // (4 * max(hidden, 1)))


def peak_of(terms: tuple[Term, ...]) -> int:
    return max(sum(t.sweep for t in terms), sum(t.loop for t in terms), sum(t.finish for t in terms))


def extra_of(terms: tuple[Term, ...]) -> int:
    """What the budget limits: the peak beside the gradients, a cast of the weight not counted."""
    counted = tuple(t for t in terms if t.kind != "cast")
    return max(0, peak_of(counted) - sum(t.finish for t in counted if t.kind == "gradient"))


def largest(fits: Callable[[int], bool], most: int, multiple: int = CHUNK_MULTIPLE) -> int:
    """The largest n up to ``most`` that fits, a multiple of ``multiple`` unless it is ``most`` or no such fits."""
    if fits(most):
        return most
    for step, top in ((multiple, most // multiple), (1, multiple - 1)):
        low, high = 0, top  # fits is monotone: bisect
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
        if low:
            return low * step
    return 0


def table(plan: Plan) -> str:
    s = plan.sizes
    rows = [
        ("tokens x hidden x vocab", f"{s.tokens} x {s.hidden} x {s.vocab}, {name(s.dtype)}"),
        ("schedule", plan.schedule + (f" ({plan.note})" if plan.note else "")),
        ("chunks", f"{plan.chunks} of {plan.chunk_tokens} tokens"),
        (
            "logits buffer",
            f"{s.logit_bytes * 8}-bit logits" if s.store == "logits" else f"16-bit exponentials ({s.store} road)",
        ),
    ]
    if plan.schedule == "recompute":
        rows.append(("gradients", f"{plan.blocks} x {plan.block_tokens} tokens, tiles of {plan.tile_columns} columns"))
    if s.any_grad:
        rows.append(("accumulation", f"weight {name(plan.weight_accumulate)}, hidden {name(plan.hidden_accumulate)}"))
    if plan.weight_error is not None:
        rows.append(("expected error of dweight", f"{plan.weight_error:.1e} relative"))
    lines = [f"{key:<32}{value}" for key, value in rows]
    columns = [(t.name, t.sweep, t.loop, t.finish) for t in plan.terms if t.sweep or t.loop or t.finish]
    lines.append(f"{'MiB':<32}{'sweep':>10}{'loop':>10}{'finish':>10}")
    lines += [f"  {label:<30}" + "".join(f"{b / MiB:>10.1f}" for b in bytes_) for label, *bytes_ in columns]
    lines.append(f"{'peak over the inputs':<32}{plan.peak_bytes / MiB:>10.1f} MiB")
    lines.append(f"{'beside the gradients':<32}{plan.extra_bytes / MiB:>10.1f} MiB of {plan.budget / MiB:.0f}")
    return "\n".join(lines)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
