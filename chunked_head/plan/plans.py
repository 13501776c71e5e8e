"""The plan of a call: its chunks, its schedule and the buffers that it needs; printed as a table."""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import torch

from ..core.checks import name
from .sizes import (
    BYTE,
    HIDDEN,
    LOOP,
    LOSSES,
    SWEEP,
    TILE_ELEMENTS,
    WEIGHT,
    Buffer,
    MiB,
    Phase,
    Sizes,
    cast_rows,
    padded_e4m3,
    peak_of,
    phase_bytes,
)

BYTES_PER_TOKEN = 80  # of temporaries in the losses' arithmetic
BYTES_PER_TEACHER_ID = 96  # of the same temporaries, for each id of a token's ``teacher_ids``
# relative error of one rounding; the error of a sum of 16-bit roundings grows as sqrt((chunks + 1) / 2)
ROUNDING_ERROR = {torch.bfloat16: 1.65e-3, torch.float16: 2.1e-4}
MAX_HALF_CHUNKS = 8  # chunks over which a sum in 16 bits is accurate enough
Schedule = Literal["loss only", "forward", "recompute"]
Section = tuple[str, Sequence[tuple[str, ...]]]  # a title and its rows of cells


@dataclass(frozen=True)
class Plan:
    """The way a call runs and the memory that the call needs; ``print`` shows a plan as a table. Holds no tensor.

    ``schedule``: "forward" makes gradients along with the loss. "recompute" makes gradients in backward, where logits
    are computed again. "loss only" makes no gradients. ``has_unit_rows``: "forward" makes the rows of hidden's gradient
    for upstream gradients of 1, and backward multiplies each row by a factor. ``chunk_tokens``: number of rows of
    logits in memory in a pass over all columns. ``block_tokens``, ``tile_columns``: numbers of rows and columns of
    logits from which "recompute" makes gradients at a time. ``hidden_accumulate``, ``weight_accumulate``: dtypes in
    which the gradients add up. ``budget``: most bytes that ``extra_bytes`` may be.
    """

    sizes: Sizes
    budget: int  # bytes
    schedule: Schedule
    chunk_tokens: int  # rows of a chunk
    block_tokens: int  # rows of a block
    tile_columns: int  # columns of a tile
    hidden_accumulate: torch.dtype
    weight_accumulate: torch.dtype
    note: str = ""  # the reason for the schedule, for the printed plan
    has_unit_rows: bool = False
    segment_chunks: int | None = None  # number of chunks, where chunks end with segments; else None
    budget_rule: tuple[str, ...] = ()  # the reason for the budget, as lines for the printed plan

    @property
    def chunks(self) -> int:
        """Number of chunks of tokens."""
        return math.ceil(self.sizes.tokens / self.chunk_tokens) if self.segment_chunks is None else self.segment_chunks

    @property
    def blocks(self) -> int:
        """Number of blocks of tokens. "recompute" makes the gradients of one block after the other."""
        return math.ceil(self.sizes.tokens / self.block_tokens)

    @functools.cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The tensors that the call makes, with their shapes, dtypes and lifetimes."""
        return tuple([b for b in (*sized_buffers(self), *call_buffers(self)) if 0 not in b.shape])

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that the call returns."""
        return sum(buffer.bytes for buffer in self.buffers if buffer.kind == "gradient")

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the bytes that the call allocates, with gradients and, under autocast, the cast weight."""
        return peak_of(self.buffers)

    @property
    def extra_bytes(self) -> int:
        """Predicted peak without gradients and cast weight: the bytes that ``memory_budget`` limits."""
        return max(0, peak_of(b for b in self.buffers if b.kind != "cast") - self.gradient_bytes)

    @property
    def weight_error(self) -> float | None:
        """Expected relative rounding error of the weight's gradient; None unless the call returns one in 16 bits."""
        if not self.sizes.returns_weight_grad or self.sizes.weight_dtype not in ROUNDING_ERROR:
            return None
        rounding_count = 1
        if self.weight_accumulate == self.sizes.weight_dtype:
            rounding_count = self.blocks if self.schedule == "recompute" else self.chunks
        return ROUNDING_ERROR[self.sizes.weight_dtype] * math.sqrt((rounding_count + 1) / 2)

    @property
    def too_many_chunks(self) -> bool:
        """True where the weight's gradient adds up in 16 bits over more than ``MAX_HALF_CHUNKS`` chunks."""
        is_half_sum = self.sizes.returns_weight_grad and self.weight_accumulate.itemsize < 4
        return is_half_sum and self.chunks > MAX_HALF_CHUNKS

    @functools.cached_property
    def teacher_last(self) -> bool:
        """True where a dense teacher's logits and the sums over student and teacher are made with the gradients."""
        return self.schedule == "forward" and self.sizes.teacher_last

    @property
    def e4m3_gradients(self) -> bool:
        """True where dhidden and dweight are products of e4m3 operands."""
        return self.schedule == "forward" and self.sizes.e4m3_gradients

    @functools.cached_property
    def in_common(self) -> dict[str, str]:
        """The plan's fields that are equal on all ranks that share a vocabulary, as text by name."""
        demand = self.sizes.demand.of_columns(None)._replace(values=0)
        sizes = replace(self.sizes, vocab=0, padding=0, demand=demand)
        return text_fields(replace(self, sizes=sizes, tile_columns=0, budget=0, budget_rule=()))

    @property
    def row_factors(self) -> bool:
        """The older name of ``has_unit_rows``; DeprecationWarning."""
        warnings.warn("Plan.row_factors is called Plan.has_unit_rows", DeprecationWarning, stacklevel=2)
        return self.has_unit_rows

    @property
    def ending(self) -> int | None:
        """The older name of ``segment_chunks``; DeprecationWarning."""
        warnings.warn("Plan.ending is called Plan.segment_chunks", DeprecationWarning, stacklevel=2)
        return self.segment_chunks

    def __str__(self) -> str:
        return as_text(sections(self))

    def __repr__(self) -> str:
        sizes = self.sizes
        shape_text = f"{sizes.tokens} x {sizes.hidden} x {sizes.vocab} {name(sizes.dtype)}"
        count_text = f"{self.chunks} chunk{'s' * (self.chunks != 1)} of {self.chunk_tokens} tokens"
        memory_text = f"{self.extra_bytes / MiB:,.0f} of {self.budget / MiB:,.0f} MiB beside the gradients"
        return f"Plan({shape_text}: {self.schedule}, {count_text}, {memory_text})"


