"""The choice of a ``Plan``: the fastest candidate that the budget holds, else the reason why none fits.

A candidate says when gradients are made and in which dtypes they add up; ``chunks.py`` finds the largest chunks and
tiles that the budget holds.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from ..core.checks import name
from ..core.memory import Cache
from .chunks import GOOD_CHUNK, block_and_tile, chunk_size, e4m3_copy, with_rows, with_tile
from .plans import MAX_HALF_CHUNKS, OTHER_BUDGETS, Plan, Schedule, needed_by
from .sizes import CHUNK_MULTIPLE, DEFAULT_BUDGET, MiB, Request, Sizes, amount, balanced, rows_of

FEW_HALF_CHUNKS = 4  # so many 16-bit sums come before an fp32 accumulator, which takes 4 % of a call
SLACK = 1.25  # how much larger chunks that end with segments may be by default
SEVERAL_FACTORS = ", several numbers a row: a gradient for each takes as many products, and memory"


class Miss(NamedTuple):
    """The reason why a candidate does not fit: its budget has too few bytes for chunks of the fewest rows."""

    missing_bytes: int  # bytes that the budget lacks
    needed_bytes: int  # bytes beside the gradients that the call needs with chunks of ``rows`` rows
    rows: int  # least rows of a chunk, or those that the caller asks for


class Candidate(NamedTuple):
    """A schedule with the dtypes of its sums, as a ``plan`` with chunks of one row. ``fitted`` finds the chunk size."""

    plan: Plan
    least_rows: int  # least rows of a chunk, or of a block in the recompute schedule
    chunk_tokens: int | None  # rows of a chunk that the caller asks for
    fits_budget: bool  # chunks of ``chunk_tokens`` rows have to fit the budget; else they override it

    @property
    def is_hopeless(self) -> bool:
        """True where the accumulator of the weight's gradient, which has another dtype than the weight, exceeds the
        budget by itself."""
        plan, sizes, counts = self.plan, self.plan.sizes, self.fits_budget or self.chunk_tokens is None
        waits = plan.weight_accumulate != sizes.weight_dtype and sizes.returns_weight_grad
        sums = sizes.weight_elements * plan.weight_accumulate.itemsize
        return counts and waits and plan.schedule == "forward" and sums > plan.budget


PLANS: "Cache[tuple[Sizes, Request], Plan | str]" = Cache(1024)


def make_plan(sizes: Sizes, request: Request) -> Plan:
    """The plan for a call of these sizes; ValueError where the request cannot be met."""
    plan_or_reason = find_plan(sizes, request)
    if isinstance(plan_or_reason, str):
        raise ValueError(plan_or_reason)
    return plan_or_reason


def find_plan(sizes: Sizes, request: Request) -> Plan | str:
    """The plan for a call of these sizes, or the reason, as text, why there is no plan."""
    return PLANS.get_or_make((sizes, request), lambda: plan_anew(sizes, request))


def find_late_plan(sizes: Sizes, request: Request) -> Plan | str:
    """The plan of a backward that makes the gradients, as a second backward does; or the reason why there is no plan.
    ``accumulate_dtype`` and then ``chunk_tokens`` of the request are dropped where they do not fit, so that backward
    does not raise for them."""
    late_sizes = replace(sizes, waits_for_backward=True, num_row_factors=0)
    for request_or_part in (
        request,
        replace(request, accumulate_dtype=None),
        Request(memory_budget=request.memory_budget),
    ):
        plan = find_plan(late_sizes, request_or_part)
        if isinstance(plan, Plan):
            break
    return plan


def plan_anew(sizes: Sizes, request: Request) -> Plan | str:
    """``find_plan`` without its cache."""
    if sizes.largest_part is not None:
        return plan_of_rank(sizes, request, sizes.largest_part)
    if refusal_text := refusal(sizes, request):
        return refusal_text
    one_rank_request, shared_request = (
        replace(request, default=default_budget(sizes, ranks)) for ranks in (1, sizes.ranks)
    )
    plan = first_that_fits(sizes, one_rank_request)
    if isinstance(plan, str):
        return plan
    plan = replace(plan, budget_rule=budget_rule(plan, one_rank_request, 1))
    if sizes.ranks == 1 or request.explicit:
        return plan
    shared_plan = first_that_fits(sizes, shared_request)
    if isinstance(shared_plan, str):
        return plan
    # a rank gets its share of the default budget only if chunks stay large: buffers of full size may fill that share
    keeps_large_blocks = shared_plan.schedule == plan.schedule and shared_plan.block_tokens >= min(
        GOOD_CHUNK, plan.block_tokens
    )
    if not keeps_large_blocks or shared_plan.chunk_tokens < min(GOOD_CHUNK, plan.chunk_tokens):
        return plan
    return replace(shared_plan, budget_rule=budget_rule(shared_plan, shared_request, sizes.ranks))


def budget_rule(plan: Plan, request: Request, ranks: int) -> tuple[str, ...]:
    """The reason for the plan's budget, as lines for the printed plan. ``ranks``: number of ranks that share the
    budget."""
    if request.explicit:
        return ("memory_budget",)
    lines = ["the default: 1.25 GiB"]
    if request.budget > default_share(plan.sizes, ranks) + e4m3_copy(plan.sizes):
        lines = [f"the default: a chunk of {GOOD_CHUNK} tokens, which takes more than 1.25 GiB"]
    elif plan.sizes.e4m3_gradients:
        lines.append("twice, for exponentials in e4m3")
    if ranks > 1:
        lines.append(f"divided by {min(ranks, 16) ** 0.5:.3g} for {ranks} ranks")
    if plan.budget > request.budget:
        growth_text = f"{(plan.budget - request.budget) / MiB:,.0f} MiB for a float32 sum of the weight's gradient"
        lines.append(f"and {growth_text}: over {MAX_HALF_CHUNKS} chunks")
    return tuple(lines)


def other_budgets(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans of the same call at budgets from 16 MiB on, each budget twice the last, up to the budget that holds all
    tokens in one chunk. A plan with the schedule and chunks of the last is left out. The caller's chunk_tokens and
    accumulate_dtype do not count."""
    last_traits = None
    for log2_bytes in range(4, 18):
        plan_or_reason = plan_anew(plan.sizes, Request(memory_budget=MiB << log2_bytes))
        if isinstance(plan_or_reason, str) or (plan_or_reason.schedule, plan_or_reason.chunks) == last_traits:
            continue
        last_traits = plan_or_reason.schedule, plan_or_reason.chunks
        yield f"{1 << log2_bytes}MiB" if log2_bytes < 10 else f"{1 << log2_bytes - 10}GiB", plan_or_reason
        if plan_or_reason.chunks == 1 and plan_or_reason.schedule != "recompute":
            return


