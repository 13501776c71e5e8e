"""The run of a call of any function: its tokens, plan, objective (in this order) and autograd.Function."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic.objective import ScalarObjective
from ..core.checks import mismatch, refuse
from ..core.private import FORWARD_MODE, in_backward, refuse_batched
from ..core.stats import RowStats, all_at_targets
from ..plan.planner import find_late_plan, find_plan
from ..plan.plans import Plan
from ..plan.segments import Spans, spans_of
from ..plan.sizes import Sizes
from ..stores.gradients import Gradients
from ..stores.operands import TeacherHead
from ..stores.sets import SetStore
from .logits_call import LogitsCall, logits_call
from .objectives import call_fields, objective_of
from .options import Call
from .recording import is_recordable
from .spec import Spec
from .sweep import HeadCall, LocalCall
from .tokens import Tokens, in_order, tokens_of

Wanted = tuple[bool, bool, bool]  # whether gradients of hidden states, weight and bias are made
Grads = tuple[Tensor | None, ...]  # of the operands


class Outcome(NamedTuple):
    """A call that ran, and its results."""

    outputs: tuple[Tensor, ...]
    plan: Plan | None = None  # None also for logits that exist
    tokens: Any = None  # ``Tokens``
    objective: Any = None
    stats: Any = None  # ``RowStats``


def run(call: Call[Any], spec: Spec) -> Outcome:
    """Runs the call at once, differentiable."""
    found = list[RowStats]()
    tokens, made, operands = prepared(tokens_of(call, spec))
    outputs = Loss.apply([made], None, found, *operands)
    if call.outputs:
        if tokens.packing is not None:
            outputs = tuple(map(tokens.packing.unpack, outputs))
        if call.shard is not None and call.weight is not None:
            outputs = tuple(map(call.shard.own_tokens, outputs))
        outputs = all_at_targets(outputs, call.leading, call.shift)
    return Outcome(outputs, made.plan, tokens, made.objective, found[0])


def prepared(tokens: Tokens, wanted: Wanted | None = None) -> tuple[Tokens, HeadCall | LogitsCall, tuple[Any, ...]]:
    """The tokens in the order in which they run, the call, and its operands: hidden states [tokens, hidden], weight and
    bias, or logits. ``wanted``: gradients to make; None: those that autograd asks for."""
    call, spec = tokens.call, tokens.spec
    if call.weight is None:
        logits, on_logits = logits_call(tokens, objective_of(tokens))
        return tokens, on_logits, (logits,)
    tokens, rows, plan, spans = planned(tokens, wanted or wanted_of(call), wanted is None and in_backward())
    # the first messages between ranks with other tokens: what one of them refuses is known by now
    objective = objective_of(tokens)
    temperature, shard = tokens.structure.temperature, call.shard
    if shard is not None:
        fields = call_fields(tokens) | {"tokens": str(call.leading), "segment_lengths": str(spans)}
        shard = shard.agreed_on(fields | plan.in_common, rows.device)
    alone = shard is None and tokens.packing is None
    records = alone and spec.backend.recording and is_recordable(plan, objective)
    on_hidden = HeadCall(
        plan=plan,
        backend=spec.backend,
        objective=objective,
        logit_scale=float(call.logit_scale) / temperature,
        softcap=None if call.softcap is None else call.softcap / temperature,
        shard=shard,
        gradient_buffer=None if call.accumulate_into is None else call.gradient_buffer,
        spans=spans,
        request=spec.request,
        packing=tokens.packing,
        recordings=spec.recordings if records else None,
        fp8_weight=None if call.fp8_weight is None else call.fp8_weight.of(call.weight, call.columns),
    )
    return tokens, on_hidden, (rows, call.weight, call.bias)


def wanted_of(call: Call[Any]) -> Wanted:
    """The gradients that autograd asks for here and now."""
    assert call.weight is not None
    if not torch.is_grad_enabled():
        return False, False, False
    return call.rows.requires_grad, call.weight.requires_grad, call.bias is not None and call.bias.requires_grad


def planned(tokens: Tokens, wanted: Wanted, again: bool) -> tuple[Tokens, Tensor, Plan, Spans | None]:
    """The tokens in the order in which they run, hidden states [tokens, hidden] as given, the plan, and spans of rows
    that depend on each other only. ``again``: inside a backward."""
    call, spec, groups = tokens.call, tokens.spec, tokens.groups
    assert call.weight is not None
    asked, weight, buffer_dtype = spec.request, call.weight, None
    count, packing, rows = len(tokens.target), tokens.packing, call.rows
    if rows.dim() != 2:
        rows = rows.reshape(-1, rows.shape[-1])
    # a view shares memory with its source, a copy does not; sets of ids read rows in the order in which they run
    moved_sets = packing is not None and tokens.kept is not None
    copied = rows.numel() > 0 and (moved_sets or rows.data_ptr() != call.rows.data_ptr())
    if call.accumulate_into is not None and call.gradient_buffer is not None:
        buffer_dtype = call.gradient_buffer.buffer.dtype
    skips, plain = packing is not None and packing.count is not None, rows.stride(1) == 1 or rows.shape[1] == 1
    kind = count, wanted, again, copied, buffer_dtype, skips, plain, weight.is_contiguous(), weight.data_ptr() & 15
    lasts = tokens.teacher is None  # else its tensors decide too

    def plan_of(by_segments: bool) -> Plan | str:
        plan = spec.plans.get((kind, by_segments)) if lasts else None
        if plan is None:
            sizes = sizes_of(
                call,
                spec,
                count,
                wanted,
                tokens.teacher,
                plain,
                late_upstream=again or bool(call.outputs),
                by_segments=by_segments,
                copied=copied,
                moved=packing is not None or by_segments,
                buffer_dtype=buffer_dtype,
                skips=skips,
            )
            check_own_matmuls(tokens, sizes)
            found = find_late_plan(sizes, asked) if again else find_plan(sizes, asked)
            if isinstance(found, str):
                return found
            plan = found
            if lasts:
                spec.plans[kind, by_segments] = plan
        else:
            sizes = plan.sizes
            made_for = sizes.tokens, sizes.hidden, sizes.vocab + sizes.padding, sizes.dtype
            if made_for != (used_for := (count, *weight.shape[::-1], spec.dtype)):
                raise mismatch("a plan", made_for, used_for)
            if sizes.demand != spec.demand:  # but in numbers
                plan = replace(plan, sizes=replace(sizes, demand=spec.demand))
        return plan

    plan, spans = plan_of(groups is not None), None
    if isinstance(plan, str) and groups is not None:
        # a budget without room for the gradient of hidden states in another order
        groups, plan = None, plan_of(by_segments=False)
    if isinstance(plan, str):
        raise ValueError(plan)
    if groups is not None and plan.schedule == "forward" and plan.chunks > 1:
        free = tokens.teacher is None or tokens.teacher.logits is None  # else another order would copy them
        spans, order = spans_of([sum(map(len, group)) for group in groups], plan.chunk_tokens, free)
        plan = replace(plan, ending=sum(map(len, spans)))
        if plan.too_many_chunks:
            # segments are too uneven for so few bits
            plan, spans = plan_of(by_segments=False), None
            if isinstance(plan, str):
                raise ValueError(plan)
        else:
            tokens = in_order(tokens, [groups[group] for group in order])
    return tokens, rows, plan, spans


def sizes_of(
    call: Call[Any],
    spec: Spec,
    tokens: int,
    wanted: Wanted,
    teacher: TeacherHead | None,
    plain_rows: bool = True,
    **traits: Any,
) -> Sizes:
    """The sizes of a plan. ``plain_rows``: columns of hidden states are contiguous. ``traits``: fields that differ."""
    weight, backend, bias = call.weight, spec.backend, call.bias
    assert weight is not None
    traits = backend.traits(call.device) | ({} if call.shard is None else call.shard.traits) | traits
    plain, columns = plain_rows and call.softcap is None and not wanted[2], traits.pop("columns", call.columns)
    store: Any = SetStore
    if not (call.kept_everywhere or spec.demand.columns_only):  # else no softmax is over the vocabulary
        store = backend.store(spec.dtype, weight, spec.demand, traits.get("gpu"), plain, teacher)
    fp8 = None if call.precision is None or not store.multiplies else "made" if call.fp8_weight is None else "given"
    known: dict[str, Any] = {
        "late_upstream": bool(call.outputs),
        "coupled": spec.coupled and not traits.get("by_segments"),
        "fp8": fp8,
        "teacher_width": 0 if teacher is None or teacher.hidden is None else teacher.hidden.shape[1],
        "teacher_cast": teacher is not None and teacher.casts,
    }
    return Sizes(
        tokens,
        weight.shape[1],
        columns,
        spec.dtype,
        call.rows.dtype,
        weight.dtype,
        store,
        weight.shape[0] - columns,
        *wanted,
        bias_dtype=None if bias is None else bias.dtype,
        demand=spec.demand,
        deterministic=call.deterministic,
        **(known | traits),
    )


def check_own_matmuls(tokens: Tokens, sizes: Sizes) -> None:
    """Raises where an option needs our own matmuls and these operands run in others."""
    own_fp8 = sizes.fp8 is not None and tokens.spec.backend.bounds_rows
    if not (sizes.skips or sizes.deterministic or own_fp8):
        return
    bounded = sizes.store.bounds_rows and tokens.spec.backend.bounds_rows
    fixed, device = sizes.deterministic, tokens.call.device
    what = f"{sizes.dtype} on {device}; theirs are 16-bit, rows on 16 bytes, a GPU of docs/gpus.md, no top_k"
    summed = [summand.label for _, summand in tokens.call.losses.terms if summand.scope == "segment"]
    summed += [metric.label for metric, _ in tokens.structure.segment_metrics]
    refuse({
        f"skip_ignored=True needs our own matmuls, which do not run these operands ({what}); use 'wait' or False":
            sizes.skips and not bounded,
        f"deterministic=True runs on GPUs of docs/gpus.md alone, and these operands are on {device}; leave it False":
            fixed and device.type == "cpu" and not tokens.spec.backend.bounds_rows,
        "deterministic=True goes with bfloat16: gradients of float16 logits are scaled by the largest of a chunk; "
        "cast to bfloat16, or leave it False":
            fixed and sizes.dtype == torch.float16,
        f"deterministic=True does not go with {', '.join(summed[:1])} on a GPU, which adds up tokens in any order; "
        "leave it False":
            fixed and summed and device.type == "cuda",
        "deterministic=True does not go with top_k, whose logits BLAS makes; take argmax=True":
            fixed and sizes.demand.top_k,
        f"deterministic=True needs our own matmuls, which do not run these operands ({what}); leave it False":
            fixed and not bounded,
        'precision="fp8" needs our own matmuls, which read a weight that is contiguous and begins on 16 bytes':
            own_fp8 and not bounded,
    })  # fmt: skip


class Pass:
    """The forward pass of a call on operands from ``prepared``: its results, and what its backward needs."""

    def __init__(self, call: LocalCall, *operands: Any):
        self.stats, self.grads = call.forward(*operands)  # gradients: None where backward makes them
        self.call, objective = call, call.objective
        self.outputs = objective.outputs(self.stats)
        # autograd saves statistics that are outputs: as attributes they would keep their graph alive
        self.known = self.stats if isinstance(objective, ScalarObjective) else None
        saved = self.stats.named() if self.known is None else {}
        self.names, self.saved = tuple(saved), [*saved.values()]
        if objective.teacher is not None:
            # autograd saves a teacher's tensors too, and frees them after backward
            self.saved += objective.teacher.tensors
            self.call = call.with_teacher([tensor.new_empty(0) for tensor in objective.teacher.tensors])
        sizes = None if call.plan is None else call.plan.sizes
        self.any_grad = sizes is None or sizes.hidden_grad or sizes.weight_grad or sizes.bias_grad

    def gradients(
        self, grads: Gradients | None, operands: Sequence[Tensor], saved: Sequence[Tensor], upstream: Grads
    ) -> Grads:
        """Gradients of the operands: ``grads`` times the rest of the upstream gradient, or made from ``saved``."""
        try:
            return self.made_or_scaled(grads, operands, saved, upstream)
        except BaseException:
            if self.call.gradient_buffer is not None:
                self.call.gradient_buffer.note_failure()
            raise

    def made_or_scaled(
        self, grads: Gradients | None, operands: Sequence[Tensor], saved: Sequence[Tensor], upstream: Grads
    ) -> Grads:
        """``gradients``, which notes what this has left in the caller's buffer if it raises."""
        buffer, expected, given = self.call.gradient_buffer, self.call.objective.expected, upstream[0]
        if buffer is not None:
            buffer.check_there()
        if grads is None:
            stats = self.known or RowStats.of(dict(zip(self.names, saved, strict=False)))
            return self.call.with_teacher(saved[len(self.names) :]).late_gradients(operands, stats, upstream)
        assert expected is not None and given is not None and self.call.plan is not None
        factors, one_or_nan = expected.factors(given), expected.one_or_nan
        if buffer is not None and grads.weight is not None:
            # with another one than promised the buffer holds a wrong gradient already
            one_or_nan = expected.one_or_nan_for(given)
            factors = *factors[:1], one_or_nan
        return grads.finish(self.call.backend, factors, one_or_nan, self.call.plan.sizes)


