"""From what a call asks to what runs: its objective, its plan, its sizes; the same way for every public function."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic.objective import Objective
from ..core.groups import block_of
from ..core.shift import all_at_targets, in_backward
from ..core.stats import Teacher
from ..plan.planner import Request, make_plan
from ..plan.plans import LEAST_SLACK, MAX_HALF_CHUNKS, Plan
from ..plan.segments import Spans, spans_of
from ..plan.sizes import Sizes
from .function import Forward, Loss, flat, forward_of
from .global_counts import call_fields
from .head_options import HeadOptions, LogitsOptions
from .logits_call import call_of as logits_call_of
from .prepared import PreparedCall, in_order, is_plain, layout_of, prepare
from .program import Program
from .sweep import Call
from .task import Task


class Wants(NamedTuple):
    """Which operands' gradients a call makes."""

    hidden: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> "Wants":
        """What autograd asks for here and now."""
        grad = torch.is_grad_enabled()
        return cls(
            grad and hidden.requires_grad,
            grad and weight.requires_grad,
            grad and bias is not None and bias.requires_grad,
        )


class Outcome(NamedTuple):
    """What ran, and what came of it."""

    outputs: tuple[Tensor, ...]
    # what follows is there for calls that have run themselves; of a replay there are the outputs alone
    plan: Plan | None = None  # None for logits that exist already too, which leave nothing to plan
    prepared: Any = None  # ``PreparedCall``
    objective: Any = None  # the task's
    stats: Any = None  # ``RowStats``
    call: Call | None = None
    forward: Forward | None = None


def run(task: Task, program: Program, rows: int | None = None) -> Outcome:
    """Runs the task at once, differentiable. ``rows``: how many, where rows that do not count follow its own."""
    prepared = prepare(task, program, rows)
    if isinstance(prepared.head, LogitsOptions):
        objective = task.objective(prepared)
        logits, on_logits = logits_call_of(prepared, objective, task.inplace)
        seen: list[Forward] = []
        outputs = Loss.apply(functools.partial(forward_of, on_logits), seen, logits)
        if task.per_token:
            outputs = all_at_targets(outputs, task.head.leading, task.head.shift)
        return Outcome(outputs, None, prepared, objective, seen[0].stats)
    head = prepared.head
    made = planned(prepared, Wants.of(head.hidden, head.weight, head.bias), again=in_backward())
    prepared = made.prepared
    # the first that ranks with other tokens send each other: what one of them refuses is known by now
    objective = task.objective(prepared)
    call = made.call(objective, padded=rows is not None)
    found: list[Forward] = []
    outputs = Loss.apply(functools.partial(forward_of, call), found, made.rows, head.weight, head.bias)
    if prepared.packing is not None and task.per_token:
        outputs = tuple(map(prepared.packing.unpack, outputs))
    if head.shard is not None and task.per_token:
        outputs = tuple(map(head.shard.own_tokens, outputs))
    if task.per_token:
        outputs = all_at_targets(outputs, task.head.leading, task.head.shift)
    return Outcome(outputs, call.plan, prepared, objective, found[0].stats, call, found[0])


class Planned(NamedTuple):
    """How a call runs, before its ranks have exchanged anything."""

    prepared: PreparedCall  # its rows in the order in which they run
    rows: Tensor  # hidden states
    request: Request
    plan: Plan
    spans: Spans | None

    def call(self, objective: Objective, padded: bool = False) -> Call:
        """With what the ranks know of each other."""
        prepared, head, shard = self.prepared, self.prepared.head, self.prepared.head.shard
        assert isinstance(head, HeadOptions)
        if shard is not None:
            fields = call_fields(prepared) | {"tokens": str(head.leading), "segment_lengths": str(self.spans)}
            shard = shard.agreed(self.plan, fields, self.rows.device)
        options = (
            prepared.logit_scale,
            prepared.softcap,
            self.request,
            head.gradient_buffer,
            prepared.packing,
            self.spans,
        )
        return Call(self.plan, prepared.backend, objective, *options, shard, padded)