def text_fields(record: Any, prefix: str = "") -> dict[str, str]:
    """Fields of a dataclass or NamedTuple as text by name. A field of a nested record has the name ``outer.inner``."""
    text_by_name: dict[str, str] = {}
    for field_name in getattr(record, "_fields", None) or [field.name for field in fields(record)]:
        value = getattr(record, field_name)
        if is_dataclass(value) or hasattr(value, "_fields"):
            text_by_name |= text_fields(value, f"{prefix}{field_name}.")
        else:
            text_by_name[prefix + field_name] = value.__name__ if isinstance(value, type) else str(value)
    return text_by_name


def byte_counter(plan: Plan, resize: Callable[..., Plan]) -> Callable[..., int]:
    """A function that takes ``*sizes``, such as the number of rows of a chunk, and returns ``extra_bytes`` of the plan
    ``resize(plan, *sizes)``."""
    fixed_buffers = [buffer for buffer in call_buffers(plan) if buffer.kind != "cast"]
    fixed_bytes = phase_bytes(fixed_buffers)
    gradient_bytes = sum(buffer.bytes for buffer in fixed_buffers if buffer.kind == "gradient")

    @functools.cache
    def bytes_of(*sizes: int) -> int:
        return max(0, peak_of(sized_buffers(resize(plan, *sizes)), fixed_bytes) - gradient_bytes)

    return bytes_of