class Loss(torch.autograd.Function):
    """Outputs of a call; of several, on streams of hidden states, the sum of their losses.

    ``sums``: where the streams' gradients of the weight add up, a ``StreamsBuffer``. ``found`` receives the statistics
    of each call. Operands: hidden states of each, weight and bias or None; or logits.
    """

    @staticmethod
    def forward(
        ctx: Any, calls: Sequence[LocalCall], sums: Any, found: list[RowStats], *operands: Tensor | None
    ) -> tuple[Tensor, ...]:
        first, count, made = operands[0], len(calls), list[Pass]()
        assert first is not None
        late = bool([call for call in calls if call.plan is None or call.plan.schedule == "recompute"])
        with kernel_context(first.device):
            if sums is not None and not late:
                sums.begin(calls[0])
            for call, rows in zip(calls, operands, strict=False):
                made.append(Pass(call, rows, *operands[count:]))
                if sums is not None and made[-1].grads is not None:
                    sums.added(call, made[-1].grads)
            outputs = made[0].outputs
            if count > 1:
                total, *others = [one.outputs[0] for one in made]
                outputs = (sum(others, total),)
        found += [one.stats for one in made]
        ctx.operands = len(operands)
        if [one for one in made if one.any_grad]:
            # saved for recomputing and for a second backward: autograd checks that inputs have not changed
            ctx.save_for_backward(*operands, *[tensor for one in made for tensor in one.saved])
            # gradients are attributes: saved tensors would be cloned on their way out
            ctx.made, ctx.sums, ctx.grads = made, sums, None if late else [one.grads for one in made]
            ctx.ends = [*itertools.accumulate([len(one.saved) for one in made], initial=len(operands))]
            for one in made:
                del one.outputs, one.stats, one.grads, one.saved
            # Under an activation checkpoint reading saved tensors runs the forward pass again, with its messages: all
            # ranks with other tokens must read, or none. True: backward reads even if it has its gradients already.
            ctx.reads_saved, ctx.overwritten = bool([1 for one in made if one.call.objective.exchanges]), False
        ctx.mark_non_differentiable(*outputs[calls[0].objective.differentiable :])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Grads:
        upstream = tuple([given if given is None else given.resolve_neg() for given in upstream])
        there = [given for given in upstream if given is not None]
        if not there:
            return (None,) * (3 + ctx.operands)
        refuse_batched(there[0])
        if ctx.overwritten:
            raise RuntimeError(
                "a second backward through a loss with inplace=True, whose logits are gone; use inplace=False"
            )
        made, sums, grads, ctx.grads, graph = ctx.made, ctx.sums, ctx.grads, None, torch.is_grad_enabled()
        # once: an activation checkpoint gives them no second time
        saved: Sequence[Tensor] = ctx.saved_tensors if grads is None or ctx.reads_saved or graph else ()
        operands, count, each = saved[: ctx.operands], len(made), list[Grads]()
        with torch.no_grad(), kernel_context(there[0].device):
            ctx.overwritten = made[0].call.inplace
            if ctx.overwritten:
                # kernels write unseen: a node that saved the logits must not take these for them, should this raise too
                torch.autograd.graph.increment_version(saved[0])
            if sums is not None and grads is None:
                sums.begin(made[0].call)
            for i, one in enumerate(made):
                if not one.any_grad:
                    each.append((None, None, None))
                    continue
                own, vectors = (*operands[i : i + 1], *operands[count:]), saved[slice(*ctx.ends[i : i + 2])]
                each.append(one.gradients(None if grads is None else grads[i], own, vectors, upstream))
                if sums is not None and grads is None:
                    sums.added(one.call, None)
            found = [*each[0]]
            if count > 1 or sums is not None:
                rows, weights, biases = zip(*each, strict=True)
                weight = next((one for one in weights if one is not None), None)
                weight = weight if sums is None else sums.finished(made, upstream, grads is None)
                found = [*rows, weight, summed(biases)]
        if graph:
            # with create_graph gradients as constants would silently drop a gradient penalty, or a product with them
            inputs = [each for each in (*operands, *there) if each is not None and each.requires_grad]
            found = [None if grad is None else OnlyOnce.apply(grad, *inputs) for grad in found]
        return None, None, None, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(FORWARD_MODE)


def summed(grads: Grads) -> Tensor | None:
    """The sum of gradients, rounded once; None of none."""
    there = [one for one in grads if one is not None]
    if len(there) < 2:
        return there[0] if there else None
    dtype = there[0].dtype
    return torch.stack(there).sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)


NOTHING = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context in which the tensors' own GPU is the current one, where kernels are launched."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else NOTHING


def kernel_context(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """``on_device`` with autocast, which the plan has dealt with, off."""
    if not torch.is_autocast_enabled(device.type):
        return on_device(device)
    stack = contextlib.ExitStack()
    stack.enter_context(on_device(device))
    stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


class OnlyOnce(torch.autograd.Function):
    """A gradient without a second derivative: asking for that raises."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *inputs: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError("chunked_head computes no second derivatives; use the full logits for a gradient penalty")
