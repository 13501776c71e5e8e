"""Calls on hidden states and a head: their plan, and what the sweep does with them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arithmetic.objective import Objective, ScalarObjective
from ..core.stats import Coefficients, RowStats
from ..kernels.common.recording import refuse
from ..parallel.groups import block_of, described
from ..parallel.shard import Shard
from ..plan.planner import LEAST_SLACK, NoPlan, find_plan, make_plan
from ..plan.plans import Plan
from ..plan.segments import Spans, spans_of
from ..plan.sizes import DEFAULT_REQUEST, Request, Sizes
from ..stores import Backend, Layout
from ..stores.gradients import GradientBuffer, Gradients
from ..stores.operands import Head, Rows, Teacher
from ..stores.sets import WithSets
from .objectives import call_fields
from .options import Call
from .spec import Spec, is_plain
from .sweep import LocalCall, Work, sweep
from .tokens import Packing, Tokens, in_order

Wanted = tuple[bool, bool, bool]  # whether gradients of hidden states, weight and bias are made


def wanted_of(call: Call[Any]) -> Wanted:
    """The gradients that autograd asks for here and now."""
    assert call.weight is not None
    if not torch.is_grad_enabled():
        return False, False, False
    return call.rows.requires_grad, call.weight.requires_grad, call.bias is not None and call.bias.requires_grad


def planned(
    tokens: Tokens,
    wanted: Wanted,
    again: bool = False,
    request: Request | None = None,
    buffer_dtype: torch.dtype | None = None,
) -> tuple[Tokens, Tensor, Plan, Spans | None]:
    """The tokens in the order in which they run, hidden states [tokens, hidden] as given, the plan, and spans of rows
    whose gradients wait for each other only. ``again``: inside of a backward. ``request``: other than the call's own.
    ``buffer_dtype``: of a buffer that the weight's gradient is added to, where it is none of the caller's."""
    call, spec, groups = tokens.call, tokens.spec, tokens.groups
    assert call.weight is not None
    asked = request or spec.request
    if groups is not None:
        tokens = in_order(tokens, groups)
    count, shard, packing, rows = len(tokens.target), call.shard, tokens.packing, call.rows
    if rows.dim() != 2:
        rows = rows.reshape(-1, rows.shape[-1])
    # a view shares memory with what it views, a copy does not
    copied = rows.numel() > 0 and (packing is not None or rows.data_ptr() != call.rows.data_ptr())
    if call.accumulate_into is not None and call.gradient_buffer is not None:
        buffer_dtype = call.gradient_buffer.buffer.dtype
    where: dict[str, Any] = {
        "again": again, "copied": copied, "plain_rows": rows.stride(1) == 1 or rows.shape[1] == 1,
        "buffer_dtype": buffer_dtype, "skips": packing is not None and packing.count is not None,
    }  # fmt: skip
    kind = count, wanted, tuple(where.values()), is_plain(call.weight), request

    def plan_of(by_segments: bool) -> Plan:
        def make() -> Plan:
            sizes = sizes_of(call, spec, count, wanted, by_segments=by_segments, teacher=tokens.teacher, **where)
            check_own_matmuls(tokens, sizes)
            # computed again in backward, a call recomputes whatever its request was made for
            plan = make_plan(sizes, Request(memory_budget=asked.memory_budget) if again else asked)
            if shard is not None and plan.vocab_block is not None and not again:
                shard.split.check_blocks()
            return plan

        if shard is not None or tokens.teacher is not None:
            return make()  # of calls among ranks, or with a teacher's tensors, plans are made anew
        plan = spec.plans.made((kind, by_segments), make)
        if plan.sizes.demand != spec.demand:  # but in numbers
            plan = replace(plan, sizes=replace(plan.sizes, demand=spec.demand))
        return plan

    if groups is None:
        return tokens, rows, plan_of(by_segments=False), None
    plan, spans = plan_of(by_segments=True), None
    if plan.schedule == "forward" and plan.chunks > 1:
        slack = LEAST_SLACK if asked.chunk_tokens is None else 1.0
        spans = spans_of([sum(map(len, group)) for group in groups], plan.chunk_tokens, slack)
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
    skips: bool = False,
    teacher: Teacher | None = None,
    **traits: Any,
) -> Sizes:
    """The sizes that a plan for so many tokens is made from. ``by_segments``: chunks end where segments do. ``again``:
    inside of a backward. ``copied``: hidden states that no view flattens, or in another order. ``plain_rows``: columns
    of hidden states are contiguous. ``skips``: matmuls stop at a number of rows that only the device knows.
    ``traits``: of the device and of ranks, other than the call's."""
    weight, backend, bias, deterministic = call.weight, spec.backend, call.bias, call.deterministic
    assert weight is not None
    traits = backend.traits(call.device) | ({} if call.shard is None else call.shard.traits) | traits
    hidden, capped = weight.shape[1], call.softcap is not None
    layout = Layout(traits.get("gpu"), spec.dtype, hidden, is_plain(weight), plain_rows, capped, wanted[2], spec.demand)
    store = "kept" if spec.kept_everywhere else backend.store(layout)
    columns = traits.pop("columns", call.columns)
    return Sizes(
        tokens, hidden, columns, spec.dtype, call.rows.dtype, weight.dtype, weight.shape[0] - columns, *wanted,
        bias_dtype=None if bias is None else bias.dtype, buffer_dtype=buffer_dtype, late_upstream=spec.late or again,
        coupled=spec.coupled and not by_segments, by_segments=by_segments, demand=spec.demand,
        deterministic=deterministic, block=block_of(call.vocab) if deterministic else None,
        teacher_width=0 if teacher is None or teacher.hidden is None else teacher.hidden.shape[1],
        teacher_cast=teacher is not None and teacher.casts,
        teacher_store=None if teacher is None else backend.teacher_store(teacher, store),
        copied=copied, skips=skips, store=store, **traits,
    )  # fmt: skip


