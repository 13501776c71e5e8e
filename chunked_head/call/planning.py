"""The plan of a call on hidden states: its key, its sizes, and the order in which rows run."""

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.checks import mismatch, refuse
from ..plan.planner import find_late_plan, find_plan, other_budgets
from ..plan.plans import Plan
from ..plan.segments import Spans, spans_of
from ..plan.sizes import Sizes
from ..stores.operands import TeacherHead
from ..stores.sets import SetStore
from .options import Call
from .spec import Spec
from .tokens import Tokens, in_order

GradFlags = tuple[bool, bool, bool]  # which gradients are made: of hidden states, weight, bias


class PlanKey(NamedTuple):
    """The key of ``Spec.plans``: all that a plan depends on besides the Spec and a dense teacher's tensors."""

    tokens: int  # number of tokens
    makes_grads: GradFlags
    is_in_backward: bool  # the call runs inside of a backward, and makes its gradients in it
    ends_with_segments: bool  # chunks end where segments end
    is_copied: bool  # hidden states are copied to get the shape [tokens, hidden]
    is_moved: bool  # rows run in another order than the caller's
    has_device_count: bool  # products stop at a number of rows on the device
    buffer_dtype: torch.dtype | None  # of the caller's buffer for the weight's gradient
    has_plain_rows: bool  # columns of hidden states are contiguous
    is_weight_contiguous: bool
    weight_offset: int  # bytes of the weight's address above a multiple of 16


def grads_asked_for(call: Call[Any]) -> GradFlags:
    """For hidden states, weight and bias, whether autograd asks for their gradient in the present grad mode."""
    assert call.weight is not None
    if not torch.is_grad_enabled():
        return False, False, False
    return call.rows.requires_grad, call.weight.requires_grad, call.bias is not None and call.bias.requires_grad


def planned(
    tokens: Tokens, hidden: Tensor, makes_grads: GradFlags, is_in_backward: bool
) -> tuple[Tokens, Plan, Spans | None]:
    """Returns the tokens in the order in which they run, the plan, and the spans. The gradients of a span's chunks wait
    for the statistics of these chunks only. Spans are None where each chunk is a span. ``hidden`` [tokens, hidden].
    ``is_in_backward``: the call runs inside of a backward. ValueError if no plan fits."""
    call, packing, groups, weight, buffer_dtype = tokens.call, tokens.packing, tokens.groups, tokens.call.weight, None
    assert weight is not None
    if call.accumulate_into is not None and call.gradient_buffer is not None:
        buffer_dtype = call.gradient_buffer.buffer.dtype
    # hidden states that are a view have the caller's memory; sets of columns read rows packed, as they run
    packs_hidden = packing is not None and tokens.column_sets is not None
    key = PlanKey(
        len(tokens.targets),
        makes_grads,
        is_in_backward,
        ends_with_segments=groups is not None,
        is_copied=hidden.numel() > 0 and (packs_hidden or hidden.data_ptr() != call.rows.data_ptr()),
        is_moved=packing is not None,
        has_device_count=packing is not None and packing.count is not None,
        buffer_dtype=buffer_dtype,
        has_plain_rows=hidden.stride(1) == 1 or hidden.shape[1] == 1,
        is_weight_contiguous=weight.is_contiguous(),
        weight_offset=weight.data_ptr() & 15,
    )
    plan = plan_or_reason(tokens, key)
    if isinstance(plan, str) and key.ends_with_segments:
        # the budget has no room for a second gradient of hidden states, in the order in which rows run
        groups, plan = None, plan_or_reason(tokens, key._replace(ends_with_segments=False))
    if isinstance(plan, str):
        raise ValueError(plan)
    if groups is None or plan.schedule != "forward" or plan.chunks == 1:
        return tokens, plan, None
    can_reorder = tokens.teacher is None or tokens.teacher.logits is None  # another order would copy a teacher's logits
    spans, order = spans_of([sum(map(len, group)) for group in groups], plan.chunk_tokens, can_reorder)
    plan = replace(plan, segment_chunks=sum(map(len, spans)))
    if not plan.too_many_chunks:
        return in_order(tokens, [groups[group] for group in order]), plan, spans
    # segments are too uneven: 16-bit sums over so many chunks are not accurate
    plan_without_spans = plan_or_reason(tokens, key._replace(ends_with_segments=False))
    if isinstance(plan_without_spans, str):
        raise ValueError(plan_without_spans)
    return tokens, plan_without_spans, None