def call_buffers(plan: Plan) -> Iterator[Buffer]:
    """The buffers that do not depend on the sizes of chunks, blocks and tiles."""
    sizes = plan.sizes
    if plan.schedule == "forward":
        yield from gradient_buffers(sizes, plan.hidden_accumulate, plan.weight_accumulate, SWEEP)
        if sizes.dtype == torch.float16 and sizes.store.has_matmul and sizes.weight_grad and sizes.half_products:
            # divided by fp16's scale before it is added; where 16-bit operands are cast, ``cast_buffers`` has it
            tile_rows = min(sizes.vocab, cast_rows(sizes.hidden))
            yield Buffer("gradient of weight, a tile", (tile_rows, sizes.hidden), torch.float32, LOOP, LOOP)
    elif plan.schedule == "recompute":
        yield from gradient_buffers(sizes, sizes.hidden_dtype, plan.weight_accumulate, LOOP)
    if sizes.is_copied:
        yield Buffer("copy of hidden states", (sizes.own_tokens, sizes.hidden), sizes.hidden_dtype, SWEEP, WEIGHT)
    if sizes.is_moved and sizes.hidden_grad:
        shape, dtype = (sizes.tokens, sizes.hidden), plan.hidden_accumulate
        yield Buffer("gradient of hidden in the call's order", shape, dtype, HIDDEN, HIDDEN)
    if sizes.hidden_ranks > 1:
        yield Buffer("teacher's hidden states", (sizes.tokens, sizes.teacher_width), sizes.dtype, SWEEP, WEIGHT)
    if sizes.weight_dtype != sizes.dtype:
        shape = sizes.vocab + sizes.padding, sizes.hidden
        yield Buffer("weight cast for autocast", shape, sizes.dtype, SWEEP, LOOP, "cast")
    if sizes.fp8_copy == "made":
        yield Buffer("weight in e4m3", (sizes.vocab, sizes.hidden), torch.float8_e4m3fn, SWEEP, LOOP)
    if plan.e4m3_gradients and sizes.hidden_grad:
        shape = sizes.hidden, padded_e4m3(sizes.vocab)
        yield Buffer("weight in e4m3, transposed", shape, torch.float8_e4m3fn, SWEEP, LOOP)
    if sizes.fp8_copy:
        yield Buffer("weight times a direction", (sizes.vocab,), torch.float32, SWEEP, LOOP)
    if sizes.teacher_cast:
        shape = (sizes.teacher_columns, sizes.teacher_width)
        yield Buffer("teacher's weight cast for autocast", shape, sizes.dtype, SWEEP, LOOP, "cast")
    yield from vector_buffers(plan)


def sized_buffers(plan: Plan) -> Iterator[Buffer]:
    """The buffers that depend on the sizes of chunks, blocks or tiles."""
    sizes, rows, is_forward = plan.sizes, plan.chunk_tokens, plan.schedule == "forward"
    # if a loss waits for several chunks, buffers of the sweep are freed before the losses' arithmetic
    last_phase = LOOP if is_forward else SWEEP if sizes.waits_for_all and rows < sizes.tokens else LOSSES
    yield Buffer("statistics of ranks", (rows, merged_bytes(sizes)), BYTE, SWEEP, SWEEP)
    yield from sizes.store.chunk_buffers(sizes, rows, last_phase, is_forward or sizes.keeps_sweep)
    yield from block_buffers(sizes, rows, sizes.vocab, SWEEP, last_phase)
    if sizes.store.has_matmul:
        yield from operand_buffers(sizes, rows, SWEEP, last_phase)
    yield from cast_buffers(sizes, sizes.vocab, SWEEP, last_phase)
    if is_forward and sizes.hidden_ranks > 1 and sizes.hidden_grad:
        yield Buffer("gradient of hidden, of all ranks", (2, rows, sizes.hidden), plan.hidden_accumulate, LOOP, LOOP)
    if plan.schedule == "recompute":
        yield from recompute_buffers(plan)
    # the losses' arithmetic runs for all tokens at once if a loss depends on all, or values are made after the sweep
    runs_in_backward = plan.schedule == "recompute" and plan.block_tokens < sizes.tokens
    has_all_tokens = sizes.waits_for_all or sizes.ends_with_segments or sizes.teacher_last or runs_in_backward
    bytes_per_token = BYTES_PER_TOKEN + BYTES_PER_TEACHER_ID * sizes.demand.columns
    if runs_in_backward and not sizes.waits_for_all:  # ``vector_buffers`` has the coefficients, which stay
        bytes_per_token -= 4 * torch.float32.itemsize
    shape = sizes.tokens if has_all_tokens else rows, bytes_per_token
    yield Buffer("losses' arithmetic", shape, BYTE, LOSSES, LOSSES)


