"""The autograd.Function of several streams: the weight's gradient is one buffer that all of them add to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backends.gradients import Gradients
from ...program.gradient_buffer import StreamsBuffer
from ..autograd import Forward, as_called, forward_of, handed_over, only_once, with_recompute_plan
from ..loop import Call, recompute
from .teacher import SharedTeacher, sweep_together


class StreamCalls(NamedTuple):
    """What runs: a call for each stream, and of which dtype their common gradient of the weight is."""

    calls: Sequence[Call]
    vocab: int  # rows of the weight that stand for an id
    buffer_dtype: torch.dtype | None  # None: the caller's buffer is added to, or the weight takes no gradient
    shared: SharedTeacher | None

    def buffer(self, weight: Tensor) -> StreamsBuffer | None:
        return None if self.buffer_dtype is None else StreamsBuffer(weight, self.vocab, self.buffer_dtype)


class StreamsLoss(torch.autograd.Function):
    """Of a weight, a bias or None and each stream's hidden states [tokens, hidden]: the sum of the streams' losses;
    ``found`` receives what each stream's forward pass has made."""

    @staticmethod
    def forward(
        ctx: Any, streams: StreamCalls, found: list[Forward], weight: Tensor, bias: Tensor | None, *hidden: Tensor
    ) -> Tensor:
        buffer, calls = None, list(streams.calls)
        with as_called(weight.device):
            for i, call in enumerate(calls):
                if streams.buffer_dtype is not None and call.plan.schedule == "forward":
                    buffer = buffer or streams.buffer(weight)
                    calls[i] = replace(call, gradient_buffer=buffer)
            shared = streams.shared
            swept = {} if shared is None else sweep_together(shared, calls, hidden, weight, bias)
            for i, (call, rows) in enumerate(zip(calls, hidden, strict=True)):
                found.append(forward_of(call, rows, weight, bias, swept.get(i)))
                if buffer is not None and call.plan.schedule == "forward":
                    buffer.added.append(call.plan.sizes.tokens > 0)
        made = tuple(found)
        if any(one.plan.sizes.any_grad for one in made):
            ctx.save_for_backward(weight, bias, *hidden, *(tensor for one in made for tensor in one.saved))
            ctx.counts = [len(one.saved) for one in made]
            ctx.streams, ctx.buffer, ctx.made = streams, buffer, [one.bare() for one in made]
            ctx.grads = [one.grads for one in made]
        ctx.set_materialize_grads(False)
        total = made[0].outputs[0]
        for one in made[1:]:
            total = total + one.outputs[0]
        return total

    @staticmethod
    def backward(ctx: Any, given: Tensor | None) -> tuple[Tensor | None, ...]:
        if given is None:
            return None, None, None, None, *[None] * len(ctx.made)
        made, grads, buffer = ctx.made, ctx.grads, ctx.buffer
        ctx.grads, ctx.buffer = [None] * len(made), None
        for one in made:
            if one.gradient_buffer is not None:
                one.gradient_buffer.check_there()
        late = [i for i, one in enumerate(made) if grads[i] is None and one.plan.sizes.any_grad]
        # once: an activation checkpoint gives them no second time. Where ranks exchange, as ``HeadLoss`` does
        saved: Sequence[Tensor] = ctx.saved_tensors if late or any(one.exchanges for one in made) else ()
        of_hidden: list[Tensor | None] = [None] * len(made)
        of_bias: list[Tensor] = []
        of_weight: Tensor | None = None
        with torch.no_grad(), as_called(given.device):
            for i, one in enumerate(made):
                if grads[i] is not None:
                    of_hidden[i], marker, bias = handed_over(without_weight(one, grads[i]), grads[i], given)
                    of_weight = marker if marker is not None else of_weight
                    of_bias += [] if bias is None else [bias]
            ctx.made = [one._replace(canary=None) for one in made]
            if buffer is not None and late:
                expected = next(one.expected for i, one in enumerate(made) if i not in late)
                made[0].backend.scale_([buffer.buffer], expected._replace(gain=None).factors(given))
            for i in late:
                buffer = buffer or ctx.streams.buffer(saved[0])
                of_hidden[i], marker, bias = made_late(ctx, saved, i, buffer, given)
                of_weight = marker if marker is not None else of_weight
                of_bias += [] if bias is None else [bias]
            if buffer is not None:
                of_weight = finished(buffer, made, given, scaled=bool(late))
        return None, None, *only_once(ctx, (of_weight, added(of_bias), *of_hidden))


def added(parts: Sequence[Tensor]) -> Tensor | None:
    """The streams' gradients of the bias, rounded once more."""
    if len(parts) < 2:
        return parts[0] if parts else None
    dtype = parts[0].dtype
    return torch.stack(list(parts)).sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)


def without_weight(made: Forward, grads: Gradients) -> Forward:
    """A stream's own part: the common buffer is finished once, for all of them."""
    if isinstance(made.gradient_buffer, StreamsBuffer):
        grads.weight = None
        grads.padded.pop("weight", None)
    return made


def made_late(
    ctx: Any, saved: Sequence[Tensor], i: int, buffer: StreamsBuffer | None, given: Tensor
) -> tuple[Tensor | None, ...]:
    """A stream's gradients once the upstream gradient is known: its own logits are computed again."""
    made, (weight, bias, *others) = ctx.made[i], saved
    count, first = len(ctx.made), sum(ctx.counts[:i])
    hidden, own = others[i], others[count + first : count + first + ctx.counts[i]]
    call, stats = made.later([hidden, weight, bias, *own])
    if buffer is not None:
        # blocks of tokens add to it, and there may be many of them
        sizes = replace(call.plan.sizes, buffer_dtype=buffer.buffer.dtype)
        call = replace(call, gradient_buffer=buffer, plan=replace(call.plan, sizes=sizes))
    coefficients, gain = call.objective.late(stats, (given,))
    call = with_recompute_plan(call)
    found = recompute(call, hidden, call.head(weight, bias), stats, coefficients, gain)
    if buffer is not None:
        buffer.added.append(call.plan.sizes.tokens > 0)
    return found


def finished(buffer: StreamsBuffer, made: Sequence[Forward], given: Tensor, scaled: bool) -> Tensor:
    """The weight's gradient in its own dtype; nan where an id of any stream was out of range."""
    if buffer.fresh:
        buffer.buffer.zero_()
    expected = made[0].expected
    assert expected is not None
    one_or_nan = expected.one_or_nan
    for one in made[1:]:
        assert one.expected is not None
        one_or_nan = one_or_nan * one.expected.one_or_nan
    factors = (one_or_nan,) if scaled else (*expected._replace(gain=None).factors(given)[:1], one_or_nan)
    dtype, backend, sums = buffer.weight.dtype, made[0].backend, buffer.taken()
    if sums.dtype == dtype:
        backend.scale_([sums], factors)
        return sums
    return backend.scale(sums, factors, dtype)
