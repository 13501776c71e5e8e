"""The plan of a call: its chunks, its schedule and the buffers that it needs; printed as a table."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..core.checks import name
from ..kernels.common.gpus import RELATIVE_STRIP, Gpu
from ..kernels.common.tiles import STRIPS_AT_ONCE
from .buffers import (
    BYTE,
    BYTES_PER_COLUMN,
    BYTES_PER_EVALUATED,
    HIDDEN,
    LOOP,
    LOSSES,
    SWEEP,
    WEIGHT,
    Buffer,
    Phase,
    cast_rows,
    chunk_buffers,
    extra_of,
    gradient_buffers,
    gradients_of,
    logit_bytes,
    operand_buffers,
    padded_columns,
    part_sums,
    peak_of,
    target_buffers,
    vector_buffers,
    wide_dtype,
    work_buffers,
)
from .sizes import MiB, Sizes, slices

# relative error of one rounding; the error of a sum of 16-bit roundings grows as sqrt((chunks + 1) / 2)
ROUNDING_ERROR = {torch.bfloat16: 1.65e-3, torch.float16: 2.1e-4}
MAX_HALF_CHUNKS = 8  # chunks over which a sum in 16 bits is accurate enough
Schedule = Literal["loss only", "forward", "recompute"]
Section = tuple[str, Sequence[tuple[str, ...]]]  # a title and its rows of cells


@dataclass(frozen=True)
class Plan:
    """The way a call runs and the memory that it needs; ``print`` shows it as a table. Holds no tensor.

    ``schedule``: "forward" makes gradients along with the loss, "recompute" in backward from logits computed again,
    "loss only" none. ``chunk_tokens``: rows of logits at a time in passes over all columns; "recompute" makes gradients
    from ``block_tokens`` rows by ``tile_columns`` columns at a time. ``budget``: bytes that ``extra_bytes`` may reach.
    """

    sizes: Sizes
    budget: int
    schedule: Schedule
    chunk_tokens: int
    block_tokens: int
    tile_columns: int
    hidden_accumulate: torch.dtype
    weight_accumulate: torch.dtype
    note: str = ""
    ending: int | None = None  # chunks of a call that end where its segments do: as many as there are

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return self.weight_accumulate

    @property
    def chunks(self) -> int:
        """Number of chunks of tokens."""
        return math.ceil(self.sizes.tokens / self.chunk_tokens) if self.ending is None else self.ending

    @property
    def blocks(self) -> int:
        return math.ceil(self.sizes.tokens / self.block_tokens)

    def token_chunks(self) -> list[slice]:
        return slices(self.sizes.tokens, self.chunk_tokens)

    def column_tiles(self) -> list[slice]:
        return slices(self.sizes.vocab, self.tile_columns)

    @functools.cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The tensors that the call makes, with their shapes, dtypes and lifetimes."""
        return tuple([b for b in (*sized_buffers(self), *call_buffers(self)) if 0 not in b.shape])

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that the call hands over."""
        return gradients_of(self.buffers)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak over the inputs, gradients and (under autocast) the cast weight included."""
        return peak_of(self.buffers)

    @property
    def extra_bytes(self) -> int:
        """Predicted peak beside the gradients and the cast weight: what ``memory_budget`` limits."""
        return extra_of(self.buffers)

    @property
    def weight_error(self) -> float | None:
        """Expected relative rounding error of the weight's gradient, where a 16-bit type rounds it."""
        if not self.sizes.returns_weight_grad or self.sizes.weight_dtype not in ROUNDING_ERROR:
            return None
        roundings = 1
        if self.weight_accumulate == self.sizes.weight_dtype:
            roundings = self.blocks if self.schedule == "recompute" else self.chunks
        return ROUNDING_ERROR[self.sizes.weight_dtype] * math.sqrt((roundings + 1) / 2)

    @property
    def too_many_chunks(self) -> bool:
        """True where the weight's gradient adds up in 16 bits over more chunks than that is accurate for."""
        half = self.sizes.returns_weight_grad and self.weight_accumulate.itemsize < 4
        return half and self.chunks > MAX_HALF_CHUNKS

    @property
    def vocab_block(self) -> int | None:
        """Ids of a block, where statistics are those of blocks first: of logits that are not stored."""
        sizes = self.sizes
        return None if self.schedule == "forward" or sizes.store == "kept" or sizes.keeps_sweep else sizes.block

    @property
    def teacher_last(self) -> bool:
        """True where a dense teacher's logits, and its statistics with the student, are made along with gradients."""
        return self.schedule == "forward" and self.sizes.teacher_last

    @property
    def in_common(self) -> "Plan":
        """The plan without what differs between ranks of a vocabulary; losses and metrics say their numbers
        themselves."""
        demand = self.sizes.demand.of_columns(None)._replace(values=0)
        return replace(self, sizes=replace(self.sizes, vocab=0, padding=0, demand=demand), tile_columns=0, budget=0)

    def __str__(self) -> str:
        return as_text(sections(self))


