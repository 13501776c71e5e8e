"""Decides a ``Plan``: the fastest schedule that the budget holds, at the accuracy that the contract promises."""

import math
import re
from dataclasses import dataclass, replace

import torch

from ..core.options import name
from ..kernels.common.cache import Cache
from .memory import CHUNK_MULTIPLE, Memory, MiB, forward_memory, recompute_memory, sweep_memory
from .plans import HALF_TILE, MAX_HALF_CHUNKS, SLACK, Plan, Schedule, balanced, rows_of, uneven
from .sizes import Sizes
from .tiles import best_tile

DEFAULT_BUDGET = 640 * MiB  # of a call whose head no other rank shares, and that has no more rows than this is for
# fewer rows than this leave the matmuls starved and make every pass over the gradient of the weight count
GOOD_CHUNK = 2048
MODEST_SWEEP = 60 * MiB
# as many chunks, or fewer, may be one fewer at the price of rows that are no multiple of a tile's
FEW_CHUNKS = 4


@dataclass(frozen=True)
class Request:
    """The arguments of a call that steer its plan."""

    memory_budget: int | str | None = None
    chunk_tokens: int | None = None
    accumulate_dtype: torch.dtype | None = None
    default: int = DEFAULT_BUDGET  # bytes where memory_budget is None: ``make_plan`` says how many

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


def amount(size: int) -> str:
    """Bytes for people: those of a MiB or more also in MiB."""
    return f"{size} bytes" if size < MiB else f"{size} bytes ({size / MiB:.1f} MiB)"


@dataclass(frozen=True)
class NoPlan:
    """The reason why no schedule meets a request; ``str`` is what the caller is told."""

    request: Request
    needed: int = 0  # bytes beside the gradients of a chunk of ``rows`` tokens
    rows: int = 0
    reason: str = ""  # where it is not that this is more than the budget

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        what = "one row of logits" if self.rows == 1 else f"a chunk of {self.rows} rows"
        return (
            f"memory_budget of {amount(self.request.budget)} is too small: {what} and what goes with it needs "
            f"{amount(self.needed)} beside the gradients; raise memory_budget"
            + (" or lower chunk_tokens" if self.request.chunk_tokens is not None else "")
        )


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


PLANS: "Cache[tuple[Sizes, Request], Plan | NoPlan]" = Cache(1024)


def make_plan(sizes: Sizes, request: Request) -> Plan:
    """The plan for a call of these sizes; ValueError or TypeError where the request cannot be met."""
    found = find_plan(sizes, request)
    if isinstance(found, NoPlan):
        raise ValueError(str(found))
    return found


def find_plan(sizes: Sizes, request: Request) -> Plan | NoPlan:
    """The plan for a call of these sizes, or the reason why there is none."""
    return PLANS.made((sizes, request), lambda: plan_anew(sizes, request))


def plan_anew(sizes: Sizes, request: Request) -> Plan | NoPlan:
    if sizes.largest_part is not None:
        return plan_part(sizes, request, sizes.largest_part)
    check_request(sizes, request)
    plan = fastest(sizes, replace(request, default=default_budget(sizes, 1)))
    if sizes.ranks == 1 or request.explicit or isinstance(plan, NoPlan):
        return plan
    less = fastest(sizes, replace(request, default=default_budget(sizes, sizes.ranks)))
    if isinstance(less, NoPlan):
        return plan
    # a rank's share of the default where chunks stay large enough: what no rank divides may fill it
    as_good = less.schedule == plan.schedule and less.block_tokens >= min(GOOD_CHUNK, plan.block_tokens)
    return less if as_good and less.chunk_tokens >= min(GOOD_CHUNK, plan.chunk_tokens) else plan


def plan_part(sizes: Sizes, request: Request, most: int) -> Plan | NoPlan:
    """A plan of the same chunks on every rank, made for the largest part of the vocabulary, ``most`` columns, for a
    rank of ``sizes.vocab`` of them. The demand of ``sizes`` is of the whole vocabulary."""
    teacher = sizes.teacher_columns > 0
    plan = find_plan(replace(sizes, vocab=most, largest_part=None, padding=0, teacher_columns=most * teacher), request)
    if isinstance(plan, NoPlan):
        return plan
    own = replace(sizes, demand=sizes.demand.of_columns(sizes.vocab), teacher_columns=sizes.vocab * teacher)
    # sums in 16 bits are over as many chunks as they may be
    most_chunks = MAX_HALF_CHUNKS if plan.sums_halves else 0
    rows, block = (
        divisible(n, sizes.spread, sizes.tokens, most_chunks) for n in (plan.chunk_tokens, plan.block_tokens)
    )
    tile = min(plan.tile_columns, sizes.vocab)
    return replace(plan, sizes=own, tile_columns=tile, chunk_tokens=rows, block_tokens=block)


