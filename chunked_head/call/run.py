"""The run of a call: makes its tokens, plan, objective and work, in this order, and runs its autograd Function."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.evaluate import under_hooks
from ..arithmetic.objective import ScalarObjective
from ..core.private import private
from ..core.stats import RowStats, all_at_targets, layout_of
from ..stores.gradients import Gradients
from .logits_work import LogitsWork, logits_work
from .objectives import objective_of, request_fields
from .options import Call
from .planning import GradFlags, grads_asked_for, planned
from .recording import is_recordable
from .spec import Spec
from .sweep import HeadWork, LocalWork
from .tokens import Tokens, tokens_of

BATCHED_ERROR = (
    "several upstream gradients at once (is_grads_batched=True, vectorize=True, torch.vmap over a backward) do not go "
    "with chunked_head, whose kernels torch.vmap cannot see through; ask for one after the other "
    "(vectorize=False), or use full logits"
)
FORWARD_MODE_ERROR = (
    "forward-mode derivatives (torch.autograd.forward_ad, strategy='forward-mode') do not go with chunked_head, which "
    "has gradients in backward only; use loss.backward() or torch.autograd.grad, or full logits"
)


Grads = tuple[Tensor | None, ...]  # gradients of the operands, or upstream gradients of the outputs


def run(call: Call[Any], spec: Spec) -> tuple[tuple[Tensor, ...], HeadWork | LogitsWork]:
    """Runs the call eagerly. Returns the outputs, which are differentiable, and the work, whose plan and objective
    ``Call.result`` reads."""
    with on_device(call.device):
        tokens, work, operands = prepared(tokens_of(call, spec))
        outputs = CallFunction.apply([work], None, *operands)
    if call.outputs:
        if tokens.packing is not None:
            outputs = tuple(map(tokens.packing.unpack, outputs))
        if call.shard is not None and call.weight is not None:
            outputs = tuple(map(call.shard.own_tokens, outputs))
        outputs = all_at_targets(outputs, call.token_shape, call.shift)
    return outputs, work


def prepared(
    tokens: Tokens, makes_grads: GradFlags | None = None
) -> tuple[Tokens, HeadWork | LogitsWork, tuple[Any, ...]]:
    """Returns the tokens in the order in which they run, the work of the sweep, and the operands: hidden states
    [tokens, hidden], weight and bias; or logits. ``makes_grads``: whether gradients of hidden states, weight and bias
    are made; None: autograd decides."""
    call, spec = tokens.call, tokens.spec
    if call.weight is None:
        logits, work_on_logits = logits_work(tokens, objective_of(tokens, None))
        return tokens, work_on_logits, (logits,)
    hidden = call.rows if call.rows.dim() == 2 else call.rows.reshape(-1, call.rows.shape[-1])
    is_in_backward = makes_grads is None and in_backward()
    tokens, plan, spans = planned(tokens, hidden, makes_grads or grads_asked_for(call), is_in_backward)
    # sends the first messages between ranks; it comes after all checks that can raise on this rank alone
    objective = objective_of(tokens, plan)
    temperature, shard = tokens.structure.temperature, call.shard
    if shard is not None:
        fields = request_fields(tokens) | {"tokens": str(call.token_shape), "segment_lengths": str(spans)}
        shard = shard.agreed_on(fields | plan.in_common, hidden.device)
    can_record = shard is None and tokens.packing is None and spec.backend.recording
    work_on_hidden = HeadWork(
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
        recordings=spec.recordings if can_record and is_recordable(plan, objective) else None,
        fp8_weight=None if call.fp8_weight is None else call.fp8_weight.checked(call.weight, call.local_width),
    )
    return tokens, work_on_hidden, (hidden, call.weight, call.bias)


def in_backward() -> bool:
    """True while autograd runs a backward. A call that begins then is in the second run of an activation checkpoint.

    Such a call makes no gradients in its forward pass, since a non-reentrant checkpoint discards the new graph. If this
    torch cannot tell, True for every call under hooks on saved tensors, which costs these calls one more matmul.
    """
    id_getters = private("_C._current_graph_task_id")
    return under_hooks() if id_getters is None else id_getters[0]() != -1


class CallFunction(torch.autograd.Function):
    """The autograd Function of a call, or of several calls, one for each stream of hidden states. It returns the
    outputs of the one call, or the sum of the losses of all streams.

    ``buffer``: a ``StreamsBuffer`` in which the streams' gradients of the weight add up, else None. Operands: the
    hidden states of each call, weight, and bias or None; or logits.

    Backward reads the works. Autograd saves the operands and a teacher's tensors, so that they are freed after
    backward: the works have empty tensors in place of a teacher's. If the call returns statistics, autograd saves these
    too, since an attribute would keep their graph alive.
    """

    @staticmethod
    def forward(ctx: Any, works: Sequence[LocalWork], buffer: Any, *operands: Tensor | None) -> tuple[Tensor, ...]:
        first_operand, stream_count = operands[0], len(works)
        assert first_operand is not None
        has_late_gradients = bool([work for work in works if work.plan is None or work.plan.schedule == "recompute"])
        outputs_by_call, grads_by_call = list[tuple[Tensor, ...]](), list[Gradients | None]()
        backward_works, saved, saved_ends = list[LocalWork](), [*operands], [len(operands)]
        with without_autocast(first_operand.device):  # ``run`` has made the tensors' GPU the current one
            if buffer is not None and not has_late_gradients:
                buffer.begin(works[0])
            for work, hidden_or_logits in zip(works, operands, strict=False):
                stats, grads = work.forward((hidden_or_logits, *operands[stream_count:]))
                outputs = work.objective.results(stats)
                if buffer is not None and grads is not None:
                    buffer.added(work, grads)
                outputs_by_call.append(outputs)
                grads_by_call.append(grads)
                if not isinstance(work.objective, ScalarObjective):
                    saved += stats.by_name.values()
                if (teacher := work.objective.teacher) is not None:
                    saved += teacher.tensors
                    work = work.with_teacher([tensor.new_empty(0) for tensor in teacher.tensors])
                backward_works.append(work)
                saved_ends.append(len(saved))
            if stream_count > 1:
                first_loss, *other_losses = [outputs[0] for outputs in outputs_by_call]
                outputs = (sum(other_losses, first_loss),)
        ctx.operands, ctx.buffer, ctx.works = len(operands), buffer, backward_works
        if [work for work in works if work.plan is None or work.plan.sizes.any_grad]:
            # saved for recomputing and for a second backward: autograd checks that inputs have not changed
            ctx.save_for_backward(*saved)
            ctx.saved_ends = saved_ends
            # gradients are attributes: saved tensors would be cloned on their way out
            ctx.grads = None if has_late_gradients else grads_by_call
            # Under an activation checkpoint, reading saved tensors runs the forward pass again, with its messages, so
            # all ranks that exchange them must read or none. ``reads_saved``: backward reads even if it has gradients.
            # Nor does a change of an operand pass unseen where gradients wait for each token's own.
            ctx.reads_saved = any(w.objective.exchanges or (w.plan is not None and w.plan.has_unit_rows) for w in works)
            ctx.is_overwritten = False
        ctx.mark_non_differentiable(*outputs[works[0].objective.differentiable :])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Grads:
        upstream = tuple([x if x is None else x.resolve_neg() for x in upstream])
        upstream_tensors = [x for x in upstream if x is not None]
        if not upstream_tensors:
            return (None,) * (2 + ctx.operands)
        refuse_batched(upstream_tensors[0])
        if ctx.is_overwritten:
            raise RuntimeError(
                "a second backward through a loss with inplace=True, whose logits are gone; use inplace=False"
            )
        works, buffer, has_graph = ctx.works, ctx.buffer, torch.is_grad_enabled()
        grads, ctx.grads = ctx.grads, None
        # read in one place: an activation checkpoint raises at a second read of saved tensors
        saved: Sequence[Tensor] = ctx.saved_tensors if grads is None or ctx.reads_saved or has_graph else ()
        operands, stream_count, gradients_by_stream = saved[: ctx.operands], len(works), list[Grads]()
        with torch.no_grad(), kernel_context(upstream_tensors[0].device):
            ctx.is_overwritten = works[0].inplace
            if ctx.is_overwritten:
                # autograd does not see what kernels write; with a new version, other nodes that saved the logits raise
                torch.autograd.graph.increment_version(saved[0])
            if buffer is not None and grads is None:
                buffer.begin(works[0])
            for i, work in enumerate(works):
                if work.plan is not None and not work.plan.sizes.any_grad:
                    gradients_by_stream.append((None, None, None))
                    continue
                stream_operands, stream_grads = (*operands[i : i + 1], *operands[stream_count:]), grads and grads[i]
                stream_saved = saved[slice(*ctx.saved_ends[i : i + 2])]
                gradients_by_stream.append(gradients_of(work, stream_grads, stream_operands, stream_saved, upstream))
                if buffer is not None and grads is None:
                    buffer.added(work, None)
            gradients = [*gradients_by_stream[0]]
            if stream_count > 1 or buffer is not None:
                hidden_grads, weight_grads, bias_grads = zip(*gradients_by_stream, strict=True)
                weight_grad = next((x for x in weight_grads if x is not None), None)
                weight_grad = weight_grad if buffer is None else buffer.finished(works, upstream, grads is None)
                gradients = [*hidden_grads, weight_grad, summed(bias_grads)]
        if has_graph:
            # with create_graph: constant gradients would silently drop the derivative of a gradient penalty
            graph_inputs = [x for x in (*operands, *upstream_tensors) if x is not None and x.requires_grad]
            gradients = [None if grad is None else OnlyOnce.apply(grad, *graph_inputs) for grad in gradients]
        return None, None, *gradients

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(FORWARD_MODE_ERROR)


def refuse_batched(upstream: Tensor) -> None:
    """Raises RuntimeError for a batch of upstream gradients (``is_grads_batched``). If this torch cannot tell, an
    operation without a batching rule raises."""
    key_getters = private("_C._dispatch_keys")
    if key_getters is not None and "Batched" in str(key_getters[0](upstream)):  # the key has no name in Python
        raise RuntimeError(BATCHED_ERROR)


def gradients_of(
    work: LocalWork, grads: Gradients | None, operands: Sequence[Tensor], saved: Sequence[Tensor], upstream: Grads
) -> Grads:
    """Returns the gradients of one call's operands: ``grads`` of the forward pass times ``upstream``; new gradients if
    ``grads`` is None. ``saved``: the statistics and a teacher's tensors that autograd has saved. After an error, the
    caller's buffer notes that it may hold a part of a gradient."""
    objective, buffer, loss_upstream = work.objective, work.gradient_buffer, upstream[0]
    try:
        if buffer is not None:
            buffer.check_attribute()
        if isinstance(objective, ScalarObjective):
            stats, teacher_tensors = objective.stats, saved
        else:
            names = layout_of(objective.demand).forms
            stats = RowStats.from_dict(dict(zip(names, saved, strict=False)))
            teacher_tensors = saved[len(names) :]
        assert stats is not None
        if grads is not None and (plan := work.plan) is not None and plan.has_unit_rows:
            if all(gradient is None for gradient in upstream[1:]):
                return grads.finish_rows(work.backend, work.row_factors(stats, upstream), plan.sizes)
            grads.hidden = None  # of the first output alone: gone before the sum of all is made
            grads = None
        if grads is None:
            return work.with_teacher(teacher_tensors).late_gradients(operands, stats, upstream)
        assert isinstance(objective, ScalarObjective) and loss_upstream is not None and work.plan is not None
        ratio, one_or_nan = objective.upstream_ratio(loss_upstream), objective.one_or_nan
        if buffer is not None and grads.weight is not None:
            # the buffer holds the gradient for the expected upstream gradient; for any other it becomes nan
            one_or_nan = objective.one_or_nan_for(loss_upstream)
        return grads.finish(work.backend, work.plan.sizes, one_or_nan, ratio)
    except BaseException:
        if buffer is not None:
            buffer.note_failure()
        raise


def summed(grads: Grads) -> Tensor | None:
    """The sum of the gradients that are not None, added in fp32 at least and rounded once; None where all are None."""
    tensors = [grad for grad in grads if grad is not None]
    if len(tensors) < 2:
        return tensors[0] if tensors else None
    dtype = tensors[0].dtype
    return torch.stack(tensors).sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)


NOTHING = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context in which the tensors' GPU is the current one: Triton launches kernels there."""
    is_other_gpu = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if is_other_gpu else NOTHING


def kernel_context(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context of ``on_device`` and ``without_autocast`` together."""
    if not torch.is_autocast_enabled(device.type):
        return on_device(device)
    stack = contextlib.ExitStack()
    stack.enter_context(on_device(device))
    stack.enter_context(without_autocast(device))
    return stack


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context with autocast off: the plan has chosen the dtypes."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else NOTHING


class OnlyOnce(torch.autograd.Function):
    """Identity on a gradient. A derivative of this gradient raises RuntimeError."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *inputs: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError("chunked_head computes no second derivatives; use the full logits for a gradient penalty")