def planned(
    prepared: PreparedCall,
    wants: Wants,
    again: bool = False,
    request: Request | None = None,
    buffer_dtype: torch.dtype | None = None,
) -> Planned:
    """``again``: inside of a backward. ``request``: other than the call's own. ``buffer_dtype``: of a buffer that the
    weight's gradient is added to, where it is none of the caller's."""
    head, program, groups = prepared.head, prepared.program, prepared.groups
    assert isinstance(head, HeadOptions)
    hidden, weight = head.hidden, head.weight
    rows = flat(hidden)
    if groups is not None:
        prepared = in_order(prepared, groups)
    # a view shares memory with what it views, a copy does not
    copied = rows.numel() > 0 and (rows.data_ptr() != hidden.data_ptr() or prepared.packing is not None)
    placed = Placed(
        prepared.token_rows.target.shape[0], wants, again, prepared.skips, groups is not None, copied,
        is_plain(weight), rows.stride(1) == 1 or rows.shape[1] == 1,
        buffer_dtype if head.gradient_buffer is None else head.gradient_buffer.buffer.dtype, request,
    )  # fmt: skip
    plan, spans = plan_placed(prepared, placed), None
    if groups is not None and plan.schedule == "forward" and plan.chunks > 1:
        slack = LEAST_SLACK if (request or program.request).chunk_tokens is None else 1.0
        spans = spans_of([sum(map(len, group)) for group in groups], plan.chunk_tokens, slack)
        plan = replace(plan, ending=sum(map(len, spans)))
        if plan.sums_halves and plan.chunks > MAX_HALF_CHUNKS:
            # segments are too uneven for so few bits
            plan, spans = plan_placed(prepared, placed._replace(by_segments=False)), None
    return Planned(prepared, rows, request or program.request, plan, spans)


def plan_placed(prepared: PreparedCall, placed: "Placed") -> Plan:
    head, program = prepared.head, prepared.program
    assert isinstance(head, HeadOptions)

    def make() -> Plan:
        sizes = sizes_of(head, program, placed, prepared.teacher)
        check_own_matmuls(prepared, sizes)
        # computed again in backward, a call recomputes whatever its request was made for
        request = placed.request or program.request
        wish = Request(memory_budget=request.memory_budget) if placed.again else request
        plan = make_plan(sizes, wish)
        if head.shard is not None and plan.vocab_block is not None and not placed.again:
            head.shard.split.check_blocks()
        return plan

    # of calls among ranks, or with a teacher's tensors, plans are made anew
    plan = program.plans.made(placed, make) if head.shard is None and prepared.teacher is None else make()
    if head.shard is None and plan.sizes.demand != program.demand:  # but in numbers
        plan = replace(plan, sizes=replace(plan.sizes, demand=program.demand))
    return plan


class Placed(NamedTuple):
    """What a plan depends on beside the program: how many tokens there are, and where tensors lie."""

    tokens: int
    wants: Wants
    again: bool
    skips: bool
    by_segments: bool  # chunks end where segments do
    copied: bool  # hidden states that no view flattens, or in another order
    plain_weight: bool  # contiguous and aligned to 16 bytes
    plain_rows: bool  # columns of hidden states contiguous
    buffer_dtype: torch.dtype | None
    request: Request | None = None  # None: the call's own


def check_own_matmuls(prepared: PreparedCall, sizes: Sizes) -> None:
    """Raises where an option needs our own matmuls and these operands run in others."""
    if not (sizes.skips or sizes.deterministic):
        return
    own, device = prepared.backend.bounds_rows(sizes.store), prepared.head.device
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
    summed = [summand.label for _, summand in prepared.losses.terms if summand.scope == "segment"]
    summed += [metric.label for metric, _ in prepared.needs.segment_metrics]
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


def sizes_of(head: HeadOptions | LogitsOptions, program: Program, placed: Placed, teacher: Teacher | None) -> Sizes:
    """What the plan is made from."""
    backend, demand, pairing = program.backend, program.demand, program.demand.pairing
    assert isinstance(head, HeadOptions)
    traits: dict[str, Any] = backend.traits(head.device) | ({} if head.shard is None else head.shard.traits)
    layout = layout_of(head, program, placed.plain_weight, placed.plain_rows, placed.wants.bias)
    store = "kept" if program.kept_everywhere else backend.store(layout)
    return Sizes(
        placed.tokens, head.hidden.shape[-1], head.columns, program.dtype,
        padding=head.weight.shape[0] - head.columns,
        hidden_dtype=head.hidden.dtype, weight_dtype=head.weight.dtype,
        hidden_grad=placed.wants.hidden, weight_grad=placed.wants.weight,
        bias_grad=placed.wants.bias, bias_dtype=None if head.bias is None else head.bias.dtype,
        late_upstream=program.late or placed.again, demand=demand,
        coupled=program.coupled and not placed.by_segments, by_segments=placed.by_segments,
        teacher_columns=0 if pairing is None else pairing.columns,
        teacher_width=0 if teacher is None or teacher.hidden is None else teacher.hidden.shape[1],
        teacher_cast=teacher is not None and teacher.casts,
        teacher_store=None if teacher is None else backend.teacher_store(teacher, store),
        store=store, copied=placed.copied, deterministic=head.deterministic,
        block=block_of(head.vocab) if head.deterministic else None, skips=placed.skips,
        buffer_dtype=placed.buffer_dtype,
        **traits,
    )  # fmt: skip