def call_buffers(plan: Plan) -> Iterator[Buffer]:
    """The buffers that do not depend on chunks, blocks and tiles."""
    sizes = plan.sizes
    if plan.schedule == "forward":
        yield from gradient_buffers(sizes, plan.hidden_accumulate, plan.weight_accumulate, SWEEP)
        if sizes.dtype == torch.float16 and sizes.store != "kept" and sizes.weight_grad and sizes.half_products:
            # fp16's factor comes back to it before it is added; where operands are cast, it is among their tiles
            columns = min(sizes.vocab, cast_rows(sizes.hidden))
            yield Buffer("gradient of weight, a tile", (columns, sizes.hidden), torch.float32, LOOP, LOOP)
    elif plan.schedule == "recompute":
        yield from gradient_buffers(sizes, sizes.hidden_dtype, plan.weight_accumulate, LOOP)
    if sizes.copied:
        yield Buffer("copy of hidden states", (sizes.own_tokens, sizes.hidden), sizes.hidden_dtype, SWEEP, WEIGHT)
    if sizes.spread > 1:
        yield Buffer("teacher's hidden states", (sizes.tokens, sizes.teacher_width), sizes.dtype, SWEEP, WEIGHT)
    if sizes.weight_dtype != sizes.dtype:
        rows = sizes.vocab + sizes.padding
        yield Buffer("weight cast for autocast", (rows, sizes.hidden), sizes.dtype, SWEEP, LOOP, "cast")
    if sizes.teacher_cast:
        shape = (sizes.teacher_columns, sizes.teacher_width)
        yield Buffer("teacher's weight cast for autocast", shape, sizes.dtype, SWEEP, LOOP, "cast")
    yield from vector_buffers(sizes)


def sized_buffers(plan: Plan) -> Iterator[Buffer]:
    """The buffers that do."""
    sizes, rows = plan.sizes, plan.chunk_tokens
    if plan.schedule == "forward":
        yield from forward_buffers(plan)
    else:
        # a sweep for statistics; where a loss waits for several chunks, they are gone by then
        last = SWEEP if sizes.coupled and rows < sizes.tokens else LOSSES
        yield from chunk_buffers(sizes, rows, last, stored=sizes.keeps_sweep)
        yield from work_buffers(sizes, rows, sizes.vocab, SWEEP, last)
    if plan.schedule == "recompute":
        yield from tile_buffers(plan)
    if sizes.scratch and rows < sizes.tokens and not sizes.late_upstream:  # torch copies them to be summed
        yield Buffer("values of all chunks", (sizes.tokens, sizes.demand.values), wide_dtype(sizes), HIDDEN, HIDDEN)
    # a loss that sees all tokens at once does its arithmetic for all of them at once, as does one whose values are last
    at_once = sizes.coupled or sizes.by_segments or sizes.teacher_last
    each = BYTES_PER_EVALUATED + BYTES_PER_COLUMN * sizes.demand.columns
    yield Buffer("losses' arithmetic", (sizes.tokens if at_once else rows, each), BYTE, LOSSES, LOSSES)


