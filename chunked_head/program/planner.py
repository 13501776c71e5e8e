"""Decides a ``Plan``: the fastest schedule that the budget holds, at the accuracy that the contract promises."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .memory import CHUNK_MULTIPLE, MiB, Term, extra_of, forward_terms, recompute_terms, sweep_terms
from .plans import (
    DEFAULT_BUDGET,
    GOOD_CHUNK,
    HALF_TILE,
    MAX_HALF_CHUNKS,
    Plan,
    balanced,
    default_budget,
    largest,
    name,
    parse_bytes,
    rows_of,
    uneven,
)
from .sizes import Sizes
from .tiles import best_tile, hidden_accumulator


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
MODEST_SWEEP = 60 * MiB
# as many chunks, or fewer, may be one fewer at the price of rows that are no multiple of a tile's
FEW_CHUNKS = 4


@functools.lru_cache(maxsize=1024)
def make_plan(sizes: Sizes, request: Request) -> Plan:
    """The plan for a call of these sizes; ValueError or TypeError where the request cannot be met."""
    check_request(sizes, request)
    plan = fastest(sizes, replace(request, default=default_budget(sizes, 1)))
    if sizes.ranks == 1 or request.explicit:
        return plan
    try:
        less = fastest(sizes, replace(request, default=default_budget(sizes, sizes.ranks)))
    except ValueError:
        return plan
    # a rank's share of the default where chunks stay large enough: what no rank divides may fill it
    as_good = less.schedule == plan.schedule and less.block_tokens >= min(GOOD_CHUNK, plan.block_tokens)
    return less if as_good and less.chunk_tokens >= min(GOOD_CHUNK, plan.chunk_tokens) else plan


def fastest(sizes: Sizes, request: Request) -> Plan:
    """The plan within one budget."""
    if not sizes.any_grad:
        return plan_loss_only(sizes, request)
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


def plan_loss_only(sizes: Sizes, request: Request) -> Plan:
    rows = sweep_rows(sizes, request)
    return assemble(sizes, request.budget, "loss only", rows, sweep_terms(sizes, rows))


def sweep_rows(sizes: Sizes, request: Request) -> int:
    """Rows of a chunk in a pass that keeps statistics and no gradient."""
    most = sizes.tokens if request.chunk_tokens is None else min(sizes.tokens, request.chunk_tokens)
    rows = largest(lambda n: extra_of(sweep_terms(sizes, n)) <= request.budget, max(most, 1))
    if not request.explicit and not sizes.keeps_sweep:
        # where no logits are kept, larger chunks gain nothing
        modest = largest(lambda n: extra_of(sweep_terms(sizes, n)) <= MODEST_SWEEP, max(most, 1))
        rows = min(rows, max(modest, GOOD_CHUNK))
    if request.chunk_tokens is not None and not request.explicit:
        rows = max(most, 1)
    if rows == 0 or (request.chunk_tokens is not None and rows < most):
        refuse(request, extra_of(sweep_terms(sizes, most if request.chunk_tokens else 1)), request.chunk_tokens or 1)
    return balanced(sizes.tokens, rows)


def plan_forward(
    sizes: Sizes, request: Request, weight_acc: torch.dtype, grow: int = 0, least: int = 1, most_chunks: int = 0
) -> Plan:
    """Gradients in the forward pass with this accumulator, in chunks of at least ``least`` rows; else ValueError."""
    budget = request.budget + grow
    wide = torch.float32 if sizes.hidden_dtype.itemsize < 4 else sizes.hidden_dtype
    # a 16-bit gradient of hidden that waits in fp32 is rounded once, after the upstream gradient is known
    # (fp16 waits without its scale, and so wants the range as well)
    # beside a caller's buffer the upstream gradient is promised
    waits = weight_acc != sizes.weight_dtype and sizes.buffer_dtype is None
    keep_wide = waits or not sizes.weight_grad or sizes.dtype == torch.float16
    needed = 0
    choices = [wide] if keep_wide and wide != sizes.hidden_dtype else []
    if sizes.sums_into(sizes.hidden_dtype):
        choices.append(sizes.hidden_dtype)
    choices = choices or [wide]
    if sizes.deterministic:  # no choice by size
        choices = [wide] if sizes.dtype == torch.float16 else choices[-1:]
    for hidden_acc in choices:
        terms = functools.cache(functools.partial(forward_terms, sizes, hidden_acc=hidden_acc, weight_acc=weight_acc))

        def extra(rows: int, terms: Callable[[int], tuple[Term, ...]] = terms) -> int:
            return extra_of(terms(rows))

        rows = chunk_rows(sizes, request, extra, budget, last=hidden_acc == choices[-1])
        enough = rows >= max(1, min(least, sizes.tokens)) if request.chunk_tokens is None else rows > 0
        if enough and (not most_chunks or -(-sizes.tokens // rows) <= most_chunks):
            named = request.chunk_tokens is not None
            equal = balanced(sizes.tokens, rows) if named or not sizes.by_segments else uneven(sizes.tokens, rows)
            # parts of dhidden may take more of fewer rows
            rows = equal if request.chunk_tokens is not None or extra(equal) <= budget else rows
            return assemble(sizes, budget, "forward", rows, terms(rows), hidden_acc, weight_acc)
        needed = extra(min(request.chunk_tokens or least, max(sizes.tokens, 1)))
    refuse(request, needed, request.chunk_tokens or least)
    raise AssertionError("refuse() raises")


def chunk_rows(sizes: Sizes, request: Request, extra, budget: int, last: bool) -> int:
    """Rows of a chunk within the budget, or as many as the caller named; 0 where they do not fit."""
    if request.chunk_tokens is None:
        rows = largest(lambda n: extra(n) <= budget, max(sizes.tokens, 1))
        # A chunk less may fit where the next multiple of 128 does not. That is worth rows that tiles compute in vain
        # where it saves a quarter of the passes over dweight, and not where it saves an eighth.
        fewer = -(-sizes.tokens // rows) - 1 if rows else 0
        for multiple in HALF_TILE, 16:
            fitting = multiple * math.ceil(sizes.tokens / fewer / multiple) if fewer else 0
            worth = 0 < fewer < FEW_CHUNKS or fitting % CHUNK_MULTIPLE == 0
            if fitting and worth and extra(fitting) <= budget:
                return fitting
        return rows
    rows = balanced(sizes.tokens, request.chunk_tokens)
    if not request.explicit:
        # a named chunk overrides the default budget; what may wait in fp32 beside it still has to be modest
        modest = sizes.tokens * sizes.hidden * 4 <= request.default // 2
        return rows if last or modest else 0
    return rows if extra(rows) <= budget else 0


def plan_coupled(sizes: Sizes, request: Request) -> Plan:
    """Gradients that wait for every token's statistics: nothing is recomputed where one chunk holds all tokens."""
    one = sizes.weight_dtype if sizes.sums_into(sizes.weight_dtype) and sizes.dtype != torch.float16 else torch.float32
    one = sizes.buffer_dtype or one
    fits = request.chunk_tokens is None or request.chunk_tokens >= sizes.tokens
    if fits and not sizes.deterministic and (not sizes.weight_grad or request.accumulate_dtype in (None, one)):
        try:
            return plan_forward(sizes, request, one, least=sizes.tokens, most_chunks=1)
        except ValueError:
            pass
    return plan_recompute(sizes, request, "a loss couples tokens")


