"""The autograd.Function of the head: gradients computed in forward and handed over in backward, or computed there."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from ..core.stats import RowStats
from ..program.planner import DEFAULT_REQUEST, Request
from .arithmetic.objective import ScalarObjective
from .loop import Call, recompute, sweep


class HeadLoss(torch.autograd.Function):
    """Of hidden [tokens, hidden], weight [vocab, hidden], bias [vocab] or None, and a call: what its objective returns.

    ``found`` receives the statistics, for what is made of them without a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, found: list[RowStats]
    ) -> tuple[Tensor, ...]:
        with as_called(hidden.device):
            stats, grads = sweep(call, hidden, call.head(weight, bias))
            outputs = call.objective.outputs(stats)
            ctx.canary = None if call.into is None or grads is None else call.into.canary(call.own_target)
        found.append(stats)
        if call.plan.sizes.any_grad:
            # inputs are saved for a recomputing or a repeated backward: autograd checks that nobody changed them
            named = stats.named()
            ctx.save_for_backward(hidden, weight, bias, *named.values(), *call.objective.teacher_tensors)
            ctx.call, ctx.names = call.without_teacher(), tuple(named)
            # gradients are attributes: saved tensors would be cloned on their way out
            ctx.grads = grads
        ctx.mark_non_differentiable(*outputs[call.objective.differentiable :])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        call, grads = ctx.call, ctx.grads
        if all(given is None for given in upstream):
            return None, None, None, None, None
        ctx.grads = None
        device = next(given.device for given in upstream if given is not None)
        if call.into is not None:
            call.into.check_there()
        with torch.no_grad(), as_called(device):
            if grads is not None:
                if call.objective.exchanges:
                    # for these an activation checkpoint computes the forward pass again, messages and all: on every
                    # rank or on none, whichever of them find their gradients waiting
                    ctx.saved_tensors  # noqa: B018
                factor, one_or_nan = call.objective.rest(upstream), call.objective.one_or_nan
                if call.into is not None:
                    # it was promised, and only as promised can what has been added stay
                    one_or_nan = one_or_nan * call.objective.kept(upstream)
                    if ctx.canary is not None:
                        one_or_nan, ctx.canary = one_or_nan * ctx.canary.one_or_nan(), None
                    factor = factor * one_or_nan
                finished = grads.finish(call.backend.scale, factor, one_or_nan, call.plan)
            else:
                hidden, weight, bias, *vectors = ctx.saved_tensors
                stats = RowStats(**dict(zip(ctx.names, vectors, strict=False)))
                call = call.with_teacher(vectors[len(ctx.names) :])
                if call.shard is not None and not isinstance(call.objective, ScalarObjective):
                    upstream = call.shard.whole_upstream(upstream)
                coefficients, gain = call.objective.late(stats, upstream)
                call = with_recompute_plan(call)
                finished = recompute(call, hidden, call.head(weight, bias), stats, coefficients, gain)
        if torch.is_grad_enabled():  # create_graph: constants here would silently drop a gradient penalty
            inputs = [t for t in ctx.saved_tensors[:3] if t is not None]
            finished = tuple(None if grad is None else OnlyOnce.apply(grad, *inputs) for grad in finished)
        return *finished, None, None


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
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("chunked_head computes no second derivatives; use the full logits for a gradient penalty")


def with_recompute_plan(call: Call) -> Call:
    """The call as a backward runs it that finds no gradients waiting: the second over a retained graph."""
    if call.plan.schedule == "recompute":
        return call
    try:
        return call.replanned(Request(memory_budget=call.request.memory_budget))
    except ValueError:  # a budget that gradients in the forward pass fitted, and none made now would
        return call.replanned(DEFAULT_REQUEST)