def plan_or_reason(tokens: Tokens, key: PlanKey) -> Plan | str:
    """The plan of a key, from the Spec's cache or new; or the reason, as text, why no plan fits."""
    call, spec, weight = tokens.call, tokens.spec, tokens.call.weight
    is_cached = tokens.teacher is None  # a plan depends on a teacher's tensors, which the key leaves out
    plan = spec.plans.get(key) if is_cached else None
    if plan is None:
        sizes = sizes_of(
            call,
            spec,
            key.tokens,
            key.makes_grads,
            tokens.teacher,
            key.has_plain_rows,
            waits_for_backward=key.is_in_backward or bool(call.outputs),
            ends_with_segments=key.ends_with_segments,
            is_copied=key.is_copied,
            is_moved=key.is_moved or key.ends_with_segments,
            buffer_dtype=key.buffer_dtype,
            has_device_count=key.has_device_count,
        )
        check_own_matmuls(tokens, sizes)
        plan_or_reason_text = (
            find_late_plan(sizes, spec.request) if key.is_in_backward else find_plan(sizes, spec.request)
        )
        if (
            isinstance(plan_or_reason_text, Plan)
            and call.memory_budget is None
            and plan_or_reason_text.extra_bytes > NOTEWORTHY
        ):
            note_default(plan_or_reason_text)
        if is_cached and isinstance(plan_or_reason_text, Plan):
            spec.plans[key] = plan_or_reason_text
        return plan_or_reason_text
    assert weight is not None
    sizes = plan.sizes
    sizes_of_plan = sizes.tokens, sizes.hidden, sizes.vocab + sizes.padding, sizes.dtype
    sizes_of_call = key.tokens, *weight.shape[::-1], spec.dtype
    if sizes_of_plan != sizes_of_call:
        raise mismatch("a plan", sizes_of_plan, sizes_of_call)
    # Specs that differ in numbers share plans; this Spec's demand, with its numbers, takes the place of the plan's
    return plan if sizes.demand == spec.demand else replace(plan, sizes=replace(sizes, demand=spec.demand))


NOTEWORTHY = 2 << 30  # bytes beside the gradients above which ``note_default`` warns
NOTES: set[str] = set()  # names of the warnings that this process has given


def note_default(plan: Plan) -> None:
    """Warns once in a process that a call takes much memory by default. The warning lists budgets that would do."""
    if "default" not in NOTES:
        NOTES.add("default")
        size_text, rule_text = f"{plan.extra_bytes / 2**30:.1f} GiB beside the gradients", ", ".join(plan.budget_rule)
        budgets_text = ", ".join([f"{budget} ({p.schedule}, {p.chunks} chunks)" for budget, p in other_budgets(plan)])
        warnings.warn(
            f"chunked_head takes {size_text}: {rule_text}. memory_budget= sets another: {budgets_text}", stacklevel=2
        )


