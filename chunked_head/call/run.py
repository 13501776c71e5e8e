"""The run of a call: its tokens, its plan, its objective, in this order for every public function."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic.objective import Objective
from ..core.checks import refuse
from ..core.private import in_backward
from ..core.stats import all_at_targets
from ..plan.planner import make_plan
from ..plan.plans import Plan
from ..plan.segments import Spans, spans_of
from ..plan.sizes import Request, Sizes
from ..stores.operands import TeacherHead
from .function import Forward, Loss, forward_of
from .logits_call import LogitsCall, logits_call
from .objectives import call_fields, objective_of
from .options import Call
from .recording import is_recordable
from .spec import Spec
from .sweep import HeadCall
from .tokens import Tokens, in_order, tokens_of

Wanted = tuple[bool, bool, bool]  # whether gradients of hidden states, weight and bias are made


class Outcome(NamedTuple):
    """A call that ran, and its results."""

    outputs: tuple[Tensor, ...]
    plan: Plan | None = None  # None for logits that exist already too, which leave nothing to plan
    tokens: Any = None  # ``Tokens``
    objective: Any = None
    stats: Any = None  # ``RowStats``


def run(call: Call[Any], spec: Spec) -> Outcome:
    """Runs the call at once, differentiable."""
    again, found = in_backward(), list[Forward]()
    tokens, made, operands = prepared(tokens_of(call, spec), None, again)
    outputs = Loss.apply(functools.partial(forward_of, made), found, *operands)
    if call.outputs:
        if tokens.packing is not None:
            outputs = tuple(map(tokens.packing.unpack, outputs))
        if call.shard is not None and call.weight is not None:
            outputs = tuple(map(call.shard.own_tokens, outputs))
        outputs = all_at_targets(outputs, call.leading, call.shift)
    return Outcome(outputs, made.plan, tokens, made.objective, found[0].stats)


def prepared(
    tokens: Tokens, wanted: Wanted | None = None, again: bool = False
) -> tuple[Tokens, HeadCall | LogitsCall, tuple[Tensor | None, ...]]:
    """The tokens in the order in which they run, the call on them, and its operands: hidden states [tokens,
    hidden], weight and bias, or logits. ``wanted``: other gradients than autograd asks for here."""
    call = tokens.call
    if call.weight is None:
        logits, on_logits = logits_call(tokens, objective_of(tokens))
        return tokens, on_logits, (logits,)
    tokens, rows, plan, spans = planned(tokens, wanted or wanted_of(call), again)
    # the first that ranks with other tokens send each other: what one of them refuses is known by now
    objective = objective_of(tokens)
    return tokens, head_call(tokens, rows, plan, spans, objective), (rows, call.weight, call.bias)


def wanted_of(call: Call[Any]) -> Wanted:
    """The gradients that autograd asks for here and now."""
    assert call.weight is not None
    if not torch.is_grad_enabled():
        return False, False, False
    return call.rows.requires_grad, call.weight.requires_grad, call.bias is not None and call.bias.requires_grad


def planned(tokens: Tokens, wanted: Wanted, again: bool = False) -> tuple[Tokens, Tensor, Plan, Spans | None]:
    """The tokens in the order in which they run, hidden states [tokens, hidden] as given, the plan, and spans of rows
    whose gradients wait for each other only. ``again``: inside of a backward."""
    call, spec, groups = tokens.call, tokens.spec, tokens.groups
    assert call.weight is not None
    asked, buffer_dtype = spec.request, None
    if groups is not None:
        tokens = in_order(tokens, groups)
    count, packing, rows = len(tokens.target), tokens.packing, call.rows
    if rows.dim() != 2:
        rows = rows.reshape(-1, rows.shape[-1])
    # a view shares memory with what it views, a copy does not
    copied = rows.numel() > 0 and (packing is not None or rows.data_ptr() != call.rows.data_ptr())
    if call.accumulate_into is not None and call.gradient_buffer is not None:
        buffer_dtype = call.gradient_buffer.buffer.dtype
    where: dict[str, Any] = {
        "again": again, "copied": copied, "plain_rows": rows.stride(1) == 1 or rows.shape[1] == 1,
        "buffer_dtype": buffer_dtype, "fp8_given": call.fp8_weight is not None,
        "skips": packing is not None and packing.count is not None,
    }  # fmt: skip
    weight = call.weight
    kind = count, wanted, tuple(where.values()), weight.is_contiguous(), weight.data_ptr() & 15
    lasts = tokens.teacher is None  # else its tensors decide too

    def plan_of(by_segments: bool) -> Plan:
        plan = spec.plans.get((kind, by_segments)) if lasts else None
        if plan is None:
            sizes = sizes_of(call, spec, count, wanted, by_segments=by_segments, teacher=tokens.teacher, **where)
            check_own_matmuls(tokens, sizes)
            # computed again in backward, a call recomputes whatever its request was made for
            plan = make_plan(sizes, Request(memory_budget=asked.memory_budget) if again else asked)
            if lasts:
                spec.plans[kind, by_segments] = plan
        elif plan.sizes.demand != spec.demand:  # but in numbers
            plan = replace(plan, sizes=replace(plan.sizes, demand=spec.demand))
        return plan

    plan, spans = plan_of(groups is not None), None
    if groups is not None and plan.schedule == "forward" and plan.chunks > 1:
        spans = spans_of([sum(map(len, group)) for group in groups], plan.chunk_tokens)
        plan = replace(plan, ending=sum(map(len, spans)))
        if plan.too_many_chunks:
            # segments are too uneven for so few bits
            plan, spans = plan_of(by_segments=False), None
    return tokens, rows, plan, spans


def sizes_of(
    call: Call[Any],
    spec: Spec,
    tokens: int,
    wanted: Wanted,
    *,
    by_segments: bool = False,
    again: bool = False,
    copied: bool = False,
    plain_rows: bool = True,
    buffer_dtype: torch.dtype | None = None,
    fp8_given: bool = False,
    skips: bool = False,
    teacher: TeacherHead | None = None,
    **traits: Any,
) -> Sizes:
    """The sizes that a plan for so many tokens is made from. ``by_segments``: chunks end where segments do. ``again``:
    inside of a backward. ``copied``: hidden states that no view flattens, or in another order. ``plain_rows``: columns
    of hidden states are contiguous. ``skips``: matmuls stop at a number of rows that only the device knows.
    ``traits``: of the device and of ranks, other than the call's."""
    weight, backend, bias = call.weight, spec.backend, call.bias
    assert weight is not None
    traits = backend.traits(call.device) | ({} if call.shard is None else call.shard.traits) | traits
    plain, columns = plain_rows and call.softcap is None and not wanted[2], traits.pop("columns", call.columns)
    store: Any = backend.sets_store
    if not spec.kept_everywhere:
        store = backend.store(spec.dtype, weight, spec.demand, traits.get("gpu"), plain, teacher)
    return Sizes(
        tokens, weight.shape[1], columns, spec.dtype, call.rows.dtype, weight.dtype, store,
        weight.shape[0] - columns, *wanted,
        bias_dtype=None if bias is None else bias.dtype, buffer_dtype=buffer_dtype, late_upstream=spec.late or again,
        coupled=spec.coupled and not by_segments, by_segments=by_segments, demand=spec.demand,
        deterministic=call.deterministic,
        teacher_width=0 if teacher is None or teacher.hidden is None else teacher.hidden.shape[1],
        teacher_cast=teacher is not None and teacher.casts,
        teacher_made=teacher is not None and (teacher.logits is None or not backend.reads_teacher),
        copied=copied, skips=skips,
        fp8=None if call.precision is None or not store.multiplies else "given" if fp8_given else "made", **traits,
    )  # fmt: skip


