"""The choice of a ``Plan``: the fastest candidate that the budget holds, else the reason why no candidate fits.

A candidate says when gradients are made and in which dtypes they add up; ``chunks.py`` finds the largest chunks and
tiles that the budget holds.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..core.checks import name
from ..core.memory import Cache
from .chunks import GOOD_CHUNK, block_and_tile, chunk_size, e4m3_copy, with_rows, with_tile
from .plans import MAX_HALF_CHUNKS, OTHER_BUDGETS, Plan, Schedule, byte_counter
from .sizes import CHUNK_MULTIPLE, DEFAULT_BUDGET, MiB, Request, Sizes, balanced, bytes_in_words, rows_of

FEW_HALF_CHUNKS = 4  # most 16-bit sums that are preferred to an fp32 accumulator, which takes 4 % of a call's time
SLACK = 1.25  # factor by which chunks that end with segments may be larger by default
SEVERAL_FACTORS = ", several numbers a row: a gradient for each takes as many products, and memory"

Candidate = tuple[Plan, bool]  # a plan with a schedule and dtypes of sums; whether its budget holds it
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
    """The plan of a backward that makes the gradients, such as a second backward; or the reason why there is no plan.
    Drops the request's ``accumulate_dtype``, and then its ``chunk_tokens``, where no plan meets them: backward should
    not raise for a forward pass's options."""
    backward_sizes = replace(sizes, waits_for_backward=True, num_row_factors=0)
    budget_request = Request(memory_budget=request.memory_budget)
    for relaxed_request in (request, replace(request, accumulate_dtype=None), budget_request):
        plan_or_reason = find_plan(backward_sizes, relaxed_request)
        if isinstance(plan_or_reason, Plan):
            break
    return plan_or_reason


def plan_anew(sizes: Sizes, request: Request) -> Plan | str:
    """The plan, or the reason why there is no plan, made anew: ``find_plan`` without its cache."""
    if sizes.largest_part is not None:
        return plan_of_rank(sizes, request, sizes.largest_part)
    if refusal_text := refusal(sizes, request):
        return refusal_text
    one_rank_request = replace(request, default=default_budget(sizes, 1))
    plan = first_that_fits(sizes, one_rank_request)
    if isinstance(plan, str):
        return plan
    plan = replace(plan, budget_rule=budget_rule(plan, one_rank_request, 1))
    if sizes.ranks == 1 or request.explicit:
        return plan
    shared_request = replace(request, default=default_budget(sizes, sizes.ranks))
    shared_plan = first_that_fits(sizes, shared_request)
    # a rank gets its share of the default budget only if chunks stay large: buffers of full size may fill the share
    if isinstance(shared_plan, str) or shared_plan.schedule != plan.schedule:
        return plan
    has_large_blocks = shared_plan.block_tokens >= min(GOOD_CHUNK, plan.block_tokens)
    if not has_large_blocks or shared_plan.chunk_tokens < min(GOOD_CHUNK, plan.chunk_tokens):
        return plan
    return replace(shared_plan, budget_rule=budget_rule(shared_plan, shared_request, sizes.ranks))


def budget_rule(plan: Plan, request: Request, ranks: int) -> tuple[str, ...]:
    """The reason for the plan's budget, as lines for the printed plan. ``ranks``: number of ranks among which the
    default budget is divided."""
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
    """Plans of the same call at budgets of 16 MiB, 32 MiB and so on, each with its budget as text. Ends with the first
    plan that holds all tokens in one chunk. Leaves out a plan that has the same schedule and number of chunks as the
    last plan. Ignores the caller's ``chunk_tokens`` and ``accumulate_dtype``."""
    last_schedule, chunk_count = "", 0
    for log2_mebibytes in range(4, 18):
        budget_plan = plan_anew(plan.sizes, Request(memory_budget=MiB << log2_mebibytes))
        if isinstance(budget_plan, str) or (budget_plan.schedule, budget_plan.chunks) == (last_schedule, chunk_count):
            continue
        last_schedule, chunk_count = budget_plan.schedule, budget_plan.chunks
        yield f"{1 << log2_mebibytes}MiB" if log2_mebibytes < 10 else f"{1 << log2_mebibytes - 10}GiB", budget_plan
        if budget_plan.chunks == 1 and budget_plan.schedule != "recompute":
            return