def recompute_buffers(plan: Plan) -> Iterator[Buffer]:
    """Buffers that the recompute schedule makes for the gradients of a block of tokens and a tile of the vocabulary."""
    sizes, block_rows, tile_columns = plan.sizes, plan.block_tokens, plan.tile_columns
    if sizes.hidden_grad and plan.hidden_accumulate != sizes.hidden_dtype:
        yield Buffer("gradient of hidden, a block", (block_rows, sizes.hidden), torch.float32, LOOP, LOOP)
    if sizes.hidden_grad and sizes.hidden_ranks > 1:
        yield Buffer("gradient of hidden, of all ranks", (2, block_rows, sizes.hidden), sizes.hidden_dtype, LOOP, LOOP)
    yield from sizes.store.tile_buffers(sizes, block_rows, tile_columns)
    yield from block_buffers(sizes, block_rows, tile_columns, LOOP, LOOP)
    yield from operand_buffers(sizes, block_rows, LOOP, LOOP)
    # a tile of dweight is made in fp32 before it is added, where fp16 is scaled or the sums have another dtype
    needs_fp32 = sizes.dtype == torch.float16 or not sizes.sums_into(plan.weight_accumulate)
    if sizes.weight_grad and needs_fp32 and (sizes.half_products or not sizes.half):
        tile_rows = min(tile_columns, cast_rows(sizes.hidden))  # of the weight: columns of the logits
        yield Buffer("gradient of weight, a tile", (tile_rows, sizes.hidden), torch.float32, LOOP, LOOP)
    yield from cast_buffers(sizes, tile_columns, LOOP, LOOP)


def block_buffers(sizes: Sizes, rows: int, columns: int, first: Phase, last: Phase) -> Iterator[Buffer]:
    """Temporaries of torch operations that make statistics and gradients by blocks of logits. The operations
    reuse the memory of the weight's cast tile, so that the tile's bytes are subtracted."""
    if not sizes.in_blocks:
        return
    demand, block_bytes = sizes.demand, min(TILE_ELEMENTS, rows * columns) * sizes.wide.itemsize
    has_sums = demand.pairing is not None or bool(demand.sums)
    has_softmax_statistics = len(demand.views) > 1 or any(statistic.of_softmax for statistic in demand.statistics[0])
    cast_bytes = sum(buffer.bytes for buffer in cast_buffers(sizes, columns, LOOP, LOOP))
    if first == SWEEP:
        block_count = 8 if has_sums else 4 if has_softmax_statistics else 2
        yield Buffer("blocks of statistics", (max(0, block_count * block_bytes - cast_bytes),), BYTE, SWEEP, SWEEP)
    if last == LOOP:
        block_count = 10 if has_sums else 5 if has_softmax_statistics else 3
        yield Buffer("blocks of gradients", (max(0, block_count * block_bytes - cast_bytes),), BYTE, LOOP, LOOP)