def plan_half_weight(sizes: Sizes, request: Request) -> Plan:
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
    fp32_bytes = 4 * sizes.weight_elements
    attempts: list[tuple[torch.dtype, int, int, int]] = []  # accumulator, budget's growth, least rows, most chunks
    if may_own:
        attempts.append((own, 0, 1, 1))
    if may_wide:
        attempts.append((torch.float32, 0, GOOD_CHUNK, 0))
    if may_own:
        attempts.append((own, 0, 1, MAX_HALF_CHUNKS))
    if may_own and wanted is not None and not request.explicit and request.chunk_tokens is None:
        # asked for by name, it overrides the default budget: chunks as large as the accuracy asks
        request = replace(request, chunk_tokens=rows_of(sizes.tokens, MAX_HALF_CHUNKS))
        attempts.append((own, 0, 1, MAX_HALF_CHUNKS))
    if may_wide:
        attempts.append((torch.float32, 0 if request.explicit else fp32_bytes, CHUNK_MULTIPLE, 0))
    for accumulator, grow, least, most_chunks in attempts:
        if request.chunk_tokens is not None and accumulator != own and grow == 0 and wanted is None:
            # fp32 unasked must fit the budget beside the named chunk
            attempt = replace(request, memory_budget=request.budget)
        else:
            attempt = request
        try:
            return plan_forward(sizes, attempt, accumulator, grow, least, most_chunks)
        except ValueError:
            continue
    if wanted == own:
        raise ValueError(
            f"accumulate_dtype={name(own)} is accurate over at most {MAX_HALF_CHUNKS} chunks, and "
            f"{sizes.tokens} tokens in so few need {half_bytes(sizes) / MiB:.0f} MiB; raise memory_budget or "
            "chunk_tokens, or leave accumulate_dtype=None"
        )
    if request.chunk_tokens is not None:
        refuse(request, fp32_bytes + request.chunk_tokens * sizes.row_bytes, request.chunk_tokens)
    if sizes.deterministic:
        raise ValueError(
            f"deterministic=True makes these gradients in the forward pass whatever the sizes, and no accumulator of "
            f"the weight's fits memory_budget ({request.budget / MiB:.0f} MiB, {half_bytes(sizes) / MiB:.0f} needed); "
            "raise it"
        )
    return plan_recompute(sizes, request, "no accumulator of the weight fits")