OTHER_BUDGETS.append(other_budgets)


def plan_of_rank(sizes: Sizes, request: Request, most_columns: int) -> Plan | str:
    """The plan of a rank that holds ``sizes.vocab`` columns of a shared vocabulary. The plan of the rank with the most
    columns, ``most_columns``, decides the size of chunks, so that all ranks have equal chunks. ``sizes.demand``: the
    demand over all columns."""
    demand = sizes.demand.of_columns(most_columns)
    plan = find_plan(replace(sizes, vocab=most_columns, largest_part=None, padding=0, demand=demand), request)
    if isinstance(plan, str):
        return plan
    local_sizes = replace(sizes, demand=sizes.demand.of_columns(sizes.vocab))
    # the weight's gradient may add up in 16 bits over at most MAX_HALF_CHUNKS chunks
    most_chunks = MAX_HALF_CHUNKS if plan.sizes.returns_weight_grad and plan.weight_accumulate.itemsize < 4 else 0
    chunk_rows, block_rows = (
        divisible_rows(n, sizes.hidden_ranks, sizes.tokens, most_chunks) for n in (plan.chunk_tokens, plan.block_tokens)
    )
    tile_columns = min(plan.tile_columns, sizes.vocab)
    return replace(plan, sizes=local_sizes, tile_columns=tile_columns, chunk_tokens=chunk_rows, block_tokens=block_rows)