def gradient_buffers(
    sizes: Sizes, hidden_sum_dtype: torch.dtype, weight_sum_dtype: torch.dtype, begin: Phase
) -> Iterator[Buffer]:
    """Buffers of the gradients that the call returns. A gradient that adds up in another dtype has a second buffer,
    "waiting", which is cast at the end. ``begin``: the first phase that adds to the gradients."""
    if sizes.hidden_grad:
        shape, is_cast_at_end = (sizes.own_tokens, sizes.hidden), hidden_sum_dtype != sizes.hidden_dtype
        first_phase = HIDDEN if is_cast_at_end else begin
        yield Buffer("gradient of hidden", shape, sizes.hidden_dtype, first_phase, WEIGHT, "gradient")
        if is_cast_at_end:
            yield Buffer("gradient of hidden, waiting", shape, hidden_sum_dtype, begin, HIDDEN)
    weight_rows, is_cast_at_end = sizes.vocab + sizes.padding, weight_sum_dtype != sizes.weight_dtype
    first_phase, shape = WEIGHT if sizes.returns_weight_grad and is_cast_at_end else begin, (weight_rows, sizes.hidden)
    if sizes.returns_weight_grad:
        yield Buffer("gradient of weight", shape, sizes.weight_dtype, first_phase, WEIGHT, "gradient")
        if is_cast_at_end:
            yield Buffer("gradient of weight, waiting", shape, weight_sum_dtype, begin, WEIGHT)
    if sizes.bias_grad:
        yield Buffer("gradient of bias", (weight_rows,), sizes.weight_dtype, first_phase, WEIGHT, "gradient")


def vector_buffers(plan: Plan) -> Iterator[Buffer]:
    """Buffers with numbers for each token: targets, fields, statistics, values, coefficients."""
    sizes, demand, tokens, wide_dtype = plan.sizes, plan.sizes.demand, plan.sizes.tokens, plan.sizes.wide
    yield Buffer("targets", (tokens,), torch.int64, SWEEP, WEIGHT)
    yield Buffer("columns' ids", (tokens, demand.columns), torch.int64, SWEEP, WEIGHT)
    yield Buffer("fields", (tokens, demand.field_bytes + 4 * demand.columns), BYTE, SWEEP, WEIGHT)
    yield Buffer("statistics", (tokens, demand.numbers_per_token), wide_dtype, SWEEP, WEIGHT)
    # 1: each token's loss alone is kept
    value_count = max(1, demand.values * plan.has_unit_rows) if sizes.waits_for_backward else demand.values
    yield Buffer("values", (tokens, value_count), wide_dtype, SWEEP, WEIGHT)
    if sizes.any_grad:
        coefficient_count = 1 + len(demand.views) + demand.columns
        coefficient_count += sum(s.slopes is not None for view_statistics in demand.statistics for s in view_statistics)
        coefficient_count += bool(demand.sums) + sum(vocab_sum.is_differentiated for vocab_sum in demand.sums)
        yield Buffer("coefficients", (tokens, coefficient_count), wide_dtype, SWEEP, WEIGHT)


def operand_buffers(sizes: Sizes, rows: int, first: Phase, last: Phase) -> Iterator[Buffer]:
    """Buffers of the matmuls' operand: hidden states, with 0 where a token does not count."""
    yield Buffer("hidden states of a chunk", (rows, sizes.hidden), sizes.dtype, first, last)
    yield Buffer("teacher's hidden states of a chunk", (rows, sizes.teacher_width), sizes.dtype, first, last)
    if sizes.fp8_copy:
        yield Buffer("hidden states in e4m3", (rows, sizes.hidden + 8), BYTE, first, last)  # and two numbers
    if sizes.hidden_ranks > 1:
        yield Buffer("hidden states of all ranks", (rows, sizes.hidden), sizes.hidden_dtype, first, last)
    if sizes.half and not sizes.half_products:  # 2: an operand and a product
        yield Buffer("hidden states in fp32", (2, rows, sizes.hidden), torch.float32, first, last)