def forward_buffers(plan: "Plan") -> Iterator[Buffer]:
    """A pass over chunks that makes gradients along with the statistics."""
    sizes, rows = plan.sizes, plan.chunk_tokens
    yield from chunk_buffers(sizes, rows, LOOP, stored=True)
    if sizes.teacher_last:
        assert sizes.demand.pairing is not None
        sums = sizes.demand.pairing.forward_kl + sizes.demand.pairing.entropy
        strips = math.ceil(sizes.vocab / (RELATIVE_STRIP * STRIPS_AT_ONCE))
        yield Buffer("teacher's sums of strips", (rows, sums, strips), torch.float32, LOOP, LOOP)
    if sizes.spread > 1 and sizes.hidden_grad:
        yield Buffer("gradient of hidden, of all ranks", (2, rows, sizes.hidden), plan.hidden_accumulate, LOOP, LOOP)
    if sizes.store == "fast" and sizes.weight_grad:
        yield from target_buffers(sizes, rows)
    yield Buffer("gradient of hidden, parts", (part_sums(sizes, rows) // 4,), torch.float32, LOOP, LOOP)
    yield from work_buffers(sizes, rows, sizes.vocab, SWEEP, LOOP)


def tile_buffers(plan: "Plan") -> Iterator[Buffer]:
    """Gradients from known statistics: by blocks of tokens, tiles of the vocabulary inside."""
    sizes, block, tile = plan.sizes, plan.block_tokens, plan.tile_columns
    if sizes.hidden_grad and plan.hidden_accumulate != sizes.hidden_dtype:
        yield Buffer("gradient of hidden, a block", (block, sizes.hidden), torch.float32, LOOP, LOOP)
    if sizes.hidden_grad and sizes.spread > 1:
        yield Buffer("gradient of hidden, of all ranks", (2, block, sizes.hidden), sizes.hidden_dtype, LOOP, LOOP)
    if sizes.grads_in_matmul and sizes.store != "kept":
        yield Buffer("gradients of a tile's logits", (block, padded_columns(tile)), sizes.dtype, LOOP, LOOP)
    elif sizes.store != "kept":
        # plain logits to differentiate, whatever the sweep stored
        columns = tile + (min(tile, sizes.teacher_columns) if sizes.teacher_store else 0)
        yield Buffer("logits of a tile", (block, columns), wide_dtype(sizes), LOOP, LOOP)
    yield from operand_buffers(sizes, block, LOOP, LOOP)
    if sizes.weight_grad and sizes.through_fp32(plan.weight_accumulate):
        yield Buffer("gradient of weight, a tile", (tile, sizes.hidden), torch.float32, LOOP, LOOP)
    yield from work_buffers(sizes, block, tile, LOOP, LOOP)


def own_dweight(plan: Plan, stored: bool) -> bool:
    """True where dweight's products are kernels of ours: where rows are skipped, since BLAS cannot, and where the only
    one is ``stored`` rather than added, as fast as BLAS's and launched sooner."""
    sizes = plan.sizes
    least, most = (0, -1) if sizes.gpu is None else sizes.gpu.own_stored
    only = plan.schedule == "forward" and plan.chunks == 1 and plan.weight_accumulate == sizes.dtype
    return sizes.store != "logits" and (sizes.skips or (stored and only and least <= sizes.tokens <= most))


def facts(plan: Plan) -> list[tuple[str, str]]:
    """Lines about the way a call runs: a label and its text."""
    s = plan.sizes
    rows = [
        ("tokens x hidden x vocab", f"{s.tokens} x {s.hidden} x {s.vocab}, {name(s.dtype)}"),
        ("schedule", plan.schedule + (f" ({plan.note})" if plan.note else "")),
        ("chunks", f"{plan.chunks} of {plan.chunk_tokens} tokens" + (" at most" if plan.ending else "")),
        (
            "logits buffer",
            {
                "logits": f"{logit_bytes(s) * 8}-bit logits",
                "relative": "16-bit logits relative to strips of columns",
                "fast": "16-bit exponentials relative to the target",
                "kept": "none: every token keeps a set of ids",
            }[s.store]
            + reason(s),
        ),
    ]
    if s.demand.pairing is not None:
        made = f"made of hidden states [{s.teacher_width}]" if s.teacher_width else "given by the caller"
        rows.append(("teacher", f"logits of {s.teacher_columns} ids, {made}"))
    if s.gpu is not None:
        rows.append(("GPU", s.gpu.name))
        rows.append(("matmuls", matmuls(plan, s.gpu)))
    if plan.schedule == "recompute":
        rows.append(("gradients", f"{plan.blocks} x {plan.block_tokens} tokens, tiles of {plan.tile_columns} columns"))
    if s.any_grad:
        rows.append(("accumulation", f"weight {name(plan.weight_accumulate)}, hidden {name(plan.hidden_accumulate)}"))
    if s.buffer_dtype is not None and s.weight_grad:
        phase = "forward pass" if plan.schedule == "forward" else "backward pass"
        rows.append(("gradient of weight", f"added to a {name(s.buffer_dtype)} buffer in the {phase}"))
    if plan.weight_error is not None:
        rows.append(("expected error of dweight", f"{plan.weight_error:.1e} relative"))
    return rows


def sections(plan: Plan) -> list[Section]:
    """The parts of a printed plan: its facts, its buffers with their lifetimes, its memory."""
    rows = [
        (b.name, " x ".join(map(str, b.shape)), name(b.dtype), f"{b.bytes / MiB:,.1f}", lifetime(b))
        for b in plan.buffers
    ]
    totals = [
        ("peak over the inputs", f"{plan.peak_bytes / MiB:,.1f} MiB"),
        ("beside the gradients", f"{plan.extra_bytes / MiB:,.1f} MiB of {plan.budget / MiB:,.0f}"),
    ]
    buffers = [("", "shape", "dtype", "MiB", "in memory"), *rows]
    return [("Plan", facts(plan)), ("Buffers", buffers), ("Memory", totals)]


def lifetime(buffer: Buffer) -> str:
    """The phases of a buffer in a word or two."""
    if (buffer.first, buffer.last) == (Phase.SWEEP, Phase.WEIGHT):
        return "call"
    first, last = (("sweep", "losses", "loop", "finish", "finish")[phase] for phase in (buffer.first, buffer.last))
    return first if first == last else f"{first} to {last}"


def as_text(shown: Sequence[Section]) -> str:
    """Sections as plain text; rows of more than two cells stand in columns, to the right in each."""
    lines = []
    for title, rows in shown:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        first = max(30, widths[0] if len(widths) > 2 else 0)
        lines.append(title)
        for label, *cells in rows:
            if cells[1:]:
                cells = [f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
            lines.append(f"  {label:<{first}}" + "".join(cells))
    return "\n".join(lines)


def reason(s: Sizes) -> str:
    """The reason why the buffer stores nothing smaller."""
    if s.store in ("fast", "kept"):
        return ""
    if s.store == "relative":
        why = name(s.dtype) if s.dtype != torch.bfloat16 else "the gradient takes a pass over them"
        return f" ({why})"
    if s.gpu is None:
        return " (no GPU with matmuls of ours)"
    why = name(s.dtype) if not s.half else "top_k" if s.demand.top_k else "rows not on 16 bytes"
    return f" ({why})"


def matmuls(plan: Plan, gpu: Gpu) -> str:
    """The matmuls that run, ours or BLAS's."""
    s = plan.sizes
    if s.store in ("logits", "kept"):
        return "BLAS's" if s.store == "logits" else "none"
    tile = gpu.exp_tile_of(plan.chunk_tokens, s.hidden, plan.vocab_block or s.vocab)
    found = [f"logits ours ({tile.block_m} x {tile.block_n})"]
    if plan.schedule == "forward" and s.hidden_grad:
        parts = s.dhidden_split(plan.chunk_tokens).parts
        whose = "ours" if s.own_dhidden else "BLAS's"
        found.append(f"dhidden {whose}" + (f" ({parts} parts)" if parts > 1 else ""))
    if plan.schedule != "loss only" and s.weight_grad:
        own = (plan.schedule == "forward" or s.grads_in_matmul) and own_dweight(plan, stored=s.buffer_dtype is None)
        found.append("dweight " + ("ours" if own else "BLAS's"))
    return ", ".join(found)
