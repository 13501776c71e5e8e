"""The autograd.Function of the head: gradients computed in forward and handed over in backward, or computed there."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arithmetic.objective import Expected, ScalarObjective
from ..core.stats import RowStats
from ..plan.planner import Request
from ..plan.plans import Plan
from ..stores.gradient_buffer import GradientBuffer
from ..stores.gradients import Gradients, Scaling
from .sweep import Call, recompute, sweep


class Forward(NamedTuple):
    """What a forward pass has made, and what its backward needs."""

    outputs: tuple[Tensor, ...]
    differentiable: int  # how many of them, the first ones
    stats: RowStats | None
    grads: Gradients | None  # None where backward makes them
    expected: Expected | None  # the upstream gradient that ``grads`` were made for
    exchanges: bool  # with ranks that hold other tokens
    backend: Scaling
    plan: Plan
    gradient_buffer: GradientBuffer | None
    padded: bool  # as the call
    saved: Sequence[Tensor]  # for a backward that makes gradients, beside the operands
    later: Callable[[Sequence[Tensor]], tuple[Call, RowStats]]  # the call and its statistics, of operands and saved

    def outputs_of(self, rows: int) -> tuple[Tensor, ...]:
        """The outputs of a call of so many rows: of each, or numbers."""
        if not self.padded:
            return self.outputs
        # as no view that autograd knows of: these may not be changed in place, which an output of ours may
        return tuple([output[:rows].detach() if output.dim() else output for output in self.outputs])

    def bare(self) -> "Forward":
        """Without what has been handed over."""
        return self._replace(outputs=(), stats=None, grads=None, saved=())


def flat(hidden: Tensor) -> Tensor:
    """Hidden states [..., hidden] as rows."""
    return hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])


def forward_of(call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Forward:
    stats, grads = sweep(call, hidden, call.head(weight, bias))
    objective, named = call.objective, stats.named()
    outputs = objective.outputs(stats)
    lasting = call.without_teacher()
    # attributes, but for statistics that are outputs: these would hold the graph that holds them
    held, late = (named, {}) if isinstance(objective, ScalarObjective) else ({}, named)
    names = tuple(late)

    def later(saved: Sequence[Tensor]) -> tuple[Call, RowStats]:
        vectors = saved[3:]
        found = RowStats(**held, **dict(zip(names, vectors, strict=False)))
        return lasting.with_teacher(vectors[len(names) :]), found

    return Forward(
        outputs, objective.differentiable, stats, grads, objective.expected, objective.exchanges, call.backend,
        call.plan, call.gradient_buffer, call.padded, (*late.values(), *objective.teacher_tensors), later,
    )  # fmt: skip


class HeadLoss(torch.autograd.Function):
    """Of hidden [tokens, hidden], weight [vocab, hidden], bias [vocab] or None: the outputs of ``forward``, which makes
    them of the three, and which ``found`` receives with all that goes with them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        forward: Callable[[Tensor, Tensor, Tensor | None], Forward],
        found: list[Forward],
    ) -> tuple[Tensor, ...]:
        with as_called(hidden.device):
            made = forward(hidden, weight, bias)
        found.append(made)
        if made.plan.sizes.any_grad:
            # inputs are saved for a recomputing or a repeated backward: autograd checks that nobody changed them
            ctx.save_for_backward(hidden, weight, bias, *made.saved)
            # gradients are attributes: saved tensors would be cloned on their way out
            ctx.made, ctx.grads = made.bare(), made.grads
            ctx.rows = len(hidden)
        outputs = made.outputs_of(len(hidden))
        ctx.mark_non_differentiable(*outputs[made.differentiable :])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        made, grads = ctx.made, ctx.grads
        upstream = tuple([given if given is None else given.resolve_neg() for given in upstream])
        first = next((given for given in upstream if given is not None), None)
        if first is None:
            return None, None, None, None, None
        ctx.grads = None
        if made.gradient_buffer is not None:
            made.gradient_buffer.check_there()
        with torch.no_grad(), as_called(first.device):
            if grads is not None:
                if made.exchanges:
                    # for these an activation checkpoint computes the forward pass again, messages and all: on every
                    # rank or on none, whichever of them find their gradients waiting
                    ctx.saved_tensors  # noqa: B018
                finished = handed_over(made, grads, upstream[0])
            else:
                finished = made_late(made, ctx.saved_tensors, upstream)
            if made.padded and finished[0] is not None:
                finished = finished[0][: ctx.rows], *finished[1:]
        return *only_once(ctx, finished), None, None


def only_once(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gradients that nobody can differentiate, where a graph of them is made (create_graph): constants there would
    silently drop a gradient penalty."""
    if not torch.is_grad_enabled():
        return grads
    inputs = [tensor for tensor in ctx.saved_tensors if tensor is not None and tensor.requires_grad]
    return tuple(None if grad is None else OnlyOnce.apply(grad, *inputs) for grad in grads)


def handed_over(made: Forward, grads: Gradients, given: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of a forward pass, times what is left of the upstream gradient."""
    assert made.expected is not None and given is not None
    factors, one_or_nan = made.expected.factors(given), made.expected.one_or_nan
    if made.gradient_buffer is not None and grads.weight is not None:
        # it was promised, and only as promised can what has been added stay
        one_or_nan = made.expected.one_or_nan_for(given)
        factors = *factors[:1], one_or_nan
    return grads.finish(made.backend, factors, one_or_nan, made.plan)


def made_late(made: Forward, saved: Sequence[Tensor], upstream: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gradients that are made once the upstream gradient is known."""
    hidden, weight, bias = saved[:3]
    call, stats = made.later(saved)
    if call.padded:
        more = call.plan.sizes.tokens - len(hidden)
        upstream = tuple([each if each is None or not each.dim() else F.pad(each, (0, more)) for each in upstream])
    if call.shard is not None and not isinstance(call.objective, ScalarObjective):
        upstream = call.shard.whole_upstream(upstream)
    coefficients = call.objective.late(stats, upstream)
    call = with_recompute_plan(call)
    return recompute(call, hidden, call.head(weight, bias), stats, coefficients)


NOTHING = contextlib.nullcontext()


def as_called(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """On the tensors' own GPU (kernels go to the current one), and with no cast but those that the plan knows of."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    cast = torch.is_autocast_enabled(device.type)
    if not elsewhere and not cast:
        return NOTHING
    stack = contextlib.ExitStack()
    if elsewhere:
        stack.enter_context(torch.cuda.device(device))
    if cast:
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


class OnlyOnce(torch.autograd.Function):
    """A gradient that depends on the call's inputs in a way nobody differentiates: to try raises."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *inputs: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError("chunked_head computes no second derivatives; use the full logits for a gradient penalty")


def with_recompute_plan(call: Call) -> Call:
    """The call as a backward runs it that finds no gradients waiting: the second over a retained graph."""
    if call.plan.schedule == "recompute":
        return call
    return call.replanned(Request(memory_budget=call.request.memory_budget))