OTHER_BUDGETS.append(other_budgets)


def plan_of_rank(sizes: Sizes, request: Request, most_columns: int) -> Plan | str:
    """The plan of a rank with ``sizes.vocab`` columns of a shared vocabulary. Its chunks are those of the rank with
    ``most_columns`` columns, so that all ranks have equal chunks. ``sizes.demand`` is that of the whole vocabulary."""
    demand = sizes.demand
    plan = find_plan(
        replace(sizes, vocab=most_columns, largest_part=None, padding=0, demand=demand.of_columns(most_columns)),
        request,
    )
    if isinstance(plan, str):
        return plan
    local_sizes = replace(sizes, demand=demand.of_columns(sizes.vocab))
    # the weight's gradient may add up in 16 bits over at most MAX_HALF_CHUNKS chunks
    most_chunks = MAX_HALF_CHUNKS if plan.sizes.returns_weight_grad and plan.weight_accumulate.itemsize < 4 else 0
    chunk_rows, block_rows = (
        divisible(n, sizes.hidden_ranks, sizes.tokens, most_chunks) for n in (plan.chunk_tokens, plan.block_tokens)
    )
    tile_columns = min(plan.tile_columns, sizes.vocab)
    return replace(plan, sizes=local_sizes, tile_columns=tile_columns, chunk_tokens=chunk_rows, block_tokens=block_rows)