def check_own_matmuls(tokens: Tokens, sizes: Sizes) -> None:
    """Raises where an option needs our own matmuls and these operands run in others."""
    if not (sizes.skips or sizes.deterministic):
        return
    own, device = tokens.backend.bounds_rows(sizes.store), tokens.call.device
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
    summed += [metric.label for metric, _ in tokens.structure.segment_metrics]
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


@dataclass(frozen=True, eq=False)
class HeadCall(LocalCall):
    """A call on hidden states: everything of it that takes no gradient."""

    plan: Plan
    backend: Backend
    objective: Objective
    logit_scale: float
    softcap: float | None
    request: Request = DEFAULT_REQUEST
    gradient_buffer: GradientBuffer | None = None  # where the weight's gradient goes, instead of back
    packing: Packing | None = None  # the order in which rows run
    spans: Spans | None = None  # of rows whose gradients wait for each other only; None: as the plan says
    shard: Shard | None = None  # this rank's part of the vocabulary, where ranks share it
    padded: bool = False  # rows that do not count follow the call's: targets have them, hidden states have not
    inplace = False

    @property
    def counted(self) -> Tensor | None:
        """[] how many rows count, those first, where products stop at them."""
        return None if self.packing is None else self.packing.count

    def head(self, weight: Tensor, bias: Tensor | None) -> Head:
        """The head in the dtype of the matmuls: under autocast the weight is cast here, once."""
        sizes = self.plan.sizes
        bias = None if bias is None else bias[: sizes.vocab].to(sizes.dtype).contiguous()
        weight = weight.to(sizes.dtype)
        if sizes.padding:
            weight = weight[: sizes.vocab]
        if len(weight) == 1:
            weight = weight.view(-1).view(weight.shape)  # its stride is an argument of kernels, and may be any
        add_targets = None if self.shard is None else self.shard.add_targets
        return Head(weight, bias, self.class_weights, self.logit_scale, self.softcap, add_targets)

    @property
    def teacher_last(self) -> bool:  # type: ignore[override]
        return self.plan.teacher_last

    @property
    def closed_spans(self) -> bool:  # type: ignore[override]
        return self.spans is not None and self.multiplies

    def forward(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[RowStats, Gradients | None]:
        """Statistics of all tokens, and gradients where the forward pass makes them."""
        head, packing = self.head(weight, bias), self.packing
        if packing is None:
            return sweep(self, hidden, head)
        stats, grads = sweep(self, packing.pack(hidden), head)
        if grads is not None and grads.hidden is not None:
            grads.hidden = packing.unpack(grads.hidden)
        return stats, grads

    def recomputing(self) -> "HeadCall":
        """The call with a plan that makes gradients in backward: for the second one over a retained graph too."""
        if self.plan.schedule == "recompute":
            return self
        plan = find_plan(
            replace(self.plan.sizes, late_upstream=True), Request(memory_budget=self.request.memory_budget)
        )
        if isinstance(plan, NoPlan):
            raise ValueError(f"a second backward over a retained graph computes the logits again: {plan}")
        return replace(self, plan=plan)

    def late_gradients(
        self, operands: Sequence[Any], stats: RowStats, upstream: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias once the upstream gradients are known."""
        if self.padded:
            more = self.plan.sizes.tokens - len(operands[0])
            upstream = tuple([each if each is None or not each.dim() else F.pad(each, (0, more)) for each in upstream])
        if self.shard is not None and not isinstance(self.objective, ScalarObjective):
            upstream = self.shard.whole_upstream(upstream)
        coefficients = self.objective.coefficients_for(stats, upstream)
        return self.recomputing().recompute(operands, stats, coefficients)

    def recompute(
        self, operands: Sequence[Any], stats: RowStats, coefficients: Coefficients
    ) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias from coefficients of all tokens; logits are computed again."""
        hidden, weight, bias = operands[:3]
        head, packing, one_or_nan = self.head(weight, bias), self.packing, self.objective.one_or_nan
        rows = hidden if packing is None else packing.pack(hidden)
        _, grads = sweep(self, rows, head, (stats, coefficients))
        assert grads is not None
        of_hidden, *others = grads.finish(self.backend, [one_or_nan], one_or_nan, self.plan)
        return of_hidden if packing is None or of_hidden is None else packing.unpack(of_hidden), *others

    def new_gradients(self, given: Tensor, known: bool) -> Gradients | None:
        plan = self.plan
        if not known and plan.schedule != "forward":
            return None
        of_hidden = plan.sizes.hidden_dtype if known else plan.hidden_accumulate
        grads = Gradients.empty(plan, of_hidden, given.device, self.gradient_buffer)
        grads.over_ranks = None if self.shard is None else self.shard.hidden_gradient()
        if self.counted is not None and grads.hidden is not None:
            grads.hidden.zero_()  # where a token does not count nothing is computed
        return grads

    def begin(self, given: Tensor, head: Head, stats: RowStats, grads: Gradients | None, known: bool) -> Work:
        plan, backend, scale, sets = self.plan, self.backend, self.objective.scale, None
        if self.kept is not None:
            every = Rows(given, self.every_target, self.columns, scale)
            sets = backend.sets_store(head, self.kept, every, self.objective.demand)
            if not self.multiplies:
                return sets, lambda at: every, [(every.tokens,)]
        teacher = self.objective.teacher
        teacher = None if teacher is None else teacher.cast()  # once, as the weight
        every = Rows(given, self.target, self.columns, scale, teacher, self.counted)
        most = plan.block_tokens if known else plan.chunk_tokens
        gathered = None if self.shard is None else self.shard.gathered(given, most)
        buffer = torch.empty(most, given.shape[1], dtype=plan.sizes.dtype, device=given.device)
        if teacher is not None and teacher.hidden is not None and teacher.weight is not None:
            teacher_buffer = teacher.weight.new_empty(most, teacher.hidden.shape[1])

        def rows_of(at: slice) -> Rows:
            """Tokens ``at`` of the call, for a store to clean; a teacher's are clean."""
            rows, count = every.at(at), at.stop - at.start
            source, order, of_rows = rows.hidden, None, rows.teacher
            if gathered is not None:
                source, order = gathered.chunk(at)  # by rank; clean rows stand in the call's order
            elif at.start >= len(given):  # where another call's tokens of this chunk lie, this one cannot say
                refuse("a chunk without a token")
                source = given[-1:]
            if of_rows is not None and of_rows.hidden is not None:
                clean = teacher_buffer[:count]
                backend.clean_rows(clean, of_rows.hidden, rows.target, None)
                of_rows = replace(of_rows, hidden=clean)
            out = buffer if count == most else buffer[:count]
            return rows._replace(hidden=out, source=source, order=order, teacher=of_rows)

        store = backend.store_of(head, plan, every, None if known else stats)
        chunks = plan.token_blocks() if known else plan.token_chunks()
        spans = [(at,) for at in chunks] if known or self.spans is None else self.spans
        return store if sets is None else WithSets(store, sets), rows_of, spans


def head_call(
    tokens: Tokens,
    rows: Tensor,
    plan: Plan,
    spans: Spans | None,
    objective: Objective,
    request: Request | None = None,
    padded: bool = False,
) -> HeadCall:
    """The call that ``planned`` has planned, with its objective and all that its ranks have agreed on."""
    call, temperature, shard = tokens.call, tokens.structure.temperature, tokens.call.shard
    if shard is not None:
        fields = call_fields(tokens) | {"tokens": str(call.leading), "segment_lengths": str(spans)}
        shard = shard.agreed_on(fields | described(plan.in_common), rows.device)
    return HeadCall(
        plan, tokens.spec.backend, objective, float(call.logit_scale) / temperature,
        None if call.softcap is None else call.softcap / temperature, request or tokens.spec.request,
        None if call.accumulate_into is None else call.gradient_buffer, tokens.packing, spans, shard, padded,
    )  # fmt: skip