def divisible(rows: int, ranks: int, tokens: int, most_chunks: int) -> int:
    """Rows that come from all ranks alike, a few less or, where that made more chunks than may be, a few more."""
    fewer = rows // ranks * ranks
    if fewer and not (-(-tokens // rows) <= most_chunks < -(-tokens // fewer)):
        return fewer
    return fewer if fewer == rows else fewer + ranks


def default_budget(sizes: Sizes, ranks: int) -> int:
    """Bytes that a call may take where its caller says nothing: what a chunk of 2048 tokens does where its logits
    alone, in the operands' dtype and with those of a teacher that gives hidden states, are more than 640 MiB.

    Of ranks that share a vocabulary each is to do with less as they grow in number, and chunks become larger. A token's
    hidden states are as long on any number of ranks, so from 16 on it stays.
    """
    share = math.isqrt(DEFAULT_BUDGET**2 // min(ranks, 16))
    rows = int(GOOD_CHUNK * SLACK) if sizes.by_segments else GOOD_CHUNK
    columns = sizes.vocab + (sizes.teacher_columns if sizes.teacher_store is not None else 0)
    # a copy of all hidden states is no part of a chunk; where it brings pairs or tokens that count together it is extra
    moved = sizes.copied and (sizes.by_segments or sizes.skips)
    copy = sizes.own_tokens * sizes.hidden * sizes.hidden_dtype.itemsize if moved else 0
    logits = rows * columns * sizes.element
    if logits <= share:
        return share + copy
    memory = forward_memory(replace(sizes, copied=copy > 0), sizes.hidden_dtype, sizes.weight_dtype)
    # logits count as many bytes as they have in the operands' dtype, whatever the buffer keeps of them
    stored = 0 if sizes.store == "kept" else rows * columns * sizes.logit_bytes
    return memory.extra(rows) - stored + logits


def fastest(sizes: Sizes, request: Request) -> Plan | NoPlan:
    """The plan within one budget."""
    if not sizes.any_grad:
        rows = sweep_rows(sizes, request, sweep_memory(sizes))
        return rows if isinstance(rows, NoPlan) else untiled(sizes, request.budget, "loss only", rows)
    if sizes.late_upstream:
        return plan_recompute(sizes, request, "the upstream gradient comes late")
    if sizes.coupled:
        return plan_coupled(sizes, request)
    if sizes.own_weight_grad and sizes.weight_dtype.itemsize < 4:
        return plan_half_weight(sizes, request)
    return plan_forward(sizes, request, sizes.buffer_dtype or sizes.weight_dtype)


def check_request(sizes: Sizes, request: Request) -> None:
    wanted = request.accumulate_dtype
    if sizes.buffer_dtype is not None and wanted not in (None, sizes.buffer_dtype):
        raise ValueError(
            f"accumulate_dtype must be None or {name(sizes.buffer_dtype)}, the dtype of accumulate_into, got {wanted!r}"
        )
    allowed = {sizes.weight_dtype} | ({torch.float32} if sizes.weight_dtype.itemsize < 4 else set())
    if wanted is not None and wanted not in allowed:
        names = " or ".join(sorted(map(name, allowed)))
        raise ValueError(
            f"accumulate_dtype must be None or {names} for a weight of {name(sizes.weight_dtype)}, got {wanted!r}"
        )


def sweep_rows(sizes: Sizes, request: Request, memory: Memory) -> int | NoPlan:
    """Rows of a chunk in a pass that keeps statistics and no gradient."""
    named = request.chunk_tokens
    most = max(1, sizes.tokens if named is None else min(sizes.tokens, named))
    if named is not None and not request.explicit:
        return balanced(sizes.tokens, most)
    rows = memory.largest(request.budget, most)
    if not request.explicit and not sizes.keeps_sweep:
        # where no logits are kept, larger chunks gain nothing
        rows = min(rows, max(memory.largest(MODEST_SWEEP, most), GOOD_CHUNK))
    if rows == 0 or (named is not None and rows < min(sizes.tokens, named)):
        return NoPlan(request, memory.extra(min(sizes.tokens, named) if named else 1), named or 1)
    return balanced(sizes.tokens, rows)


def plan_forward(
    sizes: Sizes, request: Request, weight_acc: torch.dtype, grow: int = 0, least: int = 1, most_chunks: int = 0
) -> Plan | NoPlan:
    """Gradients in the forward pass with this accumulator, in chunks of at least ``least`` rows."""
    budget, named = request.budget + grow, request.chunk_tokens
    wide = torch.float32 if sizes.hidden_dtype.itemsize < 4 else sizes.hidden_dtype
    # a 16-bit gradient of hidden that waits in fp32 is rounded once, after the upstream gradient is known
    # (fp16 waits without its scale, and so wants the range as well)
    # beside a caller's buffer the upstream gradient is promised
    waits = weight_acc != sizes.weight_dtype and sizes.buffer_dtype is None
    keep_wide = waits or not sizes.weight_grad or sizes.dtype == torch.float16
    choices = [wide] if keep_wide and wide != sizes.hidden_dtype else []
    if sizes.sums_into(sizes.hidden_dtype):
        choices.append(sizes.hidden_dtype)
    choices = choices or [wide]
    if sizes.deterministic:  # no choice by size
        choices = [wide] if sizes.dtype == torch.float16 else choices[-1:]
    for hidden_acc in choices:
        memory = forward_memory(sizes, hidden_acc, weight_acc)
        rows = chunk_rows(sizes, request, memory, budget, last=hidden_acc == choices[-1])
        enough = rows >= max(1, min(least, sizes.tokens)) if named is None else rows > 0
        if enough and (not most_chunks or -(-sizes.tokens // rows) <= most_chunks):
            by_segments = named is None and sizes.by_segments
            equal = uneven(sizes.tokens, rows) if by_segments else balanced(sizes.tokens, rows)
            # parts of dhidden may take more of fewer rows
            rows = equal if named is not None or memory.extra(equal) <= budget else rows
            return untiled(sizes, budget, "forward", rows, hidden_acc, weight_acc)
    return NoPlan(request, memory.extra(min(named or least, max(sizes.tokens, 1))), named or least)


def chunk_rows(sizes: Sizes, request: Request, memory: Memory, budget: int, last: bool) -> int:
    """Rows of a chunk within the budget, or as many as the caller named; 0 where they do not fit."""
    if request.chunk_tokens is None:
        rows = memory.largest(budget, max(sizes.tokens, 1))
        # A chunk less may fit where the next multiple of 128 does not. That is worth rows that tiles compute in vain
        # where it saves a quarter of the passes over dweight, and not where it saves an eighth.
        fewer = -(-sizes.tokens // rows) - 1 if rows else 0
        for multiple in HALF_TILE, 16:
            fitting = multiple * math.ceil(sizes.tokens / fewer / multiple) if fewer else 0
            worth = 0 < fewer < FEW_CHUNKS or fitting % CHUNK_MULTIPLE == 0
            if fitting and worth and memory.extra(fitting) <= budget:
                return fitting
        return rows
    rows = balanced(sizes.tokens, request.chunk_tokens)
    if not request.explicit:
        # a named chunk overrides the default budget; what may wait in fp32 beside it still has to be modest
        modest = sizes.tokens * sizes.hidden * 4 <= request.default // 2
        return rows if last or modest else 0
    return rows if memory.extra(rows) <= budget else 0


def plan_coupled(sizes: Sizes, request: Request) -> Plan | NoPlan:
    """Gradients that wait for every token's statistics: nothing is recomputed where one chunk holds all tokens."""
    one = sizes.weight_dtype if sizes.sums_into(sizes.weight_dtype) and sizes.dtype != torch.float16 else torch.float32
    one = sizes.buffer_dtype or one
    fits = request.chunk_tokens is None or request.chunk_tokens >= sizes.tokens
    if fits and not sizes.deterministic and (not sizes.weight_grad or request.accumulate_dtype in (None, one)):
        plan = plan_forward(sizes, request, one, least=sizes.tokens, most_chunks=1)
        if isinstance(plan, Plan):
            return plan
    return plan_recompute(sizes, request, "a loss couples tokens")


def plan_half_weight(sizes: Sizes, request: Request) -> Plan | NoPlan:
    """A 16-bit weight: its gradient in one product, in an fp32 accumulator, in its own dtype, or by recomputing."""
    own, wanted = sizes.weight_dtype, request.accumulate_dtype
    # unscaled sums over tokens can pass fp16's 65504, so in fp16 they always wait in fp32
    may_own = own != torch.float16 and sizes.sums_into(own) and wanted in (None, own)
    may_wide = wanted in (None, torch.float32)
    if wanted == torch.float16:
        raise ValueError(
            "accumulate_dtype=torch.float16 cannot hold sums of unscaled gradients (they pass 65504); "
            f"use torch.float32, which needs {4 * sizes.weight_elements / MiB:.0f} MiB, or None"
        )
    fp32_bytes, unasked = 4 * sizes.weight_elements, request
    if request.chunk_tokens is None and wanted == own and not request.explicit:
        # asked for by name, it overrides the default budget: chunks as large as the accuracy asks
        request = replace(request, chunk_tokens=rows_of(sizes.tokens, MAX_HALF_CHUNKS))
    elif request.chunk_tokens is not None and wanted is None:
        # fp32 unasked must fit the budget beside the named chunk
        unasked = replace(request, memory_budget=request.budget)
    grown = 0 if request.explicit else fp32_bytes
    attempts: tuple[tuple[bool, Request, torch.dtype, int, int, int], ...] = (
        # whether it may be made, and of ``plan_forward`` accumulator, growth of the budget, least rows, most chunks
        (may_own, request, own, 0, 1, 1),
        (may_wide, unasked, torch.float32, 0, GOOD_CHUNK, 0),
        (may_own, request, own, 0, 1, MAX_HALF_CHUNKS),
        (may_wide, request, torch.float32, grown, CHUNK_MULTIPLE, 0),
    )
    for may, attempt, accumulator, growth, least, most_chunks in attempts:
        plan = plan_forward(sizes, attempt, accumulator, growth, least, most_chunks) if may else None
        if isinstance(plan, Plan):
            return plan
    if wanted == own:
        reason = (
            f"accumulate_dtype={name(own)} is accurate over at most {MAX_HALF_CHUNKS} chunks, and "
            f"{sizes.tokens} tokens in so few need {amount(half_bytes(sizes))}; raise memory_budget or "
            "chunk_tokens, or leave accumulate_dtype=None"
        )
        return NoPlan(request, reason=reason)
    if request.chunk_tokens is not None:
        return NoPlan(request, fp32_bytes + request.chunk_tokens * sizes.row_bytes, request.chunk_tokens)
    if sizes.deterministic:
        reason = (
            f"deterministic=True makes these gradients in the forward pass whatever the sizes, and no accumulator of "
            f"the weight's fits memory_budget ({amount(request.budget)}, {amount(half_bytes(sizes))} needed); "
            "raise it"
        )
        return NoPlan(request, reason=reason)
    return plan_recompute(sizes, request, "no accumulator of the weight fits")


def half_bytes(sizes: Sizes) -> int:
    return forward_memory(sizes, sizes.hidden_dtype, sizes.weight_dtype).extra(rows_of(sizes.tokens, MAX_HALF_CHUNKS))


def plan_recompute(sizes: Sizes, request: Request, note: str) -> Plan | NoPlan:
    """Statistics in the forward pass, gradients in backward from logits computed again."""
    rows = sweep_rows(sizes, request, sweep_memory(sizes))
    if isinstance(rows, NoPlan):
        return rows
    half_weight = sizes.own_weight_grad and sizes.weight_dtype.itemsize < 4
    # a tile of the weight's gradient is finished once per block of tokens: 16-bit sums for few blocks only
    few = 1 if request.accumulate_dtype == torch.float32 else MAX_HALF_CHUNKS
    many = -(-max(sizes.tokens, 1) // CHUNK_MULTIPLE)
    attempts = [(sizes.buffer_dtype or sizes.weight_dtype, request.budget, min(few, many) if half_weight else many)]
    if half_weight and not request.explicit and request.accumulate_dtype != sizes.weight_dtype:
        attempts.append((torch.float32, request.budget + 4 * sizes.weight_elements, many))
    for weight_acc, budget, most_blocks in attempts:
        found = best_tile(sizes, budget, weight_acc, most_blocks, rows)
        if found:
            block, tile = found
            plan = untiled(sizes, budget, "recompute", rows, sizes.hidden_accumulator(tile), weight_acc)
            return replace(plan, block_tokens=block, tile_columns=tile, note=note)
    weight_acc, _, most_blocks = attempts[0]
    block = rows_of(sizes.tokens, most_blocks)
    needed = recompute_memory(sizes, rows, block, weight_acc).extra(min(sizes.vocab, CHUNK_MULTIPLE))
    return NoPlan(request, needed, block)


def untiled(
    sizes: Sizes,
    budget: int,
    schedule: Schedule,
    rows: int,
    hidden_acc: torch.dtype | None = None,
    weight_acc: torch.dtype | None = None,
) -> Plan:
    """All columns of a chunk's logits at a time."""
    accumulate = hidden_acc or sizes.hidden_dtype, weight_acc or sizes.weight_dtype
    return Plan(sizes, budget, schedule, rows, rows, sizes.vocab, *accumulate)