def cast_buffers(sizes: Sizes, columns: int, first: Phase, last: Phase) -> Iterator[Buffer]:
    """The fp32 buffer of a tile of the weight or of its gradient; none unless the device's products need a cast of
    16-bit operands."""
    if sizes.half and not sizes.half_products:
        shape = (min(columns, cast_rows(sizes.hidden)), sizes.hidden)
        yield Buffer("a tile of the weight in fp32", shape, torch.float32, first, last)


def merged_bytes(sizes: Sizes) -> int:
    """Bytes per row for the merge of ranks' statistics: the received numbers, a copy in fp64, and temporaries."""
    if sizes.ranks == 1:
        return 0
    number_count = 1 + sizes.layout.message_numbers
    list_bytes = sum(8 * len(statistic.vectors) * statistic.width for statistic in sizes.demand.lists)
    return sizes.ranks * (12 * number_count + 48 + list_bytes) + 8 * number_count


def own_dweight(plan: Plan, is_stored: bool) -> bool:
    """True where this library's kernels compute dweight, False where BLAS computes dweight. ``is_stored``: the product
    is stored, not added to a buffer. Kernels compute products that skip rows, since BLAS cannot skip rows. Kernels
    also compute a call's only product, if the product is stored and has few enough rows: the kernels are then as fast
    as BLAS, and cheaper to launch."""
    sizes = plan.sizes
    least_rows, most_rows = (0, -1) if sizes.gpu is None else sizes.gpu.own_dweight_rows
    is_only_product = plan.schedule == "forward" and plan.chunks == 1 and plan.weight_accumulate == sizes.dtype
    is_fast = is_stored and is_only_product and least_rows <= sizes.tokens <= most_rows
    return sizes.own_matmul and (sizes.has_device_count or is_fast)


def facts(plan: Plan) -> list[tuple[str, str]]:
    """Lines of a printed plan, each a label and a text, that say how the call runs."""
    sizes = plan.sizes
    lines = [
        ("tokens x hidden x vocab", f"{sizes.tokens} x {sizes.hidden} x {sizes.vocab}, {name(sizes.dtype)}"),
        ("schedule", plan.schedule + (f" ({plan.note})" if plan.note else "")),
        ("chunks", f"{plan.chunks} of {plan.chunk_tokens} tokens" + (" at most" if plan.segment_chunks else "")),
        ("logits buffer", content_of_logits(sizes)),
    ]
    if sizes.demand.pairing is not None:
        source_text = f"made of hidden states [{sizes.teacher_width}]" if sizes.teacher_width else "given by the caller"
        lines.append(("teacher", f"logits of {sizes.teacher_columns} ids, {source_text}"))
    if sizes.fp8_copy:
        operands_text = f"e4m3, the weight's copy {sizes.fp8_copy}; probable ids' logits of {name(sizes.dtype)}"
        lines.append(("logits' operands", operands_text))
        if sizes.any_grad:
            operands_text = "e4m3, targets and heavy ids apart" if plan.e4m3_gradients else name(sizes.dtype)
            lines.append(("gradients' operands", operands_text))
    if sizes.gpu is not None:
        lines.append(("GPU", sizes.gpu.name))
    if plan.schedule == "recompute":
        lines.append(("gradients", f"{plan.blocks} x {plan.block_tokens} tokens, tiles of {plan.tile_columns} columns"))
    if sizes.any_grad:
        lines.append(("accumulation", f"weight {name(plan.weight_accumulate)}, hidden {name(plan.hidden_accumulate)}"))
    if sizes.buffer_dtype is not None and sizes.weight_grad:
        pass_name = "forward" if plan.schedule == "forward" else "backward"
        lines.append(("gradient of weight", f"added to a {name(sizes.buffer_dtype)} buffer in the {pass_name} pass"))
    if plan.weight_error is not None:
        lines.append(("expected error of dweight", f"{plan.weight_error:.1e} relative"))
    return lines