def check_own_matmuls(tokens: Tokens, sizes: Sizes) -> None:
    """Raises where an option needs our own matmuls and these operands run in others."""
    own_fp8 = sizes.fp8 is not None and tokens.spec.backend.bounds_rows
    if not (sizes.skips or sizes.deterministic or own_fp8):
        return
    bounded, fixed, device = sizes.store.bounds_rows, sizes.deterministic, tokens.call.device
    what = f"{sizes.dtype} on {device}; theirs are 16-bit, rows on 16 bytes, a GPU of docs/gpus.md, no top_k"
    summed = [summand.label for _, summand in tokens.losses.terms if summand.scope == "segment"]
    summed += [metric.label for metric, _ in tokens.structure.segment_metrics]
    refuse({
        f"skip_ignored=True needs matmuls that stop at a number of rows on the device, which these operands do not run "
        f"in ({what}); use skip_ignored='wait' or False": sizes.skips and not bounded,
        "deterministic=True goes with bfloat16: gradients of float16 logits are scaled by the largest of a chunk":
            fixed and sizes.dtype == torch.float16,
        f"deterministic=True does not go with {', '.join(summed[:1])} on a GPU, which adds up a segment's tokens in "
        "any order": fixed and summed and device.type == "cuda",
        "deterministic=True does not go with top_k, whose logits BLAS makes: they depend on the number of rows; take "
        "argmax=True, or the ids from a call with deterministic=False": fixed and sizes.demand.top_k,
        f"deterministic=True needs our own matmuls, which do not run these operands ({what}): BLAS's depend on the "
        "number of rows": fixed and not bounded,
        'precision="fp8" needs our own matmuls, which read a weight that is contiguous and begins on 16 bytes':
            own_fp8 and not bounded,
    })  # fmt: skip


def head_call(tokens: Tokens, rows: Tensor, plan: Plan, spans: Spans | None, objective: Objective) -> HeadCall:
    """The call that ``planned`` has planned, with its objective and all that its ranks have agreed on."""
    call, temperature, shard = tokens.call, tokens.structure.temperature, tokens.call.shard
    if shard is not None:
        fields = call_fields(tokens) | {"tokens": str(call.leading), "segment_lengths": str(spans)}
        shard = shard.agreed_on(fields | plan.in_common, rows.device)
    spec, alone = tokens.spec, shard is None and tokens.packing is None
    records = alone and spec.backend.recording and is_recordable(plan, objective)
    return HeadCall(
        plan=plan, backend=spec.backend, objective=objective, logit_scale=float(call.logit_scale) / temperature,
        softcap=None if call.softcap is None else call.softcap / temperature, shard=shard,
        gradient_buffer=None if call.accumulate_into is None else call.gradient_buffer, spans=spans,
        request=spec.request, packing=tokens.packing, recordings=spec.recordings if records else None,
        fp8_weight=None if call.fp8_weight is None or call.weight is None else call.fp8_weight.of(call.weight),
    )  # fmt: skip
