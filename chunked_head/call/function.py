"""The autograd.Function of every call: gradients made in forward and handed over in backward, or made in backward."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic.objective import ScalarObjective
from ..core.stats import RowStats
from ..stores.gradients import Gradients
from .sweep import LocalCall

Grads = tuple[Tensor | None, ...]  # of the operands


class Forward(NamedTuple):
    """Results of a forward pass, and what its backward needs."""

    outputs: tuple[Tensor, ...]
    differentiable: int  # how many of them, the first ones
    stats: RowStats | None
    grads: Gradients | None  # None where backward makes them
    # True where backward reads the tensors that autograd has saved even if it has its gradients already. Under an
    # activation checkpoint reading them runs the forward pass again, with its messages to ranks that hold other tokens:
    # so either all ranks read them or none does.
    reads_saved: bool
    call: LocalCall  # without the teacher's tensors
    saved: Sequence[Tensor]  # for a backward that makes gradients, in addition to the operands
    # the call and its statistics, from operands and ``saved``
    later: Callable[[Sequence[Tensor]], tuple[LocalCall, RowStats]]
    inplace: bool = False  # backward overwrites the first operand with its gradient

    @property
    def any_grad(self) -> bool:
        sizes = None if self.call.plan is None else self.call.plan.sizes
        return sizes is None or sizes.hidden_grad or sizes.weight_grad or sizes.bias_grad

    def gradients(self, grads: Gradients | None, saved: Sequence[Tensor], upstream: Grads) -> Grads:
        """Gradients of the operands: ``grads`` times what is left of the upstream gradient, or made from ``saved``."""
        buffer, expected, given = self.call.gradient_buffer, self.call.objective.expected, upstream[0]
        if buffer is not None:
            buffer.check_there()
        if grads is None:
            call, stats = self.later(saved)
            return call.late_gradients(saved, stats, upstream)
        assert expected is not None and given is not None and self.call.plan is not None
        factors, one_or_nan = expected.factors(given), expected.one_or_nan
        if buffer is not None and grads.weight is not None:
            # the caller promised it: where it is another, what the forward pass has added to the buffer is wrong
            one_or_nan = expected.one_or_nan_for(given)
            factors = *factors[:1], one_or_nan
        return grads.finish(self.call.backend, factors, one_or_nan, self.call.plan.sizes)


def forward_of(call: LocalCall, *operands: Any) -> Forward:
    """The forward pass of a call on hidden states [tokens, hidden], weight and bias, or on logits."""
    stats, grads = call.forward(*operands)
    objective, named, count = call.objective, stats.named(), len(operands)
    # statistics that are outputs are saved by autograd: as attributes they would keep their own graph alive
    attributes, saved_stats = (named, {}) if isinstance(objective, ScalarObjective) else ({}, named)
    names, saved = tuple(saved_stats), [*saved_stats.values()]
    outputs, lasting = objective.outputs(stats), call
    if objective.teacher is not None:
        # autograd saves a teacher's tensors too, and frees them after backward
        saved += objective.teacher.tensors
        lasting = call.with_teacher([tensor.new_empty(0) for tensor in objective.teacher.tensors])

    def later(saved: Sequence[Tensor]) -> tuple[LocalCall, RowStats]:
        vectors = saved[count:]
        found = RowStats.of({**attributes, **dict(zip(names, vectors, strict=False))})
        return lasting.with_teacher(vectors[len(names) :]), found

    differentiable, exchanges = objective.differentiable, objective.exchanges
    return Forward(outputs, differentiable, stats, grads, exchanges, lasting, saved, later, call.inplace)


class Loss(torch.autograd.Function):
    """Outputs of ``run(*operands)``, a ``Forward`` that ``found`` receives. Operands: hidden states [tokens, hidden],
    weight [vocab, hidden] and bias [vocab] or None; logits; or a weight, a bias and several streams of hidden states.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], found: list[Any], *operands: Tensor | None) -> tuple[Tensor, ...]:
        first = operands[0]
        assert first is not None
        with kernel_context(first.device):
            made = run(*operands)
        found.append(made)
        ctx.operands, outputs = len(operands), made.outputs
        if made.any_grad:
            # inputs are saved for a recomputing or a repeated backward: autograd checks that they have not changed
            ctx.save_for_backward(*operands, *made.saved)
            # gradients are attributes: saved tensors would be cloned on their way out
            ctx.made, ctx.grads = made._replace(outputs=(), stats=None, grads=None, saved=()), made.grads
            ctx.overwritten = False
        ctx.mark_non_differentiable(*outputs[made.differentiable :])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Grads:
        upstream = tuple([given if given is None else given.resolve_neg() for given in upstream])
        there = [given for given in upstream if given is not None]
        if not there:
            return (None,) * (2 + ctx.operands)
        if ctx.overwritten:
            raise RuntimeError(
                "a second backward through a loss with inplace=True: the first has written the gradient over the "
                "logits; use inplace=False to retain the graph"
            )
        made, grads, ctx.grads, graph = ctx.made, ctx.grads, None, torch.is_grad_enabled()
        # once: an activation checkpoint gives them no second time
        saved: Sequence[Tensor] = ctx.saved_tensors if grads is None or made.reads_saved or graph else ()
        with torch.no_grad(), kernel_context(there[0].device):
            ctx.overwritten = made.inplace
            found = made.gradients(grads, saved, upstream)
            if made.inplace:
                # kernels write unseen: a node that saved the logits must not take these for them
                torch.autograd.graph.increment_version(saved[0])
        if graph:
            # a graph of gradients is made (create_graph), in which constants would silently drop a gradient penalty
            inputs = [each for each in saved[: ctx.operands] if each is not None and each.requires_grad]
            found = tuple([None if grad is None else OnlyOnce.apply(grad, *inputs) for grad in found])
        return None, None, *found


NOTHING = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context for kernels, which are launched on the current GPU: the tensors' own is the current one."""
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
    """A gradient whose own derivative in the call's inputs is not computed: asking for it raises."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *inputs: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError("chunked_head computes no second derivatives; use the full logits for a gradient penalty")