def divisible(rows: int, ranks: int, tokens: int, most_chunks: int) -> int:
    """``rows`` rounded down to a multiple of ``ranks``; rounded up if ``tokens`` would else make more than
    ``most_chunks`` chunks (0: no limit)."""
    rounded_down = rows // ranks * ranks
    if rounded_down and not (-(-tokens // rows) <= most_chunks < -(-tokens // rounded_down)):
        return rounded_down
    return rounded_down if rounded_down == rows else rounded_down + ranks


def default_share(sizes: Sizes, ranks: int) -> int:
    """Bytes of the default budget, where chunks of 2048 tokens fit them; without the e4m3 copies of the weight,
    which come on top. ``ranks``: number of ranks that share the vocabulary."""
    # exponentials in e4m3 take as much as those in 16 bits
    return math.isqrt(DEFAULT_BUDGET**2 // min(ranks, 16)) * (1 + sizes.e4m3_gradients)


def default_budget(sizes: Sizes, ranks: int) -> int:
    """Bytes that a call may take by default: 1.25 GiB; or the bytes of a chunk of 2048 tokens, if its logits (student's
    and teacher's, in the operands' dtype) alone take more than 1.25 GiB.

    With more ranks that share the vocabulary, each rank has less budget and larger chunks. From 16 ranks on the budget
    does not shrink, since hidden states are not divided among ranks.
    """
    default_bytes = default_share(sizes, ranks)
    rows = int(GOOD_CHUNK * SLACK) if sizes.ends_with_segments else GOOD_CHUNK
    columns = sizes.vocab + sizes.teacher_columns * sizes.teacher_made
    logit_bytes = rows * columns * sizes.dtype.itemsize
    if logit_bytes * (1 + sizes.e4m3_gradients) <= default_bytes:
        return default_bytes + e4m3_copy(sizes)
    # logits count in the operands' dtype, whatever the buffer keeps
    stored_itemsize = 2 if sizes.own_matmul else sizes.wide.itemsize
    stored_bytes = rows * columns * stored_itemsize if sizes.store.has_matmul else 0
    chunk_plan = with_rows(of_one_row(replace(sizes, copied=False), "forward", 0), rows)  # the copy is of all chunks
    return chunk_plan.extra_bytes - stored_bytes + logit_bytes


def of_one_row(
    sizes: Sizes,
    schedule: Schedule,
    budget: int,
    hidden_sum_dtype: torch.dtype | None = None,
    weight_sum_dtype: torch.dtype | None = None,
    note: str = "",
) -> Plan:
    """A plan with chunks of one row and all columns. ``hidden_sum_dtype``, ``weight_sum_dtype``: dtypes in which the
    gradients of hidden states and weight add up; None: the operand's dtype."""
    sum_dtypes = hidden_sum_dtype or sizes.hidden_dtype, weight_sum_dtype or sizes.weight_dtype
    return Plan(sizes, budget, schedule, 1, 1, sizes.vocab, *sum_dtypes, note=note)


def refusal(sizes: Sizes, request: Request) -> str:
    """The reason why no call of these sizes can add up gradients in ``request.accumulate_dtype``; "" if one can."""
    accumulate_dtype, weight_dtype = request.accumulate_dtype, sizes.weight_dtype
    allowed_dtypes, reason = {weight_dtype}, f" for a weight of {name(weight_dtype)}"
    if sizes.buffer_dtype is not None:
        allowed_dtypes, reason = {sizes.buffer_dtype}, ", the dtype of accumulate_into"
    elif weight_dtype.itemsize < 4:
        allowed_dtypes.add(torch.float32)
    if accumulate_dtype is not None and accumulate_dtype not in allowed_dtypes:
        choices = " or ".join(sorted(map(name, allowed_dtypes)))
        return f"accumulate_dtype must be None or {choices}{reason}, got {accumulate_dtype!r}"
    is_in_forward = not sizes.waits_for_backward and not sizes.waits_for_all
    if accumulate_dtype == torch.float16 and is_in_forward and sizes.returns_weight_grad:
        return (
            "accumulate_dtype=torch.float16 cannot hold sums of unscaled gradients (they pass 65504); "
            f"use torch.float32, which needs {4 * sizes.weight_elements / MiB:.0f} MiB, or None"
        )
    return ""


def first_that_fits(sizes: Sizes, request: Request) -> Plan | str:
    """The plan of the first candidate that fits the budget; or the reason, as text, why the candidate that lacks the
    fewest bytes does not fit."""
    for candidate in candidates(sizes, request):
        if not candidate.is_hopeless and isinstance(plan_or_miss := fitted(request, candidate), Plan):
            return plan_or_miss
    weight_dtype, accumulate_dtype = sizes.weight_dtype, request.accumulate_dtype
    misses = [miss for candidate in candidates(sizes, request) if isinstance(miss := fitted(request, candidate), Miss)]
    is_in_forward = not (sizes.waits_for_backward or sizes.waits_for_all)
    if accumulate_dtype == weight_dtype and weight_dtype.itemsize < 4 and (is_in_forward or not misses):
        needed_bytes = with_rows(of_one_row(sizes, "forward", 0), rows_of(sizes.tokens, MAX_HALF_CHUNKS)).extra_bytes
        return (
            f"accumulate_dtype={name(weight_dtype)} is accurate over at most {MAX_HALF_CHUNKS} chunks, and "
            f"{sizes.tokens} tokens in so few need {amount(needed_bytes)}; raise memory_budget or "
            "chunk_tokens, or leave accumulate_dtype=None"
        )
    _, needed_bytes, rows = min(misses, key=lambda miss: miss.missing_bytes)
    chunk_text = "one row of logits" if rows == 1 else f"a chunk of {rows} rows"
    return (
        f"memory_budget of {amount(request.budget)} is too small: {chunk_text} and what goes with it needs "
        f"{amount(needed_bytes)} beside the gradients; raise memory_budget"
        + (" or lower chunk_tokens" if request.chunk_tokens is not None else "")
    )


def candidates(sizes: Sizes, request: Request) -> Iterator[Candidate]:
    """The ways to make a call's gradients, the fastest way first."""
    weight_dtype, accumulate_dtype, chunk_tokens = sizes.weight_dtype, request.accumulate_dtype, request.chunk_tokens
    tokens = max(sizes.tokens, 1)
    if not sizes.any_grad:
        yield Candidate(of_one_row(sizes, "loss only", request.budget), 1, chunk_tokens, request.explicit)
    elif sizes.waits_for_backward:
        yield from unit_row_candidates(sizes, request)
        note = "the upstream gradient comes late" + SEVERAL_FACTORS * (sizes.num_row_factors > 1)
        yield from recompute_candidates(sizes, request, note)
    elif sizes.waits_for_all:
        # a single chunk with all tokens needs no recompute
        weight_sum_dtype = (
            weight_dtype if sizes.sums_into(weight_dtype) and sizes.dtype != torch.float16 else torch.float32
        )
        weight_sum_dtype = sizes.buffer_dtype or weight_sum_dtype
        fits_one_chunk = chunk_tokens is None or chunk_tokens >= sizes.tokens
        if (
            fits_one_chunk
            and not sizes.deterministic
            and (not sizes.weight_grad or accumulate_dtype in (None, weight_sum_dtype))
        ):
            yield from forward_candidates(sizes, request, weight_sum_dtype, tokens)
        yield from unit_row_candidates(sizes, request)
        yield from recompute_candidates(
            sizes, request, "a loss couples tokens" + SEVERAL_FACTORS * (sizes.num_row_factors > 1)
        )
    elif not sizes.returns_weight_grad or weight_dtype.itemsize >= 4:
        yield from forward_candidates(sizes, request, sizes.buffer_dtype or weight_dtype)
    else:
        # A 16-bit gradient of the weight, in this order: one product or few sums in 16 bits; an fp32 accumulator; more
        # sums in 16 bits; an fp32 accumulator on top of the default budget; recompute. fp16 never adds up in 16 bits,
        # since unscaled sums over tokens can exceed its 65504.
        may_keep_dtype = (
            weight_dtype != torch.float16 and sizes.sums_into(weight_dtype) and accumulate_dtype in (None, weight_dtype)
        )
        may_use_fp32 = accumulate_dtype in (None, torch.float32)
        least_rows = -(-tokens // MAX_HALF_CHUNKS)
        if may_keep_dtype:
            yield from forward_candidates(sizes, request, weight_dtype, -(-tokens // FEW_HALF_CHUNKS))
        if may_use_fp32:
            yield from forward_candidates(sizes, request, torch.float32, 1 if chunk_tokens else GOOD_CHUNK)
        if may_keep_dtype:
            yield from forward_candidates(sizes, request, weight_dtype, least_rows)
        if may_use_fp32:
            growth_bytes = 0 if request.explicit else 4 * sizes.weight_elements
            # the caller's chunk overrides the default budget
            wide_request = replace(request, accumulate_dtype=torch.float32)
            yield from forward_candidates(
                sizes, wide_request, torch.float32, 1 if chunk_tokens else CHUNK_MULTIPLE, growth_bytes
            )
        if accumulate_dtype != weight_dtype and chunk_tokens is None and not sizes.deterministic:
            yield from recompute_candidates(sizes, request, "no accumulator of the weight fits")


def forward_candidates(
    sizes: Sizes, request: Request, weight_sum_dtype: torch.dtype, least_rows: int = 1, growth_bytes: int = 0
) -> Iterator[Candidate]:
    """Candidates that make gradients in the forward pass. ``growth_bytes``: bytes by which their plans may exceed the
    budget."""
    is_half_weight = sizes.returns_weight_grad and sizes.weight_dtype.itemsize < 4 and not sizes.waits_for_all
    chunk_tokens, accumulate_dtype, fits_budget = request.chunk_tokens, request.accumulate_dtype, request.explicit
    if chunk_tokens is None and is_half_weight and accumulate_dtype == sizes.weight_dtype and not request.explicit:
        # accumulate_dtype overrides the default budget: chunks are so large that a sum in 16 bits is accurate enough
        chunk_tokens = rows_of(sizes.tokens, MAX_HALF_CHUNKS)
    elif chunk_tokens is not None and is_half_weight and accumulate_dtype is None and weight_sum_dtype == torch.float32:
        fits_budget = True  # an fp32 accumulator that the caller has not asked for must fit the budget
    hidden_dtype, wide_dtype = sizes.hidden_dtype, torch.promote_types(sizes.hidden_dtype, torch.float32)
    hidden_sum_dtypes = [hidden_dtype if sizes.sums_into(hidden_dtype) else wide_dtype]
    if (
        sizes.dtype == torch.float16 and wide_dtype not in hidden_sum_dtypes
    ):  # unscaled fp16 gradients need fp32's range
        hidden_sum_dtypes = [wide_dtype] if sizes.deterministic else [wide_dtype, hidden_dtype]
    for hidden_sum_dtype in hidden_sum_dtypes:
        plan = of_one_row(sizes, "forward", request.budget + growth_bytes, hidden_sum_dtype, weight_sum_dtype)
        yield Candidate(plan, least_rows, chunk_tokens, fits_budget)


def unit_row_candidates(sizes: Sizes, request: Request) -> Iterator[Candidate]:
    """Candidates that make each row of hidden's gradient in the forward pass without the one factor that comes later.

    With two such factors, each would take a tensor of its own and a product: as many products as recomputing, and more
    memory.
    """
    if sizes.num_row_factors != 1:
        return
    for candidate in forward_candidates(sizes, request, sizes.weight_dtype):
        plan = replace(candidate.plan, has_unit_rows=True, note="backward multiplies each row by what comes late")
        yield candidate._replace(plan=plan)


def recompute_candidates(sizes: Sizes, request: Request, note: str) -> Iterator[Candidate]:
    """Candidates that make statistics in the forward pass and gradients in backward, from recomputed logits."""
    is_half_weight, chunk_tokens = sizes.returns_weight_grad and sizes.weight_dtype.itemsize < 4, request.chunk_tokens
    least_rows = fewest_rows = CHUNK_MULTIPLE if chunk_tokens is None else min(CHUNK_MULTIPLE, chunk_tokens)
    has_too_many_blocks = False
    if is_half_weight:
        # the weight's gradient takes one sum per block of tokens: in 16 bits for few blocks only
        most_blocks = 1 if request.accumulate_dtype == torch.float32 else MAX_HALF_CHUNKS
        least_rows = max(least_rows, -(-sizes.tokens // most_blocks))
        has_too_many_blocks = (
            chunk_tokens is not None and balanced(sizes.tokens, chunk_tokens) * most_blocks < sizes.tokens
        )
    plan = of_one_row(sizes, "recompute", request.budget, weight_sum_dtype=sizes.buffer_dtype, note=note)
    if not has_too_many_blocks:
        yield Candidate(plan, least_rows, chunk_tokens, request.explicit)
    if (
        is_half_weight
        and (has_too_many_blocks or not request.explicit)
        and request.accumulate_dtype != sizes.weight_dtype
    ):
        grown_budget = request.budget + (0 if request.explicit else 4 * sizes.weight_elements)
        plan = replace(plan, budget=grown_budget, weight_accumulate=torch.float32)
        yield Candidate(plan, fewest_rows, chunk_tokens, request.explicit)


def fitted(request: Request, candidate: Candidate) -> Plan | Miss:
    """The candidate's plan with the largest chunks that its budget holds, or the reason why no chunks fit."""
    plan, least_rows, chunk_tokens, fits_budget = candidate
    tokens, forward_plan = max(plan.sizes.tokens, 1), plan
    if plan.schedule == "recompute":
        forward_plan, least_rows = of_one_row(plan.sizes, "loss only", request.budget), 1
    needed_bytes, least_rows = needed_by(forward_plan, with_rows), min(least_rows, tokens)
    rows = chunk_size(forward_plan, needed_bytes, chunk_tokens, least_rows, fits_budget)
    if rows < least_rows:
        least_bytes = needed_bytes(min(chunk_tokens or least_rows, tokens))
        return Miss(least_bytes - forward_plan.budget, least_bytes, chunk_tokens or least_rows)
    if plan.schedule != "recompute":
        return with_rows(plan, rows)
    plan, most_blocks = with_rows(plan, rows), -(-tokens // candidate.least_rows)
    needed_bytes, most_rows = (
        needed_by(plan, with_tile),
        tokens if chunk_tokens is None else balanced(tokens, chunk_tokens),
    )
    if tiled_plan := block_and_tile(plan, needed_bytes, most_blocks, most_rows):
        return tiled_plan
    block_rows = min(rows_of(tokens, most_blocks), most_rows)
    least_bytes = needed_bytes(block_rows, min(plan.sizes.vocab, CHUNK_MULTIPLE))
    return Miss(least_bytes - plan.budget, least_bytes, block_rows)