def divisible_rows(rows: int, ranks: int, tokens: int, most_chunks: int) -> int:
    """Rounds ``rows``, the number of a chunk's rows, down to a multiple of ``ranks``. Rounds up in two cases: if the
    result would be 0, or if ``tokens`` tokens would take more than ``most_chunks`` chunks (0: no limit)."""
    rows_below = rows // ranks * ranks
    if rows_below and not (-(-tokens // rows) <= most_chunks < -(-tokens // rows_below)):
        return rows_below
    return rows_below if rows_below == rows else rows_below + ranks


def default_share(sizes: Sizes, ranks: int) -> int:
    """Bytes of the default budget, without the weight's e4m3 copies. ``default_budget`` may give more for large chunks.
    ``ranks``: number of ranks that share the vocabulary."""
    # a call with gradients of e4m3 operands stores exponentials in e4m3 and in 16 bits
    return math.isqrt(DEFAULT_BUDGET**2 // min(ranks, 16)) * (1 + sizes.e4m3_gradients)


def default_budget(sizes: Sizes, ranks: int) -> int:
    """Bytes that a call may take by default: 1.25 GiB; or the bytes of a chunk of 2048 tokens, if the chunk's logits
    (student's and teacher's, in the operands' dtype) alone take more than 1.25 GiB.

    The more ranks share the vocabulary, the less budget each rank has. Chunks are larger nevertheless, since a rank has
    fewer columns. From 16 ranks on the budget does not shrink, since hidden states are not divided among ranks.
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
    chunk_plan = with_rows(of_one_row(replace(sizes, is_copied=False), "forward", 0), rows)  # the copy is of all chunks
    return chunk_plan.extra_bytes - stored_bytes + logit_bytes


def of_one_row(
    sizes: Sizes,
    schedule: Schedule,
    budget: int,
    hidden_sum_dtype: torch.dtype | None = None,
    weight_sum_dtype: torch.dtype | None = None,
    **plan_fields: Any,
) -> Plan:
    """A plan with chunks of one row and tiles of all columns. ``hidden_sum_dtype``, ``weight_sum_dtype``: dtypes in
    which the gradients of hidden states and weight add up; None: the dtype of the tensor itself. ``plan_fields``:
    further fields of the plan."""
    sum_dtypes = hidden_sum_dtype or sizes.hidden_dtype, weight_sum_dtype or sizes.weight_dtype
    return Plan(sizes, budget, schedule, 1, 1, sizes.vocab, *sum_dtypes, **plan_fields)


def refusal(sizes: Sizes, request: Request) -> str:
    """The reason why no call of these sizes can add up gradients in ``request.accumulate_dtype``; "" without such a
    reason."""
    accumulate_dtype, weight_dtype = request.accumulate_dtype, sizes.weight_dtype
    allowed_dtypes, reason_text = {weight_dtype}, f" for a weight of {name(weight_dtype)}"
    if sizes.buffer_dtype is not None:
        allowed_dtypes, reason_text = {sizes.buffer_dtype}, ", the dtype of accumulate_into"
    elif weight_dtype.itemsize < 4:
        allowed_dtypes.add(torch.float32)
    if accumulate_dtype is not None and accumulate_dtype not in allowed_dtypes:
        dtype_names = " or ".join(sorted(map(name, allowed_dtypes)))
        return f"accumulate_dtype must be None or {dtype_names}{reason_text}, got {accumulate_dtype!r}"
    makes_grads_in_forward = not (sizes.waits_for_backward or sizes.waits_for_all)
    if accumulate_dtype == torch.float16 and makes_grads_in_forward and sizes.returns_weight_grad:
        return (
            "accumulate_dtype=torch.float16 cannot hold sums of unscaled gradients (they pass 65504); "
            f"use torch.float32, which needs {4 * sizes.weight_elements / MiB:.0f} MiB, or None"
        )
    return ""


def first_that_fits(sizes: Sizes, request: Request) -> Plan | str:
    """The plan of the first candidate that fits the budget; or the reason, as text, why the candidate that lacks the
    fewest bytes does not fit."""
    large_plans = list[Plan]()
    for plan, is_fitting in candidates(sizes, request):
        if is_fitting:
            return plan
        large_plans.append(plan)
    weight_dtype, accumulate_dtype = sizes.weight_dtype, request.accumulate_dtype
    makes_grads_in_forward = not (sizes.waits_for_backward or sizes.waits_for_all)
    if accumulate_dtype == weight_dtype and weight_dtype.itemsize < 4 and (makes_grads_in_forward or not large_plans):
        plan = with_rows(of_one_row(sizes, "forward", 0), rows_of(sizes.tokens, MAX_HALF_CHUNKS))
        return (
            f"accumulate_dtype={name(weight_dtype)} is accurate over at most {MAX_HALF_CHUNKS} chunks, and "
            f"{sizes.tokens} tokens in so few need {bytes_in_words(plan.extra_bytes)}; raise memory_budget or "
            "chunk_tokens, or leave accumulate_dtype=None"
        )
    plan = min(large_plans, key=lambda plan: plan.extra_bytes - plan.budget)
    chunk_text = "one row of logits" if plan.block_tokens == 1 else f"a chunk of {plan.block_tokens} rows"
    return (
        f"memory_budget of {bytes_in_words(request.budget)} is too small: {chunk_text} and what goes with it needs "
        f"{bytes_in_words(plan.extra_bytes)} beside the gradients; raise memory_budget"
        + (" or lower chunk_tokens" if request.chunk_tokens is not None else "")
    )


def candidates(sizes: Sizes, request: Request) -> Iterator[Candidate]:
    """The candidates of a call, the fastest first."""
    weight_dtype, accumulate_dtype, chunk_tokens = sizes.weight_dtype, request.accumulate_dtype, request.chunk_tokens
    tokens = max(sizes.tokens, 1)
    if not sizes.any_grad:
        yield fitted(of_one_row(sizes, "loss only", request.budget), 1, request, request.explicit)
    elif sizes.waits_for_backward:
        yield from unit_row_candidates(sizes, request)
        note = "the upstream gradient comes late" + SEVERAL_FACTORS * (sizes.num_row_factors > 1)
        yield from recompute_candidates(sizes, request, note)
    elif sizes.waits_for_all:
        # a single chunk with all tokens needs no recompute
        sums_half = sizes.sums_into(weight_dtype) and sizes.dtype != torch.float16
        weight_sum_dtype = sizes.buffer_dtype or (weight_dtype if sums_half else torch.float32)
        may_have_one_chunk = not sizes.deterministic and (chunk_tokens is None or chunk_tokens >= sizes.tokens)
        if may_have_one_chunk and (not sizes.weight_grad or accumulate_dtype in (None, weight_sum_dtype)):
            yield from forward_candidates(sizes, request, weight_sum_dtype, tokens)
        yield from unit_row_candidates(sizes, request)
        note = "a loss couples tokens" + SEVERAL_FACTORS * (sizes.num_row_factors > 1)
        yield from recompute_candidates(sizes, request, note)
    elif not sizes.returns_weight_grad or weight_dtype.itemsize >= 4:
        yield from forward_candidates(sizes, request, sizes.buffer_dtype or weight_dtype)
    else:
        # A 16-bit gradient of the weight, in this order: one product or few sums in 16 bits; an fp32 accumulator; more
        # sums in 16 bits; an fp32 accumulator on top of the default budget; recompute. fp16 never adds up in 16 bits,
        # since unscaled sums over tokens can exceed its 65504.
        can_sum_half = weight_dtype != torch.float16 and sizes.sums_into(weight_dtype)
        may_sum_half = can_sum_half and accumulate_dtype in (None, weight_dtype)
        may_sum_fp32 = accumulate_dtype in (None, torch.float32)
        if may_sum_half:
            yield from forward_candidates(sizes, request, weight_dtype, -(-tokens // FEW_HALF_CHUNKS))
        if may_sum_fp32:
            yield from forward_candidates(sizes, request, torch.float32, 1 if chunk_tokens else GOOD_CHUNK)
        if may_sum_half:
            yield from forward_candidates(sizes, request, weight_dtype, -(-tokens // MAX_HALF_CHUNKS))
        if may_sum_fp32:
            accumulator_bytes = 0 if request.explicit else 4 * sizes.weight_elements
            # the caller's chunk overrides the default budget
            fp32_request = replace(request, accumulate_dtype=torch.float32)
            least_rows = 1 if chunk_tokens else CHUNK_MULTIPLE
            yield from forward_candidates(sizes, fp32_request, torch.float32, least_rows, accumulator_bytes)
        if accumulate_dtype != weight_dtype and chunk_tokens is None and not sizes.deterministic:
            yield from recompute_candidates(sizes, request, "no accumulator of the weight fits")


def forward_candidates(
    sizes: Sizes,
    request: Request,
    weight_sum_dtype: torch.dtype,
    least_rows: int = 1,
    accumulator_bytes: int = 0,
    **plan_fields: Any,
) -> Iterator[Candidate]:
    """Candidates that make gradients in the forward pass. ``accumulator_bytes``: bytes that are added to the
    budget of their plans, for an accumulator of the weight. ``plan_fields``: further fields of their plans."""
    is_half_weight = sizes.returns_weight_grad and sizes.weight_dtype.itemsize < 4 and not sizes.waits_for_all
    accumulate_dtype, fits_budget = request.accumulate_dtype, request.explicit
    if request.chunk_tokens is None:
        if is_half_weight and accumulate_dtype == sizes.weight_dtype and not request.explicit:
            # the dtype overrides the default budget: chunks are so large that a sum in 16 bits is accurate enough
            request = replace(request, chunk_tokens=rows_of(sizes.tokens, MAX_HALF_CHUNKS))
    elif is_half_weight and accumulate_dtype is None and weight_sum_dtype == torch.float32:
        fits_budget = True  # an fp32 accumulator that the caller has not asked for must fit the budget
    hidden_dtype, wide_dtype = sizes.hidden_dtype, torch.promote_types(sizes.hidden_dtype, torch.float32)
    hidden_sum_dtypes = [hidden_dtype if sizes.sums_into(hidden_dtype) else wide_dtype]
    if sizes.dtype == torch.float16 and wide_dtype not in hidden_sum_dtypes:
        # unscaled fp16 gradients need fp32's range
        hidden_sum_dtypes = [wide_dtype] if sizes.deterministic else [wide_dtype, hidden_dtype]
    budget = request.budget + accumulator_bytes
    for hidden_sum_dtype in hidden_sum_dtypes:
        plan = of_one_row(sizes, "forward", budget, hidden_sum_dtype, weight_sum_dtype, **plan_fields)
        yield fitted(plan, least_rows, request, fits_budget)


def unit_row_candidates(sizes: Sizes, request: Request) -> Iterator[Candidate]:
    """Candidates that make each row of hidden's gradient in the forward pass, without the factor that comes later.
    Yields nothing unless a row has a single factor. With two factors, each would take a tensor and a matrix product:
    as many products as recomputing takes, and more memory."""
    if sizes.num_row_factors == 1:
        note = "backward multiplies each row by what comes late"
        yield from forward_candidates(sizes, request, sizes.weight_dtype, has_unit_rows=True, note=note)


def recompute_candidates(sizes: Sizes, request: Request, note: str) -> Iterator[Candidate]:
    """Candidates that make statistics in the forward pass and gradients in backward, from recomputed logits."""
    is_half_weight, chunk_tokens = sizes.returns_weight_grad and sizes.weight_dtype.itemsize < 4, request.chunk_tokens
    least_rows = CHUNK_MULTIPLE if chunk_tokens is None else min(CHUNK_MULTIPLE, chunk_tokens)
    accurate_rows, has_too_many_blocks = least_rows, False
    if is_half_weight:
        # the weight's gradient takes one sum per block of tokens: in 16 bits for few blocks only
        most_blocks = 1 if request.accumulate_dtype == torch.float32 else MAX_HALF_CHUNKS
        accurate_rows = max(least_rows, -(-sizes.tokens // most_blocks))
        most_rows = sizes.tokens if chunk_tokens is None else balanced(sizes.tokens, chunk_tokens)
        has_too_many_blocks = most_rows * most_blocks < sizes.tokens
    plan = of_one_row(sizes, "recompute", request.budget, weight_sum_dtype=sizes.buffer_dtype, note=note)
    if not has_too_many_blocks:
        yield fitted(plan, accurate_rows, request, request.explicit)
    may_sum_fp32 = is_half_weight and request.accumulate_dtype != sizes.weight_dtype
    if may_sum_fp32 and (has_too_many_blocks or not request.explicit):
        grown_budget = request.budget + (0 if request.explicit else 4 * sizes.weight_elements)
        plan = replace(plan, budget=grown_budget, weight_accumulate=torch.float32)
        yield fitted(plan, least_rows, request, request.explicit)


def fitted(plan: Plan, least_rows: int, request: Request, fits_budget: bool) -> Candidate:
    """Returns ``plan`` with the largest chunks that its budget holds, and True. If no chunks fit, returns the plan with
    the smallest chunks that it may have, and False. ``least_rows``: least number of rows of a chunk; in the recompute
    schedule, of a block. ``fits_budget``: False if chunks of ``request.chunk_tokens`` rows override the budget."""
    tokens, chunk_tokens = max(plan.sizes.tokens, 1), request.chunk_tokens
    forward_plan, least_chunk_rows = plan, min(least_rows, tokens)
    if plan.schedule == "recompute":
        forward_plan, least_chunk_rows = of_one_row(plan.sizes, "loss only", request.budget), 1
    rows = chunk_size(forward_plan, byte_counter(forward_plan, with_rows), chunk_tokens, least_chunk_rows, fits_budget)
    if rows < least_chunk_rows:
        return with_rows(forward_plan, min(chunk_tokens or least_chunk_rows, tokens)), False
    if plan.schedule != "recompute":
        return with_rows(plan, rows), True
    plan, most_blocks = with_rows(plan, rows), -(-tokens // least_rows)
    most_rows = tokens if chunk_tokens is None else balanced(tokens, chunk_tokens)
    if tiled_plan := block_and_tile(plan, byte_counter(plan, with_tile), most_blocks, most_rows):
        return tiled_plan, True
    block_rows = min(rows_of(tokens, most_blocks), most_rows)
    return with_tile(plan, block_rows, min(plan.sizes.vocab, CHUNK_MULTIPLE)), False
