"""The run of a call: its Spec, its tokens, its plan, its objective, in this order for every public function."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic.objective import Objective
from ..core.private import in_backward
from ..core.stats import all_at_targets
from ..parallel.groups import described
from ..plan.planner import LEAST_SLACK, make_plan
from ..plan.plans import Plan
from ..plan.segments import Spans, spans_of
from ..plan.sizes import Request, Sizes
from .function import Forward, Loss, flat, forward_of
from .head_call import HeadCall
from .logits_call import call_of as logits_call_of
from .objectives import call_fields
from .options import HeadOptions, LogitsOptions
from .spec import Spec, Task, is_plain, sizes_of
from .tokens import Tokens, in_order, tokens_of

Wanted = tuple[bool, bool, bool]  # whether gradients of hidden states, weight and bias are made


class Outcome(NamedTuple):
    """A call that ran, and its results."""

    outputs: tuple[Tensor, ...]
    # what follows is there for calls that have run themselves; of a replay there are the outputs alone
    plan: Plan | None = None  # None for logits that exist already too, which leave nothing to plan
    tokens: Any = None  # ``Tokens``
    objective: Any = None  # the task's
    stats: Any = None  # ``RowStats``
    call: HeadCall | None = None
    forward: Forward | None = None


def run(task: Task, spec: Spec, rows: int | None = None) -> Outcome:
    """Runs the task at once, differentiable. ``rows``: how many, where rows that do not count follow its own."""
    tokens = tokens_of(task, spec, rows)
    head = tokens.head
    if isinstance(head, LogitsOptions):
        objective = task.objective(tokens)
        logits, on_logits = logits_call_of(tokens, objective, task.inplace)
        seen: list[Forward] = []
        outputs = Loss.apply(functools.partial(forward_of, on_logits), seen, logits)
        if task.per_token:
            outputs = all_at_targets(outputs, task.head.leading, task.head.shift)
        return Outcome(outputs, None, tokens, objective, seen[0].stats)
    made = planned(tokens, wanted_of(head.hidden, head.weight, head.bias), again=in_backward())
    tokens = made.tokens
    # the first that ranks with other tokens send each other: what one of them refuses is known by now
    objective = task.objective(tokens)
    call = made.call(objective, padded=rows is not None)
    found: list[Forward] = []
    outputs = Loss.apply(functools.partial(forward_of, call), found, made.rows, head.weight, head.bias)
    if task.per_token:
        if tokens.packing is not None:
            outputs = tuple(map(tokens.packing.unpack, outputs))
        if head.shard is not None:
            outputs = tuple(map(head.shard.own_tokens, outputs))
        outputs = all_at_targets(outputs, task.head.leading, task.head.shift)
    return Outcome(outputs, call.plan, tokens, objective, found[0].stats, call, found[0])


def wanted_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Wanted:
    """The gradients that autograd asks for here and now."""
    if not torch.is_grad_enabled():
        return False, False, False
    return hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad


class Planned(NamedTuple):
    """A call with its plan, before its ranks have exchanged anything."""

    tokens: Tokens  # in the order in which they run
    rows: Tensor  # hidden states
    request: Request
    plan: Plan
    spans: Spans | None

    def call(self, objective: Objective, padded: bool = False) -> HeadCall:
        """The call with its objective, and with all that its ranks have agreed on."""
        tokens, head, temperature = self.tokens, self.tokens.head, self.tokens.needs.temperature
        assert isinstance(head, HeadOptions)
        scale, softcap = float(head.logit_scale) / temperature, head.softcap
        softcap, shard = None if softcap is None else softcap / temperature, head.shard
        if shard is not None:
            fields = call_fields(tokens) | {"tokens": str(head.leading), "segment_lengths": str(self.spans)}
            shard = shard.agreed_on(fields | described(self.plan.in_common), self.rows.device)
        return HeadCall(
            self.plan, tokens.spec.backend, objective, scale, softcap, self.request,
            None if head.accumulate_into is None else head.gradient_buffer, tokens.packing, self.spans, shard, padded,
        )  # fmt: skip


def planned(
    tokens: Tokens,
    wanted: Wanted,
    again: bool = False,
    request: Request | None = None,
    buffer_dtype: torch.dtype | None = None,
) -> Planned:
    """``again``: inside of a backward. ``request``: other than the call's own. ``buffer_dtype``: of a buffer that the
    weight's gradient is added to, where it is none of the caller's."""
    head, spec, groups = tokens.head, tokens.spec, tokens.groups
    assert isinstance(head, HeadOptions)
    rows, asked = head.hidden, request or spec.request
    if rows.dim() != 2:
        rows = flat(rows)
    if groups is not None:
        tokens = in_order(tokens, groups)
    # a view shares memory with what it views, a copy does not
    copied = rows.numel() > 0 and (rows.data_ptr() != head.hidden.data_ptr() or tokens.packing is not None)
    if head.accumulate_into is not None and head.gradient_buffer is not None:
        buffer_dtype = head.gradient_buffer.buffer.dtype
    where = wanted, again, copied, rows.stride(1) == 1 or rows.shape[1] == 1, buffer_dtype

    def plan_of(by_segments: bool) -> Plan:
        def make() -> Plan:
            sizes = call_sizes(tokens, len(tokens.target), by_segments, *where)
            check_own_matmuls(tokens, sizes)
            # computed again in backward, a call recomputes whatever its request was made for
            plan = make_plan(sizes, Request(memory_budget=asked.memory_budget) if again else asked)
            if head.shard is not None and plan.vocab_block is not None and not again:
                head.shard.split.check_blocks()
            return plan

        if head.shard is not None or tokens.teacher is not None:
            return make()  # of calls among ranks, or with a teacher's tensors, plans are made anew
        count = None if tokens.packing is None else tokens.packing.count is not None
        plan = spec.plans.made((len(tokens.target), by_segments, count, where, is_plain(head.weight), request), make)
        if plan.sizes.demand != spec.demand:  # but in numbers
            plan = replace(plan, sizes=replace(plan.sizes, demand=spec.demand))
        return plan

    plan, spans = plan_of(groups is not None), None
    if groups is not None and plan.schedule == "forward" and plan.chunks > 1:
        slack = LEAST_SLACK if asked.chunk_tokens is None else 1.0
        spans = spans_of([sum(map(len, group)) for group in groups], plan.chunk_tokens, slack)
        plan = replace(plan, ending=sum(map(len, spans)))
        if plan.too_many_chunks:
            # segments are too uneven for so few bits
            plan, spans = plan_of(by_segments=False), None
    return Planned(tokens, rows, asked, plan, spans)


def call_sizes(
    tokens: Tokens,
    count: int,
    by_segments: bool,
    wanted: Wanted,
    again: bool,
    copied: bool,
    plain_rows: bool,
    buffer_dtype: torch.dtype | None,
) -> Sizes:
    """The sizes of a plan for ``count`` tokens. ``by_segments``: chunks end where segments do. ``copied``: hidden
    states that no view flattens, or in another order. ``plain_rows``: columns of hidden states are contiguous."""
    head, spec, packing = tokens.head, tokens.spec, tokens.packing
    assert isinstance(head, HeadOptions)
    traits = spec.backend.traits(head.device) | ({} if head.shard is None else head.shard.traits)
    return sizes_of(
        spec.backend, traits, spec.demand, count, head.hidden.shape[-1], head.columns, spec.dtype, vocab=head.vocab,
        kept_everywhere=spec.kept_everywhere, deterministic=head.deterministic, capped=head.softcap is not None,
        bias_grad=wanted[2], teacher=tokens.teacher, plain_weight=is_plain(head.weight), plain_rows=plain_rows,
        padding=head.weight.shape[0] - head.columns, hidden_dtype=head.hidden.dtype, weight_dtype=head.weight.dtype,
        hidden_grad=wanted[0], weight_grad=wanted[1], bias_dtype=None if head.bias is None else head.bias.dtype,
        late_upstream=spec.late or again, coupled=spec.coupled and not by_segments, by_segments=by_segments,
        copied=copied, skips=packing is not None and packing.count is not None, buffer_dtype=buffer_dtype,
    )  # fmt: skip


def check_own_matmuls(tokens: Tokens, sizes: Sizes) -> None:
    """Raises where an option needs our own matmuls and these operands run in others."""
    if not (sizes.skips or sizes.deterministic):
        return
    own, device = tokens.backend.bounds_rows(sizes.store), tokens.head.device
    what = f"{sizes.dtype} on {device}; theirs are 16-bit, rows on 16 bytes, a GPU of docs/gpus.md, no top_k"
    if sizes.skips and not own:
        raise ValueError(
            f"skip_ignored=True needs matmuls that stop at a number of rows on the device, which these operands do not "
            f"run in ({what}); use skip_ignored='wait' or False"
        )
    if not sizes.deterministic:
        return
    if sizes.dtype == torch.float16:
        raise ValueError(
            "deterministic=True goes with bfloat16: gradients of float16 logits are scaled by the largest of a chunk"
        )
    summed = [summand.label for _, summand in tokens.losses.terms if summand.scope == "segment"]
    summed += [metric.label for metric, _ in tokens.needs.segment_metrics]
    if summed and device.type == "cuda":
        raise ValueError(
            f"deterministic=True does not go with {summed[0]} on a GPU, which adds up a segment's tokens in any order"
        )
    if sizes.demand.top_k:
        raise ValueError(
            "deterministic=True does not go with top_k, whose logits BLAS makes: they depend on the number of rows; "
            "take argmax=True, or the ids from a call with deterministic=False"
        )
    if not own:
        raise ValueError(
            f"deterministic=True needs our own matmuls, which do not run these operands ({what}): BLAS's depend on the "
            "number of rows"
        )