def sizes_of(
    call: Call[Any],
    spec: Spec,
    tokens: int,
    makes_grads: GradFlags,
    teacher: TeacherHead | None,
    has_plain_rows: bool = True,
    **traits: Any,
) -> Sizes:
    """The sizes of a call of ``tokens`` tokens. ``has_plain_rows``: columns of hidden states are contiguous.
    ``traits``: values of fields of ``Sizes``, which replace values that follow from backend, shard and call."""
    weight, backend, bias = call.weight, spec.backend, call.bias
    assert weight is not None
    traits = backend.traits(call.device) | ({} if call.shard is None else call.shard.size_fields) | traits
    column_count, has_bias_grad = traits.pop("columns", call.local_width), makes_grads[2]
    store_class: Any = SetStore
    if not (call.kept_everywhere or spec.demand.columns_only):  # some softmax is over the vocabulary
        has_plain_operands = has_plain_rows and call.softcap is None and not has_bias_grad
        store_class = backend.store(spec.dtype, weight, spec.demand, traits.get("gpu"), has_plain_operands, teacher)
    fp8_copy = (
        None if call.precision is None or not store_class.has_matmul else "made" if call.fp8_weight is None else "given"
    )
    is_only_hidden = makes_grads == (True, False, False)
    traits_of_call: dict[str, Any] = {
        "num_row_factors": spec.num_row_factors if is_only_hidden else 0,
        "waits_for_backward": bool(call.outputs),
        "waits_for_all": spec.coupled and not traits.get("ends_with_segments"),
        "fp8_copy": fp8_copy,
        "teacher_width": 0 if teacher is None or teacher.hidden is None else teacher.hidden.shape[1],
        "teacher_cast": teacher is not None and teacher.casts,
    }
    return Sizes(
        tokens,
        weight.shape[1],
        column_count,
        spec.dtype,
        call.rows.dtype,
        weight.dtype,
        store_class,
        weight.shape[0] - column_count,
        *makes_grads,
        bias_dtype=None if bias is None else bias.dtype,
        demand=spec.demand,
        deterministic=call.deterministic,
        **(traits_of_call | traits),
    )


def check_own_matmuls(tokens: Tokens, sizes: Sizes) -> None:
    """Raises ValueError if an option needs this library's matmuls, and BLAS runs the matmuls of these sizes."""
    is_own_fp8 = sizes.fp8_copy is not None and tokens.spec.backend.stops_at_device_count
    if not (sizes.has_device_count or sizes.deterministic or is_own_fp8):
        return
    has_own_matmuls = sizes.store.stops_at_device_count and tokens.spec.backend.stops_at_device_count
    is_deterministic, device = sizes.deterministic, tokens.call.device
    limits = f"{sizes.dtype} on {device}; theirs are 16-bit, rows on 16 bytes, a GPU of docs/gpus.md, no top_k"
    segment_labels = [summand.label for _, summand in tokens.call.losses.terms if summand.scope == "segment"]
    segment_labels += [metric.label for metric, _ in tokens.structure.segment_metrics]
    refuse({
        f"skip_ignored=True needs our own matmuls, which do not run these operands ({limits}); use 'wait' or False":
            sizes.has_device_count and not has_own_matmuls,
        f"deterministic=True runs on GPUs of docs/gpus.md alone, and these operands are on {device}; leave it False":
            is_deterministic and device.type == "cpu" and not tokens.spec.backend.stops_at_device_count,
        "deterministic=True goes with bfloat16: gradients of float16 logits are scaled by the largest of a chunk; "
        "cast to bfloat16, or leave it False":
            is_deterministic and sizes.dtype == torch.float16,
        f"deterministic=True does not go with {', '.join(segment_labels[:1])} on a GPU, which adds up tokens in "
        "any order; leave it False":
            is_deterministic and segment_labels and device.type == "cuda",
        "deterministic=True does not go with top_k, whose logits BLAS makes; take argmax=True":
            is_deterministic and sizes.demand.searches_logits,
        f"deterministic=True needs our own matmuls, which do not run these operands ({limits}); leave it False":
            is_deterministic and not has_own_matmuls,
        'precision="fp8" needs our own matmuls, which read a weight that is contiguous and begins on 16 bytes':
            is_own_fp8 and not has_own_matmuls,
    })  # fmt: skip