def half_bytes(sizes: Sizes) -> int:
    rows = rows_of(sizes.tokens, MAX_HALF_CHUNKS)
    return extra_of(forward_terms(sizes, rows, sizes.hidden_dtype, sizes.weight_dtype))


def plan_recompute(sizes: Sizes, request: Request, note: str) -> Plan:
    """Statistics in the forward pass, gradients in backward from logits computed again."""
    rows = sweep_rows(sizes, request)
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
            hidden_acc = hidden_accumulator(sizes, tile)
            terms = recompute_terms(sizes, rows, block, tile, hidden_acc, weight_acc)
            plan = assemble(sizes, budget, "recompute", rows, terms, hidden_acc, weight_acc)
            return replace(plan, block_tokens=block, tile_columns=tile, note=note)
    block, tile = rows_of(sizes.tokens, attempts[0][2]), min(sizes.vocab, CHUNK_MULTIPLE)
    hidden_acc = hidden_accumulator(sizes, tile)
    refuse(request, extra_of(recompute_terms(sizes, rows, block, tile, hidden_acc, attempts[0][0])), block)
    raise AssertionError("refuse() raises")


def assemble(
    sizes: Sizes,
    budget: int,
    schedule,
    rows: int,
    terms: tuple[Term, ...],
    hidden_acc: torch.dtype | None = None,
    weight_acc: torch.dtype | None = None,
) -> Plan:
    return Plan(
        sizes=sizes,
        budget=budget,
        schedule=schedule,
        chunk_tokens=rows,
        block_tokens=rows,
        tile_columns=sizes.vocab,
        hidden_accumulate=hidden_acc or sizes.hidden_dtype,
        weight_accumulate=weight_acc or sizes.weight_dtype,
        terms=terms,
    )


def terms_of(plan: Plan) -> tuple[Term, ...]:
    """What this plan's sizes cost, however it was come by."""
    sizes, rows = plan.sizes, plan.chunk_tokens
    if plan.schedule == "loss only":
        return sweep_terms(sizes, rows)
    hidden_acc, weight_acc = plan.hidden_accumulate, plan.weight_accumulate
    if plan.schedule == "forward":
        return forward_terms(sizes, rows, hidden_acc, weight_acc)
    return recompute_terms(sizes, rows, plan.block_tokens, plan.tile_columns, hidden_acc, weight_acc)


def refuse(request: Request, needed: int, rows: int) -> None:
    what = "one row of logits" if rows == 1 else f"a chunk of {rows} rows"
    raise ValueError(
        f"memory_budget of {request.budget} bytes is too small: {what} and what goes with it needs {needed} bytes "
        f"({needed / MiB:.1f} MiB) beside the gradients; raise memory_budget"
        + (" or lower chunk_tokens" if request.chunk_tokens is not None else "")
    )