def sections(plan: Plan) -> list[Section]:
    """The sections of a printed plan: facts, buffers with their lifetimes, memory."""
    buffer_table = [("", "shape", "dtype", "MiB", "in memory"), *[
        (b.name, " x ".join(map(str, b.shape)), name(b.dtype), f"{b.bytes / MiB:,.1f}", lifetime(b))
        for b in plan.buffers
    ]]  # fmt: skip
    mebi_logits, itemsize = plan.sizes.tokens * plan.sizes.vocab / MiB, plan.sizes.dtype.itemsize  # logits / 2^20
    copies_text = f", and {4 * mebi_logits:,.0f} for each copy in float32" if itemsize < 4 else ""
    memory_lines = [
        ("peak over the inputs", f"{plan.peak_bytes / MiB:,.1f} MiB"),
        ("beside the gradients", f"{plan.extra_bytes / MiB:,.1f} MiB of {plan.budget / MiB:,.0f}"),
        *[("" if i else "budget", line) for i, line in enumerate(plan.budget_rule)],
        ("full logits would take", f"{itemsize * mebi_logits:,.0f} MiB in {name(plan.sizes.dtype)}{copies_text}"),
    ]
    budget_table = [("memory_budget", "schedule", "chunks", "sums of dweight", "MiB"), *[
        (budget, p.schedule, str(p.chunks), name(p.weight_accumulate), f"{p.extra_bytes / MiB:,.1f}")
        for plans_at_budgets in OTHER_BUDGETS for budget, p in plans_at_budgets(plan)
    ]]  # fmt: skip
    return [
        ("Plan", facts(plan)),
        ("Buffers", buffer_table),
        ("Memory", memory_lines),
        ("Budgets that would do", budget_table),
    ]


# a function that makes plans of the same call at other budgets; appended by ``planner.py``, which imports this file
OTHER_BUDGETS: list[Callable[[Plan], Iterator[tuple[str, Plan]]]] = []


def lifetime(buffer: Buffer) -> str:
    """The phases in which a buffer is in memory, such as "sweep to loop"."""
    if (buffer.first, buffer.last) == (Phase.SWEEP, Phase.WEIGHT):
        return "call"
    phase_names = "sweep", "losses", "loop", "finish", "finish"
    first_name, last_name = phase_names[buffer.first], phase_names[buffer.last]
    return first_name if first_name == last_name else f"{first_name} to {last_name}"


def as_text(sections: Sequence[Section]) -> str:
    """Sections as plain text. In rows of more than two cells, all cells but the first are aligned on the right."""
    lines = []
    for title, rows in sections:
        column_widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        label_width = max(30, column_widths[0] if len(column_widths) > 2 else 0)
        lines.append(title)
        for label, *cells in rows:
            if cells[1:]:
                cells = [f"  {cell:>{width}}" for cell, width in zip(cells, column_widths[1:], strict=True)]
            lines.append(f"  {label:<{label_width}}" + "".join(cells))
    return "\n".join(lines)


def content_of_logits(sizes: Sizes) -> str:
    """A line of the printed plan about the buffer of logits: the number that it stores for each logit, and the reason
    for the number's bits."""
    if not sizes.store.has_matmul:
        return sizes.store.description
    content_text = f"{16 if sizes.own_matmul else 8 * sizes.wide.itemsize}-bit {sizes.store.description}"
    if sizes.gpu is None:
        return f"{content_text} (no GPU with matmuls of ours)"
    if sizes.store.name == "fast":
        return content_text
    reason = name(sizes.dtype)
    if sizes.own_matmul:
        reason = reason if sizes.dtype != torch.bfloat16 else "the gradient takes a pass over them"
    elif sizes.half:
        reason = "top_k" if sizes.demand.searches_logits else "rows not on 16 bytes"
    return f"{content_text} ({reason})"
